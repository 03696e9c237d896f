"""Serve a model through OpenAI's API, on the embedded engine.

    python -m launch.serve --weights=DIR --port=8000
    python -m launch.serve --weights=RUN/checkpoints --tokenizer=DIR --host=0.0.0.0 --key_file=FILE --mesh=tensor=4

Endpoints: /v1/completions, /v1/chat/completions and /v1/responses (tools, streaming, structured output), /v1/models,
/health and /metrics; see docs/serving.md. /health answers 503 until the programs of --warm_up are compiled. On SIGTERM
and Ctrl-C it accepts no more requests and running requests finish; the exit code is 0, or 3 if some were cut off.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags, logging

from astra_jax.base.settings import Bound, Slots
from astra_jax.base.terminal import say
from launch.flags import cli, policies, services, shared
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for them
    import asyncio

    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.serving.service import OpenAIService

_NAME = flags.DEFINE_string(
    "served_model_name", None, "Name of the model for clients; by default the name of its folder."
)
_PORT = shared.port(8000)
_SLOTS = number_flag("slots", 16, Slots, "Sequences that decode at the same time: completions.")
_LENGTH = number_flag(
    "max_length",
    None,
    Annotated[int, Bound(least=2, most=2**24)],
    "Maximum tokens of prompt and completion together; by default the model's max_positions, but at most 32,768.",
)
_WEIGHT_QUANTIZATION = flags.DEFINE_enum(
    "weight_quantization",
    "none",
    ["none", "int8"],
    "Number format of the layers' matrices: as stored, or int8, with which a token reads half as many bytes.",
)
_WARM_UP = flags.DEFINE_enum(
    "warm_up",
    "usual",
    ["none", "usual", "all"],
    "Programs to compile before requests are accepted: none, those for sampling with temperature and top_p (usual), or "
    "those for other options and structured output too (all). The rest is compiled when a request first needs it.",
)
_WAITING = services.max_waiting()


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from astra_jax.rollout.engine.cache_memory import check_cache_fits
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from astra_jax.serving.service import OpenAIService, ServingConfig

    name = _NAME.value or policies.source().name
    serving = services.reached(
        ServingConfig,
        model=name,
        port=_PORT.value,
        max_waiting=_WAITING.value,
    )
    model, tokenizer = policies.read()
    length = _LENGTH.value or min(model.max_positions, 32_768)
    model.check_length(length, "--max_length")
    services.check_address(_PORT.value)
    check_cache_fits(model, _SLOTS.value, length, policies.mesh(), _WEIGHT_QUANTIZATION.value)
    params = policies.load(model)
    stopping = services.stop_signal()
    async with Engine(
        params,
        model,
        EngineConfig(slots=_SLOTS.value, max_length=length, weight_quantization=_WEIGHT_QUANTIZATION.value),
    ) as engine:
        service = OpenAIService(engine, tokenizer, serving)
        service.warming = _WARM_UP.value != "none"
        address = await services.listen(service)
        if service.warming:
            await _unless(stopping, _warm_up(service, engine))
        if not stopping.is_set():
            say(f"{name} on {address}/v1, {length} tokens, {_SLOTS.value} slots")
        gc.freeze()  # or the collector looks through JAX's million objects in between: 150 ms in which nobody is served
        await stopping.wait()
        cut = await service.stop()
    return services.ended(cut, "requests")


async def _warm_up(service: OpenAIService, engine: Engine) -> None:
    started = time.perf_counter()
    count = await engine.warm_up(options=_WARM_UP.value == "all")
    await service.warm_up()
    service.warming = False
    logging.info("%d programs were ready after %.1f s", count, time.perf_counter() - started)


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, until it is told to stop."""
    import asyncio

    tasks = {asyncio.create_task(work), asyncio.create_task(stopping.wait())}
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()  # what went wrong in it


if __name__ == "__main__":
    cli.with_cpu_environment("launch.serve", large=True)
    cli.run(main)
