"""Conversion of a GGUF file's sizes and tensors to Hugging Face's: `config.json`, and the tensors by their names there.

llama.cpp interleaves the halves of each query and key head of a Llama, because its rotary embedding turns neighbours.
The rows are put back in order here. Qwen's rows are not interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from astra_jax.models.gguf.file import GGUFError, GGUFFile


@dataclass(frozen=True)
class _Architecture:
    """Differences between the supported architectures.

    Attributes:
        hf_class: class of transformers.
        permuted: the rows of query and key heads are interleaved.
        head_norms: queries and keys have a norm each.
        biases: queries, keys and values always have biases; for a Llama the file states it.
    """

    hf_class: str
    permuted: bool = False
    head_norms: bool = False
    biases: bool = False


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", biases=True),
    "qwen3": _Architecture("Qwen3ForCausalLM", head_norms=True),
}
"""Architectures by the file's own name, which is also Hugging Face's `model_type`."""

_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "rope.freq_base",
    "rope.dimension_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
}  # fmt: skip
"""Supported keys below an architecture's name; an unknown key may change what the model computes."""
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling of every Llama 3.1, 3.2 and 3.3. A GGUF file stores only the resulting divisors of frequencies."""


class HFModel:
    """A file's model in Hugging Face's form, checked completely before a tensor is read.

    Attributes:
        config: content of `config.json`, without a dtype.
        is_bfloat16: True if all matrices are stored so.
        parameters: number of parameters.

    Raises:
        GGUFError: an unsupported architecture; a key or tensor that is missing, unknown, or of another shape.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        if (count := file.value("split.count", int, 0)) > 1:
            raise GGUFError(
                f"{file.path}: key split.count: it is one of {count} files; make one of them (llama-gguf-split --merge)"
            )
        name = file.value("general.architecture", str)
        if name not in ARCHITECTURES:
            raise GGUFError(
                f"{file.path}: general.architecture is {name[:80]!r}; read are {', '.join(map(repr, ARCHITECTURES))}"
            )
        self._name, self._architecture = name, ARCHITECTURES[name]
        prefix = f"{name}."
        for key in file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS:
                raise GGUFError(f"{file.path}: key {key[:200]} is not understood; it may change what is computed")
        self.config = self._sizes()
        self._names = self._table()
        self._check()
        matrices = [one for one in file.tensors.values() if len(one.shape) > 1]
        self.is_bfloat16 = all(one.kind == "BF16" for one in matrices)
        self.parameters = sum(math.prod(file.tensors[name].shape) for name in self._names)

    def tensors(self, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor under Hugging Face's name, one at a time, in `dtype` (float32 or bfloat16)."""
        for name, hf_name in self._names.items():
            values = self._file.read(name)
            if self._architecture.permuted and (heads := self._heads(name)):
                values = _unpaired(values, heads)
            yield hf_name, values.astype(jnp.dtype(dtype), copy=False)

    # ------------------------------------------------------------------------------------------------------ config.json

    def _sizes(self) -> dict[str, Any]:
        heads, layers = self._count("attention.head_count"), self._count("block_count")
        if layers > len(self._file.tensors):  # a table of names is made with this length
            problem = f"is {layers}, and there are {len(self._file.tensors)} tensors"
            raise self._file.error(f"{self._name}.block_count", problem, "key")
        width = self._count("embedding_length")
        head_dim = self._count("attention.key_length", width // heads)
        if not head_dim or head_dim % 2:
            raise self._file.error(f"{self._name}.attention.head_count", f"gives heads of {head_dim} of {width}", "key")
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._count(key, head_dim)) != head_dim:
                raise self._file.error(f"{self._name}.{key}", f"is {found}, and a head has {head_dim}", "key")
        if self._count("expert_count", 0):
            raise GGUFError(f"{self._file.path}: key {self._name}.expert_count: models with experts are not read")
        config: dict[str, Any] = {
            "architectures": [self._architecture.hf_class],
            "model_type": self._name,
            "vocab_size": self._rows("token_embd.weight"),
            "hidden_size": width,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
        }
        if not self._architecture.biases:
            config["attention_bias"] = "blk.0.attn_q.bias" in self._file.tensors
        if (scaling := self._scaling(head_dim, config["rope_theta"])) is not None:
            config["rope_scaling"] = scaling
        for name in ("bos", "eos", "padding"):
            if (token := self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[f"{name.removesuffix('ding')}_token_id"] = token
        return config

    def _scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        kind = self._value("rope.scaling.type", str, "none")
        if _FREQUENCIES in self._file.tensors:
            if kind != "none":
                raise self._file.error(_FREQUENCIES, f"stands beside {self._name}.rope.scaling.type {kind!r}")
            return self._llama3(head_dim, theta)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            key = f"{self._name}.rope.scaling.type"
            raise GGUFError(f"{self._file.path}: key {key} is {kind[:80]!r}; read are 'none', 'linear' and 'yarn'")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._count("rope.scaling.original_context_length")
        return scaling

    def _llama3(self, head_dim: int, theta: float) -> dict[str, Any]:
        """Return the scaling behind the stored divisors of frequencies (transformers' `_compute_llama3_parameters`)."""
        found = self._file.read(_FREQUENCIES)
        factor = max(1.0, float(f"{found.max():.6g}"))
        wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        low, high, original = _LLAMA3.values()
        blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        wanted = 1.0 / (blend + (1.0 - blend) / factor)
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
            raise self._file.error(_FREQUENCIES, f"is not a scaling of Llama 3's kind over {original} positions")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        return self._file.value(f"{self._name}.{key}", kind, default)

    def _number(self, key: str, default: float | None = None) -> float:
        found: float = self._value(key, float, default)
        if not 0 < found < 1e12:
            raise self._file.error(f"{self._name}.{key}", f"is {found}", "key")
        return float(str(np.float32(found)))  # 1e-05 is stored as float32, which is 9.99999974e-06

    def _count(self, key: str, default: int | None = None) -> int:
        found: int = self._value(key, int, default)
        if found < (1 if default is None else 0) or found > 1 << 31:
            raise self._file.error(f"{self._name}.{key}", f"is {found}", "key")
        return found

    def _rows(self, name: str) -> int:
        if name not in self._file.tensors:
            raise self._file.error(name, "is missing")
        return self._file.tensors[name].shape[0]

    # ---------------------------------------------------------------------------------------------------------- tensors

    def _table(self) -> dict[str, str]:
        """Return Hugging Face's names by the file's names."""
        layer = {
            "attn_norm.weight": "input_layernorm.weight",
            "attn_q.weight": "self_attn.q_proj.weight",
            "attn_k.weight": "self_attn.k_proj.weight",
            "attn_v.weight": "self_attn.v_proj.weight",
            "attn_output.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "ffn_gate.weight": "mlp.gate_proj.weight",
            "ffn_up.weight": "mlp.up_proj.weight",
            "ffn_down.weight": "mlp.down_proj.weight",
        }
        if self._architecture.head_norms:
            layer |= {f"attn_{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"}
        if self._architecture.biases or self.config["attention_bias"]:
            layer |= {f"attn_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}
        if self.config.get("attention_bias"):
            layer["attn_output.bias"] = "self_attn.o_proj.bias"
        names = {"token_embd.weight": "model.embed_tokens.weight"}
        for i in range(self.config["num_hidden_layers"]):
            names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{hf}" for ours, hf in layer.items()}
        names["output_norm.weight"] = "model.norm.weight"
        if not self.config["tie_word_embeddings"]:
            names["output.weight"] = "lm_head.weight"
        return names

    def _shape(self, name: str) -> tuple[int, ...]:
        config = self.config
        width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        last = name.rpartition(".")[0].rpartition(".")[2]
        if name.endswith(".bias"):
            return {"attn_q": (queries,), "attn_k": (keys,), "attn_v": (keys,), "attn_output": (width,)}[last]
        matrices = {
            "token_embd": (config["vocab_size"], width),
            "output": (config["vocab_size"], width),
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
        }
        return matrices.get(last, (width,))

    def _check(self) -> None:
        stored = self._file.tensors
        for name in self._names:
            if name not in stored:
                raise self._file.error(name, f"is missing; its shape should be {list(self._shape(name))}")
            if (found := stored[name].shape) != (wanted := self._shape(name)):
                raise self._file.error(name, f"has shape {list(found)}, not {list(wanted)}")
        if left := stored.keys() - self._names.keys() - {_FREQUENCIES}:
            raise self._file.error(min(left), f"is none of a {self._name}'s")

    def _heads(self, name: str) -> int:
        """Return the number of heads in the rows of a query or key projection; 0 for every other tensor."""
        last = name.rpartition(".")[0].rpartition(".")[2]
        return {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}.get(last, 0)


def _unpaired(values: np.ndarray, heads: int) -> np.ndarray:
    """Return interleaved rows of llama.cpp's heads as the first half and then the second."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
