"""Time of rollouts by arithmetic: sampling a token reads the weights once and the cache of all running sequences."""

from __future__ import annotations

from dataclasses import dataclass

from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.model import Model
from astra_jax.run.chips import Chip

MEMORY_SHARE = 0.9
"""Share of a server's memory for weights and cache; vLLM's default."""
SERVERS = (1, 2, 4, 8)
"""Chips of a rollout server that are tried; the fastest per chip is taken."""
MOST_SEQUENCES = 256
"""Maximum sequences that a server decodes at the same time; vLLM's default."""
_DECODE_SHARES = {"tpu": 0.71, "gpu": 0.48}
"""Share of the memory's bandwidth that decoding reaches: in compiled cycles on v6e, and measured on an H200."""


@dataclass(frozen=True)
class Server:
    """Rollout server that samples with tensor parallelism.

    Attributes:
        chips: number of chips.
        sequences: sequences that it decodes at the same time.
        memory, compute: seconds of a decoding step, in which each sequence gets a token, by either limit.
    """

    chips: int
    sequences: int
    memory: float
    compute: float

    @property
    def step_seconds(self) -> float:
        return max(self.memory, self.compute)

    @property
    def chip_seconds(self) -> float:
        """Chip-seconds of a token."""
        return self.step_seconds * self.chips / self.sequences


def cache_bytes(model: Model) -> float:
    """Return the bytes of a token in the cache, in bfloat16."""
    return 2.0 * 2 * model.n_layers * model.n_kv_heads * model.head_dim  # type: ignore[attr-defined]


def decode_seconds(
    model: Model, chip: Chip, chips: int, mfu: float, sequences: int, cached: float, *, share: float
) -> tuple[float, float]:
    """Return the seconds of a decoding step, which samples a token of each sequence: (for memory, for arithmetic).

    Args:
        cached: tokens read from all caches.
        share: share of the memory's bandwidth that decoding reaches.
    """
    weights = 2.0 * sum(model.matmul_parameters())
    memory = (weights + cached * cache_bytes(model)) / (chips * chip.hbm_bandwidth * share)
    return memory, sequences * weights / (chips * chip.flops * mfu)  # 2 flops a parameter of 2 bytes


def server_of(
    model: Model, chip: Chip, chips: int, mfu: float, context: float, *, share: float, most: int = MOST_SEQUENCES
) -> Server | None:
    """Return a server with as many sequences as its memory holds; None if the weights leave room for none.

    Args:
        context: mean tokens of a sequence in the cache.
        most: maximum sequences.
    """
    room = chips * chip.hbm_bytes * MEMORY_SHARE - 2.0 * sum(model.matmul_parameters())
    if (sequences := min(most, int(room / (cache_bytes(model) * context)))) < 1:
        return None
    return Server(
        chips, sequences, *decode_seconds(model, chip, chips, mfu, sequences, sequences * context, share=share)
    )


def rollout_seconds(model: Model, config: GRPOConfig, chip: Chip, chips: int, mfu: float) -> float | None:
    """Return the seconds in which a slice samples the episodes of one step; None if the model has no room.

    Every episode has the configuration's longest prompt and response, all of which the model samples, and every group
    is valid. A group's prompt is read once.

    Args:
        chips: chips of the slice, which is divided into servers.
        mfu: model flops utilization of reading prompts.
    """
    prompt, response = config.episode.max_prompt_tokens, config.episode.max_response_tokens
    episodes = config.batch_size * config.group_size
    share = _DECODE_SHARES["gpu" if chip.clock is None else "tpu"]
    found = []
    for size in SERVERS:
        if size > chips or not hasattr(model, "n_kv_heads"):
            continue
        servers = chips // size
        each = -(-episodes // servers)
        server = server_of(model, chip, size, mfu, prompt + response / 2, share=share, most=min(MOST_SEQUENCES, each))
        if server is not None:
            found.append(max(1.0, each / server.sequences) * response * server.step_seconds)
    if not found:
        return None
    read = config.batch_size * prompt * model.flops_per_token(prompt)[0] / 3  # forward alone
    return min(found) + read / (chips * chip.flops * mfu)
