"""One device equals eight: loss and gradients on every mesh axis, alone and mixed (two processes: `test_hosts.py`)."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_world import DENSE, EXPERTS, LENGTH, ROWS, packed_batch
from selection import by_day

from astra_jax.axes import is_bias
from astra_jax.head import _Plan, summed_loss, token_logprobs
from astra_jax.mesh import AXES, batch_sharding, check_batch, make_mesh, unzigzag, zigzag, zigzag_order
from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Llama3Scaling
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.run.batch import on_mesh
from astra_jax.run.optimizers import initial_state
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import loss_sums, sft_optimizer, train_step

TIED = dataclasses.replace(DENSE, tie_embeddings=True)
LLAMA = LlamaConfig(**{**vars(TIED), "llama3": Llama3Scaling(8.0, 32)})
QWEN2 = Qwen2Config(**{**vars(DENSE), "attention_bias": True})


def loss_and_gradients(config: Decoder, mesh, *, remat: str = "full"):
    params, batch = config.init(jax.random.key(0)), packed_batch()
    params = jax.tree_util.tree_map_with_path(lambda path, x: x + 0.1 * is_bias(path[-1].key), params)
    if mesh is not None:
        params = jax.device_put(params, config.param_shardings(mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
    gradient = jax.value_and_grad(lambda p, b: loss_sums(p, b, model=config, remat=remat, mesh=mesh), has_aux=True)
    (loss, (count, router)), gradients = jax.jit(gradient)(params, batch)
    return jax.device_get((loss / count, jax.tree.map(lambda g: g / count, gradients), router))


@cache
def on_one_device(name: str):
    return loss_and_gradients(CONFIGS[name], None)


CONFIGS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS, "llama": LLAMA, "qwen2": QWEN2}
MESHES = [
    ("dense", {"data": 8}),
    ("dense", {"fsdp": 8}),
    ("dense", {"context": 8}),
    ("dense", {"tensor": 8}),
    ("dense", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("dense", {"fsdp": 2, "context": 2, "tensor": 2}),
    ("tied", {"context": 4, "tensor": 2}),
    ("experts", {"expert": 8}),
    ("experts", {"fsdp": 8}),
    ("experts", {"expert": 2, "context": 2, "tensor": 2}),
    ("llama", {"fsdp": 4, "tensor": 2}),
    ("qwen2", {"fsdp": 4, "tensor": 2}),
    ("qwen2", {"fsdp": 2, "context": 2, "tensor": 2}),
]


BY_DAY = [("tied", {"context": 4, "tensor": 2}), ("qwen2", {"fsdp": 4, "tensor": 2})]
"""`test_a_training_step_equals_one_device_and_accumulation` has dense layers and experts by day."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), by_day(MESHES, *BY_DAY), ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x))
)
def test_eight_devices_equal_one(name, axes) -> None:
    loss, gradients, router = loss_and_gradients(CONFIGS[name], make_mesh(**axes))
    expected_loss, expected, expected_router = on_one_device(name)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    jax.tree.map(lambda ours, one: np.testing.assert_allclose(ours, one, atol=1e-5), gradients, expected)
    if router is not None:
        jax.tree.map(lambda ours, one: np.testing.assert_allclose(ours, one, rtol=1e-5), router, expected_router)


def test_biases_lie_where_their_heads_do() -> None:
    attention = QWEN2.param_shardings(make_mesh(fsdp=4, tensor=2))["layers"]["attention"]
    assert {name: tuple(one.spec) for name, one in attention.items() if is_bias(name)} == {
        "q_bias_nh": (None, "tensor", None),
        "k_bias_kh": (None, "tensor", None),
        "v_bias_kh": (None, "tensor", None),
    }
    with_output = dataclasses.replace(LLAMA, attention_bias=True).param_shardings(make_mesh(tensor=8))
    assert with_output["layers"]["attention"]["o_bias_d"].is_fully_replicated


@cache
def whole_step(model, accumulation: int, mesh):
    """Parameters and metrics after a training step in `accumulation` micro-batches."""
    shardings = None if mesh is None else model.param_shardings(mesh)
    data, rows = DataConfig(seq_len=LENGTH), {"batch_size": ROWS, "micro_batch_size": ROWS // accumulation}
    config = SFTConfig(data=data, **rows, learning_rate=1e-2, max_grad_norm=1e9, eps=1e-3)
    params, opt_state = initial_state(model.init(jax.random.key(0)), sft_optimizer(config, steps=10), shardings)
    batch = jax.tree.map(lambda x: jnp.asarray(x.reshape(accumulation, -1, LENGTH)), packed_batch())
    params, _, metrics = train_step(params, opt_state, batch, model=model, config=config, steps=10, mesh=mesh)
    return jax.device_get((params, metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (DENSE, {"fsdp": 2, "context": 2, "tensor": 2}),
        (EXPERTS, {"expert": 2, "context": 2, "tensor": 2}),
        *by_day(
            [
                (DENSE, {}),
                (DENSE, {"data": 2, "fsdp": 2, "context": 2}),
                (EXPERTS, {"data": 2, "expert": 2, "context": 2}),
                (TIED, {"data": 4, "tensor": 2}),
            ]
        ),
    ],
)
def test_a_training_step_equals_one_device_and_accumulation(model, axes) -> None:
    """Parameters after one whole step: on a mesh and in two micro-batches, against one device and one."""
    expected, expected_metrics = whole_step(model, 1, None)
    params, metrics = whole_step(model, 2, make_mesh(**axes) if axes else None)
    jax.tree.map(lambda ours, one: np.testing.assert_allclose(ours, one, atol=2e-5), params, expected)
    assert metrics["train/loss"] == pytest.approx(expected_metrics["train/loss"], abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(expected_metrics["train/grad_norm"], rel=1e-5)
    for name in expected_metrics.keys() - {"train/loss", "train/grad_norm"}:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name


def test_the_router_counts_real_tokens_only() -> None:
    router = on_one_device("experts")[2]
    real = (packed_batch().segment_ids_bt > 0).sum()
    np.testing.assert_array_equal(router.tokens, real)
    np.testing.assert_array_equal(router.assigned_e.sum(-1), real * EXPERTS.experts_per_token)
    assert (router.entropy / real < np.log(EXPERTS.n_experts)).all() and (router.entropy > 0).all()


@pytest.mark.parametrize(
    ("axes", "words", "peers"),
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, 96, ()),  # 48 words of a matrix, or among two 64 tokens and 24 words
        ({"fsdp": 2, "expert": 2, "context": 2}, 512, ("fsdp", "expert", "context")),
        ({"fsdp": 8}, 516, ()),  # does not divide
        *by_day(
            [
                ({"tensor": 8}, 128, ()),
                ({"fsdp": 4, "context": 2}, 128, ("context",)),
                ({"fsdp": 2, "context": 2, "tensor": 2}, 384, ("fsdp", "context")),
                ({"data": 2, "fsdp": 4}, 512, ("fsdp",)),
            ]
        ),
    ],
)
def test_the_head_over_a_spread_vocabulary(axes, words, peers) -> None:
    """Logprobs, entropies and gradients at a temperature, with a chunk that does not divide the tokens; whichever
    devices see each other's tokens."""
    rng = np.random.default_rng(0)
    x_btd, w_dv = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 16, 64), (64, words)))
    targets_bt = jnp.asarray(rng.integers(0, words, (8, 16)))
    assert _Plan.of(1.0, None, make_mesh(**axes), words, targets_bt.size).peers == peers
    weights = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)

    def objective(logps, entropies, weights):
        return (logps * weights + jnp.sin(entropies) * weights).sum(), (entropies * weights).sum()

    def run(mesh):
        def total(x, w):
            how = {"temperature": 0.7, "chunk": 5, "mesh": mesh, "has_entropy_gradient": True}
            return summed_loss(objective, x, w, targets_bt, weights, weights, **how)

        measured = jax.jit(partial(token_logprobs, temperature=0.7, chunk=5, mesh=mesh))(x_btd, w_dv, targets_bt)
        return measured, jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(x_btd, w_dv)

    logits = x_btd @ w_dv / 0.7
    (logps, entropy), ours = run(make_mesh(**axes))
    logps_all = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(logps, jnp.take_along_axis(logps_all, targets_bt[..., None], -1)[..., 0], atol=2e-5)
    np.testing.assert_allclose(entropy, -(jnp.exp(logps_all) * logps_all).sum(-1), atol=2e-5)
    jax.tree.map(lambda mine, one: np.testing.assert_allclose(mine, one, atol=5e-5, rtol=1e-5), ours, run(None)[1])


def test_zigzag_gives_each_device_an_early_and_a_late_chunk() -> None:
    order = zigzag_order(16, 4)
    assert order.reshape(4, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    x = jnp.arange(48).reshape(1, 16, 3)
    np.testing.assert_array_equal(unzigzag(zigzag(x, 4), 4), x)
    with pytest.raises(ValueError, match="20 does not divide into 8 chunks"):
        zigzag_order(20, 4)


def test_a_mesh_takes_a_row_for_each_place_where_a_micro_batch_is_left_open() -> None:
    open_ = SFTConfig(batch_size=16)
    mesh = make_mesh(data=2, fsdp=2, context=2)
    assert on_mesh(open_, mesh).micro_batch_rows == 4 and on_mesh(open_, mesh).micro_batches == 4
    assert on_mesh(open_, None) is open_ and open_.micro_batch_rows == 16
    own = dataclasses.replace(open_, micro_batch_size=8)
    assert on_mesh(own, mesh) is own


def test_meshes_that_divide_nothing_are_refused_by_name() -> None:
    assert tuple(make_mesh(data=-1).shape) == AXES
    with pytest.raises(ValueError, match="needs 3 devices, there are 8"):
        make_mesh(fsdp=3)
    with pytest.raises(ValueError, match=r"embed_vd.*dimension 1 is 60, which mesh axis 'fsdp' of 8 devices"):
        dataclasses.replace(DENSE, d_model=60).param_shardings(make_mesh(fsdp=8))
    with pytest.raises(ValueError, match=r"k_dkh.*dimension 2 is 4, which mesh axis 'tensor' of 8 devices"):
        dataclasses.replace(DENSE, n_heads=4, n_kv_heads=4).param_shardings(make_mesh(tensor=8))
    with pytest.raises(ValueError, match="12 rows, which mesh axes data x fsdp x expert = 8 do not divide; use 16"):
        check_batch(make_mesh(data=2, fsdp=4), 12, 64, "data.seq_len")
    with pytest.raises(ValueError, match=r"data.seq_len is 100, .*'context' of 8 devices cuts into 16 chunks; use 112"):
        check_batch(make_mesh(context=8), 8, 100, "data.seq_len")
