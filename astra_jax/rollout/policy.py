"""The one interface through which every loop samples: token ids in, token ids and their logprobs out.

Two kinds of policy stand behind it: the embedded JAX engine (`rollout/engine/`) and external servers. Text never
crosses this line, so what is trained on is exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Of a draw that is not greedy: what logits of a few thousand are divided by without leaving float32's range, and what
makes any distribution uniform."""
MIN_TOP_P = 1e-6
"""Less is no other nucleus than the likeliest token, and at 1e-46 float32 makes it 0, of which nothing is in."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids, and counts of tokens, are int32 on the device."""
MAX_PENALTY = 2.0
"""Of presence and frequency, either way, as OpenAI has it."""
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
"""A logit that is divided, or multiplied, by so much stays within float32's range."""
MAX_ALTERNATIVES = 20
"""Tokens that are shown beside a drawn one, as OpenAI has it; a static shape."""


class RequestFailed(RuntimeError):
    """This one request cannot be carried out, and the policy goes on without it; the cause is chained."""


class ConstraintError(ValueError):
    """A constraint cannot say which tokens may follow: it has become too complex, or its completion left it."""


class Constraint(Protocol):
    """Which tokens may follow in one completion, such as those that go on with JSON of a schema."""

    def allow(self, drawn: Sequence[int], words_w: np.ndarray) -> None:
        """Set the bits of the tokens that may come next. Called in a thread, by one at a time.

        Args:
            drawn: the completion so far; from call to call it only grows.
            words_w: int32, all zero, a bit for each id of the vocabulary: that of id i is bit i % 32 of word i // 32.

        Raises:
            ConstraintError: it cannot be said; the request is given up.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one completion is drawn. Penalties come first, then the constraint, temperature, min_p, top_k and top_p.

    Attributes:
        max_tokens: at most this many new tokens, from 1 to `MAX_TOKEN_ID`; see `prompt_logprobs`.
        stop_ids: sampling ends after any of these, from 0 to `MAX_TOKEN_ID`; the stop token is part of the completion.
        seed: the draw at sequence position p depends on (seed, p) and the distribution alone, never on the batch.
        temperature: divides the logits, from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`; 0 is greedy.
        top_p: nucleus mass from `MIN_TOP_P` to 1, which samples from the whole distribution.
        top_k: draw among so many of the likeliest tokens, ties with the last included, up to `MAX_TOKEN_ID`; 0 is all.
        min_p: draw among tokens that are at least so likely, in shares of the likeliest one, from 0 to 1.
        presence_penalty: taken from the logit of each token that the completion has already, up to `MAX_PENALTY`.
        frequency_penalty: likewise, as often as it has it.
        repetition_penalty: the positive logits of tokens that the prompt or the completion has are divided by it, the
            negative ones multiplied, from `MIN_REPETITION` to `MAX_REPETITION`; 1 is none.
        alternatives: show so many of the likeliest tokens at each place, up to `MAX_ALTERNATIVES`.
        constraint: which tokens may follow, or None; of this completion alone.
        prompt_logprobs: return the logprobs of the prompt's tokens too, with `alternatives` for each. They are the
            model's own: no option above changes them. `max_tokens` may then be 0.

    Raises:
        ValueError: a number is out of its range, or none.
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
    def shaped(self) -> bool:
        """Whether it asks for more than a temperature and a nucleus."""
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
    """What was sampled.

    Attributes:
        token_ids: the new tokens, the stop token included.
        logprobs: of each token under the distribution it was drawn from (temperature and nucleus applied); for greedy
            draws, under the model's own distribution (temperature 1). Finite.
        versions: of the weights that drew each token: several where an update of the weights fell into it.
        finish: `stop` after a stop token; `length` at `max_tokens` or at the policy's context length.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]

    @property
    def policy_version(self) -> int:
        """Of the weights that drew the last token."""
        return self.versions[-1]


Alternatives = tuple[tuple[int, float], ...]
"""Token ids with their logprobs."""


@dataclass(frozen=True)
class Drawn:
    """The next tokens of a completion that is under way; fields as in `Completion`.

    Attributes:
        finish: None while more tokens follow.
        alternatives: of each token, the likeliest ones at its place with their logprobs, the likeliest first: as many
            as `Sampling.alternatives` asks for, fewer where no more could be drawn. Empty when none are asked for.
        cached: prompt tokens whose keys and values were taken over from an earlier sequence; with the first part.
        prompt_logprobs: of the prompt's tokens from the second on, when asked for; with the first part.
        prompt_alternatives: likewise; as `alternatives`.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"] | None
    alternatives: list[Alternatives] = field(default_factory=list)
    cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_alternatives: list[Alternatives] = field(default_factory=list)


class Policy(Protocol):
    """Whoever samples tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """Continue `token_ids`.

        Args:
            token_ids: the whole sequence so far, never empty.
            session: names an episode. Turns of one session extend one sequence, so a policy keeps what it knows of it
                (KV cache, server) until `release`; an empty name keeps nothing. Of names that are alike up to their
                last dot the sequences begin alike: episodes of one group.

        Raises:
            ValueError: the sequence does not fit the policy's context.
        """
        ...

    def release(self, session: str) -> None:
        """Forget a session; unknown names are fine."""
        ...


class TrainablePolicy(Policy, Protocol):
    """A policy whose weights follow a trainer's."""

    @property
    def samples_with_given_arrays(self) -> bool:
        """Whether it goes on to sample with the very arrays that `update` was given: a step that runs at the same time
        must not be given them too, since it donates them."""
        ...

    async def prepare(self, params: Any, version: int) -> None:
        """Do what an `update` to these weights takes and sampling need not wait for, which goes on meanwhile with the
        weights before. On several hosts all call it.

        Raises:
            Exception: it could not be done; see the policy.
        """
        ...

    async def update(self, params: Any, version: int) -> None:
        """Sample with these weights from now on; on several hosts all call it. What is under way goes on with them.

        Args:
            params: a pytree of arrays.
            version: what tokens drawn by them are marked with.

        Raises:
            Exception: nobody took them over; see the policy.
        """
        ...

    async def sleep(self) -> None:
        """Nobody asks for a token until the next `update`, which wakes it: let go meanwhile of what sampling alone
        takes on the devices that it shares with the trainer. On several hosts all call it."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is to be logged of it with each step, by name."""
        ...

    async def close(self) -> None:
        """Give back what it holds; it samples no more."""
        ...


class SamplerBase:
    """Base class of a rollout engine of your own: override `generate` and `update`. See `TrainablePolicy`."""

    samples_with_given_arrays = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Policy.generate`."""
        raise NotImplementedError(f"{type(self).__name__} does not sample")

    def release(self, session: str) -> None:
        """See `Policy.release`. Sessions are not kept."""

    async def prepare(self, params: Any, version: int) -> None:
        """See `TrainablePolicy.prepare`. There is nothing to prepare."""

    async def update(self, params: Any, version: int) -> None:
        """See `TrainablePolicy.update`. The weights are ignored."""

    async def sleep(self) -> None:
        """See `TrainablePolicy.sleep`. Nothing is freed."""

    def metrics(self) -> dict[str, float]:
        """See `TrainablePolicy.metrics`. There are none."""
        return {}

    async def close(self) -> None:
        """See `TrainablePolicy.close`. Nothing is held."""


@dataclass(frozen=True)
class PolicyLimits:
    """What a policy can take.

    Attributes:
        slots: requests that it runs at once.
        max_length: the longest sequence, prompt and completion.
        max_stops: the most stop ids of one request.
        vocab_size: token ids are below it.
    """

    slots: int
    max_length: int
    max_stops: int
    vocab_size: int


class StreamingPolicy(Policy, Protocol):
    """A policy that shows tokens as they are drawn: what `astra_jax.serving` serves."""

    @property
    def limits(self) -> PolicyLimits: ...

    @property
    def running(self) -> int:
        """Requests that tokens are drawn for."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why it can serve no more."""
        ...

    def stream(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> AsyncGenerator[Drawn, None]:
        """As `generate`, in parts; the last has a `finish`. Closing the iterator gives the request up.

        Raises:
            ValueError: as `generate`.
            RequestFailed: this request cannot be carried out; others can.
        """
        ...
