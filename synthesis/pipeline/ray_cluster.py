"""`--executor=ray`: sandbox work on the cores of a Ray cluster, of one machine or many.

    async with RayCluster(sandbox=SandboxPool, address="auto") as cluster:
        executor = Executor(teacher, cluster)

The stages of a run stay in this process, Ray's driver. A proof or a call of a tool (`pipeline.context.in_sandbox`) is a
Ray task of one CPU, whose process opens a sandbox for its first task and keeps it. Ray places the tasks, also on
machines that join later.

A task whose process or machine dies runs again elsewhere, `TRIES` times in all. After that its record is rejected as
`worker_died`. A machine on which no sandbox opens (a package is missing, or the isolation is too weak) is logged and
left out while there is another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from astra_jax.base.errors import UserError
from synthesis.core.stages import Rejected

if TYPE_CHECKING:
    from sandbox import Sandbox

T = TypeVar("T")

TRIES = 3
_CONNECT_SECONDS = 10.0
_log = logging.getLogger(__name__)


class RayUnavailable(UserError):
    """Ray is not installed, no cluster answers, or no machine of it can work; the message has the fix."""


class RayCluster:
    """Sandboxes in the worker processes of a Ray cluster.

    Args:
        sandbox: makes a sandbox, not yet open, in each worker process; must be picklable.
        address: of a running cluster, as `ray.init` takes it, `auto` on one of its machines. None starts one on this
            machine alone and stops it at the end. If this process has called `ray.init` itself, that cluster is used.
        count: tasks at a time; None for as many as there are CPUs, also on machines that join later.
    """

    def __init__(
        self,
        *,
        sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]],
        address: str | None = None,
        count: int | None = None,
    ) -> None:
        self._sandbox, self._address, self._count = pickle.dumps(sandbox), address, count
        self._turns: AbstractAsyncContextManager[object] = nullcontext() if count is None else asyncio.Semaphore(count)
        self._left_out: set[str] = set()
        self._starts_ray = False

    async def __aenter__(self) -> RayCluster:
        """Start the cluster, or connect to it.

        Raises:
            RayUnavailable: Ray is not installed, or no cluster answers.
        """
        self._ray = _ray()
        self._starts_ray = not self._ray.is_initialized()
        if self._starts_ray:
            self._connect()
        exceptions = self._ray.exceptions
        self._deaths = (
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,
            exceptions.NodeDiedError,
            exceptions.ObjectLostError,  # a large result, with its machine
        )
        # Paths that a machine does not have do no harm there.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        options = {"num_cpus": 1, "max_retries": 0, "runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
        self._function = self._task = self._ray.remote(**options)(_task())
        self._maker = self._ray.put(self._sandbox)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._starts_ray:
            self._ray.shutdown()

    @property
    def cores(self) -> int:
        """CPUs that work at the moment, at least 1."""
        cpus = sum(int(node["Resources"].get("CPU", 0)) for node in self._nodes())
        return max(1, cpus if self._count is None else min(cpus, self._count))

    async def run(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Await `work(*arguments, sandbox)` in a worker process.

        Args:
            work: a coroutine function that can be pickled, as its arguments, its result and its exceptions are.

        Raises:
            RayUnavailable: no sandbox opens on any machine.
            Rejected: `worker_died`, after `TRIES` deaths.
            Exception: whatever `work` raises.
        """
        packed = pickle.dumps((work, arguments), pickle.HIGHEST_PROTOCOL)
        deaths = 0
        async with self._turns:
            while True:
                try:
                    node, result = await self._task.remote(self._maker, packed)
                except self._deaths as death:
                    deaths += 1
                    what = f"a worker process died ({type(death).__name__}) at {work.__name__}"
                    if deaths == TRIES:
                        raise Rejected("worker_died", f"{what}, as {TRIES - 1} did before it") from death
                    _log.warning("%s; it runs again (try %d of %d)", what, deaths + 1, TRIES)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                else:
                    if not node:
                        return result
                    self._leave_out(node, result)

    def _connect(self) -> None:
        # What workers print stays in Ray's own logs: Ray would mix it, and the machine's TPU log, into our output.
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if self._address is None:
            options |= {"address": "local", "num_cpus": self._count, "include_dashboard": False}
        else:
            options |= {"address": self._address}
        try:
            if self._address and ":" in self._address:  # Ray itself tries for minutes
                host, _, port = self._address.rpartition(":")
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            self._ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            raise RayUnavailable(
                f"no Ray cluster at {self._address or 'this machine'} ({error}): start one with `ray start`, and name "
                "its HOST:PORT, or auto on one of its machines"
            ) from None

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the machines that work: alive, and not excluded."""
        return [one for one in self._ray.nodes() if one["Alive"] and one["NodeID"] not in self._left_out]

    def _leave_out(self, node: str, why: str) -> None:
        """Give a machine no more work.

        Raises:
            RayUnavailable: it was the last one.
        """
        if node in self._left_out:  # another task found it first
            return
        self._left_out.add(node)
        self._task = self._function.options(label_selector={"ray.io/node-id": f"!in({','.join(self._left_out)})"})
        (host, *_) = [one["NodeManagerHostname"] for one in self._ray.nodes() if one["NodeID"] == node] or [""]
        if not any(one["Resources"].get("CPU") for one in self._nodes()):
            raise RayUnavailable(f"no machine of the Ray cluster can run tool code; {host} (node {node}): {why}")
        _log.warning("the machine %s (node %s) is left out, since no sandbox opens there: %s", host, node, why)


def _ray() -> ModuleType:
    """Return the package. Raises `RayUnavailable`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when a cluster is started: nothing is reported to anybody
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RayUnavailable(f"the executor ray needs the package ray ({error}): pip install '.[ray]'") from None
    return ray


# ---------------------------------------------------------------------------------------------------------------------
# In a worker process


def _task() -> Callable[[bytes, bytes], tuple[str, Any]]:
    """Return the Ray task. A nested function is sent by value, so that it starts where this package is missing."""

    def task(maker: bytes, packed: bytes) -> tuple[str, Any]:
        """Return "" and the result; or the node's id, and why no sandbox opens there."""
        try:
            from synthesis.pipeline.ray_cluster import worker

            here = worker(maker)
        except Exception as error:
            import ray

            return ray.get_runtime_context().get_node_id(), f"{type(error).__name__}: {error}"
        return "", here.run(packed)

    return task


class _Worker:
    """A worker process's event loop, and its open sandbox.

    Args:
        maker: pickled function that makes the sandbox.
    """

    def __init__(self, maker: bytes) -> None:
        # Ray sets uvloop's policy where that is installed; the sandbox's transports are asyncio's own.
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._opening = pickle.loads(maker)()  # ends with the process
        self._sandbox = self._runner.run(self._opening.__aenter__())

    def run(self, packed: bytes) -> Any:
        """Return the result of pickled work and arguments."""
        work, arguments = pickle.loads(packed)
        return self._runner.run(work(*arguments, self._sandbox))


worker = cache(_Worker)
"""The process's one; a sandbox that does not open is tried again with the next task."""
