"""The embedded engine's programs, in their real form, lowered for devices that are only described."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.mesh import platform_of
from astra_jax.models.layers import quantized
from astra_jax.models.model import Model
from astra_jax.rollout.engine import device_steps
from astra_jax.rollout.engine.cache_memory import unroll_decode_layers


def lower_decode(
    model: Model,
    slots: int,
    length: int,
    steps: int,
    mesh: Mesh,
    *,
    rows: int | None = None,
    weight_quantization: str = "none",
) -> Any:
    """Lower a chunk of `steps` tokens of `rows` rows (None: of all slots) over a cache of `length` positions each."""
    params, cache = _operands(model, slots, length, mesh, weight_quantization)
    n, make = rows or slots, partial(_small, mesh)
    given = device_steps.DecodeRows(
        index_r=make((n,), np.int32),
        last_r=make((n,), np.int32),
        positions_r=make((n,), np.int32),
        budget_r=make((n,), np.int32),
        seeds_r=make((n,), np.uint32),
        temperature_r=make((n,), np.float32),
        top_p_r=make((n,), np.float32),
        stops_rk=make((n, 4), np.int32),
    )
    options = {"model": model, "window": length, "steps": steps, "nucleus": False, "whole": rows is None}
    return device_steps.decode.lower(params, cache, given, platform=platform_of(mesh), **options)


def lower_prefill(model: Model, slots: int, length: int, rows: int, chunk: int, mesh: Mesh) -> Any:
    """Lower the prefill of `chunk` tokens of each of some rows, over the rows' whole cache."""
    params, cache = _operands(model, slots, length, mesh)
    make = partial(_small, mesh)
    tokens, positions = make((rows, chunk), np.int32), make((rows, chunk), np.int32)
    given = (params, cache, make((rows,), np.int32), tokens, positions)
    # A kernel for GPUs needs the platform that it is compiled for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return device_steps.prefill.lower(*given, model=model, window=length, platform=platform_of(mesh))


def lower_copy(model: Model, slots: int, length: int, rows: int, mesh: Mesh) -> Any:
    """Lower the copy of whole rows to as many others."""
    _, cache = _operands(model, slots, length, mesh)
    make = partial(_small, mesh)
    return device_steps.copy.lower(cache, make((rows,), np.int32), make((rows,), np.int32), window=length)


def _operands(model: Model, slots: int, length: int, mesh: Mesh, weight_quantization: str = "none") -> tuple[Any, Any]:
    """Return the engine's decoding parameters, and the cache."""

    def placed(x: Any, sharding: NamedSharding) -> Any:
        if quantized.is_quantized(x):
            return quantized.quantized_shapes(x, sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = model.abstract_params()
    alone, device = mesh.size == 1, mesh.devices.flat[0]
    if unroll_decode_layers(model, slots, length, None if alone else mesh, weight_quantization, device=device):
        whole = NamedSharding(mesh, PartitionSpec())
        read = jax.eval_shape(
            partial(model.for_decoding, unstacked=True, weight_quantization=weight_quantization), params
        )
        cache = jax.eval_shape(partial(model.cache, slots, length, stacked=False))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), (read, cache))
    shardings = model.param_shardings(mesh)
    params = jax.tree.map(placed, params, shardings)
    read = jax.eval_shape(partial(model.for_decoding, unstacked=False, weight_quantization=weight_quantization), params)
    embed = shardings["embed_vd"].spec
    head = NamedSharding(mesh, PartitionSpec(embed[1], embed[0])) if model.tie_embeddings else shardings["head_dv"]
    params = jax.tree.map(placed, read, shardings | {"head_dv": head}, is_leaf=quantized.is_quantized)
    cache = jax.eval_shape(partial(model.cache, slots, length))
    return params, jax.tree.map(lambda x: placed(x, model.cache_sharding(mesh)), cache)


def _small(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
