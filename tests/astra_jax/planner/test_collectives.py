"""Collective bytes of programs compiled for TPUs that are not here, against bytes derived by hand, for six meshes."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import BATCH, make_mesh
from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.hardware import Slice

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu: pip install '.[tpu]'"
)
LAYERS, D, F, ROWS, T = 3, 256, 512, 8, 256


def step(mesh, weights_lef, x_btd):
    """A step of layers as our decoder's are spread: every collective that one has, each written out.

    Weights are gathered over `fsdp`, what they multiply is summed over `tensor`, keys go around `context`, tokens to
    their experts; gradients are scattered over `fsdp` and summed over `data`.
    """
    sizes = mesh.shape

    def part(weights_lef, x_btd):
        def layer(x_btd, w_ef):
            w_df = jax.lax.all_gather(w_ef, "fsdp", axis=0, tiled=True)
            h_btf = jnp.tanh(x_btd @ w_df)
            y_btd = jax.lax.psum(h_btf @ w_df.T, "tensor")
            keys_bsd = jax.lax.all_gather(jnp.sin(y_btd), "context", axis=1, tiled=True)
            y_btd += jnp.sum(keys_bsd, axis=1, keepdims=True)
            ring = [(i, (i + 1) % sizes["context"]) for i in range(sizes["context"])]
            y_btd = jnp.cos(jax.lax.ppermute(y_btd, "context", ring))
            y_btd = jnp.tanh(jax.lax.all_to_all(y_btd, "expert", 2, 2, tiled=True))
            gradient_df = jnp.einsum("btd,btf->df", y_btd, h_btf, preferred_element_type=jnp.float32)
            gradient_ef = jax.lax.psum_scatter(gradient_df, "fsdp", scatter_dimension=0, tiled=True)
            return y_btd, gradient_ef

        x_btd, gradients = jax.lax.scan(layer, x_btd, weights_lef)
        return x_btd, jax.lax.psum(gradients, "data")

    weights, rows = P(None, "fsdp", "tensor"), P(BATCH, "context", None)
    return jax.shard_map(part, mesh=mesh, in_specs=(weights, rows), out_specs=(rows, weights), check_vma=False)(
        weights_lef, x_btd
    )


def by_hand(sizes: dict[str, int]) -> dict[str, float]:
    """Bytes that a device receives, with ring algorithms: of n parts it lacks n - 1, and a sum is two such rounds."""
    n = {axis: sizes.get(axis, 1) for axis in ("data", "fsdp", "expert", "context", "tensor")}
    lacks = {axis: (size - 1) / size for axis, size in n.items()}
    rows = ROWS // (n["data"] * n["fsdp"] * n["expert"])
    hidden = rows * T // n["context"] * D
    weights = D * F // n["tensor"]
    fsdp = LAYERS * (2 + 4) * weights * lacks["fsdp"]  # bfloat16 weights there, float32 gradients back
    tensor = LAYERS * 2 * 2 * hidden * lacks["tensor"]
    gathered = 2 * rows * T * D * lacks["context"]
    context = LAYERS * (gathered + (2 * hidden if n["context"] > 1 else 0))
    expert = LAYERS * 2 * hidden * lacks["expert"]
    data = 2 * 4 * LAYERS * weights // n["fsdp"] * lacks["data"]
    sums = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
    return {axis: size for axis, size in sums.items() if size}


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("v5e:2x2", {"fsdp": 4}),
        ("v5e:2x2", {"context": 4}),
        ("v5p:2x2x1", {"tensor": 4}),
        ("v6e:2x4", {"fsdp": 2, "context": 4}),
        ("v6e:2x4", {"expert": 4, "tensor": 2}),
        ("v5p:2x2x2", {"data": 2, "fsdp": 2, "context": 2}),
    ],
    ids=str,
)
def test_bytes_are_those_derived_by_hand(topology: str, sizes: dict[str, int]) -> None:
    mesh = make_mesh(**sizes, devices=Slice.parse(topology).devices())
    placed = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = placed((LAYERS, D, F), sharding=NamedSharding(mesh, P(None, "fsdp", "tensor")))
    rows = placed((ROWS, T, D), sharding=NamedSharding(mesh, P(BATCH, "context", None)))
    text = jax.jit(functools.partial(step, mesh)).lower(weights, rows).compile().as_text()
    assert bytes_by_axis(text, dict(mesh.shape)) == pytest.approx(by_hand(sizes), rel=0.01)
