"""Sizes of Qwen2.5 (arXiv 2412.15115), and their conversion from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from astra_jax.base.settings import SettingError
from astra_jax.models import hf_config
from astra_jax.models.decoder import Decoder
from astra_jax.models.names import NamedParam
from astra_jax.models.qwen2.names import names_table

_ARCHITECTURE = "Qwen2ForCausalLM"


@dataclass(frozen=True)
class Qwen2Config(Decoder):
    """Dense Qwen2.5 or Qwen2, whose checkpoints both have the type `qwen2`: biases only on queries, keys and values."""

    family: ClassVar[str] = "qwen2"
    original_context: ClassVar[int | None] = 32_768
    output_bias: ClassVar[bool] = False

    attention_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention_bias:
            raise SettingError("Qwen2Config.attention_bias is False; every Qwen2 has biases on q, k and v: use True")
        if self.n_experts:
            raise SettingError(f"Qwen2Config.n_experts is {self.n_experts}; model_type 'qwen2' is dense: use 0")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """Return the model of a `config.json`'s content; missing fields have transformers' defaults.

        Raises:
            ValueError: a size is missing, or a feature is not supported.
        """
        needed = (*hf_config.SIZES, "num_key_value_heads")
        fields = hf_config.read_fields(
            config, released="Qwen2.5", architectures=[_ARCHITECTURE], needed=needed, max_positions=32_768
        )
        return cls(**fields, dtype=dtype, param_dtype=param_dtype)

    def names(self) -> list[NamedParam]:
        """See `Model.names`."""
        return names_table(self)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a `config.json` that transformers and vLLM read."""
        return hf_config.content(self, model_type="qwen2", architecture=_ARCHITECTURE)


def _released(
    d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, *, tie_embeddings: bool = False
) -> Qwen2Config:
    """Return a released size: 32,768 positions, bfloat16, and a vocabulary with more padding if the head is untied."""
    return Qwen2Config(
        vocab_size=151_936 if tie_embeddings else 152_064,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        d_ff=d_ff,
        tie_embeddings=tie_embeddings,
        max_positions=32_768,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )


PRESETS: Mapping[str, Qwen2Config] = {
    "qwen2.5-0.5b": _released(896, 24, 14, 2, 4_864, tie_embeddings=True),
    "qwen2.5-1.5b": _released(1_536, 28, 12, 2, 8_960, tie_embeddings=True),
    "qwen2.5-3b": _released(2_048, 36, 16, 2, 11_008, tie_embeddings=True),
    "qwen2.5-7b": _released(3_584, 28, 28, 4, 18_944),
    "qwen2.5-14b": _released(5_120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _released(5_120, 64, 40, 8, 27_648),
    "qwen2.5-72b": _released(8_192, 80, 64, 8, 29_568),
}
"""Instruct models, by Qwen's own names."""
