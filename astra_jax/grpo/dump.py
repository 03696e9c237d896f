"""Dataset of a run's batches, to train on again (`replay.py`) and to inspect (`astra inspect`).

    dump = BatchDump(workdir / FOLDER, run=run, identity=identity, tokenizer=tokenizer)
    dump.begin(step)  # removes later updates of an earlier process
    line = dump.write(update, groups, filling)  # a shard: complete or absent
    dump.commit(line, before, after)  # adds it to the dataset

The folder has a card, and for each update a dataset of its own, `update_<update>`, whose records are the batch's
groups. A shard is written before the card names it with its digest, so the folder is always consistent. A truncated,
swapped or missing shard causes an error that names it. A record is a `PackedGroup`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from astra_jax.base.errors import InputError
from astra_jax.base.files import location, on_disk, write_text
from astra_jax.base.typed import convert_to
from astra_jax.rollout.records import Group, PackedGroup, pack_group, unpack_group
from astra_jax.run.identity import differences
from synthesis.core.datasets import (
    CARD_FILE,
    DatasetError,
    Folder,
    card_text,
    each_record,
    read_card,
    read_record,
    write_dataset,
)

if TYPE_CHECKING:  # the pages want neither
    from etils import epath

    from astra_jax.tokenizer import ChatTokenizer

FOLDER = "batches"
"""Folder name below a run's workdir."""

_QUESTION = 400
_SHARD = "update_"


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a group in its shard's card.

    Attributes:
        question: the start of the user's first message.
        update: the version that sampled its oldest token.
        rewards, deviation: of its episodes.
        tokens: number of sampled tokens.
        versions: the oldest and the newest version of its tokens.
    """

    index: int
    environment_id: str
    question: str
    update: int
    rewards: list[float]
    deviation: float
    tokens: int
    versions: tuple[int, int]


class DumpedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an update in the dataset's card.

    Attributes:
        groups, episodes, tokens: counts in its batch; only sampled tokens.
        reward: the mean.
        versions: the oldest and the newest version of its tokens.
        digest: of its shard.
        before, after: digests of the weights before and after the update (`TrainState.digest`).
    """

    update: int
    groups: int
    episodes: int
    tokens: int
    reward: float
    versions: tuple[int, int]
    digest: str
    before: str = ""
    after: str = ""


class BatchDump:
    """Writer of a run's batches, on the first host only.

    Args:
        folder: on disk or in a bucket.
        run: of `identity.run_id`.
        identity: of `identity.run_identity`.
        tokenizer: for the text of tokens.
    """

    def __init__(self, folder: Folder, *, run: str, identity: Mapping[str, Any], tokenizer: ChatTokenizer) -> None:
        self._folder, self._run, self._identity, self._tokenizer = location(folder), run, dict(identity), tokenizer
        self._updates: list[DumpedUpdate] = []

    def begin(self, step: int) -> None:
        """Start recording after `step` updates.

        Raises:
            DatasetError: the folder has other contents.
        """
        if (self._folder / CARD_FILE).exists():
            there = DumpedBatches(self._folder)
            self._updates = [line for line in there.updates.values() if line.update < step]
            if self._updates and (said := differences(there.identity, self._identity)):
                raise DatasetError(
                    f"{self._folder} has batches of other settings, and a replay has one configuration: {said}. Move "
                    "the folder elsewhere, or set --config.grpo.dump_batches=false"
                )
        elif self._folder.exists() and any(self._folder.iterdir()):
            raise DatasetError(f"{self._folder} has files and no {CARD_FILE}; move them elsewhere, or delete them")
        self._write_card()  # first: shards that it does not name are not in the dataset
        kept = {shard_folder(self._folder, line.update) for line in self._updates}
        for path in [*self._folder.iterdir()]:
            if path.name.lstrip(".").startswith(_SHARD) and path not in kept:
                path.rmtree()

    def write(self, update: int, groups: Sequence[Group], filling: Mapping[str, Any]) -> DumpedUpdate:
        """Write the shard of an update.

        Args:
            groups: its batch, in order.
            filling: the fill report as JSON values.

        Raises:
            DatasetError, OSError, StorageError: it could not be written.
        """
        lines = [_line(group) for group in groups]
        card = {"update": update, "filling": dict(filling), "groups": msgspec.to_builtins(lines)}
        with on_disk(self._folder) as folder:
            shard = Path(shard_folder(folder, update))
            digest = write_dataset(shard, PackedGroup, map(self._record, groups), card=card)
        rewards = [*chain.from_iterable(line.rewards for line in lines)]
        return DumpedUpdate(
            update=update,
            groups=len(groups),
            episodes=len(rewards),
            tokens=sum(line.tokens for line in lines),
            reward=float(np.mean(rewards)),
            versions=(min(line.versions[0] for line in lines), max(line.versions[1] for line in lines)),
            digest=digest,
        )

    def commit(self, line: DumpedUpdate, before: str, after: str) -> None:
        """Make a shard part of the dataset, when its update is done. Raises as `write`."""
        self._updates.append(msgspec.structs.replace(line, before=before, after=after))
        self._write_card()

    def _record(self, group: Group) -> PackedGroup:
        occurring = sorted({*chain.from_iterable(episode.token_ids for episode in group.episodes)})
        return pack_group(group, {number: self._tokenizer.decode([number]) for number in occurring})

    def _write_card(self) -> None:
        card = {"run": self._run, "identity": self._identity, "updates": msgspec.to_builtins(self._updates)}
        digest = hashlib.sha256("".join(line.digest for line in self._updates).encode()).hexdigest()
        count = sum(line.groups for line in self._updates)
        write_text(self._folder / CARD_FILE, card_text(PackedGroup, count, digest, card))


class DumpedBatches:
    """Batches written by a run.

    Attributes:
        card: the dataset's.
        run, identity: as in `BatchDump`.
        updates: by number.

    Raises:
        DatasetError: the dataset does not exist.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = location(folder)
        self.card: dict[str, Any] = read_card(self.folder)
        if self.card["kind"] != PackedGroup.__name__:
            raise DatasetError(
                f"{folder} holds {self.card['kind']} records, not the batches (PackedGroup) that a run of this version "
                "writes with dump_batches; pass the folder `batches` of such a run's workdir"
            )
        if "updates" not in self.card:
            raise DatasetError(f"{folder} is the batch of one update; give the folder that it is in")
        try:
            lines = convert_to(self.card["updates"], list[DumpedUpdate])
            self.run = convert_to(self.card.get("run"), str)
            self.identity = convert_to(self.card.get("identity"), dict[str, Any])
        except msgspec.ValidationError as error:
            raise DatasetError(
                f"{self.folder / CARD_FILE} is not a card of batches ({error}); have them written again"
            ) from None
        self.updates = {line.update: line for line in lines}

    def check_there(self, first: int, last: int) -> None:
        """Check that the batches of updates from `first` to before `last` exist.

        Raises:
            InputError: one is missing.
        """
        for update in range(first, last):
            if update not in self.updates:
                numbers = sorted(self.updates)
                there = f"updates {numbers[0]} to {numbers[-1]}" if numbers else "none"
                raise InputError(
                    f"{self.folder} has no batch of update {update}: it has {there}; lower steps (they are {last}), or "
                    "have all of them written, from the run's start on (dump_batches)"
                )

    def shard(self, update: int) -> tuple[list[GroupLine], dict[str, Any]]:
        """Return the groups and the fill report of an update, from the shard's card.

        Raises:
            DatasetError: the shard is missing, or differs from the one in the dataset's card.
        """
        path = shard_folder(self.folder, update)
        card = read_card(path)
        if update not in self.updates or card["digest"] != self.updates[update].digest:
            raise DatasetError(f"{path} is another batch than {self.folder / CARD_FILE} says; have both written again")
        try:
            filling = convert_to(card.get("filling"), dict[str, Any])
            return convert_to(card.get("groups"), list[GroupLine]), filling
        except msgspec.ValidationError as error:
            raise DatasetError(
                f"{path / CARD_FILE} is not a card of a batch ({error}); have it written again"
            ) from None

    def groups(self, update: int) -> tuple[list[Group], dict[str, Any]]:
        """Return the batch of an update, checked by its digest, and its fill report.

        Raises:
            DatasetError: it is missing, truncated, or differs from the one in the card.
        """
        _, filling = self.shard(update)
        path = shard_folder(self.folder, update)
        records = list(each_record(path, PackedGroup))  # read all records first, which checks the digest
        return [_whole(path, record) for record in records], filling

    def group(self, update: int, place: int) -> tuple[Group, dict[int, str]]:
        """Return one group by its index in the batch, and the text of its tokens. Raises as `groups`, except for its
        digest."""
        path = shard_folder(self.folder, update)
        record = read_record(path, PackedGroup, place)
        return _whole(path, record), record.pieces


def shard_folder(folder: Folder, update: int) -> epath.Path:
    """Return the folder with the batch of an update."""
    return location(folder) / f"{_SHARD}{update:08}"


def _whole(path: Folder, record: PackedGroup) -> Group:
    try:
        return unpack_group(record)
    except (ValueError, RecursionError) as error:  # errors of msgspec and json are ValueErrors
        raise DatasetError(f"{path}: group {record.index} is corrupt ({error}); have it written again") from None


def _sendable(text: str) -> str:
    """Replace lone surrogates, which JSON files cannot contain."""
    return text.encode("utf-8", "replace").decode()


def _line(group: Group) -> GroupLine:
    versions = [*chain.from_iterable(episode.sampled_by for episode in group.episodes)]
    question = next((one.content for one in group.episodes[0].messages if one.role == "user"), "")
    return GroupLine(
        index=group.index,
        environment_id=_sendable(group.environment_id),
        question=_sendable(question[:_QUESTION]),
        update=group.update,
        rewards=group.rewards,
        deviation=group.deviation,
        tokens=group.sampled_tokens,
        versions=(min(versions, default=group.update), max(versions, default=group.update)),
    )
