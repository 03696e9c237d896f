"""OpenAI's, Anthropic's and Gemini's APIs through their makers' clients, on servers as strict as the services."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from strict_apis import ANSWER, APIS, KEY, THOUGHT, StrictAnthropic, StrictApi, StrictGemini

from astra_jax.base.errors import InputError
from synthesis.core.endpoint import EndpointUnusable, RequestRefused
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.recording import Recording
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.pipeline.teacher import OpenAITeacher, TeacherError
from synthesis.trajectories.teacher_answers import ChainVote

PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = ToolSpec("find", "Find it.", PARAMETERS)
NATIVE = ("anthropic", "gemini")


@asynccontextmanager
async def served(api: str, *replies: Any, recording: Recording | None = None, mode: Any = "off", **settings: Any):
    """A teacher of a strict server of an API."""
    server = APIS[api](*replies)
    async with server as url:
        options: dict[str, Any] = {"api_key": KEY, "api": api, "backoff_seconds": 0.01, "tries": 2, **settings}
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m", **options), recording, mode)
        try:
            yield teacher, server
        finally:
            await teacher.close()


async def converse(teacher: OpenAITeacher) -> list[Message]:
    messages = [Message("system", "Be brief."), Message("user", "Where?")]
    turn = await teacher.act(messages, [TOOL], language="en", seed=7)
    calls = [ToolCall(f"call_{n}", one.name, one.arguments) for n, one in enumerate(turn.calls) if hasattr(one, "name")]
    messages.append(Message("assistant", turn.content, turn.reasoning, calls))
    messages += [Message("tool", f"at {one.id}", tool_call_id=one.id, name=one.name) for one in calls]
    last = await teacher.act(messages, [TOOL], language="en", seed=8, sent=[turn.sent])
    messages += [Message("assistant", last.content), Message("user", "Thanks. And now?")]
    again = await teacher.act(messages, [TOOL], language="en", seed=9, sent=[turn.sent, last.sent])
    return [*messages, Message("assistant", again.content, again.reasoning)]


@pytest.mark.parametrize("api", APIS)
async def test_a_conversation_with_calls_is_carried_on(api: str, tmp_path: Any) -> None:
    """Signatures, unknown fields and ids go back; no field that the service does not know is sent."""
    recording = Recording(tmp_path / "teacher.sqlite")
    async with served(api, recording=recording, mode="record") as (teacher, server):
        messages = await converse(teacher)
        assert len(server.requests) == 3 and teacher.spent.prompt_tokens == 150 == teacher.spent.tokens - 21
        assert await converse(teacher) == messages and len(server.requests) == 3  # all recorded
    _, _, first, *results, last, _, _ = messages
    assert [(one.name, one.arguments) for one in first.tool_calls] == [("find", {"item": "a"})] * 2
    assert first.reasoning == ("" if api == "openai" else THOUGHT) and last.content == ANSWER
    assert [one.content for one in results] == ["at call_0", "at call_1"]
    recording.close()


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_has_its_schema(api: str) -> None:
    async with served(api) as (teacher, server):
        given = await teacher.answer(ChainVote, "Which?", "en", 5)
        assert given.valid and given.user_query == "Look."
    assert len(server.requests) == 2  # the first found out that the schema is heeded


@pytest.mark.parametrize("api", NATIVE)
async def test_a_conversation_of_another_author_is_taken(api: str) -> None:
    """Of a recording of an older version, or of another model: without what the service would have sent."""
    calls = [ToolCall("call_0", "find", {"item": "a"})]
    messages = [Message("user", "Where?"), Message("assistant", "I look.", "", calls)]
    messages.append(Message("tool", "here", tool_call_id="call_0", name="find"))
    async with served(api) as (teacher, server):
        if api == "gemini":  # it wants a signature of its own
            with pytest.raises(TeacherError, match="thought_signature"):
                await teacher.act(messages, [TOOL], language="en", seed=7)
        else:
            turn = await teacher.act(messages, [TOOL], language="en", seed=7)
            assert turn.content == ANSWER


@pytest.mark.parametrize("api", APIS)
async def test_a_field_that_the_service_does_not_know_is_reported_with_its_name(api: str) -> None:
    async with served(api, extra_body={"no_such_field": 1}, structured_output="text") as (teacher, _):
        with pytest.raises(EndpointUnusable, match="status 400.*no_such_field"):
            await teacher.answer(ChainVote, "Which?", "en", 5)


@pytest.mark.parametrize("api", APIS)
async def test_a_wrong_key_stops_the_run_and_is_not_shown(api: str) -> None:
    async with served(api, api_key="revoked") as (teacher, server):
        with pytest.raises(EndpointUnusable, match="status 401.*give a key that may use model=m") as caught:
            await teacher.answer(ChainVote, "Which?", "en", 5)
    assert "revoked" not in str(caught.value) and len(server.requests) == 1


def gemini(parts: Any, reason: Any, **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": reason}], **more}


def anthropic(content: Any, stop: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": content, "stop_reason": stop, **more}


HALF = [{"type": "text", "text": "To reset"}]


@pytest.mark.parametrize(
    ("api", "half", "problem"),
    [
        ("anthropic", anthropic(HALF, "refusal"), r"broken off .*stop_reason='refusal'"),
        ("anthropic", anthropic(HALF, "pause_turn"), r"broken off .*stop_reason='pause_turn'"),
        ("anthropic", anthropic(HALF, "max_tokens"), "cut off at max_tokens=16384"),
        ("anthropic", anthropic(HALF, "model_context_window_exceeded"), "cut off at max_tokens=16384"),
        ("anthropic", anthropic(HALF, "end_turn", error={"type": "api_error"}), "broken off .*api_error"),
        ("gemini", gemini([{"text": "To reset"}], "SAFETY"), r"broken off .*finishReason='SAFETY'"),
        ("gemini", gemini([], "MALFORMED_FUNCTION_CALL"), r"broken off .*MALFORMED_FUNCTION_CALL"),
        ("gemini", gemini([], "FINISH_REASON_UNSPECIFIED"), "broken off"),
        ("gemini", gemini([{"text": "To reset"}], "MAX_TOKENS"), "cut off at max_tokens=16384"),
        ("gemini", {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}, r"blockReason='PROHIBITED_CONTENT'"),
        ("gemini", {"candidates": [{"finishReason": "RECITATION", "index": 0}]}, r"finishReason='RECITATION'"),
    ],
)  # fmt: skip
async def test_half_an_answer_is_never_a_whole_one(api: str, half: Any, problem: str) -> None:
    async with served(api, half, half) as (teacher, server):
        with pytest.raises(TeacherError, match=f"{problem}.* in all of 2 tries"):
            await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
        assert len(server.requests) == 2 == teacher.spent.requests


@pytest.mark.parametrize("api", NATIVE)
@pytest.mark.parametrize(
    "reply",
    [
        {}, [], "x", 7, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        {"content": "text"}, {"content": [1]}, {"candidates": []}, {"candidates": [3]},
        {"candidates": [{"content": {"parts": [1]}, "finishReason": "STOP"}]},
        {"error": {"code": 503, "message": "busy"}}, {"data": {}, "success": True},
    ],
    ids=str,
)  # fmt: skip
async def test_a_reply_of_another_form_fails_its_try(api: str, reply: Any) -> None:
    async with served(api, web.json_response(reply)) as (teacher, server):
        turn = await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
        assert len(turn.calls) == 2 and server.requests[0] == server.requests[1]


@pytest.mark.parametrize("api", NATIVE)
@pytest.mark.parametrize("status", [429, 500, 503, 529])
async def test_a_busy_service_is_asked_again_by_us_alone(api: str, status: int) -> None:
    """The clients' own retries are off: rates and budgets count each request."""
    busy = web.json_response({"error": {"message": "busy"}}, status=status)
    async with served(api, busy) as (teacher, server):
        await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
        assert len(server.requests) == 2 == teacher.endpoints[0].spent.requests + 1


@pytest.mark.parametrize("api", APIS)
async def test_keys_and_headers_of_the_environment_stay_there(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients read them, for whatever address; a key is for its address alone."""
    names = ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY",
             "ANTHROPIC_AUTH_TOKEN", "GOOGLE_API_KEY", "GEMINI_API_KEY")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "of-another-address")
    for name in ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "Authorization: Bearer of-another-address\nX-Key: of-another-address")
    async with served(api) as (teacher, server):
        await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
    (headers,) = server.headers
    assert "of-another-address" not in str(headers) and not any("stainless" in name.lower() for name in headers)


@pytest.mark.parametrize("api", NATIVE)
async def test_a_redirect_is_not_followed_with_the_key(api: str) -> None:
    other = APIS[api]()
    async with other as elsewhere:
        moved = web.Response(status=307, headers={"Location": elsewhere})
        async with served(api, moved) as (teacher, _):
            with pytest.raises(EndpointUnusable, match="status 307: it sends us to"):
                await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
        assert not other.requests


@pytest.mark.parametrize("api", NATIVE)
async def test_a_wrong_address_is_reported(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from synthesis.core.endpoint import Endpoint

    monkeypatch.setattr(Endpoint, "STARTUP_SECONDS", 0.3)
    page = [web.Response(text="<html>", content_type="text/html") for _ in range(99)]
    async with served(api, *page) as (teacher, _):
        with pytest.raises(EndpointUnusable, match="does not answer as a model endpoint"):
            await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
    nobody = OpenAITeacher(OpenAITeacherConfig("http://127.0.0.1:9", "m", api=api, backoff_seconds=0.1))  # type: ignore[arg-type]
    with pytest.raises(EndpointUnusable, match="base_url=http://127.0.0.1:9 does not answer.*is running"):
        await nobody.act([Message("user", "Where?")], [TOOL], language="en", seed=7)
    await nobody.close()


async def test_fields_of_extra_body_are_those_of_the_api() -> None:
    thinking: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with served("anthropic", extra_body=thinking) as (teacher, server):
        await converse(teacher)
        assert server.requests[1]["thinking"] == thinking["thinking"]
    config = {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}
    async with served("gemini", extra_body=config) as (teacher, server):
        await converse(teacher)
        settings = server.requests[1]["generationConfig"]
        assert settings["thinkingConfig"] == {"thinkingBudget": 0} and settings["maxOutputTokens"] == 16384


@pytest.mark.parametrize(("api", "package"), [("anthropic", "anthropic"), ("gemini", "google.genai")])
def test_a_client_that_is_not_installed_is_named_with_its_extra(
    api: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else found(name, *more)
    )
    with pytest.raises(InputError, match=rf"api={api} needs the package {package}: pip install 'astra-jax\[{api}\]'"):
        OpenAITeacher(OpenAITeacherConfig("http://h", "m", api=api))


def test_an_api_belongs_to_its_address() -> None:
    from synthesis.core.endpoint_settings import RoleSettings

    roles = {"judge": (RoleSettings("http://other/v1", "j"),), "agent": (RoleSettings(temperature=0.0),)}
    config = OpenAITeacherConfig("https://api.anthropic.com", "m", KEY, api="anthropic", roles=roles)  # type: ignore[arg-type]
    assert (config.models("judge")[0].api, config.models("agent")[0].api) == ("openai", "anthropic")
    assert config.described["api"] == "anthropic"


async def test_a_form_that_the_api_lacks_is_not_asked_for() -> None:
    async with served("anthropic", structured_output="json_object") as (teacher, server):
        request = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9,
                   "response_format": {"type": "json_object"}}  # fmt: skip
        with pytest.raises((RequestRefused, EndpointUnusable), match="no json_object"):
            await teacher.endpoints[0].complete("x", msgspec.json.encode(request), random.Random(0), trying=True)
        assert not server.requests


def test_the_servers_are_strict() -> None:
    """They are no formality: a seed for Anthropic, OpenAI's fields for Gemini are refused."""
    for server, body in (
        (StrictAnthropic(), {"model": "m", "max_tokens": 1, "messages": [], "seed": 1}),
        (StrictGemini(), {"contents": [], "generationConfig": {"max_tokens": 1}}),
    ):
        assert isinstance(server, StrictApi)
        with pytest.raises(Exception, match=r"seed|max_tokens"):
            server.check(body)  # type: ignore[call-arg, arg-type]
