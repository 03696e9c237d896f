"""For tests of evaluation: an endpoint that says what a script says, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], dict[str, Any] | int]
"""Of a request's body: the message to answer with, with `finish_reason` where it is not the usual one; or a status."""


class Scripted:
    """Serves on loopback; `async with` gives the address.

    Args:
        script: answers a request.
        models: what the endpoint lists.
        key: that it wants; None takes any.
    """

    def __init__(self, script: Script, *, models: tuple[str, ...] = ("scripted",), key: str | None = None) -> None:
        self.script, self.models, self.key = script, models, key
        self.requests: list[dict[str, Any]] = []

    async def __aenter__(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        body = await request.json()
        self.requests.append(body)
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        said = self.script(body)
        if isinstance(said, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=said)
        finish = said.pop("finish_reason", "tool_calls" if said.get("tool_calls") else "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **said}, "finish_reason": finish}
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 7}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})


def tool_call(name: str, *, id: str | None = "", **arguments: Any) -> dict[str, Any]:
    """A call as a message holds it; a call without `id` has one of its name."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id or f"call_{name}", "type": "function", "function": function}
