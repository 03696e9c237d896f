"""Requests to model endpoints that survive failures: limits, a budget, retries, and a stop when nothing answers.

An `endpoint_apis.Api` sends a request and reads its reply. This module decides when a request is sent, what a failure
means, and when the run stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import random
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.progress import TRAFFIC, log_above_progress
from astra_jax.base.proxies import via
from astra_jax.base.typed import decode_json, json_decoder
from synthesis.core.chat_format import AssistantTurn
from synthesis.core.endpoint_apis import Api, OpenAIApi
from synthesis.core.endpoint_limits import AnswerLengths, EndpointLimits, TokenEstimate
from synthesis.core.endpoint_replies import (
    BadStatus,
    EndpointReply,
    NoReply,
    StatusRefused,
    TryFailed,
    UnreadableReply,
    meaning_of,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.openai_messages import own_fields, without_fields
from synthesis.core.rate_limits import STAGE, Budget, Prices, Spent, Usage, backoff
from synthesis.core.recording import Recording
from synthesis.core.stages import AbortRun

_WORD = re.compile(r"\w+")


class EndpointDown(AbortRun):
    """The endpoint answered nothing for `max_unavailable_seconds`, or asks for a longer pause."""


class EndpointUnusable(AbortRun):
    """The endpoint refuses every request: a wrong key, a wrong model, an account without money."""


class RequestRefused(Exception):
    """The endpoint refuses this request, and a retry does not help; it would answer others.

    Attributes:
        status: with which it was refused; None: it failed repeatedly.
        said: text of the refusal.
    """

    def __init__(self, problem: str, *, status: int | None = None, said: str = "") -> None:
        super().__init__(problem)
        self.status, self.said = status, said


class _Limit(msgspec.Struct):
    """Token limit in a request's body."""

    max_tokens: int


_limits = json_decoder(_Limit)


@dataclass
class _LoopState:
    """State that belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    api: Api
    limits: EndpointLimits
    judging: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Endpoint:
    """An endpoint of one model.

    Args:
        recording: keeps what was spent; without it a restart counts from zero.
        budget: that other endpoints share; None: one of its own, as the settings say.

    Attributes:
        spent: total on this model.
        spent_by_stage: the same by `rate_limits.STAGE`.
        watch: called with each request that was answered, its reply, and what it cost in money.
    """

    EMPTY_SECONDS = 150.0
    """Time that an account must report to be empty, and answer nothing, before that is believed. DashScope reports a
    limit on tokens per minute in the words that OpenAI uses for money."""

    STARTUP_SECONDS = 5.0
    """Time that an address that never answered may fail like a wrong one. With connection time and a pause, that is 15
    seconds at most."""

    LONGEST_STARTUP_PAUSE = 1.5

    TELL_SECONDS = (3.0, 30.0)
    """Time without an answer after which the reason is printed, and interval until it is printed again."""

    OF_THE_CALLER = frozenset({401, 402, 407, *range(300, 400)})
    """Statuses about the key, the account, the proxy or the address: no other request would fare better."""

    OF_THE_ENDPOINT = frozenset({403, 404, 405, 410})
    """Statuses that are mostly about the key, the model or the address; but services moderate prompts with 403."""

    def __init__(
        self, config: OpenAITeacherConfig, recording: Recording | None = None, budget: Budget | None = None
    ) -> None:
        self.config = config
        self.spent = recording.spent(config.model) if recording else Spent()
        self.spent_by_stage = recording.spent_by_stage(config.model) if recording else {}
        self._budget = budget or config.budget()
        self._budget.count(self.spent)
        self._prices = Prices(config.price_prompt, config.price_completion)
        self.watch: Callable[[bytes, EndpointReply, float], None] | None = None
        self._recording = recording
        self._api = api_class(config)
        self._opened: _LoopState | None = None
        self._lengths = AnswerLengths(config.max_tokens)
        self._densest = 0.0  # most prompt tokens a byte of an answered request
        self._answered = 0.0
        self._probed = 0.0
        self._pending = 0  # requests that wait for an answer, or for another try
        self._silent_since = 0.0  # start of the first try that failed since the last answer; 0.0: none did
        self._told = -math.inf
        self._verdict: AbortRun | None = None
        self._names_ends = False  # whether its answers have a finish reason
        self._unread: set[str] = set()  # fields that it sends, and refuses to be sent

    async def complete(
        self,
        kind: str,
        body: bytes,
        rng: random.Random,
        *,
        timeout_seconds: float | None = None,
        trying: bool = False,
    ) -> EndpointReply:
        """Send a request until it is answered.

        Args:
            kind: of the answer; answers of a kind are about as long.
            body: the request, JSON.
            rng: of the jitter of pauses.
            timeout_seconds: instead of the configured time.
            trying: the request tests what the endpoint can do; a refusal means that it cannot.

        Raises:
            RequestRefused: this request is refused while others would not be; or it fails repeatedly while others are
                answered.
            EndpointUnusable: any request would be refused.
            EndpointDown: no request at all is answered.
            BudgetSpent: too little is left for it.
        """
        self._pending += 1
        try:
            return await self._complete(kind, body, rng, timeout_seconds, trying)
        finally:
            self._pending -= 1
            if not self._pending:  # time in which nobody asks is no outage
                self._silent_since = 0.0

    async def _complete(
        self, kind: str, body: bytes, rng: random.Random, timeout_seconds: float | None, trying: bool
    ) -> EndpointReply:
        config = self.config
        first_failure = last_failure = passed_over = 0.0
        failures = faults = 0
        self._loop_state()  # opened before the time of the first try counts
        while True:
            try:
                return await self._try(kind, body, timeout_seconds)
            except StatusRefused as refusal:
                if trying and not refusal.account and refusal.status not in self.OF_THE_CALLER:
                    raise RequestRefused(str(refusal), status=refusal.status, said=refusal.said) from None
                failure = await self._judged(refusal, body)
            except TryFailed as problem:
                failure = problem
            now = time.monotonic()
            self._silent_since = self._silent_since or max(min(failure.began, now), self._answered)
            failures, faults = failures + 1, faults + (not failure.busy)
            first_failure = first_failure or now
            pause = backoff(failures, first=config.backoff_seconds, longest=config.longest_backoff_seconds, rng=rng)
            if failure.wait is not None:
                # The wait is for the endpoint, not for the request: no request is sent before it ends.
                self._loop_state().limits.pause(failure.wait)
                pause = failure.wait + config.backoff_seconds * rng.random()
            if faults >= config.failures and (self._answered > first_failure or await self._answers(body)):
                raise RequestRefused(f"{config.place} failed {failures} times and answers other requests: {failure}")
            if self._answered > last_failure > 0:
                passed_over += now - last_failure
                if passed_over > config.max_unavailable_seconds:
                    raise RequestRefused(
                        f"{config.place} answered other requests for {passed_over:,.0f} s, and put this one off "
                        f"{failures} times: {failure}"
                    )
            last_failure = now
            silent = now - self._silent_since if self._silent_since else 0.0
            if failure.wrong_address and not self._answered:
                pause = min(pause, self.LONGEST_STARTUP_PAUSE)
            self._check_silence(failure, silent)
            self._tell(failure, silent)
            await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        """Wait for so long. Raises `AbortRun`: a verdict ended the run meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._loop_state().stopped.wait(), seconds)
        self._check_verdict()

    def _check_verdict(self) -> None:
        if self._verdict is not None:
            raise type(self._verdict)(self._verdict.problem, self._verdict.remedy)

    def _patience(self, failure: TryFailed) -> float:
        """Return for how many seconds without any answer requests wait after such a failure."""
        if failure.wrong_address and not self._answered:
            return min(self.config.max_unavailable_seconds, self.STARTUP_SECONDS)
        if failure.lasting is not None:
            return min(self.config.max_unavailable_seconds, self.EMPTY_SECONDS)
        return self.config.max_unavailable_seconds

    def _check_silence(self, failure: TryFailed, silent: float) -> None:
        """Stop the run if the endpoint has not answered for too long.

        Args:
            silent: seconds without an answer to any request.

        Raises:
            AbortRun: for all requests that wait, and for those to come.
        """
        config = self.config
        if silent > self._patience(failure):
            if failure.wrong_address and not self._answered:
                address, remedy = config.written("base_url") + via(config.base_url), failure.wrong_address
                what = f"{address} does not answer as a model endpoint ({failure})"
                raise self._stop(EndpointUnusable(what, f"{remedy}, and run the same command again to resume"))
            if failure.lasting is not None:
                raise self._refuses(failure.lasting)
        if max(silent, failure.wait or 0.0) > config.max_unavailable_seconds:
            raise self._stop(
                EndpointDown(
                    f"{config.place} has not answered for {silent:,.0f} s ({failure})"
                    + (f" and asks to wait for {failure.wait:,.0f} s" if failure.wait else ""),
                    "check the endpoint, and run the same command again to resume",
                )
            )

    def _tell(self, failure: TryFailed, silent: float) -> None:
        """Print from time to time why the program waits, beside the progress bar."""
        now, (first, again) = time.monotonic(), self.TELL_SECONDS
        if max(silent, failure.wait or 0.0) < first or now - self._told < again:
            return
        self._told = now
        asked = f", which asks to wait for {failure.wait:,.0f} s" if failure.wait else ""
        log_above_progress(
            f"Waiting for {self.config.place}{asked}: {failure!s:.200}. No answer for {silent:,.0f} s; the run "
            f"stops after {self._patience(failure):,.0f} s."
        )

    async def complete_turn(
        self, kind: str, body: Mapping[str, Any], rng: random.Random, *, timeout_seconds: float | None = None
    ) -> EndpointReply:
        """`complete` for a conversation that holds the endpoint's own messages.

        Some endpoints refuse fields of messages that they sent themselves, and name them. Those fields are left out. If
        the request is then answered, they are left out of all later ones too.

        Args:
            body: the request, with the conversation in `messages`.
        """
        refused: set[str] = set()
        while True:
            messages = [without_fields(message, self._unread | refused) for message in body["messages"]]
            request = msgspec.json.encode({**body, "messages": messages})
            try:
                reply = await self.complete(kind, request, rng, timeout_seconds=timeout_seconds)
            except RequestRefused as refusal:
                named = set(own_fields(messages)) & set(_WORD.findall(refusal.said))
                if refusal.status not in (400, 422) or not named:
                    raise
                refused |= named
                continue
            if new := sorted(refused - self._unread):
                self._unread |= refused
                log_above_progress(
                    f"{self.config.base_url} refuses {', '.join(new)} in messages of its model: left out"
                )
            return reply

    def read_turn(self, message: Mapping[str, Any], tools: Collection[str] = ()) -> AssistantTurn:
        """Parse a reply's `message`; see `Api.read_turn`."""
        return self._api.read_turn(message, tools)

    async def close(self) -> None:
        """Close all connections. The next request opens them again."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.api.close()

    async def _try(self, kind: str, body: bytes, timeout_seconds: float | None = None) -> EndpointReply:
        limits = self._loop_state().limits
        async with limits.slot():
            self._check_verdict()
            permit = await limits.reserve(TokenEstimate(kind, len(body), STAGE.get()))
            used: Usage | None = None
            answered = False
            try:
                await limits.take(permit)
                while (wait := limits.paused()) > 0:  # also where the pause began while it waited for its turn
                    await self._sleep(wait)
                try:
                    sent = time.monotonic()
                    reply = await self._send(body, timeout_seconds)
                    used, answered = reply.usage, True
                except TryFailed as failure:
                    failure.began = sent
                    used = failure.used or (self._at_most(body) if failure.lost else None)
                    raise
                except asyncio.CancelledError:
                    used = self._at_most(body)
                    raise
            finally:
                if used is not None:
                    self.book(used, permit.estimate.stage)
                limits.settle(permit, used, answered=answered)
        self._densest = max(self._densest, used.prompt / len(body))
        if self.watch is not None:
            self.watch(body, reply, self._prices.of(used))
        self._answered, self._silent_since = time.monotonic(), 0.0
        if reply.finish_reason:
            self._names_ends = True
        elif self._names_ends and not reply.problem:
            problem = "broken off by the endpoint (no finish_reason, which its other answers have)"
            reply = msgspec.structs.replace(reply, problem=problem)
        TRAFFIC.tokens += used.tokens
        return reply

    def book(self, used: Usage, stage: str) -> None:
        """Count what a request used, for a stage of the run."""
        money = self._prices.of(used)
        self.spent.add(used, money)
        self.spent_by_stage.setdefault(stage, Spent()).add(used, money)
        if self._recording is not None:
            self._recording.touch()

    def _at_most(self, body: bytes) -> Usage:
        """Return the maximum usage of a request whose answer was lost: its prompt, at the highest density so far, and
        its limit.

        Before any answer a byte counts as a token.
        """
        try:
            limit = _limits.decode(body).max_tokens
        except msgspec.DecodeError:
            limit = self.config.max_tokens
        return Usage(math.ceil(len(body) * (self._densest or 1.0)), limit)

    async def _send(self, body: bytes, timeout_seconds: float | None) -> EndpointReply:
        TRAFFIC.requests += 1
        try:
            return await self._loop_state().api.send(body, timeout_seconds or self.config.timeout_seconds)
        except NoReply as error:
            fix = "" if error.connected else "see that the endpoint is running and that this is its address"
            raise TryFailed(str(error), lost=error.connected, wrong_address=fix) from None
        except UnreadableReply as error:
            fix = "give the address of the API, which ends in /v1 for most services" if error.foreign else ""
            raise TryFailed(str(error), lost=True, used=error.usage, wrong_address=fix) from None
        except BadStatus as error:
            raise meaning_of(error) from None

    async def _judged(self, refusal: StatusRefused, body: bytes) -> TryFailed:
        """Return the meaning of a refusal: the failure that kept the endpoint from telling.

        Raises:
            RequestRefused: it is about the request.
            EndpointUnusable: it is about the endpoint: nothing was answered yet, or the status is not about a request,
                and the simplest request with the same settings is refused as well.
        """
        if refusal.account or refusal.status in self.OF_THE_CALLER:
            raise self._refuses(refusal)
        async with self._loop_state().judging:  # one after the other: the first may speak for all
            telling = self._answered and refusal.status not in self.OF_THE_ENDPOINT
            if not telling and (failure := await self._probe(body)) is not None:
                return failure
        problem = f"{self.config.place} refused the request with {refusal}"
        raise RequestRefused(problem, status=refusal.status, said=refusal.said)

    async def _answers(self, body: bytes) -> bool:
        """Return whether the endpoint answers the simplest of requests: distinguishes a bad request from an outage."""
        now = time.monotonic()
        if self._probed and now - self._probed < self.config.longest_backoff_seconds:
            return False
        self._probed = now
        return await self._probe(body) is None

    async def _probe(self, body: bytes) -> TryFailed | None:
        """Send the simplest question with a request's settings; return why there was no answer.

        Raises:
            EndpointUnusable: the endpoint refuses even this.
        """
        settings = decode_json(body, dict[str, msgspec.Raw])
        for of_the_request in ("tools", "tool_choice", "parallel_tool_calls"):
            settings.pop(of_the_request, None)
        simplest = msgspec.json.encode({**settings, "messages": [{"role": "user", "content": "Say yes."}]})
        try:
            await self._try("probe", simplest)
        except StatusRefused as refusal:
            raise self._refuses(refusal) from None
        except TryFailed as failure:
            return failure
        return None

    def _stop(self, verdict: AbortRun) -> AbortRun:
        """Return the end of the run; requests that wait, and those still to be sent, get the same."""
        self._verdict = verdict
        self._loop_state().stopped.set()
        return verdict

    def _refuses(self, refusal: StatusRefused) -> AbortRun:
        """Return the end of the run for a refusal that holds for every request."""
        config, status = self.config, refusal.status
        model = config.written("model")
        remedy = f"check {model}, {config.written('max_tokens')} and whatever else the message names"
        if status in (401, 403):
            remedy = f"give a key that may use {model}: {config.given_as.get('api_key', 'api_key')}"
        elif refusal.account:
            remedy = "check the account behind the key"
        elif status == 407:
            remedy = "give the proxy's user and password in the environment (http_proxy, https_proxy)"
        elif status in self.OF_THE_ENDPOINT:
            remedy = (
                f"check that {model} is the name of a served model ({config.base_url.rstrip('/')}/models lists them) "
                f"and that the address ends in /v1 ({config.written('base_url')})"
            )
        return self._stop(
            EndpointUnusable(
                f"{config.place} refuses every request with {refusal}",
                f"{remedy}, and run the same command again to resume",
            )
        )

    def _loop_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened.loop is not loop:
            config = self.config
            try:
                api = self._api(config)
            except ValueError as error:
                problem = f"{config.written('base_url')} is not an address ({error})"
                raise EndpointUnusable(problem, "write http://HOST:PORT/v1") from None
            self._opened = _LoopState(loop, api, EndpointLimits(config, self._budget, self._lengths))
        return self._opened


def api_class(config: OpenAITeacherConfig) -> type[Api]:
    """Return the class of an endpoint's API.

    A new API also needs its name in `ApiName` and in the flag `--teacher_api`, and an extra in `setup.py`. Its headers
    are listed in `endpoint_apis`, and its finish reasons in `endpoint_replies`.

    Raises:
        InputError: its client is not installed.
    """
    name = config.api
    if name == "openai":
        return OpenAIApi
    package = {"anthropic": "anthropic", "gemini": "google.genai"}[name]
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise InputError(f"{config.written('api')} needs the package {package}: pip install 'astra-jax[{name}]'")
    if name == "anthropic":
        from synthesis.core.endpoint_anthropic import AnthropicApi

        return AnthropicApi
    from synthesis.core.endpoint_gemini import GeminiApi

    return GeminiApi
