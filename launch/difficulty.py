"""Measure how often a policy solves each environment, to filter and order them for GRPO.

    astra difficulty --environments=runs/env/train --to=runs/env/rated --weights=Qwen/Qwen3-0.6B
    astra grpo --environments=runs/env/rated '--config.grpo.solve_rates=[0.1,0.9]' ...

    astra difficulty --environments=warehouse:warehouses --to=runs/rates --weights=Qwen/Qwen3-0.6B
    astra grpo --environments=warehouse:warehouses --difficulty=runs/rates --config.grpo.order=easy_first ...

Runs every environment with the model of --weights on the embedded engine, with the same episodes as GRPO. A solve rate
is the mean reward of an environment's episodes. For a dataset of records, --to is a copy with the rates in its records.
For any other environments that astra grpo accepts, --to has only the rates, by the environments' ids. The card has the
policy, the settings and the distribution.

Run the same command again after an interruption: finished environments are in a journal next to --to, and are not run
again. Environments whose episodes are all masked have no solve rate; the same command runs them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.settings import Count, CountOrZero, Length, Slots, Temperature
from astra_jax.base.terminal import say
from launch.flags import cli, environments, policies, sandboxes, shared, targets
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from astra_jax.evaluation.episodes import EvalConfig

policies.require_weights()

_ENVIRONMENTS = shared.environments()
_NAME = flags.DEFINE_string("policy_name", None, "Name of the policy in records; by default folder@step of --weights.")
_REWARD = shared.reward()
_EPISODES = number_flag("episodes", 4, Count, "Episodes of each environment.")
_TEMPERATURE = number_flag("temperature", 1.0, Temperature, "Sampling temperature; GRPO trains with 1.")
_SEED = shared.seed("irrelevant tools, their order, and sampling")
_SLOTS = number_flag("slots", 16, Slots, "Sequences that decode at the same time: episodes.")
_TURNS = number_flag("max_turns", 32, Count, "Maximum assistant turns of an episode.")
_PROMPT = number_flag("max_prompt_tokens", 25_600, Length, "Maximum tokens of the question and the tool documents.")
_RESPONSE = number_flag(
    "max_response_tokens",
    None,
    Length,
    "Maximum tokens after the prompt, tool outputs included; by default 49,152, or the model's max_positions minus the "
    "prompt.",
)
_DISTRACTORS = number_flag(
    "distractors_per_band", 2, CountOrZero, "Maximum irrelevant tools from each similarity band."
)


def main() -> None:
    import asyncio

    say(asyncio.run(_measure()))


async def _measure() -> str:
    from contextlib import AsyncExitStack
    from dataclasses import asdict
    from pathlib import Path

    from astra_jax.evaluation.episodes import check_is_share
    from astra_jax.evaluation.solve_rates import (
        SolveRate,
        as_rate,
        masked_because,
        measure,
        recorded,
        statistics,
    )
    from astra_jax.grpo.environments import check_environments, check_rewards
    from astra_jax.rollout.engine.cache_memory import check_cache_fits
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from synthesis.core.datasets import read_card, write_dataset
    from synthesis.core.records import ToolEnvironment
    from synthesis.core.stages import Journal
    from synthesis.core.workdir import locked_target

    target = targets.folder()
    if "://" not in _ENVIRONMENTS.value and target.resolve() == Path(_ENVIRONMENTS.value).resolve():
        raise cli.UsageError(
            f"--to={target} is the folder of --environments, which is never overwritten; give another folder"
        )
    sandbox = sandboxes.sandbox_from_flags()
    given = environments.read(_ENVIRONMENTS.value)
    reward = _REWARD.value or ("score" if given.records is None else "f1")
    check_is_share(reward)
    model, tokenizer = policies.read()
    config = _config(model.max_positions, reward)
    if (known := given.known()) is not None:
        check_rewards(known, config.episode)
    name, length = _NAME.value or policies.name(), config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(length, "--max_prompt_tokens + --max_response_tokens")
    settings = {"dtype": model.dtype, **asdict(config)}
    del settings["concurrency"]  # results do not depend on it
    check_cache_fits(model, _SLOTS.value, length, policies.mesh())
    with locked_target(target):
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(sandbox) if given.records is not None else None
            found = await stack.enter_async_context(given.open())
            digest = given.used("environments", found).digest
            run = policies.run_name("difficulty", settings, digest, tokenizer.vocabulary_digest)
            await check_environments(found, tokenizer, opened, config.episode)
            params = policies.load(model)
            journal = stack.enter_context(Journal(targets.journal(target)))
            engine_config = EngineConfig(slots=_SLOTS.value, max_length=length)
            engine = await stack.enter_async_context(Engine(params, model, engine_config))
            measured = await measure(engine, found, tokenizer, opened, config=config, journal=journal, run=run)
        how = {
            "policy": name,
            "episodes": config.episodes_per_environment,
            "temperature": config.temperature,
            "settings": settings,
            "environments": digest,
        }
        figures = statistics(measured)
        about = {"solve_rates": {**how, **figures}}
        if given.records is not None:
            pairs = zip(given.records, measured, strict=True)
            records = [recorded(one, of_one, name) for one, of_one in pairs]
            write_dataset(target, ToolEnvironment, records, card={**read_card(given.name), **about})
        else:
            others = [one for one in found if not isinstance(one, ToolEnvironment)]
            rates = [as_rate(one, of_one, name) for one, of_one in zip(others, measured, strict=True)]
            write_dataset(target, SolveRate, rates, card={"source": given.name, **about})
    masked = f" ({masked_because(measured)})" if figures["masked_episodes"] else ""
    return (
        f"{target}: {len(found)} environments, mean solve rate {figures['mean']:.3f} of {name}; "
        f"{figures['never_solved']} never solved, {figures['always_solved']} always, "
        f"{figures['unscored']} without a scored episode; "
        f"{figures['masked_episodes']} episodes masked{masked}"
    )


def _config(max_positions: int, reward: str) -> EvalConfig:
    from astra_jax.evaluation.episodes import EvalConfig
    from astra_jax.rollout.episode import EpisodeConfig

    left = max(1, min(49_152, max_positions - _PROMPT.value))
    episode = EpisodeConfig(
        max_turns=_TURNS.value,
        max_prompt_tokens=_PROMPT.value,
        max_response_tokens=_RESPONSE.value or left,
        temperature=_TEMPERATURE.value,
        distractors_per_band=_DISTRACTORS.value,
        reward=reward,
    )
    return EvalConfig(_TEMPERATURE.value, _EPISODES.value, concurrency=_SLOTS.value, episode=episode, seed=_SEED.value)


if __name__ == "__main__":
    cli.with_cpu_environment("launch.difficulty", large=True)
    cli.run(main, again="finished episodes are not run again")
