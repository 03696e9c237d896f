"""Solve rates of environments: how often a policy solves each, measured once, for curricula.

The rate of a record is written into the record. Environments that are not records get a dataset of `SolveRate`, by
their ids, which `rated` reads. Run it with `astra difficulty`. `GRPOConfig.solve_rates` and `order` use the
rates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.typed import json_decoder
from astra_jax.evaluation.episodes import INFRASTRUCTURE, EvalConfig, run_episodes
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.sampler import Sampler
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder, read_dataset
from synthesis.core.environment import AnyEnvironment, Environment, RatedEnvironment, fingerprint
from synthesis.core.records import ToolEnvironment
from synthesis.core.stages import Journal
from synthesis.environments.dependency_graph import difficulty_of

_DIGITS = 5
"""Digits of a solve rate. The reward's epsilon makes a perfect episode up to 5e-7 less than 1; rounded, it is 1."""


class Measured(msgspec.Struct, frozen=True, rename={"masked_episodes": "voided"}):
    """Rewards of the episodes of one environment.

    Attributes:
        rewards: reward of each scored episode, 0 to 1.
        masked_episodes: number of episodes in which infrastructure or a reward failed.
        reasons: their reasons, with counts.

    Journals of earlier versions have `voided`, and so do today's.
    """

    rewards: list[float]
    masked_episodes: int
    reasons: dict[str, int] = {}

    @property
    def solve_rate(self) -> float | None:
        """Return the mean reward, 0 to 1; None if no episode was scored."""
        return round(sum(self.rewards) / len(self.rewards), _DIGITS) if self.rewards else None


class SolveRate(msgspec.Struct, frozen=True):
    """Recorded solve rate of an environment that is not a record.

    Attributes:
        id: id of the environment.
        fingerprint: digest of everything that a policy sees of it, in hexadecimal digits (`environment.fingerprint`).
        solve_rate: 0 to 1; None if no episode could be scored.
        rewards: rewards of its scored episodes.
        policy: name of the measured policy.
    """

    id: str
    fingerprint: str
    solve_rate: float | None
    rewards: list[float]
    policy: str


async def measure(
    policy: Sampler,
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    *,
    config: EvalConfig,
    journal: Journal,
    run: str,
    progress: bool = True,
) -> list[Measured]:
    """Run a policy's episodes on every environment that the journal does not have yet.

    An environment enters the journal when its last episode ends. If all its episodes are masked it does not, so that
    the next run tries it again.

    Args:
        sandbox: runs the code of records.
        config: its reward must be a share, see `episodes.check_is_share`.
        run: name in the journal for everything that all results depend on: policy, environments and config.

    Returns:
        A measurement for each environment, in their order.

    Raises:
        ValueError: there are no environments, two have one id, or every episode is masked.
    """
    if not environments:
        raise InputError("there is no environment to measure; the dataset is empty or its split has none")
    (repeated, count), *_ = Counter(environment.id for environment in environments).most_common(1)
    if count > 1:
        raise InputError(f"{count} environments have the id {repeated!r}; ids must be unique: give each one of its own")
    decoder = json_decoder(Measured)
    found = {key: decoder.decode(row) for key, (row, _, _) in journal.load(run).items() if row is not None}
    under_way: dict[str, dict[int, float | None]] = {}
    reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def on_episode(environment: AnyEnvironment, number: int, episode: Episode) -> None:
        rewards = under_way.setdefault(environment.id, {})
        rewards[number] = None if episode.score is None else min(1.0, episode.reward)
        if episode.is_masked:
            reasons[environment.id][episode.unscored or INFRASTRUCTURE] += 1
        if len(rewards) < config.episodes_per_environment:
            return
        scored = [reward for _, reward in sorted(rewards.items()) if reward is not None]
        found[environment.id] = Measured(scored, len(rewards) - len(scored), dict(reasons[environment.id]))
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
        episodes = sum(one.masked_episodes for one in measured)
        raise InputError(f"no episode has a reward, all {episodes} are masked: {masked_because(measured)}")
    return measured


def masked_because(measured: Sequence[Measured]) -> str:
    """Return why episodes are masked, with counts; "" if none is."""
    counts = sum((Counter(one.reasons) for one in measured), Counter[str]())
    return "; ".join(f"{count} times {reason}" for reason, count in counts.most_common())


def as_rate(environment: Environment, measured: Measured, policy: str) -> SolveRate:
    """Return the recorded rate of an environment that is not a record."""
    digest = fingerprint(environment).hex()
    return SolveRate(environment.id, digest, measured.solve_rate, measured.rewards, policy)


def rated(environments: Sequence[AnyEnvironment], folder: Folder) -> list[AnyEnvironment]:
    """Return environments with their solve rates. Environments that were not measured, or not scored, have none.

    Args:
        folder: a dataset of `SolveRate`.

    Raises:
        DatasetError: it is not such a dataset.
        InputError: the environments are records, or one has changed since it was measured.
    """
    if records := [one.id for one in environments if isinstance(one, ToolEnvironment)]:
        raise InputError(
            f"--difficulty={folder} is for environments that are no dataset, and {records[0]} is a record of one; "
            "leave the flag out, and give the dataset that astra difficulty wrote as --environments"
        )
    rates = {one.id: one for one in read_dataset(folder, SolveRate)}
    found: list[AnyEnvironment] = []
    changed: list[str] = []
    for environment in environments:
        assert not isinstance(environment, ToolEnvironment)
        rate = rates.get(environment.id)
        if rate is not None and rate.fingerprint != fingerprint(environment).hex():
            changed.append(environment.id)
        if rate is None or rate.solve_rate is None:
            found.append(environment)
        else:
            found.append(cast(Environment, RatedEnvironment(environment, rate.solve_rate)))
    if changed:
        raise InputError(
            f"--difficulty={folder}: {len(changed)} of {len(environments)} environments have changed since they were "
            f"measured, such as {changed[0]!r:.80} (prompt or tools); run astra difficulty again"
        )
    return found


def recorded(environment: ToolEnvironment, measured: Measured, policy: str) -> ToolEnvironment:
    """Return the environment with its solve rate. Other fields of its difficulty are kept, or computed if missing."""
    # How close irrelevant tools are would take the embedder that chose them; 0 where that was not recorded.
    difficulty = environment.difficulty or difficulty_of(environment.sub_questions)
    difficulty = msgspec.structs.replace(difficulty, solve_rate=measured.solve_rate, policy=policy)
    return msgspec.structs.replace(environment, difficulty=difficulty)


def statistics(measured: Sequence[Measured]) -> Mapping[str, Any]:
    """Return the statistics of solve rates for a dataset's card, as JSON values.

    Returns:
        `mean` over environments; `histogram`, the counts in [0, 0.1), [0.1, 0.2) ... [0.9, 1]; `never_solved` and
        `always_solved`, the counts with rate 0 and 1; `unscored`, the count without a rate; `masked_episodes`, the
        masked episodes of all environments.
    """
    rates = [one.solve_rate for one in measured if one.solve_rate is not None]
    tenth = 10 ** (_DIGITS - 1)
    tenths = Counter(min(9, round(rate * 10 * tenth) // tenth) for rate in rates)  # integers: 0.7 * 10 is not 7
    return {
        "mean": sum(rates) / len(rates) if rates else None,
        "histogram": [tenths[i] for i in range(10)],
        "never_solved": rates.count(0.0),
        "always_solved": rates.count(1.0),
        "unscored": len(measured) - len(rates),
        "masked_episodes": sum(one.masked_episodes for one in measured),
    }
