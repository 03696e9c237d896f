"""Environments for RL: questions become worlds of executable tools that check themselves.

    python -m launch.environments --workdir=DIR --config.count=10000
    python -m launch.environments --workdir=DIR --teacher_url=http://HOST:8000/v1 --teacher_model=NAME \\
        --config.knowledge=contexts.jsonl.gz

Writes the datasets DIR/train and DIR/held_out and prints their statistics. Without --teacher_url the offline teacher
joins real tables (relational mode): no answer is claimed, all are computed. Sources of questions are
--config.knowledge, --config.taxonomy, --config.questions and --config.tools_of (docs/environments.md). Run the same
command again after an interruption: finished work is not done again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, executors
from launch.flags.numbers import number_flag
from sandbox.settings import Seed

if TYPE_CHECKING:  # --help does not wait for it
    from synthesis.environments.config import EnvironmentsConfig

flags.adopt_module_key_flags(executors)

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.", required=True)
_SEED = number_flag("seed", 0, Seed, "Of all that is drawn.")


def _settings() -> EnvironmentsConfig:
    from synthesis.environments.config import EnvironmentsConfig

    return EnvironmentsConfig()


def main() -> int:
    return asyncio.run(_synthesize(cli.overridden(_settings())))


async def _synthesize(config: EnvironmentsConfig) -> int:
    from synthesis.core.stages import Journal
    from synthesis.environments.pipeline import synthesize
    from synthesis.environments.statistics import table

    workdir = cli.local_folder(_WORKDIR)
    async with executors.executor_from_flags(workdir) as executor:
        with Journal(workdir / "journal.sqlite") as journal:
            summary = await synthesize(config, executor=executor, journal=journal, out_dir=workdir, seed=_SEED.value)
    for split, statistics in summary.statistics.items():
        print(f"\n{workdir / split}\n{table(statistics)}")
    print()
    cli.print_rejected(summary.rejected, summary.details)
    return cli.made(sum(summary.counts.values()), "an environment", wanted=config.count)


def _user_errors() -> tuple[type[Exception], ...]:
    from sandbox import SandboxError
    from synthesis.core.datasets import DatasetError
    from synthesis.core.stages import Stopped
    from synthesis.pipeline.embedding import EmbeddingError
    from synthesis.pipeline.ray_executor import RayUnavailable

    return (DatasetError, EmbeddingError, RayUnavailable, SandboxError, Stopped, ValueError)


if __name__ == "__main__":
    cli.run(main, user_errors=_user_errors, settings=_settings)
