"""Score a policy on environments, with the same episode runner as in GRPO."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from astra_jax.base.errors import InputError
from astra_jax.base.progress import progress_bar
from astra_jax.base.settings import Count, Seed, SettingError, Settings, Temperature
from astra_jax.evaluation.intervals import estimate
from astra_jax.rollout.episode import Episode, EpisodeConfig, episode_stats, longest_task, make_task, run_episode
from astra_jax.rollout.sampler import Sampler
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.environment import AnyEnvironment, kind_of
from synthesis.core.records import ToolEnvironment
from synthesis.core.rewards import answers, parsed, played
from synthesis.core.stages import rng_for

_FULL = 0.999
"""Least F1 that counts as perfect: the paper's F1 of perfect calls is a little below 1, because of an epsilon."""
INFRASTRUCTURE = "the environment, the sandbox or the policy failed (the log says how)"
"""Reason of masked episodes that were not scored by a reward."""
MOST_KINDS = 50
"""Maximum kinds of task in a report."""
OTHER_KINDS = "other"
_NO_NAME = re.compile(r"[^\w.-]")
"""Characters that are not allowed in a metric's name."""


@dataclass(frozen=True)
class EvalConfig(Settings):
    """Settings of an evaluation on environments.

    Attributes:
        temperature: sampling temperature; replaces the episode's. 0 is greedy.
        episodes_per_environment: episodes of each environment, with different seeds and distractor orders. More give
            narrower intervals.
        concurrency: episodes that run at the same time.
        episode: limits, distractors and reward of an episode.
        seed: random seed of distractors, tool order and sampling.
    """

    temperature: Temperature = 0.6
    episodes_per_environment: Count = 1
    concurrency: Count = 64
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    seed: Seed = 0


@dataclass(frozen=True)
class EvalResult:
    """Means over scored episodes.

    Attributes:
        f1: the F1 reward, whatever reward the policy was trained with.
        f1_interval: 95 % interval of the mean over environments, since episodes of one environment are not independent.
        answer_accuracy: share of episodes whose final answer states the expected value, see `answers_rightly`. F1 does
            not check answers.
        answer_interval: 95 % interval, as `f1_interval`.
        full_reward: share of episodes whose calls found everything that was asked, and nothing else.
        full_reward_accuracy: share of those whose final answer is correct; None if there are none.
        irrelevant_share: share of calls to tools that the question does not need.
        by_structure: F1 by question structure.
        masked_episodes: number of episodes that infrastructure ended; they are in no mean.
    """

    f1: float
    f1_interval: tuple[float, float]
    recall: float
    precision: float
    answer_accuracy: float
    answer_interval: tuple[float, float]
    full_reward: float
    full_reward_accuracy: float | None
    episodes: int
    masked_episodes: int
    mean_calls: float
    mean_turns: float
    irrelevant_share: float
    by_structure: dict[str, float]


async def evaluate(
    engine: Sampler,
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox,
    *,
    config: EvalConfig | None = None,
    progress: bool = True,
    description: str = "evaluate",
    on_episode: Callable[[ToolEnvironment, int, Episode], None] = lambda environment, number, episode: None,
) -> EvalResult:
    """Run and score `episodes_per_environment` episodes of every environment.

    Args:
        on_episode: called with each finished episode's environment, its number there, and the episode.

    Raises:
        ValueError: there are no environments, a prompt may be too long, or infrastructure ended every episode.
    """
    config = config or EvalConfig()
    if not environments:
        raise InputError("evaluate needs at least one environment; the dataset is empty or its split has none")
    for environment in environments:
        await asyncio.to_thread(longest_task, environment, tokenizer, config.episode)
    episodes: dict[tuple[str, int], Episode] = {}

    def keep(environment: ToolEnvironment, number: int, episode: Episode) -> None:
        episodes[environment.id, number] = episode
        on_episode(environment, number, episode)

    await run_episodes(
        engine,
        environments,
        tokenizer,
        sandbox,
        config=config,
        on_episode=keep,
        progress=progress,
        description=description,
    )
    pairs = [(environment.id, n) for environment in environments for n in range(config.episodes_per_environment)]
    return summarise(environments, [(pair[0], episodes[pair]) for pair in pairs])


async def run_episodes(
    engine: Sampler,
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    *,
    config: EvalConfig,
    on_episode: Callable[[Any, int, Episode], Awaitable[None] | None],
    finished: Callable[[AnyEnvironment, int], Episode | None] = lambda environment, number: None,
    progress: bool = True,
    description: str = "evaluate",
) -> None:
    """Run `episodes_per_environment` episodes of every environment, without storing them.

    Episode n of an environment depends only on (seed, its id, n), not on the other environments.

    Args:
        environments: environments with unique ids.
        sandbox: runs the code of records.
        on_episode: called with each episode's environment, its number there, and the episode.
        finished: returns an episode that an earlier process has run, which is not run again.

    Raises:
        Exception: the first exception of an episode or of `on_episode`; the other episodes are cancelled.
    """
    limits = replace(config.episode, temperature=config.temperature)
    gate = asyncio.Semaphore(config.concurrency)
    total = len(environments) * config.episodes_per_environment
    bar = progress_bar(total=total, desc=description, disable=not progress, unit="episode")

    async def one(environment: AnyEnvironment, number: int) -> None:
        if finished(environment, number) is not None:
            bar.update()
            return
        async with gate:
            rng = rng_for(config.seed, "evaluate", environment.id, number)
            task = await asyncio.to_thread(make_task, environment, tokenizer, limits, seed=rng.getrandbits(32))
            seed, session = rng.getrandbits(32), f"evaluate.{environment.id}.{number}"
            episode = await run_episode(engine, sandbox, task, tokenizer, limits, seed=seed, session=session)
            bar.update()
            if (work := on_episode(environment, number, episode)) is not None:
                await work

    try:
        async with asyncio.TaskGroup() as group:
            for environment in environments:
                for number in range(config.episodes_per_environment):
                    group.create_task(one(environment, number))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        bar.close()


def check_is_share(reward: str) -> None:
    """Check that a reward is a share from 0 to 1, as solve rates and scores are.

    Raises:
        SettingError: a weight is negative, or the weights do not sum to 1.
    """
    parts = parsed(reward)
    if any(part.weight < 0 for part in parts) or not math.isclose(sum(part.weight for part in parts), 1.0):
        raise SettingError(
            f"--reward={reward:.200}: solve rates and scores are from 0 to 1; give positive weights that sum to 1, "
            "such as score:0.9,format:0.1"
        )


def kinds_of(environments: Sequence[AnyEnvironment]) -> list[str]:
    """Return each environment's kind of task (`kind_of`) as a part of a metric's name. If there are more than
    `MOST_KINDS`, the rarest become `other`."""
    names = [_NO_NAME.sub("_", kind_of(one)) for one in environments]
    common = [name for name, _ in Counter(names).most_common()]
    if len(common) > MOST_KINDS:
        kept = {*common[: MOST_KINDS - 1]}
        names = [name if name in kept else OTHER_KINDS for name in names]
    return names


def is_solved(episode: Episode, reward: str) -> bool:
    """Return whether a scored episode has all of the reward with the largest weight, the first among equals."""
    main = max(parsed(reward), key=lambda part: part.weight)
    return episode.score is not None and episode.score.parts[main.metric] >= _FULL


def summarise_by_kind(
    environments: Sequence[AnyEnvironment], episodes: Mapping[tuple[str, int], Episode], config: EvalConfig
) -> dict[str, float]:
    """Summarise finished episodes of any environments, in total and by kind of task.

    Args:
        episodes: all episodes of `config`, by the environment's id and the episode's number.

    Returns:
        `reward`, and `solved`, the share of scored episodes that are solved (`is_solved`). With several episodes per
        environment also `pass_at_K`, the share of fully scored environments with a solved episode. The same as
        `KIND/reward` and so on. The other statistics of `episode_stats`, in total. `masked_episodes`, which are in no
        mean, and `unscored_episodes`, the masked ones that a reward could not judge.
    """
    count = config.episodes_per_environment
    by_id = {one.id: [episodes[one.id, number] for number in range(count)] for one in environments}
    every = [episode for of_one in by_id.values() for episode in of_one]

    def shares(ids: Sequence[str]) -> dict[str, float]:
        scored = [one for id in ids for one in by_id[id] if not one.is_masked]
        whole = [by_id[id] for id in ids if not any(one.is_masked for one in by_id[id])]
        found: dict[str, float] = {}
        if scored:
            found["reward"] = sum(one.reward for one in scored) / len(scored)
            found["solved"] = sum(is_solved(one, config.episode.reward) for one in scored) / len(scored)
        if whole and count > 1:
            passed = sum(any(is_solved(one, config.episode.reward) for one in of_one) for of_one in whole)
            found[f"pass_at_{count}"] = passed / len(whole)
        return found

    kinds: dict[str, list[str]] = defaultdict(list)
    for one, kind in zip(environments, kinds_of(environments), strict=True):
        kinds[kind].append(one.id)
    by_kind = {f"{kind}/{name}": value for kind, ids in sorted(kinds.items()) for name, value in shares(ids).items()}
    masked = {
        "masked_episodes": float(sum(one.is_masked for one in every)),
        "unscored_episodes": float(sum(bool(one.unscored) for one in every)),
    }
    return {**episode_stats(every), **shares(list(by_id)), **masked, **by_kind}


def summarise(environments: Sequence[ToolEnvironment], episodes: Sequence[tuple[str, Episode]]) -> EvalResult:
    """Return means and intervals of finished episodes, each with its environment's id.

    Raises:
        ValueError: infrastructure ended every episode.
    """
    by_id = {environment.id: environment for environment in environments}
    needed = {environment.id: {tool.spec.name for tool in environment.tools} for environment in environments}
    scored = [(environment_id, e, e.score) for environment_id, e in episodes if e.score is not None]
    if not scored:
        raise InputError(f"the infrastructure failed in all {len(episodes)} episodes; check the sandbox's self-test")
    f1 = [s.f1 for _, _, s in scored]
    answered = [float(answers_rightly(episode, by_id[id])) for id, episode, _ in scored]
    of_full = [right for right, value in zip(answered, f1, strict=True) if value >= _FULL]
    ids = [id for id, _, _ in scored]
    by_structure: dict[str, list[float]] = defaultdict(list)
    for environment_id, value in zip(ids, f1, strict=True):
        by_structure[by_id[environment_id].structure].append(value)
    irrelevant = [call.name not in needed[id] for id, episode, _ in scored for call in episode.calls if call.name]
    return EvalResult(
        f1=float(np.mean(f1)),
        f1_interval=_interval(ids, f1),
        recall=float(np.mean([s.recall for _, _, s in scored])),
        precision=float(np.mean([s.precision for _, _, s in scored])),
        answer_accuracy=float(np.mean(answered)),
        answer_interval=_interval(ids, answered),
        full_reward=len(of_full) / len(scored),
        full_reward_accuracy=float(np.mean(of_full)) if of_full else None,
        episodes=len(scored),
        masked_episodes=len(episodes) - len(scored),
        mean_calls=float(np.mean([s.calls for _, _, s in scored])),
        mean_turns=float(np.mean([e.turns for _, e, _ in scored])),
        irrelevant_share=float(np.mean(irrelevant)) if irrelevant else 0.0,
        by_structure={name: float(np.mean(values)) for name, values in sorted(by_structure.items())},
    )


def answers_rightly(episode: Episode, environment: ToolEnvironment) -> bool:
    """Return whether the model's last message states the expected answer: see `core.rewards.answers`."""
    made = played(environment, episode.messages, episode.calls, episode.finish)
    return answers(made, episode.score)


def _interval(ids: Sequence[str], values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over environments, from their ids and values by episode."""
    by_environment: dict[str, list[float]] = defaultdict(list)
    for environment_id, value in zip(ids, values, strict=True):
        by_environment[environment_id].append(value)
    found = estimate([float(np.mean(of_one)) for of_one in by_environment.values()], least=0.0, most=1.0)
    return found.low, found.high
