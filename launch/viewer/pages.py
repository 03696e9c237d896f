"""What the service sends: pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from synthesis.core.html import template

HERE = Path(__file__).parent
CALL = "/call"
"""The one address that programs talk to: its answers are JSON, also its refusals."""


def page(name: str, status: int = 200, **values: Any) -> web.Response:
    """A template of this folder, filled in; all that is filled in is escaped."""
    text = template(name, HERE).render(served=True, **values)
    body = text.encode("utf-8", "replace")  # of a lone surrogate, which a model can write
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8")


def short(text: str) -> str:
    """A text of a request as it is quoted in a refusal."""
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
