"""Endpoints for tests of benchmarks: real HTTP, and answers that a function of the request makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Decoding, EvalItem, ModelEndpoint, Suite, SuiteInfo
from synthesis.core.endpoint import Endpoint
from synthesis.core.endpoint_settings import OpenAITeacherConfig

Request = Mapping[str, Any]


@dataclass(frozen=True)
class Say:
    """An answer: text, calls (name and arguments, as JSON where they are an object), or a status that is none.

    `more` are further fields of the message, or others in place of those.
    """

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    finish: str = "stop"
    status: int = 200
    more: Mapping[str, Any] = field(default_factory=dict)


Sampler = Callable[[Request], Say]


def is_probe(request: Request) -> bool:
    """Whether it is the client's own question, which tells a request that is refused from an endpoint that is down."""
    return bool(request["messages"][-1]["content"] == "Say yes.")


class Scripted:
    """Serves a policy on loopback; `async with` gives who is served.

    Args:
        policy: answers a request.
        models: what the endpoint lists; the first is who is served.
        key: that it wants; None takes any.
    """

    def __init__(self, policy: Sampler, *, models: tuple[str, ...] = ("scripted",), key: str | None = None) -> None:
        self.policy, self.models, self.key = policy, models, key
        self.requests: list[Request] = []

    async def __aenter__(self) -> ModelEndpoint:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return ModelEndpoint(f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1", self.models[0])

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        body = await request.json()
        self.requests.append(body)
        known = body["model"] in self.models
        said = self.policy(body) if known else Say(f"no model {body['model']}", status=404)
        if said.status != 200:
            return web.json_response({"error": {"message": said.text}}, status=said.status)
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.calls:
            message["tool_calls"] = [
                {"id": f"call_{len(body['messages'])}_{i}", "type": "function",
                 "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
                for i, (name, given) in enumerate(said.calls)
            ]  # fmt: skip
        message |= said.more
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
             "choices": [{"index": 0, "message": message, "finish_reason": said.finish}],
             "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}
        )  # fmt: skip


def endpoint(served: ModelEndpoint) -> Endpoint:
    """A client that gives up early."""
    return Endpoint(
        OpenAITeacherConfig(
            served.url,
            served.model,
            concurrency=16,
            failures=2,
            max_unavailable_seconds=30.0,
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
    def info(self) -> SuiteInfo:
        return self.suite.info

    def ids(self, category: str) -> Sequence[str]:
        return self.only.get(category, []) if self.only else self.suite.ids(category)

    async def prepare(self) -> None:
        await self.suite.prepare()

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        return await self.suite.run(item, replace(decoding, extra={**decoding.extra, "user": item.id}))

    async def close(self) -> None:
        await self.suite.close()
