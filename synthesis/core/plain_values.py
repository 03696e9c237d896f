"""Convert what Python functions return to JSON values, without loss. Standard library only.

| type | JSON |
| --- | --- |
| numpy scalars and arrays, `array.array`, tensors (anything with `tolist()`) | number, truth value, text or list |
| `Decimal`, `Fraction`, `UUID`, paths, IP addresses, `timedelta` | text, as `str` writes it |
| `datetime`, `date`, `time` | ISO 8601 text |
| NaN and infinities | the texts `NaN`, `Infinity`, `-Infinity` |
| `bytes` | text where it is UTF-8, else base64 |
| tuples, ranges, deques, dictionary views | list |
| sets | list, sorted: two processes write the same |
| dataclasses, `msgspec.Struct`, attrs and pydantic objects | object of their fields |
| `Enum` | the member's value |

Anything else has no such form, and is refused with its type.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import json
import math
from collections import deque
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

MOST_CHARACTERS: Final = 10_000_000
"""Longest JSON text of a result: more is a mistake, and is never shown."""
_MOST_LEVELS: Final = 200
_AS_TEXT: Final = (
    Decimal, Fraction, UUID, PurePath, datetime.timedelta,
    IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network,
)  # fmt: skip
_AS_ISO: Final = (datetime.date, datetime.time)
_LISTS: Final = (list, tuple, range, deque, KeysView, ValuesView, ItemsView)


def json_text(value: Any) -> str:
    """Return a value as compact JSON. Lone surrogates, which no UTF-8 holds, become question marks.

    Raises:
        TypeError: a part of the value has no lossless JSON form; the message names its type.
        ValueError: it nests too deeply, contains itself, or is too long.
    """
    text = json.dumps(plain_value(value), ensure_ascii=False, separators=(",", ":"))
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a result of {len(text):,} characters; return at most {MOST_CHARACTERS:,}")
    return text.encode("utf-8", "replace").decode()


def plain_value(value: Any, level: int = 0) -> Any:
    """Return a value made of None, truth values, numbers, texts, lists and dictionaries with text keys.

    Raises:
        TypeError, ValueError: as `json_text`.
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if level > _MOST_LEVELS:
        raise ValueError(f"a result that nests deeper than {_MOST_LEVELS} levels, or contains itself")
    if isinstance(value, enum.Enum):
        return plain_value(value.value, level + 1)
    if _is_numeric_object(value):
        return plain_value(_listed(value), level + 1)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, str | int):  # a subclass
        return str.__str__(value) if isinstance(value, str) else int(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes_text(bytes(value))
    if isinstance(value, _AS_ISO):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, Mapping):
        return _plain_object(value, level)
    if isinstance(value, AbstractSet) and not isinstance(value, KeysView | ItemsView):
        return _sorted([plain_value(one, level + 1) for one in value])
    if isinstance(value, _LISTS):
        return [plain_value(one, level + 1) for one in value]
    if (fields := _fields(value)) is not None:
        return _plain_object(fields, level)
    raise TypeError(_refusal(value))


def _is_numeric_object(value: Any) -> bool:
    """Whether it is a scalar or an array of numpy, PyTorch, JAX or `array`. numpy's float64 is a `float` too.

    A pandas Series is none: its list would lose the index.
    """
    kind = type(value)
    return callable(getattr(kind, "tolist", None)) and not hasattr(kind, "to_dict")


def _listed(value: Any) -> Any:
    if getattr(getattr(value, "dtype", None), "kind", "") in (
        "m",
        "M",
    ):  # dates: `tolist` gives nanoseconds as bare numbers
        return value.astype(str).tolist()
    listed = value.tolist()
    if type(listed) is type(value):  # numpy's longdouble
        raise TypeError(_refusal(value))
    return listed


def _bytes_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _plain_object(value: Mapping[Any, Any], level: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, one in value.items():
        plain = plain_value(key, level + 1)
        name = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        if name in found:
            raise TypeError(f"a {type(value).__name__} with two keys that JSON writes as {name!r:.80}")
        found[name] = plain_value(one, level + 1)
    return found


def _sorted(values: list[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # of several types
        return sorted(values, key=lambda one: json.dumps(one, sort_keys=True))


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of an object of one of the known kinds."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        names: Collection[str] = [one.name for one in dataclasses.fields(value)]
    elif isinstance(getattr(kind, "__struct_fields__", None), tuple):  # msgspec
        names = kind.__struct_fields__
    elif hasattr(kind, "__attrs_attrs__"):
        names = [one.name for one in kind.__attrs_attrs__]
    elif isinstance(getattr(kind, "model_fields", None), Mapping):  # pydantic
        names = [*kind.model_fields, *(getattr(value, "__pydantic_extra__", None) or {})]
    else:
        return None
    return {name: getattr(value, name) for name in names}


def _refusal(value: Any) -> str:
    kind = f"a value of type {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    if isinstance(value, Iterator) or hasattr(value, "__anext__"):
        return f"{kind}, which can be read once only; return a list"
    if hasattr(value, "to_dict"):
        return f"{kind}, which has no JSON form; return a list or a dictionary, as `to_dict()` gives"
    return f"{kind}, which has no JSON form; return text, numbers, lists or dictionaries"
