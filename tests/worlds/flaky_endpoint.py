"""A real chat completions endpoint over HTTP whose answers depend on prompt and seed only, when it answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

from aiohttp import web


class Flaky:
    """Serves on loopback; `async with` gives the address.

    Args:
        bad: share of requests that go wrong: 429, 500, 503, no answer in time, a dropped connection, a cut body, a cut
            answer, an answer that is no JSON.
        kinds: those of `KINDS` that occur; by default all.
        latency: seconds to each answer.
        stall: seconds that a request waits which is not answered in time.
        host: address to listen on.
    """

    KINDS = ("429", "500", "503", "stall", "drop", "cut_body", "cut_answer", "no_json")

    OF_THE_ENDPOINT = KINDS[:6]
    """What the model has no part in."""

    def __init__(
        self,
        bad: float = 0.0,
        *,
        kinds: tuple[str, ...] = KINDS,
        seed: int = 0,
        latency: float = 0.002,
        stall: float = 1.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.bad, self.kinds, self.latency, self.stall = bad, kinds, latency, stall
        self.requests: list[dict[str, Any]] = []
        self.went_wrong: dict[str, int] = {}
        self.on_request: list[Any] = []
        self._rng = random.Random(seed)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0).start()
        return f"http://{self.host}:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def content(self, body: dict[str, Any]) -> str:
        drawn = hashlib.sha256(f"{body['messages'][0]['content']}|{body.get('seed')}".encode()).hexdigest()
        return json.dumps({"value": int(drawn[:4], 16), "note": drawn * 2})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        for call in self.on_request:
            call()
        kind = self._rng.choice(self.kinds) if self._rng.random() < self.bad else ""
        if kind:
            self.went_wrong[kind] = self.went_wrong.get(kind, 0) + 1
        await asyncio.sleep(self.stall if kind == "stall" else self.latency)
        if kind.isdigit():
            return web.json_response({"error": {"message": "busy"}}, status=int(kind))
        if kind == "drop":
            if request.transport is not None:  # else its client was cut off before
                request.transport.abort()
            return web.Response()
        content, finish = self.content(body), "stop"
        if kind == "cut_answer":
            content, finish = content[: self._rng.randrange(len(content))], "length"
        if kind == "no_json":
            content = f"I would say {self._rng.random()}"
        data = completion(content, finish)
        if kind == "cut_body":
            data = data[: self._rng.randrange(1, len(data) - 1)]
        return web.Response(body=data, content_type="application/json")


def completion(content: str, finish: str = "stop", prompt: int = 60, written: int = 40) -> bytes:
    """A completion of 100 tokens."""
    message = {"role": "assistant", "content": content}
    return json.dumps(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
         "choices": [{"index": 0, "message": message, "finish_reason": finish}],
         "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}}
    ).encode()  # fmt: skip
