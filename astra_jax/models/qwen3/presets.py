"""Sizes of Qwen3 (arXiv 2505.09388), and their conversion from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from astra_jax.models import hf_config
from astra_jax.models.decoder import Decoder
from astra_jax.models.names import NamedParam
from astra_jax.models.qwen3.names import names_table

_DENSE, _OF_EXPERTS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Qwen3Config(Decoder):
    """Qwen3, dense or with experts."""

    family: ClassVar[str] = "qwen3"
    original_context: ClassVar[int | None] = 32_768
    qk_norm: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """Return the model of a `config.json`'s content; missing fields have transformers' defaults.

        Raises:
            ValueError: a size is missing, or a feature is not supported.
        """
        experts = config["model_type"] == "qwen3_moe"
        refused = []
        if experts:
            if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
                refused.append(
                    f"mlp_only_layers is {config.get('mlp_only_layers')}, decoder_sparse_step "
                    f"{config.get('decoder_sparse_step')}; this port computes models whose layers all have experts"
                )
            if config.get("num_experts", config.get("num_local_experts")) is None or not config.get(
                "num_experts_per_tok"
            ):
                refused.append("num_experts or num_experts_per_tok is missing; copy the checkpoint's config.json again")
        fields = hf_config.read_fields(
            config,
            released="Qwen3",
            architectures=[_DENSE, _OF_EXPERTS],
            needed=(*hf_config.SIZES, "num_key_value_heads"),
            width="moe_intermediate_size" if experts else "intermediate_size",
            head_dim=None if experts else 128,
            max_positions=32_768,
            refused=refused,
        )
        return cls(
            **fields,
            attention_bias=config.get("attention_bias", False),
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
        """Return the content of a `config.json` that transformers and vLLM read."""
        experts = {
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.d_ff,
            "norm_topk_prob": self.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        shared = hf_config.content(
            self,
            model_type="qwen3_moe" if self.n_experts else "qwen3",
            architecture=_OF_EXPERTS if self.n_experts else _DENSE,
        )
        return shared | {"attention_bias": self.attention_bias} | (experts if self.n_experts else {})


def _released(d_model: int, n_layers: int, n_heads: int, d_ff: int, tie_embeddings: bool) -> Qwen3Config:
    """Return a released dense size, with the shared vocabulary, 8 K/V heads of 128, and bfloat16."""
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
"""Released sizes by Qwen's own names; `tiny` is ours, for CPUs. `30b-a3b` has experts, the others are dense."""
