"""Episodes -> micro-batches of a few static shapes: several episodes share a row, kept apart by segment ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from astra_jax.rollout.episode import Episode
from astra_jax.run.batch import PackedBatch
from synthesis.core.refusals import InputError

Array = Any


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
    """

    sampler_logps_bt: Array
    advantages_bt: Array
    old_logps_bt: Array | None = None
    episode_log_ratio_bt: Array | None = None
    episode_mismatch_bt: Array | None = None
    ages_bt: Array | None = None


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


def pack(
    episodes: Sequence[Episode],
    advantages: Sequence[float],
    *,
    row_buckets: Sequence[int],
    rows: int | None,
    packed: bool = True,
    update: int | None = None,
) -> list[PolicyBatch]:
    """Lay episodes into micro-batches of [rows, bucket], bucket being the smallest that holds the longest episode.

    Args:
        episodes: scored episodes.
        advantages: one for each.
        row_buckets: the allowed row lengths: as many programs are compiled as are used.
        rows: of a micro-batch; None is one.
        packed: False gives each episode a row of its own (the reference in tests).
        update: that trains on them, from the weights of this version; None leaves `ages_bt` out.

    Returns:
        Micro-batches (NumPy); the last one is filled up with padding rows.
    """
    lengths = [len(episode.token_ids) for episode in episodes]
    length = bucket_for(max(lengths), row_buckets)
    placed = first_fit(lengths, length) if packed else [[i] for i in range(len(episodes))]
    rows = rows or 1
    batches = []
    for start in range(0, len(placed), rows):
        shape = (rows, length)
        ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "loss_mask", "segment_ids", "positions")}
        floats = {name: np.zeros(shape, np.float32) for name in ("sampler_logps", "advantages")}
        if update is not None:
            ints["ages"] = np.zeros(shape, np.int32)
        for row, members in enumerate(placed[start : start + rows]):
            at = 0
            for segment, index in enumerate(members, start=1):
                episode, n = episodes[index], lengths[index]
                span = (row, slice(at, at + n))
                ints["tokens"][span] = episode.token_ids
                ints["loss_mask"][span] = episode.loss_mask
                ints["segment_ids"][span] = segment
                ints["positions"][span] = np.arange(n)
                floats["sampler_logps"][span] = episode.logprobs
                floats["advantages"][span] = advantages[index]
                if update is not None:
                    ints["ages"][span] = (update - np.asarray(episode.versions)) * np.asarray(episode.loss_mask)
                at += n
        batches.append(PolicyBatch(**{f"{name}_bt": array for name, array in (ints | floats).items()}))
    return batches
