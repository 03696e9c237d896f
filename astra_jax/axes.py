"""Axes of parameters: the suffix of a name spells its axes (`q_dnh` is [D, N, H]), without that of stacked layers.

So sharding, checkpoints and optimizers have rules about letters, and none about a model's names. A linear layer has the
model width on one side: `d` comes first if it reads the residual stream, last if it writes to it. A leading `e` is the
expert's, one more axis over which matrices are stacked. An adapter is two thin matrices with its rank, `r`, between
them: `a_dr` and `b_rnh` for `q_dnh`, `a_nhr` and `b_rd` for `o_nhd`. Rows of a few single tokens have `i` for `v`:
`rows_id` for `embed_vd`.
"""

from __future__ import annotations

from typing import Any


def letters(name: str) -> str:
    """Return the axes of a leaf, one letter each."""
    return name.rpartition("_")[2]


def vocabulary(name: str) -> int | None:
    """Return the index of a leaf's axis over tokens, or None."""
    return letters(name).index("v") if "v" in letters(name) else None


def is_stacked(path: Any) -> bool:
    """Return whether the leaf at a JAX key path has a leading axis of layers."""
    return getattr(path[0], "key", None) == "layers"


def is_small(name: str) -> bool:
    """Return whether a leaf is a norm's scale, a bias or a router, which optimizers do not treat as matrices."""
    return len(letters(name)) == 1 or name.startswith("router") or is_bias(name)


def is_bias(name: str) -> bool:
    """Return whether a leaf is a linear layer's bias; its axes are the layer's outputs."""
    return name.removesuffix(letters(name)).endswith("bias_")


def sides(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (input axes, output axes) of a linear layer's leaf, counted without the layer and the expert."""
    axes = letters(name).removeprefix("e")
    inputs = 1 if axes[0] in "dr" else axes.index("r" if axes.endswith("r") else "d")
    return tuple(range(inputs)), tuple(range(inputs, len(axes)))


def stacked_matrices(path: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (input axes, output axes) of a hidden layer's matrices in the stacked leaf at a JAX key path, or None.

    None is for embedding, head, norms, biases and routers.
    """
    name = getattr(path[-1], "key", "")
    if not is_stacked(path) or is_small(name):
        return None
    first = 1 + letters(name).startswith("e")
    inputs, outputs = sides(name)
    return tuple(first + axis for axis in inputs), tuple(first + axis for axis in outputs)
