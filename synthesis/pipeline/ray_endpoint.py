"""An endpoint that Ray's workers share: they ask it themselves, under leases that one actor hands out.

The actor, on the driver's machine, has the recording, the budget and the rates. How many requests are in flight is
leased for as long as it is used (`SlotPool`); a minute's requests and tokens, and what the budget has left, are granted
for the requests that wait for them, many in one message. So limits hold for all workers together, exactly as for one
process. What a worker was granted comes back when it dies: its slots at once, and its requests are booked with what
they can have cost. Without a limit nothing is waited for; that a request was begun is told all the same.

A worker that hears nothing for `LEASE_SECONDS` begins no request any more, so that one out of reach, which Ray gives up
only later, does not go on with what others have been given.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from synthesis.core.endpoint import Endpoint
from synthesis.core.endpoint_limits import Permit, TokenEstimate
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.progress import TRAFFIC, Traffic
from synthesis.core.rate_limits import Spent, Usage
from synthesis.core.refusals import Refusal
from synthesis.core.stages import Stopped
from synthesis.core.typed import msgpack_decoder
from synthesis.pipeline.answer_forms import Form
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.ray_mail import Mailbox
from synthesis.pipeline.slot_pool import SlotPool
from synthesis.pipeline.teacher import Mode, OpenAITeacher

LEASE_SECONDS = 10.0
HEARD_SECONDS = 2.0
"""At least so often a worker hears of the actor."""


class Letter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message between a worker and the actor; `door` is the number of one of the teacher's endpoints."""


class AskRecorded(Letter, frozen=True, array_like=True, tag=True):
    """Whether a request's answer is recorded."""

    digest: bytes


class KeepAnswer(Letter, frozen=True, array_like=True, tag=True):
    """Record an answer, or why there is none."""

    digest: bytes
    answer: str
    problem: str


class Want(Letter, frozen=True, array_like=True, tag=True):
    """So many slots could be used at the moment."""

    door: int
    slots: int


class GiveBack(Letter, frozen=True, array_like=True, tag=True):
    """So many slots are held no more."""

    door: int
    slots: int


class Begin(Letter, frozen=True, array_like=True, tag=True):
    """A request has its slot; `wait`: it waits for its part of the budget.

    Attributes:
        most: prompt and completion tokens that it can cost.
    """

    ticket: int
    door: int
    kind: str
    size: int
    most: tuple[int, int]
    stage: str
    wait: bool


class Take(Letter, frozen=True, array_like=True, tag=True):
    """It waits for its place in this minute."""

    ticket: int


class End(Letter, frozen=True, array_like=True, tag=True):
    """It is over.

    Attributes:
        used: prompt and completion tokens; None: nothing.
        answered: others of its kind will be as long.
        sent: it had begun.
    """

    ticket: int
    used: tuple[int, int] | None
    answered: bool
    sent: bool


class Pause(Letter, frozen=True, array_like=True, tag=True):
    """Nobody asks for so long: the endpoint said so."""

    door: int
    seconds: float


ToActor = AskRecorded | KeepAnswer | Want | GiveBack | Begin | Take | End | Pause


class RecordedAnswer(Letter, frozen=True, array_like=True, tag=True):
    """What is recorded for a request; `answer` is None where nothing is."""

    digest: bytes
    answer: str | None
    problem: str


class Kept(Letter, frozen=True, array_like=True, tag=True):
    """So many of a worker's answers, from its first on, are on the disk."""

    count: int


class SlotLease(Letter, frozen=True, array_like=True, tag=True):
    """So many slots more."""

    door: int
    slots: int


class Recall(Letter, frozen=True, array_like=True, tag=True):
    """Others want slots: so many may be kept, of those that are used."""

    door: int
    most: int


class Grant(Letter, frozen=True, array_like=True, tag=True):
    """What a request waited for is its own."""

    ticket: int


class Refuse(Letter, frozen=True, array_like=True, tag=True):
    """The run ends instead: a pickled `Stopped`."""

    ticket: int
    stopped: bytes


ToWorker = RecordedAnswer | Kept | SlotLease | Recall | Grant | Refuse | Pause

ENCODER = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(list[ToActor])


@dataclass(frozen=True)
class EndpointPlan:
    """What a worker needs to ask the endpoint as the actor's teacher would.

    Attributes:
        path: of the recording, on the machine at `host`.
        described: see `teacher.description`.
    """

    config: OpenAITeacherConfig
    mode: Mode
    prompts: Prompts
    path: str
    host: str
    described: Mapping[str, Any]


@dataclass
class _Request:
    """Of a worker, which has begun it and not ended it."""

    endpoint: Endpoint
    permit: Permit
    counted: bool = False
    """Against the budget, as one that is in flight."""
    waiting: asyncio.Task[None] | None = None


@dataclass
class _Asker:
    """What the actor knows of a worker.

    Attributes:
        kept: answers that it gave to keep; `durable`: how many of them it was told are on the disk.
        recalled: by door, what it was last told to keep, since it last got or gave back slots.
    """

    out: Mailbox[ToWorker] = field(default_factory=lambda: Mailbox(0.0))
    requests: dict[int, _Request] = field(default_factory=dict)
    kept: int = 0
    durable: int = 0
    recalled: dict[int, int] = field(default_factory=dict)


class EndpointActor:
    """Hands out leases, and keeps the books and the recording."""

    COMMIT_SECONDS = 0.05

    def __init__(self, make: Callable[[], OpenAITeacher]) -> None:
        self._make = make
        self._made: OpenAITeacher | None = None
        self._askers: dict[str, _Asker] = {}
        self._lost: set[str] = set()
        self._pools: list[SlotPool] = []
        self._commit: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._probing = asyncio.Lock()

    def plan(self) -> EndpointPlan:
        import ray

        teacher = self._teacher()
        path = "" if teacher.recording is None else str(teacher.recording.path)
        host = ray.util.get_node_ip_address()
        return EndpointPlan(teacher.config, teacher.mode, teacher.prompts, path, host, teacher.description)

    def traffic(self) -> Traffic:
        return TRAFFIC

    async def costs(self) -> Mapping[str, Spent]:
        return self._teacher().spent_by_stage

    async def form(self, config: OpenAITeacherConfig) -> Form:
        """How an endpoint is asked for answers, found by requests of the actor's own, in slots as all are."""
        teacher, name = self._teacher(), "actor"
        async with self._probing:
            door = teacher.endpoints.index(teacher.endpoint_of(config))
            pool = self._pools[door]
            pool.want(name, 1)
            self._deal(door)
            while not pool.held(name):
                await asyncio.sleep(0.01)
            try:
                return await teacher.form_of_answers(config)
            finally:
                pool.lose(name)
                self._deal(door)

    async def tell(self, worker: str, letters: bytes) -> None:
        """What a worker says. Raises what became of the recording, if it cannot be written."""
        self._check(worker)
        asker = self._askers.setdefault(worker, _Asker())
        doors: set[int] = set()
        for letter in _decoder.decode(letters):
            match letter:
                case AskRecorded(digest):
                    recording = self._teacher().recording
                    answer, problem = (None if recording is None else recording.answer(digest)) or (None, "")
                    asker.out.put(RecordedAnswer(digest, answer, problem))
                case KeepAnswer(digest, answer, problem):
                    self._keep(asker, digest, answer, problem)
                case Begin():
                    self._begin(asker, letter)
                case Take(ticket):
                    request = asker.requests[ticket]
                    self._grant(asker, ticket, request.endpoint.limits().take(request.permit))
                case End(ticket, used, answered, sent):
                    TRAFFIC.requests += sent
                    self._end(asker.requests.pop(ticket), None if used is None else Usage(*used), answered=answered)
                case Want(door, slots):
                    asker.recalled.pop(door, None)
                    self._pools[door].want(worker, slots)
                    doors.add(door)
                case GiveBack(door, slots):
                    asker.recalled.pop(door, None)
                    self._pools[door].give_back(worker, slots)
                    doors.add(door)
                case Pause(door, _):
                    for other in self._askers.values():
                        if other is not asker:
                            other.out.put(letter)
                    self._teacher().endpoints[door].limits().pause(letter.seconds)
        for door in doors:
            self._deal(door)

    async def hear(self, worker: str) -> bytes:
        """What a worker is told; waits for something to say, a little. Raises as `tell`."""
        self._check(worker)
        asker = self._askers.setdefault(worker, _Asker())
        said = await asker.out.empty(HEARD_SECONDS)
        self._check(worker)
        return ENCODER.encode(said)

    async def lost(self, worker: str) -> None:
        """A worker is dead: what it was granted is taken back, and what it asked may have been answered."""
        self._lost.add(worker)
        asker = self._askers.pop(worker, _Asker())
        for request in asker.requests.values():
            waits = request.waiting is not None and not request.waiting.done()
            if request.waiting is not None:
                request.waiting.cancel()
            self._end(request, None if waits else request.permit.estimate.most(), answered=False)
        for door, pool in enumerate(self._pools):
            pool.lose(worker)
            self._deal(door)

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()
            if self._made.recording is not None:
                self._made.recording.close()

    def _check(self, worker: str) -> None:
        if self._failure is not None:
            raise self._failure
        if worker in self._lost:
            raise Stopped("a worker that was taken for dead is none", "see to the network between the machines")

    def _begin(self, asker: _Asker, letter: Begin) -> None:
        endpoint, most = self._teacher().endpoints[letter.door], Usage(*letter.most)
        estimate = TokenEstimate(letter.kind, letter.size, lambda: most, letter.stage)
        request = asker.requests[letter.ticket] = _Request(endpoint, Permit(estimate))
        if not letter.wait:
            return

        async def reserve() -> None:
            request.permit = await endpoint.limits().reserve(estimate)
            request.counted = True

        self._grant(asker, letter.ticket, reserve())

    def _grant(self, asker: _Asker, ticket: int, waited_for: Coroutine[Any, Any, None]) -> None:
        """Tell a worker when its request has what it waits for."""

        async def wait() -> None:
            try:
                await waited_for
            except Stopped as stopped:
                asker.out.put(Refuse(ticket, pickle.dumps(stopped)))
            except Exception as error:
                self._fail(error)
            else:
                asker.out.put(Grant(ticket))

        asker.requests[ticket].waiting = asyncio.create_task(wait())

    def _end(self, request: _Request, used: Usage | None, *, answered: bool) -> None:
        if used is not None:
            TRAFFIC.tokens += used.tokens
            request.endpoint.book(used, request.permit.estimate.stage)
        if request.waiting is not None and not request.waiting.done():
            request.waiting.cancel()
        if request.counted:
            request.endpoint.limits().settle(request.permit, used, answered=answered)

    def _deal(self, door: int) -> None:
        """Lease what is free, and call back what others have too much of."""
        pool = self._pools[door]
        for name, slots in pool.deal().items():
            if (asker := self._askers.get(name)) is not None:
                asker.recalled.pop(door, None)
                asker.out.put(SlotLease(door, slots))
        for name, most in pool.recalls().items():
            asker = self._askers.get(name)
            if asker is not None and asker.recalled.get(door) != most:
                asker.recalled[door] = most
                asker.out.put(Recall(door, most))

    def _keep(self, asker: _Asker, digest: bytes, answer: str, problem: str) -> None:
        recording = self._teacher().recording
        assert recording is not None, "a teacher that records has a recording"
        recording.keep(digest, answer, problem)
        asker.kept += 1
        # The journal is another process's: an answer that it may build on has to be on the disk before.
        self._commit = self._commit or asyncio.create_task(self._soon())

    async def _soon(self) -> None:
        await asyncio.sleep(self.COMMIT_SECONDS)  # one commit for many answers
        self._commit = None
        recording = self._teacher().recording
        try:
            if recording is not None:
                recording.commit()
        except Refusal as failure:
            self._fail(failure)
        for asker in self._askers.values():
            if asker.durable < asker.kept:
                asker.durable = asker.kept
                asker.out.put(Kept(asker.kept))

    def _fail(self, error: Exception) -> None:
        """Whoever tells or hears something learns of it."""
        self._failure = self._failure or error
        for asker in self._askers.values():
            asker.out.hurry()

    def _teacher(self) -> OpenAITeacher:
        if self._made is None:
            self._made = self._make()
            self._pools = [SlotPool(one.config.concurrency) for one in self._made.endpoints]
        return self._made
