"""The tricks of compiled programs on CPUs, each with what it brings. Where nothing else is said, on two cores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.mesh import AnyMesh, platform_of

Array = jax.Array

UNROLLED = 2
"""Up to so many layers are written out in training."""


def trains_written_out(layers: int, remat: str, mesh: AnyMesh | None) -> bool:
    """Whether a training step's layers are written out instead of scanned: few of them, without rematerialisation.

    XLA copies into and out of a scan's stacks (a step of the quickstart's model: 142 ms of both cores' time with the
    scan, 126 ms without).
    """
    return layers <= UNROLLED and remat == "none" and platform_of(mesh) == "cpu"


def decodes_written_out(platform: str) -> bool:
    """Whether decoding wants the parameters' layers apart (`Model.for_decoding`), and written out.

    A scan copies each layer's weights before it reads them (30 million parameters, one row: 35 ms a step against 16).
    """
    return platform == "cpu"


def computed_once(function: Callable[[Array], Any], x: Array) -> Any:
    """`function` of each row of `x`, in a loop; for layers that are written out. XLA would compute the same cosines in
    each layer again, for each head. What a loop has made it takes as it is."""
    return jax.lax.map(function, x)


def in_halves(attend: Callable[..., Array], platform: str) -> Callable[..., Array]:
    """Attention over first and last half of the rows apart.

    XLA runs a batched matmul on one thread while nothing else is ready. Of two chains of operations one of each is (a
    step of a million parameters takes 5 % less).

    Args:
        attend: a function of arrays, and of tuples of them, with a leading axis of rows.
    """
    if platform != "cpu":
        return attend

    def halves(*operands: Any) -> Array:
        if (half := len(operands[0]) // 2) == 0:
            return attend(*operands)
        first, last = jax.tree.map(lambda x: x[:half], operands), jax.tree.map(lambda x: x[half:], operands)
        return jnp.concatenate([attend(*first), attend(*last)])

    return halves


def turned_apart(*arrays: Array) -> tuple[Array, ...]:
    """The last two axes swapped, in an operation of its own: multiplying is twice as fast with this small operand
    turned around than with the scores turned in the matmul. Other backends lose nothing, so it is done for all."""
    return jax.lax.optimization_barrier(tuple(x.swapaxes(-1, -2) for x in arrays))


def product_over_rows(product: Callable[[Array, Array], Array], rows: int, dtype: Any, x: Array, dy: Array) -> Array:
    """`product(x, dy)`, a matmul over the first `rows` axes of both, as CPUs are fast at it.

    XLA pulls a transposition into the matmul and then leaves its fast path: the weights' gradient of a feed-forward
    layer takes three times as long (96 ms against 30 ms for 4,608 tokens, 192 wide, 512 inside).
    """
    turned = functools.partial(_turned_product, rows, dtype)
    return jax.lax.platform_dependent(x, dy, cpu=turned, default=product)


def _turned_product(rows: int, dtype: Any, x: Array, dy: Array) -> Array:
    # The CPU's matmul wants its first operand turned around, so the smaller one comes first. XLA turns it in whatever
    # made it, a stride of a row apart (3.5 ms for 2,048 x 512 floats), and turns the result in the matmul, which then
    # leaves its fast path; behind barriers both are copies of their own, in tiles (1.2 ms).
    if x.size > dy.size:
        out = dy.ndim - rows
        dw = jax.lax.optimization_barrier(_turned_product(rows, dtype, dy, x))
        return dw.transpose(*range(out, dw.ndim), *range(out))
    turned = jax.lax.optimization_barrier(x.transpose(*range(rows, x.ndim), *range(rows)))
    over = (tuple(range(x.ndim - rows, x.ndim)), tuple(range(rows)))
    return jax.lax.dot_general(turned, dy, (over, ((), ())), preferred_element_type=dtype)
