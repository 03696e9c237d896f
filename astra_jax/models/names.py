"""Tables of names: the tensors of a Hugging Face checkpoint for each of our parameters.

HF stores a linear layer as [out, in], one tensor per layer (and expert). Here it is [in, heads, head] or [in, out],
stacked over the layers (and the experts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from astra_jax import axes
from astra_jax.models.layers.sizes import Sizes

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class NamedParam:
    """One of our parameters and its HF name, in which a `{}` stands for the layer, and a second one for the expert.

    Attributes:
        path: keys down to the leaf.
        axes: for each axis of HF's tensor, our axes (without the stacked ones) that it flattens.
    """

    path: Path
    hf_name: str
    axes: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> int:
        """Number of our leading axes that are spread over tensors: 0, 1 (layers) or 2 (layers, experts)."""
        return self.hf_name.count("{}")

    def hf_shape(self, shape: Shape) -> Shape:
        """Return HF's shape of one tensor; `shape` is ours, without the stacked axes."""
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def to_hf(self, x: np.ndarray) -> np.ndarray:
        """Convert one tensor of ours to HF's form."""
        order = [axis for group in self.axes for axis in group]
        return np.ascontiguousarray(x.transpose(order).reshape(self.hf_shape(x.shape)))

    def read(self, tensor: Any, shape: Shape, index: tuple[slice, ...]) -> np.ndarray:
        """Return the part `index` of one tensor in our form.

        Args:
            tensor: HF's tensor, anything that can be sliced. One contiguous span of each of its axes is read.
            shape: our shape, without the stacked axes.
            index: slices with steps of 1.
        """
        spans, lengths, inner, order = [], [], [], []
        for first, *rest in self.axes:
            start, stop, _ = index[first].indices(shape[first])
            step = math.prod(shape[axis] for axis in rest)
            spans.append(slice(start * step, stop * step))
            lengths += [stop - start, *(shape[axis] for axis in rest)]
            inner += [slice(None), *(index[axis] for axis in rest)]
            order += [first, *rest]
        block = np.asarray(tensor[tuple(spans)]).reshape(lengths)[tuple(inner)]
        return block.transpose(np.argsort(order))


def as_stored(path: Path, name: str) -> NamedParam:
    """Return a parameter with HF's axes, such as an embedding or a norm's scale."""
    return NamedParam(path, name, tuple((axis,) for axis in range(len(axes.letters(path[-1])))))


def linear_weight(path: Path, name: str) -> NamedParam:
    """Return a linear layer: [in …, out …] ↔ [out, in]."""
    inputs, outputs = axes.sides(path[-1])
    return NamedParam(path, name, (outputs, inputs))


def linear_bias(path: Path, name: str) -> NamedParam:
    """Return a linear layer's bias: [out …] ↔ [out]."""
    return NamedParam(path, name, (tuple(range(len(axes.letters(path[-1])))),))


# ---------------------------------------------------------------------------------------------------------------------
# Common to families of decoders: the names of the first Llama's checkpoints

LAYER = "model.layers.{}."
"""Prefix of the names of a layer's tensors."""


def decoder_table(model: Sizes) -> list[NamedParam]:
    """Return all but the feed-forwards: embedding, head, norms, and attention's matrices with their biases."""
    norms = {"attention_norm_d": "input_layernorm", "mlp_norm_d": "post_attention_layernorm"}
    names = [
        as_stored(("embed_vd",), "model.embed_tokens.weight"),
        as_stored(("final_norm_d",), "model.norm.weight"),
        *(as_stored(("layers", leaf), f"{LAYER}{name}.weight") for leaf, name in norms.items()),
    ]
    path, attention = ("layers", "attention"), LAYER + "self_attn."
    for one, leaf in {"q": "q_dnh", "k": "k_dkh", "v": "v_dkh", "o": "o_nhd"}.items():
        names.append(linear_weight((*path, leaf), f"{attention}{one}_proj.weight"))
    if model.attention_bias:
        biases = {"q": "q_bias_nh", "k": "k_bias_kh", "v": "v_bias_kh"}
        if model.output_bias:
            biases["o"] = "o_bias_d"
        names += [linear_bias((*path, leaf), f"{attention}{one}_proj.bias") for one, leaf in biases.items()]
    if not model.tie_embeddings:
        names.append(linear_weight(("head_dv",), "lm_head.weight"))
    return names


def mlp_table() -> list[NamedParam]:
    """Return the gated feed-forward of dense layers."""
    leaves = {"gate": "gate_df", "up": "up_df", "down": "down_fd"}
    return [linear_weight(("layers", "mlp", leaf), f"{LAYER}mlp.{one}_proj.weight") for one, leaf in leaves.items()]
