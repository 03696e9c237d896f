"""Render HTML pages: one look (`palette.css`, `charts.css`, `page.css`), one base (`page.html.jinja`), shared macros.

A stored page is one file that loads nothing. A page of a service is rendered with `served=True` and loads `STYLE` and
`SCRIPT` from that service. The macros that several pages use are in `parts.jinja`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from synthesis.core.records import Answer

_HERE = Path(__file__).parent
_SEPARATORS = re.compile(r"([-_/.:|>](?=\w))")
CHART_STYLE = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("palette.css", "charts.css"))
STYLE = CHART_STYLE + (_HERE / "page.css").read_text(encoding="utf-8")
SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")


def _source(text: str) -> str:
    """CSP source (W3C CSP3, §2.3.1) of a page's own style or script: no other text takes effect."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SCRIPTS = f"script-src {_source(SCRIPT)}"
POLICY = f"default-src 'none'; style-src {_source(STYLE)}; {SCRIPTS}; img-src data:"


def with_breaks(name: object) -> Markup:
    """Escape an id, and allow line breaks behind its separators."""
    return Markup(_SEPARATORS.sub(r"\1<wbr>", str(escape(name))))


def figure(value: float | None) -> str:
    """Write a number for people: 0.0123, 12.3, 1,234, 1.2e-06; – where it is unknown."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == 0 or 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def answer_text(answer: Answer) -> str:
    """Write an answer for people: `3.5 km (within 0.1)`, `Oslo, Bergen`, `true`."""
    value = answer.value
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = f"{text.lower() if isinstance(value, bool) else text} {answer.unit}".strip()  # true, as in JSON
    within = f" (within {answer.tolerance})" if answer.tolerance else ""
    return text + within + (f" (or {', '.join(answer.aliases)})" if answer.aliases else "")


def shown(value: Any) -> Any:
    """Write a value of a list or a record: three decimals, thousands separated, – where it is unknown."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    is_id = isinstance(value, str) and len(value) > 20 and " " not in value
    return with_breaks(value) if is_id and not isinstance(value, Markup) else value


@functools.cache
def _environment(*folders: Path) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([_HERE, *folders])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["json"] = lambda value: msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    environment.filters |= {"parts": with_breaks, "figure": figure, "shown": shown, "answer": answer_text}
    environment.globals |= {"served": False, "style": Markup(STYLE), "script": Markup(SCRIPT), "policy": Markup(POLICY)}
    return environment


def template(name: str, *folders: Path) -> jinja2.Template:
    """Load a template of `folders`, or of this one. Values are escaped; a missing value is an error."""
    return _environment(*folders).get_template(name)
