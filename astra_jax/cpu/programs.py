"""Optimisations of compiled programs on CPUs, each with its gain, measured on two cores unless stated otherwise."""

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
"""Name of a product for `jax.checkpoint`, if its policies cannot recognise it."""

UNROLLED = 2
"""Most layers that are unrolled in training."""

MANY_ROWS = 256
"""Rows from which a bfloat16 product is faster with operands cast to float32, if it `multiplies_bfloat16_slowly`.

On a Xeon with a hidden matrix unit a product of 1,024 x 576 x 1,536 takes 8.3 ms, not 12.2. With 256 rows it takes
2.5 ms, not 2.9; with 128 rows the same. With AVX2 alone these are 14.3, not 21.9, and 4.5, not 5.9. With 64 rows the
cast is slower: 1.8 and not 1.6.
"""

HEAD_CHUNK = 256
"""Tokens at a time in the output head.

A chunk is computed whole, even if few of its tokens are trained on. Logits beyond a cache's size are read from memory
for each operation. Compared are 1,024 tokens at a time, for a row of 1,280 tokens, 576 wide, with 49,280 vocabulary
entries. If 8 % of the tokens count, the head takes 232 ms, not 703; for 25 % 459, not 700; for all 1,054, not 1,420.
"""


def unrolls_training_layers(layers: int, remat: str, mesh: AnyMesh | None) -> bool:
    """Return whether a training step's layers are unrolled, not scanned: few of them, without rematerialisation.

    XLA copies into and out of a scan's stacks (a step of the quickstart's model: 142 ms of both cores' time with the
    scan, 126 ms without).
    """
    return layers <= UNROLLED and remat == "none" and platform_of(mesh) == "cpu"


def kept_dtype(dtype: DTypeLike, platform: str) -> DTypeLike:
    """Return the dtype of cached keys and values: float32 on CPUs, whatever the model computes in.

    XLA multiplies batches of small bfloat16 matrices element by element (a query of 9 heads over 1,024 keys, 32 rows:
    13 ms per layer, against 2.4 ms). So a token of each of 32 rows took SmolLM2-135M 727 ms, not 142.
    """
    return jnp.float32 if platform == "cpu" else dtype


def trained_dtype(dtype: str, mesh: AnyMesh | None) -> str:
    """Return the dtype of a training step's computation: float32 for bfloat16 on CPUs that multiply it slowly.

    The weights are float32 too, so nothing is rounded, or widened for each product. A step of 2 x 1,024 tokens of
    SmolLM2-135M takes 24 s, not 34, with AVX2 alone. On a Xeon with a hidden matrix unit it takes 11.9 s, not 17.5.
    Memory is the same.
    """
    return "float32" if _is_narrow_on_cpus(dtype, mesh) and _slow_bfloat16() else dtype


def kept_part(platform: str) -> int | None:
    """Return the number of positions per array of a layer's keys and values; None: one array for all.

    From one array XLA copies the part that decoding reads, once per chunk. From several it reads them in place, and
    multiplies two of them at once, each on a thread. For SmolLM2-135M a token of each of 32 rows that see 1,024 of
    1,536 positions takes 206 ms with 512 per array, not 263. With 128 or 256 the operations are too many. A model of a
    million parameters, with one query per head, stays in one array: 64 rows that see 768 take 11.8 ms, not 15.1.
    """
    return 512 if platform == "cpu" else None


def named(x: Array, name: str, mesh: AnyMesh | None) -> Array:
    """Apply `jax.checkpoint_name` to a kept value of a layer, in `scanned_dtype`."""
    return checkpoint_name(x.astype(scanned_dtype(x.dtype, mesh)), name).astype(x.dtype)


def scanned_dtype(dtype: DTypeLike, mesh: AnyMesh | None) -> DTypeLike:
    """Return the dtype of activations that a scan over layers keeps: on CPUs float32 for bfloat16.

    To write a layer's bfloat16 part into the stack of all, XLA converts the whole stack to float32 and back. 30 layers
    of a row of 1,280 tokens, 576 wide, wrote 10 GB this way.
    """
    return jnp.float32 if _is_narrow_on_cpus(dtype, mesh) else dtype


def _is_narrow_on_cpus(dtype: DTypeLike, mesh: AnyMesh | None) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16 and platform_of(mesh) == "cpu"


def computed_once(function: Callable[[Array], Any], x: Array) -> Any:
    """Apply `function` to each row of `x` in a loop, for unrolled layers.

    XLA would compute the same cosines again in each layer, for each head. It does not recompute the result of a loop.
    """
    return jax.lax.map(function, x)


def in_halves(attend: Callable[..., Array], platform: str) -> Callable[..., Array]:
    """Return an attention that computes the first and last half of the rows separately.

    XLA runs a batched matmul on one thread while no other operation is ready. With two chains of operations another is
    ready (a step of a million parameters takes 5 % less).

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
    """Swap the last two axes in a separate operation.

    A matmul is twice as fast with this small operand transposed than with the scores transposed inside it. Other
    backends lose nothing, so it is done for all.
    """

    def turned(*arrays: Array, lie: Callable[[Array], Array] = lambda x: x) -> tuple[Array, ...]:
        return jax.lax.optimization_barrier(tuple(lie(x.swapaxes(-1, -2)) for x in arrays))

    if arrays[0].dtype != jnp.bfloat16:
        return turned(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(turned, lie=_in_rows), default=turned)


def product(x: Array, y: Array, over: tuple[range, range], mesh: AnyMesh | None) -> Array:
    """Multiply `x` by `y` over these axes of both, in their dtype. It has no gradient: callers have explicit ones.

    XLA multiplies bfloat16 numbers on a processor's matrix unit (AMX) only if the result is float32 (1,024 x 576 x
    1,536: 1,499 GFLOP/s against 273; float32 has 298). Sums are float32 in both cases. If the processor
    `multiplies_bfloat16_slowly`, products of `MANY_ROWS` are cast to float32 first.
    """
    numbers = ((tuple(over[0]), tuple(over[1])), ((), ()))
    if not _is_narrow_on_cpus(x.dtype, mesh):
        return jax.lax.dot_general(x, y, numbers)
    # `jax.checkpoint` keeps its result by name: its policies do not look into the product, and would keep the float32
    # sums too.
    return checkpoint_name(_narrow_product(x, y, numbers), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(x: Array, y: Array, numbers: Any) -> Array:
    def plainly(x: Array, y: Array) -> Array:
        return jax.lax.dot_general(x, y, numbers)

    (over, _), _ = numbers
    wide = _slow_bfloat16() and x.size >= MANY_ROWS * math.prod(x.shape[axis] for axis in over)

    def summed_in_float32(x: Array, y: Array) -> Array:
        if wide:
            # Exact for each number, so only the order of the sums differs.
            x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
            return jax.lax.dot_general(x32, y32, numbers).astype(x.dtype)
        return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32).astype(x.dtype)

    # A program without a mesh may be compiled for another device than this process has.
    return jax.lax.platform_dependent(x, y, cpu=summed_in_float32, default=plainly)


def _no_gradient(*_: Any) -> Any:
    raise TypeError("a product has no gradient; take `linear`'s")


_narrow_product.defvjp(_no_gradient, _no_gradient)


@functools.cache
def _slow_bfloat16() -> bool:
    return multiplies_bfloat16_slowly(processor())


def in_float32(function: Callable[..., Any], *arrays: Array) -> Any:
    """Apply an elementwise `function` to `arrays` in float32, and return their dtype.

    In bfloat16 XLA would round after each operation, and widen before the next (silu(x) * y of 1,024 x 1,536: 2.9 ms
    against 1.3).
    """

    def wide(*arrays: Array) -> Any:
        out = function(*(x.astype(jnp.float32) for x in arrays))
        return jax.tree.map(lambda x: x.astype(arrays[0].dtype), out)

    if arrays[0].dtype != jnp.bfloat16:
        return function(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=wide, default=function)


def sum_of_products(x: Array, y: Array) -> Array:
    """Return the sum of products over the last axis, [..., N], [..., N] → [...], in float32.

    XLA takes twenty times as long if a leading axis is 1, as for a micro-batch of one row (1,280 x 576: 2.4 ms, and 0.1
    without that axis, which XLA restores if it can). As a matmul with ones it takes 0.2 in either case.
    """

    def with_ones(x: Array, y: Array) -> Array:
        products = x.astype(jnp.float32) * y.astype(jnp.float32)
        ones = jnp.ones((x.shape[-1], 1), jnp.float32)
        return (products.reshape(-1, x.shape[-1]) @ ones).reshape(x.shape[:-1])

    def plainly(x: Array, y: Array) -> Array:
        return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)

    return jax.lax.platform_dependent(x, y, cpu=with_ones, default=plainly)


def product_over_rows(product: Callable[[Array, Array], Array], rows: int, dtype: Any, x: Array, dy: Array) -> Array:
    """Compute `product(x, dy)`, a matmul over the first `rows` axes of both, in a form that is fast on CPUs.

    XLA pulls a transposition into the matmul and then leaves its fast path. The weights' gradient of a feed-forward
    layer takes three times as long (96 ms against 30 ms for 4,608 tokens, 192 wide, 512 inside).
    """
    turned = functools.partial(_turned_product, rows, dtype)
    return jax.lax.platform_dependent(x, dy, cpu=turned, default=product)


def _turned_product(rows: int, dtype: Any, x: Array, dy: Array) -> Array:
    # The CPU's matmul needs its first operand transposed, so the smaller one is first. XLA transposes it in the
    # operation before, a stride of a row apart (3.5 ms for 2,048 x 512 floats). It transposes the result in the matmul,
    # which then leaves its fast path. Behind barriers both are separate copies, in tiles (1.2 ms).
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
    """Return `x` with its last axis contiguous in memory.

    The matrix unit's products need this for both operands and their result. Otherwise XLA converts the operands to
    float32 first (1,024 x 576 x 1,536: 13 ms against 3), or refuses the product.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
