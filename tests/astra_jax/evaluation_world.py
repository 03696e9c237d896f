"""Endpoints for tests of benchmarks: real HTTP, and answers that a function of the request makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import About, Decoding, Item, Served, Suite
from synthesis.endpoint import Endpoint, OpenAITeacherConfig

Request = Mapping[str, Any]


@dataclass(frozen=True)
class Say:
    """An answer: text, calls (name and arguments, as JSON where they are an object), or a status that is none."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    finish: str = "stop"
    status: int = 200


Policy = Callable[[Request], Say]


class Scripted:
    """Serves a policy on loopback; `async with` gives who is served."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[Request] = []

    async def __aenter__(self) -> Served:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return Served(f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1", "scripted")

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        said = self.policy(body)
        if said.status != 200:
            return web.json_response({"error": {"message": said.text}}, status=said.status)
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            message["tool_calls"] = [
                {"id": f"call_{len(body['messages'])}_{i}", "type": "function",
                 "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
                for i, (name, given) in enumerate(said.calls)
            ]  # fmt: skip
        await asyncio.sleep(0)
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
             "choices": [{"index": 0, "message": message, "finish_reason": said.finish}],
             "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}
        )  # fmt: skip


def endpoint(served: Served) -> Endpoint:
    """A client that gives up early."""
    return Endpoint(
        OpenAITeacherConfig(
            served.url,
            served.model,
            concurrency=16,
            failures=2,
            outage_seconds=30.0,
            backoff_seconds=0.01,
            longest_backoff_seconds=0.02,
        )
    )


@dataclass
class Named:
    """A suite whose requests say which item they are of, in the field `user`: scripts need to know. Is a `Suite`."""

    suite: Suite
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def about(self) -> About:
        return self.suite.about

    def ids(self, category: str) -> Sequence[str]:
        return self.only.get(category, []) if self.only else self.suite.ids(category)

    async def prepare(self) -> None:
        await self.suite.prepare()

    async def run(self, item: Item, decoding: Decoding) -> ItemResult:
        return await self.suite.run(item, replace(decoding, extra={**decoding.extra, "user": item.id}))

    async def close(self) -> None:
        await self.suite.close()
