"""What the service sends: pages, and refusals, which the handlers raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from astra_jax.rollout.pages import template

HERE = Path(__file__).parent
CALL = "/call"
"""The one address that programs talk to: its answers are JSON, also its refusals."""


class Refused(Exception):
    """A request that is answered with an error. The text says what to send instead; people and programs read it."""

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}


def page(name: str, status: int = 200, **values: Any) -> web.Response:
    """A template of this folder, filled in; all that is filled in is escaped."""
    return web.Response(text=template(name, HERE).render(**values), status=status, content_type="text/html")


def refusal(request: web.Request, refused: Refused) -> web.Response:
    """As JSON to programs, as a page to people."""
    if request.path == CALL:
        response = web.json_response({"error": refused.text}, status=refused.status)
    else:
        response = page("page.html.jinja", refused.status, title="Not shown", text=refused.text)
    response.headers.update(refused.headers)
    return response


def short(text: str) -> str:
    """A text of a request as it is quoted in a refusal."""
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
