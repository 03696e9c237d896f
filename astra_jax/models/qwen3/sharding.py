"""Where Qwen3's parameters and batches live on a mesh.

A parameter's name spells its axes (`q_dnh` is [D, N, H]), so the rules are about letters, in one dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.models.qwen3.modules import abstract_params
from astra_jax.models.qwen3.presets import Qwen3Config


@dataclass(frozen=True)
class Rules:
    """Mesh axis of each logical axis; None is replicated. The defaults: FSDP over model width, tensor parallelism over
    heads, feed-forward and vocabulary, as in Megatron."""

    d: str | None = "fsdp"
    n: str | None = "tensor"
    k: str | None = "tensor"
    h: str | None = None
    f: str | None = "tensor"
    v: str | None = "tensor"


def param_specs(config: Qwen3Config, rules: Rules | None = None) -> Any:
    """A `PartitionSpec` for each parameter. Vectors (norms, biases) are replicated: they are small."""
    rules = rules or Rules()

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = path[-1].key
        letters = name.rpartition("_")[2]
        stacked = path[0].key == "layers"
        if len(letters) == 1:
            return PartitionSpec()
        axes = [getattr(rules, letter) for letter in letters]
        return PartitionSpec(*([None] if stacked else []), *axes)

    return jax.tree_util.tree_map_with_path(spec, abstract_params(config))


def param_shardings(config: Qwen3Config, mesh: Mesh, rules: Rules | None = None) -> Any:
    """A `NamedSharding` for each parameter.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards; names the parameter, the axis and both.
    """
    specs, shapes = param_specs(config, rules), abstract_params(config)

    def sharding(path: tuple[Any, ...], spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for dimension, (axis, size) in enumerate(zip(spec, leaf.shape, strict=False)):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: dimension {dimension} is {size}, which mesh axis {axis!r} of "
                    f"{mesh.shape[axis]} devices does not divide; choose a divisor"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, specs, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [B, T]: rows over `data` and `fsdp`, the sequence over `context`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
