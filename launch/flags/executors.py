"""Flags of every synthesis program: its teacher, its embedder, and where it runs sandboxed work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.settings import Count
from launch.flags import cli, sandboxes, teachers
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox import Sandbox
    from synthesis.pipeline.embedding import Embedder
    from synthesis.pipeline.executors import Executor
    from synthesis.pipeline.ray_cluster import RayCluster

_EXECUTOR = flags.DEFINE_enum(
    "executor",
    "local",
    ["local", "ray"],
    "Where tools are called and checked: on this machine, or on a Ray cluster (pip install '.[ray]'). The results are "
    "identical.",
)
ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "Ray cluster for --executor=ray: HOST:PORT, or auto on one of its machines; by default this machine's CPUs.",
)
_WORKERS = number_flag(
    "ray_workers", None, Count, "Maximum CPUs that --executor=ray uses; by default all of the cluster."
)

REPLACE = flags.DEFINE_bool(
    "replace", False, "Replace the datasets of a finished workdir if the seed, a setting or the teacher differs."
)


@asynccontextmanager
async def executor_from_flags(workdir: Path) -> AsyncIterator[Executor]:
    """Yield the executor, with the teacher, the embedder and the sandbox of the flags.

    Args:
        workdir: folder of the run.

    Raises:
        cli.UsageError: flags contradict each other or have bad values.
    """
    from synthesis.pipeline.executors import Executor

    sandbox = _cluster() if _EXECUTOR.value == "ray" else _here()
    teacher = teachers.teacher_from_flags(workdir)
    with _kept(teachers.embedder_from_flags(), workdir) as embedder:
        async with sandbox as opened:
            yield Executor(teacher, opened, embedder)


def _here() -> AbstractAsyncContextManager[Sandbox]:
    of_ray: tuple[flags.FlagHolder[Any], ...] = (ADDRESS, _WORKERS)
    cli.refuse_unused(of_ray, f"is for --{_EXECUTOR.name}=ray: give that too")
    return sandboxes.sandbox_from_flags()


def _cluster() -> RayCluster:
    from synthesis.pipeline.ray_cluster import RayCluster

    if (ADDRESS.value or "").startswith("ray://"):
        raise cli.UsageError(
            f"--{ADDRESS.name}={ADDRESS.value} is an address for Ray's client; run this program on a machine of the "
            "cluster, "
            f"with --{ADDRESS.name}=auto"
        )
    maker = sandboxes.sandbox_maker_from_flags(one_a_cpu=True)
    return RayCluster(sandbox=maker, address=ADDRESS.value, count=_WORKERS.value)


@contextmanager
def _kept(embedder: Embedder, workdir: Path) -> Iterator[Embedder]:
    """Yield the embedder, which caches paid embeddings in the run's folder."""
    from synthesis.pipeline.embedding import EndpointEmbedder
    from synthesis.pipeline.kept_embeddings import KeptEmbedder

    if not isinstance(embedder, EndpointEmbedder):
        yield embedder
        return
    with closing(KeptEmbedder(embedder, workdir)) as kept:
        yield kept
