"""Serve the sandbox over HTTP: one pool for many clients and machines.

    astra sandbox_server --port=8700
    astra sandbox_server --host=0.0.0.0 --key_file=FILE --sandbox_tier=B

Clients use `sandbox.remote.RemotePool`; /run_code accepts SandboxFusion's requests. On SIGTERM and Ctrl-C it accepts no
more calls and running calls finish; the exit code is 0, or 3 if some were cut off.
"""

from __future__ import annotations

from astra_jax.base.settings import Slots
from astra_jax.base.terminal import say
from launch.flags import cli, services, shared
from launch.flags.numbers import number_flag

_PORT = shared.port(8700)
_TIER = shared.sandbox_tier()
_SLOTS = number_flag("max_slots", 1024, Slots, "Maximum environments open at the same time.")
_CONCURRENCY = number_flag(
    "concurrency", None, Slots, "Concurrency: maximum calls that run at the same time; by default four for each core."
)
_WAITING = services.max_waiting()


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from sandbox import SandboxConfig, SandboxPool
    from sandbox.service import SandboxService, SandboxServiceConfig

    service_config = services.reached(
        SandboxServiceConfig,
        port=_PORT.value,
        max_waiting=_WAITING.value,
    )
    pool_config = SandboxConfig(
        minimum_tier=_TIER.value,
        allow_unisolated=_TIER.value == shared.UNISOLATED,
        max_slots=_SLOTS.value,
        concurrency=_CONCURRENCY.value,
    )
    stopping = services.stop_signal()
    async with SandboxPool(pool_config) as pool:
        service = SandboxService(pool, service_config)
        address = await services.listen(service)
        layers = ", ".join(f"{name} {state}" for name, state in pool.layers.items())
        say(f"sandbox on {address}, tier {pool.tier} ({layers})")
        await stopping.wait()
        cut = await service.stop()
    return services.ended(cut, "calls")


if __name__ == "__main__":
    cli.run(main)
