"""Qwen3's own chat template, which ships in trl."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path


@cache
def qwen3_template() -> str:
    spec = importlib.util.find_spec("trl")  # found, not imported: importing trl loads torch
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps trl (it ships Qwen3's template)"
    text = (Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    # TRL has a training variant beside the original; only the original drops old reasoning.
    assert "ns.last_query_index" in text and "{% generation" not in text and "{%- generation" not in text
    return text
