"""The connections of an HTTP service: how many there are, and how long each may keep it waiting.

aiohttp bounds what a request is made of, not how long it takes to come, nor how many callers there are: who opens
connections and sends a byte now and then holds them all. So the service accepts by itself, and a `Connection` stands
between each transport and aiohttp's protocol, passes everything on, and knows until when the caller's next move is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections import Counter
from collections.abc import Callable

from sandbox.access import ReachConfig, network_of

_BACKLOG = 1024  # the kernel drops what is above without a word, and the caller thinks it is connected
_PAUSE_SECONDS = 0.1  # after an accept that failed: there may be no descriptor left
_LONGEST_TICK = 1.0  # seconds


class Connection(asyncio.Protocol):
    """One caller's connection. Who finds a request's with `transport.get_protocol()` tells it of `begin` and `end`.

    Args:
        config: how long it may wait for what.
        served: aiohttp's protocol.

    Attributes:
        due: until when, by the loop's clock, the caller's next move has to come; infinity while it is the service's.
        lost: set when it is closed.
    """

    def __init__(self, config: ReachConfig, served: asyncio.Protocol) -> None:
        self._config = config
        self._served = served
        self._clock = asyncio.get_running_loop().time
        self._transport: asyncio.BaseTransport | None = None
        self._busy = False  # a request's handler runs
        self._between = False  # no byte of the next request is there
        self._stalled = False  # the caller does not take what is sent
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
        """A request's headers are there."""
        self._busy, self._between = True, False
        self._reckon(math.inf)

    def end(self) -> None:
        """Its answer is made; what is still to be sent of it goes at the caller's pace."""
        self._busy, self._between = False, True
        self._reckon(self._config.idle_seconds)

    def cut(self) -> None:
        """Hang up, whatever is still to be sent."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def _reckon(self, seconds: float) -> None:
        if not self._stalled:
            self.due = math.inf if self._busy else self._clock() + seconds


class Connections:
    """Listens, and holds what callers open to the limits of a configuration.

    Args:
        config: where to listen, and the limits.
        serve: makes aiohttp's protocol.

    Attributes:
        open: connections, TLS handshakes included.
        refused: how many were hung up on, because their address had its share.
        late: how many were cut off, because the caller's next move did not come in time.
    """

    def __init__(self, config: ReachConfig, serve: Callable[[], asyncio.Protocol]) -> None:
        self._config = config
        self._serve = serve
        self._tls = config.tls()
        # What the service does for its callers wants descriptors, too.
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
        """Begin to accept. Returns the port.

        Raises:
            OSError: the address cannot be had.
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
                port = listener.getsockname()[1]  # of a name with several addresses all have the same
        except OSError:
            await self.deafen()
            raise
        self._accepting = [loop.create_task(self._accept(listener)) for listener in self._listeners]
        self._watching = loop.create_task(self._watch())
        return port

    async def deafen(self) -> None:
        """Accept no more; those that are open go on."""
        accepting, self._accepting = self._accepting, []
        await _ended(*accepting)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def close(self) -> None:
        """Accept no more, and hang up on everybody."""
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
        """From a connection's handshake to its end."""
        connection = Connection(self._config, self._serve())
        handshake = self._config.header_seconds if self._tls else None
        try:
            with contextlib.suppress(OSError):  # it left already, or its handshake was none
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
