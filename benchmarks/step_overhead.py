"""Measure the overhead of a training step: compile time by depth, and Python that blocks before it runs.

python -m benchmarks.step_overhead [--save]
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

DEPTHS = (4, 32)

_ROUNDS = number_flag("rounds", 3, Count, "Compilations of each depth, interleaved.")
_CALLS = number_flag("calls", 50, Annotated[int, Bound(least=5, most=2**31 - 1)], "Steps whose dispatch is timed.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/step_overhead.jsonl.")


def setting(layers: int) -> tuple[Any, ...]:
    """(model, config, params, optimizer state, batch) of a small model with that many layers."""
    import jax
    import jax.numpy as jnp

    from astra_jax.models.qwen3.presets import PRESETS
    from astra_jax.run.batch import PackedBatch
    from astra_jax.run.optimizers import initial_state
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig
    from astra_jax.sft.step import sft_optimizer

    model = dataclasses.replace(PRESETS["tiny"], n_layers=layers)
    config = SFTConfig(data=DataConfig(seq_len=64), batch_size=1, remat="full")
    ones = jnp.ones((1, 1, 64), jnp.int32)
    batch = PackedBatch(ones, ones, ones, jnp.arange(64, dtype=jnp.int32)[None, None])
    params, opt_state = initial_state(model.init(jax.random.key(0)), sft_optimizer(config, 1000))
    return model, config, params, opt_state, batch


def compile_seconds(layers: int) -> float:
    """Tracing, lowering and compiling the step, from nothing."""
    import jax

    from astra_jax.sft.step import train_step

    model, config, params, opt_state, batch = setting(layers)
    jax.clear_caches()
    started = time.perf_counter()
    train_step.lower(params, opt_state, batch, model=model, config=config, steps=1000).compile()
    return time.perf_counter() - started


def blocking_seconds(layers: int, calls: int) -> list[float]:
    """From the call of a compiled step to its return, with the device idle: Python and dispatch."""
    import jax

    from astra_jax.sft.step import train_step

    model, config, params, opt_state, batch = setting(layers)
    seconds = []
    with jax.default_device(jax.devices("cpu")[0]):
        for _ in range(calls + 3):
            started = time.perf_counter()
            params, opt_state, metrics = train_step(params, opt_state, batch, model=model, config=config, steps=1000)
            seconds.append(time.perf_counter() - started)
            jax.block_until_ready((params, opt_state, metrics))
    return seconds[3:]


def main() -> None:
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", True)
    compiled: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(_ROUNDS.value):
        for depth in DEPTHS:
            compiled[depth].append(compile_seconds(depth))
    medians = {depth: statistics.median(values) for depth, values in compiled.items()}
    row = {
        "compile_seconds": {f"{depth} layers": round(value, 2) for depth, value in medians.items()},
        "compile_ratio": round(medians[DEPTHS[1]] / medians[DEPTHS[0]], 3),
        "blocking_ms_32_layers": round(1e3 * statistics.median(blocking_seconds(32, _CALLS.value)), 3),
    }
    rows.report("step_overhead", row, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
