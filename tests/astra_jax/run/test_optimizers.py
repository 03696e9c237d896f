"""The optimizers: which weights Muon takes, that its updates are orthogonal, and what is not decayed."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import moments
from astra_jax.run.config import TrainingConfig
from astra_jax.run.optimizers import apply_gradients, apply_updates, learning_rate, make_optimizer

CONFIG = Qwen3Config(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, tie_embeddings=True
)
MATRICES = {"q_dnh": (32, 32), "k_dkh": (32, 16), "v_dkh": (32, 16), "o_nhd": (32, 32)}
MATRICES |= {"gate_df": (32, 48), "up_df": (32, 48), "down_fd": (48, 32)}


def settings(name: str, **changes) -> TrainingConfig:
    return TrainingConfig(steps=1, batch_size=1, learning_rate=1.0, optimizer=name, **changes)


@functools.cache
def one_update(name: str, *, weight_decay: float = 0.0, max_grad_norm: float = 1e9):
    """(parameters, gradients, updates) of a first step at learning rate 1."""
    params = CONFIG.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    gradients = jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    optimizer = make_optimizer(settings(name, b2=0.99, weight_decay=weight_decay, max_grad_norm=max_grad_norm), 1.0)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return params, gradients, updates


def test_muon_makes_each_layers_matrices_orthogonal() -> None:
    *_, updates = one_update("muon")
    flat = updates["layers"]["attention"] | updates["layers"]["mlp"]
    for name, shape in MATRICES.items():
        for layer in range(CONFIG.n_layers):
            matrix = np.asarray(flat[name][layer]).reshape(shape)
            values = np.linalg.svd(matrix, compute_uv=False)
            # Five Newton-Schulz steps bring singular values near 1, not to it.
            assert values.min() / values.max() > 0.5, name
            np.testing.assert_allclose(np.sqrt(np.mean(matrix**2)), 0.2, rtol=0.25, err_msg=name)


def test_muon_leaves_embedding_and_norms_to_adamw() -> None:
    *_, muon = one_update("muon")
    *_, adamw = one_update("adamw")
    np.testing.assert_allclose(muon["embed_vd"], adamw["embed_vd"], atol=1e-5)
    np.testing.assert_allclose(muon["layers"]["mlp_norm_d"], adamw["layers"]["mlp_norm_d"], atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_norms_are_not_decayed_and_all_else_is(name) -> None:
    params, _, plain = one_update(name)
    *_, decayed = one_update(name, weight_decay=0.1)
    difference = jax.tree.map(lambda a, b: a - b, decayed, plain)
    for path, leaf in jax.tree.leaves_with_path(difference):
        weight = params
        for key in path:
            weight = weight[key.key]
        expected = 0.0 * weight if "norm" in jax.tree_util.keystr(path) else -0.1 * weight
        np.testing.assert_allclose(leaf, expected, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_are_clipped_by_their_global_norm(name) -> None:
    optimizer = make_optimizer(settings(name, b1=0.0, b2=0.0, eps=1.0, max_grad_norm=0.5), 1.0)
    params = {"embed_vd": jnp.zeros((2, 2))}
    gradient = {"embed_vd": jnp.full((2, 2), 3.0)}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["embed_vd"], -0.25 / 1.25, rtol=1e-5)  # 3 / norm 6 * 0.5 = 0.25; eps is 1


def test_a_step_is_optaxs_to_the_bit() -> None:
    """AdamW behind its clip; ours is only told the norm."""
    params, gradients, _ = one_update("adamw")
    reference = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.0))
    ours = make_optimizer(settings("adamw", max_grad_norm=0.5), 1e-2)
    expected, state = reference.update(gradients, reference.init(params), params)
    updates, own = ours.update(gradients, ours.init(params), params, norm=optax.tree.norm(gradients))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves((updates, own)), jax.tree.leaves((expected, state)))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_left_out_takes_its_place_on_the_schedule(name) -> None:
    """Which is that of the run's steps: what is logged, and where it ends."""
    config = settings(name, b1=0.0, b2=0.0, eps=1e-30, weight_decay=0.0, max_grad_norm=1e9)
    config = dataclasses.replace(config, steps=6, warmup_fraction=0.2, final_fraction=0.0)
    schedule = learning_rate(config, 6)
    optimizer = make_optimizer(config, schedule)
    params = {"w": jnp.zeros(())}
    state, taken = optimizer.init(params), []
    for gradient in (1.0, math.nan, math.inf, 1.0, 1.0, 1.0):
        before, gradients = params["w"], {"w": jnp.float32(gradient)}
        options = {"optimizer": optimizer, "rounding": "nearest"}
        params, state, _ = apply_gradients(params, state, gradients, jnp.float32(1), **options)
        taken.append(float(before - params["w"]))
    rates = [float(schedule(step)) for step in range(6)]
    assert taken == pytest.approx([rates[0], 0.0, 0.0, *rates[3:]], abs=1e-6)
    assert int(moments.steps_of(state)) == 4, "Adam's means have seen as many gradients"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="optimizer is 'sgd'; use one of adamw, muon"):
        make_optimizer(settings("sgd"), 1.0)


def test_stochastic_rounding_is_exact_in_expectation_and_keeps_small_updates() -> None:
    """An update of a hundredth of a bfloat16's last place: lost when rounded to nearest, kept in the mean otherwise."""
    params = {"a": jnp.full((4000,), 1.0, jnp.bfloat16), "b": jnp.full((4000,), -3.0, jnp.bfloat16)}
    last_place = {"a": 2.0**-7, "b": 2.0**-6}
    updates = {name: jnp.full((4000,), size * 0.01, jnp.float32) for name, size in last_place.items()}
    nearest = stochastic = params
    for step in range(50):
        nearest = apply_updates(nearest, updates, rounding="nearest", seed=jnp.int32(step))
        stochastic = apply_updates(stochastic, updates, rounding="stochastic", seed=jnp.int32(step))
    for name, size in last_place.items():
        assert stochastic[name].dtype == jnp.bfloat16
        assert (nearest[name] == params[name]).all()
        moved = np.asarray(stochastic[name], np.float64).mean() - float(params[name][0])
        assert moved == pytest.approx(50 * 0.01 * size, rel=0.1)
        found = set(np.unique(np.asarray(stochastic[name], np.float64)))
        assert found <= {float(params[name][0]) + k * size for k in range(-2, 10)}, "neighbours of the sums"


def test_rounding_leaves_float32_and_exact_sums_and_infinities_alone() -> None:
    for rounding in ("nearest", "stochastic"):
        exact = jnp.array([1.0, -2.5, 0.0, jnp.inf, -jnp.inf], jnp.bfloat16)
        kept = apply_updates({"x": exact}, {"x": jnp.zeros(5)}, rounding=rounding, seed=jnp.int32(0))["x"]
        np.testing.assert_array_equal(np.asarray(kept, np.float32), np.asarray(exact, np.float32))
        full = apply_updates({"x": jnp.ones(3)}, {"x": jnp.full(3, 1e-7)}, rounding=rounding, seed=jnp.int32(0))["x"]
        np.testing.assert_array_equal(full, jnp.ones(3) + jnp.full(3, 1e-7))


def test_the_state_of_bfloat16_weights_is_float32() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), CONFIG.init(jax.random.key(0)))
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(settings(name), 1e-3)
        state = optimizer.init(params)
        updates, state = optimizer.update(params, state, params)
        for leaf in [*jax.tree.leaves(updates), *(x for x in jax.tree.leaves(state) if x.ndim)]:
            assert leaf.dtype == jnp.float32
