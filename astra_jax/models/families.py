"""Families of models, by the `model_type` of their `config.json`: each family is a folder here and a line below.

A class of the user's own (`--model_class`) reads every `config.json` of the process in place of these.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from astra_jax.base.errors import InputError
from astra_jax.models.hf_config import not_computed
from synthesis.core.references import referred

if TYPE_CHECKING:
    from astra_jax.models.model import Model

FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("astra_jax.models.llama.presets", "LlamaConfig"),
    "qwen2": ("astra_jax.models.qwen2.presets", "Qwen2Config"),
    "qwen3": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
    "qwen3_moe": ("astra_jax.models.qwen3.presets", "Qwen3Config"),
}
"""`model_type` → module and class, imported when such a model is read."""

_REPLACED = ("vocab_size", "dtype", "param_dtype")
"""Fields that a run replaces: rows of added tokens, and precisions."""
_own: tuple[str, type[Model]] | None = None
"""Reference and class of the user's own model."""


def use_class(name: str) -> None:
    """Read every `config.json` with a class of the user's own, which `--model_class` names.

    Raises:
        InputError: it cannot be imported, or has no `from_hf` that reads a `config.json`.
    """
    global _own
    kind = referred(name)
    if not isinstance(kind, type) or not callable(getattr(kind, "from_hf", None)):
        raise InputError(
            f"--model_class={name} is {kind!r:.80}; give a class with the classmethod from_hf and the other members of "
            "astra_jax.models.model.Model (docs/extending.md)"
        )
    fields = {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if lacking := [one for one in _REPLACED if one not in fields]:
        raise InputError(
            f"--model_class={name}: make {kind.__name__} a frozen dataclass with the fields {', '.join(_REPLACED)}, "
            f"which a run replaces; it lacks {', '.join(lacking)}"
        )
    _own = name, kind


def from_hf(config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Model:
    """Return the model of a `config.json`'s content.

    Raises:
        InputError: the family is unknown, or this port does not compute a part of it; the message lists everything.
    """
    if _own is not None:
        from astra_jax.models.model import check_model  # it imports jax

        name, own = _own
        model = own.from_hf(config, dtype=dtype, param_dtype=param_dtype)
        check_model(model, f"the model of --model_class={name}")
        return model
    kind = config.get("model_type")
    if kind not in FAMILIES:
        read = f"this port reads {', '.join(map(repr, FAMILIES))}"
        more = not_computed(config, "model") if kind is not None else ()
        raise InputError("; ".join([f"model_type is {kind!r}; {read}, or a class of your own: --model_class", *more]))
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
