"""Datasets of conversations for SFT: flags, and the dataset that each names.

    --data=DATASET                   a folder that synthesis wrote, on disk or in a bucket
    --data=FILE.jsonl                .jsonl, .jsonl.gz, .json or .parquet, in any of the forms of docs/sft.md; also
                                     gs://BUCKET/FILE.jsonl
    --data=hub:ORG/NAME              the files of a dataset of the Hugging Face Hub
    --held_out=5%                    a share of --data, which is then not trained on

Files are converted once, and stored as a dataset in the user's cache (`~/.cache/astra-jax/data`), by their content.
"""

from __future__ import annotations

import re
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, hub, shared

if TYPE_CHECKING:
    from pathlib import Path

    from synthesis.core.datasets import Folder

_KINDS = "a folder of trajectories, a .jsonl or .parquet file of conversations, or hub:ORG/NAME"
DATA = flags.DEFINE_string("data", None, f"Dataset: {_KINDS}.", required=True)
REHEARSAL = flags.DEFINE_string(
    "rehearsal",
    None,
    f"Conversations to mix into --data, so that the model keeps its general chat ability (astra rehearse): {_KINDS}.",
)
HELD_OUT = shared.held_out(
    f"{_KINDS}; or a share of --data, for example 5%. Its loss is logged every eval_every steps."
)
_SKIP_BAD = flags.DEFINE_bool("skip_bad", False, "Skip rows of files that cannot be trained on, and report them.")
_ACCEPT = flags.DEFINE_list(
    "accept", [], "Accept rows of files with these defects, separated by commas; docs/sft.md lists them."
)
_FEW = 20
"""Conversations of a held-out part below which its loss is said to be noisy."""


class Datasets(NamedTuple):
    """Datasets of an SFT run; None where there is no flag."""

    train: Folder
    held_out: Folder | None
    rehearsal: Folder | None


def datasets(seed: int) -> Datasets:
    """Return the datasets that --data, --held_out and --rehearsal name, converted from files and split if needed.

    Args:
        seed: decides with --held_out=SHARE% which conversations are held out.

    Raises:
        UsageError: a flag names neither a dataset, a file nor a name, a row cannot be trained on (the message has its
            number), or --data cannot be split.
        HubError: the Hub does not provide a dataset.
        DatasetError: there is no dataset, or one could not be written.
    """
    share = _held_out_share()
    train = _dataset(DATA)
    assert train is not None, "--data is required"
    train, held_out = (train, _dataset(HELD_OUT)) if share is None else _split(train, share, seed)
    return Datasets(train, held_out, _dataset(REHEARSAL))


def _held_out_share() -> float | None:
    """Return the share that --held_out names, above 0 and below 1; None if it names data. Raises `UsageError`."""
    from pathlib import Path

    text = (HELD_OUT.value or "").strip()
    number = re.fullmatch(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))\s*(%?)", text)
    if number is None or (not number[2] and Path(text).exists()):
        return None
    value = float(number[1])
    if not number[2]:
        meant = f"{value * 100:g}%" if 0 < value < 1 else f"{value:g}%" if 0 < value < 100 else "5%"
        raise cli.UsageError(f"--held_out={text}: write a share of --data with %, for example --held_out={meant}")
    if not 0 < value < 100:
        raise cli.UsageError(
            f"--held_out={text} leaves nothing to {'measure on' if value <= 0 else 'train on'}: write a share above 0% "
            "and below 100%, for example --held_out=5%"
        )
    return value / 100


def _split(data: Folder, share: float, seed: int) -> tuple[Folder, Folder]:
    from astra_jax.base.errors import InputError
    from astra_jax.base.files import user_cache
    from synthesis.astra_format.conversations import CACHE_FOLDER
    from synthesis.core.datasets import read_card
    from synthesis.core.split import split_conversations

    said = f"--held_out={HELD_OUT.value}"
    try:
        parts = split_conversations(data, share, seed, user_cache(CACHE_FOLDER))
    except InputError as error:
        raise cli.UsageError(f"{said}: --data={DATA.value} has {error}; give more, or leave --held_out out") from None
    train, held_out = (read_card(part)["count"] for part in parts)
    say(
        f"{said}: of {train + held_out:,} conversations {train:,} are trained on and {held_out:,} are held out, chosen "
        f"by their content and data.seed={seed}"
    )
    if held_out < _FEW:
        say(
            f"warning: {held_out} held-out conversation{'s' * (held_out > 1)} give a noisy loss. Hold out a larger "
            "share, or give a file of other conversations with --held_out"
        )
    return parts


def _dataset(flag: flags.FlagHolder[str | None]) -> Folder | None:
    """Return the dataset that a flag names, converted from files if needed; None without the flag. Raises as
    `datasets`."""
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
    if "://" in text:
        return text.endswith(SUFFIXES)
    return (Path(text).is_file() or text.endswith(SUFFIXES)) and not Path(text).is_dir()


def _downloaded(flag: flags.FlagHolder[str | None], folder: Path) -> Path:
    """Copy a flag's file from its bucket to a folder. Raises `UsageError`: there is no such file."""
    file = cli.folder(flag)
    target = folder / file.name
    if not file.exists():
        raise cli.UsageError(f"--{flag.name}={flag.value}: there is no such file")
    target.write_bytes(file.read_bytes())
    return target


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
    with tempfile.TemporaryDirectory() as downloads:
        if text.startswith(hub.PREFIX):
            files = hub.dataset_files(text, said, SUFFIXES)
        else:
            files = [_downloaded(flag, Path(downloads)) if "://" in text else Path(text)]
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
