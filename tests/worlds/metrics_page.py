"""The page of all metrics, to compare with rows that a run wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `([^`]+)` \| [^|]*\| [^|]+\|$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"[A-Z]+(?::[A-Z]+)?")

NAMES = tuple(_ROW.findall(PAGE.read_text(encoding="utf-8").partition("## Former names")[0]))
"""All documented names; parts in capitals stand for other text."""
_DOCUMENTED = [re.compile(_PLACEHOLDER.sub("[^/]+", name)) for name in NAMES]


def undocumented(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """Return the metrics in these rows that the page does not list."""
    logged = {name for row in rows for name in row} - {"step"}
    return {name for name in logged if not any(one.fullmatch(name) for one in _DOCUMENTED)}
