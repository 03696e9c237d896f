"""Journal of a batch in progress on disk, from which a killed run resumes: finished episodes, and finished turns of
others.

    journal = BatchJournal(workdir / "rollouts", key)
    done = journal.take_episode(group, number)  # from an earlier process
    await journal.keep_turn(group, number, place, turn)  # durable when this returns

Each process that fills the batch of an update writes its own file, `update_<update>.<n>.journal`. In a bucket, whose
objects cannot be appended to, each write is a new file. A file is a sequence of records: length, SHA-256 of the
content, content. The first record is the batch's key, which identifies all inputs of sampling, including the exact
weights. A file with another key is removed. A truncated or damaged record ends its file. Files stay until a checkpoint
older than the newest is past their update, since a run may fall back to it.

A full batch is recorded with its groups, and a resumed run trains on these. Sampling again could give other groups, for
example after a masked episode or a deadline. A batch that was given up is recorded too, so its groups are not sampled
again.

If rollouts continue across updates (`async_steps`), a file has the episodes finished under one weight version, and the
batch of that version's update (`ahead.py`). Parts of an episode from earlier versions are in their files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from absl import logging
from etils import epath

from astra_jax.base.files import RemovedError, check_held, first_line, in_bucket, location, write_bytes
from astra_jax.base.typed import decode_json, decode_msgpack
from astra_jax.rollout.episode import Episode, FinishedTurn
from astra_jax.rollout.filling import FillCounts, Group, Lengths
from astra_jax.rollout.packed import Packed, packed, packed_turn, unpacked, unpacked_turn
from synthesis.core.datasets import Folder

FOLDER = "rollouts"
"""Folder name below a run's workdir."""

_FORMAT = 2
_SUFFIX = ".journal"
_HEAD = struct.Struct("<Q32s")
_BUCKET_SECONDS = 2.0
"""Seconds between two objects in a bucket; a batch that takes hours has thousands of them."""


class BatchKey(msgspec.Struct, frozen=True, kw_only=True):
    """Key that a batch's records must share with a process that resumes from them.

    Attributes:
        run: from `identity.run_id`.
        identity: digest of `identity.run_identity`: settings, model, environments, tokenizer.
        update: its number; it trains on the batch.
        version: of the weights that sample it.
        weights: their digest.
        next_index: number of the batch's first group; 0 if groups are not tied to a batch. Lower numbers are trained or
            wait elsewhere.
    """

    run: str
    identity: str
    update: int
    version: int
    weights: str
    next_index: int


class ResumeStats(msgspec.Struct):
    """Counts of records reused from an earlier process.

    `anew` counts unfinished episodes that restart from scratch, since calls gave other results.

    Attributes:
        groups: those with any finished episode or turn.
        episodes: finished episodes.
        turns: finished turns of unfinished episodes.
        dropped: files with another key, and records that are damaged or out of order.
        unkept: records of this process that could not be written.
    """

    groups: int = 0
    episodes: int = 0
    turns: int = 0
    anew: int = 0
    dropped: int = 0
    unkept: int = 0


class BatchManifest(msgspec.Struct, frozen=True):
    """Batch of an update (or that it was given up), and all changes of groups since the previous one.

    Attributes:
        next_index: of the next group to start.
        entered: (number, environment, oldest version, scored episodes) of each valid group, in order.
        trained: numbers of the batch's groups, some of which may have entered earlier. Empty if `max_groups_per_step`
            were sampled without a batch.
        ended: with `async_steps`, numbers of groups that ended without entering.
        filling: the fill report as JSON values.
        lengths: of the run's episodes so far; if strictly online, before the batch is taken.
        counts: of groups, for this update.
    """

    next_index: int
    entered: list[tuple[int, str, int, int]]
    trained: list[int]
    ended: list[int]
    filling: dict[str, Any]
    lengths: Lengths
    counts: FillCounts = msgspec.field(default_factory=FillCounts)


class _Record(msgspec.Struct, array_like=True):
    """An episode, a turn, or a batch. `place` is the turn's index from 0, -1 for a finished episode, -2 for the batch
    of the file's update. `seconds` counts from the batch's start."""

    group: int
    number: int
    place: int
    seconds: float
    content: Packed


class BatchJournal:
    """Journal of one batch, read and continued.

    Args:
        folder: on disk or in a bucket.
        before: the previous journal, whose remaining records count here too.

    Attributes:
        taken: counts of reused records.
        seconds: spent on the batch by earlier processes.
        batch: the batch of its update, or that it was given up; None if neither is recorded.
    """

    def __init__(self, folder: Folder, key: BatchKey, before: BatchJournal | None = None) -> None:
        self.taken: ResumeStats = ResumeStats() if before is None else before.taken
        self.seconds = 0.0
        self.batch: BatchManifest | None = None
        self._folder, self._key = location(folder), key
        self._episodes: dict[tuple[int, int], Episode] = {} if before is None else before._episodes
        self._turns: dict[tuple[int, int], list[FinishedTurn]] = defaultdict(list) if before is None else before._turns
        self._groups: set[int] = set() if before is None else before._groups
        self._pending: list[bytes] = []
        self._kept: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._file: IO[bytes] | None = None
        self._failed = self._closed = False
        head = _framed(msgspec.json.encode({"format": _FORMAT, "key": key}))
        self._head, self._segments = head, _segments(self._folder, key.update)
        for path in self._segments:
            self._read(path)
        self._next = max((_number(path) for path in self._segments), default=-1) + 1
        self._started = time.monotonic()

    # ----------------------------------------------------------------------------------------------- existing records

    def _read(self, path: epath.Path) -> None:
        records = _unframed(path.read_bytes())
        if next(records, b"") != self._head[_HEAD.size :]:
            self.taken.dropped += 1
            path.unlink()
            return
        for content in records:
            if content is None:  # unfinished or damaged: ignore the rest of the file
                self.taken.dropped += 1
                return
            record = decode_msgpack(content, _Record)
            self.seconds = max(self.seconds, record.seconds)
            where = record.group, record.number
            if record.place == -2:
                self.batch = decode_json(record.content.text, BatchManifest)
                continue
            if record.place == -1:
                self._episodes[where] = unpacked(record.content)
                continue
            if record.place == 0:  # the episode may have restarted
                self._turns[where] = []
            if record.place == len(self._turns[where]):
                self._turns[where].append(unpacked_turn(record.content))
            else:
                self.taken.dropped += 1

    def take_episode(self, group: int, number: int) -> Episode | None:
        """Return a finished episode, or None."""
        if (found := self._episodes.pop((group, number), None)) is not None:
            self._turns.pop((group, number), None)
            self.taken.episodes += 1
            self._note(group)
        return found

    def take_turns(self, group: int, number: int) -> list[FinishedTurn]:
        """Return the finished turns of an unfinished episode, from the first on."""
        found = self._turns.pop((group, number), [])
        self.taken.turns += len(found)
        if found:
            self._note(group)
        return found

    def take_entered(self, but: Collection[int] = ()) -> list[Group]:
        """Return the groups that entered before the `batch` was full, in order.

        Args:
            but: numbers of groups to omit.

        Returns:
            Groups whose episodes are all recorded.
        """
        numbers: dict[int, list[int]] = defaultdict(list)
        for index, number in sorted(self._episodes):
            numbers[index].append(number)
        groups = []
        for index, environment, update, count in () if self.batch is None else self.batch.entered:
            if index not in but and len(numbers[index]) == count:
                found = [self.take_episode(index, number) for number in numbers[index]]
                episodes = [episode for episode in found if episode is not None]
                groups.append(Group(index=index, environment_id=environment, update=update, episodes=episodes))
        return groups

    @property
    def has_entered(self) -> bool:
        """True if `take_entered` would return all groups."""
        there = Counter(index for index, _ in self._episodes)
        return self.batch is not None and all(there[index] == count for index, _, _, count in self.batch.entered)

    def begun_anew(self, turns: int) -> None:
        """Count an episode that restarts, and discount its turns."""
        self.taken.anew += 1
        self.taken.turns -= turns

    def counts(self) -> dict[str, float]:
        """Return `taken` as metrics."""
        return {f"journal_{name}": float(count) for name, count in msgspec.structs.asdict(self.taken).items()}

    def count_anew(self) -> None:
        """Reset the counts in `taken`."""
        self._groups.clear()
        for name in self.taken.__struct_fields__:
            setattr(self.taken, name, 0)

    def _note(self, group: int) -> None:
        self._groups.add(group)
        self.taken.groups = len(self._groups)

    # -------------------------------------------------------------------------------------------------------- writing

    async def keep_turn(self, group: int, number: int, place: int, turn: FinishedTurn) -> None:
        """Store a turn; returns when it is on disk."""
        await self._keep(_Record(group, number, place, self._elapsed(), packed_turn(turn)))

    async def keep_episode(self, group: int, number: int, episode: Episode) -> None:
        """Store a finished episode; returns when it is on disk."""
        await self._keep(_Record(group, number, -1, self._elapsed(), packed(episode)))

    async def keep_batch(self, batch: BatchManifest) -> None:
        """Store the batch of the update, or that it was given up; returns when it is on disk."""
        content = Packed(b"", b"", b"", b"", msgspec.json.encode(batch))
        await self._keep(_Record(0, 0, -2, self._elapsed(), content))

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._started

    async def _keep(self, record: _Record) -> None:
        if self._failed or self._closed:
            self.taken.unkept += 1
            return
        self._pending.append(_framed(msgspec.msgpack.encode(record)))
        if self._kept is None:
            self._kept = asyncio.get_running_loop().create_future()
        kept = self._kept
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        await asyncio.shield(kept)

    async def _write_all(self) -> None:
        """Write repeatedly, each time all records added during the previous write."""
        try:
            while self._pending and self._kept is not None:
                records, kept = self._pending, self._kept
                self._pending, self._kept = [], None
                try:
                    if not self._failed:
                        await asyncio.to_thread(self._write, b"".join(records))
                except RemovedError as error:  # ends the run: making room on the disk cannot help
                    self._failed = True
                    kept.set_exception(error)
                    kept.exception()  # marks it as retrieved: waiters may be cancelled
                except Exception as error:  # disk errors, and a bucket client's, which share no base class
                    self._failed = True
                    logging.warning(
                        "%s cannot be written (%s). If this process ends before the next batch, the finished "
                        "episodes are lost; free disk space", self._folder, first_line(error),
                    )  # fmt: skip
                finally:
                    self.taken.unkept += len(records) * self._failed
                    if not kept.done():
                        kept.set_result(None)
                if self._pending and in_bucket(self._folder):
                    await asyncio.sleep(_BUCKET_SECONDS)
        finally:
            self._writer = None

    def _write(self, content: bytes) -> None:
        check_held(self._folder)
        if in_bucket(self._folder):
            write_bytes(self._path(self._next), self._head + content)
            self._next += 1
            return
        if self._file is None:
            path = self._path(self._next)
            write_bytes(path, self._head)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the batch's life)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) or 0 :]
        os.fsync(self._file.fileno())

    def _path(self, number: int) -> epath.Path:
        return self._folder / f"{_stem(self._key.update)}.{number}{_SUFFIX}"

    async def close(self) -> None:
        """Write pending records and close the file, which stays."""
        self._closed = True
        if self._writer is not None:
            await asyncio.shield(self._writer)
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class BatchUnderWay:
    """Contents of a batch's journals, for display.

    Attributes:
        episodes: finished episodes.
        open_turns: finished turns of unfinished episodes.
        seconds: from the batch's start to the newest record.
    """

    update: int
    episodes: int = 0
    open_turns: int = 0
    seconds: float = 0.0


class JournalReader:
    """Reads the journals of the newest batch while they are written, without rereading earlier records.

    Args:
        folder: a run's `FOLDER`, on this machine's disk.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = location(folder)
        self._update = -1
        self._read: dict[epath.Path, int] = {}
        self._finished: set[tuple[int, int]] = set()
        self._turns: dict[tuple[int, int], set[int]] = {}
        self._seconds = 0.0

    def look(self) -> BatchUnderWay | None:
        """Return the current batch, or None."""
        segments = _segments(self._folder, None)
        if not segments:
            return None
        if (update := _update(segments[-1])) != self._update:
            self._update, self._seconds = update, 0.0
            self._read, self._finished, self._turns = {}, set(), {}
        for path in segments:
            if _update(path) == update:
                self._go_on(path)
        still_open = [len(places) for episode, places in self._turns.items() if episode not in self._finished]
        return BatchUnderWay(update, len(self._finished), sum(still_open), self._seconds)

    def _go_on(self, path: epath.Path) -> None:
        at = self._read.get(path, 0)
        with open(path, "rb") as file:
            file.seek(at)
            for content in _unframed(file.read()):
                if content is None:  # partly written
                    return
                if at:
                    record = decode_msgpack(content, _Record)
                    episode = (record.group, record.number)
                    self._seconds = max(self._seconds, record.seconds)
                    if record.place == -1:
                        self._finished.add(episode)
                    elif record.place >= 0:
                        self._turns.setdefault(episode, set()).add(record.place)
                at += _HEAD.size + len(content)
                self._read[path] = at


@dataclass(frozen=True)
class Journals:
    """Journals of a run, on the first host only.

    Attributes:
        folder: below the run's workdir.
        run, identity: as in `BatchKey`.
    """

    folder: Folder
    run: str
    identity: str

    def open(
        self, *, update: int, version: int, weights: str, next_index: int = 0, before: BatchJournal | None = None
    ) -> BatchJournal:
        """Open a batch's journal and read its existing records."""
        key = BatchKey(
            run=self.run,
            identity=self.identity,
            update=update,
            version=version,
            weights=weights,
            next_index=next_index,
        )
        return BatchJournal(self.folder, key, before)

    def forget(self, before: int | None = None, *, since: int | None = None) -> None:
        """Remove journals of updates before `before`, or from `since` on, or all. Raises as `check_held`."""
        check_held(self.folder)
        for path in _segments(location(self.folder), None):
            update = _update(path)
            early, late = before is not None and update < before, since is not None and update >= since
            if early or late or before is since is None:
                path.unlink(missing_ok=True)


def kept_bytes(folder: epath.Path) -> int:
    """Return the bytes of all journals in a folder."""
    return sum(path.stat().length for path in _segments(folder, None))


def _stem(update: int) -> str:
    return f"update_{update:08}"


def _segments(folder: epath.Path, update: int | None) -> list[epath.Path]:
    """Return the files of an update, or of all, in writing order."""
    if not folder.exists():
        return []
    found = [path for path in folder.iterdir() if path.name.startswith("update_") and path.name.endswith(_SUFFIX)]
    mine = [path for path in found if _whole(path) and update in (None, _update(path))]
    return sorted(mine, key=lambda path: (_update(path), _number(path)))


def _whole(path: epath.Path) -> bool:
    parts = path.name.removeprefix("update_").removesuffix(_SUFFIX).split(".")
    return len(parts) == 2 and all(part.isascii() and part.isdecimal() for part in parts)


def _update(path: epath.Path) -> int:
    return int(path.name.removeprefix("update_").partition(".")[0])


def _number(path: epath.Path) -> int:
    return int(path.name.removesuffix(_SUFFIX).rpartition(".")[2])


def _framed(content: bytes) -> bytes:
    return _HEAD.pack(len(content), hashlib.sha256(content).digest()) + content


def _unframed(data: bytes) -> Iterator[bytes | None]:
    """Yield each record's content, and None at the end if the rest is incomplete or damaged."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            yield None
            return
        length, digest = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        content = data[at : at + length]
        if len(content) != length or hashlib.sha256(content).digest() != digest:
            yield None
            return
        yield content
        at += length
