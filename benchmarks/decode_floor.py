"""The engine's decoding beside what memory allows: each step reads all weights, and each row's keys and values.

    python -m benchmarks.decode_floor --model=4b --batches=1,64 [--save]

For accelerators; one device, random bfloat16 weights, all rows of one length. The floor of a step is the bytes that it
must read over the device's bandwidth (`astra_jax.run.chips`; of others by `--bandwidth`). `share` is the floor over the
step's seconds, the median of the rounds. Prefill is not in it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count
from benchmarks import rows
from launch.flags.cli import UsageError, run
from launch.flags.numbers import number_flag, numbers_of

if TYPE_CHECKING:
    from astra_jax.models.decoder import Decoder
    from astra_jax.rollout.engine.engine import Engine

_MODEL = flags.DEFINE_string("model", "4b", "Name of a dense preset.")
_BATCHES = flags.DEFINE_list("batches", ["1", "64"], "Requests at once.")
_PROMPT = number_flag("prompt_tokens", 1024, Annotated[int, Bound(least=2, most=2**31 - 1)], "Of each request.")
_NEW = number_flag("new_tokens", 256, Count, "Of each request.")
_ROUNDS = number_flag("rounds", 3, Count, "Of each batch, after one that compiles.")
_BANDWIDTH = number_flag(
    "bandwidth", None, Annotated[float, Bound(least=1, most=1e18)], "Bytes a second, where the device's is not known."
)
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to benchmarks/results/decode_floor.jsonl.")


async def measure(engine: Engine, vocabulary: int, batch: int) -> float:
    """Seconds of a decoding step, from the engine's own counters."""
    import numpy as np

    from astra_jax.rollout.sampler import Sampling

    seconds = []
    for turn in range(1 + _ROUNDS.value):
        prompts = np.random.default_rng(turn).integers(0, vocabulary, (batch, _PROMPT.value)).tolist()
        before = engine.stats.snapshot()
        samplings = [Sampling(max_tokens=_NEW.value, stop_ids=(), seed=turn * batch + i) for i in range(batch)]
        await asyncio.gather(*(engine.generate(*one) for one in zip(prompts, samplings, strict=True)))
        spent = engine.stats.since(before)
        seconds.append(spent.decode_seconds * batch / spent.decoded_tokens)
    return statistics.median(seconds[1:])


async def compare(model: Decoder, batches: list[int], bandwidth: float) -> list[dict[str, Any]]:
    """A row for each batch."""
    import jax

    from astra_jax.models.flops import decoding_bytes
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig

    params = jax.jit(model.init)(jax.random.key(0))
    found = []
    for batch in batches:
        shapes = EngineConfig(slots=batch, max_length=_PROMPT.value + _NEW.value)
        async with Engine(params, model, shapes) as engine:
            seconds = await measure(engine, model.vocab_size, batch)
        floor = decoding_bytes(model, batch, _PROMPT.value + _NEW.value / 2) / bandwidth
        found.append(
            {
                "device": jax.devices()[0].device_kind,
                "model": _MODEL.value,
                "dtype": model.dtype,
                "batch": batch,
                "prompt_tokens": _PROMPT.value,
                "new_tokens": _NEW.value,
                "tokens_per_second": round(batch / seconds, 1),
                "step_ms": round(1e3 * seconds, 3),
                "floor_ms": round(1e3 * floor, 3),
                "share": round(floor / seconds, 3),
            }
        )
    return found


def main() -> None:
    import jax

    from astra_jax.run.chips import chip_of
    from configs.training import MODELS

    dense = [name for name, preset in MODELS.items() if not preset.n_experts]
    if _MODEL.value not in dense:
        raise UsageError(f"--model is {_MODEL.value!r}; use one of {', '.join(dense)}")
    batches = numbers_of(_BATCHES, Count)
    kind = jax.devices()[0].device_kind
    bandwidth = _BANDWIDTH.value
    if bandwidth is None:
        if (chip := chip_of(kind)) is None:
            raise UsageError(f"the memory bandwidth of {kind!r} is not known; give --bandwidth, in bytes a second")
        bandwidth = chip.hbm_bandwidth
    model = dataclasses.replace(MODELS[_MODEL.value], dtype="bfloat16", param_dtype="bfloat16")
    for row in asyncio.run(compare(model, batches, bandwidth)):
        rows.report("decode_floor", row, save=_SAVE.value)


if __name__ == "__main__":
    run(main)
