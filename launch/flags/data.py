"""Datasets of conversations for SFT: flags, and the dataset that each names.

    --data=DATASET                   a folder that synthesis wrote, on disk or in a bucket
    --data=FILE.jsonl                .jsonl, .jsonl.gz, .json or .parquet, in any of the forms of docs/sft.md
    --data=hub:ORG/NAME              the files of a dataset of the Hugging Face Hub

Files are converted once, and stored as a dataset in the user's cache (`~/.cache/astra-jax/data`), by their content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, hub, shared

if TYPE_CHECKING:
    from synthesis.core.datasets import Folder

_KINDS = "a folder of trajectories, a .jsonl or .parquet file of conversations, or hub:ORG/NAME"
DATA = flags.DEFINE_string("data", None, f"Dataset: {_KINDS}.", required=True)
REHEARSAL = flags.DEFINE_string(
    "rehearsal",
    None,
    f"Conversations to mix into --data, so that the model keeps its general chat ability (launch.rehearse): {_KINDS}.",
)
HELD_OUT = shared.held_out(f"{_KINDS}. Its loss is logged every eval_every steps.")
_SKIP_BAD = flags.DEFINE_bool("skip_bad", False, "Skip rows of files that cannot be trained on, and report them.")
_ACCEPT = flags.DEFINE_list(
    "accept", [], "Accept rows of files with these defects, separated by commas; docs/sft.md lists them."
)


def dataset(flag: flags.FlagHolder[str | None]) -> Folder | None:
    """Return the dataset that --data, --rehearsal or --held_out names, converted from files if needed; None without the
    flag.

    Raises:
        UsageError: it is neither a dataset, a file nor a name, or a row cannot be trained on (the message has its
            number).
        HubError: the Hub does not provide it.
        DatasetError: there is no dataset, or the converted one could not be written.
    """
    from synthesis.core.datasets import check_dataset
    from synthesis.core.records import Trajectory

    if not flag.value:
        return None
    if not any(_is_read(one.value or "") for one in (DATA, REHEARSAL, HELD_OUT)):
        cli.refuse_unused(
            (_SKIP_BAD, _ACCEPT), "is for files of conversations; a dataset has no such rows. Leave it out"
        )
    found = _kept(flag)
    check_dataset(found, Trajectory)
    return found


def _is_read(text: str) -> bool:
    """Return whether a text names files, local or on the Hub, and not a dataset."""
    from pathlib import Path

    from synthesis.astra_format.records import SUFFIXES

    if text.startswith(hub.PREFIX):
        return True
    return "://" not in text and (Path(text).is_file() or text.endswith(SUFFIXES)) and not Path(text).is_dir()


def _kept(flag: flags.FlagHolder[str | None]) -> Folder:
    from pathlib import Path

    from astra_jax.base.errors import InputError
    from astra_jax.base.files import user_cache
    from synthesis.astra_format.conversations import CACHE_FOLDER, kept_dataset
    from synthesis.astra_format.records import SUFFIXES
    from synthesis.core.datasets import read_card

    text = flag.value or ""
    said = f"--{flag.name}={text}"
    if not _is_read(text):
        return text
    files = hub.dataset_files(text, said, SUFFIXES) if text.startswith(hub.PREFIX) else [Path(text)]
    cache = user_cache(CACHE_FOLDER)
    try:
        found = kept_dataset(files, cache, accept=_ACCEPT.value, skip_bad=_SKIP_BAD.value, source=text)
    except InputError as error:
        remedy = "" if _SKIP_BAD.value else " (--skip_bad skips such rows)"
        raise cli.UsageError(f"--{flag.name}: {error}{remedy}") from None
    card = read_card(found)
    skipped = [f"{count} {reason}, such as {card['examples'][reason]}" for reason, count in card["skipped"].items()]
    left = f"; left out: {'; '.join(skipped)}" if skipped else ""
    say(f"{said}: {card['count']} of {card['rows']} rows, kept in {found}{left}")
    for name, count in card["noted"].items():
        say(f"{said}: {count} {'row' if count == 1 else 'rows'} with {name}, such as {card['examples'][name]}")
    if card["unread"]:
        columns = ", ".join(f"{name} ({count})" for name, count in card["unread"].items())
        say(f"{said}: columns that are not read (in how many rows): {columns}")
    for weight, count in sorted(card["weights"].items()):
        say(f"{said}: turns of weight {weight}{' (context, not trained)' if weight == '0' else ''}: {count}")
    return found
