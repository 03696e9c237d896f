"""Metrics of a rollout server's `/metrics` that the policy uses."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_PREEMPTIONS, _CACHE = "vllm:num_preemptions_total", "vllm:cache_config_info{"
_SIZE = re.compile(r'[{,]kv_cache_size_tokens="([0-9]{1,15})"')
_BLOCKS = re.compile(r'[{,]num_gpu_blocks="([0-9]{1,15})"')
_BLOCK = re.compile(r'[{,]block_size="([0-9]{1,15})"')


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics of a server; None if not reported (`--disable-log-stats`).

    Attributes:
        tokens: prefilled and sampled since the server started.
        cache: tokens that fit the KV caches of all its engines.
        preemptions: requests evicted from the full cache and recomputed.
    """

    tokens: float | None
    cache: int | None
    preemptions: float | None


def parse_metrics(text: str) -> ServerMetrics:
    """Parse vLLM's metrics. Its `cache_config_info` (0.32) has a line for each engine with that engine's
    `kv_cache_size_tokens`, while `num_gpu_blocks` is the total.

    Raises:
        ValueError: a metric is not a number.
    """
    lines = text.splitlines()

    def total(names: str | tuple[str, ...]) -> float | None:
        found = [line for line in lines if line.startswith(names)]
        return sum(float(line.rpartition(" ")[2]) for line in found) if found else None

    caches = [line for line in lines if line.startswith(_CACHE)]
    cache = sum(int(found[1]) for line in caches if (found := _SIZE.search(line)))
    if not cache and caches:
        blocks, block = _BLOCKS.search(caches[0]), _BLOCK.search(caches[0])
        cache = int(blocks[1]) * int(block[1]) if blocks and block else 0
    return ServerMetrics(total(_TOKENS), cache or None, total(_PREEMPTIONS))
