"""A batch under way, on disk: what a killed run goes on from. Finished episodes, and the finished turns of open ones.

    journal = BatchJournal(workdir / "rollouts", key)
    done = journal.take_episode(group, number)  # of an earlier process
    await journal.keep_turn(group, number, place, turn)  # when this returns, no kill undoes it

Each process that fills the batch of an update writes a file of its own, `update_<update>.<n>.journal` (in a bucket,
whose objects cannot be appended to, one for each write): records that follow each other, each of its length, the
SHA-256 of its content, and its content. The first one is the batch's key: who samples what by which weights, to the
bit. A file of another key is of no use to anybody and is removed; what is cut off or damaged ends its file. A file
stays until a checkpoint that is older than the newest is past its update: a run that falls back to that one finds all
batches since.

A batch that is full is said, with its groups: a run that goes on trains on these, whatever else it would come to now,
where an episode was voided, or the deadline had passed. One that was given up is said too: what it had sampled in vain
is not sampled again.

Where rollouts go on across updates (`async_steps`) a file has what was finished while the policy had one version's
weights, and that version's update's batch (`ahead.py`). What an episode has of earlier versions is in their files.
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

from astra_jax.rollout.episode import Episode, FinishedTurn
from astra_jax.rollout.filling import FillCounts, Group, Lengths
from astra_jax.rollout.packed import Packed, packed, packed_turn, unpacked, unpacked_turn
from synthesis.core.datasets import Folder
from synthesis.core.files import RemovedError, check_held, first_line, in_bucket, location, write_bytes
from synthesis.core.typed import decode_json, decode_msgpack

FOLDER = "rollouts"
"""Below a run's workdir."""

_FORMAT = 2
_SUFFIX = ".journal"
_HEAD = struct.Struct("<Q32s")
_BUCKET_SECONDS = 2.0
"""Between two objects, of which a batch that takes hours has thousands."""


class BatchKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of a batch must share with whoever goes on from them.

    Attributes:
        run: of `identity.run_id`.
        identity: digest of `identity.run_identity`: settings, model, environments, tokenizer.
        update: that trains on the batch.
        version: of the weights that draw it.
        weights: their digest.
        next_index: the batch's first group's number: those before it are trained on, or wait, elsewhere; 0 where
            groups are of no one batch.
    """

    run: str
    identity: str
    update: int
    version: int
    weights: str
    next_index: int


class TakenOver(msgspec.Struct):
    """What became of an earlier process's records.

    Attributes:
        groups: that were finished, or of which episodes were.
        episodes: finished ones.
        turns: finished ones, of open episodes.
        anew: episodes that were open and could not be gone on from: a world answered otherwise than before.
        dropped: files of another key, and records that are damaged or out of their order.
        unkept: records of this process that could not be written.
    """

    groups: int = 0
    episodes: int = 0
    turns: int = 0
    anew: int = 0
    dropped: int = 0
    unkept: int = 0


class TakenBatch(msgspec.Struct, frozen=True):
    """What an update is trained on, or that it was given up, and all that became of groups since the one before.

    Attributes:
        next_index: of the next group to be started.
        entered: (number, environment, oldest version, episodes that are scored) of each group that was found worth
            training on, in this order.
        trained: numbers of the batch's groups, some of which may have entered before; none: `max_groups_per_step` were
            sampled, and there was no batch.
        ended: with `async_steps`, numbers of groups that ended without entering.
        filling: how filling went, as JSON values.
        lengths: of the run's episodes by then, strictly online before the batch is taken.
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
    """An episode, or a turn of one. `place` is the turn's, from 0; -1: the episode is finished; -2: none of these, but
    the batch of the file's update. `seconds`: since the batch was begun."""

    group: int
    number: int
    place: int
    seconds: float
    content: Packed


class BatchJournal:
    """The journal of one batch, read and gone on with.

    Args:
        folder: on disk or in a bucket.
        before: the journal that this one goes on with: what is there of it counts here too.

    Attributes:
        taken: what became of what was there.
        seconds: that earlier processes spent on the batch.
        batch: what its update is trained on, or that it was given up; None: neither is said.
    """

    def __init__(self, folder: Folder, key: BatchKey, before: BatchJournal | None = None) -> None:
        self.taken: TakenOver = TakenOver() if before is None else before.taken
        self.seconds = 0.0
        self.batch: TakenBatch | None = None
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

    # ------------------------------------------------------------------------------------------------- what was there

    def _read(self, path: epath.Path) -> None:
        records = _unframed(path.read_bytes())
        if next(records, b"") != self._head[_HEAD.size :]:
            self.taken.dropped += 1
            path.unlink()
            return
        for content in records:
            if content is None:  # the end of a file that was being written, or damage: nothing behind it counts
                self.taken.dropped += 1
                return
            record = decode_msgpack(content, _Record)
            self.seconds = max(self.seconds, record.seconds)
            where = record.group, record.number
            if record.place == -2:
                self.batch = decode_json(record.content.text, TakenBatch)
                continue
            if record.place == -1:
                self._episodes[where] = unpacked(record.content)
                continue
            if record.place == 0:  # it may have been begun anew
                self._turns[where] = []
            if record.place == len(self._turns[where]):
                self._turns[where].append(unpacked_turn(record.content))
            else:
                self.taken.dropped += 1

    def take_episode(self, group: int, number: int) -> Episode | None:
        """A finished episode; None: there is none."""
        if (found := self._episodes.pop((group, number), None)) is not None:
            self._turns.pop((group, number), None)
            self.taken.episodes += 1
            self._note(group)
        return found

    def take_turns(self, group: int, number: int) -> list[FinishedTurn]:
        """The finished turns of an open episode, from its first one on."""
        found = self._turns.pop((group, number), [])
        self.taken.turns += len(found)
        if found:
            self._note(group)
        return found

    def take_entered(self, but: Collection[int] = ()) -> list[Group]:
        """The groups that entered before the `batch` was full, in this order.

        Args:
            but: numbers of those that are not asked for.

        Returns:
            Those of which all episodes are here.
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
        """Whether `take_entered` would give them all."""
        there = Counter(index for index, _ in self._episodes)
        return self.batch is not None and all(there[index] == count for index, _, _, count in self.batch.entered)

    def begun_anew(self, turns: int) -> None:
        """So many turns of an episode could not be gone on from."""
        self.taken.anew += 1
        self.taken.turns -= turns

    def counts(self) -> dict[str, float]:
        """`taken`, for the metrics."""
        return {f"journal_{name}": float(count) for name, count in msgspec.structs.asdict(self.taken).items()}

    def count_anew(self) -> None:
        """Forget what `taken` counts."""
        self._groups.clear()
        for name in self.taken.__struct_fields__:
            setattr(self.taken, name, 0)

    def _note(self, group: int) -> None:
        self._groups.add(group)
        self.taken.groups = len(self._groups)

    # --------------------------------------------------------------------------------------------------- what is kept

    async def keep_turn(self, group: int, number: int, place: int, turn: FinishedTurn) -> None:
        """Returns when the turn is on the disk."""
        await self._keep(_Record(group, number, place, self._elapsed(), packed_turn(turn)))

    async def keep_episode(self, group: int, number: int, episode: Episode) -> None:
        """Returns when the finished episode is on the disk."""
        await self._keep(_Record(group, number, -1, self._elapsed(), packed(episode)))

    async def keep_batch(self, batch: TakenBatch) -> None:
        """Returns when it is on the disk what the update is trained on, or that it was given up."""
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
        """One write after the other, each of all that was finished during the one before."""
        try:
            while self._pending and self._kept is not None:
                records, kept = self._pending, self._kept
                self._pending, self._kept = [], None
                try:
                    if not self._failed:
                        await asyncio.to_thread(self._write, b"".join(records))
                except RemovedError as error:  # the run ends by it: there is no disk where room could be made
                    self._failed = True
                    kept.set_exception(error)
                    kept.exception()  # whoever waits for it may be cancelled by then
                except Exception as error:  # the disk's, or what a bucket's client says, which has no common base
                    self._failed = True
                    logging.warning(
                        "%s cannot be written (%s); until the next batch, what is finished would be lost with this "
                        "process: make room there", self._folder, first_line(error),
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
        """Write what is still to be written, and close the file, which stays."""
        self._closed = True
        if self._writer is not None:
            await asyncio.shield(self._writer)
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class BatchUnderWay:
    """What journals hold of a batch, as it is seen from outside.

    Attributes:
        episodes: finished ones.
        open_turns: finished turns of episodes that are not.
        seconds: from the batch's beginning to the newest record.
    """

    update: int
    episodes: int = 0
    open_turns: int = 0
    seconds: float = 0.0


class Onlooker:
    """Reads the journals of the newest batch while they are written; what was read before is not read again.

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
        """The batch now; None where there is none."""
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
                if content is None:  # not all of it is written yet
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
    """The journals of a run; the first host's alone.

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
        """A batch's; reads what is there of it."""
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
        """Remove those of updates before this one, or from this one on, or all. Raises as `holding`."""
        check_held(self.folder)
        for path in _segments(location(self.folder), None):
            update = _update(path)
            early, late = before is not None and update < before, since is not None and update >= since
            if early or late or before is since is None:
                path.unlink(missing_ok=True)


def kept_bytes(folder: epath.Path) -> int:
    """Of all journals there."""
    return sum(path.stat().length for path in _segments(folder, None))


def _stem(update: int) -> str:
    return f"update_{update:08}"


def _segments(folder: epath.Path, update: int | None) -> list[epath.Path]:
    """The files of an update, or of all, in the order in which they were written."""
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
    """Each record's content; None, at last, where the rest is none."""
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
