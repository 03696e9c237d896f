"""A user's own conversations as a dataset: files in any of `forms`, read once and kept by what is in them.

    path = kept_dataset([Path("chats.jsonl")], cache)      # an ArrayRecord of Trajectory in cache/DIGEST

Unlike `sft.import_dataset`, which counts what is wrong with a release, a row that cannot be trained on ends it, by its
number: nobody should find out after a run that half of the data were not there. What is no fault here: a conversation
that ends in calls, as examples of single calls do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from synthesis.astra_format.records import SUFFIXES, Defect, each_row
from synthesis.astra_format.sft import BEYOND_REPAIR, KEPT_AS_IT_IS, MENDED, import_record
from synthesis.core.datasets import write_once
from synthesis.core.records import SCHEMA_VERSION, Trajectory
from synthesis.core.stages import Rejected

READER = 4
"""Version of the conversion of rows: with another number, files are read from scratch."""
CACHE_FOLDER = "data"
"""Folder of such datasets in the user's cache."""
DEFECTS = (
    "bad_schema", "call_without_result", "colliding_names", "ends_in_error", "leaked_markup", "no_parameters",
    "result_without_call", "unknown_tool",
)  # fmt: skip
"""Defects that a row may have and still be read."""
_NOTED = frozenset({*MENDED, *KEPT_AS_IT_IS}) - {"unread_column"}
"""Observations about a row that is read; they are counted for the user to check."""
_CHUNK = 1 << 20


def kept_dataset(
    files: Sequence[Path], cache: Path, *, accept: Collection[str] = (), skip_bad: bool = False, source: str = ""
) -> Path:
    """Return the folder of a dataset with the files' rows, in their order; it is written if it does not exist.

    Its name is a digest of the files' bytes and of the read settings. It is written aside and renamed. So it is always
    whole, even if several hosts or processes read the same files.

    Args:
        cache: the folder of such datasets.
        accept: the `DEFECTS` that a row may have.
        skip_bad: leave out other rows, counted on the card (`rows`, `skipped`, `examples`), instead of refusing. The
            card also counts rows that are read in another form than they are given in, or are worth a look (`noted`,
            with `examples`), the rows that have each column that is not read (`unread`), and the turns of each weight
            that is not 1 (`weights`).
        source: origin of the rows on the card; by default the files' names.

    Raises:
        InputError: a file cannot be read, a row cannot be trained on (by file and number), or none can.
        DatasetError: the dataset could not be written.
    """
    if unknown := sorted(set(accept) - set(DEFECTS)):
        raise InputError(f"accept: there is no defect {unknown[0]!r}; use {', '.join(DEFECTS)}")
    digests = [_digest(file) for file in files]
    settings = [READER, SCHEMA_VERSION, sorted(set(accept)), skip_bad]
    named = [[next(one for one in SUFFIXES[::-1] if file.name.endswith(one)), digest]
             for file, digest in zip(files, digests, strict=True)]  # fmt: skip
    key = hashlib.sha256(json.dumps([settings, named]).encode()).hexdigest()[:32]
    card: dict[str, Any] = {"source": source or ", ".join(file.name for file in files), "files_sha256": digests}
    # `_rows` completes the card while it is read.
    return write_once(cache / key, Trajectory, _rows(files, card, accept=accept, skip_bad=skip_bad), card=card)


def _rows(
    files: Sequence[Path], card: dict[str, Any], *, accept: Collection[str], skip_bad: bool
) -> Iterator[Trajectory]:
    skipped, noted, unread_columns, weights = (Counter[str]() for _ in range(4))
    examples: dict[str, str] = {}
    card |= {"rows": 0, "skipped": skipped, "examples": examples}
    card |= {"noted": noted, "unread": unread_columns, "weights": weights}
    for file in files:
        stem = file.name.partition(".")[0]
        for row, data in enumerate(each_row(file)):
            card["rows"] += 1
            try:
                found, defects = import_record(data, row)
                _check(found, defects, accept)
            except Rejected as rejection:
                where = f"{file}, row {row} (counted from 0): {rejection.reason}: {rejection.detail}"
                if not skip_bad:
                    raise InputError(where) from None
                skipped[rejection.reason] += 1
                examples.setdefault(rejection.reason, where)
                continue
            unread_columns.update(defect.detail for defect in defects if defect.name == "unread_column")
            seen = {defect.name: defect for defect in reversed(defects) if defect.name in _NOTED}
            noted.update(seen.keys())
            for name, defect in seen.items():
                examples.setdefault(name, f"{file}, row {row} (counted from 0): {defect.detail}")
            weights.update(f"{one.weight:g}" for one in found.messages if one.weight != 1)
            if found.id == f"astra-sft-{row:06d}":  # it has none of its own
                name = f"{stem}-{row:06d}"
                found = msgspec.structs.replace(found, id=name, task_id=name)
            yield found
    if not card["rows"] - sum(skipped.values()):
        raise InputError(f"{card['source']}: none of {card['rows']} rows can be trained on: {examples}")


def _check(found: Trajectory, defects: Sequence[Defect], accept: Collection[str]) -> None:
    """Raises `Rejected`: the row has a defect that matters here."""
    last = found.messages[-1] if found.messages else None
    ends_in = len(last.tool_calls) if last is not None else 0
    names = Counter(defect.name for defect in defects)
    fine = {*MENDED, *KEPT_AS_IT_IS, *accept, "no_final_answer"} - set(BEYOND_REPAIR)
    if names["call_without_result"] == ends_in:  # no other is open than those that it ends in
        fine.add("call_without_result")
    for defect in defects:
        if defect.name not in fine:
            raise Rejected(defect.name, defect.detail)
    if not any(message.role == "assistant" for message in found.messages):
        raise Rejected("no_assistant_turn", "no message of the assistant, and these are what is trained on")


def _digest(file: Path) -> str:
    """sha256 of a file. Raises `InputError`: it is not there, or of no known suffix."""
    if not file.name.endswith(SUFFIXES):
        raise InputError(f"{file}: the suffix says what a file is; give one of {', '.join(SUFFIXES)}")
    if not file.is_file():
        raise InputError(f"{file}: there is no such file, nor a dataset's folder")
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
