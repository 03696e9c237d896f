"""In a Ray worker: limits and recording of an endpoint that all workers share, kept by one actor (`ray_endpoint`)."""

from __future__ import annotations

import asyncio
import ipaddress
import pickle
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synthesis.core.endpoint_limits import EndpointLimits, Permit, TokenEstimate
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.rate_limits import Usage
from synthesis.core.recording import Answers
from synthesis.core.refusals import InputError
from synthesis.core.stages import Stopped
from synthesis.core.typed import msgpack_decoder
from synthesis.pipeline.answer_forms import Form
from synthesis.pipeline.ray_endpoint import (
    ENCODER,
    LEASE_SECONDS,
    AskRecorded,
    Begin,
    End,
    EndpointPlan,
    GiveBack,
    Grant,
    KeepAnswer,
    Kept,
    Letter,
    Pause,
    Recall,
    RecordedAnswer,
    Refuse,
    SlotLease,
    Take,
    ToWorker,
    Want,
)
from synthesis.pipeline.ray_mail import Mailbox, unwrapped
from synthesis.pipeline.teacher import OpenAITeacher

_GATHER_SECONDS = 0.03
"""That what is not waited for, or is waited for in any case, waits for company."""

_decoder = msgpack_decoder(list[ToWorker])


class LeasedSlots:
    """This worker's slots at one endpoint.

    Args:
        most: that the endpoint has.
    """

    def __init__(self, door: int, out: Mailbox[Letter], most: int) -> None:
        self._door, self._out, self._size = door, out, most
        self.held = self.used = 0
        self._told = 0
        self._most: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a slot."""
        if self.used < self.held and not self._waiting:
            self.used += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._tell()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release()  # it had just been given one
            raise

    def release(self) -> None:
        """A slot is used no more."""
        self.used -= 1
        self._go_on()

    def leased(self, slots: int) -> None:
        """There are more."""
        self.held += slots
        self._go_on()

    def recall(self, most: int) -> None:
        """Keep so many, and nothing that is unused."""
        self._most = most
        self._go_on()

    def fail(self, error: BaseException) -> None:
        """There will be no more."""
        while self._waiting:
            if not (place := self._waiting.popleft()).done():
                place.set_exception(error)

    def _go_on(self) -> None:
        if self._most is not None:
            # Who waits here may use what may be kept; the rest goes back.
            keep = max(self.used, min(self._most, self.used + len(self._waiting)))
            if self.held > keep:
                self._out.put(GiveBack(self._door, self.held - keep), urgent=True)
                self.held = keep
            if self.held <= self._most:
                self._most = None
        while self._waiting and self.used < self.held:
            if not (place := self._waiting.popleft()).done():
                self.used += 1
                place.set_result(None)
        self._tell()

    def want(self) -> Want | None:
        """What is wanted at the moment, if that was not told."""
        if (wanted := self._wanted()) == self._told:
            return None
        self._told = wanted
        return Want(self._door, wanted)

    def _wanted(self) -> int:
        return min(self.used + len(self._waiting), self._size)

    def _tell(self) -> None:
        """See that it is told when more is lacking than the actor knows, or something is unused that it does not know
        of; what else changes is told beside other things."""
        wanted = self._wanted()
        if wanted > self.held >= self._told:
            self._out.hurry()
        elif wanted < self.held <= self._told:
            self._out.nudge()


@dataclass
class _Ticket(Permit):
    number: int = 0


class LeasedLimits:
    """`Limits` of an endpoint that other workers ask as well."""

    def __init__(self, door: int, config: OpenAITeacherConfig, line: EndpointLine, *, budgeted: bool) -> None:
        self._door, self._line = door, line
        self._budgeted = budgeted or config.tokens_per_minute is not None  # then lengths are told
        self._rated = config.requests_per_minute is not None or config.tokens_per_minute is not None
        self.slots = LeasedSlots(door, line.out, config.concurrency)
        self._paused_until = 0.0

    def slot(self) -> AbstractAsyncContextManager[object]:
        """See `EndpointLimits.slot`."""
        return self._slot()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        await self._line.in_touch()
        await self.slots.acquire()
        try:
            yield
        finally:
            self.slots.release()

    async def reserve(self, estimate: TokenEstimate) -> Permit:
        """See `EndpointLimits.reserve`."""
        permit, most = _Ticket(estimate, number=self._line.ticket()), estimate.most()
        cost = (most.prompt, most.completion)
        begin = Begin(
            permit.number, self._door, estimate.kind, estimate.size, cost, estimate.stage, wait=self._budgeted
        )
        try:
            if self._budgeted:
                await self._line.granted(permit.number, begin)
            else:
                self._line.out.put(begin)
        except BaseException:
            self._end(permit, None, answered=False, sent=False)
            raise
        return permit

    async def take(self, permit: Permit) -> None:
        """See `EndpointLimits.take`."""
        if self._rated:
            assert isinstance(permit, _Ticket)
            await self._line.granted(permit.number, Take(permit.number))

    def settle(self, permit: Permit, used: Usage | None, *, answered: bool) -> None:
        """See `EndpointLimits.settle`."""
        self._end(permit, used, answered=answered, sent=True)

    def _end(self, permit: Permit, used: Usage | None, *, answered: bool, sent: bool) -> None:
        tokens = None if used is None else (used.prompt, used.completion)
        assert isinstance(permit, _Ticket)
        self._line.out.put(End(permit.number, tokens, answered, sent), urgent=self._budgeted)

    def pause(self, seconds: float) -> None:
        """See `EndpointLimits.pause`."""
        self._line.out.put(Pause(self._door, seconds), urgent=True)
        self.hold(seconds)

    def hold(self, seconds: float) -> None:
        """What another worker was told."""
        self._paused_until = max(self._paused_until, self._line.now() + seconds)

    def paused(self) -> float:
        """See `EndpointLimits.paused`."""
        return max(0.0, self._paused_until - self._line.now())


class EndpointLine:
    """A worker's line to the actor; the `Shared` of its teacher, and the `Answers`.

    Args:
        worker: its name.
    """

    def __init__(self, actor: Any, plan: EndpointPlan, worker: str) -> None:
        self.out: Mailbox[Letter] = Mailbox(_GATHER_SECONDS)
        self.path = Path(plan.path)
        self._actor, self._plan, self._worker = actor, plan, worker
        self._doors: list[LeasedLimits] = []
        self._looked: dict[bytes, asyncio.Future[tuple[str, str] | None]] = {}
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._tickets = 0
        self._kept = self._durable = 0
        self.now = asyncio.get_running_loop().time
        self._heard = self.now()
        self._changed = asyncio.Event()
        self._closing = False
        self._broken: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def teacher(self) -> OpenAITeacher:
        """The actor's, in this process.

        Raises:
            InputError: an endpoint's address is the driver's machine's own, and this is another.
        """
        import ray

        plan = self._plan
        teacher = OpenAITeacher(plan.config, None, plan.mode, plan.prompts, shared=self)
        if ray.util.get_node_ip_address() != plan.host:
            for endpoint in teacher.endpoints:
                if _loopback(endpoint.config.base_url):
                    raise InputError(
                        f"{endpoint.config.base_url} is the driver's machine's own address, and workers ask the "
                        "endpoint themselves: give one that all machines reach"
                    )
        self._tasks = [asyncio.create_task(self._guarded(self._send)), asyncio.create_task(self._guarded(self._listen))]
        return teacher

    @property
    def answers(self) -> Answers | None:
        """See `SharedEndpoint.answers`."""
        return self if self._plan.path else None

    def limits(self, config: OpenAITeacherConfig) -> EndpointLimits:
        """See `SharedEndpoint.limits`; doors are numbered as they are made, here as there."""
        whole = self._plan.config
        budgeted = whole.token_budget is not None or whole.money_budget is not None
        self._doors.append(LeasedLimits(len(self._doors), config, self, budgeted=budgeted))
        return self._doors[-1]

    async def form(self, config: OpenAITeacherConfig) -> Form:
        """See `SharedEndpoint.form`."""
        return await unwrapped(self._actor.form.remote(config))

    async def known(self, digest: bytes) -> tuple[str, str] | None:
        """See `Recording.answer`."""
        self._check()
        if (asked := self._looked.get(digest)) is None:
            asked = self._looked[digest] = asyncio.get_running_loop().create_future()
            self.out.put(AskRecorded(digest))
        return await asyncio.shield(asked)

    def keep(self, digest: bytes, answer: str, problem: str = "") -> None:
        """See `Recording.keep`."""
        self._kept += 1
        self.out.put(KeepAnswer(digest, answer, problem))

    async def flushed(self) -> None:
        """Wait until all that was kept so far is on the actor's disk."""
        upto = self._kept
        while self._durable < upto:
            self._check()
            await self._changed.wait()

    async def in_touch(self) -> None:
        """Wait while leases are in doubt: nothing has been heard for `LEASE_SECONDS`."""
        self._check()
        while self.now() - self._heard > LEASE_SECONDS:
            await self._changed.wait()
            self._check()

    def ticket(self) -> int:
        """The number of one more request."""
        self._tickets += 1
        return self._tickets

    async def granted(self, ticket: int, letter: Letter) -> None:
        """Send a letter and wait for its grant. Raises the `Stopped` that came instead."""
        self._check()
        place = self._grants[ticket] = asyncio.get_running_loop().create_future()
        self.out.put(letter, urgent=True)
        try:
            await place
        finally:
            self._grants.pop(ticket, None)

    async def close(self) -> None:
        """Say what is still to be said, and hang up."""
        if self._tasks:
            sending, listening = self._tasks
            self._closing = True
            self.out.hurry()
            await sending
            listening.cancel()

    async def _guarded(self, work: Any) -> None:
        """What ends the line ends all that wait on it."""
        import ray.exceptions

        try:
            await work()
        except ray.exceptions.RayTaskError as error:
            self._broken = error.cause
        except ray.exceptions.RayError as error:
            self._broken = Stopped(
                f"the process that hands out the endpoint's limits has ended ({type(error).__name__})",
                "what was answered is recorded; run the same command again to go on",
            )
        except Exception as error:
            self._broken = error
        if self._broken is not None:
            for limits in self._doors:
                limits.slots.fail(self._broken)
            places: list[asyncio.Future[Any]] = [*self._looked.values(), *self._grants.values()]
            for place in places:
                if not place.done():
                    place.set_exception(self._broken)
            self._notify()

    async def _send(self) -> None:
        while len(self.out) or not self._closing:
            letters = await self.out.empty()
            letters += [want for door in self._doors if (want := door.slots.want()) is not None]
            await self._actor.tell.remote(self._worker, ENCODER.encode(letters))

    async def _listen(self) -> None:
        while True:
            letters = _decoder.decode(await self._actor.hear.remote(self._worker))
            self._heard = self.now()
            for letter in letters:
                self._read(letter)
            self._notify()

    def _read(self, letter: ToWorker) -> None:
        match letter:
            case RecordedAnswer(digest, answer, problem):
                place = self._looked.pop(digest)
                if not place.done():
                    place.set_result(None if answer is None else (answer, problem))
            case Kept(count):
                self._durable = count
            case SlotLease(door, slots):
                self._doors[door].slots.leased(slots)
            case Recall(door, most):
                self._doors[door].slots.recall(most)
            case Grant(ticket):
                if (waiting := self._grants.get(ticket)) is not None and not waiting.done():
                    waiting.set_result(None)
            case Refuse(ticket, stopped):
                if (waiting := self._grants.get(ticket)) is not None and not waiting.done():
                    waiting.set_exception(pickle.loads(stopped))
            case Pause(door, seconds):
                self._doors[door].hold(seconds)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _loopback(url: str) -> bool:
    """Whether an address is the machine's own, which another machine takes for itself."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
