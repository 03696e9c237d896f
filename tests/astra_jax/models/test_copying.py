"""The initial weights that copy: what was said is said again, before any training; the function's shapes stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.models.copying import copying_params
from astra_jax.models.qwen3.presets import Qwen3Config
from configs.quickstart import PROFILES


def tiny(n_heads: int, n_kv_heads: int, head_dim: int, n_layers: int = 3) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=64, d_model=48, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        d_ff=96, tie_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize("gap", [10, 20])
def test_what_was_said_is_said_again_before_any_training(gap) -> None:
    """Of 1,024 tokens the one that followed last time is among the likeliest; of random weights it is any."""
    model, rows, length, span = PROFILES["quick"]().model, 8, 160, 8
    tokens_rt = np.random.default_rng(0).integers(10, model.vocab_size, (rows, length))
    start = length - gap - 2 * span
    tokens_rt[:, -span:] = tokens_rt[:, start : start + span]
    positions_rt = jnp.broadcast_to(jnp.arange(length), (rows, length))

    def typical_rank(params) -> float:
        x_rtd, _ = model.forward(params, jnp.asarray(tokens_rt), positions_rt, jnp.ones((rows, length), jnp.int32))
        logits_rsv = np.asarray(x_rtd[:, -span:-1] @ model.head_kernel(params))
        right_rs1 = np.take_along_axis(logits_rsv, tokens_rt[:, 1 - span :, None], axis=-1)
        return float(np.median((logits_rsv > right_rs1).sum(-1)))

    random = model.init(jax.random.key(0))
    assert typical_rank(random) > 200
    assert typical_rank(copying_params(random, model)) < 10


@pytest.mark.parametrize(("heads", "rank"), [((6, 3, 16), 48), ((3, 3, 16), 48), ((4, 2, 8), 16)])
def test_what_the_last_layer_attends_to_is_passed_on(heads, rank) -> None:
    config = tiny(*heads)
    attention = copying_params(config.init(jax.random.key(0)), config)["layers"]["attention"]
    v_dkh, o_nhd = attention["v_dkh"][-1], attention["o_nhd"][-1]
    copied_dd = jnp.einsum("dnh,nhe->de", jnp.repeat(v_dkh, config.n_heads // config.n_kv_heads, axis=1), o_nhd)
    of_tokens_dd = copied_dd[1:, 1:]  # but for the mark
    assert np.linalg.matrix_rank(np.asarray(copied_dd), tol=1e-3) in (rank, rank - 1)
    np.testing.assert_allclose(of_tokens_dd, of_tokens_dd.T, atol=1e-5)


def test_only_what_copies_is_changed() -> None:
    config = tiny(6, 3, 16)
    before = config.init(jax.random.key(0))
    after = copying_params(before, config)
    assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert same["layers"]["mlp"]["up_df"] and same["layers"]["mlp_norm_d"]
    for name, x in after["layers"]["attention"].items():
        assert (before["layers"]["attention"][name][1] == x[1]).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny(4, 4, 16), r"n_kv_heads \* head_dim is 64; copying needs at most d_model \(48\)"),
        (tiny(3, 3, 16, n_layers=1), "n_layers is 1; copying needs two layers"),
    ],
)
def test_what_cannot_copy_is_refused(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        copying_params(config.init(jax.random.key(0)), config)
