"""Answers of a given form: JSON of a schema, and calls that are forced, forbidden or one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from rollout_world import decisive
from serving_world import Scripted, model, on_engine, serving
from sft_world import TOOL, make_tokenizer
from test_serving_strict import SCHEMA, obj

from astra_jax.serving.grammars import Grammars
from astra_jax.serving.messages import message_of
from astra_jax.serving.protocol import ChatRequest, InvalidRequest, parse
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3, QWEN3_INSTRUCT
from synthesis.core.llama3_chat import LLAMA3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tokenizer):
    """A model that says anything, where nothing keeps it from it."""
    config = model(tokenizer.vocab_size)
    with serving(on_engine(decisive(config), config), tokenizer) as running:
        yield running


HELLO: list[Any] = [{"role": "user", "content": "Go."}]
ROUTE = obj(by={"enum": ["car", "train"]}, hours={"type": "integer", "minimum": 1, "maximum": 40})


def tool(name: str, schema: Any, *, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def formed(schema: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def asked(**fields: Any) -> ChatRequest:
    return parse({"messages": HELLO, **fields}, ChatRequest)


class Walk:
    """Draws at random what a request's grammar lets follow, sooner what ends something."""

    def __init__(self, tokenizer: ChatTokenizer, request: ChatRequest) -> None:
        grammar = Grammars(tokenizer, tokenizer.vocab_size + 7).of(request)
        assert grammar is not None
        self._grammar, self._tokenizer = grammar, tokenizer
        texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        self._weights = np.asarray([200.0 if {*text} & {*'"}]>'} or text == "n" else 1.0 for text in texts])
        self._weights[[tokenizer.eos_id, tokenizer.pad_id]] = 1e4

    def text(self, seed: int) -> str:
        """A whole turn."""
        rng, constraint, drawn = np.random.default_rng(seed), self._grammar.constraint(), list[int]()
        while True:
            words = np.zeros(-(-(self._tokenizer.vocab_size + 7) // 32), np.int32)
            constraint.allow(drawn, words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            assert len(allowed) and allowed.max() < self._tokenizer.vocab_size
            weights = self._weights[allowed]
            drawn.append(int(rng.choice(allowed, p=weights / weights.sum())))
            if drawn[-1] in (self._tokenizer.eos_id, self._tokenizer.pad_id):
                return self._tokenizer.decode(drawn[:-1])
            assert len(drawn) < 2_000


LIST = obj(next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})
SCHEMAS: list[Any] = [
    SCHEMA,
    LIST | {"$defs": {"Node": LIST}},
    obj(a={"type": "number", "exclusiveMinimum": -0.5, "maximum": 3}, b={"type": "integer", "multipleOf": 7}),
    obj(a={"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 2, "maxItems": 3}),
    obj(a={"const": {"x": [1, "y"]}}, b={"type": "string", "minLength": 2, "maxLength": 5}),
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_is_drawn_at_random_fits_the_schema(tokenizer, schema):
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    answers = Walk(tokenizer, asked(response_format=formed(schema, strict=True)))
    calls = Walk(tokenizer, asked(tools=[tool("route", schema, strict=True)], tool_choice="required"))
    for seed in range(8):
        checker.validate(json.loads(QWEN3.split_reasoning(answers.text(seed))[1]))
        called = QWEN3.parse_assistant(calls.text(seed)).calls
        assert {call.name for call in called} == {"route"}
        for call in called:
            checker.validate(call.arguments)


@pytest.mark.parametrize("chat_format", [QWEN3, QWEN3_INSTRUCT, LLAMA3], ids=["qwen3", "instruct", "llama3"])
def test_calls_are_forced_forbidden_named_and_one(tokenizer, chat_format):
    class Said(ChatTokenizer):
        def __init__(self) -> None:
            super().__init__(tokenizer._tokenizer)
            self.format = chat_format

    tools = [
        tool("route", ROUTE, strict=True),
        tool("go", {"type": "object", "allOf": [{"not": {}}]}),
        tool("stay", None),
    ]

    def called(seed: int, **fields: Any) -> tuple[str, list[str]]:
        text = Walk(Said(), asked(tools=tools, **fields)).text(seed)
        message = message_of(text, chat_format, tools=True, form="response_format" in fields)
        return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls", [])]

    forced = [called(seed, tool_choice="required") for seed in range(6)]
    forced += [called(seed, tool_choice="required", response_format={"type": "json_object"}) for seed in range(2)]
    assert all(content == "" and names for content, names in forced)
    assert {name for _, names in forced for name in names} == {"route", "go", "stay"}
    named = {"type": "function", "function": {"name": "stay"}}
    assert [called(seed, tool_choice=named) for seed in range(2)] == [("", ["stay"])] * 2
    one = [called(seed, tool_choice="required", parallel_tool_calls=False) for seed in range(6)]
    assert all(len(names) == 1 for _, names in one)
    free = [called(seed) for seed in range(6)]  # a strict function: text is free, a call is not
    assert any(content for content, _ in free) and not any("<tool_call>" in content for content, _ in free)
    either = [called(seed, response_format={"type": "json_object"}) for seed in range(8)]
    assert all(names or isinstance(json.loads(content), dict) for content, names in either)


def test_without_a_form_nothing_is_constrained(tokenizer):
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for fields in (
        {},
        {"tools": [tool("go", ROUTE)]},
        {"tools": [tool("go", ROUTE, strict=True)], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        assert grammars.of(asked(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "use text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with a schema"),
        ({"response_format": {"type": "json_object", "schema": obj()}}, "response_format.schema", "type json_schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "leave it out"),
        ({"response_format": {**formed(obj()), "strict": True}}, "response_format.strict", "leave it out"),
        ({"response_format": formed({"type": "object"}, strict=True)}, "response_format.json_schema.schema.additional"
         "Properties", "must be false"),
        ({"response_format": formed(obj(a={"type": "string", "pattern": "(?=x)"}))}, "response_format", "look-ahead"),
        ({"response_format": formed(obj(a={"type": "string", "format": "colour"}))}, "response_format", "colour"),
        ({"response_format": formed({"type": "object", "not": {}})}, "response_format", "cannot be enforced here"),
        ({"response_format": formed(obj(a={"type": "integer", "minimum": 3, "maximum": 2}))}, "response_format",
         "nsatisfiable"),
        ({"response_format": formed({"enum": [0] * 9_000})}, "response_format.json_schema.schema", "more than 5000"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ends with the turn"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "always", "tools": [tool("go", None)]}, "tool_choice", "use auto, none, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "stay"}}, "tools": [tool("go", None)]},
         "tool_choice", "a function that tools has"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_kept_are_refused(tokenizer, fields, param, why):
    with pytest.raises(InvalidRequest) as refused:
        Grammars(tokenizer, tokenizer.vocab_size).of(asked(**fields))
    assert refused.value.param == param and why in str(refused.value)


def test_a_random_model_answers_in_form_and_others_beside_it_as_ever(server):
    def ask(**options: Any) -> Any:
        return server.client().chat.completions.create(
            model="tiny", messages=HELLO, seed=3, max_tokens=60, extra_body={
                "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False},
            }, **options,
        )  # fmt: skip

    plain = ask().choices
    answers = ask(response_format=formed(ROUTE, strict=True), logprobs=True, top_logprobs=4)
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), ROUTE)
        for one in choice.logprobs.content[:-1]:
            assert 1 <= len(one.top_logprobs) <= 4 and one.logprob <= 1e-5
    tools = [tool("route", ROUTE, strict=True)]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = ask(**options).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), ROUTE)
    chunks = [chunk.choices[0] for chunk in ask(**options, stream=True)]
    streamed = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert [one.function.arguments for one in streamed] == [call.function.arguments] and chunks[
        -1
    ].finish_reason == "tool_calls"
    assert [choice.token_ids for choice in ask().choices] == [choice.token_ids for choice in plain]


def test_the_likeliest_tokens_are_shown_and_options_reach_the_draw(server):
    def ask(**options: Any) -> Any:
        extra = {"top_k": 2, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True, "return_token_ids": True}
        options |= {"max_tokens": 6, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "extra_body": extra}
        return server.client().completions.create(model="tiny", prompt="Peru", logprobs=5, **options)

    (choice,) = ask().choices
    assert all(1 <= len(best) <= 2 for best in choice.logprobs.top_logprobs)  # no third one can be drawn
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    for token, value, best in zip(tokens, values, choice.logprobs.top_logprobs, strict=True):
        assert best[token] == value
    streamed = [chunk.choices[0] for chunk in ask(stream=True)]
    assert [token for one in streamed for token in one.token_ids] == choice.token_ids
    assert [best for one in streamed for best in one.logprobs.top_logprobs] == choice.logprobs.top_logprobs


def test_a_schema_that_no_text_ends_is_the_clients_fault(server):
    endless = obj(a={"$ref": "#/$defs/N"}) | {"$defs": {"N": obj(next={"$ref": "#/$defs/N"})}}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(openai.BadRequestError, match="what may follow cannot be said"):
        server.client().chat.completions.create(
            model="tiny", messages=HELLO, response_format=formed(endless), extra_body=extra
        )
    assert server.policy.failure is None and server.policy.running == 0


def test_parallel_calls_can_be_switched_off_and_json_may_hold_tags(tokenizer):
    call = QWEN3.call_frame.text("capital_of", '{"country": "Peru"}')
    tagged = '{"a": "</think> <tool_call>x"}'
    said = {"calls": f"<think>\nhm\n</think>\n\nBoth.\n{call}\n{call}", "json": tagged}
    policy = Scripted(tokenizer, lambda prompt: said["json" if "as JSON" in prompt else "calls"])
    with serving(lambda: policy, tokenizer) as server:
        for stream in (False, True):
            create = server.client().chat.completions.create
            got = create(
                model="tiny", messages=HELLO, tools=[TOOL.to_openai()], parallel_tool_calls=False, stream=stream
            )
            if stream:
                deltas = [chunk.choices[0] for chunk in got]
                assert len([one for delta in deltas for one in delta.delta.tool_calls or []]) == 1
                finish = deltas[-1].finish_reason
            else:
                (choice,) = got.choices
                assert (choice.message.content, len(choice.message.tool_calls)) == ("Both.", 1)
                finish = choice.finish_reason
            assert finish == "tool_calls"
        assert policy.samplings[0].constraint is None
        question: Any = [{"role": "user", "content": "Say it as JSON."}]
        for tools in ([], [TOOL.to_openai()]):
            options = {"messages": question, "tools": tools, "response_format": {"type": "json_object"}}
            message = server.client().chat.completions.create(model="tiny", **options).choices[0].message
            assert (message.content, message.tool_calls) == (tagged, None)
            chunks = server.client().chat.completions.create(model="tiny", stream=True, **options)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == tagged
