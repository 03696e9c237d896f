"""Arithmetic and traffic of Pallas kernels, which no compiler estimates: attention and the experts' grouped matmuls.

Block sizes and shapes are read from the compiled program. Attention is counted for a row with one document: the kernels
visit the blocks that the causal mask shows, and packed rows skip the blocks of other documents. They do 2 matmuls per
block forward, and 5 backward, with recomputed scores. Splash's own two backward kernels, in programs of other
libraries, do 4 and 3.

A grouped matmul computes whole tiles of rows: one more for each group than its rows fill, with as many rows on each
device as with equal loads. The matrix units' busy share comes from the instruction bundles that the compiler makes of a
tile (docs/scale.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from astra_jax.attention import splash_backward
from astra_jax.mesh import zigzag_order
from astra_jax.models.layers.grouped import GRADIENT_ROWS, ROWS
from astra_jax.planner.cycles import is_kernel, kernel_name
from astra_jax.planner.hlo import Instruction, shapes

ATTENTION, EXPERTS = "attention", "experts"
_GROUPED = {
    "gmm": (ROWS, (1.0, 0.63)),
    "turned": (ROWS, (0.94, 0.41)),
    "tgmm": (GRADIENT_ROWS, (0.6, 0.35)),
}
"""Rows of a tile, and `Work.busy`: of products, of products by transposed matrices, and of matrices' gradients."""
_LANES, _SUBLANES = 128, 8
"""Number of copies of each value in memory, of a row's statistics and segment ids."""


@dataclass(frozen=True)
class Work:
    """Work of one run of a kernel on one chip.

    Attributes:
        flops: flops of its matmuls.
        contracted: the smaller side of the matmuls; a matrix unit may be wider.
        traffic: bytes between HBM and the chip.
        part: part of the step.
        busy: best share of time that the matrix units compute, for units 128 and 256 wide.
    """

    flops: float
    contracted: int
    traffic: float
    part: str = ATTENTION
    busy: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class _Blocks:
    """Blocks that one device's queries see, of one head of one row."""

    queries: int
    """Number of blocks of queries."""
    keys: int
    visited: int
    """Number of pairs of blocks."""
    block_q: int
    block_kv: int


def work_of(one: Instruction, expert: int = 1) -> Work | None:
    """Return the work of a kernel, or None if the instruction is not a known kernel.

    Args:
        expert: number of devices over which experts are spread.
    """
    name = kernel_name(one)
    if not is_kernel(one):
        return None
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}(?:, \w+=|$)", one.attributes, re.DOTALL)
    arrays = [dims for kind, dims in shapes(operands.group(1) if operands else "") if kind not in ("s8", "s32")]
    if (grouped := re.search(r"(?:^|_)(t?gmm)(?:_|$)", name)) is not None:
        return _grouped(grouped.group(1), arrays, [dims for _, dims in shapes(one.result)], expert)
    kernel = next((kernel for part, kernel in _ATTENTION.items() if part in name), None)
    if kernel is None or len(arrays) <= kernel.keys or len(arrays[0]) < 3:
        return None
    q, k = arrays[0], arrays[kernel.keys]
    if kernel.traffic is _of_keys and any(len(dims) > len(q) for _, dims in shapes(one.result)):
        return None  # splash's single-kernel mode has the same name: it writes parts of the queries' gradient
    rows, (heads, length_q, h), (kv_heads, length_k, _) = math.prod(q[:-3]), q[-3:], k[-3:]
    sizes = [re.search(rf'\\?"block_{side}{kernel.blocks}\\?": (\d+)', one.attributes) for side in ("q", "kv")]
    if sizes[0] is None or sizes[1] is None:
        return None
    blocks = _visited(length_q, length_k, int(sizes[0].group(1)), int(sizes[1].group(1)))
    pairs = rows * heads * blocks.visited
    traffic = rows * kernel.traffic(blocks, heads, kv_heads, h)
    return Work(2.0 * kernel.matmuls * pairs * blocks.block_q * blocks.block_kv * h, h, float(traffic))


def _grouped(kind: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], expert: int) -> Work | None:
    if len(operands) < 2 or not results:
        return None
    if kind == "gmm":  # rows, matrices; their outputs
        (length, inputs), matrices, (_, outputs) = operands[0], operands[1], results[0]
        tile, busy = _GROUPED["turned" if matrices[1] != inputs else "gmm"]
        groups, width = matrices[0], 2
    else:  # rows and their outputs' gradients; matrices
        (length, _), (groups, inputs, outputs) = operands[0], results[0]
        (tile, busy), width = _GROUPED["tgmm"], 4
    rows = length / expert
    computed = rows + groups * tile
    # Each core reads all rows for its own outputs.
    traffic = 2 * rows * (2 * inputs + outputs) + width * groups * inputs * outputs
    return Work(2.0 * computed * inputs * outputs, 256, traffic, EXPERTS, busy)


def _visited(length_q: int, length_k: int, block_q: int, block_kv: int) -> _Blocks:
    """Return the blocks of the busiest device; devices differ only in the diagonal's blocks."""
    context = max(1, length_k // length_q)
    starts = zigzag_order(length_k, context)[::block_q].reshape(context, -1)  # queries of a block are contiguous
    visited = max(int((-(-(own + block_q) // block_kv)).sum()) for own in starts)
    return _Blocks(length_q // block_q, length_k // block_kv, visited, block_q, block_kv)


def _forward(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Return the traffic forward: queries and outputs once, keys and values for each block of queries of each head."""
    del kv_heads
    own = b.queries * b.block_q * (2 * 2 * h + 4 * _LANES + 2 * 4 * _LANES)  # q, o, logsumexp, segments and places
    return heads * (own + b.visited * b.block_kv * (2 * 2 * h + 4 * _SUBLANES))


def _backward(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Return the traffic of the backward kernel.

    The queries' gradient, keys, values and their gradients count once. Queries and outputs' gradients, with two
    numbers, a segment and a position each, count for each block of keys of each head.
    """
    own = heads * b.queries * b.block_q * 2 * h + kv_heads * b.keys * b.block_kv * (4 * 2 * h + 4 * _LANES)
    return own + heads * b.visited * b.block_q * (2 * 2 * h + 4 * 4)


def _of_keys(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Return the traffic of splash's gradients of keys and values.

    Keys, values and their gradients count once. Queries and outputs' gradients, with two numbers each, count for each
    block of keys of each head.
    """
    own = b.keys * b.block_kv * (heads * 2 * 2 * h + kv_heads * 2 * 2 * h + heads * 4 * _LANES)
    return own + heads * b.visited * b.block_q * (2 * 2 * h + 4 * 4 * _SUBLANES)


def _of_queries(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Return the traffic of splash's gradient of queries.

    Queries, outputs' gradients and the result count once, keys and values for each block of queries of each head.
    """
    del kv_heads
    own = b.queries * b.block_q * (3 * 2 * h + 2 * 4 * _LANES + 2 * 4)
    return heads * (own + b.visited * b.block_kv * (2 * 2 * h + 4 * _SUBLANES))


@dataclass(frozen=True)
class _Kernel:
    """One of attention's kernels."""

    matmuls: int
    """Matmuls for each visited pair of blocks."""
    keys: int
    """Index of the keys among its arrays; the queries are the first."""
    blocks: str
    """Suffix of the names of its block sizes."""
    traffic: Callable[[_Blocks, int, int, int], int]


_ATTENTION = {
    # The output's gradient and two numbers for each query come before the keys.
    splash_backward.NAME: _Kernel(5, 4, "", _backward),
    "splash_mha_fwd": _Kernel(2, 1, "", _forward),
    "splash_mha_dkv": _Kernel(4, 1, "_dkv", _of_keys),
    "splash_mha_dq": _Kernel(3, 1, "_dq", _of_queries),
}
"""Kernels by a part of their name."""
