"""Matmuls of rows in groups, each group with its own matrix: the experts' linear layers, forward and backward.

On TPUs they are Pallas kernels, megablox in JAX. XLA's `ragged_dot` has a kernel for the product, but for the weights'
gradient it multiplies all rows with each expert's. Other platforms use `ragged_dot`.

As in `linear`, matrices are gathered in the activations' dtype. Their gradients are summed in float32, and each device
receives its own part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from astra_jax.mesh import WIDTH, AnyMesh, device_kind_of, free, platform_of

Array = jax.Array

ROWS = 128
"""Rows of a product's tile.

A group's last tile is computed whole, though it has few rows; larger tiles make matrix units no busier (docs/scale.md).
"""
GRADIENT_ROWS = 256
"""Rows of a tile of the weights' gradient; each tile reads and writes the running sum."""
_INPUTS, _OUTPUTS = 2_048, 768
"""Largest inputs and outputs of a product's tile. With all inputs of an expert its matrix is read once."""
_GRADIENT = (1_024, 768)
"""Largest inputs and outputs of a tile of the weights' gradient; it is summed in float32."""


_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of devices with two cores."""


@dataclass(frozen=True)
class How:
    """Static settings: the kernel, and the sharding of the matrices.

    Attributes:
        kernel: `megablox`, `megablox_interpret` (on any machine, slowly) or `ragged`.
        cores: cores of a chip that is one device; they share the outputs.
        spread: mesh axes over which a matrix's width is spread.
        copies: mesh axes over which rows are spread and matrices are not.
    """

    kernel: str
    cores: int = 1
    spread: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @classmethod
    def on(cls, mesh: AnyMesh | None) -> How:
        """Return the settings for a mesh's devices; None is one device."""
        kernel = "megablox" if platform_of(mesh) == "tpu" else "ragged"
        cores = 2 if device_kind_of(mesh) in _TWO_CORES else 1
        if mesh is None:
            return cls(kernel, cores)
        spread = tuple(axis for axis in WIDTH if axis != "expert" and mesh.shape[axis] > 1)
        return cls(kernel, cores, spread, free(mesh, ["data"]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(x_ri: Array, w_eio: Array, sizes_e: Array, how: How, wide: int = 1) -> Array:
    """Multiply x [R, in] with w [E, in, out] of each row's group → [R, out], in x's dtype.

    Args:
        w_eio: this device's part; it is cast to x's dtype.
        sizes_e: int32, rows of each group, which are contiguous; rows after the last group have undefined output.
        wide: the axis of `w_eio` that is spread, 1 or 2.
    """
    return _product(x_ri, _gathered(x_ri, w_eio, how, wide), sizes_e, how)


def _forward(
    x_ri: Array, w_eio: Array, sizes_e: Array, how: How, wide: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x_ri, w_eio, sizes_e, how, wide), (x_ri, w_eio, sizes_e)


def _backward(how: How, wide: int, residuals: tuple[Array, Array, Array], dy_ro: Array) -> tuple[Array, Array, None]:
    x_ri, w_eio, sizes_e = residuals
    dx_ri = _product(dy_ro, _gathered(dy_ro, w_eio, how, wide), sizes_e, how, turned=True)
    dw_eio = _gradient(x_ri, dy_ro, sizes_e, how)
    if how.copies:
        dw_eio = jax.lax.psum(dw_eio, how.copies)
    if how.spread:
        dw_eio = jax.lax.psum_scatter(dw_eio, how.spread, scatter_dimension=wide, tiled=True)
    return dx_ri, dw_eio.astype(w_eio.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _gathered(x: Array, w_eio: Array, how: How, wide: int) -> Array:
    w_eio = w_eio.astype(x.dtype)
    return jax.lax.all_gather(w_eio, how.spread, axis=wide, tiled=True) if how.spread else w_eio


def _product(x: Array, w_eio: Array, sizes_e: Array, how: How, *, turned: bool = False) -> Array:
    """Multiply by each group's matrix, or by its transpose."""
    if how.kernel == "ragged":
        return jax.lax.ragged_dot(x, w_eio.swapaxes(1, 2) if turned else w_eio, sizes_e)
    outputs = w_eio.shape[1] if turned else w_eio.shape[2]
    product: Array = gmm(
        _whole_tiles(x, ROWS),
        w_eio,
        sizes_e,
        preferred_element_type=x.dtype,
        tiling=(ROWS, _side(x.shape[1], _INPUTS), _side(outputs, _OUTPUTS, how.cores)),
        transpose_rhs=turned,
        interpret=how.kernel == "megablox_interpret",
    )
    return product[: len(x)]


def _gradient(x_ri: Array, dy_ro: Array, sizes_e: Array, how: How) -> Array:
    """Return the matrices' gradient, [E, in, out], float32."""
    if how.kernel == "ragged":
        dimensions = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return jax.lax.ragged_dot_general(x_ri, dy_ro, sizes_e, dimensions, preferred_element_type=jnp.float32)
    inputs, outputs = _GRADIENT
    gradient: Array = tgmm(
        _whole_tiles(x_ri, GRADIENT_ROWS).T,  # the kernel transposes it again
        _whole_tiles(dy_ro, GRADIENT_ROWS),
        sizes_e,
        preferred_element_type=jnp.float32,
        tiling=(GRADIENT_ROWS, _side(x_ri.shape[1], inputs), _side(dy_ro.shape[1], outputs, how.cores)),
        interpret=how.kernel == "megablox_interpret",
    )
    return gradient


def _whole_tiles(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, -len(x) % rows), (0, 0)))


def _side(length: int, most: int, cores: int = 1) -> int:
    """Return a tile's side, for the smallest number of equal tiles that are small enough, one or more per core."""
    tiles: Any = cores * -(-length // (most * cores))
    while length % tiles or length // tiles % 128:
        tiles += cores
        if tiles > length // 128:
            return min(length, most)
    return length // tiles
