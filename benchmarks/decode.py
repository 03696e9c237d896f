"""Compare tokens per second of the embedded engine, transformers' `generate` and vLLM, on one CPU with random weights.

Each side is a process with the same shapes, prompts, lengths, threads and dtype, sampling at temperature 1. They take
turns, and the waiting ones are stopped, so that a noisy machine affects all. Prompts are new each time. vLLM takes part
if its environment exists (`launch/vllm_cpu.sh .venv-vllm`). Prints a row for each model and batch.

    python -m benchmarks.decode --case=1m,30m --batches=1,16,64 --save
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from absl import flags

from astra_jax.base.settings import Count
from astra_jax.cpu.environment import cpu_environment
from benchmarks import rows
from benchmarks.shapes import SHAPES, SMOLLM2, dtype_of, is_llama
from benchmarks.sides import Side
from launch.flags import cli
from launch.flags.numbers import number_flag, numbers_of

SIDES = ("engine", "transformers", "vllm")
PROMPT_TOKENS, NEW_TOKENS = 128, 128
VLLM_PYTHON = rows.ROOT / ".venv-vllm" / "vllm" / "bin" / "python"

CASES = {**SHAPES, "135m": SMOLLM2}

_CASES = flags.DEFINE_list("case", ["1m", "30m"], f"Of {', '.join(CASES)}.")
_BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "Requests at once.")
_SIDES = flags.DEFINE_list("sides", list(SIDES), f"Of {', '.join(SIDES)}.")
_ROUNDS = number_flag("rounds", 5, Count, "Turns of each side with each batch.")
_THREADS = number_flag("threads", os.cpu_count(), Count, "Threads of each side.")
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to benchmarks/results/decode.jsonl.")


def start(name: str, case: str, batches: list[int], threads: int) -> Side:
    work = {
        "shape": vars(CASES[case]),
        "batches": batches,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "threads": threads,
    }
    # OpenMP's threads wait for each other busily by default: on two shared cores transformers gets 100 tokens a second
    # with that, 1,350 without.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if name == "engine":
        environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | environment, large=is_llama(work["shape"]))
    if name == "vllm":
        environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    python = str(VLLM_PYTHON) if name == "vllm" else sys.executable
    return Side([python, "-m", "benchmarks.decode_side", name, json.dumps(work)], environment, pauses=True)


def compare(case: str, names: list[str], batches: list[int], threads: int, rounds: int) -> list[dict]:
    """A row for each batch: medians of tokens a second, and the engine's over the others'."""
    sides: dict[str, Side] = {}
    speeds: dict[tuple[str, int], list[float]] = {}
    try:
        for name in names:
            sides[name] = start(name, case, batches, threads)
        for _ in range(rounds):
            for batch in batches:
                for name, side in sides.items():
                    seconds = side.ask(f"generate {batch}")["seconds"]
                    speeds.setdefault((name, batch), []).append(batch * NEW_TOKENS / seconds)
    finally:
        for side in sides.values():
            side.kill()
    found = []
    for batch in batches:
        medians = {name: statistics.median(speeds[name, batch]) for name in names}
        ours = medians.get("engine", float("nan"))
        found.append(
            {
                "case": case,
                "shapes": vars(CASES[case]),
                "dtype": dtype_of(vars(CASES[case])),
                "threads": threads,
                "batch": batch,
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": NEW_TOKENS,
                "rounds": rounds,
                "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
                "slowest_and_fastest": {n: [round(f(speeds[n, batch]), 1) for f in (min, max)] for n in names},
                "speed_ratio": {n: round(ours / value, 3) for n, value in medians.items() if n != "engine"},
            }
        )
    return found


def main() -> None:
    for flag, known in ((_CASES, CASES), (_SIDES, SIDES)):
        for name in flag.value:
            if name not in known:
                raise cli.UsageError(f"--{flag.name}={name}: use some of {', '.join(known)}")
    names = [name for name in _SIDES.value if name != "vllm" or VLLM_PYTHON.exists()]
    for case in _CASES.value:
        for row in compare(case, names, numbers_of(_BATCHES, Count), _THREADS.value, _ROUNDS.value):
            rows.report("decode", row, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
