"""Pages for people: one look (`palette.css`, `charts.css`, `page.css`), one base (`page.html.jinja`), and parts that
several show (`parts.jinja`).

A page is one file that asks nobody for anything; what a service sends is told so with `served=True`, and fetches
`STYLE` and `SCRIPT` from there. Charts are in `synthesis.core.charts`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import jinja2
import markupsafe
import msgspec

_HERE = Path(__file__).parent
_SEPARATORS = re.compile(r"([-_/.:|>](?=\w))")
STYLE = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("palette.css", "charts.css", "page.css"))
SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Of a page's own style or script, in its Content-Security-Policy (W3C CSP3, §2.3.1): nothing else takes effect."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SCRIPTS = f"script-src {_source(SCRIPT)}"
POLICY = f"default-src 'none'; style-src {_source(STYLE)}; {SCRIPTS}; img-src data:"


def _parts(name: object) -> markupsafe.Markup:
    """An id as it may be broken into lines, where there is no room for it: behind its separators."""
    return markupsafe.Markup(_SEPARATORS.sub(r"\1<wbr>", str(markupsafe.escape(name))))


def template(name: str, *folders: Path) -> jinja2.Template:
    """A template of `folders`, or of this one. All that is filled in is escaped; what is not given is an error."""
    loader = jinja2.FileSystemLoader([_HERE, *folders])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["json"] = lambda value: msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    environment.filters["parts"] = _parts
    environment.globals.update(
        served=False, style=markupsafe.Markup(STYLE), script=markupsafe.Markup(SCRIPT), policy=markupsafe.Markup(POLICY)
    )
    return environment.get_template(name)
