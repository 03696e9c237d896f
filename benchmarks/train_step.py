"""Compare a whole SFT training step with Hugging Face transformers on PyTorch, eager and compiled, as ratios.

Each side is a separate process with the same shapes, dtype, threads and malloc settings. They take turns of a second or
more, so that a noisy machine affects all. Prints a row for each case; `--save` appends them to the results.

    python -m benchmarks.train_step --case=1m,30m,vocabulary
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from absl import flags

from astra_jax.base.settings import Bound, Count
from astra_jax.cpu.environment import cpu_environment
from benchmarks import rows
from benchmarks.shapes import SHAPES, SMOLLM2, Shape, dtype_of, is_llama
from benchmarks.sides import Side, train_in_turns
from launch.flags import cli
from launch.flags.numbers import number_flag

SIDES = ("jax", "torch_eager", "torch_compile")


@dataclass(frozen=True)
class Case(Shape):
    """One comparison: a model, the rows of a step, and the steps of a turn.

    Attributes:
        rows, tokens: of a step.
        steps: of a turn. Of short ones many: the first after a pause takes up to three times as long.
        micro_batches: of a step of ours, each side as it is fastest: PyTorch takes the rows at once (with
            two micro-batches the 1m case took it 1 to 12 % longer).
        remat: what our backward pass recomputes, as its profile has it.
        torch_narrow: of a case in bfloat16: whether PyTorch casts to it in each product, and keeps weights and
            statistics in float32 as we do; has all in it; or nothing, as is fastest where the processor has no
            instruction for such products.
    """

    rows: int
    tokens: int
    steps: int
    micro_batches: int = 1
    remat: str = "none"
    torch_narrow: Literal["autocast", "weights", "nothing"] = "autocast"


CASES = {
    "1m": Case(**vars(SHAPES["1m"]), rows=8, tokens=256, steps=20, micro_batches=2),
    "30m": Case(**vars(SHAPES["30m"]), rows=4, tokens=512, steps=3),
    "vocabulary": Case(**vars(SHAPES["vocabulary"]), rows=4, tokens=512, steps=3),
    "135m": Case(**vars(SMOLLM2), rows=2, tokens=1_024, steps=3, micro_batches=2, remat="heads"),
}

_CASES = flags.DEFINE_list("case", ["1m", "30m", "vocabulary"], f"Of {', '.join(CASES)}.")
_ROUNDS = number_flag("rounds", 7, Annotated[int, Bound(least=3, most=2**31 - 1)], "Turns of each side.")
_THREADS = number_flag("threads", os.cpu_count(), Count, "Threads of each side.")
_NARROW = flags.DEFINE_enum(
    "torch_narrow",
    "autocast",
    ["autocast", "weights", "nothing"],
    "PyTorch's side of a case in bfloat16: what of it is, products, weights and statistics too, or nothing. Report the "
    "fastest.",
)
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to benchmarks/results/train_step.jsonl.")


def start(name: str, case: Case, threads: int) -> Side:
    large = is_llama(asdict(case))
    environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | os.environ, large=large)
    environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "benchmarks.train_step_side", name, json.dumps(asdict(case)), str(threads)]
    return Side(command, environment)


def compare(case: Case, threads: int, rounds: int) -> dict:
    """Medians of seconds a step, peak memory, and what JAX gains over the better PyTorch.

    `matmul_gflops`, of the same turns, says what part of that is the libraries': a step is mostly matmuls, and on some
    processors one library is twice as fast as the other, on some they are alike.
    """
    got = train_in_turns(SIDES, lambda name: start(name, case, threads), rounds, case.steps)
    best = min(got.seconds["torch_eager"], got.seconds["torch_compile"])
    least = min(got.peak_bytes["torch_eager"], got.peak_bytes["torch_compile"])
    return {
        "shapes": asdict(case),
        "parameters": got.parameters,
        "dtype": dtype_of(asdict(case)),
        "threads": threads,
        **got.rounded(),
        "speed_ratio": round(best / got.seconds["jax"], 3),
        "memory_ratio": round(got.peak_bytes["jax"] / least, 3),
    }


def main() -> None:
    for name in _CASES.value:
        if name not in CASES:
            raise cli.UsageError(f"--case={name}: use one of {', '.join(CASES)}")
        case = replace(CASES[name], torch_narrow=_NARROW.value)
        row = {"case": name, **compare(case, _THREADS.value, _ROUNDS.value)}
        rows.report("train_step", row, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
