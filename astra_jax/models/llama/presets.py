"""Sizes of Llama 2, Llama 3 and SmolLM2, which is a Llama, and their conversion from and to `config.json`.

Sources: arXiv 2307.09288, arXiv 2407.21783 and arXiv 2502.02737.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from astra_jax.base.settings import SettingError
from astra_jax.models import hf_config
from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Llama3Scaling
from astra_jax.models.llama.names import names_table
from astra_jax.models.names import NamedParam

_ARCHITECTURE = "LlamaForCausalLM"


@dataclass(frozen=True)
class LlamaConfig(Decoder):
    """Llama: no norm on queries and keys, and no biases in any released size."""

    family: ClassVar[str] = "llama"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts:
            raise SettingError(f"LlamaConfig.n_experts is {self.n_experts}; Llamas up to 3.3 are dense: use 0")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """Return the model of a `config.json`'s content; missing fields have transformers' defaults.

        Raises:
            ValueError: a size is missing, or a feature is not supported.
        """
        refused = (
            [
                f"mlp_bias is {config['mlp_bias']}; no released Llama has biases in its feed-forwards and this port "
                "does not compute them"
            ]
            if config.get("mlp_bias")
            else []
        )
        fields = hf_config.read_fields(
            config, released="Llama", architectures=[_ARCHITECTURE], max_positions=2_048, refused=refused
        )
        bias = config.get("attention_bias", False)
        return cls(**fields, attention_bias=bias, dtype=dtype, param_dtype=param_dtype)

    def names(self) -> list[NamedParam]:
        """See `Model.names`."""
        return names_table(self)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a `config.json` that transformers and vLLM read.

        The tokenizer and `generation_config.json` name the first and last tokens of a text. Without them transformers
        uses Llama 2's.
        """
        return hf_config.content(self, model_type="llama", architecture=_ARCHITECTURE) | {
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


def _released(d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int) -> LlamaConfig:
    """Return a Llama 2: a vocabulary of 32,000, 4,096 positions, heads of 128, bfloat16."""
    return LlamaConfig(
        vocab_size=32_000,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        d_ff=d_ff,
        tie_embeddings=False,
        rope_theta=1e4,
        rms_eps=1e-5,
        max_positions=4_096,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )


def _llama3(d_model: int, n_layers: int, n_heads: int, d_ff: int) -> LlamaConfig:
    """Return a Llama 3: a larger vocabulary, and 8,192 positions."""
    llama2 = _released(d_model, n_layers, n_heads, 8, d_ff)
    return replace(llama2, vocab_size=128_256, rope_theta=5e5, max_positions=8_192)


def _scaled(llama3: LlamaConfig, factor: float, tie_embeddings: bool = False) -> LlamaConfig:
    """Return a Llama 3.1 or later: extended from 8,192 to 131,072 positions."""
    scaling = Llama3Scaling(factor, 8_192)
    return replace(llama3, llama3=scaling, max_positions=131_072, tie_embeddings=tie_embeddings)


def _smollm2(d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, theta: float) -> LlamaConfig:
    """Return a SmolLM2: heads of 64, 8,192 positions, tied."""
    llama2 = _released(d_model, n_layers, n_heads, n_kv_heads, d_ff)
    return replace(llama2, vocab_size=49_152, rope_theta=theta, max_positions=8_192, tie_embeddings=True)


PRESETS: Mapping[str, LlamaConfig] = {
    "llama2-7b": _released(4_096, 32, 32, 32, 11_008),
    "llama2-13b": _released(5_120, 40, 40, 40, 13_824),
    "llama2-70b": _released(8_192, 80, 64, 8, 28_672),
    "llama3-8b": _llama3(4_096, 32, 32, 14_336),
    "llama3-70b": _llama3(8_192, 80, 64, 28_672),
    "llama3.1-8b": _scaled(_llama3(4_096, 32, 32, 14_336), 8.0),
    "llama3.1-70b": _scaled(_llama3(8_192, 80, 64, 28_672), 8.0),
    "llama3.2-1b": _scaled(_llama3(2_048, 16, 32, 8_192), 32.0, tie_embeddings=True),
    "llama3.2-3b": _scaled(_llama3(3_072, 28, 24, 8_192), 32.0, tie_embeddings=True),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1_536, 1e5),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2_560, 1e5),
    "smollm2-1.7b": _smollm2(2_048, 24, 32, 32, 8_192, 1.3e5),
}
"""Released sizes by their makers' names; Llama 3.3 has the sizes of `llama3.1-70b`."""
