"""Check that losses, gradients and weights are finite, and count the steps that were skipped because they were not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.base.errors import UserError
from astra_jax.models.model import Params
from astra_jax.run.config import TrainingConfig
from astra_jax.run.optimizers import all_finite

MAX_SKIPPED_IN_A_ROW = 10
"""Most consecutive steps that `on_nonfinite=skip` may skip. The weights do not change meanwhile, so only another batch
can help, and ten did not. `max_failed_restarts` has the same default."""


class NonFiniteError(UserError):
    """A loss, a gradient or a weight was not finite, so that the run cannot continue, or is not trained."""


@dataclasses.dataclass
class Skipped:
    """Skipped steps, whose loss or gradient was not finite. Checkpoints contain these counts.

    Attributes:
        count: of the whole run.
        in_a_row: consecutive ones, up to the newest step.
        first: the first one; 0 if there is none.
    """

    count: int = 0
    in_a_row: int = 0
    first: int = 0

    def add(self, step: int, *, is_finite: bool) -> None:
        """Count a step."""
        self.in_a_row = 0 if is_finite else self.in_a_row + 1
        self.count += not is_finite
        self.first = self.first or (0 if is_finite else step)


class FiniteCheck:
    """Finite check of every step's metrics, without waiting for the device until `flush`.

    Attributes:
        skipped: steps that changed nothing, of earlier starts too.
        loss: the loss of the newest step that was checked; NaN before there is one.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.skipped, self.loss = Skipped(), math.nan
        self._config = config
        self._queue: list[tuple[int, Any, Any, Any]] = []

    def queue(self, step: int, metrics: dict[str, Any]) -> None:
        """Queue a step's `train/loss`, `train/grad_norm` and `weights_finite`, which is removed from the
        metrics."""
        self._queue.append((step, metrics["train/loss"], metrics["train/grad_norm"], metrics.pop("weights_finite")))

    def flush(self, saved: int | None) -> None:
        """Check what is queued; waits for the device. Call it before anything is logged or saved.

        Args:
            saved: step of the newest checkpoint, for messages; None if there is none.

        Raises:
            NonFiniteError: a step's loss or gradient was not finite, and `on_nonfinite` is `stop`; or a weight is not.
        """
        queued, self._queue = self._queue, []
        for step, loss, norm, are_weights_finite in jax.device_get(queued):
            loss, norm = float(loss), float(norm)
            self.loss = loss
            kept = "nothing was saved yet" if saved is None else f"the checkpoint of step {saved} is whole"
            lower = f"Lower learning_rate (it is {self._config.learning_rate})"
            if not are_weights_finite:  # there is nothing that a later step could start from
                raise NonFiniteError(
                    f"step {step} made weights that are not finite, of loss {loss} and grad_norm {norm}; they are "
                    f"given up: {kept}. {lower}, or see to the other settings of the optimizer"
                )
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            self.skipped.add(step, is_finite=is_finite)
            if not is_finite and self._config.on_nonfinite == "stop":
                raise NonFiniteError(
                    f"step {step}: loss is {loss}, grad_norm is {norm}, so the step was not taken; {kept}. {lower}"
                    ", see to the data of that step, or set on_nonfinite=skip to leave such steps out"
                )

    def check_progress(self, step: int, saved: int | None) -> None:
        """Raise NonFiniteError if the last `MAX_SKIPPED_IN_A_ROW` steps were skipped."""
        if self.skipped.in_a_row < MAX_SKIPPED_IN_A_ROW:
            return
        kept = "Nothing was saved" if saved is None else f"The last checkpoint is of step {saved}"
        raise NonFiniteError(
            f"on_nonfinite=skip: the last {self.skipped.in_a_row} steps, up to step {step}, changed nothing: their "
            f"loss or gradient was not finite, as of {self.skipped.count} steps in all, from step "
            f"{self.skipped.first} on. {kept}. {self._remedy()}"
        )

    def check_trained(self, steps: int, saved: int | None) -> None:
        """Raise NonFiniteError if more than half of the steps of a finished run were skipped."""
        if self.skipped.count * 2 <= steps:
            return
        result = "The result" if saved is None else f"The checkpoint of step {saved}"
        raise NonFiniteError(
            f"on_nonfinite=skip: {self.skipped.count} of {steps} steps changed nothing, from step "
            f"{self.skipped.first} on: their loss or gradient was not finite. {result} was trained by "
            f"{steps - self.skipped.count} steps only. {self._remedy()}, and use another workdir"
        )

    def _remedy(self) -> str:
        return f"Lower learning_rate (it is {self._config.learning_rate}), or check the data of these steps"


def nonfinite_name(params: Params) -> str:
    """Return the name of the first weight with a number that is not finite, or ""; the same on every host."""
    leaves = [
        (path, x) for path, x in jax.tree.leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]  # numbers of 8 bits are finite, if their scales are
    finite = jax.device_get(jax.jit(lambda xs: [all_finite(x) for x in xs])([leaf for _, leaf in leaves]))
    return next((jax.tree_util.keystr(path) for (path, _), fine in zip(leaves, finite, strict=True) if not fine), "")
