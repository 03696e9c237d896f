"""Connections of an HTTP service: limits on their number and on how long each may keep the service waiting.

aiohttp limits the parts of a request, not its duration or the number of callers: slow callers could hold every
connection. So the service accepts connections itself. A `Connection` stands between each transport and aiohttp's
protocol, passes everything on, and knows the deadline of the caller's next action.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections import Counter
from collections.abc import Callable

from astra_jax.base.access import ReachConfig, network_of

_BACKLOG = 1024  # the kernel silently drops connections above this, and the caller thinks it is connected
_PAUSE_SECONDS = 0.1  # after a failed accept: there may be no descriptor left
_LONGEST_TICK = 1.0  # seconds


class Connection(asyncio.Protocol):
    """Connection of one caller. The handler finds it with `transport.get_protocol()` and calls `begin` and `end`.

    Args:
        config: time limits.
        served: aiohttp's protocol.

    Attributes:
        due: deadline of the caller's next action, by the loop's clock; infinity while the service has to act.
        lost: set when the connection is closed.
    """

    def __init__(self, config: ReachConfig, served: asyncio.Protocol) -> None:
        self._config = config
        self._served = served
        self._clock = asyncio.get_running_loop().time
        self._transport: asyncio.BaseTransport | None = None
        self._busy = False  # a request's handler runs
        self._between = False  # no byte of the next request has arrived
        self._stalled = False  # the caller does not read what is sent
        self.due = math.inf
        self.lost = asyncio.Event()

    # ------------------------------------------------------------------------------------------ called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.due = self._clock() + self._config.header_seconds
        self._served.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._between:
            self._between = False
            self._reckon(self._config.header_seconds)
        self._served.data_received(data)

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._stalled = True
        self.due = self._clock() + self._config.stall_seconds
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._stalled = False
        self._reckon(self._config.idle_seconds)
        self._served.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._served.connection_lost(exc)

    # ------------------------------------------------------------------------------------------- called by the service

    def begin(self) -> None:
        """Note that a request's headers have arrived."""
        self._busy, self._between = True, False
        self._reckon(math.inf)

    def end(self) -> None:
        """Note that the answer is made. The rest of it is sent at the caller's pace."""
        self._busy, self._between = False, True
        self._reckon(self._config.idle_seconds)

    def cut(self) -> None:
        """Close the connection at once, even if data is still to be sent."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def _reckon(self, seconds: float) -> None:
        if not self._stalled:
            self.due = math.inf if self._busy else self._clock() + seconds


class Connections:
    """Listener that applies the limits of a configuration to callers' connections.

    Args:
        config: the address, and the limits.
        serve: makes aiohttp's protocol.

    Attributes:
        open: open connections, TLS handshakes included.
        refused: connections closed because their address had its share.
        late: connections closed because the caller missed a deadline.
    """

    def __init__(self, config: ReachConfig, serve: Callable[[], asyncio.Protocol]) -> None:
        self._config = config
        self._serve = serve
        self._tls = config.tls()
        # The service needs descriptors for its own work, too.
        most = max(1, min(config.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._room = asyncio.Semaphore(most)
        self._most_of_one = max(1, int(most * config.address_share))
        self._of: Counter[str] = Counter()  # by address
        self._held: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._carried: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self.refused = self.late = 0

    @property
    def open(self) -> int:
        return self._of.total()

    async def listen(self) -> int:
        """Start to accept connections. Return the port.

        Raises:
            OSError: the address is not available.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            self._config.host, self._config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        port = self._config.port
        try:
            for family, address in dict.fromkeys((family, address) for family, *_, address in found):
                listener = socket.create_server((address[0], port), family=family, backlog=_BACKLOG)
                self._listeners.append(listener)
                listener.setblocking(False)
                port = listener.getsockname()[1]  # a name with several addresses has the same port on all
        except OSError:
            await self.deafen()
            raise
        self._accepting = [loop.create_task(self._accept(listener)) for listener in self._listeners]
        self._watching = loop.create_task(self._watch())
        return port

    async def deafen(self) -> None:
        """Accept no more connections; open ones stay."""
        accepting, self._accepting = self._accepting, []
        await _ended(*accepting)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def close(self) -> None:
        """Accept no more connections, and close all open ones."""
        await self.deafen()
        if self._watching is not None:
            await _ended(self._watching)
            self._watching = None
        for connection in self._held:
            connection.cut()
        await _ended(*self._carried)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError:
                self._room.release()
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            except BaseException:
                self._room.release()
                raise
            caller = network_of(address[0])
            if self._of[caller] >= self._most_of_one:
                self.refused += 1
                accepted.close()
                self._room.release()
                continue
            self._of[caller] += 1
            task = loop.create_task(self._carry(accepted, caller))
            self._carried.add(task)
            task.add_done_callback(self._carried.discard)

    async def _carry(self, accepted: socket.socket, caller: str) -> None:
        """Serve a connection from its handshake to its end."""
        connection = Connection(self._config, self._serve())
        handshake = self._config.header_seconds if self._tls else None
        try:
            with contextlib.suppress(OSError):  # the caller left already, or the handshake failed
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=handshake
                )
                self._held.add(connection)
                await connection.lost.wait()
        finally:
            self._held.discard(connection)
            self._of[caller] -= 1
            if not self._of[caller]:
                del self._of[caller]
            self._room.release()

    async def _watch(self) -> None:
        config = self._config
        soonest = min(config.header_seconds, config.idle_seconds, config.stall_seconds)
        tick, clock = min(_LONGEST_TICK, soonest / 4), asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(tick)
            now = clock()
            for connection in [one for one in self._held if one.due < now]:
                self.late += 1
                connection.cut()


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
