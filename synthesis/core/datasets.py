"""Datasets: a folder with `records.array_record` and `dataset_card.json`, written atomically.

Records beyond `SHARD_BYTES` are in `records-00001.array_record` and so on.

The card holds the schema version, the record kind, the count and a content digest, and the writer's entries
(statistics, resolved config, seed). Readers check all of it: no partial or foreign dataset is read as whole.

Datasets are written to disk, and read from there or from Google Cloud Storage (`gs://…`, with `gcsfs` installed).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from array_record.python import array_record_module
from etils import epath

from astra_jax.base.errors import UserError
from astra_jax.base.files import Folder as Folder
from astra_jax.base.files import check_held
from astra_jax.base.typed import decode_msgpack
from synthesis.core.compat import todays_card
from synthesis.core.records import SCHEMA_VERSION, Record, ToolEnvironment, ToolServer, ToolSpec, decode, encode
from synthesis.core.tool_schemas import UncheckableSchema, check_schema

RECORDS_FILE = "records.array_record"
CARD_FILE = "dataset_card.json"
SHARD_BYTES = 1 << 30
"""Encoded records in a file, bytes; further records are in the next file."""
_MOST_SHARDS = 100_000
_AGAIN = "delete {} and run its stage again"
_AT_ONCE = 1024
"""Records in memory as bytes while a dataset is read."""


class DatasetError(UserError):
    """A dataset is missing, corrupt or of another kind or schema; the message says which and how to fix it."""


class BinaryRecord(msgspec.Struct, frozen=True):
    """A record that holds arrays as bytes, stored as MessagePack, which does not change them; other records are
    JSON."""


def write_dataset(
    path: Path | str, kind: type[msgspec.Struct], records: Iterable[msgspec.Struct], *, card: Mapping[str, Any]
) -> str:
    """Write a dataset atomically, replacing an older one at `path`.

    Args:
        path: the dataset's folder.
        kind: the record type, e.g. `Trajectory`; every record must be one.
        records: in the order in which they are stored.
        card: further entries of the card: statistics, resolved config, seed. Must be JSON.

    Returns:
        The content digest: sha256 (hex) over the length-prefixed encoded records.

    Raises:
        TypeError: a record is not a `kind`.
        DatasetError: it could not be written; an older dataset is unchanged.
        OSError: as well.
        RemovedError: the folder that this process holds was removed or replaced.
    """
    path = Path(path)
    check_held(path)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digest, count = hashlib.sha256(), 0
    with _Shards(path, partial) as shards:
        for record in records:
            if not isinstance(record, kind):
                found = type(record).__name__
                raise TypeError(f"write_dataset({path.name!r}): record {count} is a {found}, not a {kind.__name__}")
            data = msgspec.msgpack.encode(record) if isinstance(record, BinaryRecord) else encode(record)
            digest.update(len(data).to_bytes(8, "big") + data)
            shards.write(data)
            count += 1
    if shards.count > 1:
        card = {**card, "shards": shards.count}
    with _writing(path), open(partial / CARD_FILE, "w", encoding="utf-8") as file:
        file.write(card_text(kind, count, digest.hexdigest(), card))
        file.flush()
        os.fsync(file.fileno())
    check_held(path)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return digest.hexdigest()


def write_once(
    path: Path, kind: type[msgspec.Struct], records: Iterable[msgspec.Struct], *, card: Mapping[str, Any]
) -> Path:
    """Write a dataset unless `path` has one, and return `path`.

    It is written beside `path` and renamed. So it is always whole, even if several processes write the same one.

    Raises:
        DatasetError, OSError: as `write_dataset`.
    """
    if (path / CARD_FILE).exists():
        return path
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_dataset(aside, kind, records, card=card)
        try:
            aside.rename(path)
        except OSError:
            if not (path / CARD_FILE).exists():  # else another process was first, with the same
                raise
    finally:
        for left in (aside, aside.with_name(f".{aside.name}.partial")):
            shutil.rmtree(left, ignore_errors=True)
    return path


def card_text(kind: type[msgspec.Struct], count: int, digest: str, card: Mapping[str, Any]) -> str:
    """Return the text of a card's file.

    Args:
        count, digest: of its records.
        card: its further entries; must be JSON.
    """
    whole = {**card, "kind": kind.__name__, "schema_version": SCHEMA_VERSION, "count": count, "digest": digest}
    return json.dumps(whole, indent=2, ensure_ascii=False, sort_keys=True)


class _Shards:
    """The files of a dataset that is being written.

    Args:
        path: of the dataset, for errors.
        folder: directory for the files.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
        self.count = 0
        self._begin()

    def write(self, data: bytes) -> None:
        """Append a record. Raises `DatasetError`."""
        with _writing(self._path):
            if self._bytes >= SHARD_BYTES:
                self._writer.close()
                self._begin()
            self._writer.write(data)
        self._bytes += len(data)

    def _begin(self) -> None:
        self._bytes = 0
        with _writing(self._path):
            # group_size:1 makes every record readable on its own, which Grain's data source requires.
            file = str(self._folder / _shard_name(self.count))
            self._writer = array_record_module.ArrayRecordWriter(file, "group_size:1")
        self.count += 1

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        with _writing(self._path):
            self._writer.close()


def _shard_name(number: int) -> str:
    return f"records-{number:05}.array_record" if number else RECORDS_FILE


class _writing:
    """Context of a write, which adds the dataset's name to errors of ArrayRecord and of a file. ArrayRecord has no
    error class.

    A class, since it is entered for every record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (RuntimeError, OSError)):
            raise DatasetError(
                f"{self.path} could not be written ({error}); make room there, or check the disk, and run the same "
                "command again"
            ) from None


def read_card(path: Folder) -> dict[str, Any]:
    """Return the dataset's card.

    Raises:
        DatasetError: there is no dataset at `path`, or its card is not one, or its schema version is not ours.
    """
    folder = epath.Path(path)
    try:
        card = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(f"no dataset at {path}: {CARD_FILE} is missing; run the stage that writes it") from None
    except NotADirectoryError:
        raise DatasetError(
            f"{path} is a file; a dataset is a folder with {CARD_FILE}, as the stages write it"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{folder / CARD_FILE} is not JSON ({error}); {_AGAIN.format(path)}") from None
    if not isinstance(card, dict):
        raise DatasetError(f"{folder / CARD_FILE} is not a JSON object; {_AGAIN.format(path)}")
    if card.get("schema_version") != SCHEMA_VERSION:
        raise DatasetError(
            f"{path}: schema_version is {card.get('schema_version')!r}, this version reads {SCHEMA_VERSION}; "
            "synthesise the dataset again"
        )
    for name, wanted in (("kind", str), ("count", int), ("digest", str)):
        if not isinstance(card.get(name), wanted):
            raise DatasetError(f"{folder / CARD_FILE} has no {name}; {_AGAIN.format(path)}")
    if not isinstance(shards := card.get("shards", 1), int) or not 0 < shards <= _MOST_SHARDS:
        raise DatasetError(f"{folder / CARD_FILE}: shards is {shards!r:.40}, no number of files; {_AGAIN.format(path)}")
    return todays_card(card)


def check_dataset(path: Folder, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Check by its card that a dataset exists and holds records of a kind; return the card.

    Raises:
        DatasetError: it is missing, of another kind or schema, or has no records beside its card.
    """
    card = _card_of(path, kind)
    for file in records_files(path, card):
        if not epath.Path(file).exists():
            raise DatasetError(f"no dataset at {path}: {os.path.basename(file)} is missing; {_AGAIN.format(path)}")
    return card


def records_files(path: Folder, card: Mapping[str, Any]) -> list[str]:
    """Return the paths of the record files, in order, for readers of ArrayRecord.

    Args:
        card: of the dataset (`read_card`).
    """
    return [os.fspath(epath.Path(path) / _shard_name(number)) for number in range(card.get("shards", 1))]


def read_dataset(path: Folder, kind: type[Record]) -> list[Record]:
    """Read all records of a dataset, checked against its card.

    Raises:
        DatasetError: missing, of another kind, its count or digest differs from the card's (corrupt), or a tool has a
            schema that arguments cannot be checked against (`tool_schemas.check_schema`).
    """
    return list(each_record(path, kind))


def each_record(path: Folder, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of a dataset in its order, without all of them in memory.

    Raises:
        DatasetError: as `read_dataset`; a wrong count or digest is only noticed after the last record.
    """
    card = _card_of(path, kind)
    digest, count = hashlib.sha256(), 0
    # An ArrayRecord without any record has no footer that the reader accepts.
    for data in _read_bytes(path, card) if card["count"] else ():
        digest.update(len(data).to_bytes(8, "big") + data)
        yield _decoded(path, kind, count, data)
        count += 1
    if count != card["count"] or digest.hexdigest() != card["digest"]:
        raise DatasetError(
            f"{path} is corrupt: {count} records with digest {digest.hexdigest()[:12]}, its card says "
            f"{card['count']} with {card['digest'][:12]}; {_AGAIN.format(path)}"
        )


def read_record(path: Folder, kind: type[Record], index: int) -> Record:
    """Read one record by its position in the dataset, from 0. It is not checked against the card's digest.

    Raises:
        DatasetError: the dataset is missing, of another kind, or has no such record; or the record is corrupt.
    """
    card = _card_of(path, kind)
    if not 0 <= index < card["count"]:
        raise DatasetError(f"{path} has no record {index}; it holds {card['count']}, counted from 0")
    for data in _read_bytes(path, card, index):
        return _decoded(path, kind, index, data)
    raise DatasetError(f"{path} is corrupt: its files end before record {index}; {_AGAIN.format(path)}")


def _card_of(path: Folder, kind: type[msgspec.Struct]) -> dict[str, Any]:
    card = read_card(path)
    if card["kind"] != kind.__name__:
        raise DatasetError(f"{path} holds {card['kind']} records, expected {kind.__name__}")
    return card


def _decoded(path: Folder, kind: type[Record], index: int, data: bytes) -> Record:
    try:
        record = decode_msgpack(data, kind) if issubclass(kind, BinaryRecord) else decode(data, kind)
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
    """Return the tools whose calls are checked by their schemas; those of a trajectory are only shown."""
    if isinstance(record, ToolServer):
        return record.tools
    if isinstance(record, ToolEnvironment):
        bands = [record.tools, *record.distractors.values()]
        return [tool.spec for band in bands for tool in band]
    return []


@contextlib.contextmanager
def reading(path: Folder) -> Iterator[None]:
    """Add the dataset's name to errors of an ArrayRecord reader, which have no class of their own.

    Raises:
        DatasetError: instead of them.
    """
    try:
        yield
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise DatasetError(f"{path}/{RECORDS_FILE} cannot be read ({error}); {_AGAIN.format(path)}") from None


def _read_bytes(path: Folder, card: Mapping[str, Any], only: int | None = None) -> Iterator[bytes]:
    """Yield the encoded records, or only the record at `only`."""
    before = 0
    for file in records_files(path, card):
        with reading(path):
            reader = array_record_module.ArrayRecordReader(file)
            try:
                total = reader.num_records()
                if only is None:
                    for start in range(0, total, _AT_ONCE):
                        yield from reader.read(start, min(start + _AT_ONCE, total))
                elif only - before < total:
                    yield from reader.read(only - before, only - before + 1)
                    return
                before += total
            finally:
                reader.close()
