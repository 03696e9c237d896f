"""Trainer's end of the connections on which rollout servers pull weights from its memory.

Both sides first prove that they have the sync key. The protocol is described at the servers' end, in
`plugin/astra_vllm/wire.py`. Each connection has a thread, which mostly waits for the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from absl import logging

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from astra_jax.base.terminal import printable

MAGIC = b"astra weights 1\n"
MOST_REQUEST = 64 << 10
"""Size limit of a message from a server, in bytes."""
CONNECTIONS = 1024
"""Most connections at once; each server uses 16."""
_INTRODUCTION_SECONDS = 10.0
_IDLE_SECONDS = 60.0
_SLICE = 1 << 20
"""Bytes sent per `sendall`. Each call times out after `_IDLE_SECONDS`, so a slow but active reader is not cut off."""
_NONCE = 32
_MAC = 32

Answer = tuple[dict[str, Any], memoryview | None]
"""A message, and the bytes that follow it."""


class _Ended(Exception):
    """The connection has ended for any reason."""


class WeightServer:
    """Server on one address that answers rollout servers with the key.

    Args:
        host, port: of this machine; port 0 lets the system choose.
        key: of syncs.
        answer: returns the answer to a message, with `error` if refused; called in several threads at once.

    Attributes:
        address: HOST:PORT.

    Raises:
        InputError: it cannot listen at that address.
    """

    def __init__(self, host: str, port: int, key: str, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self._key, self._answer = key.encode(), answer
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise InputError(
                f"weights cannot be served at {host}:{port} ({first_line(error)}): give --publish_address, an address "
                "of this machine that the rollout servers reach"
            ) from None
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name=f"weights at {self.address}", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with contextlib.suppress(OSError):  # wakes the accepting thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                full = len(self._open) >= CONNECTIONS
                if not full:
                    self._open.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, str(peer[0])), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.settimeout(_INTRODUCTION_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            session = self._introduced(connection, peer)
            connection.settimeout(_IDLE_SECONDS)
            number = 0
            while True:
                message = _received(connection, session, number)
                answer, content = self._answer(message)
                text = json.dumps(answer).encode()
                mac = proof(session, b"trainer", number.to_bytes(8, "big") + text)
                connection.sendall(len(text).to_bytes(4, "big") + mac + text)
                rest = memoryview(b"") if content is None else content
                for start in range(0, len(rest), _SLICE):
                    connection.sendall(rest[start : start + _SLICE])
                number += 1
        except (_Ended, OSError):
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _introduced(self, connection: socket.socket, peer: str) -> bytes:
        """Authenticate both sides. Return the key of this connection."""
        if _exactly(connection, len(MAGIC)) != MAGIC:
            raise _Ended
        theirs, ours = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
        connection.sendall(MAGIC + ours)
        both = theirs + ours
        if not hmac.compare_digest(_exactly(connection, _MAC), proof(self._key, b"server", both)):
            logging.warning("%s has asked for weights without the key of syncs, and got none", printable(peer))
            raise _Ended
        connection.sendall(proof(self._key, b"trainer", both))
        return proof(self._key, b"session", both)


def proof(key: bytes, side: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA-256 (RFC 2104) of one side's message."""
    return hmac.new(key, side + b"\0" + content, hashlib.sha256).digest()


def _received(connection: socket.socket, session: bytes, number: int) -> dict[str, Any]:
    size, mac = int.from_bytes(_exactly(connection, 4), "big"), _exactly(connection, _MAC)
    if size > MOST_REQUEST:
        raise _Ended
    content = _exactly(connection, size)
    if not hmac.compare_digest(mac, proof(session, b"server", number.to_bytes(8, "big") + content)):
        raise _Ended
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        raise _Ended from None
    if not isinstance(message, dict):
        raise _Ended
    return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise _Ended
        content += part
    return bytes(content)
