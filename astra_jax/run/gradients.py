"""Gradients of sums, added up over micro-batches: N small batches give what one large one would.

A loss function returns *sums* over tokens and counts, never means: what they are divided by is applied once, with the
optimizer's step (`optimizers.apply_gradients`).

On a mesh each replica (`mesh`) adds up the gradients of its own rows, and replicas exchange them once, when all
micro-batches are there: so little goes over the network between slices.
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
"""(params, batch, base=frozen weights under them or None, mesh=where all are) → (summed loss, other sums)."""


def gradient_shapes(params: Any, mesh: Mesh | None = None) -> Any:
    """Of what gradients are added up in: float32, whatever the weights are, and on each weight's devices. In bfloat16 a
    sum stops growing at 256 times what is added to it.

    With several replicas there is an axis more, the first one, for each replica's own.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        if mesh is None or mesh.shape["data"] == 1:
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
        lies = NamedSharding(mesh, P("data", *x.sharding.spec))
        return jax.ShapeDtypeStruct((mesh.shape["data"], *x.shape), jnp.float32, sharding=lies)

    return jax.tree.map(shape, params)


def zero_gradients(params: Any, mesh: Mesh | None = None) -> Any:
    """Arrays of `gradient_shapes`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), gradient_shapes(params, mesh))


def gradients_of(loss: LossFunction, params: Any, base: Any, batch: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
    """(gradients of `params`, (summed loss, other sums)) of one micro-batch."""
    sums, gradients = jax.value_and_grad(partial(loss, base=base, mesh=mesh), has_aux=True)(params, batch)
    return gradients, sums


def add(total: Any, more: Any) -> Any:
    """Leaf by leaf, in the type of `total`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, more)


def added(
    loss: LossFunction, params: Any, base: Any, gradients: Any, batch: Any, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """(gradients with those of one more micro-batch, its (summed loss, other sums)); `whole` makes of both those of all
    replicas."""
    alone = mesh is None or mesh.shape["data"] == 1

    def replica(params: Any, base: Any, gradients: Any, batch: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
        more, sums = gradients_of(loss, params, base, batch, mesh)
        return add(gradients, more if alone else _own(more)), sums if alone else _own(sums)

    places = (P(), P(), P("data"), P("data"))
    return in_each_replica(replica, mesh, places, P("data"))(params, base, gradients, batch)


def _own(tree: Any) -> Any:
    """A replica's, with the axis of replicas."""
    return jax.tree.map(lambda x: x[None], tree)


def whole(tree: Any, mesh: Mesh | None) -> Any:
    """The sum over replicas of what `added` returned."""
    return tree if mesh is None or mesh.shape["data"] == 1 else jax.tree.map(lambda x: x.sum(0), tree)


def accumulated(
    loss: LossFunction,
    params: Any,
    base: Any,
    batch: Any,
    mesh: Mesh | None = None,
    *,
    lengths: Sequence[int | None] = (None,),
    which_a: jax.Array | None = None,
) -> tuple[Any, Any]:
    """(gradients, (summed loss, other sums)) of all micro-batches of a batch whose leaves are [A, B / A, T].

    Args:
        lengths: to which rows may be cut, None: they are whole; a branch of the program for each.
        which_a: int32, of each micro-batch the index of its own: what is behind that is padding and is not computed.
            None: rows are whole.
    """
    alone = mesh is None or mesh.shape["data"] == 1

    def replica(params: Any, base: Any, batch: Any, which_a: Any, mesh: AnyMesh | None) -> tuple[Any, Any]:
        def cut(length: int | None, micro: Any) -> tuple[Any, Any]:
            return gradients_of(loss, params, base, jax.tree.map(lambda x_bt: x_bt[:, :length], micro), mesh)

        def of(micro: Any, which: jax.Array | None) -> tuple[Any, Any]:
            if which is None:
                return cut(None, micro)
            return jax.lax.switch(which, [partial(cut, length) for length in lengths], micro)

        gradients, sums = _accumulated(of, params, batch, which_a)
        if alone:
            return gradients, sums
        return jax.lax.psum((jax.tree.map(lambda x: x.astype(jnp.float32), gradients), sums), "data")

    return in_each_replica(replica, mesh, (P(), P(), P(None, "data"), P()), P())(params, base, batch, which_a)


def _accumulated(gradients: Callable[..., Any], params: Any, batch: Any, which_a: jax.Array | None) -> tuple[Any, Any]:
    first = jax.tree.map(lambda x: x[0], (batch, which_a))
    if jax.tree.leaves(batch)[0].shape[0] == 1:  # no second copy of the gradients
        return gradients(*first)
    shapes = jax.eval_shape(gradients, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), params)

    def step(total: Any, micro: Any) -> tuple[Any, None]:
        # The barrier keeps the gradients' reduce-scatter in the loop: XLA would move it behind, where each device
        # holds whole gradients (and its TPU compiler fails while it tries).
        return add(total, jax.lax.optimization_barrier(gradients(*micro))), None

    begin = zeros, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])
    return jax.lax.scan(step, begin, (batch, which_a))[0]
