"""Matmuls in 8 bits: near those in the model's dtype, on any mesh, and on the chips that have them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_world import DENSE, EXPERTS, LENGTH, ROWS, packed_batch
from tpu_world import needs_libtpu

from astra_jax.base.errors import InputError, UserError
from astra_jax.mesh import batch_sharding, make_mesh
from astra_jax.models.layers import quantized
from astra_jax.models.layers.linear import linear
from astra_jax.planner.hardware import Slice
from astra_jax.planner.hlo import read_hlo
from astra_jax.run.matmuls import check_matmul
from astra_jax.run.optimizers import initial_state
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import loss_sums, sft_optimizer, train_step

needs_qwix = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason=f"8 bits want {quantized.INSTALL}")
COSINE = {"int8": 0.995, "fp8": 0.96}
"""Of a gradient with the one in float32: of each matrix at least so much; measured 0.998 and 0.973."""


def loss_and_gradients(model, mesh=None, **how):
    params, batch = model.init(jax.random.key(0)), packed_batch()
    if mesh is not None:
        params = jax.device_put(params, model.param_shardings(mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
    function = jax.value_and_grad(lambda p, b: loss_sums(p, b, model=model, mesh=mesh, **how), has_aux=True)
    (loss, (count, _)), gradients = jax.jit(function)(params, batch)
    return jax.device_get((loss / count, jax.tree.map(lambda g: g / count, gradients)))


@functools.cache
def on_one_device():
    return loss_and_gradients(DENSE, matmul="int8", remat="full")


@pytest.fixture(scope="module")
def exact():
    return loss_and_gradients(DENSE)


def cosine(a, b) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@needs_qwix
@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["int8", "fp8"])
def test_gradients_point_where_float32s_do(matmul: str, exact) -> None:
    loss, gradients = loss_and_gradients(dataclasses.replace(DENSE, dtype="bfloat16"), matmul=matmul)
    expected_loss, expected = exact
    assert loss == pytest.approx(expected_loss, rel=5e-3)
    assert loss != expected_loss, "nothing was quantised"
    least = jax.tree.map(cosine, gradients, expected)
    assert min(jax.tree.leaves(least)) > COSINE[matmul]


@needs_qwix
@pytest.mark.slow
def test_training_in_8_bits_follows_the_curve_of_float32() -> None:
    """30 steps of the same data: the loss falls by two thirds, and stays within 2 % (int8) and 5 % (fp8) throughout."""
    model = dataclasses.replace(DENSE, d_model=32, n_heads=4, n_kv_heads=2)
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], packed_batch())

    def curve(matmul: str, dtype: str = "float32") -> np.ndarray:
        config = SFTConfig(
            data=DataConfig(seq_len=LENGTH), batch_size=ROWS, learning_rate=1e-2, matmul_quantization=matmul
        )
        trained = dataclasses.replace(model, dtype=dtype)
        params, state = initial_state(trained.init(jax.random.key(0)), sft_optimizer(config, 30))
        losses = []
        for _ in range(30):
            params, state, metrics = train_step(params, state, batch, model=trained, config=config, steps=30)
            losses.append(metrics["train/loss"])
        return np.asarray(jax.device_get(losses))

    exact = curve("none")
    assert exact[-1] < exact[0] / 3
    for matmul, bound in (("int8", 0.02), ("fp8", 0.05)):
        difference = np.abs(curve(matmul, "bfloat16") - exact).max() / exact[0]
        print(matmul, difference)
        assert difference < bound, (matmul, difference)


@needs_qwix
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 8}, {"data": 2, "fsdp": 2, "context": 2}], ids=str)
def test_eight_devices_equal_one(axes) -> None:
    """To rounding: a number that is scaled to just beside a half may go to the other side of it. How many do is the
    processor's affair: the loss is up to 2.3e-4 apart with AVX2, below 1e-4 with AVX-512; from float32's it is 6e-4,
    and the gradients are told from float32's by their directions (`COSINE`)."""
    expected_loss, expected = on_one_device()
    loss, gradients = loss_and_gradients(DENSE, make_mesh(**axes), matmul="int8", remat="full")
    assert loss == pytest.approx(expected_loss, rel=4e-4)
    assert min(jax.tree.leaves(jax.tree.map(cosine, gradients, expected))) > 0.9995


@needs_qwix
@pytest.mark.slow
def test_what_is_gathered_is_in_8_bits() -> None:
    """Over fsdp, each matrix as int8, forward and backward, and none of them in a wider type."""
    mesh = make_mesh(fsdp=8)
    params = jax.device_put(DENSE.init(jax.random.key(0)), DENSE.param_shardings(mesh))
    batch = jax.device_put(packed_batch(), batch_sharding(mesh))
    loss = partial(loss_sums, batch=batch, model=DENSE, matmul="int8", remat="full", mesh=mesh)
    module = read_hlo(jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile().as_text())
    text = "\n".join(
        f"{one.result} all-gather"
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode.startswith("all-gather")
    )
    f, d = DENSE.d_ff, DENSE.d_model
    assert len(re.findall(rf"s8\[(?:{d},{f}|{f},{d})\]", text)) >= 6  # gate, up and down, forward and backward
    assert not re.search(rf"(?:f32|bf16)\[(?:{d},{f}|{f},{d})\]", text)


@needs_qwix
def test_products_of_what_is_not_usual() -> None:
    """Rows of zeros give zeros, numbers of any size their product, and what is not finite stays so, in its row."""
    x = jnp.array([[0.0] * 8, [1e-12] * 8, [1e12] * 8, [jnp.nan] + [1.0] * 7, [jnp.inf] + [1.0] * 7])
    w = jax.random.normal(jax.random.key(0), (8, 4))
    ours = linear(x, w, 1, None, False, "int8")
    plain = x[:3] @ w
    np.testing.assert_array_equal(ours[0], 0.0)
    np.testing.assert_allclose(
        ours[1:3], plain[1:], rtol=0.03, atol=0.03 * np.abs(plain[1:]).max(1, keepdims=True).max()
    )
    assert not np.isfinite(ours[3:]).any()
    largest = linear(jnp.eye(8), jnp.eye(8) * 3.0, 1, None, False, "int8")  # 127.5 of a scale's steps must not wrap
    np.testing.assert_allclose(largest, 3.0 * np.eye(8), rtol=0.01)


@needs_qwix
@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["int8", "fp8"])
def test_dots_are_saved_as_they_are_used(matmul: str) -> None:
    """`remat=dots` keeps a product's output in the model's dtype, and never its sums."""
    model = dataclasses.replace(DENSE, dtype="bfloat16")
    params, batch = model.init(jax.random.key(0)), packed_batch()
    loss = partial(loss_sums, batch=batch, model=model, remat="dots", matmul=matmul)
    found = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p)[0], p)[1], params))
    places = [x.dtype for x in found if x.shape == (model.n_layers, ROWS, LENGTH, model.d_ff)]
    assert places == [jnp.bfloat16] * 2  # what comes of gate and up


@needs_libtpu
@needs_qwix
@pytest.mark.slow
@pytest.mark.parametrize("slice_", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_chips_multiply_whole_numbers(slice_: str) -> None:
    """A layer forward and backward: two of its three matmuls are of s8, over fsdp too."""
    mesh = make_mesh(fsdp=4, devices=Slice.parse(slice_).devices())
    place = partial(jax.sharding.NamedSharding, mesh)
    x = jax.ShapeDtypeStruct((4, 256, 512), jnp.bfloat16, sharding=place(jax.P("fsdp")))
    w = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=place(jax.P("fsdp")))

    def both(x, w):
        y, back = jax.vjp(lambda x, w: linear(x, w, 1, mesh, False, "int8"), x, w)
        return back(y)

    text = jax.jit(both).lower(x, w).compile().as_text()
    types = []
    for computation in read_hlo(text).computations.values():
        for one in computation.instructions:
            if one.opcode in ("convolution", "dot"):
                operands = [computation.by_name[name].result for name in one.operands[:2]]
                types.append("+".join(result.partition("[")[0] for result in operands))
    assert types.count("s8+s8") == 2, types
    assert len(types) == 3, types


def test_what_cannot_be_is_refused_by_name(monkeypatch) -> None:
    mesh = type("Mesh", (), {"devices": np.array([type("Device", (), {"device_kind": "TPU v6 lite"})()])})()
    check_matmul("none", DENSE, mesh)
    monkeypatch.setattr(quantized, "qwix", lambda: None)
    check_matmul("int8", DENSE, mesh)
    with pytest.raises(InputError, match="matmul_quantization is fp8, which a v6e does not .* use int8 or none"):
        check_matmul("fp8", DENSE, mesh)
    with pytest.raises(InputError, match="matmul_quantization is int8; the grouped matmuls of experts are not"):
        check_matmul("int8", EXPERTS, None)
    with pytest.raises(InputError, match="matmul_quantization is 'int4'; use one of none, int8, fp8"):
        check_matmul("int4", DENSE, None)


def test_without_the_library_its_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "qwix", None)
    quantized.qwix.cache_clear()
    with pytest.raises(UserError, match=r"need the library qwix .*pip install '\.\[quantized\]'"):
        check_matmul("int8", DENSE, None)
    check_matmul("none", DENSE, None)
