"""Token embedding: a table from which rows are looked up, and to whose rows the gradients are added."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import BATCH, WIDTH, AnyMesh, free, on_each_device

Array = jax.Array

_TABLE, _TOKENS = P("tensor", WIDTH), P(BATCH, "context")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table_vd: Array, tokens_bt: Array, dtype: str, mesh: AnyMesh | None) -> Array:
    """Return the tokens' rows, [B, T, D] in `dtype`.

    On a mesh each device holds some columns of the table. It looks up in them the tokens of all devices with the other
    columns. Then one exchange turns "all tokens, some columns" into "its tokens, all columns". The gradient is
    exchanged the same way back. So no device ever has the whole table, or all looked-up rows.
    """
    if mesh is None:
        return table_vd[tokens_bt].astype(dtype)
    part = functools.partial(_lookup, dtype)
    return on_each_device(part, mesh, (_TABLE, _TOKENS), _TOKENS)(table_vd, tokens_bt)


def _forward(table_vd: Array, tokens_bt: Array, dtype: str, mesh: AnyMesh | None) -> tuple[Array, tuple[Array, Array]]:
    return embed(table_vd, tokens_bt, dtype, mesh), (table_vd, tokens_bt)


def _backward(dtype: str, mesh: AnyMesh | None, residuals: tuple[Array, Array], dy_btd: Array) -> tuple[Array, None]:
    del dtype
    table_vd, tokens_bt = residuals
    if mesh is None:
        return _added(table_vd, tokens_bt, dy_btd).astype(table_vd.dtype), None
    part = functools.partial(_gradient, free(mesh, ["data"]))
    return on_each_device(part, mesh, (_TABLE, _TOKENS, _TOKENS), _TABLE)(table_vd, tokens_bt, dy_btd), None


embed.defvjp(_forward, _backward)


def _added(table_vd: Array, tokens: Array, dy: Array) -> Array:
    # In float32, whatever the weights are: a bfloat16 sum stops growing at 256 times its summand, and a token occurs
    # thousands of times in a batch.
    return jnp.zeros(table_vd.shape, jnp.float32).at[tokens].add(dy.astype(jnp.float32), mode="drop")


# ---------------------------------------------------------------------------------------------------------------------
# One device's part. Its vocabulary entries are those from `first`; n devices share the columns.


def _here(table_vd: Array, tokens_bt: Array) -> tuple[Array, Array]:
    """Return for all tokens, [n, B, T], the row on this device, and whether there is one."""
    rows_nbt = jax.lax.all_gather(tokens_bt, WIDTH) - jax.lax.axis_index("tensor") * table_vd.shape[0]
    return rows_nbt, (rows_nbt >= 0) & (rows_nbt < table_vd.shape[0])


def _lookup(dtype: Any, table_vd: Array, tokens_bt: Array) -> Array:
    rows_nbt, here_nbt = _here(table_vd, tokens_bt)
    x_nbtd = table_vd[jnp.where(here_nbt, rows_nbt, 0)].astype(dtype)
    if jax.lax.axis_size("tensor") > 1:  # each entry is on one device, the others add zeros
        x_nbtd = jax.lax.psum(jnp.where(here_nbt[..., None], x_nbtd, 0), "tensor")
    x_nbtd = jax.lax.all_to_all(x_nbtd, WIDTH, split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(x_nbtd, 0, 2).reshape(*tokens_bt.shape, -1)


def _gradient(copies: tuple[str, ...], table_vd: Array, tokens_bt: Array, dy_btd: Array) -> Array:
    rows_nbt, here_nbt = _here(table_vd, tokens_bt)
    dy_nbtd = jnp.moveaxis(dy_btd.reshape(*tokens_bt.shape, -1, table_vd.shape[1]), 2, 0)
    dy_nbtd = jax.lax.all_to_all(dy_nbtd, WIDTH, split_axis=0, concat_axis=0, tiled=True)
    dtable_vd = _added(table_vd, jnp.where(here_nbt, rows_nbt, table_vd.shape[0]), dy_nbtd)
    return jax.lax.psum(dtable_vd, copies).astype(table_vd.dtype)
