"""Generate environments for RL: questions with executable tools and checked answers.

    astra environments --workdir=DIR --config.count=10000
    astra environments --workdir=DIR --teacher_url=http://HOST:8000/v1 --teacher_model=NAME \\
        --roles='{"judge": {"url": "http://HOST:8001/v1", "model": "ANOTHER"}}' \\
        --config.knowledge=contexts.jsonl.gz

Writes the datasets DIR/train and DIR/held_out and prints their statistics. Without --teacher_url the offline teacher
joins real tables, and every answer is computed from them. Sources of questions are --config.knowledge,
--config.taxonomy, --config.questions and --config.tools_of (docs/environments.md). Run the same command again after an
interruption: finished work is not repeated.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, executors, metrics, previews, shared, summaries, teachers

if TYPE_CHECKING:  # --help does not wait for them
    from pathlib import Path

    from synthesis.core.stages import Journal
    from synthesis.environments.config import EnvironmentsConfig
    from synthesis.pipeline.executors import Executor
    from synthesis.pipeline.preview import Preview

_WORKDIR = shared.workdir("created if it does not exist. Or gs://BUCKET/FOLDER, or s3://BUCKET/FOLDER.")
_CONFIG = flags.DEFINE_string("config", None, "Preset, or a file that defines CONFIG; for example environments:paper.")
_SEED = shared.seed()


def _settings() -> EnvironmentsConfig:
    from synthesis.environments.config import EnvironmentsConfig

    return cli.load_config(_CONFIG.value, "environments") if _CONFIG.value else EnvironmentsConfig()


def main() -> int:
    return asyncio.run(_synthesize(cli.overridden(_settings())))


async def _synthesize(config: EnvironmentsConfig) -> int:
    from synthesis.core.mirror import mirrored
    from synthesis.core.stages import Journal
    from synthesis.core.workdir import locked
    from synthesis.environments.pipeline import synthesize
    from synthesis.environments.statistics import table_rows

    if previews.PREVIEW.value is not None:
        return await _preview(config, previews.PREVIEW.value, cli.local_folder(_WORKDIR))
    workdir = cli.folder(_WORKDIR, written=True, s3=True)
    with locked(workdir), metrics.shown():
        async with mirrored(workdir) as folder, executors.executor_from_flags(folder) as executor:
            teachers.print_budget(executor.teacher, config.count, "environments")
            with Journal(folder / "journal.sqlite") as journal:
                summary = await synthesize(
                    config, executor=executor, journal=journal, out_dir=folder, seed=_SEED.value,
                    replace=executors.REPLACE.value,
                )  # fmt: skip
    for split, statistics in summary.statistics.items():
        say(f"\n{workdir / split}")
        summaries.print_table(table_rows(statistics), _CONFIG.value or "")
    say()
    summaries.print_costs(summary.costs, sum(summary.counts.values()))
    summaries.print_rejected(summary.rejected, summary.details)
    say(f"\nread them, and what was rejected: astra inspect {workdir}")
    return summaries.made(sum(summary.counts.values()), "environments", wanted=config.count, rejected=summary.rejected)


async def _preview(config: EnvironmentsConfig, records: int, workdir: Path) -> int:
    from synthesis.environments.forecast import expected
    from synthesis.environments.pipeline import synthesize

    async def run(executor: Executor, journal: Journal, folder: Path, preview: Preview) -> None:
        fewer = replace(config, count=min(records, config.count))
        await synthesize(fewer, executor=executor, journal=journal, out_dir=folder, seed=_SEED.value, preview=preview)

    return await previews.preview(
        workdir, run, lambda records: partial(expected, replace(config, count=records)),
        wanted=config.count, setting="count", concurrency=config.concurrency,
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main, again="finished work is not done again", settings=_settings)
