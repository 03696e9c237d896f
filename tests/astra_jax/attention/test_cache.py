"""A cache's rows get what is put in them, where it belongs, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.attention.cache import Cache, each, put

LAYERS, ROWS, HEADS, LENGTH, WIDTH = 2, 4, 2, 12, 3


def cache(seed: int, rows: int, length: int, layers: tuple[int, ...] = (LAYERS,)) -> Cache:
    a, b = jax.random.split(jax.random.key(seed))
    shape = (*layers, rows, HEADS)
    return Cache(jax.random.normal(a, (*shape, WIDTH, length)), jax.random.normal(b, (*shape, length, WIDTH)))


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
