"""A worker of Ray's, and the driver's line to it: records go there and come back many in a message."""

from __future__ import annotations

import asyncio
import gc
import pickle
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from synthesis.core.rate_limits import STAGE
from synthesis.core.stages import COLLECT_AFTER, Rejected, Stopped, Transient
from synthesis.pipeline.embedding import Embedder
from synthesis.pipeline.executors import MakeContext, Resources
from synthesis.pipeline.ray_endpoint import EndpointPlan
from synthesis.pipeline.ray_leases import EndpointLine
from synthesis.pipeline.ray_mail import Mailbox
from synthesis.pipeline.teacher import Teacher

if TYPE_CHECKING:
    from sandbox import Sandbox

_GATHER_SECONDS = 0.03
"""That the first finished record waits for others, while its worker has more to do."""
_HEAR_SECONDS = 60.0

Given = tuple[int, list[bytes] | bytes]
"""A record's number, and its outputs' JSON, or a pickled exception."""


@dataclass(frozen=True)
class LeasedTeacher:
    """How a worker gets a teacher that asks an endpoint which all workers share."""

    actor: Any
    plan: EndpointPlan


@dataclass(frozen=True)
class Recipe:
    """How a worker gets what it works with."""

    teacher: Callable[[], Teacher] | LeasedTeacher
    sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]]
    embedder: Callable[[], Embedder]
    make_context: MakeContext[Any]


class WorkerActor:
    """Works on records."""

    def __init__(self, number: int, name: str, recipe: Recipe) -> None:
        self._number, self._name, self._recipe = number, name, recipe
        self._stack = AsyncExitStack()
        self._context: Any = None
        self._line: EndpointLine | None = None
        self._functions: dict[int, asyncio.Future[Any]] = {}
        self._out: Mailbox[Given] = Mailbox(_GATHER_SECONDS)
        self._working: set[asyncio.Task[None]] = set()

    async def where(self) -> str:
        """The id of its node."""
        import ray

        return ray.get_runtime_context().get_node_id()

    async def open(self) -> None:
        gc.set_threshold(*map(max, gc.get_threshold(), COLLECT_AFTER))
        recipe = self._recipe
        if isinstance(recipe.teacher, LeasedTeacher):
            self._line = EndpointLine(recipe.teacher.actor, recipe.teacher.plan, self._name)
            teacher: Teacher = self._line.teacher()
            self._stack.push_async_callback(self._line.close)
        else:
            teacher = recipe.teacher()
        sandbox = await self._stack.enter_async_context(recipe.sandbox())
        resources = Resources(teacher, sandbox, recipe.embedder(), self._number)
        self._context = await self._stack.enter_async_context(recipe.make_context(resources))

    async def give(self, stage: int, function: list[Any], name: str, items: list[tuple[int, bytes]]) -> None:
        """Begin to work on records.

        Args:
            function: the reference of the stage's function, which is fetched once a stage.
            name: under which costs are counted.
            items: numbers, by which `hear` names them, and pickled records.
        """
        if stage not in self._functions:
            self._functions = {stage: asyncio.ensure_future(function[0])}
        fetched = self._functions[stage]
        STAGE.set(name)
        for number, item in items:
            task = asyncio.create_task(self._work(fetched, number, item))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def hear(self) -> list[Given]:
        """What has been finished since; waits for something, a little."""
        return await self._out.empty(_HEAR_SECONDS)

    async def _work(self, function: asyncio.Future[Any], number: int, item: bytes) -> None:
        given: list[bytes] | bytes
        try:
            work = await asyncio.shield(function)
            # The outputs' JSON is made here because the driver has enough to do.
            outputs = await work(pickle.loads(item), self._context)
            given = [msgspec.json.encode(output) for output in outputs]
            if self._line is not None:
                await self._line.flushed()
        except Exception as raised:
            given = _pickled(raised)
        # While half of the records are still in work nobody has to be fast.
        self._out.put((number, given), urgent=len(self._out) + 2 > len(self._working))

    async def close(self) -> None:
        await self._stack.aclose()


def _pickled(raised: Exception) -> bytes:
    """An exception as it can be sent, with where it was raised, if that is a bug."""
    if not isinstance(raised, (Rejected, Transient, Stopped)):
        raised.add_note("".join(traceback.format_exception(raised)))
    try:
        pickle.loads(data := pickle.dumps(raised))
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"))
    return data


@dataclass
class _Sent:
    """A record on its way to the worker."""

    stage: int
    function: Any
    name: str
    number: int
    item: bytes


class WorkerLine:
    """The driver's line to one worker; both ways many records are in a message.

    Args:
        actor: a `WorkerActor`.
    """

    GATHER_SECONDS = 0.02
    """That a record on its way there waits for others."""

    def __init__(self, ray: ModuleType, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._out: Mailbox[_Sent] = Mailbox(self.GATHER_SECONDS)
        self._waiting: dict[int, asyncio.Future[list[bytes] | Exception]] = {}
        self._numbers = 0
        self._broken: BaseException | None = None
        self._tasks = [asyncio.create_task(self._guarded(work)) for work in (self._send, self._listen)]

    async def work(self, stage: int, function: Any, item: bytes, name: str) -> list[bytes]:
        """Have a record worked on.

        Raises:
            ray.exceptions.RayError: the worker died.
            Exception: what the stage raised.
        """
        if self._broken is not None:
            raise self._broken
        self._numbers += 1
        number = self._numbers
        place = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._out.put(_Sent(stage, function, name, number, item))
        try:
            given = await place
        finally:
            self._waiting.pop(number, None)
        if isinstance(given, Exception):
            raise given
        return given

    def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()

    async def _guarded(self, run: Callable[[], Any]) -> None:
        try:
            await run()
        except Exception as error:
            self._broken = self._broken or error
            for place in self._waiting.values():
                if not place.done():
                    place.set_exception(self._broken)

    async def _send(self) -> None:
        while True:
            by_stage: dict[int, list[_Sent]] = {}
            for one in await self._out.empty():
                by_stage.setdefault(one.stage, []).append(one)
            for stage, sent in by_stage.items():
                items = [(one.number, one.item) for one in sent]
                await self._actor.give.remote(stage, [sent[0].function], sent[0].name, items)

    async def _listen(self) -> None:
        while True:
            for number, given in await self._actor.hear.remote():
                if (place := self._waiting.get(number)) is not None and not place.done():
                    place.set_result(pickle.loads(given) if isinstance(given, bytes) else given)
