"""Settings: each field declares its allowed values, which are checked when a configuration is made.

    @dataclass(frozen=True)
    class Attempts(Settings):
        count: Count = 3
        share: Annotated[float, Bound(above=0, most=1)] = 0.5
        pause_seconds: Seconds | None = None

`Settings` raises `SettingError` with the field's name for a value that is not allowed. Check rules between fields in
`__post_init__`, after `super().__post_init__()`.

Only numbers, bool, str, None, Literal, containers, and dataclasses or msgspec structs of these are checked. Declare a
path as `str`, and check it in `__post_init__`, as `ReachConfig` does. A setting is saved as JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

_REFERENCE = re.compile(r"[^\s:]{1,400}:[^\W\d]\w{0,200}")
_SHOWN = 12
"""Most names of a vocabulary that a message lists; for a longer vocabulary it lists the nearest names only."""


class SettingError(ValueError):
    """Error for a value that a setting may not have. The message has the setting, the value, and the allowed values."""


@dataclass(frozen=True)
class Bound:
    """Bounds of a number, which must also be finite.

    Attributes:
        least: the smallest value.
        above: an exclusive lower bound, in place of `least`.
        most: the largest value.
        below: an exclusive upper bound, in place of `most`.
        why: the reason, for the message, if the setting's name does not make it clear.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    why: str = ""

    def holds(self, value: float) -> bool:
        """Return whether the value is within the bounds. NaN and infinity never are."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            parts = [f"from {_short(self.least)} to {_short(self.most)}"]
        else:
            ends = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
            parts = [f"{word} {_short(end)}" for word, end in ends.items() if end is not None]
        return " and ".join(parts)


@dataclass(frozen=True)
class OneOf:
    """Vocabulary of a string that is not a `Literal`.

    Attributes:
        names: all names, or a function that returns them, to load them only when they are needed.
        own: True to allow a reference to the user's code too: `my_module:my_name`, or `FOLDER/FILE.py:my_name`.
    """

    names: Iterable[str] | Callable[[], Iterable[str]]
    own: bool = False

    def all(self) -> list[str]:
        """Return all names."""
        return list(self.names() if callable(self.names) else self.names)

    def allows(self, value: str) -> bool:
        """Return whether a text is one of the names, or a reference if `own` is True."""
        return value in self.all() or (self.own and _REFERENCE.fullmatch(value) is not None)


Share = Annotated[float, Bound(least=0, most=1)]
Count = Annotated[int, Bound(least=1, most=2**31 - 1)]
"""Positive count that fits in 32 bits, which JAX counts with."""
CountOrZero = Annotated[int, Bound(least=0, most=2**31 - 1)]
Total = Annotated[int, Bound(least=1, most=2**53)]
"""Number of bytes or tokens, which may exceed 32 bits; a float represents it exactly."""
TotalOrZero = Annotated[int, Bound(least=0, most=2**53)]
Seconds = Annotated[float, Bound(above=0, most=366 * 86_400)]
"""Duration of up to a year; clocks and event loops add it to the time."""
SecondsOrZero = Annotated[float, Bound(least=0, most=366 * 86_400)]
Minutes = Annotated[float, Bound(least=0.01, most=366 * 1_440)]
Rate = Annotated[float, Bound(above=0, most=1e12)]
Amount = Annotated[float, Bound(least=0, most=1e12)]
"""Amount of money, or a relative weight."""
Length = Annotated[int, Bound(least=1, most=2**24)]
"""Sequence length, in tokens."""
Slots = Annotated[int, Bound(least=1, most=65_536)]
"""Number of open or decoding items, each with memory reserved for it."""
Temperature = Annotated[float, Bound(least=0, most=100)]
"""Sampling temperature; 0 is greedy."""
TopP = Annotated[float, Bound(above=0, most=1)]
Seed = Annotated[int, Bound(least=0, most=2**32 - 1)]
"""Random seed; Grain accepts no larger one."""
Port = Annotated[int, Bound(least=0, most=65_535)]
"""TCP port; 0 takes a free one."""


class Settings:
    """Base of configuration dataclasses, which checks that each field has a value that its declaration allows."""

    def __post_init__(self) -> None:
        """Check every field. Raises `SettingError` for a value that the field's declaration does not allow."""
        for name, annotation in declared(type(self)).items():
            check(annotation, getattr(self, name), f"{type(self).__name__}.{name}")


_DECLARED: dict[type, Mapping[str, Any]] = {}


def declared(kind: type) -> Mapping[str, Any]:
    """Return the annotations by field name, of a dataclass or a msgspec struct; {} for any other type."""
    if kind not in _DECLARED:
        names: tuple[str, ...]
        if dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
        else:
            names = getattr(kind, "__struct_fields__", ())
        hints = typing.get_type_hints(kind, include_extras=True) if names else {}
        _DECLARED[kind] = types.MappingProxyType({name: hints[name] for name in names})
    return _DECLARED[kind]


def check(annotation: Any, value: Any, name: str) -> None:
    """Check a value and everything in it against a declaration.

    Args:
        name: name of the setting, for the message.

    Raises:
        SettingError: the value has another type, is out of bounds or not finite, or is not in the vocabulary.
    """
    _check(annotation, value, name, (), annotation)


def _check(annotation: Any, value: Any, name: str, limits: tuple[Any, ...], whole: Any) -> None:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        _check(parts[0], value, name, (*limits, *annotation.__metadata__), whole)
    elif origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in parts:
            return
        refused: SettingError | None = None
        for part in parts:
            try:
                return _check(part, value, name, limits, whole)
            except SettingError as error:
                refused = refused if part is types.NoneType else error
        assert refused is not None
        raise refused
    elif origin is Literal:
        if not any(value == one and type(value) is type(one) for one in parts):
            raise _refused(name, value, whole, parts)
    elif origin is tuple and parts[-1] is not ...:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise _refused(name, value, whole)
        for place, (part, one) in enumerate(zip(parts, value, strict=True)):
            _check(part, one, f"{name}[{place}]", (), part)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _refused(name, value, whole)
        for key, one in value.items():
            _check(parts[0], key, f"a key of {name}", (), parts[0])
            _check(parts[1], one, f"{name}[{key!r}]", (), parts[1])
    elif isinstance(origin, type) and issubclass(origin, Iterable):
        if not isinstance(value, origin):
            raise _refused(name, value, whole, why=f"in Python a {origin.__name__}")
        for place, one in enumerate(value):
            _check(parts[0], one, f"{name}[{place}]", (), parts[0])
    elif isinstance(annotation, type):
        _check_one(annotation, value, name, limits, whole)


def _check_one(kind: type, value: Any, name: str, limits: tuple[Any, ...], whole: Any) -> None:
    """Check a value that is not a container."""
    if kind in (int, float):
        takes = int if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, takes):
            raise _refused(name, value, whole)
        bounds = [limit for limit in limits if isinstance(limit, Bound)] or [Bound()]
        try:
            fits = all(bound.holds(value) for bound in bounds)
        except OverflowError:  # an integer larger than every float
            fits = False
        if not fits:
            raise _refused(name, value, whole, why=next((bound.why for bound in bounds if bound.why), ""))
    elif kind in (bool, str):
        if not isinstance(value, kind):
            raise _refused(name, value, whole)
        for limit in limits:
            if isinstance(limit, OneOf) and not limit.allows(str(value)):
                raise _refused(name, value, whole, limit.all())
    elif kind is types.NoneType or declared(kind):
        if not isinstance(value, kind):
            raise _refused(name, value, whole)
        if not issubclass(kind, Settings):  # instances of Settings have checked themselves
            for field, annotation in declared(kind).items():
                _check(annotation, getattr(value, field), f"{name}.{field}", (), annotation)


def _refused(
    name: str, value: Any, annotation: Any, vocabulary: Iterable[Any] | None = None, *, why: str = ""
) -> SettingError:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "an integer of thousands of digits"
    text = text if len(text) <= 80 else f"{text[:60]}..."
    near = ""
    if vocabulary is not None and isinstance(value, str):
        found = difflib.get_close_matches(value, [one for one in vocabulary if isinstance(one, str)], n=1)
        near = f" (the nearest is {found[0]})" if found else ""
    return SettingError(f"{name} is {text}; use {wording(annotation)}{near}{f': {why}' if why else ''}")


def wording(annotation: Any) -> str:
    """Describe the values that a declaration allows, for example `a whole number from 0 to 65,535, or None`."""
    return _wording(annotation, ())


def _wording(annotation: Any, limits: tuple[Any, ...]) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _wording(parts[0], (*limits, *annotation.__metadata__))
    if origin in (typing.Union, types.UnionType):
        words = [_wording(part, limits) for part in parts if part is not types.NoneType]
        return ", or ".join([*words, *(["None"] if types.NoneType in parts else [])])
    if origin is Literal:
        return _listed([str(one) for one in parts])
    if origin is tuple and parts[-1] is not ...:
        return f"({', '.join(_wording(part, ()) for part in parts)})"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping from {_wording(parts[0], ())} to {_wording(parts[1], ())}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, each {_wording(parts[0], ())}"
    if annotation is str:
        vocabulary = next((limit for limit in limits if isinstance(limit, OneOf)), None)
        if vocabulary is None:
            return "a text"
        names = list(vocabulary.all())
        if not names:
            return "my_module:my_name"
        return _listed(names) + ", or my_module:my_name" * vocabulary.own
    if annotation in (int, float):
        bounds = " and ".join(str(limit) for limit in limits if isinstance(limit, Bound))
        return f"{'a whole number' if annotation is int else 'a number'} {bounds}".rstrip()
    if annotation is bool:
        return "true or false"
    if isinstance(annotation, type) and (fields := declared(annotation)):
        return f"{{{', '.join(f'{name}: {_wording(field, ())}' for name, field in fields.items())}}}"
    return f"a {getattr(annotation, '__name__', annotation)}"


def _listed(names: list[str]) -> str:
    if len(names) > _SHOWN:
        return f"one of {len(names)} names"
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _short(number: float) -> str:
    """Format a number with thousands separators; large and small floats as powers of ten."""
    if isinstance(number, int) or (number == int(number) and abs(number) < 1e6):
        return f"{int(number):,}"
    return f"{number:g}"
