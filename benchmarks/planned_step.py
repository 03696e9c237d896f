"""Compare the planner's prediction with measured steps on this CPU, for four sizes.

python -m benchmarks.planned_step [--save]

The compiled step is analyzed as for absent chips (trips of loops, arithmetic and traffic). The rates of matmuls and of
memory are measured in the same turns. All times are processor seconds, on which other users of the machine have little
effect.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from absl import flags

from astra_jax.base.settings import Count
from benchmarks import rows
from benchmarks.shapes import SHAPES, Shape
from launch.flags import cli
from launch.flags.numbers import number_flag

CASES = {
    "1m": (SHAPES["1m"], 8),
    "3m": (Shape(4_096, 256, 4, 4, 2, 64, 768), 8),
    "11m": (Shape(8_192, 384, 4, 6, 3, 64, 1_152), 4),
    "30m": (SHAPES["30m"], 4),
}
"""By name: the model, and rows of `TOKENS` tokens."""
TOKENS = 256
MATMUL, NUMBERS = 1_024, 16 << 20

_ROUNDS = number_flag("rounds", 5, Count, "Turns of each size.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the kept ones.")


def built(shape: Shape, batch: int) -> tuple[Callable[[], float], Any]:
    """(a step, its program as the planner reads it)."""
    import jax
    import numpy as np

    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.planner.hlo import read_hlo
    from astra_jax.run.batch import PackedBatch, to_device
    from astra_jax.run.optimizers import initial_state
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig
    from astra_jax.sft.step import sft_optimizer, train_step

    model = Qwen3Config(**asdict(shape), tie_embeddings=True)
    config = SFTConfig(data=DataConfig(seq_len=TOKENS), batch_size=batch)
    state = list(initial_state(model.init(jax.random.key(0)), sft_optimizer(config, 1_000)))
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, (batch, TOKENS)).astype(np.int32)
    ones = np.ones_like(ids)
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), ids.shape)
    on_device = to_device(PackedBatch(ids, ones, ones, places), None, micro_batches=1)
    compiled = train_step.lower(*state, on_device, model=model, config=config, steps=1_000).compile()

    def step() -> float:
        state[0], state[1], metrics = compiled(*state, on_device)
        return float(metrics["loss"])

    return step, read_hlo(compiled.as_text())


def seconds_of(work: Callable[[], Any], times: int) -> float:
    """Processor seconds, the median of several."""
    spent = []
    for _ in range(times):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return statistics.median(spent)


def main() -> None:
    import jax
    import jax.numpy as jnp

    from astra_jax.planner.roofline import Rates, roofline

    square = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL))
    product, sweep = jax.jit(jnp.matmul), jax.jit(lambda a, b: a * 2 + b)
    numbers = jnp.ones((NUMBERS,))
    cases = {name: built(*case) for name, case in CASES.items()}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    rates = []
    for _ in range(_ROUNDS.value + 1):  # the first warms up
        for name, (step, module) in cases.items():
            flops = 2 * MATMUL**3 / seconds_of(lambda: product(square, square).block_until_ready(), 5)
            moved = 3 * 4 * NUMBERS / seconds_of(lambda: sweep(numbers, numbers).block_until_ready(), 5)
            rates.append(Rates(flops, moved))
            turns[name].append((sum(roofline(module, rates[-1]).values()), seconds_of(step, 3)))
    figures = {
        name: {
            "predicted_seconds": round(statistics.median(p for p, _ in of[1:]), 4),
            "measured_seconds": round(statistics.median(m for _, m in of[1:]), 4),
            "ratio": round(statistics.median(p / m for p, m in of[1:]), 3),
        }
        for name, of in turns.items()
    }
    matmul = statistics.median(one.flops for one in rates) / 1e9
    memory = statistics.median(one.bandwidth for one in rates) / 1e9
    machine = {"matmul_gflops": round(matmul, 1), "memory_gb_a_second": round(memory, 2)}
    rows.report("planned_step", {"sizes": figures, **machine}, save=_SAVE.value)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    cli.with_cpu_environment("benchmarks.planned_step")
    cli.run(main)
