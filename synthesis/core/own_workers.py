"""Call a user's environments and rewards in their own processes, and kill processes that hang. See `own_process.py`.

    workers = OwnWorkers([environment_object])
    worker = await workers.open()                                   # a copy of the object, for one episode
    kind, text = await worker.ask("call", 0, ("stock_of", {"item": "bolts"}), seconds=60)
    worker.kill()

Objects are pickled by value where a process could not import them (cloudpickle); locks arrive unlocked. Other objects
are imported in the process, by the name that the user gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Final

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.terminal import say
from sandbox.protocol import FrameReader, frame
from synthesis.core.environment import PlayedEpisode, ToolsUnavailable
from synthesis.core.object_tools import object_tools
from synthesis.core.own_pickling import by_value, pickling_problem
from synthesis.core.own_process import HELLO, Kind, Known, Order, named, questions_digest
from synthesis.core.references import loaded_files

LOAD_SECONDS: Final = 600.0
"""For a process to import the user's modules and to load the objects."""
MOST_AT_ONCE: Final = 64
"""Rewards that are not `async` and are asked at once, each in a worker of its own."""
_OPENING_AT_ONCE: Final = 16
_OPEN_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0
_PING_SECONDS: Final = 5.0
_PRINTED_BYTES: Final = 64 << 10
_PRINTED_SECONDS: Final = 60.0
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from synthesis.core.own_process import main; main(int(sys.argv[1]))"
)


class OwnCodeError(Exception):
    """Foreign code raised, or gave what is of no use; the message is a predicate: "raised KeyError: 'bolts'"."""


class WorkerDied(OwnCodeError):
    """A worker did not answer in time and was killed, or its process ended.

    Attributes:
        late: it was killed.
    """

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class OwnWorker(asyncio.Protocol):
    """A forked process, which holds a copy of all objects. It is killed at its end, with everything that it started."""

    def __init__(self, zygote: _Zygote, token: int) -> None:
        self._zygote, self._token = zygote, token
        self._loop = asyncio.get_running_loop()
        self._frames, self._numbers = FrameReader(), itertools.count(HELLO + 1)
        self._waiting: dict[int, asyncio.Future[tuple[Kind, Any]]] = {}
        self._transport: asyncio.Transport | None = None
        self._end = ""
        self.hello = self._expect(HELLO)

    @property
    def is_alive(self) -> bool:
        """True if it accepts requests."""
        return self._transport is not None

    async def ask(
        self, action: str, position: int, given: Any, *, seconds: float | None = None, kills: bool = True
    ) -> tuple[Kind, Any]:
        """Return what the worker answers to a request.

        Args:
            action: `call`, `score`, `reward`, `close` or `ping`.
            position: of the object among those of the process.
            given: tool and arguments, or an episode.
            seconds: for the answer; None: the caller cancels.
            kills: whether an answer that is late or no longer wanted kills the worker.

        Raises:
            WorkerDied: it was late, or its process ended.
            ToolsUnavailable: not through its own doing.
        """
        if self._transport is None:
            raise self._death()
        number = next(self._numbers)
        pickled = by_value if action in ("score", "reward") else pickle.dumps
        try:
            request = pickled((number, action, position, given))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's objects raise
            raise OwnCodeError(f"cannot be sent an episode that cannot be pickled ({named(error)})") from error
        future = self._expect(number)
        self._transport.write(frame(request))
        # A timer, not `asyncio.timeout`: after a pause of the whole loop the answer that is there already counts.
        timer = None if seconds is None else self._loop.call_later(seconds, self._late, future, seconds)
        try:
            return await future
        except (WorkerDied, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) or error.late:
                if kills:
                    self.kill(str(error) or "was given up")
                elif self._transport is not None:
                    self._transport.write(frame(pickle.dumps((number, "cancel", position, None))))
            raise
        finally:
            self._waiting.pop(number, None)
            if timer is not None:
                timer.cancel()

    def kill(self, why: str = "was closed") -> None:
        """End its process."""
        if self._transport is not None:
            self._end = why
            self._transport.abort()
            self._transport = None
        self._zygote.kill(self._token)
        self._fail()

    def ended(self, code: int) -> None:
        """Note the exit code of its process, which ended by itself."""
        reason = f"exit code {code}" if code >= 0 else _signal_name(-code)
        self._end = f"ended its process ({reason})"
        if self._transport is None:  # else there may be an answer that is still to be read
            self._fail()

    def _expect(self, number: int) -> asyncio.Future[tuple[Kind, Any]]:
        future = self._waiting[number] = self._loop.create_future()
        return future

    @staticmethod
    def _late(future: asyncio.Future[tuple[Kind, Any]], seconds: float) -> None:
        if not future.done():
            future.set_exception(WorkerDied(f"did not answer in {seconds:g} s", late=True))

    def _death(self) -> Exception:
        if not (self._end or self._zygote.is_alive):
            return ToolsUnavailable("the process of own code was killed from outside")
        return WorkerDied(self._end or "ended its process")

    def _fail(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._death())
                future.exception()  # nobody need ask for it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for message in self._frames.feed(data):
            number, kind, value = msgspec.msgpack.decode(message)
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result((kind, value))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio. The exit code comes by another way, and a little later."""
        if self._transport is not None:
            self._transport = None
            self._loop.call_later(0 if self._end else _END_SECONDS, self._fail)


class _Zygote:
    """The process that workers are forked from. It is killed, with all of them, when nobody refers to it any more."""

    def __init__(self, order: Order, sent: bytes, digest: str) -> None:
        """Start it, and wait until it has loaded everything. Blocks. Raises `ToolsUnavailable`."""
        ours, theirs = socket.socketpair()
        self._control = Connection(ours.detach())
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        finally:
            theirs.close()
            os.close(writer)
        self._end = weakref.finalize(self, _end_process, self._process, self._control)
        threading.Thread(target=_print, args=(reader,), name="own-code", daemon=True).start()
        self._tokens = itertools.count()
        self._workers: weakref.WeakValueDictionary[int, OwnWorker] = weakref.WeakValueDictionary()
        self._opening = asyncio.Semaphore(_OPENING_AT_ONCE)
        self.asking, self.idle = asyncio.Semaphore(MOST_AT_ONCE), list[OwnWorker]()
        self.sharing = asyncio.Lock()
        self.shared: OwnWorker | None = None  # of all asynchronous rewards
        self._load(order, sent, digest)

    def _load(self, order: Order, sent: bytes, digest: str) -> None:
        watch = threading.Timer(LOAD_SECONDS, self._process.kill)
        watch.start()
        try:
            self._control.send_bytes(pickle.dumps(order))
            self._control.send_bytes(sent)
            is_loaded, said = msgspec.msgpack.decode(self._control.recv_bytes())
        except (EOFError, OSError):
            self._end()
            code = self._process.poll()
            why = f"its process ended with {code}, after at most {LOAD_SECONDS:g} s; what it printed is above"
            is_loaded, said = False, why
        finally:
            watch.cancel()
        if not is_loaded:
            raise ToolsUnavailable(f"own code cannot be loaded in a process of its own: {said}")
        if order.reference and said != digest:
            raise ToolsUnavailable(
                f"{order.reference} gives other environments each time that it is imported; have it make the same "
                "ones, or objects that can be pickled"
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the notices of the process."""
        notices, descriptor = FrameReader(), self._control.fileno()
        mine = weakref.ref(self)

        def read() -> None:
            data, zygote = os.read(descriptor, 1 << 16), mine()
            if not data or zygote is None:
                loop.remove_reader(descriptor)
                return
            for message in notices.feed(data):
                token, code = msgspec.msgpack.decode(message)
                if (worker := zygote._workers.get(token)) is not None:
                    worker.ended(code)

        loop.add_reader(descriptor, read)
        weakref.finalize(self, _detach, loop, descriptor)

    async def open(self) -> OwnWorker:
        """Fork a worker. Raises `ToolsUnavailable`."""
        async with self._opening:
            token, (ours, theirs) = next(self._tokens), socket.socketpair()
            try:
                with theirs:
                    self._control.send_bytes(pickle.dumps(("open", token)))
                    send_handle(self._control, theirs.fileno(), None)
                ours.setblocking(False)
                loop = asyncio.get_running_loop()
                _, worker = await loop.create_unix_connection(functools.partial(OwnWorker, self, token), sock=ours)
            except OSError as error:
                ours.close()
                raise ToolsUnavailable(f"no worker for own code could be started: {error}") from error
            self._workers[token] = worker
            try:
                async with asyncio.timeout(_OPEN_SECONDS):
                    await worker.hello
            except BaseException as error:
                worker.kill()
                if isinstance(error, TimeoutError | WorkerDied):
                    raise ToolsUnavailable("no worker for own code could be started; see what was printed") from error
                raise
            return worker

    def kill(self, token: int) -> None:
        """Have a worker's process killed."""
        with contextlib.suppress(OSError):
            self._control.send_bytes(pickle.dumps(("kill", token)))


class OwnWorkers:
    """The processes of a list of objects: environments, rewards.

    Args:
        objects: what workers hold copies of.
        reference: what the user named the environments by, `my_module:my_name`; "" where there is no name.

    Raises:
        InputError: an object cannot be pickled, and there is no name by which it could be imported.
    """

    def __init__(self, objects: Sequence[Any], reference: str = "") -> None:
        self._objects = list(objects)
        self._own = len(self._objects)
        self._reference = ""
        self._starting: asyncio.Task[_Zygote] | None = None
        self._started_for: tuple[asyncio.AbstractEventLoop, int] | None = None
        if objects and (problem := pickling_problem(self._objects)):
            if not reference:
                raise InputError(
                    f"environment {type(objects[0]).__name__}: it cannot be copied to the process of its episode "
                    f"({problem}); open what it holds on first use, or name it by --environments=my_module:my_name"
                )
            self._reference = reference

    def add(self, function: Callable[..., Any]) -> int:
        """Return the position of a reward, which is added where it is new.

        Raises:
            InputError: it cannot be pickled.
        """
        for position, one in enumerate(self._objects[self._own :], self._own):
            if one is function:
                return position
        if problem := pickling_problem(function):
            raise InputError(f"it cannot be copied to a process of its own ({problem}); define it in a module")
        self._objects.append(function)
        return len(self._objects) - 1

    def _sent_objects(self) -> Any:
        """Return the data sent to a process: the annotations of the environments' tools, and the objects."""
        if self._reference:
            return {}, self._objects[self._own :]
        kinds = {type(one): one for one in self._objects[: self._own]}
        return {kind: object_tools(one).annotations for kind, one in kinds.items()}, self._objects

    async def open(self) -> OwnWorker:
        """Fork a worker. Raises `ToolsUnavailable`: the objects cannot be loaded, or no process can be had."""
        return await (await self._zygote()).open()

    def sent(self, episode: PlayedEpisode) -> PlayedEpisode:
        """Return an episode in which a loaded object stands by its position."""
        position = next((at for at, one in enumerate(self._objects) if one is episode.environment), None)
        return episode if position is None else dataclasses.replace(episode, environment=Known(position))

    async def reward(self, position: int, episode: PlayedEpisode, *, seconds: float) -> float:
        """Return what a reward gives for an episode.

        Raises:
            OwnCodeError: it raised, gave no number, was late, or ended its process.
            ToolsUnavailable: no process can be had.
        """
        zygote, given = await self._zygote(), self.sent(episode)
        if not _is_asynchronous(self._objects[position]):
            return share_of(await _ask_alone(zygote, position, given, seconds))
        try:
            return share_of(await _ask_shared(zygote, position, given, seconds))
        except WorkerDied as error:
            if error.late:
                raise
        return share_of(await _ask_alone(zygote, position, given, seconds))  # another may have ended the process

    async def _zygote(self) -> _Zygote:
        wanted = asyncio.get_running_loop(), len(self._objects)
        starting = self._starting
        if starting is None or self._started_for != wanted or _is_over(starting):
            self._started_for = wanted
            self._starting = starting = wanted[0].create_task(self._start())
        return await asyncio.shield(starting)

    async def _start(self) -> _Zygote:
        def start() -> _Zygote:
            digest = questions_digest(self._objects)
            return _Zygote(Order(loaded_files(), self._reference), by_value(self._sent_objects()), digest)

        zygote = await asyncio.to_thread(start)
        zygote.attach(asyncio.get_running_loop())
        return zygote


def _is_over(starting: asyncio.Task[_Zygote]) -> bool:
    """Return whether a start has failed, or the started process has ended."""
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or not starting.result().is_alive


def workers_of(environment: Any) -> OwnWorkers | None:
    """Return the processes that have an environment's object, where it has such."""
    found = getattr(environment, "workers", None)
    return found if isinstance(found, OwnWorkers) else None


async def _ask_alone(zygote: _Zygote, position: int, given: PlayedEpisode, seconds: float) -> tuple[Kind, Any]:
    """Ask a reward in a worker that nobody else asks meanwhile."""
    async with zygote.asking:
        while zygote.idle and not zygote.idle[-1].is_alive:
            zygote.idle.pop()
        worker = zygote.idle.pop() if zygote.idle else await zygote.open()
        try:
            return await worker.ask("reward", position, given, seconds=seconds)
        finally:
            if worker.is_alive:
                zygote.idle.append(worker)


async def _ask_shared(zygote: _Zygote, position: int, given: PlayedEpisode, seconds: float) -> tuple[Kind, Any]:
    """Ask an `async` reward, in the worker in which all such run at once."""
    async with zygote.sharing:
        if zygote.shared is None or not zygote.shared.is_alive:
            zygote.shared = await zygote.open()
        worker = zygote.shared
    try:
        return await worker.ask("reward", position, given, seconds=seconds, kills=False)
    except WorkerDied as error:
        if error.late:
            with contextlib.suppress(WorkerDied, ToolsUnavailable):  # it is killed, if its loop stands still
                await worker.ask("ping", 0, None, seconds=_PING_SECONDS)
        raise


def share_of(reply: tuple[Kind, Any]) -> float:
    """Return the number of a reply. Raises `OwnCodeError`: there is none."""
    kind, value = reply
    if kind == "error":
        raise OwnCodeError(f"raised {value}")
    if kind == "no_share":
        raise OwnCodeError(f"gave {value}, which is not a number from 0 to 1")
    return float(value)


# ---------------------------------------------------------------------------------------------------------------------
# The process, from outside


def _is_asynchronous(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _detach(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    if not loop.is_closed():
        loop.remove_reader(descriptor)


def _end_process(process: subprocess.Popen[bytes], control: Connection) -> None:
    """End the process: closing its connection makes it kill its workers and exit."""
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _print(descriptor: int) -> None:
    """Show what own code prints on standard error: so much a minute, since what it prints may be a model's choice."""
    began, shown, hidden = time.monotonic(), 0, 0
    with open(descriptor, "rb", closefd=True) as printed:
        while data := printed.readline(_PRINTED_BYTES):
            if time.monotonic() - began > _PRINTED_SECONDS:
                began, shown = time.monotonic(), 0
            if shown + len(data) > _PRINTED_BYTES:
                hidden += len(data)
                continue
            if hidden:
                say(f"own code printed {hidden:,} bytes more, which are not shown", file=sys.stderr)
                hidden = 0
            shown += len(data)
            say(f"own code: {data.decode('utf-8', 'replace').rstrip()}", file=sys.stderr)
    if hidden:
        say(f"own code printed {hidden:,} bytes more, which are not shown", file=sys.stderr)
