"""Run a user's environments and rewards in processes of their own. `own_workers.py` is the trainer's side.

The trainer starts one process, which loads the objects once. It forks a *worker* for each episode: the fork is
the episode's copy of everything, class attributes and module globals included. A worker carries out one request after
the other; once something asynchronous comes, it runs an event loop. It can be killed at any moment.

    trainer -> process   list of objects to load. Then ("open", token) with a descriptor, or ("kill", token)
    process -> trainer   success of the load. Then (token, exit code) of workers that ended by themselves
    trainer -> worker    (number, action, position of the object, arguments), pickled
    worker  -> trainer   (number, kind, text or number), MessagePack: what a worker writes is never unpickled
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import hashlib
import inspect
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, Final, Literal, NoReturn

import msgspec

from astra_jax.base.files import first_line
from astra_jax.base.terminal import say
from sandbox import libc
from sandbox.json_values import NotJsonError, to_json
from sandbox.protocol import ERROR_CHARACTERS, frame
from synthesis.core.environment import PlayedEpisode
from synthesis.core.object_tools import note_tools, object_tools
from synthesis.core.references import load_file, referred

HELLO: Final = 0
"""Number of a worker's first message."""
_MOST_CHARACTERS: Final = 10_000_000
"""Longest JSON text of a result; the model is shown far less."""
_PR_SET_PDEATHSIG: Final = 1
_FIRST_TO_GO: Final = "1000"
"""Score of a worker for the kernel's out-of-memory killer, which is to spare the trainer."""

Kind = Literal["ok", "error", "share", "no_share"]


@dataclasses.dataclass(frozen=True)
class Order:
    """Objects that a process loads.

    Attributes:
        files: the user's modules that were loaded by path.
        reference: import path of the environments; "" if they are pickled.
    """

    files: Sequence[str]
    reference: str


@dataclasses.dataclass(frozen=True)
class Known:
    """Stands for an object that a process has loaded, in what is sent to its workers."""

    position: int


def listed(found: Any) -> list[Any]:
    """Return the environments that an object of the user's is, holds, or makes."""
    made: Any = found() if inspect.isfunction(found) or inspect.isclass(found) else found
    several = isinstance(made, Iterable) and not (hasattr(made, "question") or hasattr(made, "begin"))
    return list(made) if several else [made]


def questions_digest(subjects: Iterable[Any]) -> str:
    """Return what tells one list of environments from another."""
    asked = [str(getattr(one, "question", "")) for one in subjects]
    return hashlib.sha256(repr(asked).encode("utf-8", "replace")).hexdigest()


def named(error: BaseException) -> str:
    """Return an error of foreign code as a line, whatever its own methods do."""
    try:
        said = first_line(error)
    except BaseException:
        said = ""
    kind = type(error).__name__
    text = f"{kind}: {said}" if said and said != kind else kind
    return text[:ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def number_of(value: Any) -> float:
    """Convert a score to a float. Raises `TypeError`, `ValueError` or `OverflowError`: it is not a number."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("a text is not a number, though `float` reads some")
    return float(value)


# ---------------------------------------------------------------------------------------------------------------------
# The process


class _Zygote:
    """Forks workers, and keeps their process ids, so that each can be killed with everything that it started."""

    def __init__(self, control: Connection, objects: Sequence[Any]) -> None:
        self._control, self._objects = control, objects
        self._notices = socket.socket(fileno=os.dup(control.fileno()))
        self._workers: dict[int, int] = {}  # process id by token
        self._killed: set[int] = set()  # process ids, not yet reaped
        self._ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._ended, False)
        signal.signal(signal.SIGCHLD, lambda number, at: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._ended:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._ended, 1 << 16)
                    self._reap()
                    continue
                try:
                    action, token = pickle.loads(self._control.recv_bytes())
                except (EOFError, OSError):
                    self._leave()
                if action == "open":
                    self._open(token, recv_handle(self._control))
                elif (pid := self._workers.pop(token, None)) is not None:
                    self._killed.add(pid)
                    _kill_group(pid)

    def _open(self, token: int, descriptor: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's of threads that a user's module has started
                pid = os.fork()
        except OSError as error:  # the trainer sees the socket close
            say(f"no worker could be forked: {error}", file=sys.stderr)
            os.close(descriptor)
            return
        if pid == 0:
            self._become_worker(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # as the worker does: whoever comes first
        self._workers[token] = pid

    def _become_worker(self, descriptor: int) -> NoReturn:
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write(_FIRST_TO_GO)
            for one in (self._ended, self._wake):
                os.close(one)
            self._notices.close()
            self._control.close()
            _Worker(Connection(descriptor), self._objects).serve()
        except BaseException:  # of a task that the user's code has left behind
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        tokens = {pid: token for token, pid in self._workers.items()}
        for pid in [*tokens, *self._killed]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)  # what it has left running; its id is still its own
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._killed.discard(pid)
            if (token := tokens.get(pid)) is not None:
                del self._workers[token]
                with contextlib.suppress(OSError):  # a notice that finds no room says less, and blocks nobody
                    self._notices.send(frame(msgspec.msgpack.encode((token, code))), socket.MSG_DONTWAIT)

    def _leave(self) -> NoReturn:
        for pid in [*self._workers.values(), *self._killed]:
            _kill_group(pid)
        os._exit(0)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a worker that was just forked has no group yet
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# A worker


class _Worker:
    def __init__(self, connection: Connection, objects: Sequence[Any]) -> None:
        self._connection, self._objects = connection, objects
        self._running: dict[int, asyncio.Task[None]] = {}  # by number

    def serve(self) -> NoReturn:
        self._reply(HELLO, "ok", "")
        while (waiting := self._take()) is None:
            pass
        asyncio.run(self._serve_asynchronously(waiting))
        os._exit(0)

    async def _serve_asynchronously(self, first: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def take() -> None:
            if (begin := self._take()) is not None:
                begin()

        loop.add_reader(self._connection.fileno(), take)
        first()
        await loop.create_future()  # for ever: the process ends with its connection

    def _take(self) -> Callable[[], None] | None:
        """Carry out the next request. Returns what starts the rest of it, which needs an event loop."""
        try:
            number, action, position, given = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if action == "cancel":
            if (task := self._running.get(number)) is not None:
                task.cancel()
            return None
        try:
            finish, made = self._begin(action, position, given)
            if not inspect.isawaitable(made):
                self._reply(number, *finish(made))
                return None
        except BaseException as error:  # SystemExit and StopIteration are errors of the code that raised them
            self._reply(number, "error", named(error))
            return None

        def start() -> None:
            task = asyncio.get_running_loop().create_task(self._finish(number, finish, made))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))

        return start

    async def _finish(self, number: int, finish: Callable[[Any], tuple[Kind, Any]], made: Awaitable[Any]) -> None:
        try:
            reply = finish(await made)
        except BaseException as error:
            reply = "error", named(error)
        self._reply(number, *reply)

    def _begin(self, action: str, position: int, given: Any) -> tuple[Callable[[Any], tuple[Kind, Any]], Any]:
        """Call the user's code. Returns a function that encodes its result, and the result or an awaitable of it."""
        if action == "ping":
            return lambda made: ("ok", ""), None
        subject = self._objects[position]
        if action == "close":
            return lambda made: ("ok", ""), subject.close()
        if action in ("score", "reward"):
            episode: PlayedEpisode = given
            if isinstance(known := episode.environment, Known):
                episode = dataclasses.replace(episode, environment=self._objects[known.position])
            return _share, (subject.score(episode) if action == "score" else subject(episode))
        tool: str
        arguments: Mapping[str, Any]
        tool, arguments = given
        try:
            converted = object_tools(subject).converted(tool, arguments)
        except ValueError as error:
            problem = f"invalid arguments: {error}"
            return lambda made: ("error", problem), None
        return functools.partial(_result, tool), getattr(subject, tool)(**converted)

    def _reply(self, number: int, kind: Kind, value: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode((number, kind, value)))
        except OSError:  # the trainer has gone
            os._exit(0)


def _result(tool: str, value: Any) -> tuple[Kind, Any]:
    try:
        text = json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":"))
    except NotJsonError as error:
        return "error", f"{tool} returned what JSON cannot hold: {first_line(error)}"
    if len(text) > _MOST_CHARACTERS:
        return "error", f"{tool} returned {len(text):,} characters of JSON; return at most {_MOST_CHARACTERS:,}"
    return "ok", text


def _share(value: Any) -> tuple[Kind, Any]:
    try:
        return "share", number_of(value)
    except (TypeError, ValueError, OverflowError):
        return "no_share", f"{value!r:.80}".encode("utf-8", "replace").decode()


# ---------------------------------------------------------------------------------------------------------------------


def _load(order: Order, pickled: bytes) -> list[Any]:
    for file in order.files:
        load_file(file)
    found = listed(referred(order.reference)) if order.reference else []
    objects = [one for one in found if not hasattr(one, "begin")]
    annotations, more = pickle.loads(pickled)
    note_tools(annotations)
    for one in objects:
        object_tools(one)  # workers find them made
    return [*objects, *more]


def main(descriptor: int) -> NoReturn:
    """Load what the trainer sends, and serve it until the trainer has gone."""
    control = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    try:
        order, pickled = pickle.loads(control.recv_bytes()), control.recv_bytes()
        objects = _load(order, pickled)
        reply = True, questions_digest(objects)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        reply = False, named(error)
    del pickled
    control.send_bytes(msgspec.msgpack.encode(reply))
    if not reply[0]:
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    _Zygote(control, objects).serve()
