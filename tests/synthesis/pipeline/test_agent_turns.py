"""The agent behind an endpoint is asked as an agent: messages and tools in, a message out, over a real socket."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from synthesis.core.chat_format import AssistantTurn, MalformedCall
from synthesis.core.endpoint_settings import RoleSettings
from synthesis.core.openai_messages import read_reply
from synthesis.core.recording import Recording
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, TeacherError

TOOLS = [ToolSpec("find", "Find it.", {"type": "object", "properties": {"item": {"type": "string"}}})]
CALLS = [ToolCall("call_1", "find", {"item": "a"}), ToolCall("call_2", "find", {"item": "é"})]
MESSAGES = [
    Message("system", "Be brief."),
    Message("user", "Where are they?"),
    Message("assistant", "", "I look.", CALLS),
    Message("tool", "here", tool_call_id="call_1", name="find"),
    Message("tool", "there", tool_call_id="call_2", name="find"),
]


def call(arguments: Any = '{"item": "a"}', name: Any = "find", id: str = "abc") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def served(*replies: dict[str, Any] | tuple[str, dict[str, Any]], recording=None, mode="off", **config: Any):
    """A teacher whose endpoint sends these messages, the last for ever, and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        reply = replies[min(len(bodies), len(replies)) - 1]
        finish, message = reply if isinstance(reply, tuple) else ("stop", reply)
        return web.json_response({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = OpenAITeacherConfig(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m", **config)
    teacher = OpenAITeacher(settings, recording, mode)
    try:
        yield teacher, bodies
    finally:
        await teacher.close()
        await runner.cleanup()


async def act(teacher: OpenAITeacher, seed: int = 7) -> AssistantTurn:
    return await teacher.act(MESSAGES, TOOLS, language="en", seed=seed)


async def test_the_conversation_and_the_tools_are_what_is_sent_and_nothing_else():
    async with served({"content": "Here and there.", "reasoning_content": "Both are found. "}) as (teacher, bodies):
        assert await act(teacher) == AssistantTurn("Both are found.", "Here and there.")
    [body] = bodies
    asked = [call('{"item": "a"}', id="call_1"), call('{"item": "é"}', id="call_2")]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where are they?"},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": asked},
        {"role": "tool", "content": "here", "tool_call_id": "call_1"},
        {"role": "tool", "content": "there", "tool_call_id": "call_2"},
    ]
    assert body["tools"] == [TOOLS[0].to_openai()] and "response_format" not in body
    assert (body["seed"], body["model"], body["temperature"]) == (7, "m", 1.0)


async def test_parallel_calls_and_their_order():
    async with served({"content": None, "tool_calls": [call(), call('{"item": "b"}', id="abd")]}) as (teacher, _):
        turn = await act(teacher)
    assert [(one.name, one.arguments) for one in turn.calls] == [("find", {"item": "a"}), ("find", {"item": "b"})]
    assert turn.reasoning == turn.content == ""


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"content": "A.", "reasoning": "Why."}, AssistantTurn("Why.", "A.")),
        ({"content": "<think>\nWhy.\n</think>\n\nA."}, AssistantTurn("Why.", "A.")),
        ({"content": "Why.</think>A."}, AssistantTurn("Why.", "A.")),
        ({"content": [{"type": "text", "text": "A"}, {"type": "image"}, {"text": 1}]}, AssistantTurn("", "A")),
        ({"content": 3, "reasoning_content": None, "tool_calls": None}, AssistantTurn("", "")),
        ({"content": {"type": "text", "text": "A."}}, AssistantTurn("", "A.")),
        ({"content": "A.", "reasoning_content": "<think>\nWhy.\n</think>"}, AssistantTurn("Why.", "A.")),
        ({"content": "A.", "thinking": "Why."}, AssistantTurn("Why.", "A.")),
        (
            {"content": [{"type": "thinking", "thinking": "Why."}, "A."], "reasoning_content": "Why."},
            AssistantTurn("Why.", "A."),
        ),
        (
            {"content": "A.", "reasoning_details": [{"type": "reasoning.text", "text": "Why."}]},
            AssistantTurn("Why.", "A."),
        ),
        ({"content": "A.", "reasoning": {"summary": [{"text": "Why."}]}}, AssistantTurn("Why.", "A.")),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Why."}]},
                    {"type": "text", "text": "A."},
                ]
            },
            AssistantTurn("Why.", "A."),
        ),
        (
            {"content": [{"type": "thinking", "thinking": "Why."}, {"type": "output_text", "text": "A."}]},
            AssistantTurn("Why.", "A."),
        ),
        (
            {"content": [{"type": "reasoning", "text": "Why."}, {"type": "text", "text": "A."}]},
            AssistantTurn("Why.", "A."),
        ),
        ({"content": [{"text": "Why.", "thought": True}, {"text": "A."}]}, AssistantTurn("Why.", "A.")),
        (
            {"content": "Models end a thought with `</think>`."},
            AssistantTurn("", "Models end a thought with `</think>`."),
        ),
        (
            {"function_call": {"name": "find", "arguments": "{}"}},
            AssistantTurn("", "", [ToolCall("call_0", "find", {})]),
        ),
        (
            {"content": [{"type": "tool_use", "id": "a", "name": "find", "input": {"item": "b"}}]},
            AssistantTurn("", "", [ToolCall("a", "find", {"item": "b"})]),
        ),
        (
            {"content": [{"functionCall": {"name": "find", "args": {"item": "b"}}}]},
            AssistantTurn("", "", [ToolCall("call_0", "find", {"item": "b"})]),
        ),
        (
            {"tool_calls": [{"type": "function", "name": "find", "arguments": "{}"}]},
            AssistantTurn("", "", [ToolCall("call_0", "find", {})]),
        ),
        ({"tool_calls": [call("null", id="")]}, AssistantTurn("", "", [ToolCall("call_0", "find", {})])),
        ({"tool_calls": [call(None)]}, AssistantTurn("", "", [ToolCall("abc", "find", {})])),
        ({"tool_calls": [call("null")]}, AssistantTurn("", "", [ToolCall("abc", "find", {})])),
        ({"tool_calls": [call(" ")]}, AssistantTurn("", "", [ToolCall("abc", "find", {})])),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Why."}]},
                    {"type": "text", "text": "A."},
                ]
            },
            AssistantTurn("Why.", "A."),
        ),
        (
            {"content": [{"type": "reasoning", "text": "Why."}, {"type": "output_text", "text": "A."}]},
            AssistantTurn("Why.", "A."),
        ),
        ({"tool_calls": [call({"item": 1})]}, AssistantTurn("", "", [ToolCall("abc", "find", {"item": 1})])),
    ],
)
def test_what_servers_send(message, turn):
    assert read_reply(message) == turn


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [call("{item}")]},
        {"tool_calls": [call("[1]")]},
        {"tool_calls": [call(name=None)]},
        {"tool_calls": ["find"]},
        {"tool_calls": "find"},
    ],
)
async def test_a_call_that_cannot_be_read_is_asked_for_again_and_never_made(message):
    async with served(message, message, {"content": "Well."}) as (teacher, bodies):
        assert await act(teacher) == AssistantTurn("", "Well.")
        assert [body["seed"] for body in bodies] == [7, 8, 9]
    async with served(message, tries=2) as (teacher, bodies):
        turn = await act(teacher)
        assert len(bodies) == 2 and any(isinstance(one, MalformedCall) for one in turn.calls)


LEAKS = [
    {"content": '<tool_call>\n{"name": "find"}\n</tool_call>'},
    {"content": "I look it up.\n\n<｜DSML｜function_calls", "tool_calls": [call()]},
    {"content": "<think>\nThe user wants it. I could ask again"},
    {"content": "<thought>\nA plan.\n</thought>\nIt is here."},
    {"content": "To end a thought, models write </think> in their text."},
    {"content": '```json\n{"name": "find", "arguments": {"item": "a"}}\n```'},
    {"content": "It is here.<|im_end|>"},
    {"content": "It is here.", "reasoning_content": "So. <tool_call>{}"},
    {"tool_calls": [call('{"item": "a<|eot_id|>"}')]},
]


@pytest.mark.parametrize("message", LEAKS)
async def test_a_turn_with_markup_in_it_is_asked_for_again_and_then_no_turn(message):
    async with served(message, {"content": "Well."}) as (teacher, bodies):
        assert await act(teacher) == AssistantTurn("", "Well.") and len(bodies) == 2
    async with served(message, tries=2) as (teacher, bodies):
        assert (await act(teacher)).leak and len(bodies) == 2


async def test_a_refusal_is_asked_for_again_and_named():
    refusal = {"content": None, "refusal": "I cannot help with that."}
    async with served(refusal, {"content": "Well."}) as (teacher, _):
        assert (await act(teacher)).content == "Well."
    async with served(refusal, tries=2) as (teacher, _):
        with pytest.raises(TeacherError, match="refused by the model: I cannot help with that"):
            await act(teacher)


@pytest.mark.parametrize(
    ("name", "arguments", "repairs"),
    [
        ("functions.find", '{"item": "a"}', ["tool_name"]),
        ("default_api.find", '{"item": "a"}', ["tool_name"]),
        ("functions.find:0", '{"item": "a"}', ["tool_name"]),
        ("find<|channel|>commentary", '{"item": "a"}', ["tool_name"]),
        (" find ", '{"item": "a"}', ["tool_name"]),
        ("find", '```json\n{"item": "a"}\n```', ["code_fence"]),
        ("functions.find", '{"item": "a"}}', ["tool_name", "stray_bracket"]),
    ],
)
async def test_a_call_in_another_form_is_repaired_and_the_repair_is_named(name, arguments, repairs):
    async with served({"tool_calls": [call(), call(arguments, name)]}) as (teacher, bodies):
        turn = await act(teacher)
    assert len(bodies) == 1 and turn.repairs == {1: repairs}
    assert [(one.name, one.arguments) for one in turn.calls] == [("find", {"item": "a"})] * 2


def test_a_name_that_is_not_offered_stays_as_it_was_written():
    for name in ("functions.other", "find.functions", "find2", "myfind"):
        (found,) = read_reply({"tool_calls": [call("{}", name)]}, ["find"]).calls
        assert found.name == name
    (found,) = read_reply({"tool_calls": [call("{}", "api.find")]}, ["find", "api.find"]).calls
    assert found.name == "api.find"


async def test_a_turn_that_was_cut_off_is_no_turn():
    cut = ("length", {"content": "Half"})
    async with served(cut, cut, {"content": "Whole."}) as (teacher, bodies):
        assert (await act(teacher)).content == "Whole." and [body["seed"] for body in bodies] == [7, 8, 9]
    async with served(cut, tries=3) as (teacher, _):
        with pytest.raises(TeacherError, match="cut off at max_tokens=16384 in all of 3 tries"):
            await act(teacher)


@pytest.mark.parametrize("word", ["content_filter", "error", "abort", "SAFETY", "insufficient_system_resource"])
async def test_a_turn_that_was_broken_off_is_no_turn(word):
    """What is left of it would be trained on, as an answer that ends in the middle of a sentence."""
    half = (word, {"content": "To reset your router, first unplug the"})
    async with served(half, {"content": "Whole."}) as (teacher, bodies):
        assert (await act(teacher)).content == "Whole." and [body["seed"] for body in bodies] == [7, 8]
    async with served(half, tries=3) as (teacher, _):
        with pytest.raises(TeacherError, match=rf"broken off .*\(finish_reason='{word}'\) in all of 3 tries"):
            await act(teacher)
    async with served(("length", {"content": "Half"}), half, tries=2) as (teacher, _):
        with pytest.raises(TeacherError, match="cut off at max_tokens=16384 or broken off by the endpoint"):
            await act(teacher)


@pytest.mark.parametrize(
    "word", ["stop", "tool_calls", "function_call", "stop_sequence", "eos_token", "STOP", "", None]
)
async def test_a_turn_that_its_model_ended_is_whole(word):
    async with served((word, {"content": "Whole."})) as (teacher, bodies):
        assert (await act(teacher)).content == "Whole." and len(bodies) == 1


async def test_the_agents_settings_are_those_of_its_role():
    own = RoleSettings(temperature=0.2, max_tokens=99, extra_body={"top_k": 3, "seed": None}, tries=2)
    roles = {"agent": (own,)}
    async with served({"tool_calls": [call("x")]}, roles=roles) as (teacher, bodies):
        await act(teacher)
    asked = [(body["temperature"], body["max_tokens"], body["top_k"], body.get("seed")) for body in bodies]
    assert asked == [(0.2, 99, 3, None)] * 2


async def test_turns_are_recorded_as_they_came(tmp_path):
    recording = Recording(tmp_path / "teacher.sqlite")
    message = {"content": "", "reasoning": "Why.", "tool_calls": [call()]}
    async with served(message, recording=recording, mode="record") as (teacher, bodies):
        first = await act(teacher)
        assert await act(teacher) == first and len(bodies) == 1
        replaying = OpenAITeacher(teacher.config, recording, "replay")
        assert await act(replaying) == first and json.loads(json.dumps(first.calls[0].arguments)) == {"item": "a"}
        with pytest.raises(Exception, match="has no answer to a request for a turn of the agent"):
            await act(replaying, seed=8)
    recording.close()
