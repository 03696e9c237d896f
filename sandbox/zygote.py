"""Trusted fork server: `python -s -S -P zygote.py <control descriptor>`. Standard library only.

The host starts it by exec and never by fork (a process with JAX's threads must not fork). It loads once what all calls
need, makes it deterministic, and forks a slot for each request. It never sees untrusted code. When the host closes the
control socket or dies, it ends with everything below it. Control messages are JSON in frames:

    {"open": token, "plan": {...}, "limits": {...}, "uid": int | null}   with the slot's socket as a descriptor
    {"kill": token}
"""

from __future__ import annotations

import _locale
import _socket  # `socket` would add half a megabyte to each call's copy
import contextlib
import gc
import json
import os
import select
import signal
import struct
import sys
import time
import types

for _name in ("sandbox", "astra_jax"):
    if _name not in sys.modules:
        # Run by path, so the packages may not be importable: define them from this file's place.
        _package = types.ModuleType(_name)
        _package.__path__ = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), _name)]
        sys.modules[_name] = _package

from sandbox import call, determinism, heap, libc, lockdown, modules  # noqa: E402
from sandbox.protocol import HELLO_ID, REPLY, CallVerdict, FrameReader, frame  # noqa: E402
from sandbox.slot import Slot  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from sandbox.limits import LockPlan

_OWN_MODULES: dict[str, types.ModuleType] = {}
_CONTROL = call.CHANNEL + 1  # the rehearsal needs `CHANNEL`
_REAP_MILLISECONDS = 1000
_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 64  # in one message


class Zygote:
    """Server that forks slots and keeps their process ids, so that each can be killed and reaped without a race."""

    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._clock = time.monotonic  # kept before `determinism.install` replaces it
        self._slots: dict[int, int] = {}  # process id by token
        self._births: dict[int, int] = {}  # token by the pipe that will carry a slot's process id
        self._poll = select.poll()
        self._readable = lockdown.library_paths()
        self._lifeline, self._lifeline_writer = os.pipe()  # it closes when the zygote ends, which tells the slots

    def serve(self) -> NoReturn:
        """Serve control messages until the host closes its end."""
        frames = FrameReader()
        self._poll.register(self._control, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll(_REAP_MILLISECONDS):
                if descriptor in self._births:
                    self._born(descriptor)
                elif descriptor == _CONTROL:
                    data, descriptors = self._receive()
                    if not data:
                        self._end()
                    for message in frames.feed(data):
                        self._obey(json.loads(message), descriptors)
            self._reap()

    def _receive(self) -> tuple[bytes, list[int]]:
        data, messages, _, _ = self._control.recvmsg(1 << 16, _socket.CMSG_LEN(_MOST_DESCRIPTORS * _DESCRIPTOR.size))
        rights = [sent for level, kind, sent in messages if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)]
        return data, [descriptor for sent in rights for (descriptor,) in _DESCRIPTOR.iter_unpack(sent)]

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "open" in message:
            if not message["plan"]["allow_open"]:  # calls could load nothing themselves
                modules.load(*modules.PRELOADED)
            # One descriptor with each "open", sent in the same order.
            self._open(message, descriptors.pop(0))
        elif (pid := self._slots.pop(message["kill"], None)) is not None:
            os.kill(pid, signal.SIGKILL)

    def _open(self, message: dict[str, Any], descriptor: int) -> None:
        reader, writer = os.pipe()
        try:
            if libc.check(libc.fork(), "fork") == 0:
                self._become_slot(message, descriptor, writer)
        except OSError as error:  # the host sees the slot's socket close and tries again
            with contextlib.suppress(OSError):  # standard error cannot be written
                print(f"sandbox zygote: cannot fork a slot: {error}", file=sys.stderr, flush=True)
        os.close(descriptor)
        os.close(writer)
        self._births[reader] = message["open"]
        self._poll.register(reader, select.POLLIN)

    def _born(self, descriptor: int) -> None:
        text = os.read(descriptor, 32)
        token = self._births.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if text:
            self._slots[token] = int(text)

    def _reap(self) -> None:
        ended = set()
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                ended.add(pid)
        if not ended:
            return
        # A slot can be reaped only once its process id has been sent.
        # The id must not be noted after this: it could then be another process's.
        for descriptor, _ in self._poll.poll(0):
            if descriptor in self._births:
                self._born(descriptor)
        self._slots = {token: slot for token, slot in self._slots.items() if slot not in ended}

    def _end(self) -> NoReturn:
        for descriptor in list(self._births):
            self._born(descriptor)
        for pid in self._slots.values():
            os.kill(pid, signal.SIGKILL)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                os._exit(0)

    def _become_slot(self, message: dict[str, Any], descriptor: int, birth: int) -> NoReturn:
        """Run in the zygote's child: put the layers in place, greet the host, and serve. Never returns."""
        os.dup2(descriptor, _CONTROL)  # in place of the zygote's own
        lockdown.close_descriptors(_CONTROL, birth, self._lifeline)
        null = os.open(os.devnull, os.O_RDWR)  # not the zygote's, which other environments share
        # Nor the host's standard error. The descriptor of a call's channel must be free of anything that it needs.
        for number in (0, 1, 2, call.CHANNEL):
            if number != null:
                os.dup2(null, number)
        if null != call.CHANNEL:
            os.close(null)
        control = _socket.socket(fileno=_CONTROL)
        try:
            plan, limits, uid = _sent(message["plan"]), _sent(message["limits"]), message["uid"]
            if plan.namespaces:
                lockdown.enter_namespaces(as_superuser=uid is not None)
            # The child is process 1 of the new pid namespace; the zygote adopts it when this process ends.
            if plan.namespaces and (pid := libc.check(libc.fork(), "fork")):
                os.write(birth, str(pid).encode())
                os._exit(0)
            if not plan.namespaces:
                os.write(birth, str(libc.getpid()).encode())
            os.close(birth)
            layers = lockdown.confine_slot(plan, uid, self._readable)
            layers |= self._describe_process(plan)
            slot = Slot(control, self._lifeline, plan, limits, self._readable, self._clock)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".encode()
            control.sendall(frame(REPLY.pack(HELLO_ID, CallVerdict.NOT_LOCKED, 0, 0.0, 0.0, 0) + reason))
            os._exit(1)
        slot.serve(layers)

    def _describe_process(self, plan: LockPlan) -> dict[str, str]:
        names = "allow-list" if plan.allow_open else "allow-list, no paths"
        return {
            "landlock": f"ABI {lockdown.landlock_abi()}" if plan.landlock else "off",
            "seccomp": names if plan.seccomp else "off",
            "rlimits": "on",
            "address_randomisation": "off" if lockdown.address_randomisation_is_off() else "on",
        }


def _sent(fields: dict[str, Any]) -> Any:
    """Return a `LockPlan` or `Limits` from the host as a plain object, since their classes are not loaded here."""
    return types.SimpleNamespace(**fields)


def _preload() -> None:
    modules.load(*modules.ALWAYS)
    os.environ.clear()
    # Of C.UTF-8 only the part for characters is loaded, and calls cannot read the other files: those parts are C's.
    os.environ.update({"PATH": "/usr/bin:/bin", "TZ": "UTC", "LC_CTYPE": "C.UTF-8"})
    _install_locale()
    sys.argv = [""]
    sys.dont_write_bytecode = True


def _install_locale() -> None:
    """Let calls set C.UTF-8 for all categories. Categories other than characters are C's."""
    c_setlocale = _locale.setlocale
    whole = c_setlocale(_locale.LC_ALL, "")

    def setlocale(category: int, name: str | None = None) -> str:
        if name is not None and name.lower().replace("-", "") == "c.utf8":
            name = whole if category == _locale.LC_ALL else name if category == _locale.LC_CTYPE else "C"
        return c_setlocale(category, name)

    _locale.setlocale = setlocale


def main() -> NoReturn:
    """Move the control socket to its descriptor, prepare, and serve."""
    if lockdown.stop_address_randomisation():
        os.execv(sys.executable, sys.orig_argv)
    descriptor = int(sys.argv[1])
    if descriptor != _CONTROL:
        os.dup2(descriptor, _CONTROL)
        os.close(descriptor)
    os.set_inheritable(_CONTROL, False)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, call.CHANNEL):  # the last for the rehearsal
        if number != null:
            os.dup2(null, number)
    if null != call.CHANNEL:
        os.close(null)
    zygote = Zygote(_socket.socket(fileno=_CONTROL))
    lockdown.adopt_orphans()
    _preload()
    determinism.install()
    # Tools must not import these by accident. Kept alive: freeing them in each call would touch 190 pages.
    _OWN_MODULES.update({n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "sandbox"})
    call.rehearse()
    gc.collect()
    heap.fill_gaps()
    gc.freeze()
    gc.disable()
    gc.set_threshold(20_000)  # else building a table of a few hundred rows is interrupted by several collections
    zygote.serve()


if __name__ == "__main__":
    main()
