"""Settings of low-rank adapters; `adapters` computes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from astra_jax.base.settings import Bound, Count, CountOrZero, OneOf, SettingError, Settings
from astra_jax.models.matmuls import WEIGHT_QUANTIZATIONS

ALL = "all-linear"
"""Target that stands for every matrix that can have an adapter."""


@dataclass(frozen=True)
class LoRA(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

    Matrices W are frozen, W + scale · A B is computed, and only the thin A and B are trained. Without a rank there are
    no adapters, and all weights are trained.

    Attributes:
        rank: columns of A and rows of B; 8 to 64 are usual. None: no adapters.
        alpha: scaling of the adapters: A B is multiplied by alpha / rank.
        targets: matrices that get an adapter, by their names in checkpoints: `q_proj`, `k_proj`, `v_proj`, `o_proj`
            and, in dense models, `gate_proj`, `up_proj`, `down_proj`; or `all-linear` for all of these. Experts,
            routers, embedding and head get none.
        tokens: ids of tokens whose own rows in the embedding, and in a separate head, are trained in addition to the
            adapters. Programs add the tokens that the weights have no rows for, since a low rank cannot distinguish new
            tokens.
        rank_stabilized: use alpha / √rank (rsLoRA, arXiv 2312.03732), so that updates do not shrink with the rank.
        weight_quantization: number format of the layers' frozen matrices: `model.param_dtype` (`none`), or 8 bits with
            a scale for each output (`int8`), which needs a half or a quarter of the memory. Training, sampling and
            merging use these values, as in QLoRA (arXiv 2305.14314), which has 4 bits.
    """

    rank: Count | None = None
    alpha: Annotated[float, Bound(above=0, most=1e6)] = 32.0
    targets: tuple[str, ...] = (ALL,)
    tokens: tuple[CountOrZero, ...] = ()
    rank_stabilized: bool = False
    weight_quantization: Annotated[str, OneOf(WEIGHT_QUANTIZATIONS)] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise SettingError(f"targets is empty, so that nothing would be trained; name matrices, or use {ALL}")
        if twice := {name for name in self.targets if self.targets.count(name) > 1}:
            raise SettingError(f"targets has {min(twice)} twice; name each matrix once")
        if len(set(self.tokens)) < len(self.tokens):
            twice_trained = min(one for one in self.tokens if self.tokens.count(one) > 1)
            raise SettingError(f"tokens has {twice_trained} twice; name each token once")
        if self.rank is None:
            for name in ("alpha", "targets", "tokens", "rank_stabilized", "weight_quantization"):
                if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                    raise SettingError(
                        f"{name} is {value}, but rank is None, so there are no adapters; give a rank too"
                    )

    @property
    def scale(self) -> float:
        """Factor of the product. Raises `ValueError` without a rank."""
        if self.rank is None:
            raise ValueError("adapters without a rank have no scale")
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


FULL = LoRA()
"""Settings without adapters."""
