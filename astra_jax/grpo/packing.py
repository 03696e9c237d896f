"""Packing of episodes into micro-batches of a few static shapes. Episodes share rows, separated by segment ids.

Episodes of a group start with the same prompt, most of their tokens if tools have long documents. A row has the prompt
once, and all of them continue it. Hidden states, losses and gradients equal those of whole episodes, since each token
attends to the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

from astra_jax.attention.documents import prefix_segment_id
from astra_jax.base.errors import InputError
from astra_jax.rollout.episode import Episode
from astra_jax.run.batch import PackedBatch

Array = Any

WORTH = 2 / 3
"""Largest cost of rows with shared prompts, relative to whole episodes, at which they are used. Attention is less
efficient in longer rows, since it visits more partly masked blocks.

Measured on a CPU with a million parameters: episodes of 256 tokens with prompts of 64 need 0.81 of the positions and
1.4 times the time. Those of 704 with 512 need 0.38 and 0.62. With 135 million parameters, those of 650 with 474 need
0.23 and 0.28.
"""


@struct.dataclass
class PolicyBatch(PackedBatch):
    """Packed episodes, all [B, T]; every value is at the position of its token.

    Attributes:
        loss_mask_bt: 1 if the token was sampled.
        sampler_logps_bt: float32, the sampler's logprob of the token.
        advantages_bt: float32, of the token's episode.
        old_logps_bt, episode_log_ratio_bt, episode_mismatch_bt: see `losses.PolicyTerms`; None until the update
            computes them, or if not needed.
        ages_bt: int32, see `losses.PolicyTerms`; None if all tokens are sampled by the trained weights.
        reference_logps_bt, weights_bt: float32, see `losses.PolicyTerms`; None if the objective does not need them.
        has_shared_prefix: static: whether `Model.forward` must support documents that continue others.
    """

    sampler_logps_bt: Array
    advantages_bt: Array
    old_logps_bt: Array | None = None
    episode_log_ratio_bt: Array | None = None
    episode_mismatch_bt: Array | None = None
    ages_bt: Array | None = None
    reference_logps_bt: Array | None = None
    weights_bt: Array | None = None
    has_shared_prefix: bool = struct.field(pytree_node=False, default=False)


def bucket_for(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket of at least `length`.

    Raises:
        ValueError: all are smaller.
    """
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise InputError(f"an episode of {length} tokens fits no row; raise the largest row bucket ({max(buckets)})")
    return min(fitting)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by first-fit decreasing: return indices by row, with no row above `capacity`. Deterministic."""
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
    """Consecutive episodes in a row, after the prefix that they share.

    Attributes:
        members: their indices.
        shared: tokens of that prefix; 0 if each has its own.
    """

    members: tuple[int, ...]
    shared: int

    def length(self, lengths: Sequence[int]) -> int:
        return self.shared + sum(lengths[i] - self.shared for i in self.members)


def _shared(episodes: Sequence[Episode]) -> int:
    """Return the number of prefix tokens that episodes can share: the common part of their prompts except the last
    token, which predicts each one's first own token."""
    first, last = (bound(episode.token_ids for episode in episodes) for bound in (min, max))
    most = min(episode.prompt_tokens for episode in episodes)
    alike = next((i for i in range(most) if first[i] != last[i]), most)  # the extremes share what all share
    return max(0, alike - 1)


def _laid_together(episodes: Sequence[Episode], groups: Sequence[int] | None, length: int) -> list[list[_Together]]:
    """Return the contents of each row of `length`. A group too long for a row is split over several, each with its
    prompt."""
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
    """Pack episodes into micro-batches of [rows, bucket].

    The bucket is the smallest that fits the longest episode. With shared prompts it is the one with the fewest
    positions in total, since longer rows repeat a prompt less often. `told` states whether batches with shared prompts
    must be marked: `Model.needs_prefix_flag`.

    Args:
        episodes: scored episodes.
        advantages: one for each.
        row_buckets: the allowed row lengths; one program is compiled for each length in use.
        rows: of a micro-batch; None is one.
        packed: False gives each episode its own row (the reference in tests).
        groups: the group of each episode. A row has the common prefix of a group's prompts once, as a document that its
            episodes continue (`attention.documents`), if that saves enough (`WORTH`). None: prompts are not shared.
        update: the update that trains on them, from the weights of this version; None omits `ages_bt`.
        weights: of each episode's tokens; None omits `weights_bt`.

    Returns:
        Micro-batches (NumPy); the last one is padded with empty rows.
    """
    rows, has_shared_prefix = rows or 1, False
    length = bucket_for(max(len(episode.token_ids) for episode in episodes), row_buckets)
    placed = _laid_together(episodes, None, length) if packed else [[_Together((i,), 0)] for i in range(len(episodes))]
    if groups is not None:

        def cost(one: tuple[int, list[list[_Together]]]) -> int:
            return -(-len(one[1]) // rows) * one[0]

        tried = [(one, _laid_together(episodes, groups, one)) for one in sorted(row_buckets) if one >= length]
        if cost(best := min(tried, key=cost)) <= WORTH * cost((length, placed)):
            length, placed = best
            has_shared_prefix = told
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
        batches.append(PolicyBatch(**arrays, has_shared_prefix=has_shared_prefix))
    return batches


def _documents(together: Sequence[_Together], episodes: Sequence[Episode]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (segment id, episode, index of its first token, index after its last) of each document in a row."""
    number = 0
    for one in together:
        prompt = 0
        if one.shared:
            number = prompt = number + 1
            yield prompt, one.members[0], 0, one.shared
        for index in one.members:
            number += 1
            segment = prefix_segment_id(number, prompt) if prompt else number
            yield segment, index, one.shared, len(episodes[index].token_ids)
