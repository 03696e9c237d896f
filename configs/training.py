"""Training jobs, each a model and its training settings, and their presets: `--config=sft:14b`.

For another run write a file that defines `CONFIG`, an `SFTRun` or a `GRPORun`: `--config=FILE.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from astra_jax.base.settings import Settings
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.decoder import Decoder
from astra_jax.models.llama import presets as llama
from astra_jax.models.lora import FULL
from astra_jax.models.model import Model, check_model
from astra_jax.models.qwen2 import presets as qwen2
from astra_jax.models.qwen3 import presets as qwen3
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs import auto


@dataclass(frozen=True)
class SFTRun(Settings):
    """Configuration of one SFT run.

    Attributes:
        model: sizes and dtypes of the policy.
        sft: settings of the training.
    """

    model: Model
    sft: SFTConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model, "SFTRun.model")


@dataclass(frozen=True)
class GRPORun(Settings):
    """Configuration of one GRPO run.

    Attributes:
        model: sizes and dtypes of the policy.
        grpo: settings of the training.
    """

    model: Model
    grpo: GRPOConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model, "GRPORun.model")


MODELS: Mapping[str, Decoder] = {**qwen3.PRESETS, **llama.PRESETS, **qwen2.PRESETS}
"""Sizes of every family, by their makers' names."""


def sft_run(size: str, *, learning_rate: float | None = None, seq_len: int = 20_480) -> SFTRun:
    """Return SFT with the paper's batch: 32 rows of 20k tokens, or of the model's maximum length.

    Args:
        size: a name in `MODELS`.
        learning_rate: the peak; None: `auto.sft_rate`.
    """
    model = MODELS[size].in_training_precision()
    data = DataConfig(seq_len=min(seq_len, model.max_positions))
    peak = auto.sft_rate(model, FULL) if learning_rate is None else learning_rate
    return SFTRun(model, SFTConfig(data=data, batch_size=32, learning_rate=peak, remat="full"))


def grpo_run(size: str, *, learning_rate: float = 2e-6) -> GRPORun:
    """Return GRPO with the paper's settings: episodes of up to 25,600 + 49,152 tokens.

    YaRN stretches Qwen's models for this length, as their makers do. Rows divide into chunks of whole attention blocks
    over `context` axes of up to 16 devices.
    """
    grpo = GRPOConfig(
        learning_rate=learning_rate, remat="full", row_buckets=(8_192, 16_384, 32_768, 49_152, 65_536, 81_920)
    )
    longest = grpo.episode.max_prompt_tokens + grpo.episode.max_response_tokens
    return GRPORun(MODELS[size].in_training_precision().with_context_length(longest), grpo)


def short_grpo_run(size: str, *, learning_rate: float = 2e-6) -> GRPORun:
    """Return GRPO of a model for 8,192 tokens, with episodes of that length."""
    episode = EpisodeConfig(max_prompt_tokens=4_096, max_response_tokens=4_096, max_turn_tokens=1_024)
    grpo = GRPOConfig(learning_rate=learning_rate, remat="full", episode=episode, row_buckets=(2_048, 4_096, 8_192))
    return GRPORun(MODELS[size].in_training_precision(), grpo)


KINDS: Mapping[str, type[SFTRun] | type[GRPORun]] = {"sft": SFTRun, "grpo": GRPORun}
"""Configuration classes, by the part of a preset's name before the colon."""
_SIZES = tuple(name for name in MODELS if name != "tiny")
_SHORT = ("llama3-8b", "llama3-70b", "smollm2-135m", "smollm2-360m", "smollm2-1.7b")
"""Models of 8,192 positions. Llama 2's are too few for episodes, so it has no preset of GRPO."""

PRESETS: Mapping[str, Callable[[], SFTRun | GRPORun]] = {
    **{f"sft:{size}": partial(sft_run, size) for size in _SIZES},
    **{f"grpo:{size}": partial(grpo_run, size) for size in _SIZES if not size.startswith("llama2")},
    **{f"grpo:{size}": partial(short_grpo_run, size) for size in _SHORT},
}
"""Presets by the name for `--config`: the loop and the model's size."""

AUTO: Mapping[str, Callable[[Model], SFTRun | GRPORun]] = {
    "sft:auto": lambda model: SFTRun(model, auto.provisional_sft(model)),
    "grpo:auto": lambda model: GRPORun(model, auto.provisional_grpo()),
}
"""Settings for any model, by the name for `--config`. Programs complete them (`configs.auto`) when the data and the
devices are known.
"""


def unstretched(name: str, model: Model) -> Model:
    """Return the model of a preset with its makers' context, in place of the preset's own YaRN for long episodes.

    Args:
        name: value of --config.
        model: the preset's, perhaps with other settings; unchanged if its context differs from the preset's.
    """
    released = MODELS.get(name.partition(":")[2])
    if name not in PRESETS or released is None or not isinstance(model, Decoder):
        return model
    preset = PRESETS[name]().model
    if not isinstance(preset, Decoder) or (model.yarn, model.max_positions) != (preset.yarn, preset.max_positions):
        return model
    return replace(model, yarn=released.yarn, max_positions=released.max_positions)
