"""What a training job is made of: the model, how it is trained, and the mesh. Each preset is a file of its own."""

from __future__ import annotations

from dataclasses import dataclass

from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.qwen3.presets import PRESETS, Qwen3Config
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig


@dataclass(frozen=True)
class SFTRun:
    """One SFT job."""

    model: Qwen3Config
    sft: SFTConfig


@dataclass(frozen=True)
class GRPORun:
    """One GRPO job."""

    model: Qwen3Config
    grpo: GRPOConfig


def sft_run(size: str, *, learning_rate: float, seq_len: int = 20_480) -> SFTRun:
    """SFT with the paper's batch: 32 rows of 20k tokens.

    Args:
        size: a name in `astra_jax.models.qwen3.presets.PRESETS`.
        learning_rate: the peak.
    """
    data = DataConfig(seq_len=seq_len)
    sft = SFTConfig(data=data, batch_size=32, learning_rate=learning_rate, remat="full")
    return SFTRun(PRESETS[size].in_training_precision(), sft)


def grpo_run(size: str, *, learning_rate: float = 2e-6) -> GRPORun:
    """GRPO with the paper's settings: episodes of up to 25,600 + 49,152 tokens, so the model is stretched by YaRN.

    The row lengths divide into chunks of whole attention blocks over `context` axes of up to 16 devices.
    """
    grpo = GRPOConfig(
        learning_rate=learning_rate, remat="full", row_buckets=(8_192, 16_384, 32_768, 49_152, 65_536, 77_824)
    )
    longest = grpo.episode.max_prompt_tokens + grpo.episode.max_response_tokens
    return GRPORun(PRESETS[size].in_training_precision().stretched(longest), grpo)
