"""Hugging Face checkpoints of Qwen3: one table of names serves loading and saving.

HF stores a linear layer as [out, in], one tensor a layer; here it is [in, heads, head] or [in, out], stacked over the
layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from astra_jax.models.qwen3.modules import Params, abstract_params
from astra_jax.models.qwen3.presets import Qwen3Config

Path_ = tuple[str, ...]


class WeightsError(Exception):
    """A checkpoint does not hold this model; the message names the tensor, what was expected and what was found."""


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and its HF name (`{}` is the layer); `to_hf` of one layer's array, and back."""

    path: Path_
    hf_name: str
    to_hf: Callable[[np.ndarray], np.ndarray]
    from_hf: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


def _same(path: Path_, name: str) -> Entry:
    return Entry(path, name, lambda x: x, lambda x, shape: x.reshape(shape))


def _linear(path: Path_, name: str, inputs: int = 1) -> Entry:
    """The first `inputs` axes of ours are the layer's input."""

    def to_hf(x: np.ndarray) -> np.ndarray:
        return x.reshape(int(np.prod(x.shape[:inputs])), -1).T

    return Entry(path, name, to_hf, lambda x, shape: x.T.reshape(shape))


def names(config: Qwen3Config) -> list[Entry]:
    """The table."""
    layer = "model.layers.{}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    table = [
        _same(("embed_vd",), "model.embed_tokens.weight"),
        _same(("final_norm_d",), "model.norm.weight"),
        _same(("layers", "attention_norm_d"), layer + "input_layernorm.weight"),
        _same(("layers", "mlp_norm_d"), layer + "post_attention_layernorm.weight"),
        _linear(("layers", "attention", "q_dnh"), attention + "q_proj.weight"),
        _linear(("layers", "attention", "k_dkh"), attention + "k_proj.weight"),
        _linear(("layers", "attention", "v_dkh"), attention + "v_proj.weight"),
        _linear(("layers", "attention", "o_nhd"), attention + "o_proj.weight", inputs=2),
        _same(("layers", "attention", "q_norm_h"), attention + "q_norm.weight"),
        _same(("layers", "attention", "k_norm_h"), attention + "k_norm.weight"),
        _linear(("layers", "mlp", "gate_df"), mlp + "gate_proj.weight"),
        _linear(("layers", "mlp", "up_df"), mlp + "up_proj.weight"),
        _linear(("layers", "mlp", "down_fd"), mlp + "down_proj.weight"),
    ]
    if config.attention_bias:
        for ours, theirs in (("q_bias_nh", "q"), ("k_bias_kh", "k"), ("v_bias_kh", "v"), ("o_bias_d", "o")):
            entry = Entry(
                ("layers", "attention", ours),
                f"{attention}{theirs}_proj.bias",
                lambda x: x.reshape(-1),
                lambda x, shape: x.reshape(shape),
            )
            table.append(entry)
    if not config.tie_embeddings:
        table.append(_linear(("head_dv",), "lm_head.weight"))
    return table


def _leaf(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: Path_, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def read_config(directory: Path | str, **dtypes: str) -> Qwen3Config:
    """The model's config from an HF directory.

    Raises:
        WeightsError: there is no `config.json`.
        ValueError: see `Qwen3Config.from_hf`.
    """
    try:
        content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint") from None
    return Qwen3Config.from_hf(content, **dtypes)


def load_hf(directory: Path | str, config: Qwen3Config, *, shardings: Any = None) -> Params:
    """Parameters from the safetensors files of an HF directory, cast to `config.param_dtype`.

    One parameter at a time is on the host, stacked over its layers, and goes straight to its devices.

    Args:
        shardings: as from `sharding.param_shardings`; None is the default device.

    Raises:
        WeightsError: a tensor is missing, left over, or of another shape.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory} has no *.safetensors; give the directory of a Hugging Face checkpoint")
    where = {name: file for file in files for name in _tensor_names(file)}
    if config.tie_embeddings:
        where.pop("lm_head.weight", None)  # some checkpoints store the tied matrix twice
    abstract = abstract_params(config)
    params: Params = {}
    for entry in names(config):
        leaf = _leaf(abstract, entry.path)
        stacked = "{}" in entry.hf_name
        shape = leaf.shape[1:] if stacked else leaf.shape
        wanted = entry.to_hf(np.empty(shape, np.bool_)).shape
        arrays = []
        for index in range(config.n_layers if stacked else 1):
            name = entry.hf_name.format(index)
            if name not in where:
                raise WeightsError(f"{directory}: tensor {name} is missing; its shape should be {wanted}")
            with safe_open(where.pop(name), framework="flax") as file:
                array = np.asarray(file.get_tensor(name))
            if array.shape != wanted:
                raise WeightsError(f"{directory}: tensor {name} has shape {array.shape}, the config says {wanted}")
            arrays.append(entry.from_hf(array, shape).astype(leaf.dtype))
        value = np.stack(arrays) if stacked else arrays[0]
        sharding = None if shardings is None else _leaf(shardings, entry.path)
        _set(params, entry.path, jnp.asarray(value) if sharding is None else jax.device_put(value, sharding))
    if where:
        raise WeightsError(
            f"{directory}: {len(where)} tensors do not belong to this config, for example {min(where)}; "
            "check tie_word_embeddings, attention_bias and num_hidden_layers in config.json"
        )
    return params


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())


def hf_tensors(params: Params, config: Qwen3Config) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its HF name, as contiguous host arrays."""
    for entry in names(config):
        value = np.asarray(jax.device_get(_leaf(params, entry.path)))
        if "{}" in entry.hf_name:
            for index, one in enumerate(value):
                yield entry.hf_name.format(index), np.ascontiguousarray(entry.to_hf(one))
        else:
            yield entry.hf_name, np.ascontiguousarray(entry.to_hf(value))


def save_hf(params: Params, config: Qwen3Config, directory: Path | str) -> None:
    """Write `model.safetensors` and `config.json`; transformers and vLLM load them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(hf_tensors(params, config)), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
