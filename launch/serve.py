"""Serve a model through OpenAI's API, on the embedded engine.

    astra serve --weights=DIR --port=8000
    astra serve --weights=RUN --tokenizer=DIR --host=0.0.0.0 --key_file=FILE --mesh=tensor=4

Endpoints: /v1/completions, /v1/chat/completions and /v1/responses (tools, streaming, structured output), /v1/models,
/health and /metrics; see docs/serving.md. The server is ready when the programs of a short request are compiled; the
others are compiled in the background. /health answers 503 until the server is ready, and then counts the programs. On
SIGTERM and Ctrl-C it accepts no more requests and running requests finish; the exit code is 0, or 3 if some were cut
off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, engines, policies, services, shared

if TYPE_CHECKING:  # --help does not wait for them
    import asyncio

    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.serving.service import OpenAIService

policies.require_weights()

_NAME = flags.DEFINE_string(
    "served_model_name", None, "Name of the model for clients; by default the name of its folder."
)
_PORT = shared.port(8000)
_WARM_UP = flags.DEFINE_enum(
    "warm_up",
    "usual",
    ["none", "usual", "all"],
    "Programs to compile in the background: none, those for sampling with temperature and top_p (usual), or those for "
    "other options and structured output too (all). A request that needs another program has it compiled first.",
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
    length = engines.LENGTH.value or min(model.max_positions, 32_768)
    model.check_length(length, "--max_length")
    services.check_address(_PORT.value)
    check_cache_fits(model, engines.SLOTS.value, length, policies.mesh(), engines.WEIGHT_QUANTIZATION.value)
    say(f"reading the weights of {policies.source()}", file=sys.stderr)
    params = policies.load(model)
    stopping = services.stop_signal()
    async with Engine(
        params,
        model,
        EngineConfig(
            slots=engines.SLOTS.value, max_length=length, weight_quantization=engines.WEIGHT_QUANTIZATION.value
        ),
    ) as engine:
        service = OpenAIService(engine, tokenizer, serving)
        service.warming = _WARM_UP.value != "none"
        address = await services.listen(service)
        ready = f"{name} on {address}/v1, {length} tokens, {engines.SLOTS.value} slots"
        if service.warming:
            await _unless(stopping, _warm_up(service, engine, ready))
        else:
            say(ready)
        gc.freeze()  # or the collector looks through JAX's million objects in between: 150 ms in which nobody is served
        await stopping.wait()
        cut = await service.stop()
    return services.ended(cut, "requests")


async def _warm_up(service: OpenAIService, engine: Engine, ready: str) -> None:
    """Compile the programs of --warm_up. Print when the server is ready for a request, and the progress of the rest."""
    import contextlib

    from astra_jax.base.progress import progress_bar

    say("compiling the programs of a first request", file=sys.stderr)
    async with contextlib.aclosing(engine.warm_up(options=_WARM_UP.value == "all")) as compiled:
        service.programs = await anext(compiled)
        service.warming = False
        say(ready)
        await service.warm_up()
        done, count = service.programs
        with progress_bar(total=count, initial=done, desc="programs compiled in the background") as progress:
            async for service.programs in compiled:
                progress.update()


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
