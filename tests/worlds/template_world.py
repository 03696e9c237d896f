"""Qwen3's own chat templates, which ship in trl."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path


def qwen3_template() -> str:
    text = template("qwen3")
    # TRL has a training variant beside the original; only the original drops old reasoning.
    assert "ns.last_query_index" in text and "{% generation" not in text and "{%- generation" not in text
    return text


@cache
def template(name: str) -> str:
    """One of TRL's, by its name there."""
    spec = importlib.util.find_spec("trl")  # found, not imported: importing trl loads torch
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps trl (it ships Qwen3's template)"
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


PLAIN_CHATML = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Of a model that knows no tools, as SmolLM2's; SYSTEM is a text in quotes."""
