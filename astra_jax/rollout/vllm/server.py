"""HTTP client of one vLLM server, with its two completion endpoints.

`/inference/v1/generate` reports which weights sampled each token. It exists if the server was started with
`--enable-scale-out`. `/v1/completions` always exists but does not report the weights, so the policy asks separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import aiohttp

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.http_responses import AnswerTooLarge, read_answer
from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.server_metrics import ServerMetrics, parse_metrics
from synthesis.core.stages import rng_for


class PolicyError(UserError, RuntimeError):
    """The rollout servers cannot be used as configured. The message says which and why."""


class Unreachable(PolicyError):
    """No server answers at the address, or fewer than the run requires."""

    away = True


class NotServing(Exception):
    """The server answers, but not with the requested result."""


FAILURES = (aiohttp.ClientError, TimeoutError, NotServing)
"""Errors of a request whose server is at fault."""


def why(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ServerCompletion:
    """Tokens sampled by a server for one request.

    Attributes:
        token_ids: the new tokens, at least one.
        logprobs: of each token.
        labels: of the weights that sampled each token; None if the server does not report them.
    """

    token_ids: list[int]
    logprobs: list[float]
    labels: list[str] | None


class Route(Protocol):
    """A completion endpoint of a server."""

    path: ClassVar[str]

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """Return the request body."""
        ...

    def draw(self, answer: dict[str, Any]) -> ServerCompletion:
        """Parse the server's answer.

        Raises:
            PolicyError, NotServing: it is not what was requested.
            KeyError, IndexError, TypeError, AttributeError: it has an unexpected form.
        """
        ...


@dataclass(frozen=True)
class GenerateRoute:
    """vLLM's tokens-in, tokens-out endpoint."""

    on_tpus: bool = False
    seeded: bool = False
    path: ClassVar[str] = "/inference/v1/generate"

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """See `Route.body`."""
        return {
            "token_ids": list(token_ids),
            "sampling_params": {**_parameters(self, token_ids, sampling), "detokenize": False},
        }

    def draw(self, answer: dict[str, Any]) -> ServerCompletion:
        """See `Route.draw`."""
        choice = _choice(answer)
        labels: list[str] = []
        for span in choice.get("weight_versions") or ():
            if span["start"] != len(labels):
                raise PolicyError(f"{self.path} says of no or of several weights that they drew token {len(labels)}")
            labels += [str(span["version"])] * (span["end"] - span["start"])
        if len(labels) != len(choice["token_ids"]):
            raise PolicyError(f"{self.path} does not report which weights sampled each token; use vLLM 0.32 or later")
        return _draw(choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], labels)


@dataclass(frozen=True)
class CompletionsRoute:
    """OpenAI's endpoint, with vLLM's token ids."""

    on_tpus: bool = False
    seeded: bool = False
    path: ClassVar[str] = "/v1/completions"

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """See `Route.body`."""
        return {"prompt": list(token_ids), "return_token_ids": True, **_parameters(self, token_ids, sampling)}

    def draw(self, answer: dict[str, Any]) -> ServerCompletion:
        """See `Route.draw`."""
        choice = _choice(answer)
        return _draw(choice["token_ids"], choice["logprobs"]["token_logprobs"], None)


def _parameters(
    route: GenerateRoute | CompletionsRoute, token_ids: Sequence[int], sampling: Sampling
) -> dict[str, Any]:
    if sampling.needs_logits_processing or sampling.prompt_logprobs:
        raise ValueError(
            f"{sampling} asks for more than a temperature and a nucleus, which no trainer's logprobs follow"
        )
    parameters: dict[str, Any] = {
        **_PLAIN,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only `stop_token_ids` stop a completion
    }
    parameters["logprobs"] = 1 if route.on_tpus else 0  # of the sampled token alone; on TPUs 0 returns none
    if not route.seeded:
        return parameters
    # The server seeds per request, and our seeds are per sequence position.
    seed = rng_for(sampling.seed, "vllm", len(token_ids)).getrandbits(31)
    return parameters | {"seed": seed}


_PLAIN = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling options that stay disabled. When a request omits them, vLLM takes them from the model's
`generation_config.json`, and samples from another distribution than the trainer's."""


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = answer["choices"][0]
    if choice.get("finish_reason") not in (None, "stop", "length"):  # `abort`: the tokens end for another reason
        raise NotServing(f"a completion ended by {choice['finish_reason']!r}")
    return choice


def _draw(tokens: list[int], logprobs: list[float], labels: list[str] | None) -> ServerCompletion:
    if len(tokens) != len(logprobs) or not tokens:
        raise PolicyError(f"a server returned {len(tokens)} tokens with {len(logprobs)} logprobs")
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in logprobs):
        raise PolicyError("a server returned a logprob that is not a finite number")
    return ServerCompletion(list(tokens), [float(one) for one in logprobs], labels)


@dataclass
class ServerCounts:
    """Counts of a server's requests and of its changes of service."""

    completions: int = 0
    tokens: int = 0  # sampled and used
    spanning: int = 0  # completions used that span a weight update
    stale: int = 0  # completions by other weights, discarded
    failures: int = 0  # unanswered requests, repeated elsewhere
    dropped: int = 0  # times taken out of service
    rejoined: int = 0


class RolloutServer:
    """One server: its HTTP connection and the state known to the policy.

    Args:
        certified: the name in its certificate, if it differs from the address.

    Attributes:
        asked: requests in flight.
        checked: the server was found to fit this policy.
        leaving: it gets no new requests, and is removed when none is in flight.
        stalled: it sampled nothing for too long and no token since; it may still answer checks.
        cache: tokens that fit its KV cache; None if it does not report this.
        preemptions: see `ServerMetrics`; 0 if not reported.
        reason: cause for being out of service; "" before anything is known.
        unanswered: unanswered checks in a row.
        settled: set while no sync is running; requests wait for it.
        syncs: number of syncs started. If it grew during a request, several weights may have sampled the completion.
        sync_seconds: duration of the last sync, by stage.
        sync: the running sync, if any.
        has: label of the last weights loaded from this process. Weights that another process of the run loaded under
            the same label are different ones.
        counts: since the policy was opened.
        on_tpus: it runs on TPUs; set before `find_route`.
        seeded: it accepts a seed; set before `find_route`. tpu-inference 0.32 refuses seeds. Without our plugin, vLLM's
            CPU engine crashes on a seed if a prompt is prefilled in parts.
    """

    def __init__(self, url: str, certified: str | None = None) -> None:
        self.url, self._certified = url, certified
        self.asked = 0
        self.checked = self.leaving = self.stalled = False
        self.cache: int | None = None
        self.preemptions = 0.0
        self.reason = ""
        self.unanswered = 0
        self.counts = ServerCounts()
        self.sync: asyncio.Task[str] | None = None
        self.has = ""
        self._left: asyncio.Future[None] | None = None
        self._tokens: float | None = None
        self._moved = 0.0
        self.settled = asyncio.Event()
        self.settled.set()
        self.syncs = 0
        self.sync_seconds: dict[str, float] = {}
        self._paced = time.monotonic(), 0
        self.on_tpus = self.seeded = False
        self.route: Route = GenerateRoute()
        self.session: aiohttp.ClientSession | None = None

    async def find_route(self, seconds: float) -> None:
        """Find the completion endpoint of this server.

        Raises:
            PolicyError: it does not answer within `seconds`, or not as vLLM would.
        """
        status, text = await self._small("POST", GenerateRoute.path, {}, seconds=seconds)
        if status == 400:  # the endpoint exists: it rejects the invalid request `{}`
            self.route = GenerateRoute(self.on_tpus, self.seeded)
        elif status in (403, 404):
            self.route = CompletionsRoute(self.on_tpus, self.seeded)
        else:
            raise PolicyError(f"{self.url}{GenerateRoute.path} answers {status}: {text[:500]}")

    async def draw(self, token_ids: Sequence[int], sampling: Sampling, seconds: float) -> ServerCompletion:
        """Sample one completion.

        Raises:
            ValueError: the server refuses the request.
            PolicyError: it gives an invalid answer.
            FAILURES: it does not answer.
        """
        body = self.route.body(token_ids, sampling)
        answer = await self._while_serving(self.post(self.route.path, body, seconds))
        try:
            drawn = self.route.draw(answer)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise NotServing(f"{self.route.path} answers in another form ({why(error)}): {str(answer)[:500]}") from None
        if len(drawn.token_ids) < sampling.max_tokens and drawn.token_ids[-1] not in sampling.stop_ids:
            raise NotServing(
                f"a completion ended after {len(drawn.token_ids)} tokens by none that was to stop it, max_tokens was "
                f"{sampling.max_tokens}"
            )
        return drawn

    async def try_drawing(self, seconds: float) -> None:
        """Check that the server samples a token, with any weights; also while it is out of service.

        Raises:
            PolicyError, KeyError, IndexError, TypeError, AttributeError: as `draw`.
            FAILURES: it does not within `seconds`.
        """
        one = Sampling(max_tokens=1, stop_ids=(), seed=0)
        self.route.draw(await self.post(self.route.path, self.route.body([0], one), seconds))

    async def fetch_metrics(self, seconds: float) -> ServerMetrics:
        """Read the server's metrics, and store its `cache` and `preemptions`.

        Raises:
            FAILURES: it does not answer.
        """
        status, text = await self._exchange("GET", "/metrics", None, seconds, None)
        try:
            found = parse_metrics(text if status == 200 else "")
        except ValueError as error:
            raise NotServing(f"/metrics answers with something other than a number: {error}") from None
        self.cache, self.preemptions = found.cache, found.preemptions or 0.0
        return found

    def moves(self, tokens: float | None) -> float:
        """Record its token count. Return the seconds without new tokens while requests were in flight.

        Args:
            tokens: None if unknown, or to reset the timer.
        """
        now = asyncio.get_running_loop().time()
        if tokens is None or tokens != self._tokens or not self.asked:
            self._tokens, self._moved = tokens, now
        return now - self._moved

    def pace(self) -> float:
        """Return the used tokens sampled per second since the last call."""
        before, self._paced = self._paced, (time.monotonic(), self.counts.tokens)
        return (self._paced[1] - before[1]) / max(self._paced[0] - before[0], 1e-9)

    # ------------------------------------------------------------------------------------------- in service or not

    @property
    def serving(self) -> bool:
        """True if it has the current weights and answers."""
        return self._left is not None and not self._left.done()

    def take_in(self) -> None:
        """Put the server into service."""
        if not self.serving:
            self._left = asyncio.get_running_loop().create_future()
        self.reason = ""

    def leave_out(self, reason: str) -> None:
        """Take the server out of service, and abort its requests."""
        self.reason = reason
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Enclose a request; waits for a running sync, since tokens sampled during one have no known version.

        After a sync ends, a waiting task resumes a few event-loop turns later, when the next sync may have started.
        """
        while not self.settled.is_set():
            settled = asyncio.ensure_future(self.settled.wait())
            try:
                await self._or_left_out(settled)
            finally:
                settled.cancel()
            if not self.serving:
                break
        self.asked += 1
        try:
            yield
        finally:
            self.asked -= 1

    async def _or_left_out(self, done: asyncio.Future[Any]) -> None:
        """Wait until `done` is done or the server is taken out of service."""
        both: set[asyncio.Future[Any]] = {done} if self._left is None else {done, self._left}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)

    async def _while_serving(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work`. Raises `NotServing` if the server is taken out of service first."""
        task = asyncio.ensure_future(work)
        try:
            await self._or_left_out(task)
            if task.done():
                return task.result()
            raise NotServing(f"it was left out with the request in flight: {self.reason}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def get(
        self, path: str, remedy: str, headers: Mapping[str, str] | None = None, *, seconds: float = 60.0
    ) -> dict[str, Any]:
        """GET a small JSON object.

        Args:
            remedy: advice if the path does not exist.
            headers: in addition to the API key.
            seconds: timeout.

        Raises:
            PolicyError: there is no answer, or it is not JSON with status 200.
        """
        return self._whole(path, remedy, *await self._small("GET", path, headers=headers, seconds=seconds))

    async def tell(
        self, path: str, remedy: str, body: dict[str, Any], headers: Mapping[str, str] | None = None, *, seconds: float
    ) -> dict[str, Any]:
        """POST `body` and return a small JSON object; arguments and errors as in `get`."""
        return self._whole(path, remedy, *await self._small("POST", path, body, headers, seconds))

    def _whole(self, path: str, remedy: str, status: int, text: str) -> dict[str, Any]:
        if status == 404:
            raise PolicyError(f"{self.url} has no {path}: {remedy}")
        if status == 401:
            raise PolicyError(f"{self.url} asks for another API key")
        if status != 200:
            said = (_object(text) or {}).get("error") if status == 409 else None
            raise PolicyError(
                f"{self.url}: {said[:500]}"
                if isinstance(said, str)
                else f"{self.url}{path} answers {status}: {text[:500]}"
            )
        if (answer := _object(text)) is None:
            raise PolicyError(f"{self.url}{path} answers with something other than a JSON object: {text[:500]}")
        return answer

    async def post(
        self, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """POST a request that may take long.

        Args:
            headers: in addition to the API key.

        Raises:
            ValueError: the server refuses the request (400).
            FAILURES: it does not answer, or answers with another error.
        """
        status, text = await self._exchange("POST", path, body, seconds, headers)
        if status == 400:
            raise InputError(f"{self.url}{path} refuses: {text}")
        if status != 200:
            raise NotServing(f"{path} answers {status}: {text[:500]}")
        if (answer := _object(text)) is None:
            raise NotServing(f"{path} answers with something other than a JSON object: {text[:500]}")
        return answer

    async def _small(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> tuple[int, str]:
        try:
            return await self._exchange(method, path, body, seconds, headers)
        except FAILURES as error:
            raise Unreachable(f"no rollout server answers at {self.url} ({why(error)})") from error

    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str] | None
    ) -> tuple[int, str]:
        assert self.session is not None
        timeout = aiohttp.ClientTimeout(total=seconds)
        asked = self.session.request(
            method,
            f"{self.url}{path}",
            json=body,
            timeout=timeout,
            headers=headers,
            allow_redirects=False,
            server_hostname=self._certified,
        )
        async with asked as response:
            try:
                return response.status, (await read_answer(response)).decode(errors="replace")
            except AnswerTooLarge as error:
                raise NotServing(f"{path}: {error}") from None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
