"""Several hosts, one program: what only the first of them does, and how the others learn of it."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that talks to rollout servers, samples, and writes metrics."""
    return jax.process_index() == 0


def from_first(value: bytes) -> bytes:
    """The first process's `value`, on every process; all must call it. What the others pass is ignored."""
    if jax.process_count() == 1:
        return value
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(value))))
    content = np.frombuffer(value, np.uint8) if is_first() else np.zeros(size, np.uint8)
    return multihost_utils.broadcast_one_to_all(content).astype(np.uint8).tobytes()
