"""Trajectories for SFT: tool documents become graphs, chains, tasks, and scored agent runs.

    python -m launch.trajectories --workdir=DIR --config.trajectories=3000
    python -m launch.trajectories --workdir=DIR --teacher_url=http://HOST:8000/v1 --teacher_model=NAME \\
        '--config.registries=["registry.jsonl.gz"]'

Writes the datasets DIR/servers, chains, tasks and trajectories, and the tool graphs, and prints the statistics. Without
--teacher_url the offline teacher answers by rules about real tables; then only their servers, and those of installed
MCP servers, can be asked about (docs/trajectories.md). Run the same command again after an interruption: finished work
is not done again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, executors
from launch.flags.numbers import number_flag
from sandbox.settings import Seed

if TYPE_CHECKING:  # --help does not wait for it
    from synthesis.trajectories.config import TrajectoriesConfig

flags.adopt_module_key_flags(executors)

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.", required=True)
_SEED = number_flag("seed", 0, Seed, "Of all that is drawn.")


def _settings() -> TrajectoriesConfig:
    from synthesis.trajectories.config import TrajectoriesConfig

    return TrajectoriesConfig()


def main() -> int:
    return asyncio.run(_synthesize(cli.overridden(_settings())))


async def _synthesize(config: TrajectoriesConfig) -> int:
    from synthesis.core.stages import Journal
    from synthesis.trajectories.pipeline import synthesize
    from synthesis.trajectories.statistics import table_rows

    workdir = cli.local_folder(_WORKDIR)
    journal_file = workdir / "journals" / f"{_identity(config, _SEED.value)}.sqlite"
    async with executors.executor_from_flags(workdir) as executor:
        with Journal(journal_file) as journal:
            summary = await synthesize(
                config, executor=executor, journal=journal, out_dir=workdir, workdir=workdir, seed=_SEED.value
            )
    for name, folder in summary.datasets.items():
        print(f"{folder}: {summary.counts[name]:,}")
    print()
    for name, value in table_rows(summary.statistics["trajectories"]).items():
        print(f"{name:<32} {value}")
    print()
    cli.print_rejected(summary.rejected, summary.details)
    return cli.made(summary.counts["trajectories"], "a trajectory", wanted=config.trajectories)


def _identity(config: TrajectoriesConfig, seed: int) -> str:
    """Names the journal: another configuration, seed or content of the files that are read starts anew."""
    import dataclasses
    import hashlib

    import msgspec

    quiet = dataclasses.replace(config, concurrency=1, collect_concurrency=1)
    settings = msgspec.json.decode(msgspec.json.encode(quiet, order="deterministic"))
    if config.attempts == type(config).attempts:
        del settings["attempts"]  # so that a journal of a version without this setting is gone on with
    digest = hashlib.sha256(msgspec.json.encode([settings, seed]))
    for name in (*config.registries, *([config.personas] if config.personas else [])):
        path = Path(name)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:12]


def _user_errors() -> tuple[type[Exception], ...]:
    from sandbox import SandboxError
    from synthesis.core.stages import Stopped
    from synthesis.pipeline.ray_executor import RayUnavailable

    return (RayUnavailable, SandboxError, Stopped, ValueError)


if __name__ == "__main__":
    cli.run(main, user_errors=_user_errors, settings=_settings)
