"""Episodes of random tokens, and the model that says how likely they are: what batches of GRPO are tested with."""

from __future__ import annotations

import msgspec
import numpy as np

from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import Episode
from synthesis.core.reward import Reward

MODEL = Qwen3Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tie_embeddings=True,
    max_positions=256,
)


def make_episode(rng: np.random.Generator, value: float, length: int) -> Episode:
    mask = [0] * 3 + (rng.random(length - 3) < 0.7).astype(int).tolist()
    logprobs = [-float(rng.exponential(1)) if m else 0.0 for m in mask]
    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
    ids = rng.integers(0, MODEL.vocab_size, length).tolist()
    return Episode("e", ids, 3, mask, logprobs, [0] * length, [], score, 1, "answered", [])


def with_prompt(prompt: list[int], episode: Episode) -> Episode:
    """The same after a longer prompt."""
    n = len(prompt)
    return msgspec.structs.replace(
        episode,
        token_ids=[*prompt, *episode.token_ids[3:]],
        prompt_tokens=n,
        loss_mask=[0] * n + episode.loss_mask[3:],
        logprobs=[0.0] * n + episode.logprobs[3:],
        versions=[0] * n + episode.versions[3:],
    )


def of_prompts(episodes: list[Episode], sizes: list[int], rng: np.random.Generator) -> tuple[list[Episode], list[int]]:
    """Episodes of groups of these sizes, and which group each is of; prompts have 1 to 40 tokens."""
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    prompts = [rng.integers(0, MODEL.vocab_size, rng.integers(1, 41)).tolist() for _ in sizes]
    return [with_prompt(prompts[group], one) for group, one in zip(groups, episodes, strict=True)], groups
