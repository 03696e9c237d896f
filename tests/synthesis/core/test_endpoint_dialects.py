"""What endpoints answer beside whole completions, and what they want back: dialects of OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from certificates import make_certificate

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.endpoint import Endpoint, EndpointDown, EndpointUnusable, RequestRefused
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.recording import Recording
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.stages import NothingAccepted
from synthesis.pipeline.teacher import OpenAITeacher, TeacherError
from synthesis.trajectories.teacher_answers import ChainVote

Script = Callable[[int, dict[str, Any]], Any]
TOOL = ToolSpec("find", "Find it.", {"type": "object", "properties": {"item": {"type": "string"}}})
REQUEST = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9})
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


@asynccontextmanager
async def served(script: Script, tls: ssl.SSLContext | None = None, **settings: Any):
    """A teacher whose endpoint gives what `script(number of the request, body)` returns, and the bodies it was sent."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        given = script(len(bodies) - 1, bodies[-1])
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}/v1"
    options = {"backoff_seconds": 0.01, "longest_backoff_seconds": 0.02, "structured_output": "text", **settings}
    teacher = OpenAITeacher(OpenAITeacherConfig(url, "m", **options))
    try:
        yield teacher, bodies
    finally:
        await teacher.close()
        await runner.cleanup()


def completion(message: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": USAGE, **more}


async def act(teacher: OpenAITeacher) -> AssistantTurn:
    return await teacher.act([Message("user", "Where?")], [TOOL], language="en", seed=7)


# ---------------------------------------------------------------------------------------------------------------------
# Errors in a reply with status 200

HALF = {"role": "assistant", "content": "To reset your router, first"}
ERROR = {"code": 502, "message": "Upstream idle timeout"}


def _in_choice(error: Any, finish: Any) -> dict[str, Any]:
    given = completion(HALF, finish)
    given["choices"][0]["error"] = error
    return given


@pytest.mark.parametrize(
    "half",
    [
        completion(HALF, "stop", error=ERROR),
        completion(HALF, None, error="Upstream idle timeout"),
        completion(HALF, None, errors=[ERROR]),
        completion(HALF, None, error_code=17, error_msg="busy"),
        completion(HALF, "stop", base_resp={"status_code": 1027, "status_msg": "output sensitive"}),
        completion(HALF, "stop", type="error"),
        _in_choice(ERROR, None),
        _in_choice(ERROR, "stop"),
        completion({**HALF, "error": ERROR}),
        completion(HALF, "unknown"),
        completion(HALF, "insufficient_system_resource"),
        completion(HALF, 0),
        completion({"role": "assistant", "content": None, "refusal": "I cannot help with that."}),
    ],
    ids=lambda half: json.dumps(half)[13:90],
)
async def test_half_an_answer_is_never_a_whole_one(half: Any) -> None:
    async with served(lambda number, body: half if number == 0 else completion({"content": "Whole."})) as (one, bodies):
        assert (await act(one)).content == "Whole." and [body["seed"] for body in bodies] == [7, 8]
    async with served(lambda number, body: half, tries=2) as (teacher, bodies):
        with pytest.raises(TeacherError, match=r"broken off by the endpoint \(.*in all of 2|refused by the model"):
            await act(teacher)
        assert teacher.spent.tokens == 2 * 8


@pytest.mark.parametrize("empty", [None, "", 0, False, [], {}, {"code": "0", "message": ""}, "Success"])
async def test_an_empty_error_field_is_no_error(empty: Any) -> None:
    more = {"error": empty, "error_msg": "ok", "base_resp": {"status_code": 0, "status_msg": "success"}}
    async with served(lambda number, body: completion({"content": "Whole."}, **more)) as (teacher, bodies):
        assert (await act(teacher)).content == "Whole." and len(bodies) == 1


async def test_a_missing_finish_reason_is_half_an_answer_where_others_have_one() -> None:
    replies = [completion({"content": "One."}), completion(HALF, None), completion({"content": "Two."})]
    async with served(lambda number, body: replies[number]) as (teacher, bodies):
        assert [(await act(teacher)).content for _ in range(2)] == ["One.", "Two."]
    async with served(lambda number, body: completion({"content": "Whole."}, None)) as (teacher, bodies):
        assert [(await act(teacher)).content for _ in range(2)] == ["Whole."] * 2 and len(bodies) == 2


async def test_an_error_without_an_answer_means_what_its_code_means() -> None:
    busy = {"error": {"message": "Provider returned error", "code": 429}}
    async with served(lambda number, body: busy if number < 2 else completion({"content": "A."})) as (teacher, bodies):
        assert (await act(teacher)).content == "A." and bodies[0] == bodies[2]
    empty = {"error": {"message": "Insufficient credits", "code": 402}}
    async with served(lambda number, body: empty) as (teacher, _):
        with pytest.raises(EndpointUnusable, match="refuses every request with status 402.*check the account"):
            await act(teacher)


async def test_an_account_without_money_stops_the_run_whatever_the_status() -> None:
    said = {"type": "error", "error": {"message": "Your credit balance is too low to access the API."}}

    def script(number: int, body: Any) -> Any:
        return completion({"content": "A."}) if number == 0 else web.json_response(said, status=400)

    async with served(script) as (teacher, bodies):
        await act(teacher)
        with pytest.raises(EndpointUnusable, match="check the account"):
            await act(teacher)
        assert len(bodies) == 2


@pytest.mark.parametrize(
    "counts", [{"prompt_tokens": "5", "completion_tokens": "3"}, {"prompt_tokens": 5.0, "completion_tokens": 3.0}]
)
async def test_counts_of_tokens_are_read_as_they_are_written(counts: Any) -> None:
    async with served(lambda number, body: completion({"content": "A."}, usage=counts)) as (teacher, _):
        await act(teacher)
        assert teacher.spent.tokens == 8


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": "none"}, {"choices": [None]}, {"choices": [{"message": "hello"}]}, {"choices": {}}, [], [[1]], "x",
        7, {"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"message": None, "finish_reason": "stop"}]},
        {"usage": []}, {"usage": {"prompt_tokens": "many"}},
    ],
    ids=json.dumps,
)  # fmt: skip
async def test_a_reply_of_another_form_fails_its_try(reply: Any) -> None:
    def script(number: int, body: Any) -> Any:
        return web.json_response(reply) if number == 0 else completion({"content": "A."})

    async with served(script) as (teacher, bodies):
        assert (await act(teacher)).content == "A." and bodies[0] == bodies[1]


# ---------------------------------------------------------------------------------------------------------------------
# A wrong address


def _page(number: int, body: Any) -> web.Response:
    return web.Response(text="<html>Sign in</html>", content_type="text/html")


def _wrapped(number: int, body: Any) -> Any:
    return {"data": completion({"content": "A."}), "success": True}


@pytest.mark.parametrize("form", ["auto", "json_schema", "json_object", "text"])
@pytest.mark.parametrize("script", [None, _page, _wrapped])
async def test_a_wrong_address_is_reported_to_all_requests_at_once(
    script: Script | None, form: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took as many times as long as there were requests, since each found out for itself."""
    monkeypatch.setattr(Endpoint, "STARTUP_SECONDS", 2.0)
    monkeypatch.setattr(Endpoint, "TELL_SECONDS", (0.1, 30.0))
    async with served(script or _page, structured_output=form) as (teacher, _):
        if script is None:
            nobody = f"http://127.0.0.1:{_free_port()}/v1"
            teacher = OpenAITeacher(OpenAITeacherConfig(nobody, "m", structured_output=form, backoff_seconds=0.05))
        url = teacher.config.base_url
        began = time.monotonic()
        asked = [teacher.answer(ChainVote, "Which?", "en", number) for number in range(16)]
        given = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - began < 15
        with pytest.raises(EndpointUnusable, match="does not answer as a model endpoint"):
            await act(teacher)  # nobody asks any more
    assert {type(one) for one in given} == {EndpointUnusable}
    said = str(given[0])
    assert said.startswith(f"base_url={url} ") and "run the same command again to resume" in said
    assert ("ends in /v1" if script else "is running and that this is its address") in said
    assert capsys.readouterr().err.count(f"Waiting for {url}: ") == 1


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_wrong_address_is_reported_within_15_seconds() -> None:
    """The longest way: the last failure just below the limit, a pause, a host that drops packets."""
    from synthesis.core.endpoint_apis import CONNECT_SECONDS

    assert Endpoint.STARTUP_SECONDS + Endpoint.LONGEST_STARTUP_PAUSE + CONNECT_SECONDS < 15


async def test_an_outage_of_an_address_that_answered_is_waited_for() -> None:
    down = False

    def script(number: int, body: Any) -> Any:
        return _page(number, body) if down else completion({"content": "A."})

    async with served(script, max_unavailable_seconds=0.5) as (teacher, _):
        await act(teacher)
        down = True
        began = time.monotonic()
        given = await asyncio.gather(*(act(teacher) for _ in range(8)), return_exceptions=True)
        assert {type(one) for one in given} == {EndpointDown} and 0.5 < time.monotonic() - began < 10


# ---------------------------------------------------------------------------------------------------------------------
# What endpoints want back


def call(id: Any = "D681PevKs", **more: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "find", "arguments": '{"item": "a"}'}, **more}


async def converse(teacher: OpenAITeacher) -> AssistantTurn:
    """Two turns: calls and an answer, with our own ids of calls."""
    messages = [Message("user", "Where?")]
    turn = await teacher.act(messages, [TOOL], language="en", seed=7)
    calls = [ToolCall(f"call_{n}", one.name, one.arguments) for n, one in enumerate(turn.calls) if is_call(one)]
    messages.append(Message("assistant", turn.content, turn.reasoning, calls))
    messages += [Message("tool", f"at {one.id}", tool_call_id=one.id, name=one.name) for one in calls]
    return await teacher.act(messages, [TOOL], language="en", seed=8, sent=[turn.sent])


def is_call(one: Any) -> bool:
    return isinstance(one, ToolCall)


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "reasoning": "Think.", "tool_calls": [call()]},
        {"content": "", "reasoning_content": "Think.", "tool_calls": [call("a"), call("b")]},
        {"content": None, "tool_calls": [call(extra_content={"google": {"thought_signature": "c2ln"}})]},
        {
            "content": None,
            "reasoning_details": [{"type": "reasoning.encrypted", "data": "ENC"}],
            "tool_calls": [call()],
        },
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Deep."}]}], "tool_calls": [call()]},
        {"content": "<think>Deep.</think>Ok.", "tool_calls": [call()], "provider_specific_fields": {"x": [1, None]}},
    ],
    ids=lambda message: ",".join(message),
)
async def test_an_endpoint_gets_back_what_it_sent(message: Any) -> None:
    reply = {"role": "assistant", **message}
    async with served(lambda number, body: completion({"content": "A."} if number else reply)) as (teacher, bodies):
        assert (await converse(teacher)).content == "A."
    question, sent, *results = bodies[1]["messages"]
    assert sent == {name: value for name, value in reply.items() if value or name == "content"}
    assert [one["tool_call_id"] for one in results] == [one["id"] for one in message["tool_calls"]]


@pytest.mark.parametrize("ids", [["", ""], [None, None], ["same", "same"], [3, "own"]])
async def test_calls_without_an_id_of_their_own_get_one_that_all_services_take(ids: list[Any]) -> None:
    reply = {"content": None, "tool_calls": [call(id) for id in ids]}
    async with served(lambda number, body: completion({"content": "A."} if number else reply)) as (teacher, bodies):
        await converse(teacher)
    _, sent, *results = bodies[1]["messages"]
    given = [one["id"] for one in sent["tool_calls"]]
    assert len(set(given)) == 2 and [one["tool_call_id"] for one in results] == given
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) or id == "own" for id in given)


async def test_fields_that_an_endpoint_sends_and_refuses_are_left_out() -> None:
    """Groq refuses `reasoning_content`, others what a gateway adds to a call."""
    reply = {"content": "", "reasoning_content": "Think.", "tool_calls": [call(index=0)]}

    def script(number: int, body: Any) -> Any:
        for one in body["messages"]:
            for name in {*one} - {"role", "content", "tool_calls", "tool_call_id"}:
                said = f"'messages.1' : property '{name}' is unsupported"
                return web.json_response({"error": {"message": said}}, status=400)
            if any("index" in each for each in one.get("tool_calls", ())):
                said = {
                    "loc": ["body", "messages", 1, "tool_calls", 0, "index"],
                    "msg": "Extra inputs are not permitted",
                }
                return web.json_response({"detail": [said]}, status=422)
        return completion({"content": "A."} if body["messages"][-1]["role"] == "tool" else reply)

    async with served(script) as (teacher, bodies):
        assert (await converse(teacher)).content == "A." and len(bodies) == 4
        assert (await converse(teacher)).content == "A." and len(bodies) == 6  # known by now
    assert bodies[-1]["messages"][1]["tool_calls"] == [call()]


@pytest.mark.parametrize(("said", "asked"), [("too long", 2), ("too long for a reasoning model", 3)])
async def test_a_refusal_of_something_else_stays_one(said: str, asked: int) -> None:
    """Also where it happens to hold the name of a field, which is sent again the next time."""
    turn = {"role": "assistant", "content": "", "reasoning": "Think.", "tool_calls": [call()]}

    def script(number: int, body: Any) -> Any:
        if len(body["messages"]) == 1:
            return completion(turn)
        return web.json_response({"error": {"message": said}}, status=400)

    async with served(script) as (teacher, bodies):
        with pytest.raises(TeacherError, match="too long"):
            await converse(teacher)
        assert len(bodies) == asked
        with pytest.raises(TeacherError, match="too long"):
            await converse(teacher)
        assert bodies[asked + 1]["messages"][1] == turn


async def test_a_replayed_conversation_asks_nothing_though_ids_differ(tmp_path: Any) -> None:
    recording = Recording(tmp_path / "teacher.sqlite")

    def script(number: int, body: Any) -> Any:
        return completion({"content": "A."} if number % 2 else {"content": "", "tool_calls": [call(f"id{number}")]})

    async with served(script) as (plain, bodies):
        teacher = OpenAITeacher(plain.config, recording, "record")
        first = await converse(teacher)
        assert await converse(teacher) == first and len(bodies) == 2
        await teacher.close()
    recording.close()


@pytest.mark.parametrize("name", ["functions.find", "find<|channel|>commentary", "functions.find:0"])
async def test_a_name_with_markup_around_it_is_the_offered_one(name: str) -> None:
    made = {**call(), "function": {"name": name, "arguments": "{}"}}
    async with served(lambda number, body: completion({"content": "", "tool_calls": [made]})) as (teacher, _):
        (found,) = (await act(teacher)).calls
        assert isinstance(found, ToolCall) and found.name == "find"


# ---------------------------------------------------------------------------------------------------------------------
# A run that gets nothing usable


async def test_a_run_whose_answers_are_all_unusable_stops_with_the_reasons() -> None:
    def script(number: int, body: Any) -> Any:
        return completion({"content": "Half"}, "unknown") if number % 3 else completion({"content": f"No. {number}"})

    async with served(script, unusable_answers=30, concurrency=1) as (teacher, bodies):
        with pytest.raises(NothingAccepted) as caught:
            for seed in range(100):
                with pytest.raises(TeacherError):
                    await teacher.answer(ChainVote, "Which?", "en", seed)
        assert len(bodies) == 30
    said = str(caught.value)
    assert "ChainVote: none of 30 accepted" in said and "raise unusable_answers=30" in said
    assert "20 times the answer was broken off by the endpoint (finish_reason='unknown'), such as: Half" in said
    assert "10 times the answer is not JSON" in said and "No. 0" in said


async def test_a_run_whose_answers_are_usable_now_and_then_goes_on() -> None:
    good = '{"reason": "a", "user_query": "b", "valid": true}'

    def script(number: int, body: Any) -> Any:
        return completion({"content": "No."} if number % 20 else {"content": good})

    async with served(script, unusable_answers=30, tries=60) as (teacher, bodies):
        for seed in range(5):
            await teacher.answer(ChainVote, "Which?", "en", seed)


# ---------------------------------------------------------------------------------------------------------------------
# What a stranger's endpoint may cost


@pytest.mark.parametrize("packed", [False, True])
async def test_a_reply_without_end_is_not_read_to_its_end(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    from synthesis.core import endpoint_apis

    monkeypatch.setattr(endpoint_apis, "MOST_BYTES", 1 << 20)
    body = json.dumps(completion({"content": "a" * (1 << 22)})).encode()
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"} if packed else {}

    def script(number: int, _: Any) -> Any:
        given = zlib.compress(body) if packed else body
        return web.Response(body=given, headers=headers) if number == 0 else completion({"content": "A."})

    async with served(script) as (teacher, bodies):
        assert (await act(teacher)).content == "A." and len(bodies) == 2


async def test_a_reply_that_nests_too_deeply_fails_its_try() -> None:
    deep = b'{"choices": [{"message": {"content": "A.", "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}}]}"

    def script(number: int, body: Any) -> Any:
        return web.Response(body=deep, content_type="application/json") if not number else completion({"content": "B."})

    async with served(script) as (teacher, _):
        assert (await act(teacher)).content == "B."


@pytest.mark.parametrize("status", [200, 400, 401])
async def test_the_key_is_in_no_message(status: int) -> None:
    key = "sk-0123456789abcdef"
    said = {"error": {"message": f"Incorrect API key provided: {key}"}}

    async with served(
        lambda n, b: web.json_response(said, status=status), api_key=key, max_unavailable_seconds=0.1
    ) as (one, _):
        with pytest.raises((EndpointUnusable, EndpointDown, RequestRefused)) as caught:
            await one.endpoints[0].complete("x", REQUEST, random.Random(0))
    assert key not in str(caught.value) and "[key]" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# The way to the endpoint


@pytest.mark.parametrize("trusted", [True, False])
async def test_an_endpoint_over_tls_is_checked(trusted: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the authorities that SSL_CERT_FILE names."""
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", cert)
    async with served(lambda number, body: completion({"content": "A."}), tls=context, max_unavailable_seconds=0.2) as (
        one,
        _,
    ):
        if trusted:
            assert (await act(one)).content == "A."
        else:
            with pytest.raises(EndpointUnusable, match="does not answer as a model endpoint .*[Cc]ertificate"):
                await act(one)


@pytest.mark.parametrize("status", [200, 407])
async def test_the_environments_proxy_is_used(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(str(request.url))
        return web.json_response(completion({"content": "A."}), status=status)

    server = web.Server(answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{runner.addresses[0][1]}")
    teacher = OpenAITeacher(OpenAITeacherConfig("http://models.example/v1", "m"))
    if status == 200:
        assert (await act(teacher)).content == "A."
    else:
        with pytest.raises(EndpointUnusable, match=r"status 407.*\(http_proxy, https_proxy\)"):
            await act(teacher)
    assert asked == ["http://models.example/v1/chat/completions"]
    await teacher.close()
    await runner.cleanup()
