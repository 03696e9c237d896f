"""Long lists, in parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from aiohttp import web

from sandbox.http_service import HttpRefusal

T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list; `number` and `last` start at 1, `matching` counts over all pages."""

    items: list[T]
    number: int
    last: int
    matching: int


def part(matching: Sequence[T], number: int, size: int = 50) -> Page[T]:
    """Page `number`, from 1; the last one where there are not so many."""
    last = max(1, math.ceil(len(matching) / size))
    number = min(max(1, number), last)
    return Page(list(matching[(number - 1) * size : number * size]), number, last, len(matching))


def page_number(request: web.Request) -> int:
    """The page that ?page asks for. Raises `HttpRefusal` where it is no whole number."""
    number = request.query.get("page", "1")
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise HttpRefusal(400, f"page is {number[:40]!r}; give a whole number from 1")
    return int(number)


def asked(request: web.Request, names: Sequence[str]) -> dict[str, str]:
    """What the address says of each name, "" where it says nothing."""
    return {name: request.query.get(name, "") for name in names}


def address(wanted: Any, number: int) -> str:
    """The address of a page of the list, with a filter (a dataclass) as it is."""
    chosen: Mapping[str, Any] = {name: value for name, value in asdict(wanted).items() if value}
    return f"/?{urlencode({**chosen, 'page': number})}"
