"""Gradients of sums, accumulated over micro-batches: N small batches give the result of a large one.

A loss function returns *sums* over tokens and counts, never means. The division happens once, in the optimizer's step
(`optimizers.apply_gradients`).

On a mesh each replica (`mesh`) accumulates the gradients of its own rows. Replicas exchange them once after all
micro-batches, which keeps network traffic between slices low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import AnyMesh, in_each_replica

LossFunction = Callable[..., tuple[jax.Array, Any]]
"""(params, batch, base=frozen weights or None, mesh=their mesh) → (summed loss, other sums)."""


def gradient_shapes(params: Any, mesh: Mesh | None = None) -> Any:
    """Return the shapes of gradient accumulators: float32 for any weight dtype, on each weight's devices. In bfloat16 a
    sum stops growing at 256 times the addend.

    With several replicas there is an additional first axis for each replica's own.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        if mesh is None or mesh.shape["data"] == 1:
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
        lies = NamedSharding(mesh, P("data", *x.sharding.spec))
        return jax.ShapeDtypeStruct((mesh.shape["data"], *x.shape), jnp.float32, sharding=lies)

    return jax.tree.map(shape, params)


def zero_gradients(params: Any, mesh: Mesh | None = None) -> Any:
    """Return zero arrays of `gradient_shapes`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), gradient_shapes(params, mesh))


def gradients_of(loss: LossFunction, params: Any, base: Any, batch: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
    """Return (gradients of `params`, (summed loss, other sums)) of one micro-batch."""
    sums, gradients = jax.value_and_grad(partial(loss, base=base, mesh=mesh), has_aux=True)(params, batch)
    return gradients, sums


def add(total: Any, more: Any) -> Any:
    """Add trees leaf by leaf, in the dtypes of `total`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, more)


def accumulate_one(
    loss: LossFunction, params: Any, base: Any, gradients: Any, batch: Any, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Return (gradients including one more micro-batch, its (summed loss, other sums)). `sum_replicas` sums both over
    replicas."""
    alone = mesh is None or mesh.shape["data"] == 1

    def replica(params: Any, base: Any, gradients: Any, batch: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
        more, sums = gradients_of(loss, params, base, batch, mesh)
        return add(gradients, more if alone else _own(more)), sums if alone else _own(sums)

    places = (P(), P(), P("data"), P("data"))
    return in_each_replica(replica, mesh, places, P("data"))(params, base, gradients, batch)


def _own(tree: Any) -> Any:
    """Add the axis of replicas to a replica's own values."""
    return jax.tree.map(lambda x: x[None], tree)


def sum_replicas(tree: Any, mesh: Mesh | None) -> Any:
    """Sum results of `accumulate_one` over replicas."""
    return tree if mesh is None or mesh.shape["data"] == 1 else jax.tree.map(lambda x: x.sum(0), tree)


def accumulate_scan(
    loss: LossFunction,
    params: Any,
    base: Any,
    batch: Any,
    mesh: Mesh | None = None,
    *,
    lengths: Sequence[int | None] = (None,),
    bucket_ids_a: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Return (gradients, (summed loss, other sums)) of all micro-batches of a batch whose leaves are [A, B / A, T].

    Args:
        lengths: possible row lengths, None for whole rows; the program has a branch for each.
        bucket_ids_a: int32, index into `lengths` for each micro-batch. Positions beyond are padding, not computed.
            None: rows are whole.
    """
    alone = mesh is None or mesh.shape["data"] == 1

    def replica(params: Any, base: Any, batch: Any, bucket_ids_a: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
        def cut(length: int | None, micro: Any) -> tuple[Any, Any]:
            return gradients_of(loss, params, base, jax.tree.map(lambda x_bt: x_bt[:, :length], micro), mesh)

        def of(micro: Any, which: jax.Array | None) -> tuple[Any, Any]:
            if which is None:
                return cut(None, micro)
            return jax.lax.switch(which, [partial(cut, length) for length in lengths], micro)

        gradients, sums = _scan_micro_batches(of, params, batch, bucket_ids_a)
        if alone:
            return gradients, sums
        return jax.lax.psum((jax.tree.map(lambda x: x.astype(jnp.float32), gradients), sums), "data")

    return in_each_replica(replica, mesh, (P(), P(), P(None, "data"), P()), P())(params, base, batch, bucket_ids_a)


def _scan_micro_batches(
    gradients: Callable[..., Any], params: Any, batch: Any, bucket_ids_a: jax.Array | None
) -> tuple[Any, Any]:
    first = jax.tree.map(lambda x: x[0], (batch, bucket_ids_a))
    if jax.tree.leaves(batch)[0].shape[0] == 1:  # avoids a second copy of the gradients
        return gradients(*first)
    shapes = jax.eval_shape(gradients, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), params)

    def step(total: Any, micro: Any) -> tuple[Any, None]:
        # The barrier keeps the gradients' reduce-scatter in the loop. XLA would move it after the loop, where each
        # device has whole gradients (and its TPU compiler fails).
        return add(total, jax.lax.optimization_barrier(gradients(*micro))), None

    begin = zeros, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])
    return jax.lax.scan(step, begin, (batch, bucket_ids_a))[0]
