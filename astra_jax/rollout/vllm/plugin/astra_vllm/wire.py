"""Server's end of a connection to a trainer's host that serves weights from its memory.

    server -> host     MAGIC, 32 random bytes
    host -> server     MAGIC, 32 random bytes
    server -> host     proof that it has the key: HMAC-SHA-256 over "server" and both sides' random bytes
    host -> server     its own, over "trainer"; without the server's, the connection ends here, and nothing was said
    both, then         messages: 4 bytes of length, an HMAC under a key of this connection (over the direction, the
                       message's number and itself), JSON; what a message announces follows it as plain bytes

The sync key is never sent. Weights are not encrypted, so anybody who can read the network can read them. Their digests
are in authenticated messages, so nobody on the way can change them. The trainer's end is
`astra_jax/rollout/vllm/wire.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

MAGIC = b"astra weights 1\n"
MOST_MESSAGE = 16 << 20
_NONCE = 32
_MAC = 32


class Lost(Exception):
    """The connection is unusable; a new one may work. The message says why."""


class NotTheTrainer(Exception):
    """The peer does not have our key, or is not a trainer."""


class TrainerConnection:
    """Authenticated connection to one host of a trainer.

    Args:
        address: HOST:PORT.
        key: of syncs.
        seconds: timeout for receiving a byte.

    Raises:
        Lost: no answer.
        NotTheTrainer: the peer is not the trainer.
    """

    def __init__(self, address: str, key: str, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._sent = self._received = 0
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise Lost(f"{address} cannot be reached ({error})") from None
        try:
            self._session = self._introduced(address, key.encode())
        except BaseException:
            self.close()
            raise

    def _introduced(self, address: str, key: bytes) -> bytes:
        ours = secrets.token_bytes(_NONCE)
        self._send(MAGIC + ours)
        if self._exactly(len(MAGIC)) != MAGIC:
            raise NotTheTrainer(f"{address} is not a trainer of this version that serves weights")
        both = ours + self._exactly(_NONCE)
        self._send(proof(key, b"server", both))
        try:
            shown = self._exactly(_MAC)
        except Lost:  # perhaps a broken connection: peers without the key get no answer
            raise Lost(
                f"{address} takes another key than that of this server's ASTRA_SYNC_KEY_FILE, or serves nobody now"
            ) from None
        if not hmac.compare_digest(shown, proof(key, b"trainer", both)):
            raise NotTheTrainer(f"{address} has not the key of this server's ASTRA_SYNC_KEY_FILE")
        return proof(key, b"session", both)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the host's answer.

        Raises:
            Lost: there is no answer, or it is not authentic.
        """
        content = json.dumps(message).encode()
        mac = proof(self._session, b"server", self._sent.to_bytes(8, "big") + content)
        self._sent += 1
        self._send(len(content).to_bytes(4, "big") + mac + content)
        size, mac = int.from_bytes(self._exactly(4), "big"), self._exactly(_MAC)
        if size > MOST_MESSAGE:
            raise Lost(f"a message of {size} bytes was announced")
        content = self._exactly(size)
        if not hmac.compare_digest(mac, proof(self._session, b"trainer", self._received.to_bytes(8, "big") + content)):
            raise Lost("a message was changed on the way")
        self._received += 1
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise Lost("a message is not a JSON object")
        return answer

    def fill(self, target: memoryview) -> None:
        """Receive the bytes announced by the last answer. Raises `Lost`."""
        view, at = target.cast("B"), 0
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as error:
                raise Lost(f"the connection broke ({error})") from None
            if not count:
                raise Lost(f"the connection ended after {at} of {len(view)} bytes")
            at += count

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        content = bytearray(size)
        self.fill(memoryview(content))
        return bytes(content)

    def _send(self, content: bytes) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise Lost(f"the connection broke ({error})") from None


def proof(key: bytes, side: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA-256 (RFC 2104) of one side's message."""
    return hmac.new(key, side + b"\0" + content, hashlib.sha256).digest()
