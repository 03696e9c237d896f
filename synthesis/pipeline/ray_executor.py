"""`--executor=ray`: the stages of a run in Ray's workers, on one machine or many.

    executor = RayExecutor(sandbox=SandboxPool, teacher=OfflineTeacher, address="auto", count=64)

A worker is an actor with an event loop, a sandbox, and a context of its own; the process of the run (the driver) hands
it records and writes down what comes back, so the journal, the order and the bytes are those of the local executor.

Workers ask an endpoint themselves. Its limits, budget and recording hold for all of them together because one actor, on
the driver's machine, leases what they may do (`ray_endpoint`). A teacher without an endpoint is a pure function: each
worker has one. Records and messages travel many at a time (`ray_worker`, `ray_mail`).

A machine on which workers cannot begin (a package is missing, the sandbox isolates too little) is named and left out
while there is a worker elsewhere; one that joins the cluster later gets workers, where no number of them was asked for.

A worker that dies loses nothing: its records are given to others. A record that has seen `DEATHS` workers die is worked
on once more, alone in a worker, so that it is not rejected for another's fault; then it is rejected as `worker_died`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from synthesis.core.progress import TRAFFIC, Progress, Traffic
from synthesis.core.rate_limits import STAGE, Spent
from synthesis.core.references import OWN_FOLDER
from synthesis.core.refusals import Refusal
from synthesis.core.stages import Rejected
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.executors import C, In, MakeContext, Out, Workers, follows_rules
from synthesis.pipeline.ray_endpoint import EndpointActor
from synthesis.pipeline.ray_mail import unwrapped
from synthesis.pipeline.ray_nodes import RayNodes, WorkerSlot
from synthesis.pipeline.ray_worker import LeasedTeacher, Recipe, WorkerActor, WorkerLine
from synthesis.pipeline.teacher import OpenAITeacher, Teacher, description

if TYPE_CHECKING:
    from sandbox import Sandbox


_log = logging.getLogger(__name__)

DEATHS = 3
_CALLS = 1_000_000
"""Of an actor at once: what is in work is bounded by the driver."""
_CLOSE_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
LOOK_SECONDS = 5.0
"""Between two looks at which machines there are."""


class RayUnavailable(Refusal):
    """Ray is not installed, or no worker stays alive; the message says what to do."""


def _options(**options: Any) -> dict[str, Any]:
    """Of an actor of ours."""
    # Paths that a machine does not have do no harm there.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    # Ray's actors run on uvloop where that is installed; the sandbox's transports are asyncio's own.
    variables = {"PYTHONPATH": paths, "RAY_USE_UVLOOP": "0", OWN_FOLDER: os.getcwd()}
    return {"max_concurrency": _CALLS, "runtime_env": {"env_vars": variables}, **options}


def _ray() -> ModuleType:
    """Raises `RayUnavailable`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when a cluster is started: nothing is reported to anybody
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RayUnavailable(f"the executor ray needs the package ray ({error}): pip install '.[ray]'") from None
    return ray


# ---------------------------------------------------------------------------------------------------------------------
# The driver


class RayExecutor:
    """Works in Ray's workers; the same bytes as `LocalExecutor`.

    All arguments that are functions are called in the workers, and have to be pickled: classes, functions of modules,
    `functools.partial` of them.

    Args:
        sandbox: makes a sandbox, not yet open.
        teacher: makes each worker's teacher, where there is no endpoint.
        endpoint: makes the teacher behind an endpoint; give this or `teacher`.
        embedder: makes the embedder.
        address: of a cluster that runs, as `ray.init` takes it, `auto` on one of its machines; None: one is started on
            this machine alone, and stopped at the end. Where this process has called `ray.init` itself, that is used.
        count: workers; None: as many as there are CPUs, also on machines that join later.

    Raises:
        ValueError: neither `teacher` nor `endpoint` is given, or both.
    """

    def __init__(
        self,
        *,
        sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]],
        teacher: Callable[[], Teacher] | None = None,
        endpoint: Callable[[], OpenAITeacher] | None = None,
        embedder: Callable[[], Embedder] = SentenceEmbedder,
        address: str | None = None,
        count: int | None = None,
    ) -> None:
        if (teacher is None) == (endpoint is None):
            raise ValueError("teacher, endpoint: give exactly one of them")
        self.embedder = embedder()
        self.by_rules = follows_rules(teacher)
        self._teacher = teacher
        self._sandbox, self._endpoint, self._make_embedder = sandbox, endpoint, embedder
        self._address, self._count = address, count

    @asynccontextmanager
    async def workers(self, make_context: MakeContext[C]) -> AsyncIterator[Workers[C]]:
        """See `Executor.workers`.

        Raises:
            RayUnavailable: Ray is not installed or no cluster answers; or, from a stage, no worker stays alive.
            Exception: what workers raise that cannot make their sandbox or context, where that is so on every machine.
        """
        ray = _ray()
        with self._cluster(ray):
            async with AsyncExitStack() as stack:
                teacher: Callable[[], Teacher] | LeasedTeacher
                lost: Callable[[str], Any] = _nobody
                costs: Callable[[], Awaitable[Mapping[str, Spent]]] = _nothing
                if self._endpoint is not None:
                    actor = await stack.enter_async_context(_endpoint_actor(ray, self._endpoint))
                    plan = await unwrapped(actor.plan.remote())
                    teacher, asked, lost = LeasedTeacher(actor, plan), plan.described, actor.lost.remote
                    costs = actor.costs.remote
                elif self._teacher is not None:
                    teacher, asked = self._teacher, description(self._teacher())
                recipe = Recipe(teacher, self._sandbox, self._make_embedder, make_context)
                crew = _Crew(ray, recipe, self._count, asked, costs, lost)
                stack.push_async_callback(crew.close)
                crew.start()
                yield crew

    @contextlib.contextmanager
    def _cluster(self, ray: ModuleType) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
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
            ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            raise RayUnavailable(
                f"no Ray cluster at {self._address or 'this machine'} ({error}): start one with `ray start`, and name "
                "its HOST:PORT, or auto on one of its machines"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


async def _nothing() -> Mapping[str, Spent]:
    """The costs where there is no endpoint."""
    return {}


def _nobody(worker: str) -> None:
    """Who is told of a dead worker where there is no endpoint."""


@asynccontextmanager
async def _endpoint_actor(ray: ModuleType, make: Callable[[], OpenAITeacher]) -> AsyncIterator[Any]:
    """The actor that shares the endpoint out, on this machine: the recording is a file of the run's folder."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    # Should it die, nobody knows what was leased: the run ends, and the next one goes on from the recording.
    options = _options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
    actor = ray.remote(EndpointActor).options(**options).remote(make)

    async def watch() -> None:
        before = Traffic()
        with contextlib.suppress(ray.exceptions.RayError):  # workers say so better
            while True:
                seen = await actor.traffic.remote()
                TRAFFIC.requests += seen.requests - before.requests
                TRAFFIC.tokens += seen.tokens - before.tokens
                before = seen
                await asyncio.sleep(Progress.SECONDS)

    watching = asyncio.create_task(watch())
    try:
        yield actor
    finally:
        watching.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(actor.close.remote(), _CLOSE_SECONDS)
        ray.kill(actor)


class _Crew:
    """The workers of one run; see `synthesis.pipeline.executors.Workers`.

    Args:
        count: of them; None: one for each CPU.
        lost: is told the name of a worker that died.
    """

    def __init__(
        self, ray: ModuleType, recipe: Recipe, count: int | None, teacher: Mapping[str, Any],
        costs: Callable[[], Awaitable[Mapping[str, Spent]]], lost: Callable[[str], Any],
    ) -> None:  # fmt: skip
        self.teacher, self._costs, self._lost = teacher, costs, lost
        self._ray = ray
        self._recipe = ray.put(recipe)
        self._grows = count is None
        self._nodes = RayNodes(ray)
        self._slots = [WorkerSlot(number, 1) for number in range(count or max(1, self._nodes.room()))]
        self._last_resort: WorkerSlot | None = None
        self._looking: asyncio.Task[None] | None = None
        self._stages = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        exceptions = ray.exceptions
        self._deaths = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,
            exceptions.ActorUnschedulableError,  # its machine went away before it was there
        )

    @property
    def count(self) -> int:
        """See `Workers.count`."""
        return len(self._slots)

    def start(self) -> None:
        self._start(*self._slots)
        self._looking = asyncio.create_task(self._look())

    def bound(
        self, function: Callable[[In, C], Awaitable[Sequence[Out]]], concurrency: int
    ) -> Callable[[In], Awaitable[Sequence[Any]]]:
        """See `Workers.bound`; what it returns raises `Rejected` with `worker_died` too."""
        self._stages += 1
        stage, reference = self._stages, self._ray.put(function)

        async def work(item: In) -> Sequence[Any]:
            packed = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            for deaths in range(DEATHS + 1):
                slot = await (self._free(self._slots, concurrency) if deaths < DEATHS else self._alone())
                actor, line = slot.actor, slot.line
                assert line is not None, "a worker that is ready has a line"
                try:
                    outputs = await line.work(stage, reference, packed, STAGE.get())
                except self._deaths:
                    self._replace(slot, actor)
                else:
                    return [msgspec.Raw(output) for output in outputs]
                finally:
                    slot.load -= 1
                    self._notify()
            raise Rejected("worker_died", f"{DEATHS + 1} workers died at it, the last with nothing else in work")

        return work

    async def costs(self) -> Mapping[str, Spent]:
        """See `Workers.costs`."""
        return await self._costs()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        TRAFFIC.workers = ""
        slots = [slot for slot in self._places() if slot.actor is not None]
        for slot in slots:
            if slot.opening is not None:
                slot.opening.cancel()
            if slot.line is not None:
                slot.line.close()
        closing = [asyncio.wait_for(slot.actor.close.remote(), _CLOSE_SECONDS) for slot in slots if slot.ready]
        await asyncio.gather(*closing, return_exceptions=True)
        for slot in slots:
            self._ray.kill(slot.actor)

    async def _free(self, slots: Sequence[WorkerSlot], most: int) -> WorkerSlot:
        """The least busy worker that is ready and has fewer than `most` records in work; one more is its now."""
        while True:
            if self._failure is not None:
                raise self._failure
            if free := [slot for slot in slots if slot.ready and slot.load < most]:
                chosen = min(free, key=lambda slot: slot.load)
                chosen.load += 1
                return chosen
            await self._changed.wait()

    async def _alone(self) -> WorkerSlot:
        """As `_free`, of the worker for records that may have killed others; no CPU is kept for it."""
        if self._last_resort is None:
            self._last_resort = WorkerSlot(-1, 0)
            self._start(self._last_resort)
        return await self._free([self._last_resort], 1)

    def _places(self) -> list[WorkerSlot]:
        return [*self._slots, *([] if self._last_resort is None else [self._last_resort])]

    def _start(self, *slots: WorkerSlot) -> None:
        """Start workers anew; one for which there is no machine waits until one joins."""
        self._nodes.look()
        for slot in slots:
            slot.ready, slot.actor, slot.opening, slot.name = False, None, None, uuid.uuid4().hex
            if slot.line is not None:
                slot.line.close()
                slot.line = None
            if (where := self._nodes.choose(slot, self._places())) is not None:
                options = _options(num_cpus=slot.cpus, max_restarts=0, **where)
                make = self._ray.remote(WorkerActor).options(**options)
                slot.actor = make.remote(slot.number, slot.name, self._recipe)
                slot.opening = asyncio.create_task(self._open(slot, slot.actor))
        self._tell()

    async def _open(self, slot: WorkerSlot, actor: Any) -> None:
        """A worker that no machine has room for yet is waited for here, while others work."""
        try:
            slot.node = slot.node or await actor.where.remote()
            await unwrapped(actor.open.remote())
        except self._deaths as death:
            self._lost(slot.name)
            slot.unready_deaths += 1
            if slot.unready_deaths > DEATHS:
                self._leave_out(
                    slot, RayUnavailable(f"worker {slot.number} died {DEATHS + 1} times as it began: {death}")
                )
            else:
                self._start(slot)
        except Exception as error:
            self._leave_out(slot, error)
        else:
            slot.ready, slot.unready_deaths, slot.line = True, 0, WorkerLine(self._ray, actor)
            self._tell()
        self._notify()

    def _leave_out(self, slot: WorkerSlot, error: Exception) -> None:
        """No further worker is started where this one could not begin; without another one, that ends the run."""
        with contextlib.suppress(Exception):
            self._ray.kill(slot.actor)
        self._lost(slot.name)
        if not slot.node:  # it never came to any
            self._failure = error
            return
        if (first := self._nodes.leave_out(slot.node)) is not None:
            _log.warning("%s is left out, since no worker can begin there: %s: %s", first, type(error).__name__, error)
        slot.unready_deaths = 0
        self._start(slot)
        if all(one.actor is None for one in self._slots):
            self._failure = error

    async def _look(self) -> None:
        """Start workers on machines that have joined, in place of those that have none or beside all there are."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._nodes.look()
            known = len(self._slots)
            if self._grows:
                self._slots += [WorkerSlot(number, 1) for number in range(known, self._nodes.room())]
            if waiting := [slot for slot in self._places() if slot.actor is None]:
                self._start(*waiting)
                self._notify()

    def _replace(self, slot: WorkerSlot, dead: Any) -> None:
        if slot.actor is dead:  # else another of its records has been told first
            _log.warning("worker %d died; what it had in work is done again", slot.number)
            with contextlib.suppress(Exception):
                self._ray.kill(dead)  # it may live, out of reach
            self._lost(slot.name)
            self._start(slot)

    def _tell(self) -> None:
        """Show how many work, when that has changed: a record's end is too often for it."""
        TRAFFIC.workers = f"{sum(slot.ready for slot in self._slots)}/{len(self._slots)}"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
