"""What a training job is made of, the model and how it is trained, and the presets: `--config=sft:14b`.

A run that is none of them is a file that defines `CONFIG`, an `SFTRun` or a `GRPORun`: `--config=FILE.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.qwen3.presets import PRESETS as MODELS
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from sandbox.settings import Settings


@dataclass(frozen=True)
class SFTRun(Settings):
    """One SFT job.

    Attributes:
        model: the policy, in the precision that it is trained in.
        sft: how it is trained.
    """

    model: Qwen3Config
    sft: SFTConfig


@dataclass(frozen=True)
class GRPORun(Settings):
    """One GRPO job.

    Attributes:
        model: the policy, in the precision that it is trained in.
        grpo: how it is trained.
    """

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
    return SFTRun(MODELS[size].in_training_precision(), sft)


def grpo_run(size: str, *, learning_rate: float = 2e-6) -> GRPORun:
    """GRPO with the paper's settings: episodes of up to 25,600 + 49,152 tokens, so the model is stretched by YaRN.

    The row lengths divide into chunks of whole attention blocks over `context` axes of up to 16 devices.
    """
    grpo = GRPOConfig(
        learning_rate=learning_rate, remat="full", row_buckets=(8_192, 16_384, 32_768, 49_152, 65_536, 81_920)
    )
    longest = grpo.episode.max_prompt_tokens + grpo.episode.max_response_tokens
    return GRPORun(MODELS[size].in_training_precision().stretched(longest), grpo)


_PEAKS = {
    "0.6b": 1e-5,
    "1.7b": 1e-5,
    "4b": 1e-5,
    "8b": 5e-6,
    "14b": 5e-6,
    "32b": 2e-6,
    "30b-a3b": 5e-6,
}
"""SFT's learning rates: of 14b and 32b the paper's, the others ours."""

PRESETS: Mapping[str, Callable[[], SFTRun | GRPORun]] = {
    **{f"sft:{size}": partial(sft_run, size, learning_rate=peak) for size, peak in _PEAKS.items()},
    **{f"grpo:{size}": partial(grpo_run, size) for size in _PEAKS},
}
"""By the name that `--config` takes: the loop and the model's size."""
