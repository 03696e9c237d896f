r"""Run real clients of OpenAI's API against `astra serve`, unchanged, and print what works as a Markdown table.

    uv venv clients
    uv pip install --python clients/bin/python openai openai-agents litellm langchain-openai inspect-ai instructor \
        "pydantic-ai-slim[openai]" "lm-eval[api]" transformers
    uv pip install --python clients/bin/python --upgrade openai
    python -m benchmarks.serving_clients --clients=clients

The second line is there since instructor allows no version of openai's `jiter` that inspect-ai's `openai` takes.
Without `--weights` a tiny model with random weights is served: its texts mean nothing, but calls and answers of a given
form are valid, so every exchange of a client happens. A check that fails prints its error, and the exit status is 1.
The clients need no network. `serving_clients_side.py` has the checks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.tokenizer import ChatTokenizer
from benchmarks.serving_clients_side import CHECKS, CLIENTS
from benchmarks.texts import words
from launch.flags import cli
from synthesis.core.chat_template import template_of
from synthesis.core.chatml import QWEN3_INSTRUCT

_CLIENTS = flags.DEFINE_string("clients", None, "Folder of the environment with the clients' packages.", required=True)
_ONLY = flags.DEFINE_list("only", list(CLIENTS), "Clients to run.")
_WEIGHTS = flags.DEFINE_string("weights", None, "Hugging Face folder to serve; by default a tiny random model.")
_LENGTH = 4_096
_SECONDS = 1_200
"""Time limit of one client; most of it is the first compilation of each of the server's programs."""


def random_model(folder: Path) -> None:
    """Write a tiny model with random weights and a tokenizer."""
    text = " ".join(words())
    tokenizer = ChatTokenizer.train([text, *json.dumps({"type": "object", "properties": {}}).split()], 2_000, folder)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=128,
        tie_embeddings=True,
        max_positions=_LENGTH,
    )
    # Random weights would never close a thought.
    (template,) = folder.glob("*.jinja")
    template.write_text(template_of(QWEN3_INSTRUCT))
    save_hf(config.init(jax.random.key(0)), config, folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder's model."""
    command = [sys.executable, "-m", "launch.serve", f"--weights={folder}", "--served_model_name=tiny", "--port=0"]
    command += [f"--max_length={_LENGTH}", "--slots=4", "--warm_up=none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.split(" on ")[1].split(",")[0]
        finally:
            process.terminate()


def checked(python: Path, client: str, url: str, folder: Path) -> dict[str, Any]:
    """The versions and checks that `serving_clients_side` prints for a client."""
    side = Path(__file__).with_name("serving_clients_side.py")
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    with tempfile.TemporaryDirectory() as work:
        command = [python, side, client, url, folder]
        ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"version": "?", "checks": {name: f"failed: {ended.stderr[-500:]}" for name in CHECKS}}


def main() -> int:
    python = Path(_CLIENTS.value).absolute() / "bin" / "python"
    rows, failures = [], []
    with contextlib.ExitStack() as stack:
        folder = Path(_WEIGHTS.value or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        if not _WEIGHTS.value:
            random_model(folder)
        url = stack.enter_context(served(folder))
        for client in _ONLY.value:
            found = checked(python, client, url, folder)
            print(client, found, file=sys.stderr, flush=True)
            results = found["checks"]
            failures += [f"{client}, {name}: {result}" for name, result in results.items() if result != "yes"]
            cells = ["yes" if results.get(name) == "yes" else "no" if name in results else "" for name in CHECKS]
            rows.append(f"| `{client}` {found['version']} | {' | '.join(cells)} |")
    print(f"| client | {' | '.join(CHECKS)} |\n| --- |{' --- |' * len(CHECKS)}", *rows, sep="\n")
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    cli.with_cpu_environment("benchmarks.serving_clients")
    cli.run(main)
