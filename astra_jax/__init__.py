"""ASTRA in JAX: Qwen3 in Flax, supervised fine-tuning, online multi-turn GRPO, rollout and evaluation.

Shapes are in the names: `x_btd` is [B, T, D], and einsum letters equal the name's. The letters, everywhere:

    B batch    T time        S key time    D model width    N query heads    K key-value heads
    H head     F feed-forward              V vocabulary     L layers         (G = N / K, queries a K/V head)

Importing this package imports no jax.
"""

__version__ = "0.2.0"
