"""Datasets: a folder with `records.array_record` and `dataset_card.json`, written whole or not at all.

The card holds the schema version, the record kind, the count and a content digest, next to what the writer adds
(statistics, resolved config, seed). Readers check all of it: nothing half-written or foreign is ever read as whole.

They are written to disk and read from there or from Google Cloud Storage (`gs://…`, with `gcsfs` installed).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from array_record.python import array_record_module
from etils import epath

from synthesis.core.records import SCHEMA_VERSION, Record, ToolEnvironment, ToolServer, ToolSpec, decode, encode
from synthesis.core.tool_schemas import UncheckableSchema, check_schema

RECORDS_FILE = "records.array_record"
CARD_FILE = "dataset_card.json"
_AGAIN = "delete {} and run its stage again"
_AT_ONCE = 1024
"""Records that are held as bytes while a dataset is read."""

Folder = str | os.PathLike[str]
"""Where a dataset is: a folder, or gs://bucket/folder."""


class DatasetError(Exception):
    """A dataset is missing, corrupt or of another kind or schema; the message says which and how to mend it."""


def write_dataset(
    path: Path | str, kind: type[msgspec.Struct], records: Iterable[msgspec.Struct], *, card: Mapping[str, Any]
) -> str:
    """Write a dataset atomically, replacing an older one at `path`.

    Args:
        path: the dataset's folder.
        kind: the record type, e.g. `Trajectory`; every record must be one.
        records: in the order in which they are stored.
        card: what else the card says: statistics, resolved config, seed. Must be JSON.

    Returns:
        The content digest: sha256 (hex) over the length-prefixed encoded records.

    Raises:
        TypeError: a record is not a `kind`.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digest, count = hashlib.sha256(), 0
    # group_size:1 makes every record readable on its own, which Grain's data source requires.
    writer = array_record_module.ArrayRecordWriter(str(partial / RECORDS_FILE), "group_size:1")
    try:
        for record in records:
            if not isinstance(record, kind):
                found = type(record).__name__
                raise TypeError(f"write_dataset({path.name!r}): record {count} is a {found}, not a {kind.__name__}")
            data = encode(record)
            digest.update(len(data).to_bytes(8, "big") + data)
            writer.write(data)
            count += 1
    finally:
        writer.close()
    full_card = {
        **card,
        "kind": kind.__name__,
        "schema_version": SCHEMA_VERSION,
        "count": count,
        "digest": digest.hexdigest(),
    }
    with open(partial / CARD_FILE, "w", encoding="utf-8") as file:
        json.dump(full_card, file, indent=2, ensure_ascii=False, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return digest.hexdigest()


def read_card(path: Folder) -> dict[str, Any]:
    """The dataset's card.

    Raises:
        DatasetError: there is no dataset at `path`, or its card is not JSON, or its schema version is not ours.
    """
    folder = epath.Path(path)
    try:
        card = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(f"no dataset at {path}: {CARD_FILE} is missing; run the stage that writes it") from None
    except json.JSONDecodeError as error:
        raise DatasetError(f"{folder / CARD_FILE} is not JSON ({error}); {_AGAIN.format(path)}") from None
    if card.get("schema_version") != SCHEMA_VERSION:
        raise DatasetError(
            f"{path}: schema_version is {card.get('schema_version')!r}, this version reads {SCHEMA_VERSION}; "
            "synthesise the dataset again"
        )
    return card


def records_file(path: Folder) -> str:
    """Where the records are; for readers of ArrayRecord."""
    return os.fspath(epath.Path(path) / RECORDS_FILE)


def read_dataset(path: Folder, kind: type[Record]) -> list[Record]:
    """All records of a dataset, checked against its card.

    Raises:
        DatasetError: missing, of another kind, its count or digest differs from the card's (corrupt), or a tool has a
            schema that is no schema for arguments (`tool_schemas.check_schema`).
    """
    return list(each_record(path, kind))


def each_record(path: Folder, kind: type[Record]) -> Iterator[Record]:
    """The records of a dataset one after the other, in its order; for what need not hold all of them at once.

    Raises:
        DatasetError: as `read_dataset`; that the count or the digest differs is only known after the last record.
    """
    card = _card_of(path, kind)
    digest, count = hashlib.sha256(), 0
    # An ArrayRecord without any record has no footer that the reader accepts.
    for data in _read_bytes(path) if card["count"] else ():
        digest.update(len(data).to_bytes(8, "big") + data)
        yield _decoded(path, kind, count, data)
        count += 1
    if count != card["count"] or digest.hexdigest() != card["digest"]:
        raise DatasetError(
            f"{path} is corrupt: {count} records with digest {digest.hexdigest()[:12]}, its card says "
            f"{card['count']} with {card['digest'][:12]}; {_AGAIN.format(path)}"
        )


def read_record(path: Folder, kind: type[Record], index: int) -> Record:
    """One record by its place in the dataset's order, from 0. It is not checked against the card's digest.

    Raises:
        DatasetError: the dataset is missing, of another kind, or has no such record; or the record is corrupt.
    """
    count = _card_of(path, kind)["count"]
    if not 0 <= index < count:
        raise DatasetError(f"{path} has no record {index}; it holds {count}, counted from 0")
    return _decoded(path, kind, index, next(_read_bytes(path, index)))


def _card_of(path: Folder, kind: type[msgspec.Struct]) -> dict[str, Any]:
    card = read_card(path)
    if card["kind"] != kind.__name__:
        raise DatasetError(f"{path} holds {card['kind']} records, expected {kind.__name__}")
    return card


def _decoded(path: Folder, kind: type[Record], index: int, data: bytes) -> Record:
    try:
        record = decode(data, kind)
    except msgspec.MsgspecError as error:
        raise DatasetError(f"{path}: record {index} is corrupt ({error}); {_AGAIN.format(path)}") from None
    for tool in _callable_tools(record):
        try:
            check_schema(tool.parameters)
        except UncheckableSchema as error:
            raise DatasetError(
                f"{path}: record {index}: the schema of tool {tool.name!r:.80} cannot be used: {error}"
            ) from None
    return record


def _callable_tools(record: msgspec.Struct) -> list[ToolSpec]:
    """The tools whose calls are checked by their schemas; those of a trajectory are only shown."""
    if isinstance(record, ToolServer):
        return record.tools
    if isinstance(record, ToolEnvironment):
        bands = [record.tools, *record.distractors.values()]
        return [tool.spec for band in bands for tool in band]
    return []


def _read_bytes(path: Folder, only: int | None = None) -> Iterator[bytes]:
    """The encoded records, or the one at `only`."""
    try:
        reader = array_record_module.ArrayRecordReader(records_file(path))
        try:
            total = reader.num_records()
            places = range(0, total, _AT_ONCE) if only is None else (only,)
            for start in places:
                yield from reader.read(start, min(start + _AT_ONCE, total) if only is None else start + 1)
        finally:
            reader.close()
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise DatasetError(f"{records_file(path)} cannot be read ({error}); {_AGAIN.format(path)}") from None
