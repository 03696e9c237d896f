"""Interface through which every loop samples: token ids in, token ids and their logprobs out.

Two kinds of policy implement it: the embedded JAX engine (`rollout/engine/`) and external servers. Text never crosses
this interface, so training uses exactly the sampled tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Temperature range for sampling that is not greedy. Logits of a few thousand divided by the minimum stay within
float32's range. The maximum makes any distribution uniform."""
MIN_TOP_P = 1e-6
"""Smallest nucleus. Lower values also keep the likeliest token only, and at 1e-46 float32 rounds to 0: an empty
nucleus."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids, and counts of tokens, are int32 on the device."""
MAX_PENALTY = 2.0
"""Largest absolute presence or frequency penalty, as in OpenAI's API."""
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
"""Range of the repetition penalty: logits that are divided or multiplied by it stay within float32's range."""
MAX_ALTERNATIVES = 20
"""Most alternatives returned for a sampled token, as in OpenAI's API. A static shape."""


class RequestFailed(RuntimeError):
    """This request failed and the policy continues without it. The cause is chained."""


class ConstraintError(ValueError):
    """A constraint cannot name the allowed tokens: it became too complex, or the completion violated it."""


class Constraint(Protocol):
    """Rule for the tokens allowed next in one completion, for example to continue JSON of a schema."""

    def allow(self, drawn: Sequence[int], words_w: np.ndarray) -> None:
        """Set the bits of the tokens that may come next. Called in a thread, one call at a time.

        `drawn` is the completion so far; it only grows from call to call. `words_w` is int32, all zero, with one bit
        per vocabulary id: id i is bit i % 32 of element i // 32.

        Raises:
            ConstraintError: the allowed tokens cannot be determined; the request is aborted.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a completion. Penalties apply first, then constraint, temperature, min_p, top_k and top_p.

    Attributes:
        max_tokens: at most this many new tokens, from 1 to `MAX_TOKEN_ID`; see `prompt_logprobs`.
        stop_ids: sampling ends after any of these, from 0 to `MAX_TOKEN_ID`; the stop token is part of the completion.
        seed: the token at sequence position p depends only on (seed, p) and the distribution, never on the batch.
        temperature: divides the logits, from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`; 0 is greedy.
        top_p: nucleus mass from `MIN_TOP_P` to 1, which samples from the whole distribution.
        top_k: sample among the k likeliest tokens, including ties with the last one, up to `MAX_TOKEN_ID`; 0 disables
            it.
        min_p: sample among tokens with at least this share of the likeliest token's probability, from 0 to 1.
        presence_penalty: subtracted from the logit of each token already in the completion, up to `MAX_PENALTY`.
        frequency_penalty: subtracted once for each occurrence of the token in the completion, up to `MAX_PENALTY`.
        repetition_penalty: divides positive logits and multiplies negative logits of tokens in the prompt or
            completion, from `MIN_REPETITION` to `MAX_REPETITION`; 1 disables it.
        alternatives: return this many of the likeliest tokens at each position, up to `MAX_ALTERNATIVES`.
        constraint: restricts the next token of this completion; None for no restriction.
        prompt_logprobs: return the logprobs of the prompt's tokens too, with `alternatives` for each. They are the
            model's own: no option above changes them. `max_tokens` may then be 0.

    Raises:
        ValueError: a value is out of its range, or NaN.
    """

    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    alternatives: int = 0
    constraint: Constraint | None = field(default=None, compare=False)
    prompt_logprobs: bool = False

    @property
    def needs_logits_processing(self) -> bool:
        """True if it asks for more than a temperature and a nucleus."""
        given = (self.top_k, self.min_p, self.presence_penalty, self.frequency_penalty, self.alternatives)
        return any(given) or self.repetition_penalty != 1 or self.constraint is not None

    def __post_init__(self) -> None:
        fewest = 0 if self.prompt_logprobs else 1
        if not fewest <= self.max_tokens <= MAX_TOKEN_ID:
            raise ValueError(f"Sampling.max_tokens is {self.max_tokens}; use a number from {fewest} to {MAX_TOKEN_ID}")
        for stop_id in self.stop_ids:
            if not 0 <= stop_id <= MAX_TOKEN_ID:
                raise ValueError(f"Sampling.stop_ids has {stop_id}; token ids are from 0 to {MAX_TOKEN_ID}")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(
                f"Sampling.temperature is {self.temperature}; use 0 (greedy), or a number from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if not MIN_TOP_P <= self.top_p <= 1:
            raise ValueError(f"Sampling.top_p is {self.top_p}; use a number from {MIN_TOP_P:g} to 1")
        for name, least, most in (
            ("top_k", 0, MAX_TOKEN_ID),
            ("min_p", 0, 1),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", MIN_REPETITION, MAX_REPETITION),
            ("alternatives", 0, MAX_ALTERNATIVES),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"Sampling.{name} is {getattr(self, name)}; use a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class Completion:
    """Sampled completion of a request.

    Attributes:
        token_ids: the new tokens, the stop token included.
        logprobs: of each token under the distribution it was sampled from (temperature and nucleus applied). Greedy
            sampling uses the model's own distribution (temperature 1). Finite.
        versions: weight version that sampled each token; several if the weights were updated during the completion.
        finish: `stop` after a stop token; `length` at `max_tokens` or at the policy's context length.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.versions[-1]


Alternatives = tuple[tuple[int, float], ...]
"""Token ids with their logprobs."""


@dataclass(frozen=True)
class TokenChunk:
    """Next tokens of a completion in progress; other fields as in `Completion`.

    Attributes:
        finish: None while more tokens follow.
        alternatives: for each token, the likeliest tokens at its position with their logprobs, likeliest first. There
            are `Sampling.alternatives` of them, or fewer if fewer could be sampled.
        cached: prompt tokens whose keys and values were reused from an earlier sequence; only in the first part.
        prompt_logprobs: of the prompt's tokens from the second on, if requested; only in the first part.
        prompt_alternatives: like `alternatives`, for the prompt's tokens; only in the first part.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"] | None
    alternatives: list[Alternatives] = field(default_factory=list)
    cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_alternatives: list[Alternatives] = field(default_factory=list)


class Sampler(Protocol):
    """Sampler of tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """Continue `token_ids`.

        Args:
            token_ids: the whole sequence so far, never empty.
            session: names an episode. Turns of a session extend one sequence, so a policy keeps its state (KV cache,
                server) until `release`. An empty name keeps nothing. Sessions whose names are equal up to the last dot
                share a prefix: episodes of one group.

        Raises:
            ValueError: the sequence does not fit the policy's context.
        """
        ...

    def release(self, session: str) -> None:
        """Forget a session; unknown names are fine."""
        ...


class TrainableSampler(Sampler, Protocol):
    """A policy whose weights follow a trainer's."""

    @property
    def aliases_params(self) -> bool:
        """True if it samples from the arrays passed to `load_weights`. A concurrent training step must not use them,
        since it donates its inputs."""
        ...

    async def publish_weights(self, params: Any, policy_version: int) -> None:
        """Do the part of `load_weights` that can overlap with sampling from the current weights. On several hosts all
        call it.

        Raises:
            Exception: preparation failed; see the policy.
        """
        ...

    async def load_weights(self, params: Any, policy_version: int) -> None:
        """Sample with these weights from now on. Requests in progress continue with them. On several hosts all call it.

        Args:
            params: a pytree of arrays.
            policy_version: number recorded with each token that these weights sample.

        Raises:
            Exception: the weights could not be replaced; see the policy.
        """
        ...

    async def sleep(self) -> None:
        """Free the device memory that only sampling needs. No token is requested until the next `load_weights`, which
        wakes it. On several hosts all call it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log with each step, by name."""
        ...

    async def close(self) -> None:
        """Release all resources; the policy cannot sample afterwards."""
        ...


class SamplerBase:
    """Base class of a rollout engine of your own: override `generate` and `load_weights`. See `TrainableSampler`."""

    aliases_params = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Sampler.generate`."""
        raise NotImplementedError(f"{type(self).__name__} does not sample")

    def release(self, session: str) -> None:
        """See `Sampler.release`. Sessions are not kept."""

    async def publish_weights(self, params: Any, policy_version: int) -> None:
        """See `TrainableSampler.publish_weights`. Nothing is published."""

    async def load_weights(self, params: Any, policy_version: int) -> None:
        """See `TrainableSampler.load_weights`. The weights are ignored."""

    async def sleep(self) -> None:
        """See `TrainableSampler.sleep`. Nothing is freed."""

    def metrics(self) -> dict[str, float]:
        """See `TrainableSampler.metrics`. There are none."""
        return {}

    async def close(self) -> None:
        """See `TrainableSampler.close`. Nothing is held."""


@dataclass(frozen=True)
class PolicyLimits:
    """Limits of a policy.

    Attributes:
        slots: requests that run at once.
        max_length: the longest sequence, prompt and completion.
        max_stops: the most stop ids of one request.
        vocab_size: token ids are below it.
    """

    slots: int
    max_length: int
    max_stops: int
    vocab_size: int


class StreamingPolicy(Sampler, Protocol):
    """A policy that streams tokens as they are sampled. `astra_jax.serving` serves it."""

    @property
    def limits(self) -> PolicyLimits: ...

    @property
    def running(self) -> int:
        """Number of requests being sampled."""
        ...

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the policy, or None."""
        ...

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str = ""
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a completion in parts; the last has a `finish`. Closing the iterator aborts the request.

        Raises:
            ValueError: as `generate`.
            RequestFailed: this request failed; others can still succeed.
        """
        ...
