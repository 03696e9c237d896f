"""Storage of an optimizer's running means: in bfloat16, and in host memory.

Paths identify them in the optimizer's state: each ends in the path of its weight.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from astra_jax.axes import stacked_matrices

HOST = "pinned_host"
"""JAX's name for host memory that devices access directly."""

Array = jax.Array
_DEVICE = jax.memory.Space.Device


def names_of(params: Any) -> list[str]:
    """Return the weights' paths, in order."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]


def owner_of(path: Any, x: Any, names: Collection[str]) -> str | None:
    """Return the path of the weight whose statistics a state leaf has; None for a counter or a common constant."""
    text = jax.tree_util.keystr(path)
    return max((name for name in names if text.endswith(name)), key=len, default=None) if x.ndim else None


def steps_of(state: Any) -> Array:
    """Return the number of updates that an optimizer has made."""
    count: Array = optax.tree.get_all_with_path(state, "count")[0][1]
    return count


def rounded(x: Array, key: Array) -> Array:
    """Round to one of the two neighbours in bfloat16, with probabilities that make the expectation exact."""
    # A bfloat16 is the upper half of a float32: noise in the lower half carries with the right probability.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    nearby = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), nearby, x.astype(jnp.bfloat16))


def in_bfloat16(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Keep running means in bfloat16 and compute them in float32. They are rounded stochastically, since with rounding
    to nearest a decay of 0.999 would never change them."""

    def kept(state: Any, params: Any, how: Callable[[Any, Array], Array]) -> Any:
        names = names_of(params)
        return jax.tree.map_with_path(lambda path, x: how(path, x) if owner_of(path, x, names) else x, state)

    def init(params: Any) -> Any:
        return kept(optimizer.init(params), params, lambda _, x: x.astype(jnp.bfloat16))

    def update(gradients: Any, state: Any, params: Any = None, *, part: Any = 0, **extra: Any) -> tuple[Any, Any]:
        whole = kept(state, params, lambda _, x: x.astype(jnp.float32))
        updates, new = optimizer.update(gradients, whole, params, **extra)
        key = jax.random.fold_in(jax.random.key(steps_of(new)), part)

        def round_one(path: Any, x: Array) -> Array:  # by name: its noise differs from its weight's
            return rounded(x, jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode())))

        return updates, kept(new, params, round_one)

    return optax.GradientTransformationExtraArgs(init, update)


Step = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""(params, optimizer state, gradients, keys, part) → (params, optimizer state); for all weights, or for some, with
`optax.MaskedNode`s for the others. `part` makes random numbers distinct."""


def may_be_away(params: Any) -> set[str]:
    """Return the weights whose statistics may be in host memory: the layers' matrices, processed layer by layer."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return {jax.tree_util.keystr(path) for path in paths if stacked_matrices(path) is not None}


def started(state: Any, places: Any) -> Any:
    """Place a new state inside a program, with its host part in host memory."""

    def put(x: Array, place: Any) -> Array:
        return jax.device_put(x, jax.memory.Space.Host) if place.memory_kind == HOST else x

    return jax.tree.map(put, state, places)


def restored(state: Any) -> Any:
    """Prepare a restored state for programs. JAX treats host arrays not made by a program or `device_put` as device
    arrays, so each leaf is copied to the devices and back."""

    def known(x: Array) -> Array:
        if x.sharding.memory_kind != HOST or x.aval.memory_space != _DEVICE:
            return x
        return jax.block_until_ready(jax.device_put(on_devices(x), x.sharding))

    return jax.tree.map(known, state)


def on_devices(x: Any) -> Any:
    """Copy an array from host memory to its devices, if it is there."""
    away = isinstance(x, Array) and x.sharding.memory_kind == HOST
    return jax.device_put(x, x.sharding.with_memory_kind("device")) if away else x


def away(tree: Any) -> Any:
    """Copy arrays to host memory, each part on its device's host; `on_devices` is the inverse."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(HOST)), tree)


def stepped(step: Step, params: Any, state: Any, gradients: Any, keys: Any) -> tuple[Any, Any]:
    """Run `step` with the state on the devices.

    The part in host memory is copied to the devices and back, a layer at a time, in a loop that updates in place.
    Outside a loop the compiler would start all copies before the forward pass, as soon as their source exists.
    """
    if all(jax.typeof(x).memory_space == _DEVICE for x in jax.tree.leaves(state)):
        return step(params, state, gradients, keys, 0)
    names, away = names_of(params), may_be_away(params)

    def weights(tree: Any, there: bool) -> Any:
        return _masked(tree, lambda path, _: (jax.tree_util.keystr(path) in away) == there)

    def owned(there: bool | None) -> Any:
        def kept(path: Any, x: Array) -> bool:
            owner = owner_of(path, x, names)
            return there is None if owner is None else (owner in away) == there

        return _masked(state, kept)

    common = owned(None)  # counters
    rest = step(
        weights(params, False), _merged(owned(False), common), weights(gradients, False), weights(keys, False), 0
    )
    layer_gradients, layer_keys = weights(gradients, True), weights(keys, True)

    def layer(i: Array, given: tuple[Any, Any]) -> tuple[Any, Any]:
        def slice_of(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1)

        def put(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new, i, 0)

        of_layer = jax.tree.map(slice_of, (*given, layer_gradients))
        here = jax.tree.map(lambda x: jax.device_put(x, _DEVICE), of_layer[1])
        own_keys = jax.tree.map(lambda key: jax.random.fold_in(key, i + 1), layer_keys)
        new, here = step(of_layer[0], _merged(here, common), of_layer[2], own_keys, i + 1)
        back = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), _like(here, given[1]))
        return jax.tree.map(put, given, (new, back))

    start = weights(params, True), owned(True)
    layers = jax.tree.leaves(start[0])[0].shape[0]
    new_params, new_state = jax.lax.fori_loop(0, layers, layer, start)
    return _merged(rest[0], new_params), _merged(rest[1], new_state)


def _masked(tree: Any, kept: Callable[[Any, Any], bool]) -> Any:
    return jax.tree.map_with_path(lambda path, x: x if kept(path, x) else optax.MaskedNode(), tree)


def _hidden(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _merged(one: Any, other: Any) -> Any:
    """Merge two trees of the same structure with complementary masks."""
    return jax.tree.map(lambda x, y: y if _hidden(x) else x, one, other, is_leaf=_hidden)


def _like(tree: Any, mask: Any) -> Any:
    """Mask a tree like another one."""
    return jax.tree.map(lambda x, y: y if _hidden(y) else x, tree, mask, is_leaf=_hidden)
