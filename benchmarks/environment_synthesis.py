"""Measure environments per hour of relational synthesis: the offline teacher, the real sandbox, every check.

Prints a row; `--save` appends it.

    python -m benchmarks.environment_synthesis --count=11600
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Seed
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

_COUNT = number_flag("count", 600, Annotated[int, Bound(least=10, most=2**31 - 1)], "Questions asked for.")
_SEED = number_flag("seed", 0, Seed, "Of the run.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/environments.jsonl.")


async def measure(count: int, seed: int, folder: Path) -> dict[str, Any]:
    from sandbox import SandboxConfig, SandboxPool
    from synthesis.core.stages import Journal
    from synthesis.environments.config import EnvironmentsConfig
    from synthesis.environments.pipeline import synthesize
    from synthesis.offline.teacher import OfflineTeacher
    from synthesis.pipeline.executors import Executor

    config = EnvironmentsConfig(count=count)
    async with SandboxPool(SandboxConfig()) as sandbox:
        with Journal(folder / "journal.sqlite") as journal:
            started = time.perf_counter()
            summary = await synthesize(
                config, executor=Executor(OfflineTeacher(), sandbox), journal=journal, out_dir=folder, seed=seed
            )
            seconds = time.perf_counter() - started
    made = sum(summary.counts.values())
    refused = sum(summary.rejected.get("verify", {}).values())
    return {
        "asked": count,
        "environments": made,
        "minutes": round(seconds / 60, 2),
        "environments_per_minute": round(made / seconds * 60, 1),
        "duplicates_removed": summary.rejected.get("distinct", {}).get("duplicate", 0),
        "share_surviving_verification": round(made / (made + refused), 5),
        "rejected": summary.rejected,
        "train": summary.statistics["train"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(_COUNT.value, _SEED.value, Path(folder)))
    rows.report("environments", figures, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
