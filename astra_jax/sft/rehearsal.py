"""Rehearsal: the model's own conversations, mixed into SFT on tool use to preserve its chat ability.

    the opening of a user's turn ─ the model writes the request ─ the model answers ─ a conversation without tools

Conversations are sampled at temperature 1 from the weights that SFT starts from. Up to a constant, the loss on them is
the divergence KL(first weights, trained weights). So a share of them (`DataConfig.self_generated_ratio`) is an anchor
that needs no second model in memory and no other data. The term is from pseudo-rehearsal (Robins 1995). That an aligned
model writes a user's request when given only the opening of a user turn is from Magpie (Xu et al. 2024,
arXiv:2406.08464).

Run it with `astra rehearse`, and use the result with `astra sft --rehearsal`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.settings import Count, Length, Seed, Settings, Slots
from astra_jax.rollout.sampler import Sampler, Sampling
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import Segment
from synthesis.core.records import Message, Trajectory
from synthesis.core.stages import Journal, Rejected, StageResult, rng_for, run_stage

_DRAWS = 2**32


@dataclass(frozen=True)
class RehearsalConfig(Settings):
    """Settings for sampling a model's own conversations.

    Attributes:
        conversations: number of conversations to sample. Unusable ones are counted, with the reason, and not replaced.
        max_request_tokens: maximum tokens of a sampled user request; a conversation with a longer one is excluded.
        max_answer_tokens: maximum tokens of a sampled answer. A longer answer is cut and kept, and its end is not
            trained on (`Trajectory.unfinished`): excluding it would leave only the model's shorter answers.
        concurrency: conversations sampled at the same time.
        seed: random seed of all sampling.
    """

    conversations: Count = 1_000
    max_request_tokens: Length = 128
    max_answer_tokens: Length = 256
    concurrency: Slots = 64
    seed: Seed = 0

    @property
    def max_tokens(self) -> int:
        """Most tokens sampled in a conversation."""
        return self.max_request_tokens + self.max_answer_tokens


async def rehearse(
    policy: Sampler, tokenizer: ChatTokenizer, config: RehearsalConfig, *, journal: Journal, run: str
) -> StageResult[Trajectory]:
    """Sample conversations of one request and one answer each; the same for the same weights and seed.

    Args:
        policy: accepts sequences of `longest` tokens.
        run: journal key of everything besides the seed that affects sampling: weights and settings.

    Returns:
        Conversations in the order of their numbers. Excluded ones are counted by reason. `request_unfinished`: too
        long, or longer when tokenised again. `empty_request`. `empty_answer`. `thought_unfinished`: the answer ended
        during thinking.

    Raises:
        InputError: no conversation could be kept.
        Exception: raised by the policy.
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
        # The last character may lack some of its tokens.
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
            "writes no requests; give your own conversations without tools as --rehearsal"
        )
    return found


def longest(tokenizer: ChatTokenizer, config: RehearsalConfig) -> int:
    """Return the most tokens of a conversation."""
    return len(_opened_answer(tokenizer, Message("user", ""))) + config.max_tokens


def _opened_answer(tokenizer: ChatTokenizer, request: Message) -> list[int]:
    return tokenizer.encode_segments(tokenizer.format.render([request], [], add_generation_prompt=True))[0]


def _opened_request(tokenizer: ChatTokenizer) -> list[int]:
    """Return the prompt up to a user's first word, with the format's default system turn if there is one."""
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
