"""Conversion of a tool's result into JSON data. Standard library only.

    to_json({"when": datetime.date(2026, 1, 1), "tags": {"b", "a"}})  # {"when": "2026-01-01", "tags": ["a", "b"]}

A value is converted if its JSON form loses nothing. Any other is refused, with its path and type in the message:

  * JSON data, and subclasses of its types    unchanged, as the plain type; an integer has at most 4,300 digits
  * tuple, named tuple, deque, range, views   array, in order
  * set, frozenset                            array, sorted: numbers and texts by value, anything else by its JSON
  * mappings, dataclasses, attrs, sqlite rows object; msgspec structs, pydantic models and SimpleNamespace too
  * Enum                                      its value
  * Decimal, Fraction                         number, if the number's JSON text is exactly the value; else text
  * date, time, datetime, timedelta           ISO 8601
  * bytes, bytearray, memoryview              text, if they are UTF-8
  * UUID, Path, IP addresses                  text
  * numpy scalars and arrays, other tensors   numbers and nested arrays

Keys of objects are texts. Numbers, true, false, null and values with a text form above become texts as keys. Two keys
with one text are refused, and so are NaN, infinities, iterators and values that contain themselves.

Types of libraries are recognised by their names and methods, so that nothing is imported for them.
"""

from __future__ import annotations

import json
import os
import types
from collections import abc

from astra_jax.base.nesting import MOST_NESTING

TYPE_CHECKING = False
if TYPE_CHECKING:  # as in `sandbox.call`, whose processes load this module
    from collections.abc import Callable, Iterable
    from typing import Any

MOST_DIGITS = 4_300
"""Most digits of an integer: Python's own limit for the conversion from and to text."""

_LARGEST = 10**MOST_DIGITS
_SHOWN, _DEEPEST = 60, 8  # characters of a key, and keys of a path, in a message


class NotJsonError(ValueError):
    """Error for a value without a JSON form. The message has its path, its type and what to return instead."""


def to_json(value: Any) -> Any:
    """Convert a tool's result into `dict`, `list`, `str`, `int`, `float`, `bool` and None.

    Raises:
        NotJsonError: a part has no lossless JSON form, two keys of an object have one text, or the value is nested
            deeper than `astra_jax.base.nesting.MOST_NESTING`.
    """
    try:
        return _Conversion().value(value, ())
    except NotJsonError:
        raise
    except Exception as error:  # raised by the value's own methods
        raise NotJsonError(f"the conversion failed with {type(error).__name__}: {error}") from error


def has_plain_keys(value: Any, written: bytes) -> bool:
    """Return True if all keys in JSON data are of type `str`, so that none of them can collide.

    Args:
        value: the data. Its encoder accepts no other containers than `dict`, `list` and `tuple`.
        written: the data as JSON. Without objects no search is needed, with one object almost none.
    """
    objects = written.count(b"{")
    if not objects:
        return True
    level = [value]
    while level:
        found: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(type(key) is str for key in one):
                    return False
                objects -= 1
                if objects <= 0:
                    return True
                found += one.values()
            elif isinstance(one, list | tuple):
                found += one
        level = found
    return True


class _Conversion:
    def __init__(self) -> None:
        self._open: set[int] = set()  # ids of the containers around the value

    def value(self, value: Any, place: tuple[Any, ...]) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return _text(value, place)
        if isinstance(value, int):
            if not -_LARGEST < value < _LARGEST:
                raise _refused(place, f"an integer of more than {MOST_DIGITS} digits; return it as text")
            return int.__int__(value)
        if isinstance(value, float):
            if value != value or value in (float("inf"), float("-inf")):
                raise _refused(place, f"{float.__repr__(value)}, which JSON cannot hold; return null or a text")
            return float.__float__(value)
        if id(value) in self._open:
            raise _refused(place, f"the {_name(value)} that contains it; return it without the cycle")
        if len(self._open) >= MOST_NESTING:
            raise NotJsonError(f"it nests deeper than {MOST_NESTING} levels: return it flatter")
        self._open.add(id(value))
        try:
            return self._other(value, place)
        finally:
            self._open.discard(id(value))

    def _other(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Convert a value other than null, boolean, text or number."""
        if isinstance(value, abc.Mapping):
            return self._object(value.items(), place)
        if isinstance(value, list | tuple):
            return self._array(value, place)
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]
        for name in names:
            if name in _CONVERTED:
                return self.value(_CONVERTED[name](value, place), place)
        if (fields := _fields(value)) is not None:
            return self._object(fields, place)
        if isinstance(value, bytes | bytearray | memoryview):
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                raise _refused(place, f"{_name(value)} that are not UTF-8; return them as base64 or hex text") from None
        kind = type(value)
        if hasattr(kind, "__fspath__"):
            return self.value(os.fspath(value), place)
        if hasattr(kind, "tolist") and hasattr(kind, "dtype") and not hasattr(kind, "iloc"):  # nor a Series of pandas
            return self._tensor(value, place)
        if isinstance(value, abc.Set) and not isinstance(value, abc.MappingView):
            return sorted(self._array(value, place), key=_in_order)
        if isinstance(value, abc.Sequence) or (isinstance(value, abc.MappingView) and isinstance(value, abc.Iterable)):
            return self._array(value, place)
        raise _refused(place, _advice(value))

    def _array(self, values: Iterable[Any], place: tuple[Any, ...]) -> list[Any]:
        return [self.value(one, (*place, number)) for number, one in enumerate(values)]

    def _object(self, pairs: Iterable[tuple[Any, Any]], place: tuple[Any, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        for key, value in pairs:
            text = self._key(key, place)
            if text in keys:
                both = f"{_short(keys[text])} and {_short(key)}"
                raise _refused(place, f"an object whose keys {both} are one in JSON, {json.dumps(text)}; rename one")
            keys[text] = key
            made[text] = self.value(value, (*place, text))
        return made

    def _key(self, key: Any, place: tuple[Any, ...]) -> str:
        plain = key if type(key) is str else self.value(key, (*place, key))
        if isinstance(plain, list | dict):
            raise _refused(place, f"an object with the key {_short(key)}; use texts as keys, or return a list of pairs")
        return _text(plain, (*place, key)) if isinstance(plain, str) else json.dumps(plain)

    def _tensor(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind, shape, names = getattr(value.dtype, "kind", ""), tuple(value.shape), getattr(value.dtype, "names", None)
        if shape and (kind in ("m", "M") or names):  # `tolist` returns integers for nanoseconds, and loses names
            return self._array(value, place)
        if names:
            return self._object(((name, value[name]) for name in names), place)
        plain = value.tolist()
        if kind in ("m", "M") and (plain is None or isinstance(plain, int) or kind == "M"):
            if plain is None:
                raise _refused(place, "NaT, which JSON cannot hold; return null or a text")
            return str(value)
        if type(plain) is type(value):  # a number that Python has no type for
            if float(plain) != plain:
                raise _refused(place, f"{_with_article(value)} that no float holds exactly; return a float or a text")
            plain = float(plain)
        return self.value(plain, place)


# ---------------------------------------------------------------------------------------------------------------------
# Types with a single form


def _decimal(value: Any, place: tuple[Any, ...]) -> Any:
    if not value.is_finite():
        raise _refused(place, f"{value}, which JSON cannot hold; return null or a text")
    return _number(value, str(value), -MOST_DIGITS < value.adjusted() < MOST_DIGITS)


def _fraction(value: Any, place: tuple[Any, ...]) -> Any:
    most = 4 * MOST_DIGITS  # bits
    return _number(value, str(value), value.numerator.bit_length() < most and value.denominator.bit_length() < most)


def _number(value: Any, text: str, small: bool) -> Any:
    """Return the number whose JSON text is exactly an exact number, or the number's own text."""
    if not small:
        return text
    if value == int(value) and not text.startswith("-0"):
        return int(value)
    try:
        near = float(value)
    except OverflowError:
        return text
    return near if type(value)(repr(near)) == value else text


def _duration(value: Any, place: tuple[Any, ...]) -> str:
    """Return an ISO 8601 duration such as `-P1DT2H3M4.5S`."""
    if hasattr(value, "isoformat"):  # pandas' type counts nanoseconds
        return _moment(value, place)
    sign, value = ("-", -value) if value.days < 0 else ("", value)
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    part = f"{seconds}.{value.microseconds:06}".rstrip("0").rstrip(".")
    units = {"H": str(hours), "M": str(minutes), "S": part}
    clock = "".join(f"{count}{unit}" for unit, count in units.items() if count != "0")
    days = f"{value.days}D" if value.days else ""
    return f"{sign}P{days}T{clock}" if clock else f"{sign}P{days or 'T0S'}"


def _moment(value: Any, place: tuple[Any, ...]) -> str:
    if value != value:  # pandas' NaT
        raise _refused(place, f"{value}, which JSON cannot hold; return null or a text")
    text: str = value.isoformat()
    return text


def _as_text(value: Any, place: tuple[Any, ...]) -> str:
    return str(value)


_CONVERTED: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "enum.Enum": lambda value, place: value.value,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "datetime.timedelta": _duration,
    "datetime.date": _moment,
    "datetime.time": _moment,
    "uuid.UUID": _as_text,
    "collections.UserString": _as_text,
    **{f"ipaddress.IPv{version}{kind}": _as_text for version in (4, 6) for kind in ("Address", "Network")},
}


def _fields(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return names and values of an object that declares its fields; None for other objects and for classes."""
    kind = type(value)
    if isinstance(value, type):
        return None
    if hasattr(kind, "__dataclass_fields__"):
        fields = kind.__dataclass_fields__.values()  # `ClassVar` and `InitVar` make pseudo-fields
        return [(one.name, getattr(value, one.name)) for one in fields if one._field_type.name == "_FIELD"]
    if hasattr(kind, "__attrs_attrs__"):
        return [(one.name, getattr(value, one.name)) for one in kind.__attrs_attrs__]
    if hasattr(kind, "__struct_encode_fields__"):
        names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        return [(written, getattr(value, name)) for written, name in names]
    if callable(getattr(kind, "model_dump", None)):
        dumped: Iterable[tuple[Any, Any]] = value.model_dump().items()
        return dumped
    if isinstance(value, types.SimpleNamespace):
        return vars(value).items()
    if f"{kind.__module__}.{kind.__qualname__}" == "sqlite3.Row":
        return zip(value.keys(), value, strict=True)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Texts and messages


def _text(value: str, place: tuple[Any, ...]) -> str:
    plain = str.__str__(value)
    try:
        if not plain.isascii():
            plain.encode()
    except UnicodeEncodeError as error:
        raise _refused(place, f"a text that is not Unicode ({error.reason} at {error.start})") from None
    return plain


def _in_order(value: Any) -> tuple[int, Any, str]:
    """Return a key that sorts any JSON values: numbers, then texts, then anything else by its JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, value, ""
    return (1, 0, value) if isinstance(value, str) else (2, 0, json.dumps(value, sort_keys=True))


def _advice(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the {_name(value)} {value.__name__!r}; return what it holds or computes"
    if isinstance(value, abc.Coroutine):
        return "a coroutine; define the function with `def`, without `async`"
    if isinstance(value, abc.Iterator | abc.AsyncIterator):
        return f"{_with_article(value)}, which can be read once; return a list"
    if hasattr(value, "iloc"):
        return f"{_with_article(value)}; return lists or objects, for example with .to_dict()"
    return f"{_with_article(value)}, which has no JSON form; return objects, arrays, texts and numbers"


def _refused(place: tuple[Any, ...], what: str) -> NotJsonError:
    if not place:
        return NotJsonError(f"it is {what}")
    path = "".join(f"[{_short(one)}]" for one in place[:_DEEPEST]) + ("…" if len(place) > _DEEPEST else "")
    return NotJsonError(f"its {path} is {what}")


def _short(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:  # raised by an unknown class
        text = _name(key)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _name(value: Any) -> str:
    return type(value).__name__


def _with_article(value: Any) -> str:
    name = _name(value)
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
