"""The flags of every program that synthesises: where its stages run, with which teacher, embedder and sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.flags import cli, sandboxes, teachers
from launch.flags.numbers import number_flag
from sandbox.settings import Count

if TYPE_CHECKING:  # --help does not wait for it
    from synthesis.pipeline.embedding import Embedder
    from synthesis.pipeline.executors import Executor

flags.adopt_module_key_flags(sandboxes)
flags.adopt_module_key_flags(teachers)

_EXECUTOR = flags.DEFINE_enum(
    "executor",
    "local",
    ["local", "ray"],
    "Where the stages run: in this process, or in Ray's workers (pip install '.[ray]'), which gives the same bytes.",
)
ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "Cluster of --executor=ray: HOST:PORT, or auto on one of its machines; by default this machine's CPUs.",
)
_WORKERS = number_flag(
    "ray_workers", None, Count, "Workers of --executor=ray, a CPU each; by default as many as there are CPUs."
)


REPLACE = flags.DEFINE_bool(
    "replace", False, "Write a finished workdir's datasets anew, where the seed, a setting or the teacher is another."
)


@asynccontextmanager
async def executor_from_flags(workdir: Path) -> AsyncIterator[Executor]:
    """The executor, with the teacher, the embedder and the sandbox of their flags.

    Args:
        workdir: of the run.

    Raises:
        cli.UsageError: flags contradict each other or have bad values.
    """
    from synthesis.offline.teacher import OfflineTeacher

    make_endpoint = teachers.endpoint_maker_from_flags(workdir)
    make_embedder = teachers.embedder_maker_from_flags()
    if _EXECUTOR.value == "ray":
        from synthesis.pipeline.ray_executor import RayExecutor

        if (ADDRESS.value or "").startswith("ray://"):
            raise cli.UsageError(
                f"--{ADDRESS.name}={ADDRESS.value} is of Ray's client: run this program on a machine of the cluster, "
                f"with --{ADDRESS.name}=auto"
            )
        executor = RayExecutor(
            sandbox=sandboxes.sandbox_maker_from_flags(one_a_cpu=True),
            teacher=None if make_endpoint else OfflineTeacher,
            endpoint=make_endpoint,
            embedder=make_embedder,
            address=ADDRESS.value,
            count=_WORKERS.value,
        )
        with _kept(executor.embedder, workdir) as executor.embedder:
            yield executor
        return
    from synthesis.pipeline.executors import LocalExecutor

    of_ray: tuple[flags.FlagHolder[Any], ...] = (ADDRESS, _WORKERS)
    cli.refuse_unused(of_ray, f"is for --{_EXECUTOR.name}=ray: give that too")
    teacher = make_endpoint() if make_endpoint else OfflineTeacher()
    async with sandboxes.sandbox_from_flags() as sandbox:
        with _kept(make_embedder(), workdir) as embedder:
            yield LocalExecutor(teacher, sandbox, embedder)


@contextmanager
def _kept(embedder: Embedder, workdir: Path) -> Iterator[Embedder]:
    """The embedder, which keeps what it pays for in the run's folder."""
    from synthesis.pipeline.embedding import EndpointEmbedder
    from synthesis.pipeline.kept_embeddings import KeptEmbedder

    if not isinstance(embedder, EndpointEmbedder):
        yield embedder
        return
    with closing(KeptEmbedder(embedder, workdir)) as kept:
        yield kept
