"""The endpoint of `benchmarks.teacher`: answers every request after the same time. Prints its port and serves.

    python -m benchmarks.teacher_side LATENCY_SECONDS

When its standard input ends it prints what it saw (`Seen`, JSON) and ends. It reads no more of HTTP than it must: what
it costs is taken from the client where both share a processor.
"""

from __future__ import annotations

import asyncio
import json
import select
import selectors
import sys
import time
from dataclasses import asdict, dataclass

MESSAGE = {"role": "assistant", "content": json.dumps({"city": "Oslo", "certain": True})}
BODY = json.dumps(
    {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
     "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
     "usage": {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320}}
).encode()  # fmt: skip
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@dataclass
class Seen:
    """Measurements of the endpoint.

    Attributes:
        answered: number of requests.
        peak: maximum concurrent requests, from a request's first byte read to its answer sent.
        late_ms: mean time from a request's last byte read to its answer sent, beyond the latency.
    """

    answered: int = 0
    peak: int = 0
    late_ms: float = 0.0


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request on it at a time."""

    seen = Seen()
    open = 0
    late_seconds = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop, latency: float) -> None:
        self.loop, self.latency = loop, latency
        self.read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.read:
            Connection.open += 1
            self.seen.peak = max(self.seen.peak, Connection.open)
        self.read += data
        head, end, body = self.read.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            assert len(body) == length, "a second request before the answer to the first"
            self.loop.call_at(due := time.monotonic() + self.latency, self.answer, due)

    def answer(self, due: float) -> None:
        self.read = b""
        Connection.open -= 1
        Connection.late_seconds += time.monotonic() - due
        self.seen.answered += 1
        if not self.transport.is_closing():
            self.transport.write(RESPONSE)


class Punctual(selectors.EpollSelector):
    """epoll rounds its time-out up to a millisecond, of a hundred that an answer takes; select does not."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


async def serve(latency: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(loop, latency), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()
    seen = Connection.seen
    seen.late_ms = round(1000 * Connection.late_seconds / max(1, seen.answered), 2)
    print(json.dumps(asdict(seen)), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Punctual())) as runner:
        runner.run(serve(float(sys.argv[1])))
