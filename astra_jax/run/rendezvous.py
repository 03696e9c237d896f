"""Rendezvous of a run's hosts before JAX's own, so that errors name missing hosts.

JAX's own rendezvous prints nothing while it waits, and aborts with a C++ trace that names no host. Here the first host
listens on the address of JAX's later service. The others connect, send their number and the host count, and wait. When
all are connected, each is asked to confirm and then released. At the deadline all connected hosts get the numbers of
the missing ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from astra_jax.base.errors import UserError
from astra_jax.base.terminal import say

_HELLO, _READY, _GO, _NO = "astra-host", "ready", "go", "no "
_LINE = 512
"""Most bytes of a line."""
_HELLO_SECONDS = 5.0
"""Seconds to wait for a line of a new connection; strangers connect to open ports too."""
_TELL_SECONDS = 10.0
"""Seconds between two messages about missing hosts."""


class RendezvousError(UserError):
    """The hosts did not meet. The message names the missing host, or two that do not match."""


class HostsMissing(RendezvousError):
    """Some hosts did not connect in time."""

    away = True


class RendezvousDeadline:
    """Guard around JAX's own rendezvous: at the deadline it prints a line and exits, before JAX aborts with a trace.

    Hosts that their cluster lets find each other cannot be named here; for others `rendezvous` has done that.

    Args:
        seconds: time limit for the others.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="rendezvous", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        if not self._over.wait(self._seconds):
            remedy = "see that the same command runs on each, and that they reach the first one"
            say(
                f"error: the hosts of this run did not all connect within {self._seconds:g} s; {remedy}",
                file=sys.stderr,
            )
            os._exit(1)


def rendezvous(address: str, count: int, host: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Return when all hosts of a run are connected.

    Args:
        address: host:port of the first one.
        count: number of hosts.
        host: number of this one.
        seconds: time limit for the others.
        tell: called with a message now and then while a host is missing.

    Raises:
        RendezvousError: some did not connect in time, have another host count, or share a number.
    """
    name, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise RendezvousError(f"the first host's address is {address!r}: write HOST:PORT, such as 10.0.0.1:8476")
    if count == 1:
        return
    until = time.monotonic() + seconds
    if host == 0:
        _receive(int(port), count, seconds, until, tell)
    else:
        _come(name.strip("[]"), int(port), count, host, seconds, until, tell)


def _receive(port: int, count: int, seconds: float, until: float, tell: Callable[[str], None]) -> None:
    there: dict[int, socket.socket] = {}
    told = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(_listening(port))
        except OSError as error:
            raise RendezvousError(f"port {port}, where the hosts are to meet, cannot be had here: {error}") from None
        try:
            while missing := _missing(count, there):
                left = until - time.monotonic()
                if left <= 0:
                    raise HostsMissing(f"{_named(missing, count)} did not come within {seconds:g} s")
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    tell(f"waits for {_named(missing, count)}, {left:.0f} s more")
                listening.settimeout(min(left, 1.0, _TELL_SECONDS))
                with contextlib.suppress(OSError):  # nobody connected, or the connection failed
                    came, _ = listening.accept()
                    stack.callback(came.close)
                    _welcome(came, count, there)
        except RendezvousError as error:
            for came in there.values():
                _say(came, f"{_NO}{error}")
            raise
        for came in there.values():
            _say(came, _GO)
        for came in there.values():  # they close first, so JAX can use the port at once
            with contextlib.suppress(OSError):
                came.settimeout(_HELLO_SECONDS)
                came.recv(1)


def _welcome(came: socket.socket, count: int, there: dict[int, socket.socket]) -> None:
    """Register a new connection; strangers are disconnected. Raises `RendezvousError`."""
    words = _line(came, _HELLO_SECONDS).split(" ")
    if words[0] != _HELLO or len(words) != 3 or not all(one.isascii() and one.isdecimal() for one in words[1:]):
        came.close()
        return
    host, hosts = int(words[1]), int(words[2])
    refusal = None
    if hosts != count:
        refusal = f"host {host} says that there are {hosts} hosts, the first one says {count}"
    elif host in there and _stands(there[host]):
        refusal = f"host {host} is there twice: give each another number"
    elif not 0 < host < count:
        refusal = f"a host says that it is number {host}: they are 0 to {count - 1}"
    if refusal:
        _say(came, f"{_NO}{refusal}")
        raise RendezvousError(refusal)
    there[host] = came


def _missing(count: int, there: dict[int, socket.socket]) -> list[int]:
    """Return the hosts that are not connected. An open connection is no proof, since its end may be on the way, so
    hosts confirm."""
    missing = [host for host in range(1, count) if host not in there or not _stands(there[host])]
    if not missing and (missing := sorted(host for host, came in there.items() if not _is_ready(came))):
        for host in missing:  # it may connect again
            there.pop(host).close()
    return missing


def _is_ready(came: socket.socket) -> bool:
    _say(came, _READY)
    try:
        return _line(came, _HELLO_SECONDS) == _READY
    except OSError:
        return False


def _come(
    name: str, port: int, count: int, host: int, seconds: float, until: float, tell: Callable[[str], None]
) -> None:
    first, told, why = f"host 0 of {count}, at {name}:{port}", time.monotonic(), "nothing was tried"
    while (left := until - time.monotonic()) > 0:
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            tell(f"waits for {first} ({why}), {left:.0f} s more")
        try:
            with socket.create_connection((name, port), timeout=min(left, _HELLO_SECONDS)) as there:
                _say(there, f"{_HELLO} {host} {count}")
                why = "it is there, and waits for others"
                while (said := _line(there, max(0.0, until - time.monotonic()))) == _READY:
                    _say(there, _READY)
        except OSError as error:
            why = why if isinstance(error, TimeoutError) else str(error)
            time.sleep(min(0.2, max(0.0, left)))
            continue
        if said == _GO:
            return
        if said.startswith(_NO):
            raise RendezvousError(said.removeprefix(_NO))
        why = "it closed the connection"
        time.sleep(min(0.2, left))
    raise HostsMissing(f"{first}, did not answer within {seconds:g} s ({why})")


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as listening:
        yield listening


def _line(there: socket.socket, seconds: float) -> str:
    """Read a line, or the part of it before the connection ended. Raises `TimeoutError` for a slow sender."""
    until, said = time.monotonic() + seconds, b""
    while not said.endswith(b"\n") and len(said) < _LINE:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("it says nothing")
        there.settimeout(left)
        if not (part := there.recv(_LINE - len(said))):
            break
        said += part
    return said.decode(errors="replace").strip()


def _say(there: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        there.sendall(text.encode()[: _LINE - 1] + b"\n")


def _stands(there: socket.socket) -> bool:
    """Return whether a connection is still open."""
    there.setblocking(False)
    try:
        return bool(there.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        there.setblocking(True)


def _named(hosts: list[int], count: int) -> str:
    shown = ", ".join(map(str, hosts[:8])) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return f"host{'s' if len(hosts) > 1 else ''} {shown} of {count}"
