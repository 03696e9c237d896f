"""Flags and summary of the programs that translate records released by ASTRA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli

if TYPE_CHECKING:
    from synthesis.astra_format.records import Imported

_FROM = flags.DEFINE_string("from", None, "File of released records to import, or folder of a dataset to export.")
_TO = flags.DEFINE_string("to", None, "Dataset to write; the folder of an import, or the file of an export.")


@contextlib.contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """Yield (--from, --to) and lock the target: a file to import or a folder to export, and a target that does not
    exist.

    Raises:
        UsageError: a flag is missing, there is no such source, or the target exists.
        WorkdirError: another process writes the target.
    """
    from synthesis.core.workdir import locked_target

    if not _FROM.value or not _TO.value:
        raise cli.UsageError("give --from=FILE and --to=DIR to import, or --from=DIR and --to=FILE.jsonl to export")
    source, target = Path(_FROM.value), Path(_TO.value)
    if not source.exists():
        raise cli.UsageError(f"--from={source}: there is no such file or folder")
    with locked_target(target):
        if target.exists():
            raise cli.UsageError(f"--to={target} exists already; give a new name")
        yield source, target


def say_imported(target: Path, imported: Imported[Any]) -> None:
    """Print how many records were written, and what was rejected."""
    say(f"{target}: {len(imported.records)} of {imported.rows} records")
    for reason, rejected in imported.rejected.most_common():
        say(f"  {rejected} rejected, {reason}: {imported.details[reason]}")
