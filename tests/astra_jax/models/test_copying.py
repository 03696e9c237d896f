"""The initial weights that copy: value and output matrices are inverse, the function's shapes stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.models.copying import copying_params
from astra_jax.models.qwen3.presets import Qwen3Config


def tiny(n_heads: int, n_kv_heads: int, head_dim: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=64, d_model=48, n_layers=3, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        d_ff=96, tie_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "rank"), [((6, 3, 16), 48), ((3, 3, 16), 48), ((4, 2, 8), 16)])
@pytest.mark.parametrize("layer", [0, 2])
def test_what_a_head_attends_to_is_passed_on(heads, rank, layer) -> None:
    config = tiny(*heads)
    attention = copying_params(config.init(jax.random.key(0)), config)["layers"]["attention"]
    v_dkh, o_nhd = attention["v_dkh"][layer], attention["o_nhd"][layer]
    copied_dd = jnp.einsum("dnh,nhe->de", jnp.repeat(v_dkh, config.n_heads // config.n_kv_heads, axis=1), o_nhd)
    np.testing.assert_allclose(copied_dd @ copied_dd, copied_dd, atol=1e-5)  # a projection
    assert np.linalg.matrix_rank(np.asarray(copied_dd), tol=1e-3) == rank


def test_only_what_copies_is_changed() -> None:
    config = tiny(6, 3, 16)
    before = config.init(jax.random.key(0))
    after = copying_params(before, config)
    assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert same["layers"]["attention"]["k_dkh"] and same["layers"]["mlp"]["up_df"] and same["final_norm_d"]
    for name in ("v_dkh", "o_nhd", "q_dnh"):
        assert (before["layers"]["attention"][name][1] == after["layers"]["attention"][name][1]).all()


def test_too_many_heads_are_refused() -> None:
    config = tiny(4, 4, 16)
    with pytest.raises(ValueError, match=r"n_kv_heads \* head_dim is 64; copying needs at most d_model \(48\)"):
        copying_params(config.init(jax.random.key(0)), config)
