"""The sandbox behind HTTP: one pool for many callers and machines.

    python -m launch.sandbox_server --port=8700
    python -m launch.sandbox_server --host=0.0.0.0 --token_file=FILE --minimum_tier=B

Callers use `sandbox.remote.RemotePool`; /run_code answers as SandboxFusion does. On SIGTERM (and Ctrl-C) it takes no
more calls, lets those in flight end, and exits with 0; with 3 when some had to be cut off.
"""

from __future__ import annotations

from absl import flags

from launch.flags import cli, services

flags.adopt_module_key_flags(services)

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; beyond loopback a token is needed.")
_PORT = flags.DEFINE_integer("port", 8700, "0 takes a free one.", lower_bound=0, upper_bound=65_535)
_TOKEN_FILE = flags.DEFINE_string("token_file", None, "File whose first line is the token that callers must show.")
_TIER = flags.DEFINE_enum("minimum_tier", "C", ["A", "B", "C", "D"], "Weakest isolation to accept.")
_UNISOLATED = flags.DEFINE_bool("allow_unisolated", False, "Accept tier D, where rlimits are all there is.")
_SLOTS = flags.DEFINE_integer("max_slots", 1024, "Environments kept open at once.", lower_bound=1)
_CONCURRENCY = flags.DEFINE_integer("concurrency", None, "Calls at once; by default four a core.", lower_bound=1)
_WAITING = flags.DEFINE_integer("max_waiting", 1024, "Calls that may wait; more are answered 429.", lower_bound=0)
_DRAIN = flags.DEFINE_float("drain_seconds", 60.0, "For calls in flight when it is told to stop.", lower_bound=0)


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
    try:
        pool_config = SandboxConfig(
            minimum_tier=_TIER.value,
            allow_unisolated=_UNISOLATED.value,
            max_slots=_SLOTS.value,
            concurrency=_CONCURRENCY.value,
        )
    except ValueError as error:
        raise cli.UsageError(str(error)) from None
    told = services.told_to_stop()
    async with SandboxPool(pool_config) as pool:
        service = SandboxService(pool, service_config)
        address = await services.listen(service)
        layers = ", ".join(f"{name} {state}" for name, state in pool.layers.items())
        print(f"sandbox on {address}, tier {pool.tier} ({layers})", flush=True)
        await told.wait()
        cut = await service.stop()
    return services.ended(cut, "calls")


def _user_errors() -> tuple[type[Exception], ...]:
    from sandbox import SandboxError

    return (SandboxError,)


if __name__ == "__main__":
    cli.run(main, user_errors=_user_errors)
