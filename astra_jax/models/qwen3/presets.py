"""Sizes of Qwen3 (arXiv 2505.09388), and their translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Yarn
from astra_jax.models.names import NamedParam
from astra_jax.models.qwen3.names import names_table
from synthesis.core.refusals import InputError


@dataclass(frozen=True)
class Qwen3Config(Decoder):
    """A Qwen3, dense or with experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """From the content of a `config.json`. What it leaves out is what transformers takes it to be.

        Raises:
            ValueError: it lacks a size, or uses something that this port does not compute.
        """
        experts = config["model_type"] == "qwen3_moe"
        width = "moe_intermediate_size" if experts else "intermediate_size"
        for name in (*_SIZES, width):
            if name not in config:
                raise InputError(f"{name} is missing; copy the checkpoint's config.json again, or write it there")
        if (quantised := config.get("quantization_config") or config.get("compression_config")) is not None:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise InputError(
                f"quantization_config is of {method!r}; this port computes float32 and bfloat16: give the release that "
                "is not quantised"
            )
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise InputError(
                f"hidden_act is {activation!r}; every released Qwen3 has 'silu', all that this port computes"
            )
        kinds = config.get("layer_types") or ()
        if config.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
            raise InputError(
                f"use_sliding_window is {config.get('use_sliding_window')}, layer_types {sorted(set(kinds))}; no "
                "released Qwen3 has windows and this port does not compute them"
            )
        if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise InputError(
                f"mlp_only_layers is {config.get('mlp_only_layers')}, decoder_sparse_step "
                f"{config.get('decoder_sparse_step')}; this port computes models whose layers all have experts"
            )
        # transformers 5 keeps the rotary settings in one dictionary, earlier versions had another for YaRN alone, which
        # still goes before it, whole: YaRN is switched on by hand in the old place.
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise InputError(f"rope_scaling or rope_parameters is {rope!r}; it is an object with a rope_type")
        max_positions = config.get("max_position_embeddings", 32_768)
        original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
        yarn = _yarn(rope, max_positions, original or max_positions)
        if yarn is not None:
            # Released files keep the trained length in max_position_embeddings when YaRN is switched on by hand.
            max_positions = max(max_positions, round(yarn.factor * yarn.original_max_positions))
        kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim", None if experts else 128)
        return cls(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_attention_heads"] if kv_heads is None else kv_heads,
            head_dim=head_dim or config["hidden_size"] // config["num_attention_heads"],
            d_ff=config[width],
            tie_embeddings=config.get("tie_word_embeddings", False),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            rms_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            attention_bias=config.get("attention_bias", False),
            yarn=yarn,
            n_experts=config.get("num_experts", config.get("num_local_experts")) if experts else 0,  # transformers 5
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            norm_topk_prob=config.get("norm_topk_prob", False) if experts else True,
            dtype=dtype,
            param_dtype=param_dtype,
        )

    def names(self) -> list[NamedParam]:
        """See `Model.names`."""
        return names_table(self)

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers and vLLM read."""
        experts = {
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.d_ff,
            "norm_topk_prob": self.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.yarn is not None:
            rope |= {
                "rope_type": "yarn",
                "factor": self.yarn.factor,
                "original_max_position_embeddings": self.yarn.original_max_positions,
                "beta_fast": self.yarn.beta_fast,
                "beta_slow": self.yarn.beta_slow,
                "truncate": self.yarn.truncate,
            }
            if self.yarn.attention_factor is not None:
                rope["attention_factor"] = self.yarn.attention_factor
        return {
            "architectures": ["Qwen3MoeForCausalLM" if self.n_experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.n_experts else "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            **(experts if self.n_experts else {}),
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            **({"rope_scaling": rope} if self.yarn is not None else {}),
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
            "torch_dtype": self.param_dtype,
        }


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""What no `config.json` may leave out: transformers would take another model's."""


def _yarn(rope: Mapping[str, Any], max_positions: int, original: int) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise InputError(f"rope_type is {kind!r}; this port computes 'default' and 'yarn'")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise InputError("rope_parameters has mscale; no released Qwen3 uses it and this port does not compute it")
    if (part := rope.get("partial_rotary_factor") or 1) != 1:
        raise InputError(
            f"rope_parameters has partial_rotary_factor {part}; no released Qwen3 uses it and this port "
            "turns whole heads"
        )
    return Yarn(
        factor=float(rope.get("factor") or max_positions / original),
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
        truncate=rope.get("truncate", True),
    )


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
    "30b-a3b": replace(
        _released(2_048, 48, 32, 768, False), n_kv_heads=4, n_experts=128, experts_per_token=8, norm_topk_prob=True
    ),
}
"""By Qwen's own names; `tiny` is ours, for CPUs. `30b-a3b` has experts, the others are dense."""
