"""Grouped matmuls: kernels and `ragged_dot` equal one matmul a group, forward and backward, on a mesh too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import SingleDeviceSharding
from tpu_world import needs_libtpu

from astra_jax.mesh import make_mesh
from astra_jax.models.layers.grouped import GRADIENT_ROWS, ROWS, How, grouped_matmul
from astra_jax.models.layers.moe import _experts
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.models.remat import REMATS
from astra_jax.planner.cycles import count_cycles
from astra_jax.planner.hardware import Slice
from astra_jax.planner.hlo import read_hlo
from astra_jax.planner.kernels import work_of

SIZES = [100, 0, 7, 150, 0, 31]
"""Of 300 rows 12 are in no group; one group spans tiles, two are empty."""


def inputs(dtype: str):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=size) for size in ((300, 256), (len(SIZES), 256, 128), (300, 128)))
    return jnp.asarray(x, dtype), jnp.asarray(w, "float32"), jnp.asarray(dy, dtype), jnp.asarray(SIZES, jnp.int32)


def by_group(x, w, dy):
    """(products, gradients of rows, gradients of matrices), one group after the other, in float64."""
    ends = np.cumsum(SIZES)
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    for group, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
        at = slice(end - size, end)
        y[at], dx[at], dw[group] = x[at] @ w[group], dy[at] @ w[group].T, x[at].T @ dy[at]
    return y[: ends[-1]], dx[: ends[-1]], dw


@pytest.mark.parametrize("how", [How("ragged"), How("megablox_interpret"), How("megablox_interpret", cores=2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_its_gradients_are_each_groups_own(how: How, dtype: str) -> None:
    """The matrices' gradient is float32 whatever the rows are, and padding adds nothing."""
    x, w, dy, sizes = inputs(dtype)
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, how), x, w)
    dx, dw = back(jnp.where(jnp.arange(300)[:, None] < sum(SIZES), dy, 0))
    assert y.dtype == dx.dtype == jnp.dtype(dtype) and dw.dtype == jnp.float32
    want = by_group(x, w.astype(dtype), dy)
    tolerance = {"atol": 1e-3, "rtol": 1e-5} if dtype == "float32" else {"atol": 0.25, "rtol": 0.01}
    for got, expected in zip((y[: sum(SIZES)], dx[: sum(SIZES)]), want, strict=False):
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, **tolerance)
    np.testing.assert_allclose(np.asarray(dw, np.float64), want[2], atol=1e-3, rtol=1e-4)


MODEL = Qwen3Config(
    vocab_size=64,
    d_model=64,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    head_dim=8,
    d_ff=32,
    tie_embeddings=False,
    n_experts=4,
    experts_per_token=2,
)


DENSE = dataclasses.replace(MODEL, n_experts=0, experts_per_token=0, d_ff=48)


def loss_of(params, mesh, remat="none", model=MODEL):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (4, 16)))
    ones, places = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(16), tokens.shape)
    x_btd, router = model.forward(params, tokens, places, ones, mesh=mesh, remat=remat)
    return (jnp.sin(x_btd) * jnp.arange(64)).mean(), router


def loss_and_gradients(mesh):
    """Of a layer's outputs, by each parameter."""
    params = MODEL.init(jax.random.key(0))
    if mesh is not None:
        params = jax.device_put(params, MODEL.param_shardings(mesh))
    return jax.device_get(jax.jit(jax.value_and_grad(partial(loss_of, mesh=mesh), has_aux=True))(params))


@pytest.mark.slow
def test_experts_from_the_kernel_equal_the_reference_on_eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    want = loss_and_gradients(None)
    on = How.on
    monkeypatch.setattr(How, "on", lambda mesh: dataclasses.replace(on(mesh), kernel="megablox_interpret"))
    found = loss_and_gradients(make_mesh(fsdp=2, expert=2, tensor=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), found, want)


@pytest.mark.parametrize(("axes", "products"), [({}, 3 + 2 + 6), ({"fsdp": 2}, 2 + 1 + 4)])
def test_the_last_product_is_not_computed_again_and_gathered_matrices_are_one(
    axes: dict[str, int], products: int
) -> None:
    """Forward, again for the backward pass, and gradients: of gate, up and down, or of both and down."""
    mesh = make_mesh(**axes, devices=jax.devices()[:2]) if axes else None
    again = jax.make_jaxpr(jax.grad(partial(loss_of, mesh=mesh, remat="full"), has_aux=True))(
        MODEL.init(jax.random.key(0))
    )
    assert sum("ragged_dot" in one.primitive.name for one in equations(again.jaxpr)) == products


def equations(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("model", [MODEL, DENSE], ids=["experts", "dense"])
def test_what_is_computed_again_is_what_is_counted(model: Qwen3Config) -> None:
    """By the products with the layers' matrices in the gradient, `remat` by `remat`."""
    params = model.init(jax.random.key(0))
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2}

    def multiplied(remat: str) -> int:
        """Numbers of matrices that a token is multiplied with: of experts those that it goes to."""
        jaxpr = jax.make_jaxpr(jax.grad(partial(loss_of, mesh=None, model=model, remat=remat), has_aux=True))(params)
        products = [one for one in equations(jaxpr.jaxpr) if "dot_general" in one.primitive.name]
        matrices = [of.aval.shape for one in products for of in one.invars if of.aval.shape in shapes]
        return sum(math.prod(s) * (model.experts_per_token / s[0] if s[0] == model.n_experts else 1) for s in matrices)

    found = {remat: multiplied(remat) - multiplied("none") for remat in REMATS}
    assert found == {remat: model.recomputed_parameters(remat) for remat in REMATS}


@needs_libtpu
@pytest.mark.slow
def test_rows_are_weighed_and_summed_in_a_pass_each() -> None:
    """Forward, again, and backward, 4,096 tokens at Qwen3-30B-A3B's sizes: cycles beside the products."""
    of = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(Slice.parse("v5p:2x2x1").devices()[0]))
    x, weights, chosen = of((4096, 2048), "bfloat16"), of((4096, 8), "float32"), of((4096, 8), "int32")
    inwards, outwards = of((128, 2048, 768), "bfloat16"), of((128, 768, 2048), "bfloat16")

    def gradients(x, weights, matrices, chosen, dy):
        experts = jax.checkpoint(
            lambda x, weights: _experts((x, chosen, weights), 0, matrices, How("megablox", 2), others=False)
        )
        y, back = jax.vjp(experts, x, weights)
        return y, back(dy)

    compiled = jax.jit(gradients).lower(x, weights, (inwards, inwards, outwards), chosen, x).compile()
    cycles = count_cycles(read_hlo(compiled.as_text())).by_category
    # A pass that reads and writes 32,768 rows of 2,048 is 0.3 million cycles at the memory's rate.
    assert cycles["elementwise"] < 3.6e6 and cycles["copy"] < 0.5e6


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2"])
def test_the_kernels_compile_and_nothing_else_multiplies(name: str) -> None:
    """At Qwen3-30B-A3B's sizes: no expert's matrix meets another's rows, and none is turned around in memory."""
    device = Slice.parse(name).devices()[0]
    of = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    x, dy, sizes = of((4096, 2048), "bfloat16"), of((4096, 768), "bfloat16"), of((128,), "int32")
    how = How("megablox", cores=2 if "v5p" in name else 1)

    def gradients(x, w, sizes, dy):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, how), x, w)[1](dy)

    for w in (of((128, 2048, 768), "float32"), of((128, 768, 2048), "float32")):
        args = (x, w, sizes, dy) if w.shape[1] == 2048 else (dy, w, sizes, x)
        module = read_hlo(jax.jit(gradients).lower(*args).compile().as_text())
        counted = count_cycles(module)
        assert [counted.kernels[name] for name in sorted(counted.kernels)] == [1.0, 1.0]
        assert all("gmm" in name for name in counted.kernels) and counted.by_category.get("matmul", 0) == 0
        work = [found for one in module.computations[module.entry].instructions if (found := work_of(one)) is not None]
        tiles = (4096 + 128 * ROWS, 4096 + 128 * GRADIENT_ROWS)  # as the planner counts them: one more for each group
        assert sorted(one.flops for one in work) == [2.0 * rows * 2048 * 768 for rows in tiles]
        assert {one.part for one in work} == {"experts"}
