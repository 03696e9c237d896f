"""Chat completions over HTTP that outlive a flaky endpoint: limits, budget, retries, and an end when nothing answers.

aiohttp is spoken to directly: the `openai` package takes 2 ms of processor time a request, so that one process makes
500 a second at best; aiohttp takes a tenth of that (`benchmarks/teacher.py`).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import urllib.parse
import urllib.request
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sandbox.answers import AnswerTooLarge, read_answer, without_keys
from synthesis.core.endpoint_limits import AnswerLengths, EndpointLimits, OwnLimits, TokenEstimate
from synthesis.core.endpoint_replies import (
    EndpointReply,
    UnreadableReply,
    read_completion,
    said_used,
    shown,
    too_many,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.progress import TRAFFIC
from synthesis.core.rate_limits import STAGE, Budget, Prices, Spent, Usage, backoff, retry_after
from synthesis.core.recording import Recording
from synthesis.core.stages import Stopped
from synthesis.core.typed import decode_json, json_decoder


class EndpointDown(Stopped):
    """The endpoint has answered nothing for `outage_seconds`, or asks to be left alone for longer."""


class EndpointUnusable(Stopped):
    """The endpoint refuses whatever it is asked: a wrong key, a wrong model, an account without money."""


class RequestRefused(Exception):
    """The endpoint will not answer this request, and asking it again does not help; others it would answer.

    Attributes:
        status: with which it was refused; None: it failed again and again.
        said: with that.
    """

    def __init__(self, problem: str, *, status: int | None = None, said: str = "") -> None:
        super().__init__(problem)
        self.status, self.said = status, said


class _Failure(Exception):
    """A try that another may mend. `lost`: the model may have written an answer all the same, which is paid for."""

    def __init__(
        self,
        problem: str,
        *,
        busy: bool = False,
        wait: float | None = None,
        lost: bool = False,
        used: Usage | None = None,
        lasting: _Refusal | None = None,
    ) -> None:
        super().__init__(problem)
        self.busy = busy
        self.lasting = lasting  # what it is if it stays so
        self.wait = wait
        self.lost = lost
        self.used = used  # where the endpoint said it


class _Refusal(Exception):
    """A status with which a request is refused, whoever is to blame."""

    def __init__(self, status: int, said: str, *, account: bool = False) -> None:
        super().__init__(f"status {status}: {said}")
        self.status, self.said = status, said
        self.account = account or status == 402


class _Limit(msgspec.Struct):
    """Of a request's body."""

    max_tokens: int


_limits = json_decoder(_Limit)


@dataclass
class _Line:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: Any
    limits: EndpointLimits
    judging: asyncio.Lock


class Endpoint:
    """A chat completions endpoint.

    Args:
        recording: keeps what was spent; without it a restart counts from zero.
        budget: that other endpoints share; None: one of its own, as the settings say.
        limits: that other processes share, in whose books requests are then; None: its own, as the settings say.

    Attributes:
        spent: in all, on this model.
        spent_by_stage: of it, by `rate_limits.STAGE`.
        watch: called with each request that was answered, its reply, and what it cost in money.
    """

    TRANSIENT = frozenset({408, 409, 425, 429})
    """Statuses below 500 that another try may mend."""

    EMPTY_SECONDS = 150.0
    """For so long an account says that it is empty, and answers nothing, before that is believed: DashScope says of a
    minute's tokens, with the same words, what OpenAI says of money."""

    OF_GATEWAYS = frozenset({502, 504})
    """Statuses with which a gateway says that it lost the answer; with other ones nothing was written."""

    OF_THE_CALLER = frozenset({401, 402, 407, *range(300, 400)})
    """Statuses that are about the key, the account, the proxy or the address: no other request would fare better."""

    OF_THE_ENDPOINT = frozenset({403, 404, 405, 410})
    """Statuses that are mostly about the key, the model or the address; but services moderate prompts with 403."""

    def __init__(
        self, config: OpenAITeacherConfig, recording: Recording | None = None, budget: Budget | None = None,
        limits: EndpointLimits | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.spent = recording.spent(config.model) if recording else Spent()
        self.spent_by_stage = recording.spent_by_stage(config.model) if recording else {}
        self._budget = budget or Budget(tokens=config.token_budget, money=config.money_budget)
        self._budget.count(self.spent)
        self._prices = Prices(config.price_prompt, config.price_completion)
        self.watch: Callable[[bytes, EndpointReply, float], None] | None = None
        self._recording = recording
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {config.api_key}", "Content-Type": "application/json"}
        self._proxy = _proxy_of(config.base_url)
        self._opened: _Line | None = None
        self._limits = limits
        self._lengths = AnswerLengths(config.max_tokens)
        self._densest = 0.0  # most prompt tokens a byte of an answered request
        self._answered = 0.0
        self._probed = 0.0
        self._refusal: _Refusal | None = None

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
            trying: it asks what the endpoint can do; a refusal says that it cannot, whatever else it could mean.

        Raises:
            RequestRefused: this request is refused while others would not be; or it fails again and again while others
                are answered.
            EndpointUnusable: any request would be refused.
            EndpointDown: no request at all is answered.
            BudgetSpent: too little is left for it.
        """
        config = self.config
        first_failure = last_failure = passed_over = 0.0
        failures = faults = 0
        while True:
            try:
                return await self._try(kind, body, timeout_seconds)
            except _Refusal as refusal:
                if trying and refusal.status not in self.OF_THE_CALLER:
                    raise RequestRefused(str(refusal), status=refusal.status, said=refusal.said) from None
                failure = await self._judged(refusal, body)
            except _Failure as problem:
                failure = problem
            now = time.monotonic()
            failures, faults = failures + 1, faults + (not failure.busy)
            first_failure = first_failure or now
            pause = backoff(failures, first=config.backoff_seconds, longest=config.longest_backoff_seconds, rng=rng)
            if failure.wait is not None:
                # It speaks for the endpoint, not for the request: nobody asks before.
                self._line().limits.pause(failure.wait)
                pause = failure.wait + config.backoff_seconds * rng.random()
            if faults >= config.failures and (self._answered > first_failure or await self._answers(body)):
                raise RequestRefused(f"{config.base_url} failed {failures} times and answers other requests: {failure}")
            if self._answered > last_failure > 0:
                passed_over += now - last_failure
                if passed_over > config.outage_seconds:
                    raise RequestRefused(
                        f"{config.base_url} answered other requests for {passed_over:,.0f} s, and put this one off "
                        f"{failures} times: {failure}"
                    )
            last_failure = now
            silent = now - max(first_failure, self._answered)
            if failure.lasting is not None and silent > min(config.outage_seconds, self.EMPTY_SECONDS):
                raise self._refuses(failure.lasting)
            if max(silent, failure.wait or 0.0) > config.outage_seconds:
                raise EndpointDown(
                    f"{config.base_url} has answered nothing for {silent:,.0f} s ({failure})"
                    + (f" and asks to wait for {failure.wait:,.0f} s" if failure.wait else ""),
                    f"see to the endpoint or raise outage_seconds={config.outage_seconds:,.0f}, and run the same "
                    "command again to go on",
                )
            await asyncio.sleep(pause)

    def limits(self) -> EndpointLimits:
        """Those of the event loop that runs."""
        return self._line().limits

    async def close(self) -> None:
        """Hang up; also done when nobody uses the endpoint any more."""
        if self._opened is not None:
            await self._opened.session.close()
            self._opened = None

    async def _try(self, kind: str, body: bytes, timeout_seconds: float | None = None) -> EndpointReply:
        limits = self._line().limits
        async with limits.slot():
            if self._refusal is not None:
                raise self._refuses(self._refusal)
            permit = await limits.reserve(TokenEstimate(kind, len(body), lambda: self._at_most(body), STAGE.get()))
            used: Usage | None = None
            answered = False
            try:
                await limits.take(permit)
                while (wait := limits.paused()) > 0:  # also where the pause began while it waited for its turn
                    await asyncio.sleep(wait)
                try:
                    reply = await self._send(body, timeout_seconds)
                    used, answered = reply.usage, True
                except _Failure as failure:
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
        self._answered = time.monotonic()
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
        """What a request can have cost whose answer was lost: its prompt, as dense as any so far, and its limit.

        Before any was answered a byte counts as a token.
        """
        try:
            limit = _limits.decode(body).max_tokens
        except msgspec.DecodeError:
            limit = self.config.max_tokens
        return Usage(math.ceil(len(body) * (self._densest or 1.0)), limit)

    async def _send(self, body: bytes, timeout_seconds: float | None) -> EndpointReply:
        import aiohttp

        TRAFFIC.requests += 1
        seconds = timeout_seconds or self.config.timeout_seconds
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._line().session.post(
                self._url, data=body, headers=self._headers, proxy=self._proxy, allow_redirects=False, timeout=timeout
            ) as response:
                status, data = response.status, await read_answer(response)
                elsewhere = without_keys(response.headers.get("Location", "").encode(), self._headers).decode()
                asked_wait = retry_after(response.headers.get("Retry-After")) if status != 200 else None
        except TimeoutError:
            raise _Failure(f"no answer in {seconds:g} s", lost=True) from None
        except aiohttp.InvalidURL:
            raise EndpointUnusable(
                f"base_url={self.config.base_url} is no address", "write http://HOST:PORT/v1"
            ) from None
        except (aiohttp.ClientError, OSError, AnswerTooLarge) as error:
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            raise _Failure(f"{type(error).__name__}: {error}", lost=reached) from None
        if status == 429 and (about := too_many(data)) != "busy":
            if about == "request":
                raise _Refusal(status, shown(data))
            refusal = _Refusal(status, shown(data), account=True)
            raise _Failure(str(refusal), busy=True, wait=asked_wait, lasting=refusal)
        if status in self.TRANSIENT or status >= 500:
            busy, lost = status == 429, status in self.OF_GATEWAYS
            raise _Failure(f"status {status}: {shown(data)}", busy=busy, wait=asked_wait, lost=lost)
        if 300 <= status < 400:
            raise _Refusal(status, f"it sends us to {elsewhere[:200]!r}; give that as base_url if you trust it")
        if status != 200:
            raise _Refusal(status, shown(data))
        try:
            return read_completion(data, len(body))
        except UnreadableReply as error:
            raise _Failure(str(error), lost=True, used=said_used(data)) from None

    async def _judged(self, refusal: _Refusal, body: bytes) -> _Failure:
        """What a refusal means: the failure that kept the endpoint from telling.

        Raises:
            RequestRefused: it is about the request.
            EndpointUnusable: it is about the endpoint: nobody was answered yet, or the status speaks of no request, and
                the simplest request with the same settings is refused as well.
        """
        if refusal.status in self.OF_THE_CALLER:
            raise self._refuses(refusal)
        async with self._line().judging:  # one after the other: the first may speak for all
            telling = self._answered and refusal.status not in self.OF_THE_ENDPOINT
            if not telling and (failure := await self._probe(body)) is not None:
                return failure
        problem = f"{self.config.base_url} refused the request with {refusal}"
        raise RequestRefused(problem, status=refusal.status, said=refusal.said)

    async def _answers(self, body: bytes) -> bool:
        """Whether the endpoint answers the simplest of requests: tells a poisonous request from an outage."""
        now = time.monotonic()
        if self._probed and now - self._probed < self.config.longest_backoff_seconds:
            return False
        self._probed = now
        return await self._probe(body) is None

    async def _probe(self, body: bytes) -> _Failure | None:
        """Ask the simplest of questions with a request's settings; why there was no answer.

        Raises:
            EndpointUnusable: the endpoint refuses even this.
        """
        settings = decode_json(body, dict[str, msgspec.Raw])
        for of_the_request in ("tools", "tool_choice", "parallel_tool_calls"):
            settings.pop(of_the_request, None)
        simplest = msgspec.json.encode({**settings, "messages": [{"role": "user", "content": "Say yes."}]})
        try:
            await self._try("probe", simplest)
        except _Refusal as refusal:
            raise self._refuses(refusal) from None
        except _Failure as failure:
            return failure
        return None

    def _refuses(self, refusal: _Refusal) -> EndpointUnusable:
        """The end of the run; requests that are still to be sent learn of it."""
        self._refusal = refusal
        config, status = self.config, refusal.status
        remedy = f"see to model={config.model!r}, max_tokens={config.max_tokens} and whatever else the message names"
        if status in (401, 403):
            remedy = f"give a key that may use model={config.model!r}: the flag that ends in key_file names its file"
        elif refusal.account:
            remedy = "see to the account behind the key"
        elif status == 407:
            remedy = "give the proxy's user and password in the environment (http_proxy, https_proxy)"
        elif status in self.OF_THE_ENDPOINT:
            remedy = (
                f"see that model={config.model!r} is the name of a served model ({config.base_url.rstrip('/')}/models "
                "lists them) and that base_url ends in /v1"
            )
        return EndpointUnusable(
            f"{config.base_url} refuses every request with {refusal}",
            f"{remedy}, and run the same command again to go on",
        )

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened.loop is not loop:
            import aiohttp  # a quarter of a second, and the offline teacher needs none of it

            config = self.config
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # `EndpointLimits.slot` is the limit
                timeout=aiohttp.ClientTimeout(total=config.timeout_seconds),
            )
            weakref.finalize(self, _hang_up, session)
            own = self._limits or OwnLimits(config, self._budget, self._lengths)
            self._opened = _Line(loop, session, own, asyncio.Lock())
        return self._opened


def _proxy_of(url: str) -> str | None:
    """The proxy that the environment names for an address; aiohttp would look it up for each request, in a thread."""
    address = urllib.parse.urlsplit(url)
    if not address.hostname or urllib.request.proxy_bypass(address.hostname):
        return None
    return urllib.request.getproxies().get(address.scheme)


def _hang_up(session: Any) -> None:
    """Close a session that nobody closed, without a loop to wait in."""
    import aiohttp

    if not session.closed:
        connector = session.connector
        session.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it wants to be awaited, but has closed them already
            if asyncio.iscoroutine(waiting := aiohttp.BaseConnector.close(connector)):
                waiting.close()
