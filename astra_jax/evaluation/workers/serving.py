"""Server in a harness's environment that forks a process for every item. Standard library only.

    python worker.py SOCKET

The program imports its harness once, listens on a Unix socket, prints `ready`, and forks for each connection. The child
answers that connection's requests and ends with it. So an item's data in the harness's globals (BFCL keeps its
simulators there) is gone with its process, and nothing is imported twice.

A request is one line of JSON, {"method": NAME, "params": {...}}. An answer is one line, {"result": ...} or {"error":
"TYPE: message", "trace": ...}. Before it answers, a method may send a request itself (`ask`), {"ask": NAME, "params":
{...}}, and gets {"reply": ...}. The program ends when its standard input is closed, so it ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

Methods = Mapping[str, Callable[..., Any]]
_heard: BinaryIO | None = None
"""Messages from the other side, in a process that answers it."""


class Unheard(BaseException):
    """The other side of the connection is gone. Not an `Exception`, so that a harness that catches those stops too."""


def serve(path: str, methods: Callable[[], Methods]) -> None:
    """Serve until standard input is closed.

    Args:
        path: path of the Unix socket.
        methods: called in every child before its first request; returns the methods by name.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1024)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready and not os.read(0, 1):
                os.killpg(0, signal.SIGKILL)  # children too: nobody hears them any more
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    os.dup2(2, 1)  # what a harness prints is no answer
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a harness may wait for its own children
                    answer(connection.detach(), methods)
                    os._exit(0)
                connection.close()


def answer(channel: int, methods: Callable[[], Methods]) -> None:
    """Answer requests until the other side closes the connection.

    Args:
        channel: descriptor of a stream. It is read and written as a file, since a locked process may not use socket
            calls.
        methods: as in `serve`.
    """
    global _heard
    known: Methods | None = None
    with open(channel, "rb") as requests:
        _heard = requests
        while line := requests.readline():
            try:
                request = json.loads(line)
                known = known if known is not None else methods()
                encoded = json.dumps({"result": known[request["method"]](**request["params"])})
            except Unheard:
                return
            except BaseException as error:  # the other side decides what becomes of it
                trace = traceback.format_exc()
                encoded = json.dumps({"error": f"{type(error).__name__}: {error}", "trace": trace})
            _write(channel, encoded)


def ask(name: str, /, **params: Any) -> Any:
    """Send a request to the other side from inside a method, and return the reply.

    With it, a locked process without network can request a completion.

    Raises:
        Unheard: the other side is gone.
    """
    assert _heard is not None, "only a process that answers another can ask it"
    try:
        _write(_heard.fileno(), json.dumps({"ask": name, "params": params}))
        line = _heard.readline()
    except OSError as error:
        raise Unheard(f"{name}: {error}") from None
    if not line:
        raise Unheard(f"{name}: nobody answers any more")
    return json.loads(line)["reply"]


def _write(channel: int, line: str) -> None:
    rest = memoryview(line.encode() + b"\n")
    while rest:
        rest = rest[os.write(channel, rest) :]
