"""Measure the effect of the reward and of irrelevant tools in training: the paper's two ablations, on a small scale.

For each seed the quickstart runs to its end (a finished run is not repeated). From its weights after SFT, GRPO then
runs again in three arms: with recall instead of F1, with precision, and without irrelevant tools in training. All are
evaluated on the same held-out environments, with irrelevant tools. Writes a row for each seed and arm, and prints the
means over seeds. --figure plots the training curves. Finished work is not repeated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from astra_jax.base.settings import Seed
from benchmarks import curves, processes, rows
from launch.flags import cli
from launch.flags.numbers import numbers_of

_WORKDIR = flags.DEFINE_string("workdir", None, "Parent folder of the runs; finished ones are kept.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds.")
_PROFILE = flags.DEFINE_enum("profile", "quick", ["quick", "full", "ci"], "Profile of launch.quickstart.")
_FIGURE = flags.DEFINE_string("figure", None, "Write the curves of all arms and seeds to this SVG file.")

ARMS: dict[str, Callable[[Any], Any]] = {
    "f1": lambda episode: episode,
    "recall": lambda episode: replace(episode, reward=episode.reward.replace("f1", "recall")),
    "precision": lambda episode: replace(episode, reward=episode.reward.replace("f1", "precision")),
    "no irrelevant tools": lambda episode: replace(episode, distractors_per_band=0),
}
"""Each changes the quickstart's episodes; `f1` is the quickstart's own GRPO."""

COLUMNS = {
    "F1": "f1",
    "recall": "recall",
    "precision": "precision",
    "calls an episode": "mean_calls",
    "calls to irrelevant tools": "irrelevant_share",
}
CURVES = {"rollout/reward": "reward", "rollout/calls": "calls an episode", "rollout/recall": "recall"}


def main() -> None:
    curves.check(_FIGURE.value)
    runs = {seed: Path(_WORKDIR.value).absolute() / f"{_PROFILE.value}-{seed}" for seed in numbers_of(_SEEDS, Seed)}
    for seed, run in runs.items():
        processes.run("launch.quickstart", f"--workdir={run}", f"--seed={seed}", f"--profile={_PROFILE.value}")
        for arm in ARMS:
            result = result_of(run, arm)
            if not result.exists():
                scores = asyncio.run(arm_of(run, seed, arm))
                rows.append("ablations", {"profile": _PROFILE.value, "seed": seed, "arm": arm, **scores})
                result.parent.mkdir(exist_ok=True)
                result.write_text(json.dumps(scores))
    print(table({arm: [json.loads(result_of(run, arm).read_text()) for run in runs.values()] for arm in ARMS}))
    if _FIGURE.value:
        arms = {arm: [folder_of(run, arm) / "metrics" for run in runs.values()] for arm in ARMS}
        curves.draw(arms, CURVES, Path(_FIGURE.value))


def folder_of(run: Path, arm: str) -> Path:
    """Return the folder of an arm's checkpoints and metrics."""
    return run / "grpo" if arm == "f1" else result_of(run, arm).with_suffix("")


def result_of(run: Path, arm: str) -> Path:
    """Return the file of an arm's scores, which exists once it is finished."""
    return run.with_name(f"{run.name}-ablations") / f"{arm.replace(' ', '_')}.json"


def table(scores: dict[str, list[dict[str, Any]]]) -> str:
    """Means over seeds and, in brackets, the least and the greatest, as markdown."""
    lines = ["| GRPO with | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for arm, seeds in scores.items():
        cells = []
        for name in COLUMNS.values():
            values = [one[name] for one in seeds]
            cells.append(f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def arm_of(run: Path, seed: int, arm: str) -> dict[str, Any]:
    """Train an arm, unless its folder has it finished, and evaluate it."""
    from astra_jax.evaluation.episodes import evaluate
    from astra_jax.grpo import train as grpo
    from astra_jax.rollout.engine.engine import Engine
    from configs.quickstart import PROFILES, seeded
    from launch.quickstart import stages, summary
    from launch.quickstart.ledger import Ledger
    from sandbox import SandboxPool

    config = seeded(PROFILES[_PROFILE.value](), seed)
    changed = replace(config.grpo, episode=ARMS[arm](config.grpo.episode))
    ledger = Ledger(run, summary.identity(config, _PROFILE.value))
    try:
        quickstart = stages.Quickstart(config, run, ledger)
        train, held_out = quickstart.environments_of("train"), quickstart.environments_of("held_out")
        start, tokenizer = partial(quickstart.trained, "sft/tools"), quickstart.tokenizer
    finally:
        ledger.close()
    async with SandboxPool() as sandbox:
        async with Engine(start(), config.model, config.engine) as engine:
            arguments = (changed, config.model, start, train, tokenizer, sandbox, folder_of(run, arm))
            result = await grpo.train(*arguments, policy=engine)
        async with Engine(result.params, config.model, config.engine) as engine:
            found = await evaluate(engine, held_out, tokenizer, sandbox, config=config.evaluation, description=arm)
    scores = {name: value for name, value in asdict(found).items() if isinstance(value, int | float)}
    return {"updates": result.steps, "stopped": result.stopped, **{n: round(v, 4) for n, v in scores.items()}}


if __name__ == "__main__":
    cli.run(main)
