"""State of a training run that a step changes: weights, optimizer state, step count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.models import adapters
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Params
from astra_jax.run.checkpoints import named
from astra_jax.run.digests import digest_of_json, digests_of


@dataclass
class TrainState:
    """Weights, optimizer state and step count of a run. A step donates the arrays and puts new ones here.

    Attributes:
        step: number of completed steps.
        params: the trained arrays: all weights, or the adapters.
        opt_state: optimizer state of `params`.
        base: frozen weights under adapters; None if all weights are trained.
        lora: settings of the adapters.
        base_digests: digest of each array of `base`.
    """

    step: int
    params: Params
    opt_state: Any
    base: Params | None
    lora: LoRA
    base_digests: Mapping[str, str] = field(default_factory=dict)
    _digest: tuple[int, str] = (-1, "")

    def inference_params(self, *, copied: bool = False) -> Params:
        """Return the weights to sample or evaluate with: the trained arrays joined with the frozen ones.

        Args:
            copied: copy the trained arrays, for a reader that outlives the next step, which donates them.
        """
        trained = jax.tree.map(jnp.copy, self.params) if copied else self.params
        return adapters.attach_lora(trained, self.base, self.lora)

    def digest(self) -> str:
        """Return a digest of all weights, bit for bit. On several hosts each must call it at the same step."""
        step, digest = self._digest
        if step != self.step:
            digest = digest_of_weights(self.params, self.base_digests)
            self._digest = self.step, digest
        return digest


def digest_of_weights(params: Params, base_digests: Mapping[str, str]) -> str:
    """Return a digest of weights, bit for bit. On several hosts each must call it.

    Args:
        params: all weights, or adapters.
        base_digests: digest of each array under adapters; empty without them.
    """
    return digest_of_json(digests_of(named(params)) | {"frozen": dict(base_digests)})
