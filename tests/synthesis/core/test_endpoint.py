"""Limits, budget, retries and recordings of the OpenAI-compatible teacher, against a real HTTP endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import hashlib
import json
import random
import selectors
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from flaky_endpoint import Flaky, completion

import synthesis.pipeline.prompts
from synthesis.core.endpoint import Endpoint, EndpointDown, EndpointUnusable, RequestRefused
from synthesis.core.endpoint_limits import AnswerLengths, EndpointLimits, Permit, TokenEstimate
from synthesis.core.journal import StoreError
from synthesis.core.rate_limits import Budget, BudgetSpent, TokenBucket, Usage, retry_after
from synthesis.core.recording import NotRecorded, Recording
from synthesis.core.stages import Journal, Rejected, StageResult, run_stage
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, TeacherError, _identity

ROOT = Path(__file__).parent.parent.parent.parent


class DrawnAnswer(msgspec.Struct, frozen=True):
    value: int
    note: str


class Scripted(Flaky):
    """Answers with what `script(number of the request, body)` gives: a response, or None for a good answer."""

    def __init__(self, script: Any, **options: Any) -> None:
        super().__init__(**options)
        self.script = script
        self.active = self.peak = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            number = len(self.requests)
            given = self.script(number, await request.json())
            response = await super().answer(request)
            return response if given is None else given
        finally:
            self.active -= 1


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "drawn_answer.jinja").write_text("Draw for {{ about }}.")
    monkeypatch.setattr(synthesis.pipeline.prompts, "PROMPTS", tmp_path)
    synthesis.pipeline.prompts.packaged.cache_clear()
    yield
    synthesis.pipeline.prompts.packaged.cache_clear()


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[[], Recording]]:
    """Opens the test's recording; all are closed at its end, since a later test's journal would commit them too."""
    opened: list[Recording] = []

    def open_one() -> Recording:
        opened.append(Recording(tmp_path / "teacher.sqlite"))
        return opened[-1]

    yield open_one
    for one in reversed(opened):  # of two at once the later has the lock
        with contextlib.suppress(sqlite3.ProgrammingError):  # the test has closed it
            one.close()


def teacher_of(url: str, recording: Recording | None = None, mode: Any = "off", **config: Any) -> OpenAITeacher:
    options = {
        "model": "m",
        "structured_output": "json_schema",
        "backoff_seconds": 0.01,
        "timeout_seconds": 5.0,
        **config,
    }
    return OpenAITeacher(OpenAITeacherConfig(url, **options), recording, mode)


async def ask(teacher: OpenAITeacher, about: object = "x", seed: int = 5) -> DrawnAnswer:
    return await teacher.ask(DrawnAnswer, {"about": about}, language="en", seed=seed)


async def draw(teacher: OpenAITeacher, journal: Journal, count: int = 20) -> StageResult[DrawnAnswer]:
    async def stage(number: int) -> list[DrawnAnswer]:
        try:
            return [await ask(teacher, number)]
        except TeacherError as error:
            raise Rejected("teacher_failed", str(error)) from error

    options: dict[str, Any] = {"key": str, "out": DrawnAnswer, "concurrency": 4}
    return await run_stage("draw", stage, range(count), journal=journal, **options)


def status(code: int, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=code, headers=headers)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@pytest.mark.parametrize(
    "bad",
    [
        lambda: status(408),
        lambda: status(409),
        lambda: status(429),
        lambda: status(500),
        lambda: status(502),
        lambda: status(503),
        lambda: web.Response(body=b'{"choices": [{"mess', content_type="application/json"),
        lambda: web.Response(body=b"<html>gateway</html>"),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response({"choices": [{"message": None}]}),
    ],
)
async def test_what_an_endpoint_spoils_is_asked_for_again_as_it_was(bad: Any) -> None:
    async with Scripted(lambda number, body: bad() if number == 0 else None) as url:
        assert (await ask(teacher_of(url))).note
    endpoint = Scripted(lambda number, body: bad() if number == 0 else None)
    async with endpoint as url:
        await ask(teacher_of(url))
    assert endpoint.requests[0] == endpoint.requests[1] and len(endpoint.requests) == 2


async def test_a_reply_has_the_whole_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Zürich"}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Ich denke …", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    counted = {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    cut = {"choices": [{"message": {"role": "assistant", "content": "abcd" * 5}, "finish_reason": "length"}]}
    bare = {"choices": [{"message": {"content": ""}}]}
    of_parts = [{"type": "text", "text": "ab"}, {"type": "image_url"}, {"type": "text", "text": "c"}]
    parts = {"choices": [{"message": {"content": of_parts}, "finish_reason": "eos"}]}
    parts["usage"] = {"prompt_tokens": 7.0, "completion_tokens": 3.0}  # type: ignore[assignment]
    given = [counted, cut, bare, parts]
    async with Scripted(lambda number, body: web.json_response(given[number])) as url:
        endpoint = teacher_of(url).endpoints[0]
        request = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "Where?"}]})
        called, long, empty, listed = [await endpoint.complete("agent", request, random.Random(0)) for _ in given]
    assert called.message == message and called.usage == Usage(7, 3)
    assert (called.text, called.finish_reason, called.truncated) == ("", "tool_calls", False)
    assert (long.text, long.finish_reason, long.truncated) == ("abcd" * 5, "length", True)
    assert long.usage == Usage(len(request) // 4, 5)  # not counted by the endpoint: estimated
    assert (empty.message, empty.finish_reason) == ({"role": "assistant", "content": ""}, "")
    assert (called.problem, long.problem) == ("", "cut off at max_tokens=16384")
    assert (listed.text, listed.usage, listed.problem) == ("abc", Usage(7, 3), "")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (completion("I do not know."), "the answer is not JSON"),
        (completion('{"value": 1, "note": ""}', "length"), "the answer was cut off at max_tokens=16384"),
        (completion('{"value": 1, "note": ""}', "error"), "broken off by the endpoint (finish_reason='error')"),
        (completion('{"value": 1, "no'), "the answer is not JSON"),
        (completion('{"value": "one", "note": ""}'), "does not fit its schema: Expected `int`, got `str`"),
        (completion('{"value": 1, "note": ""} or {"value": 2, "note": ""}'), "two different JSON objects"),
    ],
)
async def test_each_try_has_another_seed_and_is_told_what_was_wrong(bad: bytes, told: str) -> None:
    """The tries of one request are as many draws: a model may well repeat an answer of the same seed."""
    endpoint = Scripted(lambda number, body: web.Response(body=bad) if number < 2 else None)
    async with endpoint as url:
        assert (await ask(teacher_of(url))).note
    assert [body["seed"] for body in endpoint.requests] == [5, 6, 7]
    first, *others = [body["messages"][0]["content"] for body in endpoint.requests]
    assert first == "Draw for x." and all(one.startswith("Draw for x.\n\nYour last answer") for one in others)
    assert all(told in one for one in others)


async def test_a_request_that_alone_fails_is_refused_and_the_others_go_on() -> None:
    """An answer that crashes the server must not be taken for an outage, which would stop the run."""

    def poisonous(number: int, body: Any) -> web.Response | None:
        return status(500) if "poison" in body["messages"][0]["content"] else None

    async with Scripted(poisonous) as url:
        teacher = teacher_of(url, failures=3)
        assert await ask(teacher, "bread")
        with pytest.raises(TeacherError, match="failed 3 times and answers other requests"):
            await ask(teacher, "poison")
        assert await ask(teacher, "bread")


async def test_an_outage_stops_the_run_and_rejects_nothing(tmp_path: Path) -> None:
    down = True
    async with Scripted(lambda number, body: status(503) if down and number >= 8 else None) as url:
        teacher = teacher_of(url, max_unavailable_seconds=0.3, longest_backoff_seconds=0.05, failures=3)
        with Journal(tmp_path / "journal") as journal:
            with pytest.raises(EndpointDown, match=r"has not answered.*stage draw: 8 of 20 inputs are finished.*again"):
                await draw(teacher, journal)
            down = False
            result = await draw(teacher_of(url), journal)
    assert len(result.outputs) == 20 and result.resumed == 8 and not result.rejected


async def test_retry_after_is_honoured_by_all_requests() -> None:
    times: list[float] = []

    def once(number: int, body: Any) -> web.Response | None:
        times.append(time.monotonic())
        return status(429, **{"Retry-After": "1"}) if number == 0 else None

    async with Scripted(once) as url:
        teacher = teacher_of(url)
        first = asyncio.create_task(ask(teacher, 0))
        await asyncio.sleep(0.2)
        await asyncio.gather(first, ask(teacher, 1), ask(teacher, 2))
    assert min(times[1:]) - times[0] >= 0.95


def test_a_pause_holds_for_those_that_wait_for_their_rate_too() -> None:
    """They waited behind it, and then came one after another as if nobody had asked them to wait; nor do they come all
    at once when it is over."""
    begun: list[float] = []

    async def scene(loop: Leaping) -> None:
        endpoint = teacher_of("http://h/v1", requests_per_minute=300).endpoints[0]
        limits = EndpointLimits(endpoint.config, Budget(tokens=None, money=None), AnswerLengths(16))

        async def one() -> None:
            await limits.take(Permit(TokenEstimate("answer", 1, "")))
            begun.append(loop.time())

        waiting = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(0.5)
        limits.pause(2.0)
        await asyncio.gather(*waiting)

    with contextlib.closing(Leaping()) as loop:
        loop.run_until_complete(scene(loop))
    assert sum(at <= 0.5 for at in begun) in (7, 8) and not any(0.5 < at < 2.5 for at in begun)
    assert sum(at < 3.5 for at in begun) <= 8 + 5 + 6 and max(begun) > 5.0


async def test_a_wait_beyond_the_outage_stops_the_run() -> None:
    async with Scripted(lambda number, body: status(429, **{"Retry-After": "7200"})) as url:
        with pytest.raises(EndpointDown, match="asks to wait for 7,200 s"):
            await ask(teacher_of(url))


def test_retry_after_as_rfc_9110_writes_it() -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert retry_after("120") == 120.0 and retry_after(None) is None and retry_after("soon") is None
    assert 25 < retry_after(email.utils.format_datetime(soon, usegmt=True)) <= 30  # type: ignore[operator]
    assert retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def too_many(message: str, **more: str) -> web.Response:
    return web.json_response({"error": {"message": message, **more}}, status=429)


EMPTY = {"type": "insufficient_quota", "code": "insufficient_quota"}
TOO_LARGE = "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 41000."


async def test_an_empty_account_stops_the_run_though_its_status_says_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "EMPTY_SECONDS", 0.1)
    said = "You exceeded your current quota, please check your plan and billing details."
    async with Scripted(lambda number, body: too_many(said, **EMPTY) if number else None) as url:
        teacher = teacher_of(url, longest_backoff_seconds=0.05)
        await ask(teacher, 0)
        with pytest.raises(EndpointUnusable, match="refuses every request with status 429: .*quota.*check the account"):
            await ask(teacher, 1)
        with pytest.raises(EndpointUnusable, match="check the account"):  # nobody asks any more
            await ask(teacher, 2)


async def test_a_quota_that_comes_back_within_a_minute_is_waited_for() -> None:
    """Some services say of a minute's tokens what others say of money."""
    async with Scripted(lambda number, body: too_many("quota", **EMPTY) if number < 3 else None) as url:
        assert (await ask(teacher_of(url))).note


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (lambda: too_many(TOO_LARGE, type="tokens", code="rate_limit_exceeded"), 1),
        (lambda: too_many("Rate limit reached: Limit 30,000, Used 9, Requested 30,001. Try again"), 1),
        (lambda: web.json_response([{"error": {"message": TOO_LARGE}}], status=429), 1),
        (lambda: too_many("Rate limit reached: Limit 30000, Used 25000, Requested 8000. Try again in 6s"), 2),
        (lambda: web.json_response({"error": "busy", "code": 7}, status=429), 2),
        (lambda: web.json_response([[]], status=429), 2),
        (lambda: web.Response(body=b"\xff{", status=429), 2),
    ],
)
async def test_a_request_that_is_too_large_for_a_minute_is_not_asked_for_ever(answer: Any, asked: int) -> None:
    poisoned: list[int] = []

    def script(number: int, body: Any) -> web.Response | None:
        if "large" in body["messages"][0]["content"]:
            poisoned.append(number)
            return answer() if len(poisoned) == 1 else None
        return None

    async with Scripted(script) as url:
        teacher = teacher_of(url)
        await ask(teacher, "bread")
        if asked == 1:
            with pytest.raises(TeacherError, match="refused the request with status 429"):
                await ask(teacher, "large")
        else:
            await ask(teacher, "large")
        await ask(teacher, "bread")
    assert len(poisoned) == asked


async def test_a_request_that_is_put_off_for_as_long_as_an_outage_may_last_is_refused_alone() -> None:
    def script(number: int, body: Any) -> web.Response | None:
        return status(429) if "poison" in body["messages"][0]["content"] else None

    async with Scripted(script) as url:
        teacher = teacher_of(url, max_unavailable_seconds=0.4, longest_backoff_seconds=0.02)

        async def others() -> None:
            while True:
                await ask(teacher, "bread")

        asking = asyncio.create_task(others())
        with pytest.raises(
            TeacherError, match=r"answered other requests for .* put this one off \d+ times: status 429"
        ):
            await ask(teacher, "poison")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


class Guarded(Flaky):
    """After so many answers refuses with `code` a key that is not "right" and a model that is not "m"."""

    def __init__(self, code: int, answers: int = 0) -> None:
        super().__init__()
        self.code, self.answers = code, answers
        self.given = self.refused = self.active = self.peak = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            wrong = request.headers["Authorization"] != "Bearer right" or (await request.json())["model"] != "m"
            if wrong and self.given >= self.answers:
                self.refused += 1
                return web.json_response({"error": {"message": f"not you ({self.code})"}}, status=self.code)
            self.given += 1
            return await super().answer(request)
        finally:
            self.active -= 1


@pytest.mark.parametrize(
    ("code", "wrong", "remedy", "answers"),
    [
        (401, {"api_key": "wrong"}, "use model=.*: api_key", 0),
        (401, {"api_key": "revoked"}, "use model=.*: api_key", 8),
        (402, {"api_key": "poor"}, "account", 0),
        (402, {"api_key": "poor"}, "account", 8),
        (403, {"api_key": "wrong"}, "use model=.*: api_key", 0),
        (403, {"api_key": "revoked"}, "use model=.*: api_key", 8),
        (404, {"model": "n"}, r"model=n is the name of a served model \(http://.*/v1/models lists", 0),
        (404, {"model": "unloaded"}, "model=unloaded is the name", 8),
        (405, {"model": "n"}, r"ends in /v1 \(base_url=http", 0),
        (407, {"api_key": "wrong"}, "https_proxy", 0),
        (400, {"model": "n"}, "check model=n, max_tokens=16384", 0),
        (422, {"model": "n"}, "check model=n, max_tokens=16384", 0),
    ],
)
async def test_an_endpoint_that_refuses_everything_stops_the_run_and_rejects_nothing(
    tmp_path: Path, record: Callable[[], Recording], code: int, wrong: Any, remedy: str, answers: int
) -> None:
    endpoint = Guarded(code, answers)
    recording = record()
    async with endpoint as url:
        with Journal(tmp_path / "journal") as journal:
            teacher = teacher_of(url, recording, "record", **{"api_key": "right", "concurrency": 3, **wrong})
            said = rf"{url} refuses every request with status {code}: .*not you \({code}\).*; "
            done = rf"stage draw: {answers} of 20 inputs are finished and kept in .*"
            with pytest.raises(EndpointUnusable, match=f"{said}{done}{remedy}.*run the same command again to resume"):
                await draw(teacher, journal)
            assert len(journal.load("draw")) == answers
            # One of each worker, and the simplest request, which tells whose fault it is; nothing once that is known.
            assert endpoint.refused <= 4 + 1 and endpoint.peak <= 3
            result = await draw(teacher_of(url, recording, "record", api_key="right"), journal)
    assert len(result.outputs) == 20 and result.resumed == answers and not result.rejected


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("code", "why"), [(400, "context"), (413, "body"), (422, "schema"), (403, "moderated")])
async def test_a_request_that_alone_is_refused_is_rejected_alone(
    tmp_path: Path, code: int, why: str, first: bool
) -> None:
    """Also where it is the first of its run: others would be answered."""

    def script(number: int, body: Any) -> web.Response | None:
        poison = "Draw for 0." if first else "Draw for 19."
        return status(code) if body["messages"][0]["content"] == poison else None

    async with Scripted(script) as url:
        with Journal(tmp_path / "journal") as journal:
            result = await draw(teacher_of(url, concurrency=1), journal)
    assert len(result.outputs) == 19 and result.rejected == {"teacher_failed": 1}
    assert f"refused the request with status {code}" in result.details["teacher_failed"], why


async def test_whose_fault_a_refusal_is_is_asked_again_where_the_endpoint_fails_to_say() -> None:
    answers = [status(400), status(503), status(400), None]
    endpoint = Scripted(lambda number, body: answers[number])
    async with endpoint as url:
        with pytest.raises(TeacherError, match="refused the request with status 400"):
            await ask(teacher_of(url))
    asked = [body["messages"][0]["content"] for body in endpoint.requests]
    assert asked == ["Draw for x.", "Say yes."] * 2
    assert endpoint.requests[0]["response_format"] == endpoint.requests[1]["response_format"]


async def test_the_tools_of_a_request_are_its_own_fault() -> None:
    def script(number: int, body: Any) -> web.Response | None:
        return status(400) if "tools" in body else None

    async with Scripted(script) as url:
        request = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "tools": [1], "tool_choice": "auto"}
        with pytest.raises(RequestRefused, match="status 400"):
            await teacher_of(url).endpoints[0].complete("agent", msgspec.json.encode(request), random.Random(0))


async def test_a_redirect_is_not_followed_with_the_key() -> None:
    async with (other := Flaky()) as elsewhere:
        async with Scripted(lambda number, body: status(308, Location=elsewhere)) as url:
            with pytest.raises(
                EndpointUnusable, match=f"status 308: it sends us to '{elsewhere}'; give that as base_url"
            ):
                await ask(teacher_of(url))
        assert not other.requests


async def test_an_address_that_is_none_stops_the_run() -> None:
    with pytest.raises(EndpointUnusable, match="base_url=http:///v1 is not an address .*; write http://HOST:PORT/v1"):
        await ask(teacher_of("http:///v1"))


# ---------------------------------------------------------------------------------------------------------------------
# Rates


class Leaping(asyncio.SelectorEventLoop):
    """A loop that waits for nothing: its clock leaps to the next timer."""

    def __init__(self) -> None:
        super().__init__(LeapingSelector(self))
        self.seconds = 0.0

    def time(self) -> float:
        return self.seconds


class LeapingSelector(selectors.SelectSelector):
    def __init__(self, loop: Leaping) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.seconds += timeout or 0.0
        return super().select(0)


def test_a_bucket_lets_through_its_rate_and_takes_corrections() -> None:
    async def run(loop: Leaping) -> None:
        bucket = TokenBucket(per_minute=6000, clock=loop.time)
        for _ in range(150):  # 100 at once, the others at 100 a second
            await bucket.take(lambda: 1)
        assert loop.time() == pytest.approx(0.5, abs=0.01)
        await bucket.take(lambda: 10_000)  # a debt of 100 s
        bucket.give_back(9_990)
        started = loop.time()
        await bucket.take(lambda: 5)
        assert loop.time() - started < 1.0

    with contextlib.closing(Leaping()) as loop:
        loop.run_until_complete(run(loop))


async def test_requests_per_minute_and_in_flight() -> None:
    endpoint = Scripted(lambda number, body: None, latency=0.02)
    async with endpoint as url:
        teacher = teacher_of(url, requests_per_minute=1200, concurrency=3)
        started = time.monotonic()
        await asyncio.gather(*(ask(teacher, number) for number in range(40)))
        assert time.monotonic() - started >= 0.95  # 20 at once, 20 a second
    assert endpoint.peak <= 3


async def test_tokens_per_minute_are_corrected_by_usage() -> None:
    """Estimated at 16,384 tokens an answer, 50 requests would take hours; they use 100 each."""
    async with Scripted(lambda number, body: None) as url:
        teacher = teacher_of(url, tokens_per_minute=120_000)
        started = time.monotonic()
        async with asyncio.timeout(600):
            await asyncio.gather(*(ask(teacher, number) for number in range(50)))
        assert time.monotonic() - started >= 1.2  # 5,000 tokens, 2,000 of them at once, 2,000 a second


# ---------------------------------------------------------------------------------------------------------------------
# Budget


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ({"token_budget": 1000}, r"token_budget=1000\) is spent: 1,000 tokens \(600 of prompts, 400 of answers\)"),
        ({"money_budget": 1.0, "price_prompt": 1000.0, "price_completion": 1000.0}, "1.00 in money, in 10 requests"),
    ],
)
async def test_a_spent_budget_stops_cleanly_and_a_raised_one_goes_on(
    tmp_path: Path, record: Callable[[], Recording], caps: Any, said: str
) -> None:
    async def stage(number: int) -> list[DrawnAnswer]:
        return [await ask(teacher, number)]

    endpoint = Scripted(lambda number, body: None)
    async with endpoint as url:
        outputs = []
        for attempt, factor in enumerate([1, 1, 10]):
            raised = {k: v * factor if "budget" in k else v for k, v in caps.items()}
            recording = record()
            teacher = teacher_of(url, recording, "record", **raised)
            with Journal(tmp_path / "journal") as journal:
                running = run_stage("draw", stage, range(20), key=str, out=DrawnAnswer, journal=journal, concurrency=1)
                if attempt < 2:
                    with pytest.raises(BudgetSpent, match=said) as caught:
                        await running
                    assert "stage draw: 10 of 20 inputs are finished" in str(caught.value)
                    assert "journal; raise the budget and run the same command again" in str(caught.value)
                else:
                    outputs = (await running).outputs
            assert teacher.spent.requests == len(endpoint.requests)
            recording.close()
    # What was spent outlives the restart: the second run asked nothing, the third only what was left.
    assert len(outputs) == 20 and len(endpoint.requests) == 20
    assert record().spent("m").tokens == 2000


async def test_many_in_flight_hardly_overrun_a_budget() -> None:
    endpoint = Scripted(lambda number, body: None)
    async with endpoint as url:
        teacher = teacher_of(url, token_budget=5000, concurrency=64)
        given = await asyncio.gather(*(ask(teacher, n) for n in range(100)), return_exceptions=True)
    assert sum(isinstance(one, BudgetSpent) for one in given) == 50 and teacher.spent.tokens == 5000


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"money_budget": 5.0}, "money_budget=5.0 needs prices for model"),
        ({"concurrency": 0}, "OpenAITeacherConfig.concurrency is 0; use a whole number from 1"),
        ({"requests_per_minute": -1.0}, "requests_per_minute is -1.0; use a number above 0"),
    ],
)
def test_a_wrong_configuration_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OpenAITeacherConfig("http://h/v1", "m", **config)


# ---------------------------------------------------------------------------------------------------------------------
# Recordings


async def test_a_recorded_run_is_repeated_without_asking(record: Callable[[], Recording]) -> None:
    """Also its failure, and whatever the endpoint would say now."""
    random_answers = Scripted(
        lambda number, body: (
            status(400)
            if "bad" in body["messages"][0]["content"]
            else web.Response(body=completion(json.dumps({"value": number, "note": str(time.time())})))
        )
    )
    async with random_answers as url:
        with pytest.raises(ValueError, match="mode='record'"):
            teacher_of(url, None, "record")
        teacher = teacher_of(url, record(), "record")
        first = [await ask(teacher, number) for number in range(5)]
        with pytest.raises(TeacherError) as failed:
            await ask(teacher, "bad")
        teacher.recording.close()  # type: ignore[union-attr]
        asked = len(random_answers.requests)

        again = teacher_of("http://127.0.0.1:9/v1", record(), "replay")
        assert [await ask(again, number) for number in range(5)] == first
        with pytest.raises(TeacherError) as failed_again:
            await ask(again, "bad")
        assert str(failed_again.value) == str(failed.value)
        for other in ({"about": 0, "seed": 6}, {"about": "new"}):
            with pytest.raises(NotRecorded, match="has no answer to a request for DrawnAnswer"):
                await ask(again, **other)
        assert len(random_answers.requests) == asked

        # Recording goes on where it stopped: what failed is asked again, what is new too.
        resumed = teacher_of(url, record(), "record")
        assert [await ask(resumed, number) for number in range(5)] == first
        await ask(resumed, "new")
        assert len(random_answers.requests) == asked + 1


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, but long enough to be read as a header of one" * 20)
    with pytest.raises(ValueError, match="is not a recording.*name another file"):
        Recording(tmp_path / "file")


async def test_a_recorded_answer_that_no_longer_fits_is_asked_again_and_never_while_replaying(
    record: Callable[[], Recording],
) -> None:
    recording, endpoint = record(), Scripted(lambda number, body: None)
    async with endpoint as url:
        old = teacher_of(url, recording, "record")
        digest = hashlib.sha256(_identity(old.config, DrawnAnswer, "Draw for x.", 5)).digest()
        recording.keep(digest, '{"value": "of another type"}')
        with pytest.raises(NotRecorded, match="DrawnAnswer is recorded, and cannot be used: .*fit its schema"):
            await ask(teacher_of(url, recording, "replay"))
        assert not endpoint.requests
        given = await ask(old)
        assert len(endpoint.requests) == 1 and await ask(teacher_of(url, recording, "replay")) == given


SPENDER = """
import sys
from synthesis.core.rate_limits import Usage
from synthesis.core.recording import Recording
recording = Recording(sys.argv[1])
spent, staged = recording.spent("m"), recording.spent_by_stage("m")
print(spent.tokens, flush=True)
for line in sys.stdin:
    spent.add(Usage(int(line), 0), 1.0)
    recording.keep(line.encode(), "answer")
    recording.commit()
    print(spent.tokens, flush=True)
recording.close()
"""


def test_runs_that_share_a_recording_count_what_all_of_them_spent(tmp_path: Path) -> None:
    """Each wrote its own totals over the other's: spending was lost, and a budget of both was overrun."""
    path = tmp_path / "teacher.sqlite"
    command = [sys.executable, "-c", SPENDER, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:

        def said(process: Any, line: str = "") -> str:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert said(one) == said(other) == "0"
        assert [said(one, "1000\n"), said(other, "500\n"), said(one, "1\n")] == ["1000", "1500", "1501"]
        one.communicate()
        other.communicate()
    recording = Recording(path)
    assert (recording.spent("m").tokens, recording.spent("m").requests) == (1501, 3)
    assert all(recording.answer(line) == ("answer", "") for line in (b"1000\n", b"500\n", b"1\n"))
    recording.close()


def test_a_recording_that_another_process_holds_is_named(tmp_path: Path) -> None:
    """And nothing is lost or counted twice by the try."""
    recording = Recording(tmp_path / "teacher.sqlite")
    recording._db.execute("PRAGMA busy_timeout=50")
    spent = recording.spent("m")
    spent.add(Usage(7, 0), 0.0)
    with contextlib.closing(sqlite3.connect(recording.path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        recording.keep(b"a", "one")
        for _ in range(2):
            with pytest.raises(
                StoreError, match=r"teacher.sqlite could not be written \(database is locked\); .*no other"
            ):
                recording.commit()
        assert recording.answer(b"a") == ("one", "")
        holder.execute("ROLLBACK")
    recording.close()
    again = Recording(recording.path)
    assert again.answer(b"a") == ("one", "") and again.spent("m").tokens == 7
    again.close()
