"""Families of models, by the `model_type` of their `config.json`: each family is a folder here and a line below."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from astra_jax.base.errors import InputError
from astra_jax.models.hf_config import not_computed

if TYPE_CHECKING:
    from astra_jax.models.model import Model

FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("astra_jax.models.llama.presets", "LlamaConfig"),
    "qwen2": ("astra_jax.models.qwen2.presets", "Qwen2Config"),
    "qwen3": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
    "qwen3_moe": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
}
"""`model_type` → module and class, imported when such a model is read."""


def from_hf(config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Model:
    """Return the model of a `config.json`'s content.

    Raises:
        InputError: the family is unknown, or this port does not compute a part of it; the message lists everything.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        read = f"this port reads {', '.join(map(repr, FAMILIES))}"
        more = not_computed(config, "model") if kind is not None else ()
        raise InputError("; ".join([f"model_type is {kind!r}; {read}", *more]))
    module, name = FAMILIES[kind]
    return getattr(importlib.import_module(module), name).from_hf(config, dtype=dtype, param_dtype=param_dtype)


def differences(
    stored: Model, wanted: Model, *, but: Collection[str] = (), stretches: bool = True
) -> list[tuple[str, Any, Any]]:
    """List the fields in which the weights' model differs from a configuration: each name, their value, the other's.

    Training may stretch the context and choose dtypes. Every other difference makes another model, and so does a
    context that is already stretched.

    Args:
        but: other fields that may differ.
        stretches: whether the context may be stretched. A server that does not would compute another model.
    """
    free = {"max_positions", "dtype", "param_dtype", *but}
    if stretches and not vars(stored).get("yarn"):
        free.add("yarn")
    both = [name for name in vars(stored) if name not in free and name in vars(wanted)]
    found = [(name, vars(stored)[name], vars(wanted)[name]) for name in both]
    return [one for one in [("family", stored.family, wanted.family), *found] if one[1] != one[2]]
