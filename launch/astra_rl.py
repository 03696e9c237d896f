"""Convert environments from and to the format that ASTRA released (ASTRA-RL).

    astra astra_rl --from=FILE --to=DIR         # .jsonl, .jsonl.gz, .json or .parquet to a dataset
    astra astra_rl --from=DIR --to=FILE.jsonl   # a dataset to .jsonl or .parquet

An import searches the calls behind each gold answer and proves them in the sandbox. Environments with an unreachable
answer are rejected; the dataset's card counts the reasons. Run the same command again after an interruption: it
resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astra_jax.base.settings import Count
from astra_jax.base.terminal import say
from launch.flags import cli, released, sandboxes, shared
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from pathlib import Path

_SEED = shared.seed("the order of the tools of an exported record")
_CALLS = number_flag("calls_per_answer", 512, Count, "Maximum calls tried for one gold answer in a round.")


def main() -> None:
    import asyncio

    with released.places() as (source, target):
        if source.is_dir():
            cli.refuse_unused((_CALLS, *sandboxes.FLAGS), "is for an import, which searches calls; leave it out")
            _export(source, target)
        else:
            cli.refuse_unused((_SEED,), "is for an export; leave it out")
            asyncio.run(_import(source, target))


def _export(source: Path, target: Path) -> None:
    from synthesis.astra_format.rl import write_records
    from synthesis.core.datasets import read_dataset
    from synthesis.core.records import ToolEnvironment

    count = write_records(target, read_dataset(source, ToolEnvironment), _SEED.value)
    say(f"{target}: {count} records")


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
        "config": dataclasses.asdict(config),
        "statistics": statistics_of(imported.records),
        **imported.account(),
    }
    write_dataset(target, ToolEnvironment, imported.records, card=card)
    journal_path.unlink()  # the dataset is whole; a further import is to start anew
    released.say_imported(target, imported)


if __name__ == "__main__":
    cli.run(main, again="finished work is not done again")
