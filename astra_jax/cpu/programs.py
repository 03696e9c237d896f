"""The tricks of compiled programs on CPUs, each with what it brings. Where nothing else is said, on two cores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from astra_jax.cpu.environment import multiplies_bfloat16_slowly, processor
from astra_jax.mesh import AnyMesh, platform_of

Array = jax.Array

PRODUCT = "product"
"""What a product is called for `jax.checkpoint`, where its policies cannot see that it is one."""

UNROLLED = 2
"""Up to so many layers are written out in training."""

MANY_ROWS = 256
"""From so many on a bfloat16 product is worth making float32 of its operands where the processor
`multiplies_bfloat16_slowly`: of 1,024 x 576 x 1,536 8.3 ms in place of 12.2 on a Xeon whose matrix unit is hidden, of
256 rows 2.5 for 2.9, of 128 as long; with AVX2 alone 14.3 for 21.9, 4.5 for 5.9, and of 64 rows 1.8 for 1.6."""

HEAD_CHUNK = 256
"""Tokens at a time in the output head. A chunk is computed whole, also where few of its tokens are trained on, and more
logits than a cache holds are read from memory for each operation (a row of 1,280 tokens, 576 wide, 49,280 words: where
8 % of them count 232 ms in place of 703 with 1,024 at a time, 459 for 700 where 25 %, 1,054 for 1,420 where all)."""


def trains_written_out(layers: int, remat: str, mesh: AnyMesh | None) -> bool:
    """Whether a training step's layers are written out instead of scanned: few of them, without rematerialisation.

    XLA copies into and out of a scan's stacks (a step of the quickstart's model: 142 ms of both cores' time with the
    scan, 126 ms without).
    """
    return layers <= UNROLLED and remat == "none" and platform_of(mesh) == "cpu"


def kept_dtype(dtype: DTypeLike, platform: str) -> DTypeLike:
    """In what keys and values are kept: float32 on CPUs, whatever the model computes in.

    XLA multiplies batches of small bfloat16 matrices element by element (a query of 9 heads over 1,024 keys, 32 rows:
    13 ms a layer, against 2.4 ms), so that a token of each of 32 rows cost SmolLM2-135M 727 ms instead of 142.
    """
    return jnp.float32 if platform == "cpu" else dtype


def trained_dtype(dtype: str, mesh: AnyMesh | None) -> str:
    """In what a training step computes: on CPUs that multiply bfloat16 slowly float32 for it, of which the weights are.

    Nothing is rounded on the way then, and nothing made wider for each product (SmolLM2-135M, a step of 2 x 1,024
    tokens: 24 s in place of 34 with AVX2 alone, 11.9 for 17.5 on a Xeon whose matrix unit is hidden, in as much
    memory).
    """
    return "float32" if _is_narrow_on_cpus(dtype, mesh) and _slow_bfloat16() else dtype


def kept_part(platform: str) -> int | None:
    """How many positions of a layer's keys and values are an array of their own; None: all.

    Of one array XLA copies what decoding looks at, once a chunk; of several it reads them where they lie, and it
    multiplies two of them at once, each on a thread (SmolLM2-135M, a token of each of 32 rows that see 1,024 of 1,536:
    263 ms and 206 with 512; 128 or 256 are more operations than they are worth; a million parameters, whose heads have
    one query each, take 15.1 ms in place of 11.8 for 64 rows that see 768, and stay in one).
    """
    return 512 if platform == "cpu" else None


def named(x: Array, name: str, mesh: AnyMesh | None) -> Array:
    """`jax.checkpoint_name` of what a layer keeps, in `scanned_dtype`."""
    return checkpoint_name(x.astype(scanned_dtype(x.dtype, mesh)), name).astype(x.dtype)


def scanned_dtype(dtype: DTypeLike, mesh: AnyMesh | None) -> DTypeLike:
    """In what a scan over layers keeps activations: on CPUs float32 for bfloat16.

    XLA writes a layer's bfloat16 part into the stack of all by making float32 of the whole stack, and bfloat16 of it
    again: 30 layers of a row of 1,280 tokens, 576 wide, wrote 10 GB so.
    """
    return jnp.float32 if _is_narrow_on_cpus(dtype, mesh) else dtype


def _is_narrow_on_cpus(dtype: DTypeLike, mesh: AnyMesh | None) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16 and platform_of(mesh) == "cpu"


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

    def turned(*arrays: Array, lie: Callable[[Array], Array] = lambda x: x) -> tuple[Array, ...]:
        return jax.lax.optimization_barrier(tuple(lie(x.swapaxes(-1, -2)) for x in arrays))

    if arrays[0].dtype != jnp.bfloat16:
        return turned(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(turned, lie=_in_rows), default=turned)


def product(x: Array, y: Array, over: tuple[range, range], mesh: AnyMesh | None) -> Array:
    """`x` times `y` over these axes of both, in their dtype; without a gradient, it is of those that are spelled out.

    XLA multiplies bfloat16 numbers on a processor's matrix unit (AMX) only where the product is asked for in float32
    (1,024 x 576 x 1,536: 1,499 GFLOP/s against 273; float32 has 298). Sums are float32 either way. Where the processor
    `multiplies_bfloat16_slowly`, `MANY_ROWS` are made float32 first.
    """
    numbers = ((tuple(over[0]), tuple(over[1])), ((), ()))
    if not _is_narrow_on_cpus(x.dtype, mesh):
        return jax.lax.dot_general(x, y, numbers)
    # What `jax.checkpoint` keeps of it goes by the name: its policies do not look into the product, and would keep the
    # float32 sums too.
    return checkpoint_name(_narrow_product(x, y, numbers), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(x: Array, y: Array, numbers: Any) -> Array:
    def plainly(x: Array, y: Array) -> Array:
        return jax.lax.dot_general(x, y, numbers)

    (over, _), _ = numbers
    wide = _slow_bfloat16() and x.size >= MANY_ROWS * math.prod(x.shape[axis] for axis in over)

    def summed_in_float32(x: Array, y: Array) -> Array:
        if wide:
            # Exact of each number, so that nothing but the order of the sums is another.
            x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
            return jax.lax.dot_general(x32, y32, numbers).astype(x.dtype)
        return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32).astype(x.dtype)

    # A program of no mesh may be compiled for another device than this process has.
    return jax.lax.platform_dependent(x, y, cpu=summed_in_float32, default=plainly)


def _no_gradient(*_: Any) -> Any:
    raise TypeError("a product has no gradient; take `linear`'s")


_narrow_product.defvjp(_no_gradient, _no_gradient)


@functools.cache
def _slow_bfloat16() -> bool:
    return multiplies_bfloat16_slowly(processor())


def in_float32(function: Callable[..., Any], *arrays: Array) -> Any:
    """`function`, elementwise, of `arrays`, in their dtype. What is bfloat16 XLA would round after each operation, and
    widen before the next (silu(x) * y of 1,024 x 1,536: 2.9 ms against 1.3)."""

    def wide(*arrays: Array) -> Any:
        out = function(*(x.astype(jnp.float32) for x in arrays))
        return jax.tree.map(lambda x: x.astype(arrays[0].dtype), out)

    if arrays[0].dtype != jnp.bfloat16:
        return function(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=wide, default=function)


def sum_of_products(x: Array, y: Array) -> Array:
    """[..., N], [..., N] → [...]: float32, over the last axis.

    XLA takes twenty times as long for it where a leading axis is 1, as of a micro-batch of one row (1,280 x 576: 2.4
    ms, and 0.1 without that axis, which XLA puts back where it can). As a matmul with ones it takes 0.2 in either case.
    """

    def with_ones(x: Array, y: Array) -> Array:
        products = x.astype(jnp.float32) * y.astype(jnp.float32)
        ones = jnp.ones((x.shape[-1], 1), jnp.float32)
        return (products.reshape(-1, x.shape[-1]) @ ones).reshape(x.shape[:-1])

    def plainly(x: Array, y: Array) -> Array:
        return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)

    return jax.lax.platform_dependent(x, y, cpu=with_ones, default=plainly)


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
    turned = x.transpose(*range(rows, x.ndim), *range(rows))
    narrow = x.dtype == jnp.bfloat16
    turned = jax.lax.optimization_barrier(_in_rows(turned) if narrow else turned)
    over = (tuple(range(x.ndim - rows, x.ndim)), tuple(range(rows)))
    dw = jax.lax.dot_general(turned, dy, (over, ((), ())), preferred_element_type=dtype)
    return _in_rows(dw) if narrow else dw


def _in_rows(x: Array) -> Array:
    """`x` as it lies in memory: its last axis together. The matrix unit's products want it so of both operands and of
    what comes of them; else XLA makes float32 of the operands first (1,024 x 576 x 1,536: 13 ms against 3), or refuses
    the product."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
