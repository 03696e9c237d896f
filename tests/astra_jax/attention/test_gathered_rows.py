"""Keys and values over a `context` axis: gathered in the row's order, and laid down at most once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_world import needs_libtpu

from astra_jax.attention import attention
from astra_jax.mesh import gather_row, make_mesh, on_each_device, zigzag
from astra_jax.planner.collectives import KINDS
from astra_jax.planner.cycles import carries_collective, is_free, is_kernel
from astra_jax.planner.hardware import CHIPS, Slice
from astra_jax.planner.hlo import Module, read_hlo, shapes

LENGTH, QUERIES, KEYS, WIDTH, D_MODEL = 32_768, 8, 8, 128, 64


@pytest.mark.parametrize("context", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [1, 2])
def test_all_devices_have_the_whole_row_in_its_order(context: int, axis: int) -> None:
    row = jnp.arange(2 * 3 * 16 * 5).reshape(2, 16, 3, 5)
    mesh = make_mesh(data=1, context=context, devices=jax.devices()[:context])

    def part(x):
        return jnp.moveaxis(gather_row(jnp.moveaxis(x, 1, axis), context, axis), axis, 1)

    each = on_each_device(part, mesh, (P(None, "context"),), P(None, "context"))(zigzag(row, context))
    for one in np.split(np.asarray(each), context, axis=1):
        np.testing.assert_array_equal(one, row)


@pytest.mark.slow
@needs_libtpu
def test_what_is_gathered_is_moved_once_at_most() -> None:
    """Compiled for v6e, where the compiler gathers along the first axis: keys and values are copied once each to where
    kernels want them, and in the backward pass their gradients once each to where they are sent from."""
    mesh = make_mesh(context=4, devices=Slice.parse("v6e:2x2").devices())

    def of(shape: tuple[int, ...], spec: P, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    def layer(x, weights, ids):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, weight) for weight in weights)
        return attention(q, k, v, ids, ids, mesh=mesh)

    def gradients(x, weights, ids):
        def total(x, weights):
            return layer(x, weights, ids).astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1))(x, weights)

    x = of((1, LENGTH, D_MODEL), P(None, "context"))
    weights = tuple(of((D_MODEL, heads, WIDTH), P()) for heads in (QUERIES, KEYS, KEYS))
    ids = of((1, LENGTH), P(None, "context"), "int32")
    assert times_written(compiled(layer, x, weights, ids)) <= 2
    assert times_written(compiled(gradients, x, weights, ids)) <= 4


def compiled(program, *arguments) -> Module:
    return read_hlo(jax.jit(program).lower(*arguments).compile(dict(CHIPS["v6e"].compiler_options)).as_text())


def times_written(module: Module) -> float:
    """How often an array of all keys or values is written, in parts or whole, by no kernel and no collective."""
    runs, whole = module.runs(lambda computation: 0.0), LENGTH * KEYS * WIDTH
    sizes = [
        math.prod(dims)
        for name, computation in module.computations.items()
        if runs[name] and name not in module.apart
        for one in computation.instructions
        if not is_kernel(one) and not is_free(one) and one.opcode not in KINDS and not carries_collective(module, one)
        for _, dims in shapes(one.result)
    ]
    return sum(size for size in sizes if size > whole / 4) / whole  # a device's own are a quarter
