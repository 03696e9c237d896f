"""The values of a tool's JSON output, each with the unit that its key gives it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NamedTuple

from astra_jax.base.nesting import check_nesting
from synthesis.core.locales import Locale
from synthesis.core.normal_text import fold
from synthesis.core.quantities import written_number
from synthesis.core.units import LONGEST_UNIT, Quantity, unit_of_key

MOST_CHARACTERS: Final = 16_384
"""Twice what a model is shown of a result."""
_MOST_NODES: Final = 20_000
NO: Final = "no"
"""Also Norway, Norwegian, nobelium and the heading of a column of numbers."""
_CODES = frozenset(
    {"code", "codes", "symbol", "symbols", "abbreviation", "abbr", "language", "languages", "lang", "locale", "country"}
    | {"countries", "nationality", "tld", "domain", "element", "alpha", "iso", "iso2", "alpha2"}
)
"""Words of a key, or before a colon, under which "no" is a code, a name or a heading."""
_ASKING = frozenset({"is", "are", "was", "has", "have", "can", "does", "did"})
"""Words that a key begins with where its value is yes or no: `is_eu_country`."""
_KEY_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_KEY_IN_TEXT = re.compile(r"""(?:"[^"\n]{0,80}"|'[^'\n]{0,80}')\s{0,3}:""")


class Code(NamedTuple):
    """A string whose key says that it is a code."""

    text: str


class Flag(NamedTuple):
    """A boolean and the key that it has."""

    name: str
    value: bool


def leaves_of(output: Any, locale: Locale | None) -> Iterator[Quantity | str | Code | Flag | None]:
    """Strings, booleans and numbers of a JSON value; None, and nothing after it, where it has too many values."""
    # No recursion: an output may be nested deeper than Python calls. Iterators: most of a huge one is never read.
    waiting: list[Iterator[tuple[Any, str]]] = [iter([(output, "")])]
    nodes = 0
    while waiting:
        value, unit = next(waiting[-1], (_END, ""))
        nodes += value is not _END
        if nodes > _MOST_NODES or (isinstance(value, str) and len(value) > MOST_CHARACTERS):
            yield None
            return
        if isinstance(value, str) and (inside := opened(value)) is not None:
            value = inside
        if value is _END:
            waiting.pop()
        elif isinstance(value, dict):
            waiting.append(_members(value))
        elif isinstance(value, list | tuple) and not isinstance(value, Flag):
            waiting.append(zip(value, repeat(unit)))  # noqa: B905
        elif isinstance(value, bool):
            yield Flag("", value)
        elif isinstance(value, Flag):
            yield value
        elif isinstance(value, int | float):
            if isinstance(value, int) or math.isfinite(value):
                yield Quantity(value, unit.lstrip(_CODE))
        elif isinstance(value, str):
            if unit.startswith(_CODE) and fold(value) == NO:
                yield Code(value)
            elif (unit := unit.lstrip(_CODE)) and (number := _written_number(value, locale)) is not None:
                yield Quantity(number, unit)
            else:
                yield _KEY_IN_TEXT.sub(" ", value) if ":" in value else value


def _written_number(text: str, locale: Locale | None) -> int | float | None:
    number = written_number(text)
    if locale is None or len(text) > LONGEST_UNIT:
        return number
    read = written_number(locale.numbers(locale.spelled(text)))
    return number if read is None else read


_END: Final = object()
_CODE: Final = "\0"
"""Before the unit of a key that says that its string is a code."""


def _members(value: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    beside = next((value[key] for key in ("unit", "units", "单位") if isinstance(value.get(key), str)), "")
    beside = beside[:LONGEST_UNIT]
    places = (
        (Flag(str(key), one) if isinstance(one, bool) else one, _place(str(key)[-LONGEST_UNIT:]))
        for key, one in value.items()
    )
    if not beside:
        return places
    # It yields to a unit that the key says for sure.
    return (
        (one, place[: place.startswith(_CODE)] + beside if place[-1:] in ("", _CODE, "?") else place)
        for one, place in places
    )


@lru_cache(maxsize=4096)
def _place(key: str) -> str:
    """Return the unit that a key says; after `_CODE` where it says that its string is a code."""
    return (_CODE if names_a_code(key) else "") + unit_of_key(key)


def names_a_code(text: str) -> bool:
    words = [word.casefold() for word in _KEY_WORD.findall(text)]
    return not _CODES.isdisjoint(words) and words[0] not in _ASKING


def opened(text: str) -> Any:
    """Return the object or list that a string holds as JSON, else None."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = check_nesting(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
