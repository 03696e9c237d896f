"""How often a policy solves each environment: measured once, recorded with the environment, for curricula.

Run it with `python -m launch.difficulty`; `GRPOConfig.solve_rates` and `order` are what it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from astra_jax.evaluation.episodes import EvalConfig, run_episodes
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.policy import Policy
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.records import ToolEnvironment
from synthesis.core.refusals import InputError
from synthesis.core.stages import Journal
from synthesis.core.typed import json_decoder
from synthesis.environments.dependency_graph import difficulty_of

_DIGITS = 5
"""Of a solve rate. The reward's epsilon keeps a perfect episode up to 5e-7 below 1; rounded, it is 1."""


class Measured(msgspec.Struct, frozen=True):
    """What the episodes of one environment came to.

    Attributes:
        rewards: F1 of each scored episode, 0 to 1.
        voided: episodes that infrastructure ended.
    """

    rewards: list[float]
    voided: int

    @property
    def solve_rate(self) -> float | None:
        """The mean reward, 0 to 1; None when no episode was scored."""
        return round(sum(self.rewards) / len(self.rewards), _DIGITS) if self.rewards else None


async def measure(
    policy: Policy,
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox,
    *,
    config: EvalConfig,
    journal: Journal,
    run: str,
    progress: bool = True,
) -> list[Measured]:
    """Run a policy's episodes on every environment that the journal does not have yet.

    An environment is in the journal when its last episode ends; one whose episodes were all voided is not, so that the
    next run tries it again.

    Args:
        run: names in the journal what all results depend on: policy, environments and config.

    Returns:
        For each environment, in their order.

    Raises:
        ValueError: no environments, two of one id, or the infrastructure voided every episode.
    """
    if not environments:
        raise InputError("there is no environment to measure; the dataset is empty or its split has none")
    (repeated, count), *_ = Counter(environment.id for environment in environments).most_common(1)
    if count > 1:
        raise InputError(f"{count} environments have the id {repeated!r}; ids must be unique: synthesise them again")
    decoder = json_decoder(Measured)
    found = {key: decoder.decode(row) for key, (row, _, _) in journal.load(run).items() if row is not None}
    under_way: dict[str, dict[int, float | None]] = {}

    def on_episode(environment: ToolEnvironment, number: int, episode: Episode) -> None:
        rewards = under_way.setdefault(environment.id, {})
        rewards[number] = _f1(episode)
        if len(rewards) < config.episodes_per_environment:
            return
        scored = [reward for _, reward in sorted(rewards.items()) if reward is not None]
        found[environment.id] = Measured(scored, len(rewards) - len(scored))
        del under_way[environment.id]
        if scored:
            journal.add(run, environment.id, msgspec.json.encode(found[environment.id]))
            journal.commit()  # the next one may take minutes

    todo = [environment for environment in environments if environment.id not in found]
    await run_episodes(
        policy,
        todo,
        tokenizer,
        sandbox,
        config=config,
        on_episode=on_episode,
        progress=progress,
        description="difficulty",
    )
    measured = [found[environment.id] for environment in environments]
    if not any(one.rewards for one in measured):
        episodes = sum(one.voided for one in measured)
        raise InputError(f"the infrastructure voided all {episodes} episodes; check the sandbox's self-test")
    return measured


def _f1(episode: Episode) -> float | None:
    score = episode.score
    return None if score is None else score.f1


def recorded(environment: ToolEnvironment, measured: Measured, policy: str) -> ToolEnvironment:
    """The environment with its solve rate; the rest of its difficulty is kept, or found out where it has none."""
    # How close irrelevant tools are would take the embedder that chose them; 0 where that was not recorded.
    difficulty = environment.difficulty or difficulty_of(environment.sub_questions)
    difficulty = msgspec.structs.replace(difficulty, solve_rate=measured.solve_rate, policy=policy)
    return msgspec.structs.replace(environment, difficulty=difficulty)


def statistics(measured: Sequence[Measured]) -> Mapping[str, Any]:
    """What a dataset's card says of its solve rates, as JSON values.

    Returns:
        `mean` over environments; `histogram`: how many are in [0, 0.1), [0.1, 0.2) ... [0.9, 1]; `never_solved`: a rate
        of 0; `always_solved`: of 1; `voided`: without a rate; `voided_episodes`: of all environments.
    """
    rates = [one.solve_rate for one in measured if one.solve_rate is not None]
    tenth = 10 ** (_DIGITS - 1)
    tenths = Counter(min(9, round(rate * 10 * tenth) // tenth) for rate in rates)  # integers: 0.7 * 10 is not 7
    return {
        "mean": sum(rates) / len(rates) if rates else None,
        "histogram": [tenths[i] for i in range(10)],
        "never_solved": rates.count(0.0),
        "always_solved": rates.count(1.0),
        "voided": len(measured) - len(rates),
        "voided_episodes": sum(one.voided for one in measured),
    }
