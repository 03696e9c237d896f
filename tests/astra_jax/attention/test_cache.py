"""A cache's rows get what is put in them, where it belongs, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.attention.cache import Cache, ChunkedCache, each, put

LAYERS, ROWS, HEADS, LENGTH, WIDTH = 2, 4, 2, 12, 3


def cache(seed: int, rows: int, length: int, layers: tuple[int, ...] = (LAYERS,)) -> Cache:
    a, b = jax.random.split(jax.random.key(seed))
    shape = (*layers, rows, HEADS)
    return Cache(jax.random.normal(a, (*shape, WIDTH, length)), jax.random.normal(b, (*shape, length, WIDTH)))


PARTS = [(5, 5, 2), (1, 10, 1), (8, 4)]


def in_parts(whole: Cache, lengths: tuple[int, ...]) -> ChunkedCache:
    ends = np.cumsum(lengths)
    return ChunkedCache(
        tuple(
            Cache(whole.k_bkhs[..., end - n : end], whole.v_bksh[..., end - n : end, :])
            for end, n in zip(ends, lengths, strict=True)
        )
    )


def joined(layer: ChunkedCache) -> Cache:
    keys, values = zip(*layer.parts, strict=True)
    return Cache(jnp.concatenate(keys, axis=-1), jnp.concatenate(values, axis=-2))


def assert_equal(one: Cache, other: Cache) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("length", [5, LENGTH, 20])
@pytest.mark.parametrize("layers", [(), (LAYERS,)])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_get_their_positions_and_no_others(length: int, layers: tuple[int, ...], apart: bool) -> None:
    """From the first place, from the middle, up to the last one, nothing, and a row that there is not."""
    index, start = [2, 0, 3, 1, ROWS], [0, 4, LENGTH - 2, 7, -1]
    count = [min(length, LENGTH), 3, 2, 0, 0]
    before, new = cache(0, ROWS, LENGTH, layers), cache(1, len(index), length, layers)
    given = (jnp.array(index), jnp.array(start), jnp.array(count))
    after = jax.jit(lambda c, n: put((c,), *given, (n,))[0] if apart else put(c, *given, n))(before, new)
    k, v = np.array(before.k_bkhs), np.array(before.v_bksh)
    for row, (slot, at, n) in enumerate(zip(index, start, count, strict=True)):
        if n:
            k[..., slot, :, :, at : at + n] = np.asarray(new.k_bkhs)[..., row, :, :, :n]
            v[..., slot, :, at : at + n, :] = np.asarray(new.v_bksh)[..., row, :, :n, :]
    np.testing.assert_array_equal(after.k_bkhs, k)
    np.testing.assert_array_equal(after.v_bksh, v)


@pytest.mark.parametrize("lengths", PARTS)
@pytest.mark.parametrize("length", [1, 5, LENGTH, 20])
def test_parts_get_what_the_whole_gets(lengths: tuple[int, ...], length: int) -> None:
    """Every place to begin at, and every count that fits: within a part, over several, up to an end, and nothing."""
    whole, new = cache(0, ROWS, LENGTH, ()), cache(1, ROWS, length, ())
    parts = in_parts(whole, lengths)
    both = jax.jit(lambda index, start, count: [put((x,), index, start, count, (new,))[0] for x in (parts, whole)])
    for start in range(LENGTH):
        for count in {0, 1, 4, LENGTH - start} & set(range(min(length, LENGTH - start) + 1)):
            # One row has so many, one has nothing, one is not there, one has one at another place.
            counts, starts = jnp.array([count, 0, 0, 1]), jnp.array([start, start, -1, LENGTH - 1 - start])
            found, expected = both(jnp.array([2, 0, ROWS, 1]), starts, counts)
            assert [part.length for part in found.parts] == list(lengths)
            assert_equal(joined(found), expected)


@pytest.mark.parametrize("lengths", PARTS)
def test_parts_are_read_and_copied_as_the_whole(lengths: tuple[int, ...]) -> None:
    whole = cache(0, ROWS, LENGTH, ())
    parts = in_parts(whole, lengths)
    assert (parts.length, parts.dtype) == (whole.length, whole.dtype)
    rows = jnp.array([3, 1, ROWS])
    assert_equal(joined(parts.gather_rows(rows)), whole.gather_rows(rows))
    for length in range(1, LENGTH + 1):
        assert_equal(joined(parts.window(length)), whole.window(length))
        moved = (jnp.array([1, 1, 0]), jnp.array([3, 0, ROWS]), length)
        assert_equal(joined(parts.copied(*moved)), whole.copied(*moved))


def test_rows_are_copied_to_rows() -> None:
    before = cache(0, ROWS, LENGTH)
    after = before.copied(jnp.array([1, 1, 0]), jnp.array([3, 0, ROWS]), 5)
    for old, new, axis in zip(before, after, (-1, -2), strict=True):
        old, new = (np.moveaxis(np.asarray(x), axis, 0) for x in (old, new))
        for target in (3, 0):
            np.testing.assert_array_equal(new[:5, :, target], old[:5, :, 1])
            np.testing.assert_array_equal(new[5:, :, target], old[5:, :, target])
        np.testing.assert_array_equal(new[:, :, 1:3], old[:, :, 1:3])


def test_layers_apart_are_as_one() -> None:
    whole = cache(0, ROWS, LENGTH)
    apart = tuple(Cache(*(x[i] for x in whole)) for i in range(LAYERS))
    for i, layer in enumerate(each(lambda one: one.window(4), apart)):
        np.testing.assert_array_equal(layer.k_bkhs, whole.window(4).k_bkhs[i])
