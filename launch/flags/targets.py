"""Dataset written by a program that samples from a model: its flag, folder and journal."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch.flags import cli

_TO = flags.DEFINE_string("to", None, "Dataset to write; replaces an older one.", required=True)


def folder() -> Path:
    """Return the folder of --to. Raises `UsageError` if it has anything other than a dataset, which would be
    overwritten."""
    from synthesis.core.datasets import CARD_FILE

    target = cli.local_folder(_TO)
    if target.exists() and not (target / CARD_FILE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise cli.UsageError(f"--to={_TO.value} has files that are not a dataset's; give a new folder")
    return target


def journal(target: Path) -> Path:
    """Return the path of the journal, which keeps finished records until and after the dataset is written."""
    return target.with_name(f"{target.name}.journal.sqlite")
