"""Sharding of parameters on a mesh.

A parameter's name spells its axes (`q_dnh` is [D, N, H]), so one dataclass has the rules, by letter. The collectives
of `astra_jax.head`, `astra_jax.attention` and `layers/` assume these defaults, and name the axes of `mesh.AXES`
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax import axes
from astra_jax.base.errors import InputError
from astra_jax.mesh import WIDTH
from astra_jax.models.model import Params

Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """Mesh axes of each logical axis; None is replicated.

    The defaults: FSDP over model width, tensor parallelism over heads, feed-forward and vocabulary as in Megatron,
    experts over their own axis. An adapter's rank and single tokens are replicated.

    A mesh axis shards a parameter once: if experts use `expert`, the width uses the other axes.

    Attributes:
        d: model width.
        n: query heads.
        k: key and value heads.
        h: width of a head.
        f: feed-forward width.
        v: vocabulary.
        e: experts.
        r: rank of an adapter.
        i: rows of single tokens, in place of `v`.
    """

    d: Axis = WIDTH
    n: Axis = "tensor"
    k: Axis = "tensor"
    h: Axis = None
    f: Axis = "tensor"
    v: Axis = "tensor"
    e: Axis = "expert"
    r: Axis = None
    i: Axis = None


def param_specs(abstract: Params, rules: Rules | None = None) -> Any:
    """Return a `PartitionSpec` for each parameter.

    Norms and the router are small, so they are replicated. Biases are replicated except over their heads: each device
    has those of the heads that it computes.
    """
    rules = rules or Rules()

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = path[-1].key
        if axes.is_small(name):
            if not axes.is_bias(name):
                return PartitionSpec()
            heads = [getattr(rules, letter) if letter in "nk" else None for letter in axes.letters(name)]
            return PartitionSpec(*([None] if axes.is_stacked(path) else []), *heads)
        spread: list[Axis] = []
        taken: set[str] = set()
        for letter in axes.letters(name):
            wanted = getattr(rules, letter)
            left = tuple(one for one in _names(wanted) if one not in taken)
            taken.update(left)
            spread.append(left if len(left) > 1 else left[0] if left else None)
        return PartitionSpec(*([None] if axes.is_stacked(path) else []), *spread)

    return jax.tree_util.tree_map_with_path(spec, abstract)


def _names(axis: Axis) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def param_shardings(abstract: Params, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Return a `NamedSharding` for each parameter.

    Raises:
        ValueError: a mesh axis does not divide the dimension that it shards; names the parameter, the axis and both.
    """
    specs = param_specs(abstract, rules)

    def sharding(path: tuple[Any, ...], spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for dimension, (axis, size) in enumerate(zip(spec, leaf.shape, strict=False)):
            devices = int(np.prod([mesh.shape[name] for name in _names(axis)]))
            if size % devices:
                used = " x ".join(name for name in _names(axis) if mesh.shape[name] > 1)
                raise InputError(
                    f"{jax.tree_util.keystr(path)}: dimension {dimension} is {size}, which mesh axis {used!r} of "
                    f"{devices} devices does not divide; choose a divisor"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, specs, abstract, is_leaf=lambda x: isinstance(x, PartitionSpec))


def cache_sharding(n_kv_heads: int, mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays [L, B, K, ...].

    Key heads are spread over `tensor`, and over as many of the other axes as divide them. So no device stores or reads
    another one's heads. Rows stay whole, since any of them may be written.
    """
    chosen: list[str] = []
    left = n_kv_heads
    for axis in ("tensor", *WIDTH, "data"):
        if left % mesh.shape[axis] == 0:
            chosen.append(axis)
            left //= mesh.shape[axis]
    return NamedSharding(mesh, PartitionSpec(None, None, tuple(chosen)))
