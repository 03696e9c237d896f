"""What a model says by itself, kept so that SFT on tool use does not make it unlearn to talk.

    the opening of a user's turn ─ the model writes the request ─ the model answers ─ a conversation without tools

Drawn at temperature 1 from the weights that SFT starts from. The loss on such answers is, but for a constant, the
divergence KL(first weights, trained weights) where nothing is to be learnt, so a share of them among the conversations
(`DataConfig.rehearsed`) is an anchor that needs no second model in memory and no data of others. The words are those of
pseudo-rehearsal (Robins 1995); that an aligned model writes a user's request when nothing but the opening of one is
given to it is Magpie's (Xu et al. 2024, arXiv:2406.08464).

Run it with `python -m launch.rehearse`; `launch.sft --rehearsal` is what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from astra_jax.rollout.policy import Policy, Sampling
from astra_jax.tokenizer import ChatTokenizer
from sandbox.settings import Count, Length, Seed, Settings, Slots
from synthesis.core.chat_format import Segment
from synthesis.core.records import Message, Trajectory
from synthesis.core.refusals import InputError
from synthesis.core.stages import Journal, Rejected, StageResult, rng_for, run_stage

_DRAWS = 2**32


@dataclass(frozen=True)
class RehearsalConfig(Settings):
    """How a model's own conversations are drawn.

    Attributes:
        conversations: begun; those of which nothing can be kept are counted, with the reason.
        max_request_tokens: a request that is not over by then is left out.
        max_answer_tokens: an answer that is not over by then is kept, and its end is not trained on
            (`Trajectory.unfinished`): left out, they would leave the model's shorter answers alone.
        concurrency: conversations that are drawn at a time.
        seed: of all draws.
    """

    conversations: Count = 1_000
    max_request_tokens: Length = 128
    max_answer_tokens: Length = 256
    concurrency: Slots = 64
    seed: Seed = 0

    @property
    def max_tokens(self) -> int:
        """Of what is drawn in a conversation."""
        return self.max_request_tokens + self.max_answer_tokens


async def rehearse(
    policy: Policy, tokenizer: ChatTokenizer, config: RehearsalConfig, *, journal: Journal, run: str
) -> StageResult[Trajectory]:
    """Draw conversations of one request and one answer each; the same for the same weights and seed.

    Args:
        policy: takes sequences of `longest` tokens.
        run: names in the journal what all draws depend on beside the seed's: weights and settings.

    Returns:
        In the order of their numbers. Left out are `request_unfinished`, also one whose text has more tokens than the
        model wrote it with, `empty_request`, `empty_answer`, and `thought_unfinished`: an answer that is not over while
        the model thinks.

    Raises:
        InputError: nothing could be kept.
        Exception: what the policy raises.
    """
    opening, most = _opened_request(tokenizer), longest(tokenizer, config)

    async def conversation(number: int) -> list[Trajectory]:
        rng = rng_for(config.seed, "rehearsal", number)
        asked = await policy.generate(opening, _draw(tokenizer, config.max_request_tokens, rng.randrange(_DRAWS)))
        if asked.finish != "stop":
            raise Rejected("request_unfinished")
        request = Message("user", tokenizer.decode(asked.token_ids[:-1]).strip())
        if not request.content:
            raise Rejected("empty_request")
        prompt = _opened_answer(tokenizer, request)
        if len(prompt) + config.max_answer_tokens > most:
            raise Rejected("request_unfinished")
        given = await policy.generate(prompt, _draw(tokenizer, config.max_answer_tokens, rng.randrange(_DRAWS)))
        unfinished = given.finish != "stop"
        text = tokenizer.decode(given.token_ids if unfinished else given.token_ids[:-1])
        if unfinished and tokenizer.format.is_thinking(text):
            raise Rejected("thought_unfinished")
        # A character of several tokens may have been broken off.
        reasoning, content = tokenizer.format.split_reasoning(text.rstrip("\ufffd") if unfinished else text)
        if not content.strip():
            raise Rejected("empty_answer")
        answer = Message("assistant", content, reasoning=reasoning)
        return [_kept(f"rehearsal_{number}", [request, answer], unfinished=unfinished)]

    found = await run_stage(
        run,
        conversation,
        range(config.conversations),
        key=str,
        out=Trajectory,
        journal=journal,
        concurrency=config.concurrency,
        description="rehearse",
    )
    if not found.outputs:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(found.rejected.items()))
        raise InputError(
            f"of {config.conversations} conversations none could be kept ({why}); a model that was not trained to chat "
            "writes no requests: give conversations of your own, without tools, as --rehearsal"
        )
    return found


def longest(tokenizer: ChatTokenizer, config: RehearsalConfig) -> int:
    """Tokens of a conversation, at most."""
    return len(_opened_answer(tokenizer, Message("user", ""))) + config.max_tokens


def _opened_answer(tokenizer: ChatTokenizer, request: Message) -> list[int]:
    return tokenizer.encode_segments(tokenizer.format.render([request], [], add_generation_prompt=True))[0]


def _opened_request(tokenizer: ChatTokenizer) -> list[int]:
    """Up to where a user's first words would stand; with the system's turn, if the model's format has one by itself."""
    segments = tokenizer.format.render([Message("user", "")], [])
    text = "".join(segment.text for segment in segments)
    opened, _, _ = text.rpartition(tokenizer.format.turn_end)
    return tokenizer.encode_segments([Segment(opened, trainable=False)])[0]


def _draw(tokenizer: ChatTokenizer, most: int, seed: int) -> Sampling:
    return Sampling(max_tokens=most, stop_ids=tokenizer.end_ids, seed=seed)


def _kept(name: str, messages: list[Message], *, unfinished: bool) -> Trajectory:
    return Trajectory(
        id=name,
        task_id=name,
        server_id="",
        domain="conversation",
        language="en",
        tools=[],
        messages=messages,
        injected_failures=0,
        scores={},
        reward=None,
        needs=[],
        unfinished=True if unfinished else msgspec.UNSET,
    )
