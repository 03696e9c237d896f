"""The families of models, by what their `config.json` calls itself: a family is a folder here and a line below."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from synthesis.core.refusals import InputError

if TYPE_CHECKING:
    from astra_jax.models.model import Model

FAMILIES: dict[str, tuple[str, str]] = {
    "qwen3": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
    "qwen3_moe": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
}
"""`model_type` → module and class, imported when such a model is read."""


def from_hf(config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Model:
    """The model of a `config.json`'s content.

    Raises:
        ValueError: a family that there is not, or something in it that this port does not compute.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"model_type is {kind!r}; this port reads {', '.join(map(repr, FAMILIES))}")
    module, name = FAMILIES[kind]
    return getattr(importlib.import_module(module), name).from_hf(config, dtype=dtype, param_dtype=param_dtype)
