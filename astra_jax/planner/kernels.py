"""What a Pallas kernel does, which no compiler estimates: the arithmetic and the traffic of splash attention.

Read from the compiled program, so that block sizes and shapes are those that run. The kernel walks over the blocks that
the causal mask shows, whatever is packed into a row. It does 2 matmuls a block forward and 7 backward: 4 for the
gradients of keys and values, 3 for that of the queries, both from scores computed again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from astra_jax.mesh import zigzag_order
from astra_jax.planner.cycles import is_kernel, kernel_name
from astra_jax.planner.hlo import Instruction, shapes

_LANES, _SUBLANES = 128, 8
"""Of a row's statistics and segment ids in memory: each value is there so often."""


@dataclass(frozen=True)
class Work:
    """Of one run of a kernel on one chip.

    Attributes:
        flops: of its matmuls.
        contracted: the smaller side of those, which a matrix unit may be wider than.
        traffic: bytes between HBM and the chip.
    """

    flops: float
    contracted: int
    traffic: float


@dataclass(frozen=True)
class _Blocks:
    """The blocks that one device's queries see, of one head of one row."""

    queries: int
    """Blocks of queries."""
    keys: int
    visited: int
    """Pairs of blocks."""
    block_q: int
    block_kv: int


def work_of(one: Instruction) -> Work | None:
    """The work of a splash kernel; None: it is no kernel, or another, of which nothing is known."""
    name = kernel_name(one)
    found = re.match(r"splash_mha_(fwd|dkv|dq)", name) if is_kernel(one) else None
    if found is None:
        return None
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}(?:, \w+=|$)", one.attributes, re.DOTALL)
    arrays = [dims for kind, dims in shapes(operands.group(1) if operands else "") if kind not in ("s8", "s32")]
    if len(arrays) < 3 or len(arrays[0]) < 3:
        return None
    q, k = arrays[0], arrays[1]
    rows, (heads, length_q, h), (kv_heads, length_k, _) = math.prod(q[:-3]), q[-3:], k[-3:]
    backward = "" if found.group(1) == "fwd" else f"_{found.group(1)}"
    sizes = [re.search(rf'\\?"block_{side}{backward}\\?": (\d+)', one.attributes) for side in ("q", "kv")]
    if sizes[0] is None or sizes[1] is None:
        return None
    blocks = _visited(length_q, length_k, int(sizes[0].group(1)), int(sizes[1].group(1)))
    matmuls = {"fwd": 2, "dkv": 4, "dq": 3}[found.group(1)]
    pairs = rows * heads * blocks.visited
    traffic = rows * {"fwd": _forward, "dkv": _keys, "dq": _queries}[found.group(1)](blocks, heads, kv_heads, h)
    return Work(2.0 * matmuls * pairs * blocks.block_q * blocks.block_kv * h, h, float(traffic))


def _visited(length_q: int, length_k: int, block_q: int, block_kv: int) -> _Blocks:
    """Of the device that has most to do; all have the same but for the diagonal's blocks."""
    context = max(1, length_k // length_q)
    starts = zigzag_order(length_k, context)[::block_q].reshape(context, -1)  # a block's queries follow each other
    visited = max(int((-(-(own + block_q) // block_kv)).sum()) for own in starts)
    return _Blocks(length_q // block_q, length_k // block_kv, visited, block_q, block_kv)


def _forward(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Queries and outputs once, keys and values for each block of queries of each head."""
    del kv_heads
    own = b.queries * b.block_q * (2 * 2 * h + 4 * _LANES + 2 * 4 * _LANES)  # q, o, logsumexp, segments and places
    return heads * (own + b.visited * b.block_kv * (2 * 2 * h + 4 * _SUBLANES))


def _keys(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Keys, values and their gradients once, queries and outputs' gradients for each block of keys of each head."""
    own = b.keys * b.block_kv * (heads * 2 * 2 * h + kv_heads * 2 * 2 * h + heads * 4 * _LANES)
    return own + heads * b.visited * b.block_q * (2 * 2 * h + 4 * 4 * _SUBLANES)


def _queries(b: _Blocks, heads: int, kv_heads: int, h: int) -> int:
    """Queries, outputs' gradients and the result once, keys and values for each block of queries of each head."""
    del kv_heads
    own = b.queries * b.block_q * (3 * 2 * h + 2 * 4 * _LANES + 2 * 4)
    return heads * (own + b.visited * b.block_kv * (2 * 2 * h + 4 * _SUBLANES))
