"""Order of the stages of a synthesis, which neither journals nor cards have."""

from __future__ import annotations

import re
from collections.abc import Collection

TRAJECTORIES = (
    *("collect", "registries", "tools", "normalize", "propose", "graph", "verify", "draw", "tasks", "augment"),
    *("duplicates", "score", "interact", "user", "judge"),
)
ENVIRONMENTS = (
    *("collect", "registries", "tools", "normalize", "documents", "decompose", "distinct", "validate", "quality"),
    *("augment", "implement", "merge", "worlds", "distract", "verify"),
)


def in_order(names: Collection[str]) -> list[str]:
    """Return stages in the order of their pipeline; a user's own follows its stage, and unknown ones are last."""
    order = ENVIRONMENTS if set(names) & (set(ENVIRONMENTS) - set(TRAJECTORIES)) else TRAJECTORIES

    def place(name: str) -> tuple[int, str]:
        stage = name.partition("+")[0]
        return order.index(stage) if stage in order else len(order), name

    return sorted(names, key=place)


def name_of(key: str) -> str:
    """Return a stage's name from its key in a journal, without the digest behind it and the pipeline before it."""
    name = re.sub(r"[/ ][0-9a-f]{12,}$", "", key)
    return name.rpartition("/")[2] if name.startswith(("trajectories/", "environments/")) else name
