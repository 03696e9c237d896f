"""Frozen weights and new adapters of a run that trains adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from astra_jax.models import adapters, peft
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Model, Params
from astra_jax.run import frozen


class AdapterBase:
    """Frozen weights under a run's adapters, read once.

    Args:
        start: returns the weights; the run takes them over.
        origin: the source that `start` reads.

    Attributes:
        params: the weights on their devices; None until they are loaded.
        reference: identity of the weights, with a digest of each array.
    """

    def __init__(
        self,
        model: Model,
        lora: LoRA,
        start: Callable[[], Params],
        origin: frozen.WeightsSource | None,
        mesh: Mesh | None,
    ) -> None:
        self._model, self._lora, self._start, self._origin, self._mesh = model, lora, start, origin, mesh
        self.params: Params | None = None
        self.reference = frozen.BaseWeightsRef(lora, origin, model.param_dtype, {})

    def load(self) -> Params:
        """Return the frozen weights; `start` is called once."""
        if self.params is None:
            plain = dataclasses.replace(self._lora, weight_quantization="none")
            base = jax.device_put(self._start(), self._shardings(plain))
            self.reference = frozen.frozen(base, self._lora, self._origin)
            adapters.store(base, self._lora)
            self.params = jax.device_put(base, self._shardings(self._lora))
        return self.params

    def check(self, digests: Mapping[str, str]) -> None:
        """Check that the weights equal the base of a checkpoint's adapters.

        Raises:
            WeightsError: they differ.
        """
        self.load()
        saved = dataclasses.replace(self.reference, digests=digests)
        saved.compare(self.reference, "the weights to start from")

    def initial_adapters(self) -> Params:
        """Return the adapters to start from: new ones, or those of `origin.adapter`."""
        base = self.load()
        lora, shardings = self._lora, adapters.trained_shardings(self._model, self._lora, self._mesh)

        def sample(base: Params) -> Params:
            return adapters.initial_adapters(self._model, lora, jax.random.key(0), base)

        new: Params = jax.jit(sample, out_shardings=shardings)(base)
        if self._origin is None or self._origin.adapter is None:
            return new
        found, loaded = peft.load(self._origin.adapter, self._model, shardings=shardings)

        def combine(new: Params, loaded: Params) -> Params:
            return peft.continued(new, loaded, lora, found.tokens)

        return jax.jit(combine, out_shardings=shardings)(new, loaded)  # type: ignore[no-any-return]

    def _shardings(self, lora: LoRA) -> Any:
        return jax.tree.map(lambda x: x.sharding, adapters.abstract_base(self._model, lora, self._mesh))
