"""Journal of a run's rollouts on disk: finished episodes, and the batch of each update.

    journal = BatchJournal(workdir / "rollouts", key)
    done = journal.take_episode(group, number)  # from an earlier process
    await journal.keep_episode(group, number, episode)  # durable when this returns

Consumes: finished episodes and filled batches. A killed run resumes from them; unfinished episodes start again.
Waits for: the disk or bucket. Writing stops at the first error, which is logged; later records are counted.

Each process writes a file of its own for each version of the weights, `update_<version>.<n>.journal`: the episodes that
finished while the sampler had this version, and the batch of its update. In a bucket, whose objects cannot be appended
to, each write is a new file. A file is a sequence of records: length, SHA-256 of the content, content. The first record
is the key, which identifies all inputs of sampling, including the exact weights. A file with another key is removed. A
truncated or damaged record ends its file. Files stay until a checkpoint older than the newest is past their update,
since a run may fall back to it.

A full batch is recorded with its groups, and a resumed run trains on these. Sampling again could give other groups,
for example after a masked episode, or because groups enter a batch as they finish (`async_rollouts`). A batch that was
given up is recorded too, so its groups are not sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from absl import logging
from etils import epath

from astra_jax.base.files import RemovedError, check_held, first_line, in_bucket, location, write_bytes
from astra_jax.base.typed import decode_msgpack
from astra_jax.rollout.buffer import Lengths
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group, PackedEpisode, pack_episode, unpack_episode
from synthesis.core.datasets import Folder

FOLDER = "rollouts"
"""Folder name below a run's workdir."""

_FORMAT = 3
"""Format of the records. A new field of `Episode` with a default needs no other format, since `pack_episode`
stores it."""
_PREFIX, _SUFFIX = "update_", ".journal"
_HEAD = struct.Struct("<Q32s")
_BUCKET_SECONDS = 2.0
"""Least seconds between two objects in a bucket; a batch that takes hours has thousands of episodes."""


class BatchKey(msgspec.Struct, frozen=True, kw_only=True):
    """Key that a file's records must share with a process that resumes from them.

    Attributes:
        run: from `identity.run_id`.
        identity: digest of `identity.run_identity`: settings, model, environments, tokenizer.
        version: of the weights: the number of updates in them.
        weights: their digest.
    """

    run: str
    identity: str
    version: int
    weights: str


class ResumeStats(msgspec.Struct):
    """Counts of records since the previous batch.

    Attributes:
        episodes: reused from an earlier process.
        dropped: files with another key, damaged records, and batches with a missing episode.
        unwritten: records of this process that could not be written.
    """

    episodes: int = 0
    dropped: int = 0
    unwritten: int = 0


class BatchManifest(msgspec.Struct, frozen=True):
    """Batch of an update (or that it was given up), and all changes of groups since the previous one.

    Attributes:
        next_index: of the next group to start.
        entered: (index, oldest version, scored episodes) of each group that entered the buffer, in order.
        trained: indices of the batch's groups, some of which may have entered earlier. Empty if `max_groups_per_step`
            were sampled without a batch.
        ended: indices of groups that ended without entering.
        filling: the fill report as JSON values.
        lengths: of the run's episodes so far.
    """

    next_index: int
    entered: list[tuple[int, int, int]]
    trained: list[int]
    ended: list[int]
    filling: dict[str, Any]
    lengths: Lengths


class _Record(msgspec.Struct, array_like=True):
    """A finished episode of a group, or the batch of the file's update. `seconds` counts from the file's start."""

    seconds: float
    group: int = 0
    number: int = 0
    episode: PackedEpisode | None = None
    batch: BatchManifest | None = None


class BatchJournal:
    """Journal of one version of the weights, read and continued.

    Args:
        folder: on disk or in a bucket.
        before: journal of the previous version, whose remaining episodes count here too.

    Attributes:
        stats: counts of reused records.
        seconds: spent on the version by earlier processes.
        batch: the batch of its update, or that it was given up; None if neither is recorded.
    """

    def __init__(self, folder: Folder, key: BatchKey, before: BatchJournal | None = None) -> None:
        self.stats: ResumeStats = ResumeStats() if before is None else before.stats
        self.seconds = 0.0
        self.batch: BatchManifest | None = None
        self._folder, self._key = location(folder), key
        self._episodes: dict[tuple[int, int], PackedEpisode] = {} if before is None else before._episodes
        self._pending: list[bytes] = []
        self._writing = asyncio.Lock()
        self._write_at = 0.0
        self._file: IO[bytes] | None = None
        self._is_closed = False
        self._head = _framed(msgspec.json.encode({"format": _FORMAT, "key": key}))
        self._next = 0
        for _, number, path in _segments(self._folder, key.version):
            self._read(path)
            self._next = number + 1
        self._started = time.monotonic()

    # ----------------------------------------------------------------------------------------------- existing records

    def _read(self, path: epath.Path) -> None:
        records = _unframed(path.read_bytes())
        head = next(records, b"")
        if head != self._head[_HEAD.size :]:
            if head and f'"format":{_FORMAT},'.encode() not in head:
                logging.warning("%s has the format of an earlier version: its rollouts are sampled again", path)
            self.stats.dropped += 1
            path.unlink()
            return
        for content in records:
            if content is None:  # unfinished or damaged: ignore the rest of the file
                self.stats.dropped += 1
                return
            record = decode_msgpack(content, _Record)
            self.seconds = max(self.seconds, record.seconds)
            if record.episode is not None:
                self._episodes[record.group, record.number] = record.episode
            if record.batch is not None:
                self.batch = record.batch

    @property
    def available(self) -> int:
        """Number of finished episodes that `take_episode` has not returned yet."""
        return len(self._episodes)

    def take_episode(self, group: int, number: int) -> Episode | None:
        """Return a finished episode, or None."""
        return self._take(group, number) if (group, number) in self._episodes else None

    def _take(self, group: int, number: int) -> Episode:
        self.stats.episodes += 1
        return unpack_episode(self._episodes.pop((group, number)))

    def take_entered(self, but: Collection[int]) -> list[Group] | None:
        """Return the groups that entered the buffer for the `batch`, in order; None if an episode is missing.

        Args:
            but: indices of groups to omit.
        """
        assert self.batch is not None, "ask for it first"
        entered = [(index, update, count) for index, update, count in self.batch.entered if index not in but]
        numbers: dict[int, list[int]] = defaultdict(list)
        for index, number in sorted(self._episodes):
            numbers[index].append(number)
        if any(len(numbers[index]) != count for index, _, count in entered):
            return None
        return [
            Group.from_episodes(index, update, [self._take(index, number) for number in numbers[index]])
            for index, update, _ in entered
        ]

    def discard(self, groups: Collection[int]) -> None:
        """Free the episodes of groups that are over."""
        for index, number in [one for one in self._episodes if one[0] in groups]:
            del self._episodes[index, number]

    def counts(self) -> dict[str, float]:
        """Return `stats` as metrics."""
        return {f"journal_{name}": float(count) for name, count in msgspec.structs.asdict(self.stats).items()}

    def reset_counts(self) -> None:
        """Set all counts in `stats` to 0."""
        self.stats.episodes = self.stats.dropped = self.stats.unwritten = 0

    # -------------------------------------------------------------------------------------------------------- writing

    async def keep_episode(self, group: int, number: int, episode: Episode) -> None:
        """Store a finished episode; returns when it is on disk."""
        await self._keep(_Record(self._elapsed(), group, number, episode=pack_episode(episode)))

    async def keep_batch(self, batch: BatchManifest) -> None:
        """Store the batch of the update, or that it was given up; returns when it is on disk."""
        await self._keep(_Record(self._elapsed(), batch=batch))

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._started

    async def _keep(self, record: _Record) -> None:
        if self._is_closed:
            self.stats.unwritten += 1
            return
        self._pending.append(_framed(msgspec.msgpack.encode(record)))
        await asyncio.shield(asyncio.create_task(self._write_pending()))

    async def _write_pending(self) -> None:
        """Write all pending records, unless the write before has done so."""
        async with self._writing:
            if not self._pending:
                return
            await asyncio.sleep(self._write_at - time.monotonic())
            records, self._pending = self._pending, []
            try:
                if not self._is_closed:
                    await asyncio.to_thread(self._write, b"".join(records))
            except RemovedError:  # ends the run: making room on the disk cannot help
                self._is_closed = True
                raise
            except Exception as error:  # disk errors, and a bucket client's, which share no base class
                self._is_closed = True
                logging.warning(
                    "%s cannot be written (%s); until the next batch, what is finished would be lost with this "
                    "process: make room there", self._folder, first_line(error),
                )  # fmt: skip
            if self._is_closed:
                self.stats.unwritten += len(records)
            if in_bucket(self._folder):
                self._write_at = time.monotonic() + _BUCKET_SECONDS

    def _write(self, content: bytes) -> None:
        check_held(self._folder)
        path = self._folder / f"{_PREFIX}{self._key.version:08}.{self._next}{_SUFFIX}"
        if in_bucket(self._folder):
            write_bytes(path, self._head + content)
            self._next += 1
            return
        if self._file is None:
            write_bytes(path, self._head)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the batch's life)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) or 0 :]
        os.fsync(self._file.fileno())

    async def close(self) -> None:
        """Write pending records and close the file, which stays."""
        await self._write_pending()
        async with self._writing:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None


@dataclass
class BatchUnderWay:
    """An update's finished episodes so far, for display.

    Attributes:
        scored: how many of them have a reward.
        best, worst: the highest and the lowest reward; 0.0 if none is scored.
    """

    update: int
    episodes: int
    scored: int = 0
    best: float = 0.0
    worst: float = 0.0


class JournalReader:
    """Reads the journals of the newest version while they are written, without rereading earlier records.

    Args:
        folder: a run's `FOLDER`, on this machine's disk.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = location(folder)
        self._update = -1
        self._read: dict[epath.Path, int] = {}
        self._finished: dict[tuple[int, int], float | None] = {}

    def look(self) -> BatchUnderWay | None:
        """Return the current batch, or None."""
        segments = _segments(self._folder)
        if not segments:
            return None
        if (update := segments[-1][0]) != self._update:
            self._update, self._read, self._finished = update, {}, {}
        for version, _, path in segments:
            if version == update:
                self._read_on(path)
        rewards = [reward for reward in self._finished.values() if reward is not None]
        spread = max(rewards, default=0.0), min(rewards, default=0.0)
        return BatchUnderWay(update, len(self._finished), len(rewards), *spread)

    def _read_on(self, path: epath.Path) -> None:
        at = self._read.get(path, 0)
        with open(path, "rb") as file:
            file.seek(at)
            for content in _unframed(file.read()):
                if content is None:  # partly written
                    return
                if at:
                    record = decode_msgpack(content, _Record)
                    if record.episode is not None:
                        score = json.loads(record.episode.text)["score"]
                        self._finished[record.group, record.number] = score and score["value"]
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

    def open(self, version: int, weights: str, before: BatchJournal | None = None) -> BatchJournal:
        """Open the journal of a version of the weights and read its existing records."""
        key = BatchKey(run=self.run, identity=self.identity, version=version, weights=weights)
        return BatchJournal(self.folder, key, before)

    def forget(self, before: int | None = None, *, since: int | None = None) -> None:
        """Remove journals of versions before `before`, or from `since` on, or all. Raises as `check_held`."""
        check_held(self.folder)
        for version, _, path in _segments(location(self.folder)):
            early, late = before is not None and version < before, since is not None and version >= since
            if early or late or before is since is None:
                path.unlink(missing_ok=True)


def kept_bytes(folder: epath.Path) -> int:
    """Return the bytes of all journals in a folder."""
    return sum(path.stat().length for _, _, path in _segments(folder))


def _segments(folder: epath.Path, version: int | None = None) -> list[tuple[int, int, epath.Path]]:
    """Return the files of a version, or of all, in writing order, each with its version and number."""
    found = []
    for path in folder.iterdir() if folder.exists() else ():
        parts = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX).split(".")
        is_whole = path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX) and len(parts) == 2
        if is_whole and all(part.isascii() and part.isdecimal() for part in parts):
            found.append((int(parts[0]), int(parts[1]), path))
    return sorted(one for one in found if version in (None, one[0]))


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
