"""The sandbox behind HTTP: one pool for many callers and machines.

    python -m launch.sandbox_server --port=8700
    python -m launch.sandbox_server --host=0.0.0.0 --token_file=FILE --minimum_tier=B

Callers use `sandbox.remote.RemotePool`; /run_code answers as SandboxFusion does. On SIGTERM (and Ctrl-C) it takes no
more calls, lets those in flight end, and exits with 0; with 3 when some had to be cut off.
"""

from __future__ import annotations

from absl import flags

from launch.flags import cli, services
from launch.flags.numbers import number_flag
from sandbox.settings import CountOrZero, Port, SecondsOrZero, Slots
from synthesis.core.terminal import say

flags.adopt_module_key_flags(services)

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; beyond loopback a token is needed.")
_PORT = number_flag("port", 8700, Port, "0 takes a free one.")
_TOKEN_FILE = flags.DEFINE_string("token_file", None, "File whose first line is the token that callers must show.")
_TIER = flags.DEFINE_enum("minimum_tier", "C", ["A", "B", "C", "D"], "Weakest isolation to accept.")
_UNISOLATED = flags.DEFINE_bool("allow_unisolated", False, "Accept tier D, where rlimits are all there is.")
_SLOTS = number_flag("max_slots", 1024, Slots, "Environments kept open at once.")
_CONCURRENCY = number_flag("concurrency", None, Slots, "Calls at once; by default four a core.")
_WAITING = number_flag("max_waiting", 1024, CountOrZero, "Calls that may wait; more are answered 429.")
_DRAIN = number_flag("drain_seconds", 60.0, SecondsOrZero, "For calls in flight when it is told to stop.")


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from sandbox import SandboxConfig, SandboxPool
    from sandbox.service import SandboxService, SandboxServiceConfig

    service_config = services.reached(
        SandboxServiceConfig,
        host=_HOST.value,
        port=_PORT.value,
        token=cli.token_of(_TOKEN_FILE),
        max_waiting=_WAITING.value,
        drain_seconds=_DRAIN.value,
    )
    pool_config = SandboxConfig(
        minimum_tier=_TIER.value,
        allow_unisolated=_UNISOLATED.value,
        max_slots=_SLOTS.value,
        concurrency=_CONCURRENCY.value,
    )
    told = services.told_to_stop()
    async with SandboxPool(pool_config) as pool:
        service = SandboxService(pool, service_config)
        address = await services.listen(service)
        layers = ", ".join(f"{name} {state}" for name, state in pool.layers.items())
        say(f"sandbox on {address}, tier {pool.tier} ({layers})")
        await told.wait()
        cut = await service.stop()
    return services.ended(cut, "calls")


if __name__ == "__main__":
    cli.run(main)
