"""One vLLM server as the policy sees it: its HTTP, and the two ways in which it draws a completion.

`/inference/v1/generate` says which weights drew each token, and is there when the server was started with
`--enable-scale-out`. `/v1/completions` is always there and does not say it, so that the policy has to ask.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import aiohttp

from astra_jax.rollout.policy import Sampling
from sandbox.answers import AnswerTooLarge, read_answer
from synthesis.core.refusals import InputError, Refusal
from synthesis.core.stages import rng_for


class PolicyError(Refusal, RuntimeError):
    """The rollout servers cannot be used as asked; the message says which and why."""


class NotServing(Exception):
    """The server answers, but not what was asked for."""


FAILURES = (aiohttp.ClientError, TimeoutError, NotServing)
"""What a request raises when its server is at fault."""


def why(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Draw:
    """What a server drew.

    Attributes:
        token_ids: the new tokens, at least one.
        logprobs: of each.
        versions: of the weights that drew them; None when the server does not say.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: frozenset[str] | None


class Route(Protocol):
    """A way to have tokens drawn."""

    path: ClassVar[str]

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """What is sent."""
        ...

    def draw(self, answer: dict[str, Any]) -> Draw:
        """What comes back. Raises `PolicyError` when it is not what was asked for."""
        ...


@dataclass(frozen=True)
class GenerateRoute:
    """vLLM's tokens-in, tokens-out endpoint."""

    on_tpus: bool = False
    path: ClassVar[str] = "/inference/v1/generate"

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """See `Route.body`."""
        return {
            "token_ids": list(token_ids),
            "sampling_params": {**_parameters(token_ids, sampling, self.on_tpus), "detokenize": False},
        }

    def draw(self, answer: dict[str, Any]) -> Draw:
        """See `Route.draw`."""
        choice = answer["choices"][0]
        versions = frozenset(span["version"] for span in choice.get("weight_versions") or ())
        if not versions:
            raise PolicyError(f"{self.path} does not say which weights drew a completion; vLLM 0.32 and later do")
        return _draw(choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], versions)


@dataclass(frozen=True)
class CompletionsRoute:
    """OpenAI's endpoint, with vLLM's token ids."""

    on_tpus: bool = False
    path: ClassVar[str] = "/v1/completions"

    def body(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """See `Route.body`."""
        return {"prompt": list(token_ids), "return_token_ids": True, **_parameters(token_ids, sampling, self.on_tpus)}

    def draw(self, answer: dict[str, Any]) -> Draw:
        """See `Route.draw`."""
        choice = answer["choices"][0]
        return _draw(choice["token_ids"], choice["logprobs"]["token_logprobs"], None)


def _parameters(token_ids: Sequence[int], sampling: Sampling, on_tpus: bool) -> dict[str, Any]:
    parameters = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only those stop
    }
    if on_tpus:  # tpu-inference 0.32 refuses a request with a seed, and takes 0 for no logprobs at all
        return parameters | {"logprobs": 1}
    # The server counts its draws from the request on; ours are those of a place in the sequence.
    seed = rng_for(sampling.seed, "vllm", len(token_ids)).getrandbits(31)
    return parameters | {"logprobs": 0, "seed": seed}  # logprobs of the drawn token alone


def _draw(tokens: list[int], logprobs: list[float], versions: frozenset[str] | None) -> Draw:
    if len(tokens) != len(logprobs) or not tokens:
        raise PolicyError(f"a server returned {len(tokens)} tokens with {len(logprobs)} logprobs")
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in logprobs):
        raise PolicyError("a server returned a logprob that is no finite number")
    return Draw(list(tokens), [float(one) for one in logprobs], versions)


class RolloutServer:
    """One server, its HTTP and what the policy knows of it.

    Args:
        requests: in flight at once.

    Attributes:
        serving: it has the current weights, and no request has failed since.
        settled: set while it is not being synced; requests wait for it.
        syncs: how many were begun; a request during which this grew may have been drawn by several weights.
        sync_seconds: of the last one, by stage.
        on_tpus: where it runs; set before `find_route`.
    """

    def __init__(self, url: str, requests: int) -> None:
        self.url = url.rstrip("/")
        self.permits = asyncio.Semaphore(requests)
        self.load = 0
        self.serving = False
        self.settled = asyncio.Event()
        self.settled.set()
        self.syncs = 0
        self.sync_seconds: dict[str, float] = {}
        self.on_tpus = False
        self.route: Route = GenerateRoute()
        self.session: aiohttp.ClientSession | None = None

    async def find_route(self) -> None:
        """See which way of drawing this server has. Raises `PolicyError`: it does not answer, or not as vLLM would."""
        status, text = await self._small("POST", GenerateRoute.path, {})
        if status == 400:  # it would take a request, which `{}` is not
            self.route = GenerateRoute(self.on_tpus)
        elif status in (403, 404):
            self.route = CompletionsRoute(self.on_tpus)
        else:
            raise PolicyError(f"{self.url}{GenerateRoute.path} answers {status}: {text[:500]}")

    async def draw(self, token_ids: Sequence[int], sampling: Sampling, seconds: float) -> Draw:
        """One completion.

        Raises:
            ValueError: the server refuses the request.
            PolicyError: it answers something else.
            FAILURES: it does not answer.
        """
        answer = await self.post(self.route.path, self.route.body(token_ids, sampling), seconds)
        return self.route.draw(answer)

    async def get(self, path: str, remedy: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """A small answer.

        Args:
            remedy: what to do when there is no such path.
            headers: besides the API key.

        Raises:
            PolicyError: there is no answer, or another than JSON with status 200.
        """
        status, text = await self._small("GET", path, headers=headers)
        if status == 404:
            raise PolicyError(f"{self.url} has no {path}: {remedy}")
        if status == 401:
            raise PolicyError(f"{self.url} asks for another API key")
        if status != 200:
            raise PolicyError(f"{self.url}{path} answers {status}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            raise PolicyError(f"{self.url}{path} answers what is not JSON: {text[:500]}") from None

    async def post(
        self, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """An answer that may take long.

        Args:
            headers: besides the API key.

        Raises:
            ValueError: the server refuses the request (400).
            FAILURES: it does not answer, or with another error.
        """
        status, text = await self._exchange("POST", path, body, seconds, headers)
        if status == 400:
            raise InputError(f"{self.url}{path} refuses: {text}")
        if status != 200:
            raise NotServing(f"{path} answers {status}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            raise NotServing(f"{path} answers what is not JSON: {text[:500]}") from None

    async def _small(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        try:
            return await self._exchange(method, path, body, 60.0, headers)
        except FAILURES as error:
            raise PolicyError(f"no rollout server answers at {self.url} ({why(error)})") from error

    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str] | None
    ) -> tuple[int, str]:
        assert self.session is not None
        timeout = aiohttp.ClientTimeout(total=seconds)
        asked = self.session.request(
            method, f"{self.url}{path}", json=body, timeout=timeout, headers=headers, allow_redirects=False
        )
        async with asked as response:
            try:
                return response.status, (await read_answer(response)).decode(errors="replace")
            except AnswerTooLarge as error:
                raise NotServing(f"{path}: {error}") from None
