"""A reward for a policy of random weights, which says noise: half of what can be said is right."""

from __future__ import annotations

import hashlib

from synthesis.core.environment import PlayedEpisode


def even(episode: PlayedEpisode) -> float:
    """1 where the digest of what the policy said is even, else 0."""
    said = "\n".join(message.content for message in episode.messages if message.role == "assistant")
    return float(hashlib.sha256(said.encode()).digest()[0] % 2 == 0)
