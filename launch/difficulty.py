"""How often a policy solves each environment, recorded with it: what a curriculum chooses by.

    python -m launch.difficulty --environments=DIR --to=DIR --weights=FOLDER --episodes=4 --temperature=1.0
    python -m launch.grpo --environments=DIR --config.grpo.solve_rates=[0.1,0.9] ...

Runs the model of --weights over every environment of a dataset, on the embedded engine and with the episodes that GRPO
trains on, and writes the dataset anew with each environment's solve rate: the mean F1 reward of its episodes. The card
says by which policy and how they are distributed.

Run the same command again after an interruption: what is finished is in a journal beside --to, and is not run again.
Environments whose episodes were all voided by infrastructure have no solve rate; the same command tries them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, policies, sandboxes, shared, targets
from launch.flags.numbers import number_flag
from sandbox.settings import Count, CountOrZero, Length, Slots, Temperature
from synthesis.core.terminal import say

if TYPE_CHECKING:
    from astra_jax.evaluation.episodes import EvalConfig

flags.adopt_module_key_flags(policies)
flags.adopt_module_key_flags(targets)
flags.adopt_module_key_flags(sandboxes)

_ENVIRONMENTS = shared.environments()
_NAME = flags.DEFINE_string("policy_name", None, "What records call the policy; by default folder@step of --weights.")
_EPISODES = number_flag("episodes", 4, Count, "Of each environment.")
_TEMPERATURE = number_flag("temperature", 1.0, Temperature, "Of sampling; 1 is what GRPO trains with.")
_SEED = shared.seed("irrelevant tools, their order, and sampling")
_SLOTS = number_flag("slots", 16, Slots, "What decodes together: episodes.")
_TURNS = number_flag("max_turns", 32, Count, "Assistant turns of an episode.")
_PROMPT = number_flag("max_prompt_tokens", 25_600, Length, "Question and tool documents.")
_RESPONSE = number_flag(
    "max_response_tokens",
    None,
    Length,
    "All after the prompt, tool outputs too; by default 49,152, or what the model's max_positions leave.",
)
_DISTRACTORS = number_flag("distractors_per_band", 2, CountOrZero, "Irrelevant tools of each band.")


def main() -> None:
    import asyncio

    say(asyncio.run(_measure()))


async def _measure() -> str:
    from dataclasses import asdict
    from pathlib import Path

    from astra_jax.evaluation.solve_rates import measure, recorded, statistics
    from astra_jax.grpo.environments import check_environments
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.room import check_room
    from astra_jax.rollout.engine.slots import EngineConfig
    from synthesis.core.datasets import read_card, read_dataset, write_dataset
    from synthesis.core.records import ToolEnvironment
    from synthesis.core.stages import Journal
    from synthesis.core.workdir import locked_target

    target = targets.folder()
    if "://" not in _ENVIRONMENTS.value and target.resolve() == Path(_ENVIRONMENTS.value).resolve():
        raise cli.UsageError(f"--to={target} is --environments, which stays as it is; give another folder")
    sandbox = sandboxes.sandbox_from_flags()
    environments = read_dataset(_ENVIRONMENTS.value, ToolEnvironment)
    card = read_card(_ENVIRONMENTS.value)
    model, tokenizer = policies.read()
    config = _config(model.max_positions)
    name, length = _NAME.value or policies.name(), config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(length, "--max_prompt_tokens + --max_response_tokens")
    settings = {"dtype": model.dtype, **asdict(config)}
    del settings["concurrency"]  # results do not depend on it
    check_room(model, _SLOTS.value, length, policies.mesh())
    run = policies.run_name("difficulty", settings, card["digest"], tokenizer.vocabulary_digest)
    with locked_target(target):
        async with sandbox as opened:
            await check_environments(environments, tokenizer, opened, config.episode)
            params = policies.load(model)
            with Journal(targets.journal(target)) as journal:
                async with Engine(params, model, EngineConfig(slots=_SLOTS.value, max_length=length)) as engine:
                    measured = await measure(
                        engine, environments, tokenizer, opened, config=config, journal=journal, run=run
                    )
        records = [recorded(one, found, name) for one, found in zip(environments, measured, strict=True)]
        how = {
            "policy": name,
            "episodes": config.episodes_per_environment,
            "temperature": config.temperature,
            "settings": settings,
            "environments": card["digest"],
        }
        found = statistics(measured)
        write_dataset(target, ToolEnvironment, records, card={**card, "solve_rates": {**how, **found}})
    return (
        f"{target}: {len(records)} environments, mean solve rate {found['mean']:.3f} of {name}; "
        f"{found['never_solved']} never solved, {found['always_solved']} always, {found['voided']} voided"
    )


def _config(max_positions: int) -> EvalConfig:
    from astra_jax.evaluation.episodes import EvalConfig
    from astra_jax.rollout.episode import EpisodeConfig

    left = max(1, min(49_152, max_positions - _PROMPT.value))
    episode = EpisodeConfig(
        max_turns=_TURNS.value,
        max_prompt_tokens=_PROMPT.value,
        max_response_tokens=_RESPONSE.value or left,
        temperature=_TEMPERATURE.value,
        distractors_per_band=_DISTRACTORS.value,
    )
    return EvalConfig(_TEMPERATURE.value, _EPISODES.value, concurrency=_SLOTS.value, episode=episode, seed=_SEED.value)


if __name__ == "__main__":
    cli.with_cpu_environment("launch.difficulty", large=True)
    cli.run(main, again="finished episodes are not run again")
