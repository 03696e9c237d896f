"""A group of episodes in memory, and the one form in which groups and episodes are stored.

`PackedEpisode` is an episode in checkpoints, journals and datasets, and in messages between hosts; `PackedGroup` is a
group there. JSON of thousands of numbers is slow and long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from astra_jax.base.typed import convert_to
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.sessions import Masked
from synthesis.core.datasets import BinaryRecord


def group_deviation(rewards: Sequence[float]) -> float:
    """Return the population standard deviation of rewards; exactly 0 if they are equal (rounding would give 1e-17)."""
    values = np.asarray(rewards, dtype=np.float64)
    return float(values.std()) if values.size and values.min() < values.max() else 0.0


class Group(msgspec.Struct, frozen=True):
    """Episodes of one prompt.

    Attributes:
        update: the update whose weights sampled the oldest token.
        episodes: those with a score.
        masked: the reason for each episode without a score; not stored.
    """

    index: int
    environment_id: str
    update: int
    episodes: list[Episode]
    masked: list[Masked] = []

    @classmethod
    def from_episodes(cls, index: int, update: int, episodes: Iterable[Episode]) -> Group:
        """Return the group of these scored episodes."""
        found = list(episodes)
        return cls(index, found[0].environment_id if found else "", update, found)

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @property
    def deviation(self) -> float:
        return group_deviation(self.rewards)

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(episode.loss_mask) for episode in self.episodes)


class PackedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode as bytes: 2 or 4 for each token, plus 4 for each sampled one.

    Attributes:
        tokens: number of tokens, T.
        token_ids: [T] little-endian unsigned integers of 2 or 4 bytes.
        spans: [S, 2] little-endian int32, one per run of tokens of a kind: its length, and the version that sampled it,
            or -1 if not sampled.
        logprobs: little-endian float32 of the sampled tokens only; training computes in this dtype.
        text: the other fields as JSON, which supports integers of any length and lone surrogates, unlike msgpack.
    """

    tokens: int
    token_ids: bytes
    spans: bytes
    logprobs: bytes
    text: bytes


class PackedGroup(BinaryRecord, frozen=True, kw_only=True):
    """A stored group; fields as in `Group`. The environment's id is in the episodes.

    Attributes:
        pieces: in datasets, the text of each token id that occurs; part of a character is U+FFFD.
    """

    index: int
    update: int
    episodes: list[PackedEpisode]
    pieces: dict[int, str] = {}


def pack_episode(episode: Episode) -> PackedEpisode:
    """Return the episode as bytes."""
    rest = msgspec.structs.replace(episode, token_ids=[], loss_mask=[], logprobs=[], versions=[])
    ids, sampled = np.asarray(episode.token_ids, np.int64), np.asarray(episode.loss_mask, bool)
    kinds = np.where(sampled, np.asarray(episode.versions, np.int64), -1)
    starts = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]) if len(kinds) else [])
    counts = np.diff(np.append(starts, len(kinds)))
    return PackedEpisode(
        tokens=len(ids),
        token_ids=ids.astype("<u2" if ids.max(initial=0) < 1 << 16 else "<u4").tobytes(),
        spans=np.stack([counts, kinds[starts]], axis=1).astype("<i4").tobytes(),
        logprobs=np.asarray(episode.logprobs, "<f4")[sampled].tobytes(),
        text=json.dumps(msgspec.to_builtins(rest)).encode(),
    )


def unpack_episode(packed: PackedEpisode) -> Episode:
    """Return the episode that was packed, its logprobs rounded to float32.

    Raises:
        ValueError: its parts are invalid or inconsistent.
    """
    width = len(packed.token_ids) // max(1, packed.tokens)
    ids = np.frombuffer(packed.token_ids, "<u2" if width == 2 else "<u4")
    counts, kinds = np.frombuffer(packed.spans, "<i4").reshape(-1, 2).T
    if len(ids) != packed.tokens or counts.min(initial=1) < 1 or counts.sum() != packed.tokens:
        raise ValueError(f"{len(ids)} token ids in {counts.sum()} positions of {packed.tokens}")
    versions = np.repeat(kinds, counts)
    sampled = versions >= 0
    logprobs = np.zeros(packed.tokens, np.float32)
    logprobs[sampled] = np.frombuffer(packed.logprobs, "<f4")
    values = {
        "token_ids": ids.tolist(),
        "loss_mask": sampled.astype(int).tolist(),
        "logprobs": logprobs.tolist(),
        "versions": np.where(sampled, versions, 0).tolist(),
    }
    rest = json.loads(packed.text)
    if rest["finish"] == "voided":  # so earlier versions call it
        rest["finish"] = "masked"
    return convert_to(rest | values, Episode)


def pack_group(group: Group, pieces: Mapping[int, str] | None = None) -> PackedGroup:
    """Return the group as bytes, without its masked episodes."""
    episodes = [pack_episode(episode) for episode in group.episodes]
    return PackedGroup(index=group.index, update=group.update, episodes=episodes, pieces=dict(pieces or {}))


def unpack_group(packed: PackedGroup) -> Group:
    """Return the group that was packed. Raises as `unpack_episode`."""
    return Group.from_episodes(packed.index, packed.update, map(unpack_episode, packed.episodes))
