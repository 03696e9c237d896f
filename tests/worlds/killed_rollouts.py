"""Rollouts without a model, which a test kills: a policy that knows in any process what it is asked for, and tables."""

from __future__ import annotations

import asyncio

from rollout_world import ScriptedSampler, call, make_environment

from astra_jax.grpo.config import GRPOConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.sampler import RequestFailed
from sandbox import CallResult, Outcome

EPISODE = EpisodeConfig(max_turns=4, max_prompt_tokens=600, max_response_tokens=300, distractors_per_band=1)
CONFIG = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=3,
    concurrent_groups=3,
    learning_rate=1e-2,
    micro_batch_size=2,
    checkpoint_every=10,
    episode=EPISODE,
    row_buckets=(900,),
)
ENVIRONMENTS = [make_environment("a"), make_environment("b", "Japan"), make_environment("c")]


def by_seed(session: str, turn: int, seed: int) -> str:
    """Up to three turns of calls, as the episode's seed says; some of them right."""
    if turn < seed % 4:
        return call("capital_of", country="France" if (seed >> turn) % 2 else "Japan")
    return f"I say {seed % 7}."


class Killed(BaseException):
    """What the process dies of."""


class Sampler(ScriptedSampler):
    """Knows in any process which turn of an episode it is asked for; kills its process at a draw.

    Attributes:
        draws: (version, session, place in the sequence) of each that ended, in all processes.
        fail_at: the draw of this process that a server gives up.
    """

    def __init__(self, tokenizer, kill_at: int = 10**9) -> None:
        super().__init__(tokenizer, by_seed)
        self.kill_at, self.fail_at, self.asked = kill_at, 0, 0
        self.draws: list[tuple[int, str, int]] = []

    async def generate(self, token_ids, sampling, *, session=""):
        self.asked += 1
        if self.asked == self.kill_at:
            raise Killed
        if self.asked == self.fail_at:
            raise RequestFailed("the server closed the connection")
        ended = list(token_ids).count(self.tokenizer.eos_id)
        self.turns[session] = (ended - 2) // 2  # the system's and the user's end, and those of a turn and its results
        await asyncio.sleep(0)
        completion = await super().generate(token_ids, sampling, session=session)
        self.draws.append((self.version, session, len(token_ids)))
        return completion

    def like(self, kill_at: int) -> Sampler:
        other = Sampler(self.tokenizer, kill_at)
        other.draws, other.script = self.draws, self.script
        return other


class Tables:
    """A sandbox that answers at once, as the tools of `rollout_world` would."""

    calls = 0
    answers = {"France": "Paris", "Japan": "Tokyo", "Paris": 2_102_650, "Tokyo": 14_094_034}

    async def call(self, code, function, arguments, **_):
        await asyncio.sleep(0)
        if "sources" in arguments:  # many calls at once: the guesses that a run tries at its start
            return CallResult(Outcome.OK, [[False, "no such place"] for _ in arguments["calls"]], "")
        self.calls += 1
        (asked,) = arguments.values()
        return CallResult(Outcome.OK, {function: self.answers[asked]}, "")
