"""Environments from and to the record that ASTRA released (ASTRA-RL): four columns, without reference calls.

    python -m launch.astra_rl --from=FILE --to=DIR         # .jsonl, .jsonl.gz, .json or .parquet to a dataset
    python -m launch.astra_rl --from=DIR --to=FILE.jsonl   # a dataset to .jsonl or .parquet

On import the calls behind the gold answers are searched and proven in the sandbox; what no call reaches is rejected,
and the dataset's card counts why. A run that was killed goes on where it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, sandboxes
from launch.flags.numbers import number_flag
from sandbox.settings import Count, Seed

if TYPE_CHECKING:
    from pathlib import Path

_FROM = flags.DEFINE_string("from", None, "File of released records, or folder of a dataset of environments.")
_TO = flags.DEFINE_string("to", None, "Folder of the dataset to write, or file.")
_SEED = number_flag("seed", 0, Seed, "Order of the tools of an exported record.")
_CALLS = number_flag("calls_per_answer", 512, Count, "Most calls tried for one gold answer in a round.")


def main() -> None:
    import asyncio
    from pathlib import Path

    if not _FROM.value or not _TO.value:
        raise cli.UsageError("give --from=FILE and --to=DIR to import, or --from=DIR and --to=FILE.jsonl to export")
    source, target = Path(_FROM.value), Path(_TO.value)
    if not source.exists():
        raise cli.UsageError(f"--from={source}: there is no such file or folder")
    if target.exists():
        raise cli.UsageError(f"--to={target} is there already; give a new name")
    if source.is_dir():
        from synthesis.astra_format.rl import write_records
        from synthesis.core.datasets import read_dataset
        from synthesis.core.records import ToolEnvironment

        count = write_records(target, read_dataset(source, ToolEnvironment), _SEED.value)
        print(f"{target}: {count} records")
    else:
        asyncio.run(_import(source, target))


async def _import(source: Path, target: Path) -> None:
    import dataclasses

    from synthesis.astra_format.records import read_rows
    from synthesis.astra_format.rl import SearchConfig, import_dataset
    from synthesis.core.datasets import write_dataset
    from synthesis.core.records import ToolEnvironment
    from synthesis.core.stages import Journal
    from synthesis.environments.statistics import statistics_of

    read_rows(source)  # what is no file of records is refused before there is a journal
    config = SearchConfig(calls_per_answer=_CALLS.value)
    journal_path = target.with_name(f".{target.name}.journal.sqlite")
    async with sandboxes.sandbox_from_flags() as sandbox:
        with Journal(journal_path) as journal:
            imported = await import_dataset(source, sandbox, journal, config)
    card = {
        "source": source.name,
        "rows": imported.rows,
        "config": dataclasses.asdict(config),
        "statistics": statistics_of(imported.environments),
        "defects": dict(sorted(imported.defects.items())),
        "rejected": dict(sorted(imported.rejected.items())),
        "examples": imported.details,
    }
    write_dataset(target, ToolEnvironment, imported.environments, card=card)
    journal_path.unlink()  # the dataset is whole; a further import is to start anew
    print(f"{target}: {len(imported.environments)} of {imported.rows} records")
    for reason, count in imported.rejected.most_common():
        print(f"  {count} rejected, {reason}: {imported.details[reason]}")


def _user_errors() -> tuple[type[Exception], ...]:
    from sandbox import SandboxError
    from synthesis.core.datasets import DatasetError

    return (DatasetError, SandboxError, ValueError)


if __name__ == "__main__":
    cli.run(main, user_errors=_user_errors)
