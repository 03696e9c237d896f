"""The endpoint of `benchmarks.teacher`: answers every request after the same time. Prints its port and serves.

    python -m benchmarks.teacher_side LATENCY_SECONDS

It reads no more of HTTP than it must: what it costs is taken from the client where both share a processor.
"""

from __future__ import annotations

import asyncio
import json
import sys

MESSAGE = {"role": "assistant", "content": json.dumps({"city": "Oslo", "certain": True})}
BODY = json.dumps(
    {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
     "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
     "usage": {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320}}
).encode()  # fmt: skip
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request on it at a time."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.read += data
        head, end, body = self.read.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self.read = body[length:]
            asyncio.get_running_loop().call_later(self.latency, self.answer)

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(RESPONSE)


async def serve(latency: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(latency), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
