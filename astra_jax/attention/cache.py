"""Keys and values of past positions, as decoding reads and extends them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

Array = jax.Array


class Cache(NamedTuple):
    """Place s of a row is the row's position s. Of one layer, or with a leading axis of layers.

    The axes are in the order in which attention's two matmuls read them. On CPUs turning [S, H] around in each step
    takes two thirds of a tiny model's decoding (2.4 ms against 7.4 ms a step of 16 rows of 256 on two cores); on a v6e
    reading keys with the width last takes 9 % longer (compiled cycles, 4B, 16 rows of 4,096).
    """

    k_bkhs: Array
    v_bksh: Array

    @property
    def length(self) -> int:
        return self.v_bksh.shape[-2]

    def window(self, length: int) -> Cache:
        """The first `length` positions."""
        return Cache(self.k_bkhs[..., :length], self.v_bksh[..., :length, :])

    def taken(self, index_r: Array) -> Cache:
        """These rows."""
        return Cache(*(jnp.take(x, index_r, axis=-4, mode="clip") for x in self))

    def sliced(self, index_r: Array) -> Cache:
        """These rows, each by a slice: unlike a gather, it is read through the slice of a layer that a scan takes."""

        def rows(x: Array) -> Array:
            axis = x.ndim - 4
            parts = [jax.lax.dynamic_slice_in_dim(x, index_r[i], 1, axis) for i in range(len(index_r))]
            return jnp.concatenate(parts, axis)

        return Cache(*map(rows, self))

    def with_row(self, row: Array, index: Array, start: Array, count: Array, new: Cache) -> Cache:
        """With the first `count` positions of row `row` of `new` from `start` on in the row `index`, as far as there
        are places for them: `start` may be before the first. See `put`."""
        width = min(new.length, self.length)
        # Of more than there are places for those that begin at the first place, or behind it.
        skipped = jnp.clip(-start, 0, new.length - width) if new.length > width else 0
        start, count = start + skipped, count - skipped
        # A slice that would end behind the cache begins earlier, and what is new lies later in it; or the other way
        # around, where it would begin before the cache.
        at = jnp.clip(start, 0, self.length - width)
        moved = start - at
        at_t = jnp.arange(width)
        written_t = (at_t >= moved) & (at_t < moved + count)

        def write(x: Array, more: Array, positions: int, mask: Array) -> Array:
            place: list[Any] = [0] * x.ndim
            place[-4], place[positions] = index, at
            more = jax.lax.dynamic_slice_in_dim(more, row, 1, axis=more.ndim - 4)
            if new.length > width:
                more = jax.lax.dynamic_slice_in_dim(more, skipped, width, axis=more.ndim + positions)
            more = jnp.roll(more, moved, axis=positions)
            old = jax.lax.dynamic_slice(x, place, more.shape)
            return _in_place(x, jnp.where(mask, more, old), place)

        k_bkhs = write(self.k_bkhs, new.k_bkhs, -1, written_t)
        return Cache(k_bkhs, write(self.v_bksh, new.v_bksh, -2, written_t[:, None]))

    def copied(self, source_r: Array, target_r: Array, length: int) -> Cache:
        """With the first `length` positions of some rows in others, one after the other; rows that there are not get
        nothing. Layer by layer: a long row of all layers may be more than there is room for."""
        layers = self.v_bksh.shape[0] if self.v_bksh.ndim > 4 else 1

        def one(i: Array, cache: Cache) -> Cache:
            row, layer = i // layers, i % layers

            def move(x: Array, positions: int) -> Array:
                sizes = [1] * (x.ndim - 3) + list(x.shape[-3:])
                sizes[positions] = min(length, cache.length)
                leading = [layer] if x.ndim > 4 else []
                target: list[Any] = [*leading, target_r[row], 0, 0, 0]
                new = jax.lax.dynamic_slice(x, [*leading, source_r[row], 0, 0, 0], sizes)
                old = jax.lax.dynamic_slice(x, target, sizes)
                return _in_place(x, jnp.where(target_r[row] < x.shape[-4], new, old), target)

            return Cache(move(cache.k_bkhs, -1), move(cache.v_bksh, -2))

        return jax.lax.fori_loop(0, layers * len(source_r), one, self)

    def at_step(self, step: Array, new: Cache) -> Cache:
        """With the one position of `new` at place `step` of every row."""
        write = jax.lax.dynamic_update_slice_in_dim
        k_bkhs = write(self.k_bkhs, new.k_bkhs, step, axis=self.k_bkhs.ndim - 1)
        return Cache(k_bkhs, write(self.v_bksh, new.v_bksh, step, axis=self.v_bksh.ndim - 2))

    @property
    def dtype(self) -> Any:
        return self.v_bksh.dtype


class InParts(NamedTuple):
    """One layer's cache in arrays of their own: those places first that are in the first of them.

    What a window leaves out is left out as whole arrays, of which nothing is copied; see `cpu.programs.kept_part`.
    """

    parts: tuple[Cache, ...]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def window(self, length: int) -> InParts:
        """The first `length` positions."""
        return InParts(tuple(part.window(length - at) for at, part in places(self) if at < length))

    def taken(self, index_r: Array) -> InParts:
        """These rows."""
        return InParts(tuple(part.taken(index_r) for part in self.parts))

    def copied(self, source_r: Array, target_r: Array, length: int) -> InParts:
        """As `Cache.copied`."""
        return InParts(
            tuple(part.copied(source_r, target_r, length - at) if at < length else part for at, part in places(self))
        )


Layer = Cache | InParts
"""What one layer keeps."""

Caches = Cache | tuple[Layer, ...]
"""One for all layers, or one a layer."""


def places(layer: Layer) -> list[tuple[int, Cache]]:
    """Its arrays, one after the other, each with the position of its first place."""
    parts = layer.parts if isinstance(layer, InParts) else (layer,)
    return list(zip(itertools.accumulate((part.length for part in parts), initial=0), parts, strict=False))


def _in_place(x: Array, part: Array, place: list[Any]) -> Array:
    return with_layout_constraint(jax.lax.dynamic_update_slice(x, part, place), Layout(tuple(range(x.ndim))))


def of_tokens(k_btkh: Array, v_btkh: Array, dtype: Any) -> Cache:
    """One layer's, of T new tokens, as they are kept."""
    return Cache(k_btkh.transpose(0, 2, 3, 1).astype(dtype), v_btkh.transpose(0, 2, 1, 3).astype(dtype))


def each(function: Callable[..., Any], *caches: Any) -> Any:
    """`function` of a cache, or of each layer's where they are apart."""
    if isinstance(caches[0], Cache):
        return function(*caches)
    return tuple(function(*layers) for layers in zip(*caches, strict=True))


def put(caches: Caches, index_r: Array, start_r: Array, count_r: Array, new: Caches) -> Any:
    """With the first `count_r` positions of `new` from `start_r` on in the rows `index_r`.

    Row by row, each by one slice that is read and written back, under the order of axes that the cache has. On TPUs a
    scatter, or a slice under an order that XLA chooses, copies all keys twice: to have the positions first, and to put
    them back. (Rows that are not in the cache have a count of 0.)

    Where layers are apart one loop writes them all, of each part of theirs (`InParts`). Its length is not known to the
    compiler, which therefore keeps it as a loop even for one row, and all that is read to make `new` comes before it.
    XLA copies a layer, twice, that it may write before it has read it: of 30 layers with 4 x 8,192 places that took
    0.37 of the 0.43 s in which 64 tokens were prefilled.
    """
    if isinstance(caches, Cache):
        return _put(caches, index_r, start_r, count_r, new, None, len(index_r))
    written = []
    for of_layers in zip(*map(places, caches), strict=True):  # the same part of each
        part = tuple(one for _, one in of_layers)
        starts_r = start_r - of_layers[0][0]
        there_r = (count_r > 0) & (starts_r < part[0].length) & (starts_r + count_r > 0)
        written.append(_put(part, index_r, starts_r, count_r, new, jnp.argsort(~there_r), jnp.sum(there_r)))
    return tuple(
        InParts(one) if isinstance(layer, InParts) else one[0]
        for layer, one in zip(caches, zip(*written, strict=True), strict=True)
    )


def _put(
    caches: Cache | tuple[Cache, ...],
    index_r: Array,
    start_r: Array,
    count_r: Array,
    new: Any,
    order_r: Array | None,
    rows: Any,
) -> Any:
    """`put` of the first `rows` of `order_r`; None is their own order."""

    def one(i: Array, caches: Any) -> Any:
        row = i if order_r is None else order_r[i]
        at = [jax.lax.dynamic_index_in_dim(x, row, keepdims=False) for x in (index_r, start_r, count_r)]
        return each(lambda layer, more: layer.with_row(row, *at, more), caches, new)

    return jax.lax.fori_loop(0, rows, one, caches)


def first(caches: Caches) -> Layer:
    """One of them, for what all have in common."""
    return caches if isinstance(caches, Cache) else caches[0]
