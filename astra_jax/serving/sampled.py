"""One choice of an answer: sampled tokens become text, until a stop token, a stop string or the length ends it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astra_jax.rollout.sampler import Alternatives, PolicyLimits, Sampling, StreamingPolicy
from astra_jax.serving.messages import FirstCall
from astra_jax.serving.protocol import ChatRequest, CompletionRequest, InvalidRequest
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import beginning

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8; a token has one byte at least."""
_MOST_PENDING = 8
"""Most pending tokens that can be the start of a character."""


@dataclass(frozen=True)
class Part:
    """New part of a choice.

    Attributes:
        text: whole characters; never the start of a stop string.
        offsets: start of each token's text in the choice's text.
        finish: finish reason, with the last part.
        stop_reason: the stop string or the requested stop id that ended it; None for the end of a turn.
        alternatives, cached, prompt_logprobs, prompt_alternatives: see `TokenChunk`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    offsets: list[int]
    finish: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_alternatives: list[Alternatives] = field(default_factory=list)


class Detokenizer:
    """Converter of token ids to text, one at a time. Its outputs are final, and add up to the text of all the ids."""

    def __init__(self, tokenizer: ChatTokenizer, *, stops: Sequence[str] = (), skip_special: bool = True) -> None:
        """
        Args:
            stops: the text ends before the first of them.
            skip_special: leave the tokens of the format's frame out.
        """
        self._tokenizer = tokenizer
        self._stops = stops
        self._hidden = tokenizer.frame_ids if skip_special else frozenset()
        self._pending: list[int] = []  # tokens whose text may end within a character
        self._held = ""  # text that may be the start of a stop string
        self._length = 0
        self.stop: str | None = None

    @property
    def length(self) -> int:
        """Number of characters so far, including text that is held back."""
        return self._length + len(self._held)

    def push(self, token_id: int) -> str:
        """Return new text. Sets `stop` when a stop string is complete; do not call it afterwards."""
        if token_id not in self._hidden:
            self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        if text.endswith(_INCOMPLETE):
            text, self._pending = self._settled(text)
        else:
            self._pending = []
        return self._advance(text, last=False) if text else ""

    def _settled(self, text: str) -> tuple[str, list[int]]:
        """Return the final part of the pending tokens' text, which ends within a character, and the remaining tokens.

        A model may produce invalid bytes for any length of time.
        """
        if len(self._pending) > _MOST_PENDING:
            for last in range(_MOST_BYTES - 1, 0, -1):
                before, behind = self._pending[:-last], self._pending[-last:]
                whole = self._tokenizer.decode(before)
                if whole + self._tokenizer.decode(behind) == text:  # no character spans the split
                    return whole, behind
        return "", self._pending

    def finish(self) -> str:
        """Return the text that was held back."""
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        self._pending.clear()
        return self._advance(text, last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found and self.stop is None:
            at, self.stop = min(found)
            self._held = ""
            self._length += at
            return text[:at]
        held = 0 if last else max((beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        self._length += len(text) - held
        return text[: len(text) - held]


def samplings_of(
    asked: CompletionRequest | ChatRequest, choices: int, limits: PolicyLimits, turn_ends: Sequence[int]
) -> list[Sampling]:
    """Return the sampling settings of each choice. Choices of one prompt have consecutive seeds in any batch.

    Args:
        choices: number of choices, `asked.n` of each prompt.
        turn_ends: token ids that end a turn, unless `asked.ignore_eos`.

    Raises:
        InvalidRequest: there are more stop ids than the policy supports, or one is not in its vocabulary.
    """
    ends = () if asked.ignore_eos else turn_ends
    stop_ids = tuple(dict.fromkeys([*ends, *asked.stop_token_ids]))
    if len(stop_ids) > limits.max_stops:
        raise InvalidRequest(
            f"stop_token_ids has {len(asked.stop_token_ids)} ids; with those that end a turn at most "
            f"{limits.max_stops} are watched for",
            param="stop_token_ids",
        )
    for wrong in asked.stop_token_ids:
        if not 0 <= wrong < limits.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {wrong}; ids are from 0 to {limits.vocab_size - 1}", param="stop_token_ids"
            )
    # If no token is sampled, the policy only scores the prompt.
    scores = isinstance(asked, CompletionRequest) and asked.echo and (asked.wants_logprobs or not asked.max_tokens)
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    most = limits.max_length if asked.token_limit is None else asked.token_limit
    return [
        Sampling(
            max_tokens=most,
            stop_ids=stop_ids,
            seed=seed + i % asked.n,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            min_p=asked.min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty,
            alternatives=asked.alternatives,
            prompt_logprobs=scores,
        )
        for i in range(choices)
    ]


async def sample(
    policy: StreamingPolicy,
    tokenizer: ChatTokenizer,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    stops: Sequence[str],
    turn_ends: Sequence[int],
    skip_special: bool,
    first_call: FirstCall | None = None,
) -> AsyncGenerator[Part, None]:
    """Yield the parts of one choice. Closing the iterator frees its slot; so does a stop string.

    Args:
        stops: strings that end it. Their text, and that of a stop token, is not returned.
        turn_ends: the ids of `sampling.stop_ids` that need no `stop_reason`.
        first_call: detector with which the choice ends after its first call.
    """
    text = Detokenizer(tokenizer, stops=stops, skip_special=skip_special)
    async with contextlib.aclosing(policy.stream(prompt, sampling)) as stream:
        async for drawn in stream:
            new, offsets = "", []
            of_prompt: dict[str, Any] = {
                "cached": drawn.cached,
                "prompt_logprobs": drawn.prompt_logprobs,
                "prompt_alternatives": drawn.prompt_alternatives,
            }
            stopped_by = drawn.token_ids[-1] if drawn.finish == "stop" else None
            for i, token_id in enumerate(drawn.token_ids):
                offsets.append(text.length)
                more = text.push(token_id) if stopped_by is None or i + 1 < len(drawn.token_ids) else ""
                new += more
                if text.stop is not None:
                    so_far = drawn.token_ids[: i + 1], drawn.logprobs[: i + 1], offsets
                    yield Part(new, *so_far, "stop", text.stop, drawn.alternatives[: i + 1], **of_prompt)
                    return
                if first_call is not None and first_call.push(more):
                    so_far = drawn.token_ids[: i + 1], drawn.logprobs[: i + 1], offsets
                    yield Part(new, *so_far, "stop", None, drawn.alternatives[: i + 1], **of_prompt)
                    return
            if drawn.finish is None:
                so_far = drawn.token_ids, drawn.logprobs, offsets
                yield Part(new, *so_far, alternatives=drawn.alternatives, **of_prompt)
                continue
            new += text.finish()
            reason: str | int | None = None if stopped_by in turn_ends else stopped_by
            finish: Literal["stop", "length"] = drawn.finish
            if text.stop is not None:  # it became complete with a character that never ended
                finish, reason = "stop", text.stop
            so_far = drawn.token_ids, drawn.logprobs, offsets
            yield Part(new, *so_far, finish, reason, drawn.alternatives, **of_prompt)
