"""Generate trajectories for SFT: tool documents become tasks and scored agent runs.

    astra trajectories --workdir=DIR --config.trajectories=3000
    astra trajectories --workdir=DIR --teacher_url=http://HOST:8000/v1 --teacher_model=NAME \\
        --roles='{"judge": {"url": "http://HOST:8001/v1", "model": "ANOTHER"}}' \\
        '--config.tools=["registry.jsonl.gz"]'

Writes the datasets DIR/servers, chains, tasks and trajectories, and the tool graphs, and prints the statistics. Without
--teacher_url the offline teacher answers by rules from real tables. Its tasks can only be about the servers of these
tables, and of installed MCP servers (docs/trajectories.md). Run the same command again after an interruption, or for
more trajectories: finished work is not repeated.
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
    from synthesis.pipeline.executors import Executor
    from synthesis.pipeline.preview import Preview
    from synthesis.trajectories.config import TrajectoriesConfig

_WORKDIR = shared.workdir("created if it does not exist. Or gs://BUCKET/FOLDER, or s3://BUCKET/FOLDER.")
_CONFIG = flags.DEFINE_string("config", None, "Preset, or a file that defines CONFIG; for example trajectories:paper.")
_SEED = shared.seed()


def _settings() -> TrajectoriesConfig:
    from synthesis.trajectories.config import TrajectoriesConfig

    return cli.load_config(_CONFIG.value, "trajectories") if _CONFIG.value else TrajectoriesConfig()


def main() -> int:
    return asyncio.run(_synthesize(cli.overridden(_settings())))


async def _synthesize(config: TrajectoriesConfig) -> int:
    from synthesis.core.mirror import mirrored
    from synthesis.core.stages import Journal
    from synthesis.core.workdir import locked
    from synthesis.trajectories.pipeline import synthesize
    from synthesis.trajectories.statistics import table_rows

    if previews.PREVIEW.value is not None:
        return await _preview(config, previews.PREVIEW.value, cli.local_folder(_WORKDIR))
    workdir = cli.folder(_WORKDIR, written=True, s3=True)
    with locked(workdir), metrics.shown():
        async with mirrored(workdir) as folder:
            journal_file = folder / "journals" / "trajectories.sqlite"
            if old := sorted(one for one in journal_file.parent.glob("*.sqlite") if one != journal_file):
                raise cli.UsageError(
                    f"{old[0]} is the journal of an earlier version. Resume the run with that version, or give another "
                    "--workdir (this version can read its datasets, and its recorded answers by --teacher_recording)"
                )
            async with executors.executor_from_flags(folder) as executor:
                teachers.print_budget(executor.teacher, config.trajectories, "trajectories")
                with Journal(journal_file) as journal:
                    summary = await synthesize(
                        config, executor=executor, journal=journal, out_dir=folder, workdir=folder, seed=_SEED.value,
                        replace=executors.REPLACE.value,
                    )  # fmt: skip
    for name, count in summary.counts.items():
        say(f"{workdir / name}: {count:,}")
    say()
    summaries.print_table(table_rows(summary.statistics["trajectories"]), _CONFIG.value or "")
    say()
    summaries.print_costs(summary.costs, summary.counts["trajectories"])
    summaries.print_rejected(summary.rejected, summary.details)
    summaries.print_changed(summary.statistics["servers"]["tools_changed"], summary.details["tools_changed"])
    say(f"\nread them, and what was rejected: astra inspect {workdir}")
    return summaries.made(
        summary.counts["trajectories"], "trajectories", wanted=config.trajectories, rejected=summary.rejected
    )


async def _preview(config: TrajectoriesConfig, records: int, workdir: Path) -> int:
    from synthesis.trajectories.forecast import expected, small
    from synthesis.trajectories.pipeline import synthesize

    async def run(executor: Executor, journal: Journal, folder: Path, preview: Preview) -> None:
        await synthesize(
            small(config, records), executor=executor, journal=journal, out_dir=folder, workdir=folder,
            seed=_SEED.value, preview=preview,
        )  # fmt: skip

    return await previews.preview(
        workdir, run, lambda records: partial(expected, replace(config, trajectories=records)),
        wanted=config.trajectories, setting="trajectories", concurrency=config.concurrency,
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main, again="finished work is not done again", settings=_settings)
