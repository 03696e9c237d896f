"""ASTRA in JAX: Qwen3 in Flax, supervised fine-tuning, online multi-turn GRPO, rollout and evaluation.

Names contain shapes: `x_btd` is [B, T, D], and einsum letters equal the name's. The letters are the same everywhere:

- B batch, T time, S key time, D model width;
- N query heads, K key-value heads, G = N / K queries per K/V head, H head;
- F feed-forward, V vocabulary, L layers.

Importing this package imports no jax.
"""

__version__ = "0.2.0"
