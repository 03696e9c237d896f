"""Process in a harness's environment that is locked before it acts on model output. Standard library only.

The layers are those of the project's `sandbox`. That package is loaded by itself, because its folder may be the
site-packages of our own environment, which a harness must not see.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Methods, answer, ask

_SANDBOX = Path(__file__).resolve().parents[3] / "sandbox"
_NOT_THE_MODELS = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""Signals of an operator, or of a machine that is out of memory."""


class Died(Exception):
    """Model output ended the process: it used up its processor time, or broke the interpreter."""


class Confined:
    """A forked process, locked for good, that answers requests. Everything it needs must have been imported before.

    Args:
        methods: called in the locked process before its first request; returns the methods by name.
        cpu_seconds: processor time of the process, from fork to end.
        memory_bytes: limit of its address space.

    Raises:
        OSError: a process cannot be locked on this system.
    """

    def __init__(self, methods: Callable[[], Methods], *, cpu_seconds: int = 60, memory_bytes: int = 2 * 2**30) -> None:
        _load_sandbox()
        from sandbox.confine import CHANNEL, confine
        from sandbox.limits import Limits

        limits = Limits(cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self._cpu_seconds = cpu_seconds
        self._pid = os.fork()
        if self._pid == 0:
            try:
                for number in range(3):
                    os.dup2(os.open(os.devnull, os.O_RDWR), number)
                state = "locked"
                try:
                    confine(theirs.fileno(), parent, limits)
                except OSError as error:
                    state = str(error)
                os.write(CHANNEL, f"{state}\n".encode())
                if state == "locked":
                    answer(CHANNEL, methods)
            finally:
                os._exit(0)
        theirs.close()
        self._channel = ours
        self._answers = ours.makefile("rb")
        state = self._answers.readline().decode().strip()
        if state != "locked":
            raise OSError(f"this system cannot lock a process (Landlock, seccomp): {state or 'it ended'}")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method. Its own requests (`serving.ask`) are forwarded to the other side of this process's connection.

        Raises:
            Died: its input ended the process.
            RuntimeError: the method raised an exception, or somebody else ended the process.
        """
        message: dict[str, Any] = {"method": method, "params": params}
        while True:
            try:
                self._channel.sendall(json.dumps(message).encode() + b"\n")
                line = self._answers.readline()
            except OSError:
                line = b""
            if not line.endswith(b"\n"):
                self._explain(method)
            answered = json.loads(line)
            if "error" in answered:
                raise RuntimeError(f"{answered['error']}\n{answered['trace']}")
            if "ask" not in answered:
                return answered["result"]
            message = {"reply": ask(answered["ask"], **answered["params"])}

    def close(self) -> None:
        """Close the connection and wait for the process to end."""
        self._answers.close()
        self._channel.close()
        os.waitpid(self._pid, 0)

    def _explain(self, method: str) -> None:
        _, status = os.waitpid(self._pid, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU:
            raise Died(f"{method} used up {self._cpu_seconds} s of processor time")
        if number and number not in _NOT_THE_MODELS:
            raise Died(f"{method} ended the process with {signal.Signals(number).name}")
        raise RuntimeError(f"{method}: the process ended with status {status}")


def require_confinement() -> None:
    """Attack from inside a locked process. End the program if any attack succeeds, or a process cannot be locked."""

    def methods() -> Methods:
        from sandbox.confine import breaches

        return {"breaches": breaches}

    try:
        confined = Confined(methods)
        reached = confined.call("breaches")
        confined.close()
    except OSError as error:
        sys.exit(
            f"{error}; code that acts on a model's output runs nowhere else. Use Linux 5.13 or later with Landlock"
        )
    if reached:
        sys.exit(f"a locked process is not confined here: {'; '.join(reached)}")


def _load_sandbox() -> None:
    if "sandbox" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "sandbox", _SANDBOX / "__init__.py", submodule_search_locations=[str(_SANDBOX)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sandbox"] = module
    spec.loader.exec_module(module)
