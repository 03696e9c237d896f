"""Training again on the batches that a run has written (`dump.py`), to the bit.

What an update makes of a batch depends on the weights, the optimizer's state, the batch and the settings alone. So a
run of the same settings from the same weights comes to the same weights after each update, with nobody who samples;
that it did is seen by their digests, and where it did not it ends there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from astra_jax.grpo.dump import DumpedBatches
from astra_jax.grpo.exhaustion import Exhaustion
from astra_jax.grpo.rollouts import FillReport, GroupBatch
from astra_jax.rollout.policy import SamplerBase
from astra_jax.run.identity import differences
from synthesis.core.datasets import DatasetError, Folder
from synthesis.core.refusals import InputError
from synthesis.core.typed import convert_to


class Replay:
    """Gives a run the batches of another one; stands where `Rollouts` stands else.

    Args:
        folder: `workdir/batches` of that run.

    Attributes:
        folder: as it was given, absolute.
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
        """The digest of what the batches were sampled from."""
        return str(self._batches.identity.get("environments", ""))

    def check(self, identity: Mapping[str, Any], steps: int) -> None:
        """See that a run of this identity is one that the batches are of.

        Raises:
            InputError: settings, model or tokenizer are others; or an update is missing.
        """
        if said := differences(self._batches.identity, identity):
            raise InputError(
                f"{self.folder} has the batches of a run of other settings: {said}. Use those settings, and "
                "its --weights and --tokenizer"
            )
        self._batches.check_there(0, steps)

    async def follow(self, version: int, weights: str = "") -> None:
        """See that the weights after so many updates are what they were.

        Raises:
            InputError: they are not.
        """
        here, updates = self.folder, self._batches.updates
        self._batches.check_there(max(0, version - 1), max(1, version))
        if version and weights != updates[version - 1].after:
            raise InputError(
                f"update {version - 1} came to other weights than in the run that wrote {here}: another machine, mesh, "
                "version of JAX or XLA, row_buckets, remat or micro_batch_size rounds otherwise; use the same"
            )
        if not version and weights != updates[0].before:
            raise InputError(f"the run that wrote {here} began from other weights; give those as --weights")

    async def fill(self, update: int, on_group: Callable[[int], None] = lambda missing: None) -> None:
        """Read the batch of an update.

        Raises:
            DatasetError: it cannot be read.
        """
        groups, filling = await asyncio.to_thread(self._batches.groups, update)
        try:
            self._batch = GroupBatch(groups, convert_to(filling, FillReport))
        except msgspec.ValidationError as error:
            raise DatasetError(f"{self.folder}: update {update}: {error}; have it written again") from None
        on_group(0)

    def take(self) -> GroupBatch | None:
        """The batch, which leaves."""
        batch, self._batch = self._batch, None
        return batch

    def exhaustion(self) -> Exhaustion:
        """No batch is missing here: `fill` raises."""
        raise AssertionError("every update of a replay has a batch")

    def state(self) -> dict[str, Any]:
        """There is none: an update's batch is where it is."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `state`."""

    async def close(self) -> None:
        """Nothing goes on."""


class NoPolicy(SamplerBase):
    """Sampler of a run that replays batches: nothing is sampled."""
