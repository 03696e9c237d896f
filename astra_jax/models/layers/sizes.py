"""Sizes of a decoder, and the variants of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from astra_jax.base.settings import Bound, Count, CountOrZero, Length, OneOf, SettingError, Settings

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Yarn(Settings):
    """YaRN scaling of the rotary embedding (arXiv 2309.00071), which extends the context beyond the trained length.

    Attributes:
        factor: factor by which the context is extended.
        original_max_positions: context length in tokens that the weights were trained at.
        beta_fast, beta_slow: dimensions with more than `beta_fast` turns over the original length are unchanged.
            Dimensions with fewer than `beta_slow` turns are interpolated, with a ramp in between.
        attention_factor: factor on cos and sin. None: 0.1 ln(factor) + 1.
        truncate: round the ramp's ends outwards to whole dimensions.
    """

    factor: Annotated[float, Bound(least=1, most=1e6, why="it stretches the context")]
    original_max_positions: Length
    beta_fast: Annotated[float, Bound(above=0, most=1e6)] = 32.0
    beta_slow: Annotated[float, Bound(above=0, most=1e6)] = 1.0
    attention_factor: Annotated[float, Bound(above=0, most=1e6)] | None = None
    truncate: bool = True

    @property
    def scale(self) -> float:
        """Factor of cos and sin."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class Llama3Scaling(Settings):
    """Scaling of the rotary embedding that transformers calls `llama3`: Llama 3.1 and later were trained with it.

    Attributes:
        factor: factor by which dimensions with at most `low_turns` turns over the original length are slowed down.
        original_max_positions: context length in tokens before the scaling.
        low_turns, high_turns: dimensions with at least `high_turns` turns are unchanged. Between `low_turns` and
            `high_turns` the frequency is interpolated (transformers: low_freq_factor, high_freq_factor).
    """

    factor: Annotated[float, Bound(least=1, most=1e6, why="it stretches the context")]
    original_max_positions: Length
    low_turns: Annotated[float, Bound(above=0, most=1e6)] = 1.0
    high_turns: Annotated[float, Bound(above=0, most=1e6)] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_turns <= self.low_turns:
            raise SettingError(
                f"high_turns is {self.high_turns}; it must be above low_turns ({self.low_turns}), as "
                "high_freq_factor is above low_freq_factor in every released config.json"
            )


@dataclass(frozen=True)
class Sizes(Settings):
    """Sizes of a decoder, dense or with experts.

    Attributes:
        vocab_size: rows of the embedding, padding included.
        d_model: width of the residual stream; need not be `n_heads * head_dim`.
        n_layers: number of blocks of attention and feed-forward.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads; must divide `n_heads`.
        head_dim: width of a head; must be even, for the rotary embedding.
        d_ff: width of the gated feed-forward, or of one expert.
        rope_theta: base of the rotary embedding.
        rms_eps: constant that every norm adds to the mean square.
        tie_embeddings: use the transposed embedding as the head.
        max_positions: longest sequence in tokens that the model supports; with `yarn`, the extended length.
        attention_bias: biases on the q, k and v projections, and on o if the family has one.
        yarn: scaling of the rotary embedding by YaRN. None: no YaRN.
        llama3: scaling of the rotary embedding as in Llama 3.1. None: no such scaling.
        linear: factor that slows down the whole rotary embedding (linear scaling). None: no such scaling. Without
            `yarn`, `llama3` and `linear` the embedding is plain.
        n_experts: number of experts; 0 is a dense model.
        experts_per_token: number of experts that each token uses.
        norm_topk_prob: normalize the weights of the chosen experts to a sum of 1.
        qk_norm: set by the family: RMS norm on the queries and keys of each head.
        output_bias: set by the family: `attention_bias` covers the o projection too.
        dtype: dtype of activations and matmuls. Norms, softmax, routing and rotary embedding are always float32.
        param_dtype: dtype of the parameters. With `bfloat16` choose the optimizer's `rounding`.
    """

    qk_norm: ClassVar[bool] = False
    output_bias: ClassVar[bool] = True

    vocab_size: Count
    d_model: Count
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    head_dim: Count
    d_ff: Count
    tie_embeddings: bool
    rope_theta: Annotated[float, Bound(least=1, most=1e12)] = 1e6
    rms_eps: Annotated[float, Bound(least=1e-30, most=1)] = 1e-6
    max_positions: Length = 40_960
    attention_bias: bool = False
    yarn: Yarn | None = None
    llama3: Llama3Scaling | None = None
    linear: Annotated[float, Bound(least=1, most=1e6, why="it stretches the context")] | None = None
    n_experts: CountOrZero = 0
    experts_per_token: CountOrZero = 0
    norm_topk_prob: bool = True
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    param_dtype: Annotated[str, OneOf(DTYPES)] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % self.n_kv_heads:
            raise SettingError(f"n_kv_heads is {self.n_kv_heads}; it must divide n_heads ({self.n_heads})")
        if self.head_dim % 2:
            raise SettingError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number")
        scaled = [name for name in ("yarn", "llama3", "linear") if getattr(self, name) is not None]
        if len(scaled) > 1:
            raise SettingError(f"{' and '.join(scaled)} are both given; the rotary embedding is scaled in one way")
        if self.n_experts and not 1 <= self.experts_per_token <= self.n_experts:
            raise SettingError(
                f"experts_per_token is {self.experts_per_token}; it must be between 1 and n_experts ({self.n_experts})"
            )
