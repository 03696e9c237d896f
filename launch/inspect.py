"""Show a run of synthesis or a dataset on a local page: trajectories, environments, rejected records, an evaluation.

    astra inspect WORKDIR
    astra inspect WORKDIR/held_out
    astra inspect WORKDIR/results
    astra inspect WORKDIR/batches
    astra inspect --data=DIR --host=0.0.0.0 --key_file=FILE --sandbox_url=http://sandbox:8700

Of a synthesis the pages show the stored records, the rejected records with their reasons (/rejected), and the servers,
chains and tasks. The dataset's card determines the kind of records; /card shows the card. On the page of environments,
visitors can run the dataset's tools in the sandbox with any arguments. So the page listens on this machine only. On any
other address than loopback it needs a key, which the browser asks for as the password (with any user name). On SIGTERM
and Ctrl-C running requests finish; the exit code is 0, or 3 if some were cut off.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.errors import InputError
from astra_jax.base.terminal import say
from launch.flags import cli, sandboxes, services, shared

if TYPE_CHECKING:  # --help does not wait for it
    from launch.viewer.lists import Pages

_DATA = flags.DEFINE_string(
    "data",
    None,
    "Dataset: the workdir of a synthesis, one of its datasets, an evaluation's results, or a GRPO run's batches.",
)
_PORT = shared.port(8800)


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from launch.viewer.cards import ViewerService
    from launch.viewer.service import ViewerConfig
    from launch.viewer.stored import RejectedPages, find_pages
    from synthesis.core.datasets import read_card

    if not _DATA.value:
        raise cli.UsageError("no dataset is given; write astra inspect DIR, or --data=DIR")
    config = services.reached(ViewerConfig, port=_PORT.value)
    stopping = services.stop_signal()
    data, more = find_pages(_DATA.value)
    async with AsyncExitStack() as stack:
        if data or not more:
            card = read_card(data or _DATA.value)
            pages, sandboxed = await _pages(data or _DATA.value, card.get("kind"), stack)
        else:  # nothing is stored yet
            card, pages, sandboxed = {}, RejectedPages(Path(_DATA.value), "/"), ""
            del more["/rejected"]
        more = {address: one for address, one in more.items() if len(one)}
        service = ViewerService(pages, card, config, more)
        address = await services.listen(service)
        say(f"{len(pages):,} {pages.noun} on {address}/{sandboxed}")
        for path, others in more.items():
            say(f"{len(others):,} {others.noun} on {address}{path}")
        await stopping.wait()
        cut = await service.stop()
    return services.ended(cut, "requests")


async def _pages(path: str, kind: object, stack: AsyncExitStack) -> tuple[Pages, str]:
    """Open the pages of a dataset. Also return a line to print about their sandbox, which the stack closes.

    Raises:
        UsageError: the dataset has records of another kind, or two with one id.
    """
    from astra_jax.grpo.dump import DumpedBatches
    from astra_jax.rollout.records import PackedGroup
    from launch.viewer.batches import BatchPages
    from launch.viewer.environments import EnvironmentPages, stored_environments
    from launch.viewer.results import ResultPages
    from launch.viewer.stored import StoredPages
    from launch.viewer.trajectories import TrajectoryPages
    from synthesis.core.records import Task, ToolChain, ToolServer

    try:
        if kind == "Trajectory":
            return TrajectoryPages(path), ""
        if kind == "ItemResult":
            return ResultPages(path), ""
        if kind == PackedGroup.__name__:
            return BatchPages(DumpedBatches(path)), ""
        step_records: tuple[Any, ...] = (Task, ToolChain, ToolServer)
        for steps in step_records:
            if kind == steps.__name__:
                return StoredPages(path, steps), ""
        if kind != "ToolEnvironment":
            raise InputError(
                f"it holds {kind} records; give the workdir of a synthesis, one of its datasets, an evaluation's "
                "results or a GRPO run's batches"
            )
        environments = stored_environments(path)
    except InputError as error:
        raise cli.UsageError(f"--data={path}: {error}") from None
    sandbox = await stack.enter_async_context(sandboxes.sandbox_from_flags())
    return EnvironmentPages(environments, sandbox), f", sandbox tier {sandbox.tier}"


if __name__ == "__main__":
    cli.run(main, argument=_DATA)
