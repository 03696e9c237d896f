"""OpenAI's fields: each that its client can send is accepted, ignored by name or refused by name; each that is sent
back is exact to its published schema; and what the server said is accepted again as a conversation's history."""

from __future__ import annotations

import functools
import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest
from openai.types import Completion, CompletionUsage, Model, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from serving_world import Scripted, serving
from sft_world import TOOL, make_tokenizer

from astra_jax.serving.items import items_request_of
from astra_jax.serving.messages import conversation_of
from astra_jax.serving.protocol import ChatRequest, CompletionRequest, InvalidRequest, parse
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3, ChatML

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
ITEMS_HELLO: dict[str, Any] = {"model": "tiny", "input": "hello"}
CALL = QWEN3.call_frame.text("capital_of", '{"country": "Perú 北京"}')
TURNS = [
    "plain text\n",
    "",
    "<think>\nwhy?\n</think>\n\nbecause 🙂",
    f"<think>\n\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
    f"{CALL}\nbehind it",
    f"{CALL}\n{CALL}",
    f"between\n{CALL}\nthem\n{CALL}",
    '<tool_call>\n{"name": "capital_of", "arguments": 3}\n</tool_call>',
    "<think>\nnever closed",
    "<|im_start|>tags</think> and <tool_response>",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Repeats(Scripted):
    """Says what `turn` is, and keeps the prompts."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer, self._answer)
        self.turn, self.prompts = "hello", list[str]()

    def _answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.turn


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(lambda: Repeats(tokenizer), tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def unthinking(tokenizer):
    """The same, of a model whose template has no thoughts."""
    other = ChatTokenizer(tokenizer._tokenizer, chat_format=ChatML())
    with serving(lambda: Repeats(other), other) as running:
        yield running


def post(server, path: str, body: dict[str, Any]) -> tuple[Any, bytes]:
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read()


def ignored(server, path: str, body: dict[str, Any]) -> list[str]:
    found = {
        (post(server, path, {**body, "stream": stream})[0]["Astra-Ignored-Fields"] or "") for stream in (0 > 1, 1 > 0)
    }
    (names,) = found  # the same for a stream and a whole answer
    return [name for name in names.split(", ") if name]


# ---------------------------------------------------------------------------------------------------------------------
# In


@pytest.mark.parametrize(
    ("read", "minimal", "params"),
    [
        (lambda fields: parse(fields, ChatRequest), HELLO, chat_create_params.CompletionCreateParamsBase),
        (
            lambda fields: parse(fields, CompletionRequest),
            {"prompt": "x"},
            completion_create_params.CompletionCreateParamsBase,
        ),
        (items_request_of, ITEMS_HELLO, response_create_params.ResponseCreateParamsBase),
    ],
    ids=["chat", "completions", "responses"],
)
def test_no_field_of_openais_client_is_unknown(read, minimal, params):
    for name in params.__annotations__:
        try:
            asked = read({**minimal, name: {"sauce": "brown"}})
        except InvalidRequest as refused:
            assert not refused.text.startswith("unknown field") and name in f"{refused.param} {refused.text}", (
                refused.text
            )
        else:
            is_ignored = any(one.startswith(name) for one in asked.ignored)
            assert is_ignored or hasattr(asked, name) or name in asked.echoed, name


def test_what_cannot_change_an_answer_is_named_in_a_header(server):
    chat = {"user": "me", "verbosity": "low", "prompt_cache_key": "a", "service_tier": "flex"}
    assert ignored(server, "chat/completions", {**HELLO, **chat, "best_of": 1, "n": 1}) == list(chat)
    assert ignored(server, "chat/completions", HELLO) == []
    assert ignored(server, "completions", {"prompt": "x", "safety_identifier": "a", "best_of": 2, "n": 2}) == [
        "safety_identifier"
    ]
    items = {"truncation": "auto", "text": {"verbosity": "high"}, "reasoning": {"summary": "detailed"}, "store": True}
    items |= {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
    assert sorted(ignored(server, "responses", {**ITEMS_HELLO, **items})) == [
        "include.reasoning.encrypted_content",
        "reasoning.summary",
        "store",
        "text.verbosity",
        "truncation",
    ]
    options = {"include_obfuscation": False, "include_usage": True, "continuous_usage_stats": True}
    headers, body = post(server, "chat/completions", {**HELLO, "stream": True, "stream_options": options})
    assert headers["Astra-Ignored-Fields"] == "stream_options.include_obfuscation"
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(body)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] > 1


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_efforts_switch_thoughts(server, unthinking, effort):
    for path, body, field in (
        ("chat/completions", {**HELLO, "reasoning_effort": effort}, "reasoning_effort"),
        ("responses", {**ITEMS_HELLO, "reasoning": {"effort": effort}}, "reasoning.effort"),
    ):
        assert ignored(server, path, body) == []
        assert server.policy.prompts[-1].endswith("<think>\n\n</think>\n\n") == (effort in ("none", "minimal"))
        assert ignored(unthinking, path, body) == [field]
        assert unthinking.policy.prompts[-1].endswith("<|im_start|>assistant\n")
    body = {**HELLO, "chat_template_kwargs": {"enable_thinking": effort not in ("none", "minimal")}}
    assert ignored(server, "chat/completions", {**body, "reasoning_effort": effort}) == []
    assert ignored(unthinking, "chat/completions", body) == ["chat_template_kwargs.enable_thinking"]
    body["reasoning_effort"] = "high" if effort in ("none", "minimal") else "none"
    with pytest.raises(InvalidRequest, match=r"reasoning_effort is .*enable_thinking is .*leave one of them out"):
        parse(body, ChatRequest)


# ---------------------------------------------------------------------------------------------------------------------
# Out

OURS = {
    *("message.reasoning_content", "delta.reasoning_content", "choices[].stop_reason", "choices[].token_ids"),
    *("prompt_token_ids", "choices[].prompt_token_ids", "max_model_len"),
}
"""Fields beside OpenAI's, which vLLM sends too."""


def extras(value: Any, path: str = "") -> Iterator[str]:
    """Paths of a model's fields that its schema does not have."""
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{path}.{name}".lstrip(".") for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from extras(getattr(value, name, None), f"{path}.{name}")
    elif isinstance(value, list):
        for one in value:
            yield from extras(one, f"{path}[]")


adapter = functools.cache(pydantic.TypeAdapter)


def exact(data: Any, kind: Any) -> Any:
    """The value as a type of the client's: no field is missing, of another type, or unknown."""
    value = adapter(kind).validate_json(json.dumps(data), strict=True)
    beside = {path for path in extras(value) if not any(path.endswith(one) for one in OURS)}
    if data.get("type") == "response.function_call_arguments.done":
        beside.discard("name")  # clients before 3.57 require it
    assert not beside, beside
    return value


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


TOOLS = [TOOL.to_openai()]
ITEM_TOOLS = [{"type": "function", **{name: one for name, one in TOOLS[0]["function"].items() if name != "strict"}}]
CHATS: list[dict[str, Any]] = [
    {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"n": 2, "max_tokens": 2, "stop": ["\n"]},
    {"logprobs": True},
]


@pytest.mark.parametrize("turn", TURNS)
def test_every_field_is_exact(server, turn):
    server.policy.turn = turn
    for fields in CHATS:
        whole = exact(json.loads(post(server, "chat/completions", {**HELLO, **fields})[1]), ChatCompletion)
        for choice in whole.choices:
            for one in (choice.logprobs and choice.logprobs.content) or ():
                assert bytes(one.bytes).decode("utf-8", "replace") == one.token or one.token.startswith("\\x")
        for options in ({}, {"stream_options": {"include_usage": True}}):
            body = {**HELLO, **fields, "stream": True, **options}
            chunks = [exact(one, ChatCompletionChunk) for one in events(post(server, "chat/completions", body)[1])]
            assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
            if options:
                assert chunks[-1].usage == whole.usage and not any(chunk.usage for chunk in chunks[:-1])
        assert isinstance(whole.usage, CompletionUsage) and whole.usage.completion_tokens_details.reasoning_tokens >= 0
    for extra in ({}, {"logprobs": 1, "n": 2}, {"echo": True, "max_tokens": 3}):
        body = {"model": "tiny", "prompt": ["a", "b"], **extra}
        exact(json.loads(post(server, "completions", body)[1]), Completion)
        for chunk in events(post(server, "completions", {**body, "stream": True})[1]):
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI's type is that of a whole answer
            exact(chunk, Completion)
    for fields in ({"tools": ITEM_TOOLS}, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}):
        body = {**ITEMS_HELLO, **fields, "metadata": {"a": "b"}, "reasoning": {"effort": "low", "summary": "auto"}}
        exact(json.loads(post(server, "responses", body)[1]), Response)
        sent = events(post(server, "responses", {**body, "stream": True})[1])
        for event in sent:
            exact(event, ResponseStreamEvent)
        assert [event["sequence_number"] for event in sent] == list(range(len(sent)))


def test_errors_and_models_are_exact(server):
    models = json.loads(urllib.request.urlopen(f"{server.url}/v1/models", timeout=60).read())
    assert models["object"] == "list" and exact(models["data"][0], Model).id == "tiny"
    for path, body in (
        ("chat/completions", {**HELLO, "n": 0}),
        ("completions", {"prompt": "x", "model": "gpt"}),
        ("responses", {}),
    ):
        with pytest.raises(urllib.request.HTTPError) as refused:  # type: ignore[attr-defined]
            post(server, path, body)
        error = json.loads(refused.value.read())
        assert list(error) == ["error"] and set(error["error"]) == {"message", "type", "param", "code"}
        assert isinstance(error["error"]["type"], str) and isinstance(error["error"]["message"], str)


def test_tokens_that_are_parts_of_characters_keep_their_bytes(server, tokenizer):
    server.policy.turn = text = "🙂 é"
    body = {**HELLO, "logprobs": True, "top_logprobs": 0}
    content = json.loads(post(server, "chat/completions", body)[1])["choices"][0]["logprobs"]["content"][:-1]
    assert bytes(itertools.chain.from_iterable(one["bytes"] for one in content)).decode() == text
    assert content[0]["token"] == "\\xf0" and content[0]["bytes"] == [0xF0]  # no token of this vocabulary is an emoji
    legacy = json.loads(post(server, "completions", {"model": "tiny", "prompt": "x", "logprobs": 0})[1])
    assert legacy["choices"][0]["logprobs"]["tokens"][0] == "bytes:\\xf0"
    for token_id in tokenizer.ids:
        data = tokenizer.token_bytes(token_id)
        assert data.decode("utf-8", "replace") == tokenizer.decode([token_id])


# ---------------------------------------------------------------------------------------------------------------------
# And in again


DUMPS: list[Callable[[Any], Any]] = [
    lambda one: one.model_dump(),
    lambda one: one.model_dump(exclude_none=True),
    lambda one: one.to_dict(),
]


@pytest.mark.parametrize("turn", TURNS)
def test_an_answer_is_accepted_as_history_however_a_client_keeps_it(server, turn):
    server.policy.turn = turn
    client = server.client()
    answer = client.chat.completions.create(**HELLO, tools=TOOLS).choices[0].message
    calls = [call.id for call in answer.tool_calls or ()]
    results: list[Any] = [{"role": "tool", "tool_call_id": one, "content": "…"} for one in calls]
    items: Any = client.responses.create(**ITEMS_HELLO, tools=ITEM_TOOLS).output
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "…"}
        for one in items
        if one.type == "function_call"
    ]
    last = [{"role": "user", "content": "And now?"}] if not calls else []
    start = len(server.policy.prompts)
    for dump in DUMPS:
        client.chat.completions.create(
            model="tiny", messages=[*HELLO["messages"], dump(answer), *results, *last], tools=TOOLS
        )
        history = [{"role": "user", "content": "hello"}, *map(dump, items), *outputs, *last]
        client.responses.create(model="tiny", input=history, tools=ITEM_TOOLS)
    assert len(set(server.policy.prompts[start:])) == 1, server.policy.prompts[start:]
    if turn in (CALL, f"{CALL}\n{CALL}"):  # a turn as it was trained comes back as it was said
        assert f"assistant\n{turn}<|im_end|>" in server.policy.prompts[-1]


DEEP = '{"a": ' + "[" * 300 + "]" * 300 + "}"
NOTHING: dict[str, Any] = {"function_call": None, "audio": None, "annotations": [], "refusal": None, "name": None}


@pytest.mark.parametrize(
    ("message", "content", "arguments"),
    [
        ({"content": None, **NOTHING, "tool_calls": None}, "", []),
        ({"content": "", "tool_calls": []}, "", []),
        ({}, "", []),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, "c"]}, "abc", []),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}], "id": "msg_1", "status": "x"}, "a", []),
        ({"content": None, "refusal": "No."}, "No.", []),
        ({"content": None, "tool_calls": [("f", "")]}, "", [{}]),
        ({"content": None, "tool_calls": [("f", " "), ("f", None), ("f", "null")]}, "", [{}, {}, {}]),
        ({"content": None, "tool_calls": [("f", {"a": 1})]}, "", [{"a": 1}]),
        ({"content": "x", "tool_calls": [("f", "{bad")]}, "x\n" + QWEN3.call_frame.text("f", "{bad"), []),
        ({"tool_calls": [("f", DEEP)]}, QWEN3.call_frame.text("f", DEEP), []),
        ({"tool_calls": [("f", '{"a": NaN}')]}, QWEN3.call_frame.text("f", '{"a": NaN}'), []),
        ({"tool_calls": [("f", '{"a": "\\ud800"}')]}, QWEN3.call_frame.text("f", '{"a": "\\ud800"}'), []),
        ({"content": None, "tool_calls": [("f", "[1]"), ("f", "{}")]}, QWEN3.call_frame.text("f", "[1]"), [{}]),
    ],
)
def test_an_assistants_message_is_accepted_as_clients_send_it(message, content, arguments):
    calls = message.get("tool_calls")
    if calls:
        kept = [{"id": "1", "type": "function", "function": {"name": name, "arguments": one}} for name, one in calls]
        message = {**message, "tool_calls": kept}
    said = {"role": "assistant", **message}
    (read,), _ = conversation_of(parse({"messages": [said]}, ChatRequest), QWEN3)
    assert (read.content, [call.arguments for call in read.tool_calls]) == (content, arguments)


def test_results_of_tools_and_developers_are_accepted():
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be terse."}]},
        {"role": "tool", "content": None, "tool_call_id": "1", "name": "f", "status": "success"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]},
    ]
    read, _ = conversation_of(parse({"messages": messages}, ChatRequest), QWEN3)
    assert [(one.role, one.content) for one in read] == [("system", "Be terse."), ("tool", ""), ("tool", "23")]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}], "encrypted_content": None}
    items = [
        {"role": "user", "content": "x"},
        {**summary, "id": "rs_1", "status": None},
        {"role": "assistant", "content": "y"},
    ]
    (_, said), _ = conversation_of(items_request_of({"input": items}), QWEN3)
    assert (said.reasoning, said.content) == ("why", "y")


@pytest.mark.parametrize("field", [{"audio": {"id": "a"}}, {"prefix": True}, {"partial": True}])
def test_fields_of_a_message_that_would_change_it_are_refused(field):
    said = {"role": "assistant", "content": "x", **field}
    with pytest.raises(InvalidRequest) as refused:
        conversation_of(parse({"messages": [said]}, ChatRequest), QWEN3)
    assert refused.value.param == f"messages[0].{next(iter(field))}"
