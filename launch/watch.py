"""Show a run live: curves, episodes, samples, servers, and what it waits for.

    python -m launch.watch WORKDIR                 a page on this machine that updates itself
    python -m launch.watch WORKDIR --terminal      the same in this terminal, for instance over SSH

WORKDIR is the workdir of SFT, GRPO, synthesis or the quickstart, running, finished or killed. It may be
gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; the small files are copied here. Nothing in the workdir is written or locked.
The page listens on this machine only. On any other address than loopback it needs a key, which the browser asks for as
the password (with any user name). With --terminal and no terminal, as in a pipe, the state is printed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from absl import flags

from astra_jax.base.errors import InputError
from astra_jax.base.files import in_bucket
from astra_jax.base.settings import Bound
from astra_jax.base.terminal import say
from launch.flags import cli, services, shared
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from launch.viewer.watched import Watcher

_WORKDIR = shared.workdir("on this machine's disk or in a bucket.", required=False)
_PORT = shared.port(8810)
_TERMINAL = flags.DEFINE_bool("terminal", False, "Show the run in this terminal until Ctrl-C, instead of a page.")
_SECONDS = number_flag(
    "refresh_seconds", 3.0, Annotated[float, Bound(least=0.2, most=3600)], "Seconds between two updates of the display."
)


def main() -> int:
    import asyncio

    from launch.viewer import watch_terminal
    from launch.viewer.watched import Watcher

    if not _WORKDIR.value:
        raise cli.UsageError("no workdir is given; write python -m launch.watch WORKDIR, or --workdir=WORKDIR")
    folder = cli.folder(_WORKDIR, s3=True)
    if not in_bucket(folder) and not folder.is_dir():
        raise cli.UsageError(f"--workdir={_WORKDIR.value} is not a folder; give the --workdir of a run")
    try:
        watcher = Watcher(folder)
    except InputError as error:
        raise cli.UsageError(f"--workdir={_WORKDIR.value}: {error}") from None
    if _TERMINAL.value:
        watch_terminal.watch(watcher, _SECONDS.value)
        return 0
    return asyncio.run(_serve(watcher))


async def _serve(watcher: Watcher) -> int:
    from launch.viewer.service import ViewerConfig
    from launch.viewer.watch_pages import WatchService

    stopping = services.stop_signal()
    service = WatchService(watcher, services.reached(ViewerConfig, port=_PORT.value), seconds=_SECONDS.value)
    address = await services.listen(service)
    say(f"{watcher.name} on {address}/")
    await stopping.wait()
    return services.ended(await service.stop(), "requests")


if __name__ == "__main__":
    cli.run(main, argument=_WORKDIR)
