"""What is answered as a call of a strict function fits its schema; what cannot be promised is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving_world import Drip, serving
from sft_world import make_tokenizer

from astra_jax.serving.messages import TurnDeltas, message_of
from astra_jax.serving.protocol import InvalidRequest
from astra_jax.serving.strict import MOST_SCHEMAS, check_of, enforceable
from synthesis.core.chatml import QWEN3
from synthesis.core.records import ToolCall

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
# As the agents' library of OpenAI and pydantic's send them.
SCHEMA: dict[str, Any] = {
    "$defs": {"City": {**CITY, "title": "City"}},
    "type": "object",
    "title": "route_args",
    "properties": {
        "start": {"$ref": "#/$defs/City", "description": "Where from."},
        "via": {"type": "array", "items": {"$ref": "#/$defs/City"}, "maxItems": 2},
        "by": {"enum": ["car", "train"], "type": "string"},
        "hours": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
    },
    "required": ["start", "via", "by", "hours"],
    "additionalProperties": False,
}
GOOD = {"start": {"name": "Lima"}, "via": [{"name": "Cusco"}], "by": "car", "hours": None}


def tool(schema: Any, *, strict: Any = True, name: str = "route") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def test_arguments_that_fit_are_a_call_and_others_are_none():
    check = check_of([tool(SCHEMA), tool(SCHEMA, strict=False, name="free"), tool(None, name="nothing")])
    assert check is not None
    assert check(ToolCall("", "route", GOOD)) == ""
    for wrong in (
        {"by": "ship"},
        {"hours": 0},
        {"hours": "1"},
        {"start": {"name": 3}},
        {"start": {"name": "Lima", "country": "Peru"}},
        {"via": [{"name": "x"}] * 3},
        {"more": 1},
    ):
        assert check(ToolCall("", "route", GOOD | wrong))
        assert check(ToolCall("", "free", GOOD | wrong)) == ""
    assert check(ToolCall("", "route", {"start": {"name": "Lima"}}))
    assert check(ToolCall("", "nothing", {})) == "" and check(ToolCall("", "nothing", {"a": 1}))
    assert "too many" in check(ToolCall("", "route", GOOD | {"via": [{"name": "x"}] * 10_000}))
    assert check_of([tool(SCHEMA, strict=False), tool(SCHEMA, strict=None)]) is None


LOOP = obj(next={"$ref": "#/$defs/Node"}) | {"$defs": {"Node": obj(next={"$ref": "#/$defs/Node"})}}
# Each level is in the next one twice: a thousand references are 2 ** 500 schemas.
DOUBLED = obj(a={"$ref": "#/$defs/d499"}) | {
    "$defs": {"d0": {"type": "string"}}
    | {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 500)}
}


@pytest.mark.parametrize(
    ("schema", "param", "why"),
    [
        ({"type": "string"}, "p", "no schema of type object"),
        ({**obj(), "additionalProperties": True}, "p.additionalProperties", "must be false"),
        ({"type": "object", "properties": {}}, "p.additionalProperties", "must be false"),
        ({**obj(a={"type": "string"}), "required": []}, "p.required", "must name all properties"),
        (obj(a={"type": "object"}), "p.a.additionalProperties", "must be false"),
        (obj(a={"type": ["object", "null"]}), "p.a.additionalProperties", "must be false"),
        (obj(a={"type": "null", "additionalProperties": {"pattern": "x"}}), "p.a.additionalProperties", "must be"),
        (obj(a={}), "p.a", "says no type"),
        (obj(a={"type": "string", "pattern": "^(a+)+$"}), "p.a.pattern", "cannot be enforced here"),
        (obj(a={"type": "string", "format": "date"}), "p.a.format", "cannot be enforced here"),
        (obj(a={"allOf": []}), "p.a.allOf", "cannot be enforced here"),
        (obj(a={"$ref": "http://127.0.0.1/schema"}), "p.a.$ref", "not one of $defs"),
        (obj(a={"type": "text"}), "p.a.type", 'is "text"'),
        (obj(a={"type": "integer", "multipleOf": 0}), "p.a.multipleOf", "is 0"),
        (obj(a={"enum": []}), "p.a.enum", "is []"),
        (obj(a=3), "p.a", "is 3, no schema"),
        (obj(a={"enum": ["x" * 40_000]}), "p", "more than 32768 characters"),
        (obj(a={"enum": [1] * MOST_SCHEMAS}, b={"type": "null"}), "p", "more than 1000 schemas"),
        (LOOP, "p.next.next.$ref", "contains itself"),
        (DOUBLED, "p", "more than 1000 schemas or 32 levels"),
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused_by_name(schema, param, why):
    with pytest.raises(InvalidRequest) as refused:
        enforceable(schema, "p")
    assert refused.value.param == param and why in str(refused.value)
    assert "change the schema, or leave strict out" in str(refused.value)


def written(arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'route', 'arguments': arguments})}\n</tool_call>"


def test_a_call_that_does_not_fit_stays_in_the_content_streamed_or_not():
    check = check_of([tool(SCHEMA)])
    bad = written(GOOD | {"by": "ship"})
    text = f"Let me see.\n{bad}\n{written(GOOD)}"
    message = message_of(text, QWEN3, tools=True, check=check)
    assert message["content"] == f"Let me see.\n{bad}"
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [GOOD]
    for step in (1, 5, len(text)):
        deltas = TurnDeltas(QWEN3, tools=True, check=check)
        made = [delta for at in range(0, len(text), step) for delta in deltas.push(text[at : at + step])]
        made += deltas.finish()
        assert "".join(delta.get("content", "") for delta in made) == message["content"]
        assert sum("tool_calls" in delta for delta in made) == 1


@pytest.mark.parametrize(("name", "finish"), [("Lima", "tool_calls"), (3, "length")])
def test_strict_over_http(tmp_path, name, finish):
    tokenizer = make_tokenizer(tmp_path)
    text = f"<tool_call>\n{json.dumps({'name': 'route', 'arguments': {'name': name}})}\n</tool_call>"
    policy = Drip(tokenizer, text, seconds=0)
    with serving(lambda: policy, tokenizer) as server:
        (choice,) = (
            server.client()
            .chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Go."}],
                tools=[tool(CITY)],
                max_tokens=len(tokenizer.encode(text)),
            )
            .choices
        )
    if finish == "tool_calls":
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"name": "Lima"}]
    else:
        assert choice.message.tool_calls is None and choice.message.content == text
