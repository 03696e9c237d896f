"""A small model whose axes eight devices divide, and a packed batch for it."""

from __future__ import annotations

import dataclasses

import numpy as np

from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.batch import PackedBatch

DENSE = Qwen3Config(
    vocab_size=128,
    d_model=64,
    n_layers=2,
    n_heads=16,
    n_kv_heads=8,
    head_dim=8,
    d_ff=96,
    tie_embeddings=False,
)
EXPERTS = dataclasses.replace(DENSE, n_experts=8, experts_per_token=2, d_ff=16)
ROWS, LENGTH = 8, 64


def packed_batch(seed: int = 0) -> PackedBatch:
    """Documents of random lengths, with padding behind them, and a random loss mask."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        start = 0
        for document in range(1, 6):
            length = min(int(rng.integers(1, 30)), LENGTH - 3 - start)
            if length <= 0:
                break
            segments[row, start : start + length] = document
            positions[row, start : start + length] = np.arange(length)
            start += length
    tokens = rng.integers(0, DENSE.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    mask = (rng.random((ROWS, LENGTH)) < 0.6).astype(np.float32) * (segments > 0)
    return PackedBatch(tokens_bt=tokens, segment_ids_bt=segments, positions_bt=positions, loss_mask_bt=mask)
