"""Pages for people: templates of which all may import `conversation.jinja`, which shows messages and calls."""

from __future__ import annotations

from pathlib import Path

import jinja2
import msgspec

_HERE = Path(__file__).parent


def template(name: str, *folders: Path) -> jinja2.Template:
    """A template of `folders`, or of this one. All that is filled in is escaped; what is not given is an error."""
    loader = jinja2.FileSystemLoader([_HERE, *folders])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["json"] = lambda value: msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return environment.get_template(name)
