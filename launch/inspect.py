"""A local page that shows a dataset's environments and runs their tools in the sandbox.

    python -m launch.inspect --environments=DIR
    python -m launch.inspect --environments=DIR --host=0.0.0.0 --token_file=FILE --sandbox_url=http://sandbox:8700

Whoever opens the page can run the tools that the dataset holds, with arguments of their own. So it is there for this
machine alone; beyond loopback it asks for a token, which the browser takes as the password (any user name will do). On
SIGTERM (and Ctrl-C) it lets calls in flight end, and exits with 0; with 3 when some had to be cut off.
"""

from __future__ import annotations

from absl import flags

from launch import cli, sandboxes, services

flags.adopt_module_key_flags(sandboxes)

_ENVIRONMENTS = flags.DEFINE_string("environments", None, "Dataset of tool environments to show.", required=True)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; beyond loopback a token is needed.")
_PORT = flags.DEFINE_integer("port", 8800, "0 takes a free one.", lower_bound=0, upper_bound=65_535)
_TOKEN_FILE = flags.DEFINE_string("token_file", None, "File whose first line is the token that people must show.")


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from launch.catalogue import Catalogue
    from launch.inspection import InspectionConfig, Service
    from synthesis.datasets import read_dataset
    from synthesis.records import ToolEnvironment

    token = cli.token_of(_TOKEN_FILE)
    try:
        config = InspectionConfig(_HOST.value, _PORT.value, token)
    except ValueError as error:
        raise cli.UsageError(str(error)) from None
    told = services.told_to_stop()
    environments = read_dataset(_ENVIRONMENTS.value, ToolEnvironment)
    try:
        catalogue = Catalogue(environments)
    except ValueError as error:
        raise cli.UsageError(f"--environments={_ENVIRONMENTS.value}: {error}") from None
    async with sandboxes.sandbox_from_flags() as sandbox:
        service = Service(catalogue, sandbox, config)
        await services.listen(service, _HOST.value, _PORT.value)
        host = f"[{_HOST.value}]" if ":" in _HOST.value else _HOST.value
        print(
            f"{len(catalogue)} environments on http://{host}:{service.port}/, sandbox tier {sandbox.tier}", flush=True
        )
        await told.wait()
        cut = await service.stop()
    return services.ended(cut, "calls")


def _mends() -> tuple[type[Exception], ...]:
    from sandbox import SandboxError
    from synthesis.datasets import DatasetError

    return (DatasetError, SandboxError)


if __name__ == "__main__":
    cli.run(main, mends=_mends)
