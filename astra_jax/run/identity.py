"""Whether a workdir's checkpoint belongs to the run that wants to resume from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from synthesis.core.datasets import Folder


class WorkdirError(Exception):
    """The workdir belongs to a run of another config, model or dataset; the message names the difference."""


def run_identity(**parts: Any) -> dict[str, Any]:
    """Nested settings as flat JSON values with dotted names, as they come back from a checkpoint."""
    return _flatten(json.loads(json.dumps(parts)))


def check_same_run(saved: Mapping[str, Any], ours: Mapping[str, Any], workdir: Folder) -> None:
    """Compare a checkpoint's identity with this run's.

    Raises:
        WorkdirError: they differ.
    """
    names = [name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)]
    if names:
        names.sort(key=lambda name: (name.count("."), name))  # the outer ones, which decide the inner ones, first
        shown = [f"{name} is {saved.get(name)!r} there, {ours.get(name)!r} here" for name in names[:3]]
        differences = "; ".join(shown) + (f"; and {len(names) - 3} more settings" if len(names) > 3 else "")
        raise WorkdirError(f"{workdir} belongs to another run: {differences}. Use those settings, or another --workdir")


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat
