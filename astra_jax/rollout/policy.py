"""The one interface through which every loop samples: token ids in, token ids and their logprobs out.

Two kinds of policy stand behind it: the embedded JAX engine (`rollout/engine/`) and external servers. Text never
crosses this line, so what is trained on is exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Of a draw that is not greedy: what logits of a few thousand are divided by without leaving float32's range, and what
makes any distribution uniform."""
MIN_TOP_P = 1e-6
"""Less is no other nucleus than the likeliest token, and at 1e-46 float32 makes it 0, of which nothing is in."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids, and counts of tokens, are int32 on the device."""


class RequestFailed(RuntimeError):
    """This one request cannot be carried out, and the policy goes on without it; the cause is chained."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one completion is drawn.

    Attributes:
        max_tokens: at most this many new tokens, from 1 to `MAX_TOKEN_ID`.
        stop_ids: sampling ends after any of these, from 0 to `MAX_TOKEN_ID`; the stop token is part of the completion.
        seed: the draw at sequence position p depends on (seed, p) and the distribution alone, never on the batch.
        temperature: divides the logits, from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`; 0 is greedy.
        top_p: nucleus mass from `MIN_TOP_P` to 1, which samples from the whole distribution.

    Raises:
        ValueError: a number is out of its range, or none.
    """

    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_TOKEN_ID:
            raise ValueError(f"Sampling.max_tokens is {self.max_tokens}; use a number from 1 to {MAX_TOKEN_ID}")
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


@dataclass(frozen=True)
class Completion:
    """What was sampled.

    Attributes:
        token_ids: the new tokens, the stop token included.
        logprobs: of each token under the distribution it was drawn from (temperature and nucleus applied); for greedy
            draws, under the model's own distribution (temperature 1). Finite.
        policy_version: the weights that drew all of these tokens.
        finish: `stop` after a stop token; `length` at `max_tokens` or at the policy's context length.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Drawn:
    """The next tokens of a completion that is under way; fields as in `Completion`.

    Attributes:
        finish: None while more tokens follow.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish: Literal["stop", "length"] | None


class Policy(Protocol):
    """Whoever samples tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """Continue `token_ids`.

        Args:
            token_ids: the whole sequence so far, never empty.
            session: names an episode. Turns of one session extend one sequence, so a policy keeps what it knows of it
                (KV cache, server) until `release`; an empty name keeps nothing.

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
        """Sample with these weights from now on; on several hosts all call it.

        Args:
            params: a pytree of arrays.
            version: what completions by them are marked with.

        Raises:
            Exception: nobody took them over; see the policy.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What is to be logged of it with each step, by name."""
        ...

    async def close(self) -> None:
        """Give back what it holds; it samples no more."""
        ...


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
