"""Long lists, in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def checked_sort(sort: str, keys: Collection[str]) -> str:
    """What ?sort asks for. Raises `HttpRefusal`: it is none of the keys, with or without a minus."""
    if sort.removeprefix("-") not in ("", *keys) or sort == "-":
        raise HttpRefusal(400, f"sort is {sort[:40]!r}; give one of {', '.join(keys)}, or with - before it")
    return sort


def arranged(items: Iterable[T], sort: str, keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Items in the order of a key, the largest first where it begins with a minus, else as they are; those of which the
    key is not known (None) come last."""
    found = list(items)
    if not sort:
        return found
    key = keys[sort.removeprefix("-")]
    known = [one for one in found if key(one) is not None]
    return sorted(known, key=key, reverse=sort.startswith("-")) + [one for one in found if key(one) is None]


def query(wanted: Any, **more: Any) -> str:
    """A filter (a dataclass) as the query of an address, "" where it chooses nothing."""
    chosen: Mapping[str, Any] = {name: value for name, value in {**asdict(wanted), **more}.items() if value}
    return f"?{urlencode(chosen)}" if chosen else ""


def address(wanted: Any, number: int, **more: Any) -> str:
    """The address of a page of the list, with a filter (a dataclass) as it is, but for `more`."""
    return f"/{query(wanted, **more, page=number)}"


@dataclass(frozen=True)
class Beside:
    """The neighbours of one in the list that it was chosen from: their addresses, "" where there is none, its place,
    from 1, and how many there are; all empty where the list has not got it."""

    before: str = ""
    after: str = ""
    place: int = 0
    total: int = 0


def beside(items: Sequence[T], own: T, place: Callable[[T], str]) -> Beside:
    """See `Beside`. Args: place: gives the address of one."""
    try:
        index = items.index(own)
    except ValueError:
        return Beside()
    before = place(items[index - 1]) if index else ""
    after = place(items[index + 1]) if index + 1 < len(items) else ""
    return Beside(before, after, index + 1, len(items))
