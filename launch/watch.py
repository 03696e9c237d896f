"""Show the outcome of a run and why, its curves, episodes, samples, servers and stages, read from its workdir.

    astra watch WORKDIR                      a page that updates itself
    astra watch WORKDIR --terminal           the same in this terminal
    astra watch WORKDIR --beside=WORKDIR     curves of two runs

WORKDIR is the workdir of SFT, GRPO, synthesis, an evaluation or the quickstart: running, finished, failed or killed, or
empty before a run. It may be gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; the small files are copied here. Nothing in the
workdir is written or locked.
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
_BESIDE = flags.DEFINE_string("beside", None, "Workdir of a second run, whose curves the page plots dashed.")
_PORT = shared.port(8810)
_TERMINAL = flags.DEFINE_bool("terminal", False, "Show the run in this terminal until Ctrl-C, instead of a page.")
_SECONDS = number_flag(
    "refresh_seconds", 3.0, Annotated[float, Bound(least=0.2, most=3600)], "Seconds between two updates of the display."
)


def main() -> int:
    import asyncio

    from launch.viewer import watch_terminal

    if not _WORKDIR.value:
        raise cli.UsageError("no workdir is given; write astra watch WORKDIR, or --workdir=WORKDIR")
    watcher = _watcher(_WORKDIR)
    beside = _watcher(_BESIDE) if _BESIDE.value else None
    if _TERMINAL.value:
        cli.refuse_unused([_BESIDE], "is for the page; leave out --terminal")
        watch_terminal.watch(watcher, _SECONDS.value)
        return 0
    return asyncio.run(_serve(watcher, beside))


def _watcher(flag: flags.FlagHolder[str | None]) -> Watcher:
    """Return a watcher of a flag's folder. Raises `UsageError`: it is not the workdir of a run."""
    from launch.viewer.watched import Watcher

    folder = cli.folder(flag, s3=True)
    if not in_bucket(folder) and not folder.is_dir():
        raise cli.UsageError(f"--{flag.name}={flag.value} is not a folder; give the --workdir of a run")
    try:
        return Watcher(folder)
    except InputError as error:
        raise cli.UsageError(f"--{flag.name}={flag.value}: {error}") from None


async def _serve(watcher: Watcher, beside: Watcher | None) -> int:
    from launch.viewer.service import ViewerConfig
    from launch.viewer.watch_pages import WatchService

    stopping = services.stop_signal()
    config = services.reached(ViewerConfig, port=_PORT.value)
    service = WatchService(watcher, config, seconds=_SECONDS.value, beside=beside)
    address = await services.listen(service)
    say(f"{watcher.name} on {address}/")
    await stopping.wait()
    return services.ended(await service.stop(), "requests")


if __name__ == "__main__":
    cli.run(main, argument=_WORKDIR)
