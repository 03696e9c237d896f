"""The dataset that a program writes which samples from a model: a flag, the folder that it names, and its journal."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch.flags import cli

_TO = flags.DEFINE_string("to", None, "Dataset to write; in place of an older one.", required=True)


def folder() -> Path:
    """The folder of --to. Raises `UsageError` where writing it would destroy something else than a dataset."""
    from synthesis.core.datasets import CARD_FILE

    target = cli.local_folder(_TO)
    if target.exists() and not (target / CARD_FILE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise cli.UsageError(f"--to={_TO.value} holds something else than a dataset; give a new folder")
    return target


def journal(target: Path) -> Path:
    """Where what is finished is kept until the dataset is written, and after."""
    return target.with_name(f"{target.name}.journal.sqlite")
