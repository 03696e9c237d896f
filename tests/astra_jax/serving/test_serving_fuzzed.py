"""Requests of every wrong kind: none is answered 5xx, none stops the server, and none changes what comes after it."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_world import decisive
from serving_world import model
from sft_world import TOOL, make_tokenizer

from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.serving.service import OpenAIService, ServingConfig

REQUESTS = 3_000
SHAPES = EngineConfig(slots=2, max_length=256, prefill_chunk=32, decode_chunk=4, min_window=256)

# ---------------------------------------------------------------------------------------------------------------------
# Values

_TEXTS = st.text(st.characters(categories=("L", "N", "P", "Zs", "Cc", "Cs", "So")), max_size=12) | st.sampled_from(
    ["", "auto", "none", "<|im_end|>", "<think>", "\ud800", "a" * 5_000, "\udfff\ud800", "{", "\x00", "tiny"]
)
_NUMBERS = (
    st.integers(-3, 3)
    | st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 1 << 40, 10**400])
    | st.floats()
    | st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e-300, 1e-45, 1e-6, 1e38, 1e39, 1e308, -0.0, 0.5])
)
_SCALARS = st.none() | st.booleans() | _NUMBERS | _TEXTS
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)

_CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": _TEXTS, "arguments": _TEXTS | st.just('{"a": 1}') | _VALUES})},
    optional={"id": _SCALARS, "type": _SCALARS},
)
_PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXTS}) | _VALUES, max_size=3)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | _TEXTS},
    optional={
        "content": _TEXTS | _PARTS | _VALUES,
        "tool_calls": st.lists(_CALLS, max_size=2) | _VALUES,
        "reasoning_content": _TEXTS | _VALUES,
        "name": _SCALARS,
        "tool_call_id": _SCALARS,
        "function_call": _VALUES,
        "refusal": _SCALARS,
    },
)
_SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object") | _VALUES},
    optional={
        "properties": st.dictionaries(_TEXTS, _VALUES, max_size=2),
        "required": _VALUES,
        "additionalProperties": st.just(False) | _VALUES,
        "$defs": _VALUES,
    },
)
_FUNCTIONS = st.fixed_dictionaries(
    {"name": st.just("f") | _TEXTS, "parameters": _SCHEMAS | _VALUES},
    optional={"description": _VALUES, "strict": st.just(True) | _VALUES},
)
_TOOLS = st.fixed_dictionaries({"type": st.just("function") | _SCALARS, "function": _FUNCTIONS | _VALUES})

_BOTH = {
    "model": st.just("tiny") | _VALUES,
    "n": st.integers(1, 3) | _VALUES,
    "temperature": st.floats(0, 2) | _VALUES,
    "top_p": st.floats(0, 1) | _VALUES,
    "seed": st.integers() | _VALUES,
    "stop": _TEXTS | st.lists(_TEXTS, max_size=20) | _VALUES,
    "stop_token_ids": st.lists(_NUMBERS, max_size=6) | _VALUES,
    "max_tokens": st.integers(1, 2) | _VALUES,
    "stream": st.just(True) | _VALUES,
    "stream_options": st.sampled_from(
        [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    )
    | _VALUES,
    "logprobs": st.sampled_from([0, 2, True]) | _VALUES,
    **{
        name: st.booleans() | _VALUES
        for name in ("ignore_eos", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens")
    },
    **{
        name: st.sampled_from([0, 0.5, 1, -2, 20, True]) | _VALUES
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p")
    },
    **{name: st.sampled_from([0, 1, {}, True]) | _VALUES for name in ("logit_bias", "user")},
}
_COMPLETION = _BOTH | {
    "prompt": _TEXTS | st.lists(_NUMBERS | _TEXTS, max_size=4) | st.lists(st.lists(_NUMBERS), max_size=2) | _VALUES,
    "echo": st.just(True) | _VALUES,
}
_CHAT = _BOTH | {
    "messages": st.lists(_MESSAGES, max_size=3) | st.lists(_VALUES, max_size=2) | _VALUES,
    "tools": st.lists(_TOOLS, max_size=2) | _VALUES,
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", "required", {"type": "function"}, {"type": "function", "function": {"name": "f"}}]
    )
    | _VALUES,
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
    | st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries({"schema": _SCHEMAS | _VALUES}, optional={"strict": st.booleans()})
            | _VALUES,
        }
    )
    | _VALUES,
    "parallel_tool_calls": st.booleans() | _VALUES,
    "max_completion_tokens": st.integers(1, 2) | _VALUES,
    "top_logprobs": st.integers(0, 3) | _VALUES,
    "reasoning_effort": st.sampled_from(["none", "high"]) | _VALUES,
    "continue_final_message": st.just(True) | _VALUES,
    "chat_template_kwargs": st.fixed_dictionaries({"enable_thinking": st.booleans() | _VALUES}) | _VALUES,
}
_ITEMS = {name: strategy for name, strategy in _BOTH.items() if name not in ("n", "stop", "max_tokens", "logprobs")} | {
    "input": _TEXTS
    | st.lists(
        _MESSAGES
        | st.fixed_dictionaries({"type": st.just("function_call"), "name": _TEXTS, "arguments": _TEXTS | _VALUES})
        | st.fixed_dictionaries({"type": st.just("function_call_output"), "output": _TEXTS | _VALUES})
        | st.fixed_dictionaries({"type": st.just("reasoning"), "content": _PARTS | _VALUES}),
        max_size=3,
    )
    | _VALUES,
    "instructions": _TEXTS | _VALUES,
    "tools": st.lists(st.builds(lambda function: {"type": "function", **function}, _FUNCTIONS), max_size=2) | _VALUES,
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}]) | _VALUES,
    "text": st.fixed_dictionaries({"format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | _VALUES})
    | st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": st.just("json_schema"), "schema": _SCHEMAS})})
    | _VALUES,
    "max_output_tokens": st.integers(1, 2) | _VALUES,
    "include": st.just(["message.output_text.logprobs"]) | _VALUES,
    "top_logprobs": st.integers(0, 3) | _VALUES,
    "reasoning": st.just({"effort": "none"}) | _VALUES,
    **{name: _VALUES for name in ("previous_response_id", "store", "truncation", "n", "metadata")},
}
_PATHS: dict[str, tuple[dict[str, Any], dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": ({"prompt": "hello", "max_tokens": 2}, _COMPLETION),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}, _CHAT),
    "/v1/responses": ({"input": "hello", "max_output_tokens": 2}, _ITEMS),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good request of which some fields are not, and whose bytes may be cut, doubled or wrapped."""
    path = draw(st.sampled_from(sorted(_PATHS)))
    base, fields = _PATHS[path]
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    body: Any = base | {name: draw(fields[name]) for name in names}
    kind = draw(st.sampled_from(["fields"] * 12 + ["value", "unknown", "bytes", "nested", "twice", "utf-16", "digits"]))
    if kind == "value":
        body = draw(_VALUES)
    elif kind == "unknown":
        body |= {draw(_TEXTS): draw(_VALUES)}
    text = json.dumps(body, ensure_ascii=draw(st.booleans()))
    encoded = text.encode("utf-8", "surrogatepass")
    if kind == "bytes":
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(encoded))] * 2)))
        encoded = encoded[:start] + draw(st.binary(max_size=6)) + encoded[end:]
    elif kind == "nested":
        levels = draw(st.sampled_from([100, 199, 300, 900, 1_100, 50_000]))
        opened, closed = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}")]))
        name = draw(st.sampled_from([b"metadata", b"tools", b"prompt", b"user", b"x"]))
        encoded = b'{"%s":%s1%s,' % (name, opened * levels, closed * levels) + encoded[1:]
    elif kind == "twice" and encoded.startswith(b"{"):
        encoded = encoded[:-1] + b", " + encoded[1:]
    elif kind == "utf-16":
        encoded = text.encode("utf-16", "surrogatepass")
    elif kind == "digits":
        encoded = b'{"seed":%s,' % (b"9" * draw(st.sampled_from([19, 400, 5_000]))) + encoded[1:]
    return path, encoded


# ---------------------------------------------------------------------------------------------------------------------
# The server


class World:
    """The service on the real engine and its client, on one event loop."""

    def __init__(self, folder: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.statuses: dict[int, int] = {}
        self.run(self._start(folder))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 300))

    async def _start(self, folder: Any) -> None:
        tokenizer = make_tokenizer(folder)
        config = model(tokenizer.vocab_size)
        self.engine = Engine(decisive(config), config, SHAPES)
        self.service = OpenAIService(self.engine, tokenizer, ServingConfig("tiny", port=0))
        await self.service.start()
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{self.service.port}")

    async def close(self) -> None:
        await self.client.close()
        await self.service.stop()
        await self.engine.close()

    async def post(self, path: str, body: bytes) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        async with self.client.post(path, data=body, headers=headers) as answer:
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
            return answer.status, (await answer.read()).decode()

    def checked(self, path: str, body: bytes) -> tuple[int, list[Any]]:
        """Status and JSON of an answer, which is said to be the client's fault if to be a fault at all."""
        status, text = self.run(self.post(path, body))
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        streamed = [strict(event) for event in events if event != "[DONE]"]
        answers = streamed if events else [strict(text)]
        assert status < 500, answers
        for answer in answers:
            failed = answer.get("response", answer).get("error") or {}
            assert "server_error" not in (failed.get("type"), failed.get("code")), answer
        if events:
            ends = ("response.completed", "response.incomplete", "response.failed")
            assert events[-1] == "[DONE]" or answers[-1]["type"] in ends
        if status != 200:
            assert answers[0]["error"]["message"] and len(text) < 3_000
        return status, answers


def strict(text: str) -> Any:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refused)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("tokenizer"))
    yield world
    world.run(world.close())
    world.loop.close()


NORMAL = {
    "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
    "tools": [TOOL.to_openai()],
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": True,
    "return_token_ids": True,
}


def normal(world: World) -> list[int]:
    status, (answer,) = world.checked("/v1/chat/completions", json.dumps(NORMAL).encode())
    assert status == 200
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow
def test_no_request_is_answered_5xx_or_changes_what_comes_after(world):
    before = normal(world)

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def fuzz(request: tuple[str, bytes]) -> None:
        world.checked(*request)

    world.statuses.clear()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    fuzz()
    now = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{world.statuses}, {now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime:.1f} processor seconds")
    assert sum(world.statuses.values()) >= REQUESTS
    assert world.statuses[200] > REQUESTS / 20 and world.statuses[400] > REQUESTS / 4
    assert (world.engine.failure, world.engine.stats.failed, world.engine.running) == (None, 0, 0)
    assert normal(world) == before
