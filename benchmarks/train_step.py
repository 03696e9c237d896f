"""A whole SFT training step against Hugging Face transformers on PyTorch, eager and compiled, as ratios.

Each side is a process of its own with the same shapes, dtype, threads and malloc settings; they take turns, a few steps
at a time, so that a noisy machine is noisy for all. Prints a row for each case; `--save` appends them to the results.

    python -m benchmarks.train_step --case=1m,30m,vocabulary
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass

from absl import app, flags

from benchmarks import rows
from launch.cli import cpu_environment

SIDES = ("jax", "torch_eager", "torch_compile")


@dataclass(frozen=True)
class Case:
    """Shapes of one comparison; parameters and activations are float32, the embedding is tied."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rows: int
    tokens: int


CASES = {
    "1m": Case(1_024, 192, 2, 3, 3, 64, 512, 8, 256),
    "30m": Case(8_192, 512, 8, 8, 4, 64, 1_536, 4, 512),
    "vocabulary": Case(151_936, 256, 4, 4, 2, 64, 768, 4, 512),
}

_CASES = flags.DEFINE_list("case", list(CASES), f"Of {', '.join(CASES)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each side.", lower_bound=3)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps of a turn.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "Threads of each side.")
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to benchmarks/results/train_step.jsonl.")


class Side:
    """One process that trains when told to."""

    def __init__(self, name: str, case: Case, threads: int) -> None:
        environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | os.environ) | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.train_step_side", name, json.dumps(asdict(case)), str(threads)]
        self.process = subprocess.Popen(
            command, cwd=rows.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []
        self.first = self.ask("ready")["seconds"]

    def ask(self, word: str) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self.process.wait()}; see its output above")
        return json.loads(line)


def compare(case: Case, threads: int, rounds: int, steps: int) -> dict:
    """Medians of seconds a step, peak memory, and what JAX gains over the better PyTorch."""
    sides = {name: Side(name, case, threads) for name in SIDES}
    try:
        for _ in range(rounds):
            for side in sides.values():
                side.seconds += side.ask(f"train {steps}")["seconds"]
        ends = {name: side.ask("end") for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.process.kill()
    medians = {name: statistics.median(side.seconds) for name, side in sides.items()}
    peaks = {name: end["peak_rss_bytes"] for name, end in ends.items()}
    best = min(medians["torch_eager"], medians["torch_compile"])
    least = min(peaks["torch_eager"], peaks["torch_compile"])
    return {
        "shapes": asdict(case),
        "parameters": ends["jax"]["parameters"],
        "dtype": "float32",
        "threads": threads,
        "seconds_per_step": {name: round(value, 4) for name, value in medians.items()},
        "first_step_seconds": {name: round(side.first, 1) for name, side in sides.items()},
        "peak_rss_gib": {name: round(value / 2**30, 2) for name, value in peaks.items()},
        "losses": {name: round(end["loss"], 4) for name, end in ends.items()},
        "speed_ratio": round(best / medians["jax"], 3),
        "memory_ratio": round(peaks["jax"] / least, 3),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    for name in _CASES.value:
        if name not in CASES:
            raise app.UsageError(f"--case={name}: use one of {', '.join(CASES)}")
        row = {"case": name, **compare(CASES[name], _THREADS.value, _ROUNDS.value, _STEPS.value)}
        rows.report("train_step", row, save=_SAVE.value)


if __name__ == "__main__":
    app.run(main)
