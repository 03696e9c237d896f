"""What is refused before it costs anything, and long bodies that hold nobody else up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from serving_world import Drip
from sft_world import make_tokenizer

from astra_jax.base.nesting import MOST_NESTING
from astra_jax.rollout.sampler import PolicyLimits, RequestFailed
from astra_jax.serving import bodies, service
from astra_jax.serving.protocol import InvalidRequest
from astra_jax.serving.service import OpenAIService, ServingConfig
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import Segment

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Watched(ChatTokenizer):
    """Says which threads tokenise how much, and waits with texts that begin with `wait` until it is told."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer._tokenizer)
        self.threads: set[int] = set()
        self.characters = 0
        self.go = threading.Event()

    def encode_segments(self, segments: Sequence[Segment], *, most: int | None = None) -> tuple[list[int], list[int]]:
        self.threads.add(threading.get_ident())
        self.characters += sum(len(segment.text) for segment in segments)
        if segments[0].text.startswith("wait"):
            assert self.go.wait(60)
        return super().encode_segments(segments, most=most)


class World:
    """A service and its client on this thread's event loop."""

    def __init__(self, policy: Any, tokenizer: ChatTokenizer) -> None:
        self.policy, self.tokenizer = policy, tokenizer

    async def __aenter__(self) -> World:
        self.service = OpenAIService(self.policy, self.tokenizer, ServingConfig("tiny", port=0))
        await self.service.start()
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{self.service.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.service.stop()

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.client.post(path, data=data, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    async def get(self, path: str) -> str:
        async with self.client.get(path) as answer:
            return await answer.text()


# ---------------------------------------------------------------------------------------------------------------------
# Refused

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
DEEP = "[" * (MOST_NESTING + 1) + "]" * (MOST_NESTING + 1)


def with_call(**function: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETE, {"prompt": "x", "stop_token_ids": [1 << 40]}, "stop_token_ids", "has 1099511627776; ids are from 0"),
        (COMPLETE, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids", "has -1"),
        (COMPLETE, b'{"prompt": "x", "temperature": NaN}', None, "NaN is not JSON"),
        (COMPLETE, b'{"prompt": "x", "top_p": -Infinity}', None, "-Infinity is not JSON"),
        (COMPLETE, b'{"prompt": "x", "temperature": 1e999}', None, "beyond the range of numbers"),
        (COMPLETE, b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", None, "4300 digits"),
        (COMPLETE, {"prompt": "x", "temperature": 1e-40}, "temperature", "use 0 (greedy), or a number from 1e-06"),
        (COMPLETE, {"prompt": "x", "temperature": 10**400}, "temperature", "out of range"),
        (COMPLETE, {"prompt": "x", "top_p": 1e-300}, "top_p", "use a number from 1e-06 to 1"),
        (COMPLETE, {"prompt": "x", "seed": 1 << 63}, "seed", "to 9,223,372,036,854,775,807"),
        (COMPLETE, {"prompt": "x", "max_tokens": 1 << 31}, "max_tokens", "from 1 to 2,147,483,647"),
        (CHAT, {**HELLO, "max_tokens": -5, "max_completion_tokens": 1}, "max_tokens", "max_tokens is -5"),
        (COMPLETE, {"prompt": "x", "stop": ["a"] * 17}, "stop", "17 strings, the longest of 1 characters; at most 16"),
        (COMPLETE, {"prompt": "x", "stop": "a" * 257}, "stop", "the longest of 257"),
        (COMPLETE, {"prompt": [1 << 80]}, "prompt", "has token id 1208925819614629174706176"),
        (COMPLETE, {"prompt": "a\ud800"}, "prompt", "the lone surrogate \\ud800, at position 1"),
        (COMPLETE, {"prompt": "x", "stop": ["\udfff"]}, "stop[0]", "half a character"),
        (COMPLETE, {"prompt": "x", "\ud800": 1}, None, "the body has half a character"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udead"}]}]},
         "messages[0].content[0].text", "\\udead"),
        (CHAT, with_call(arguments=[1]), ARGUMENTS, "a JSON object"),
        (CHAT, {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": json.loads(DEEP)}}]},
         "tools[0].function.parameters[0][0]", "nests deeper than 200 arrays and objects"),
        (COMPLETE, b"[" * 50_000, None, "the body nests deeper than 200"),
        (COMPLETE, b'{"prompt": "x", "n": 1, "n": 2}', None, "the name 'n' is in one object twice"),
        (COMPLETE, b'{"prompt": "\xff"}', None, "the body is not UTF-8: invalid start byte at byte 12"),
        (COMPLETE, json.dumps({"prompt": "x"}).encode("utf-16"), None, "the body is not UTF-8"),
        (CHAT, b'{"messages": [' + b"{}," * 60_000 + b"{}]}", None, "more than 262144 values"),
        (COMPLETE, b'{"prompt": [' + b"1," * bodies.MOST_VALUES + b"1]}", None, "more than 262144 values"),
        (COMPLETE, {"prompt": "x", "user" * 1_000: 1}, "user" * 25, "unknown field 'useruser"),
        (CHAT, {**HELLO, "tools": [{"type": "function", "function": {"name": 'f", "x'}}]}, "tools[0].function.name",
         "letters, digits, _ and -"),
    ],
)  # fmt: skip
def test_what_no_policy_can_carry_out_is_refused_by_name(tokenizer, path, body, param, message):
    async def refused():
        async with World(Drip(tokenizer), tokenizer) as world:
            status, answer = await world.post(path, body)
            return status, answer["error"]

    status, error = asyncio.run(refused())
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert message in error["message"] and len(error["message"]) < 1_100, error


def test_values_are_counted_outside_of_strings_and_no_further_than_they_may_be(monkeypatch):
    monkeypatch.setattr(bodies, "MOST_VALUES", 1_000)
    full = json.dumps({"metadata": {"x": '\\",[{' * 2_000, "y": "\\" * 2_001}}).encode()
    assert bodies.read_object(full)["metadata"]["y"] == "\\" * 2_001
    for values in (b"[],", b'"",', b'{"a":0},', b'"\\\\",', b"null,", b'["\\"",1],'):
        with pytest.raises(InvalidRequest, match="more than 1000 values"):
            bodies.read_object(b'{"metadata": [' + values * 1_001 + b"1]}")
        few = b'{"metadata": [' + values * 100 + b'"' + b"." * 3_000 + b'"]}'
        assert len(bodies.read_object(few)["metadata"]) == 101


# ---------------------------------------------------------------------------------------------------------------------
# Long


@pytest.mark.parametrize("where", ["prompt", "user", "assistant", "tools"])
def test_more_characters_than_the_context_holds_are_refused_before_they_are_tokenised(tokenizer, where):
    text = "<" * (15 * MIB)
    body: dict[str, Any] = {"prompt": text} if where == "prompt" else {"messages": [{"role": where, "content": text}]}
    if where == "tools":
        body = {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "description": text}}]}
    watched = Watched(tokenizer)

    async def refused():
        async with World(Drip(tokenizer), watched) as world:
            return await world.post(COMPLETE if where == "prompt" else CHAT, body)

    status, answer = asyncio.run(refused())
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "characters; prompt and completion have room for 10000 tokens here" in answer["error"]["message"]
    assert watched.characters == 0


def test_what_is_short_does_not_wait_for_what_is_long(tokenizer, monkeypatch):
    monkeypatch.setattr(service, "_LONG", 1_000)
    watched = Watched(tokenizer)
    long = {"prompt": "wait " * 300, "max_tokens": 1}
    conversation = {"messages": [{"role": "user", "content": "hello " * 300}], "max_tokens": 1}
    ended: list[str] = []

    async def ask(world: World, name: str, path: str, body: Any) -> int:
        status, _ = await world.post(path, body)
        ended.append(name)
        return status

    async def all_at_once():
        async with World(Drip(tokenizer), watched) as world:
            held = [asyncio.create_task(ask(world, "long", COMPLETE, long)) for _ in range(3)]
            held.append(asyncio.create_task(ask(world, "long", CHAT, conversation)))
            while not watched.threads:
                await asyncio.sleep(0.01)
            for _ in range(5):
                assert await ask(world, "short", COMPLETE, {"prompt": "x", "max_tokens": 1}) == 200
            assert '"status": "ok"' in await world.get("/health")
            watched.go.set()
            return await asyncio.gather(*held)

    assert asyncio.run(all_at_once()) == [200] * 4
    assert ended == ["short"] * 5 + ["long"] * 4
    assert threading.get_ident() not in watched.threads


# ---------------------------------------------------------------------------------------------------------------------
# Failing


class Failing(Drip):
    """Fails each request whose prompt is one token, by name, or by a bug."""

    limits = PolicyLimits(slots=2, max_length=1_000, max_stops=4, vocab_size=10_000)
    error: Exception

    async def stream(self, token_ids, sampling, *, session=""):
        if len(token_ids) == 1:
            raise self.error
        async for drawn in super().stream(token_ids, sampling):
            yield drawn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RequestFailed("a request of 1 tokens failed"), "a request of 1 tokens failed"),
        (KeyError("secret"), "KeyError; the server's log says where"),
    ],
)
def test_what_the_server_fails_on_is_answered_500_by_name_and_counted(tokenizer, error, said, stream):
    policy = Failing(tokenizer)
    policy.error = error

    async def failed():
        async with World(policy, tokenizer) as world:
            body = json.dumps({"prompt": [1], "stream": stream})
            async with world.client.post(COMPLETE, data=body, headers={"Content-Type": "application/json"}) as answer:
                text = (await answer.text()).removeprefix("data: ")
            good, _ = await world.post(COMPLETE, {"prompt": [1, 2], "max_tokens": 2})
            return answer.status, json.loads(text)["error"], good, await world.get("/metrics")

    status, body, good, metrics = asyncio.run(failed())
    assert (status, body["type"], good) == (200 if stream else 500, "server_error", 200)
    assert body["message"] == f"the server failed on this request: {said}"
    assert f'astra_serving_failures_total{{error="{type(error).__name__}"}} 1.0' in metrics
