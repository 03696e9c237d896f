"""Bit-exact training on the recorded batches of a run (`dump.py`).

An update depends only on the batch, the weights, the optimizer's state and the settings. So a run with the same
settings and initial weights reproduces the weights after each update without sampling. Their digests are checked, and a
difference ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.typed import convert_to
from astra_jax.grpo.dump import DumpedBatches
from astra_jax.grpo.exhaustion import Exhaustion
from astra_jax.grpo.rollouts import FillReport, GroupBatch
from astra_jax.rollout.sampler import SamplerBase
from astra_jax.run.identity import differences
from synthesis.core.datasets import DatasetError, Folder


class Replay:
    """Source of another run's recorded batches, used in place of `Rollouts`.

    Args:
        folder: `workdir/batches` of that run.

    Attributes:
        folder: the same, absolute.
        run: its id.

    Raises:
        DatasetError: there are no batches.
    """

    def __init__(self, folder: Folder) -> None:
        self._batches = DumpedBatches(folder)
        self.folder = self._batches.folder
        self.run = self._batches.run
        self._batch: GroupBatch | None = None

    @property
    def environments(self) -> str:
        """Digest of the environments that the batches were sampled from."""
        return str(self._batches.identity.get("environments", ""))

    def check(self, identity: Mapping[str, Any], steps: int) -> None:
        """Check that the batches match a run of this identity.

        Raises:
            InputError: settings, model or tokenizer differ, or an update is missing.
        """
        if said := differences(self._batches.identity, identity):
            raise InputError(
                f"{self.folder} has the batches of a run of other settings: {said}. Use those settings, and "
                "its --weights and --tokenizer"
            )
        self._batches.check_there(0, steps)

    async def set_version(self, version: int, weights: str = "") -> None:
        """Check that the weights after `version` updates equal the recorded ones.

        Raises:
            InputError: they differ.
        """
        here, updates = self.folder, self._batches.updates
        self._batches.check_there(max(0, version - 1), max(1, version))
        if version and weights != updates[version - 1].after:
            raise InputError(
                f"update {version - 1} gave other weights than in the run that wrote {here}: another machine, mesh, "
                "version of JAX or XLA, row_buckets, remat or micro_batch_size rounds otherwise; use the same"
            )
        if not version and weights != updates[0].before:
            raise InputError(f"the run that wrote {here} started from other weights; give those as --weights")

    async def fill(self, update: int, on_missing: Callable[[int], None] = lambda missing: None) -> None:
        """Read the batch of an update.

        Raises:
            DatasetError: it cannot be read.
        """
        groups, filling = await asyncio.to_thread(self._batches.groups, update)
        try:
            self._batch = GroupBatch(groups, convert_to(filling, FillReport))
        except msgspec.ValidationError as error:
            raise DatasetError(f"{self.folder}: update {update}: {error}; have it written again") from None
        on_missing(0)

    def take(self) -> GroupBatch | None:
        """Return the batch and remove it."""
        batch, self._batch = self._batch, None
        return batch

    def exhaustion(self) -> Exhaustion:
        """Never called, since `fill` raises for a missing batch."""
        raise AssertionError("every update of a replay has a batch")

    def state(self) -> dict[str, Any]:
        """Return an empty state: all batches are on disk."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `state`."""

    async def close(self) -> int:
        """Return 0: no episode is running."""
        return 0


class NoSampler(SamplerBase):
    """Sampler of a run that replays batches: nothing is sampled."""
