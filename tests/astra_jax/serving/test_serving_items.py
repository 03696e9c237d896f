"""The Responses API through the `openai` client, whose own types say what an answer and each event must have."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving_world import Scripted, serving
from sft_world import make_tokenizer

from astra_jax.serving.items import items_request_of
from astra_jax.serving.protocol import InvalidRequest
from synthesis.core.chatml import QWEN3

CALLS = "\n".join(QWEN3.call_frame.text("capital_of", json.dumps({"country": one})) for one in ("Peru", "Kenya"))
SAID = {
    "capitals": f"<think>\nI look them up.\n</think>\n\nLet me see.\n{CALLS}",
    "as JSON": '<think>\nhm\n</think>\n\n{"capital": "Lima"}',
    "<tool_response>": "<think>\n\n</think>\n\nLima and Nairobi.",
}
TOOL: Any = {
    "type": "function",
    "name": "capital_of",
    "description": "The capital of a country.",
    "parameters": {
        "type": "object",
        "properties": {"country": {"type": "string"}},
        "required": ["country"],
        "additionalProperties": False,
    },
    "strict": True,
}
OPEN = {"type": "object"}
FORM: Any = {"format": {"type": "json_schema", "name": "x", "schema": {
    "type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"],
    "additionalProperties": False}, "strict": True}}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def says(prompt: str) -> str:
        return next(text for key, text in reversed(SAID.items()) if key in prompt)

    with serving(lambda: Scripted(tokenizer, says), tokenizer) as running:
        yield running


def valid(answer: Response) -> Response:
    return Response.model_validate(answer.to_dict())


def shape(answer: Response) -> list[Any]:
    """The output without ids, which are new each time."""
    return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True) for item in answer.output]


def test_an_agents_turns_and_their_events(server):
    create = server.client().responses.create
    question: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "The capitals?"}]}]
    asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "instructions": "Look up.", "max_output_tokens": 900}
    first = valid(create(input=question, **asked))
    thought, said, *calls = first.output
    assert (first.status, first.instructions, first.tools[0].name) == ("completed", "Look up.", "capital_of")
    assert thought.content[0].text == "I look them up." and said.content[0].text == first.output_text == "Let me see."
    assert [json.loads(call.arguments) for call in calls] == [{"country": "Peru"}, {"country": "Kenya"}]
    assert len({item.id for item in first.output}) == 4 and calls[0].call_id != calls[1].call_id
    usage = first.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens

    events = list(create(input=question, stream=True, **asked))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert shape(valid(events[-1].response)) == shape(first)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Let me see." and len(deltas) > 2
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in events[-1].response.output]
    with server.client().responses.stream(input=question, **asked) as stream:  # the client's own reading of the events
        assert shape(stream.get_final_response()) == shape(first)

    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "…"} for call in calls]
    second = valid(create(input=[*question, *(one.to_dict() for one in first.output), *outputs], **asked))
    assert second.output_text == "Lima and Nairobi."


def test_answers_of_a_form_logprobs_and_options(server):
    got = valid(
        server.client().responses.create(
            model="tiny",
            input="Say it as JSON.",
            text=FORM,
            temperature=0.5,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            extra_body={"top_k": 20, "seed": 4},
        )
    )
    sampling = server.policy.samplings[-1]
    assert (sampling.top_k, sampling.seed, sampling.alternatives, sampling.temperature) == (20, 4, 2, 0.5)
    assert json.loads(got.output_text) == {"capital": "Lima"} and sampling.constraint is not None
    assert got.text.format.name == "x" and got.output[-1].content[0].logprobs
    parsed = server.client().responses.create(model="tiny", input="as JSON", reasoning={"effort": "none"})
    assert parsed.reasoning.effort == "none"


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({}, "input", "input is missing"),
        ({"input": 3}, "input", "send a list"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0]", "send messages, function calls"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "parts of type text"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "send all items instead"),
        ({"input": "x", "background": True}, "background", "leave it out"),
        ({"input": "x", "n": 2}, "n", "a field of chats"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]", "only functions"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": "x", "sauce": 1}, "sauce", "unknown field 'sauce'"),
        ({"input": "x", "top_p": 2}, "top_p", "top_p is 2"),
        ({"input": "x", "include": ["sauce"]}, "include", 'include has "sauce"'),
        ({"input": "x", "metadata": {"a": 1}}, "metadata", "send an object of strings"),
        ({"input": "x", "text": {"format": 3}}, "text.format", "text.format is 3"),
        ({"input": "x", "text": "short"}, "text", "send an object"),
        ({"input": "x", "reasoning": 7}, "reasoning", "reasoning is 7"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", 'reasoning.effort is "huge"'),
        ({"input": "x", "reasoning": {"effort": []}}, "reasoning.effort", "reasoning.effort is []"),
        ({"input": "x", "reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", "not supported here"),
        ({"input": "x", "reasoning": {"context": "all_turns"}}, "reasoning.context", "not supported here"),
        ({"input": "x", "reasoning_effort": "low"}, "reasoning_effort", "a field of chats"),
        (
            {"input": "x", "reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
            "reasoning.effort",
            "leave one of them out",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "gA"}]}, "input[0].encrypted_content", "cannot be read"),
        ({"input": "x", "top_logprobs": 5}, "top_logprobs", "without message.output_text.logprobs in include"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_names_of_this_interface(fields, param, why):
    with pytest.raises(InvalidRequest) as refused:
        items_request_of(fields)
    assert refused.value.param == param and why in refused.value.text


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"verbosity": "medium", "format": None}},
        {"reasoning": {"effort": None, "summary": "auto"}, "top_logprobs": 0},
        {"reasoning": {"effort": "medium"}},
        {"truncation": "auto", "include": ["reasoning.encrypted_content"], "max_tool_calls": 3},
    ],
)
def test_what_asks_for_nothing_is_taken(fields):
    plain = items_request_of({"input": "x"})
    asked = items_request_of({"input": "x", **fields})
    assert asked.response_format == plain.response_format and asked.thinking == plain.thinking


def test_refusals_of_the_prompt_and_the_grammar_have_those_names_too(server):
    client = server.client()
    for options, param in (
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": "x", "tools": [{**TOOL, "parameters": {"type": "object"}}]},
            "tools[0].parameters.additionalProperties",
        ),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "json_object", "schema": OPEN}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {**FORM["format"], "schemas": OPEN}}}, "text.format.schemas"),
        ({"input": "x" * 200_000}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", **options)
        assert refused.value.param == param and param in str(refused.value)
