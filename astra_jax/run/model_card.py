"""Completion of a trained run as a model: tokenizer, chat template, generation configuration and card beside its
weights.

`write_card` writes README.md for the Hugging Face Hub: method, datasets (with digests), configuration, metrics and
licence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import astra_jax
from astra_jax import chat_files
from astra_jax.base.files import location, write_bytes, write_text
from astra_jax.run.metrics import is_exhausted, read_metrics
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, read_card

FILE = "README.md"
CHECKPOINTS = "checkpoints"
_LICENCE = re.compile(r"^license: ?([\w.-]{1,60})$", re.MULTILINE)
_REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_HEADER_BYTES = 1 << 14
_OF_SPEED = ("seconds", "memory", "per_second", "mfu", "time", "share")
"""Parts of the names of metrics about speed and resources rather than results."""


@dataclass(frozen=True)
class TrainedOn:
    """A dataset of a run.

    Attributes:
        role: its use, such as `data`.
        name: its source, without parent folders.
        count: number of records.
        digest: sha256 of the records.
    """

    role: str
    name: str
    count: int
    digest: str


def trained_on(role: str, dataset: Folder) -> TrainedOn:
    """Describe a dataset by its card. Raises as `read_card`."""
    card = read_card(dataset)
    name = str(card.get("source") or location(dataset))
    return TrainedOn(role, name if name.startswith("hub:") else name.rpartition("/")[2], card["count"], card["digest"])


def complete(folder: Folder, tokenizer: ChatTokenizer, source: Folder) -> list[str]:
    """Copy the other files of a model beside a run's weights, from the folder of its tokenizer.

    Returns:
        Sentences for the user: files that differ from the folder's, and files that were not copied.
    """
    chat_files.save_tokenizer(source, folder, tokenizer.changed_files)
    notes = []
    if changed := sorted(tokenizer.changed_files):
        ends = " ".join(map(str, tokenizer.end_ids))
        notes.append(
            f"{', '.join(changed)}: written for the trained format, whose turns end with {tokenizer.format.turn_end} "
            f"(end tokens: {ends})"
        )
    if left := chat_files.not_copied(source):
        notes.append(f"not copied from {source}: {', '.join(left)}")
    return notes


def write_card(
    workdir: Folder,
    method: str,
    config: Any,
    datasets: Sequence[TrainedOn],
    *,
    base: str,
    weights: Folder | None,
    summary: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the card of a run beside its weights, with the metrics of its last logged step.

    Args:
        workdir: the run's.
        method: `SFT` or `GRPO`.
        config: a dataclass, all of whose settings are JSON.
        base: name of the initial model as the user gave it.
        weights: its folder, whose card may name a licence.
        summary: rows of the table that the run printed before its first step (`RunSummary`).
    """
    rows = [row for row in read_metrics(location(workdir) / "metrics") if not is_exhausted(row)]
    licence = "" if weights is None else _licence(weights)
    text = _card(method, config, datasets, rows[-1] if rows else {}, summary, base=base, licence=licence)
    write_text(location(workdir) / CHECKPOINTS / FILE, text)


def _licence(weights: Folder) -> str:
    """Return the licence in the card beside the weights, or ""."""
    card = location(weights) / FILE
    if not card.exists():
        return ""
    header = card.read_bytes()[:_HEADER_BYTES].decode("utf-8", errors="replace")
    found = _LICENCE.search(header.removeprefix("---").partition("\n---")[0])
    return found[1] if found else ""


def _card(
    method: str,
    config: Any,
    datasets: Sequence[TrainedOn],
    last: Mapping[str, Any],
    summary: Sequence[tuple[str, str]],
    *,
    base: str,
    licence: str,
) -> str:
    header = ["library_name: transformers", "tags:", "- tool-use", "- astra", f"- {method.lower()}"]
    if licence:
        header.append(f"license: {licence}")
    if _REPOSITORY.fullmatch(base):
        header.append(f"base_model: {base}")
    figures = {
        name: value
        for name, value in last.items()
        if isinstance(value, int | float) and math.isfinite(value) and not any(one in name for one in _OF_SPEED)
    }
    lines = [
        "---",
        *header,
        "---",
        "",
        f"# {method} of {_cell(base if header[-1].startswith('base_model') else base.rstrip('/').rpartition('/')[2])}",
        "",
        f"Trained with astra-jax {astra_jax.__version__} ([ASTRA](https://arxiv.org/abs/2601.21558), in JAX).",
        "",
        f"Licence: {licence + ', that of what it began from' if licence else 'not said by what it began from'}.",
        "",
        "## Data",
        "",
        "| for | from | records | sha256 |",
        "| --- | --- | ---: | --- |",
        *(f"| {one.role} | {_cell(one.name)} | {one.count:,} | `{one.digest}` |" for one in datasets),
        "",
        *(["## Run", "", "| | |", "| --- | --- |"] if summary else []),
        *(f"| {name} | {_cell(value)} |" for name, value in summary),
        *([""] if summary else []),
        f"## Figures at step {figures.pop('step', 0):,}",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {name} | {value:.6g} |" for name, value in figures.items()),
        "",
        "## Configuration",
        "",
        "```json",
        json.dumps(asdict(config), indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Format a user's text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def copy_card(source: Folder, target: Folder) -> None:
    """Copy the card that lies beside weights, if there is one."""
    if (card := location(source) / FILE).exists():
        write_bytes(location(target) / FILE, card.read_bytes())
