"""Episodes -> micro-batches of a few static shapes: several episodes share a row, kept apart by segment ids.

Episodes of a group begin with the same prompt, most of their tokens where tools are documented at length. It lies in a
row once, and all of them go on from it: hidden states, losses and gradients are those of whole episodes, since a token
sees what it would see there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

from astra_jax.attention.documents import going_on
from astra_jax.rollout.episode import Episode
from astra_jax.run.batch import PackedBatch
from synthesis.core.refusals import InputError

Array = Any

WORTH = 2 / 3
"""Of the work that whole episodes take, the most that rows with common prompts may take: in longer rows attention
visits more blocks of which part is hidden. On a CPU, with a million parameters: episodes of 256 tokens, 64 of them
prompt, take 0.81 of the room and 1.4 times the time, those of 704 and 512 take 0.38 and 0.62; with 135 million those of
650 and 474 take 0.23 and 0.28."""


@struct.dataclass
class PolicyBatch(PackedBatch):
    """Packed episodes, all [B, T]; everything about a token stands at the token.

    Attributes:
        loss_mask_bt: 1 where the token was sampled.
        sampler_logps_bt: float32, the sampler's logprob of the token.
        advantages_bt: float32, of the token's episode.
        old_logps_bt, episode_log_ratio_bt, episode_mismatch_bt: what `losses.PolicyTerms` says; None until the update
            has computed them, and where it need not.
        ages_bt: int32, see there; None where all tokens are drawn by the weights that are trained.
        reference_logps_bt, weights_bt: float32, see there; None where the objective does not ask for them.
        go_on: static: what `Model.forward` is to be told of documents that go on from others.
    """

    sampler_logps_bt: Array
    advantages_bt: Array
    old_logps_bt: Array | None = None
    episode_log_ratio_bt: Array | None = None
    episode_mismatch_bt: Array | None = None
    ages_bt: Array | None = None
    reference_logps_bt: Array | None = None
    weights_bt: Array | None = None
    go_on: bool = struct.field(pytree_node=False, default=False)


def bucket_for(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`.

    Raises:
        ValueError: none does.
    """
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise InputError(f"an episode of {length} tokens fits no row; raise the largest row bucket ({max(buckets)})")
    return min(fitting)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices by row, no row above `capacity`. Deterministic."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


@dataclass(frozen=True)
class _Together:
    """Episodes that lie behind one another in a row, with the beginning that they share once before them.

    Attributes:
        members: their indices.
        shared: tokens of that beginning; 0: each has its own.
    """

    members: tuple[int, ...]
    shared: int

    def length(self, lengths: Sequence[int]) -> int:
        return self.shared + sum(lengths[i] - self.shared for i in self.members)


def _shared(episodes: Sequence[Episode]) -> int:
    """Tokens of the beginning that episodes can share: all that is alike in their prompts but the last token, from
    which each one's first own token is predicted."""
    first, last = (bound(episode.token_ids for episode in episodes) for bound in (min, max))
    most = min(episode.prompt_tokens for episode in episodes)
    alike = next((i for i in range(most) if first[i] != last[i]), most)  # what the least and the greatest share, all do
    return max(0, alike - 1)


def _laid_together(episodes: Sequence[Episode], groups: Sequence[int] | None, length: int) -> list[list[_Together]]:
    """What lies in each row of `length`; a group that is too long for a row lies in several, its prompt in each."""
    lengths = [len(episode.token_ids) for episode in episodes]
    members: dict[int, list[int]] = {}
    for index in range(len(episodes)):
        members.setdefault(index if groups is None else groups[index], []).append(index)
    found: list[_Together] = []
    for group in members.values():
        shared = _shared([episodes[i] for i in group])
        for part in first_fit([lengths[i] - shared for i in group], length - shared):
            several = tuple(group[i] for i in part)
            found.append(_Together(several, shared if len(several) > 1 else 0))
    return [[found[i] for i in row] for row in first_fit([one.length(lengths) for one in found], length)]


def pack(
    episodes: Sequence[Episode],
    advantages: Sequence[float],
    *,
    row_buckets: Sequence[int],
    rows: int | None,
    packed: bool = True,
    groups: Sequence[int] | None = None,
    told: bool = False,
    update: int | None = None,
    weights: Sequence[float] | None = None,
) -> list[PolicyBatch]:
    """Lay episodes into micro-batches of [rows, bucket].

    The bucket is the smallest that holds the longest episode; where prompts lie in a row once it is that in which all
    take the fewest places, since a longer row has a prompt fewer times.

    Args:
        episodes: scored episodes.
        advantages: one for each.
        row_buckets: the allowed row lengths: as many programs are compiled as are used.
        rows: of a micro-batch; None is one.
        packed: False gives each episode a row of its own (the reference in tests).
        groups: of which group each is: what the prompts of a group have alike lies in a row once, as a document that
            its episodes go on from (`attention.documents`), where that is worth it (`WORTH`). None: each episode is
            whole.
        told: whether batches with such documents must say so: `Model.is_told_what_goes_on`.
        update: that trains on them, from the weights of this version; None leaves `ages_bt` out.
        weights: of each episode's tokens; None leaves `weights_bt` out.

    Returns:
        Micro-batches (NumPy); the last one is filled up with padding rows.
    """
    rows, go_on = rows or 1, False
    length = bucket_for(max(len(episode.token_ids) for episode in episodes), row_buckets)
    placed = _laid_together(episodes, None, length) if packed else [[_Together((i,), 0)] for i in range(len(episodes))]
    if groups is not None:

        def cost(one: tuple[int, list[list[_Together]]]) -> int:
            return -(-len(one[1]) // rows) * one[0]

        tried = [(one, _laid_together(episodes, groups, one)) for one in sorted(row_buckets) if one >= length]
        if cost(best := min(tried, key=cost)) <= WORTH * cost((length, placed)):
            length, placed = best
            go_on = told
    batches = []
    for start in range(0, len(placed), rows):
        shape = (rows, length)
        ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "loss_mask", "segment_ids", "positions")}
        floats = {name: np.zeros(shape, np.float32) for name in ("sampler_logps", "advantages")}
        if update is not None:
            ints["ages"] = np.zeros(shape, np.int32)
        if weights is not None:
            floats["weights"] = np.zeros(shape, np.float32)
        for row, together in enumerate(placed[start : start + rows]):
            at = 0
            for segment, index, first, last in _documents(together, episodes):
                episode, n = episodes[index], last - first
                span, own = (row, slice(at, at + n)), slice(first, last)
                ints["tokens"][span] = episode.token_ids[own]
                ints["loss_mask"][span] = episode.loss_mask[own]
                ints["segment_ids"][span] = segment
                ints["positions"][span] = np.arange(first, last)
                floats["sampler_logps"][span] = episode.logprobs[own]
                floats["advantages"][span] = advantages[index]
                if weights is not None:
                    floats["weights"][span] = weights[index]
                if update is not None:
                    ages = (update - np.asarray(episode.versions[own])) * np.asarray(episode.loss_mask[own])
                    ints["ages"][span] = ages
                at += n
        arrays = {f"{name}_bt": array for name, array in (ints | floats).items()}
        batches.append(PolicyBatch(**arrays, go_on=go_on))
    return batches


def _documents(together: Sequence[_Together], episodes: Sequence[Episode]) -> Iterator[tuple[int, int, int, int]]:
    """(segment id, an episode, first and after the last of its tokens) of a row's documents."""
    number = 0
    for one in together:
        prompt = 0
        if one.shared:
            number = prompt = number + 1
            yield prompt, one.members[0], 0, one.shared
        for index in one.members:
            number += 1
            segment = going_on(number, prompt) if prompt else number
            yield segment, index, one.shared, len(episodes[index].token_ids)
