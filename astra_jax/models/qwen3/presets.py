"""Sizes of Qwen3 (arXiv 2505.09388), and their translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Qwen3Config:
    """A dense Qwen3.

    Attributes:
        d_model: width of the residual stream; need not be `n_heads * head_dim`.
        n_kv_heads: divides `n_heads`.
        d_ff: width of the gated feed-forward.
        rope_theta: base of the rotary embedding.
        rms_eps: added to the mean square in every norm.
        tie_embeddings: the head is the embedding transposed (HF: true up to 4B).
        max_positions: the longest sequence that the weights were made for.
        attention_bias: biases on the q, k, v and o projections.
        dtype: of activations and matmuls; norms, softmax and rotary embedding are float32.
        param_dtype: of the parameters.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    tie_embeddings: bool
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    max_positions: int = 40_960
    attention_bias: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads is {self.n_kv_heads}; it must divide n_heads ({self.n_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Qwen3Config:
        """From the content of a `config.json`.

        Raises:
            ValueError: not a dense Qwen3, or it uses something that this port does not compute.
        """
        if config.get("model_type") != "qwen3":
            raise ValueError(f"model_type is {config.get('model_type')!r}; this port reads 'qwen3' (dense)")
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window is true; no released Qwen3 uses it and this port does not compute it")
        # transformers 5 keeps the rotary settings in one dictionary, earlier versions at the top level.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope_type is {kind!r}; this port computes the default rotary embedding only")
        return cls(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            d_ff=config["intermediate_size"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 1e6)),
            rms_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 40_960),
            attention_bias=config.get("attention_bias", False),
            dtype=dtype,
            param_dtype=param_dtype,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers and vLLM read."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
            "torch_dtype": self.param_dtype,
        }


def _released(d_model: int, n_layers: int, n_heads: int, d_ff: int, tie_embeddings: bool) -> Qwen3Config:
    """What all released dense sizes share: vocabulary, 8 K/V heads of 128, bfloat16."""
    return Qwen3Config(
        vocab_size=151_936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        d_ff=d_ff,
        tie_embeddings=tie_embeddings,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )


PRESETS: Mapping[str, Qwen3Config] = {
    "tiny": Qwen3Config(
        vocab_size=1_024,
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        d_ff=384,
        tie_embeddings=True,
        max_positions=4_096,
    ),
    "0.6b": _released(1_024, 28, 16, 3_072, True),
    "1.7b": _released(2_048, 28, 16, 6_144, True),
    "4b": _released(2_560, 36, 32, 9_728, True),
    "8b": _released(4_096, 36, 32, 12_288, False),
    "14b": _released(5_120, 40, 40, 17_408, False),
    "32b": _released(5_120, 64, 64, 25_600, False),
}
"""By Qwen's own names; `tiny` is ours, for CPUs."""
