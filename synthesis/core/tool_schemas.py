"""JSON schemas of tools, and the check of arguments against them: a closed vocabulary, checked in bounded steps.

A schema comes from a tool's author. Here it is a tree of known keywords: no references, so nothing is fetched or
contains itself, and no regular expressions, so nothing backtracks. `pattern` and `format` are only shown to the model,
and the tool itself may check them: 52 of the 9,978 tools of 1,704 public MCP servers have a pattern. A step checks one
keyword on one value; arguments that need more than `MOST_STEPS` are refused.

The rules are JSON Schema's (Draft 2020-12), for the known keywords; 0.3 is a multiple of 0.1.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

MOST_DEPTH: Final = 40
"""Maximum nesting of schemas, and of values."""
MOST_VALUES: Final = 5_000
"""Maximum size of a schema: keywords, names, values, and each hundred characters. The largest known has 2,210."""
MOST_STEPS: Final = 20_000
TYPES: Final = ("string", "integer", "number", "boolean", "array", "object", "null")


class UncheckableSchema(Exception):
    """A tool's schema that arguments cannot be checked against; the message names the keyword and the fix."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100
_REPR.maxlist = _REPR.maxdict = 10
_REPR.maxlevel = 2


def brief(value: Any) -> str:
    """Return the start of a value's `repr`, of bounded length and work: a few aliases of YAML are lists of a
    billion."""
    return _REPR.repr(value)


# ---------------------------------------------------------------------------------------------------------------------
# Schemas


def check_schema(schema: Any) -> None:
    """Check that arguments can be checked against a schema, whatever it is.

    Raises:
        UncheckableSchema: an unknown keyword, or one with an invalid value; too large or too deep.
    """
    check_size(schema)
    try:
        _check_schema(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise UncheckableSchema(f"the schema is not JSON: {error}") from None


def check_size(schema: Any) -> None:
    """Check that a schema that is only shown is small enough.

    Raises:
        UncheckableSchema: too large or too deep.
    """
    count, waiting = 0, [(schema, 0)]
    while waiting:
        one, depth = waiting.pop()
        count += 1 + (len(one) // 100 if isinstance(one, str) else 0)
        if depth > 2 * MOST_DEPTH:  # of two levels one is a keyword's
            raise UncheckableSchema(f"the schema nests deeper than {MOST_DEPTH}; flatten it")
        if isinstance(one, Mapping):
            waiting += [(inner, depth + 1) for inner in one.values()]
            count += sum(map(len, filter(lambda name: isinstance(name, str), one))) // 100
        elif isinstance(one, list):
            waiting += [(inner, depth + 1) for inner in one]
        if count + len(waiting) > MOST_VALUES:
            raise UncheckableSchema(f"the schema has more than {MOST_VALUES} values; leave some out")


@lru_cache(maxsize=4096)
def _check_schema(text: str) -> None:
    waiting: list[tuple[Any, str]] = [(json.loads(text), "")]
    while waiting:
        schema, where = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise UncheckableSchema(f"{where or 'the schema'} must be a schema, an object, not {brief(schema)}")
        for keyword, value in schema.items():
            here = f"{where}.{keyword}".lstrip(".")[-100:]
            if keyword in _SCHEMAS:
                waiting += [(inner, f"{here}{name}") for name, inner in _inner(keyword, value, here)]
            elif keyword in _FORMS:
                is_right, what = _FORMS[keyword]
                if not is_right(value):
                    raise UncheckableSchema(f"{here} must be {what}, not {brief(value)}")
            elif not keyword.startswith("x-"):
                remedy = _REMEDIES.get(keyword, "leave it out")
                raise UncheckableSchema(f"{here}: {keyword[:100]!r} is no keyword that tools may use; {remedy}")


_SCHEMAS: Final = frozenset({"properties", "items", "prefixItems", "additionalProperties", "propertyNames", "not",
                             "anyOf", "oneOf", "allOf"})  # fmt: skip
"""Keywords that hold schemas."""
_REMEDIES: Final = {"$ref": "put what it refers to in its place", "patternProperties": "list the properties"}


def _inner(keyword: str, value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of a keyword, with the path to them."""
    if keyword == "properties":
        if not isinstance(value, dict):
            raise UncheckableSchema(f"{where} must be an object of schemas by name, not {brief(value)}")
        return ((f".{name}", inner) for name, inner in value.items())
    if keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if not isinstance(value, list) or not value:
            raise UncheckableSchema(f"{where} must be a list of schemas, not {brief(value)}")
        return ((f"[{i}]", inner) for i, inner in enumerate(value))
    return iter((("", value),))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_NUMBER = (_is_number, "a finite number")
_COUNT = (_is_count, "a whole number from 0 on")
_TEXT = (lambda value: isinstance(value, str), "a text")
_BOOLEAN = (lambda value: isinstance(value, bool), "true or false")
_LIST = (lambda value: isinstance(value, list), "a list")
_ANY = (lambda value: True, "any value")
_Forms = dict[str, tuple[Callable[[Any], bool], str]]
CHECKED: Final[_Forms] = {
    "type": (_is_type, f"one or several of {', '.join(TYPES)}"),
    "enum": _LIST, "const": _ANY, "uniqueItems": _BOOLEAN,
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of names"
    ),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a finite number above 0"),
    "minimum": _NUMBER, "maximum": _NUMBER, "exclusiveMinimum": _NUMBER, "exclusiveMaximum": _NUMBER,
    "minLength": _COUNT, "maxLength": _COUNT, "minItems": _COUNT, "maxItems": _COUNT,
    "minProperties": _COUNT, "maxProperties": _COUNT,
}  # fmt: skip
"""Keywords that arguments are checked by and that hold no schemas, with the form of their values."""
WORDS: Final[_Forms] = {
    "title": _TEXT, "description": _TEXT, "format": _TEXT, "pattern": _TEXT, "contentEncoding": _TEXT,
    "contentMediaType": _TEXT, "$schema": _TEXT, "$id": _TEXT, "$comment": _TEXT, "default": _ANY, "example": _ANY,
    "examples": _LIST, "deprecated": _BOOLEAN, "readOnly": _BOOLEAN, "writeOnly": _BOOLEAN,
}  # fmt: skip
"""Keywords that are only for the model, by which no argument is checked; so are all that start with `x-`."""
_FORMS: Final[_Forms] = CHECKED | WORDS
KEYWORDS: Final = _SCHEMAS | _FORMS.keys()


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


_OPEN: Final = ("allOf", "anyOf", "oneOf")
"""A schema with more rules on names than its `properties` decides itself which names it takes."""


def argument_error(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return why the arguments do not fit the tool's JSON schema, or the empty string.

    Names that the schema does not list are refused unless it has a rule for others: a tool's function takes its
    properties as keywords and would raise.

    Raises:
        UncheckableSchema: the schema fails, not the arguments; see `check_schema`.
    """
    check_schema(schema)
    properties = schema.get("properties", {})
    unknown = set(arguments) - set(properties)
    if unknown and schema.get("additionalProperties", False) is False and not any(key in schema for key in _OPEN):
        known = ", ".join(sorted(properties)) or "none"
        return f"unknown argument {brief(min(unknown))}; known arguments: {known}"
    try:
        _Check().value(schema, arguments, ())
    except _Unfit as error:
        where = ".".join(map(str, error.path))[:100]
        problem = error.message()[:300]
        return f"argument {where!r}: {problem}" if where else problem
    return ""


def with_integers(schema: Any, value: Any) -> Any:
    """Return checked arguments with whole floats as integers where their schema takes no other number.

    JSON Schema calls 3.0 an integer; Python takes no 3.0 as a count or an index.
    """
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, float):
        kinds = {kind for one in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())) for kind in _kinds(one)}
        return int(value) if value.is_integer() and "integer" in kinds and "number" not in kinds else value
    for one in schema.get("allOf", ()):
        value = with_integers(one, value)
    if isinstance(value, Mapping):
        properties, further = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: with_integers(properties.get(name, further), one) for name, one in value.items()}
    if isinstance(value, list):
        first, further = schema.get("prefixItems", ()), schema.get("items")
        return [with_integers(first[i] if i < len(first) else further, one) for i, one in enumerate(value)]
    return value


def _kinds(schema: Any) -> Sequence[str]:
    named = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    return (named,) if isinstance(named, str) else named


_Message = Callable[[], str]
"""Makes an error message on demand: messages of alternatives are never read, and a long value's takes longer than its
check."""


def value_error(schema: Mapping[str, Any], value: Any) -> str:
    """Return why a value, such as a default, does not fit a schema that can be checked; "" if it fits."""
    try:
        _Check().value(schema, value, ())
    except _Unfit as error:
        return error.message()[:300]
    return ""


class _Unfit(Exception):
    def __init__(self, path: tuple[str | int, ...], message: _Message) -> None:
        super().__init__()
        self.path, self.message = path, message


class _TooLarge(_Unfit):
    """An error that no other alternative can avoid."""


class _Check:
    """Check of one value; the schema was checked before, so it is a tree of known keywords."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, path: tuple[str | int, ...], count: int = 1) -> None:
        self.steps += count
        if self.steps > MOST_STEPS:
            raise _TooLarge(path, lambda: "the arguments are too large to be checked; make them smaller")

    def value(self, schema: Any, value: Any, path: tuple[str | int, ...]) -> None:
        """Check a value. Raises `_Unfit`; errors of the value itself come before errors inside it."""
        self.step(path, 1 if isinstance(schema, bool) else len(schema))
        if schema is False:
            raise _Unfit(path, lambda: f"nothing is allowed here, not even {brief(value)}")
        if schema is True:
            return
        if "type" in schema and not has_type(value, schema["type"]):
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            raise _Unfit(path, lambda: f"{brief(value)} is not of type {', '.join(map(repr, names))}")
        if problem := self.own(schema, value, path):
            raise _Unfit(path, problem)
        self.combined(schema, value, path)
        if isinstance(value, Mapping):
            self.members(schema, value, path)
        elif isinstance(value, list):
            self.items(schema, value, path)

    def own(self, schema: Mapping[str, Any], value: Any, path: tuple[str | int, ...]) -> _Message | None:
        """Return the error of the value itself, or None."""
        if "const" in schema and self.frozen(value, path) != self.frozen(schema["const"], path):
            return lambda: f"{brief(schema['const'])} was expected"
        if "enum" in schema:
            listed = schema["enum"]
            self.step(path, len(listed) // 50)
            is_text = isinstance(value, str)  # which equals nothing but a text
            if not (value in listed if is_text else self.is_among(value, listed, path)):
                return lambda: f"{brief(value)} is not one of {brief(listed)}"
        if isinstance(value, str):
            return _size_problem(schema, value, "minLength", "maxLength")
        if _is_json_number(value):
            return _number_problem(schema, value)
        if isinstance(value, list):
            if schema.get("uniqueItems") and len({self.frozen(one, path) for one in value}) < len(value):
                return lambda: f"{brief(value)} has non-unique elements"
            return _size_problem(schema, value, "minItems", "maxItems")
        if isinstance(value, Mapping):
            missing = next((name for name in schema.get("required", ()) if name not in value), None)
            if missing is not None:
                return lambda: f"{brief(missing)} is a required property"
            return _size_problem(schema, value, "minProperties", "maxProperties")
        return None

    def combined(self, schema: Mapping[str, Any], value: Any, path: tuple[str | int, ...]) -> None:
        for one in schema.get("allOf", ()):
            self.value(one, value, path)
        if "anyOf" in schema and not any(self.fits(one, value, path) for one in schema["anyOf"]):
            raise _Unfit(path, lambda: f"{brief(value)} is not valid under any of the given schemas")
        if "oneOf" in schema and (count := sum(self.fits(one, value, path) for one in schema["oneOf"])) != 1:
            how = f"valid under {count}" if count else "not valid under any"
            raise _Unfit(path, lambda: f"{brief(value)} is {how} of the given schemas")
        if "not" in schema and self.fits(schema["not"], value, path):
            raise _Unfit(path, lambda: f"{brief(value)} should not be valid under {brief(schema['not'])}")

    def fits(self, schema: Any, value: Any, path: tuple[str | int, ...]) -> bool:
        try:
            self.value(schema, value, path)
        except _TooLarge:
            raise
        except _Unfit:
            return False
        return True

    def members(self, schema: Mapping[str, Any], value: Mapping[str, Any], path: tuple[str | int, ...]) -> None:
        properties, further = schema.get("properties", {}), schema.get("additionalProperties", True)
        names = schema.get("propertyNames", True)
        self.step(path, len(value))
        for name, one in value.items():
            if names is not True:
                self.value(names, name, path)
            if name in properties:
                self.value(properties[name], one, (*path, name))
            elif further is False:
                raise _Unfit(path, partial(_unexpected, name))
            elif further is not True:
                self.value(further, one, (*path, name))

    def items(self, schema: Mapping[str, Any], value: list[Any], path: tuple[str | int, ...]) -> None:
        first, further = schema.get("prefixItems", ()), schema.get("items", True)
        for index, one in enumerate(value if further is not True else value[: len(first)]):
            self.value(first[index] if index < len(first) else further, one, (*path, index))

    def is_among(self, value: Any, listed: list[Any], path: tuple[str | int, ...]) -> bool:
        wanted = self.frozen(value, path)
        return any(self.frozen(one, path) == wanted for one in listed)

    def frozen(self, value: Any, path: tuple[str | int, ...], depth: int = 0) -> Any:
        """Return a hashable form that is equal for values that JSON treats as equal: 1 is 1.0 but not true."""
        self.step(path)
        if depth > MOST_DEPTH:
            raise _TooLarge(path, lambda: f"the value nests deeper than {MOST_DEPTH}")
        if isinstance(value, Mapping):
            return ("object", frozenset((name, self.frozen(one, path, depth + 1)) for name, one in value.items()))
        if isinstance(value, list):
            return ("array", *(self.frozen(one, path, depth + 1) for one in value))
        return (isinstance(value, bool), value)


def _unexpected(name: str) -> str:
    return f"Additional properties are not allowed ({brief(name)} was unexpected)"


def _is_json_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_type(value: Any, names: str | list[str]) -> bool:
    """Return whether a JSON value is of one of the types; 1.0 is an integer too."""
    found = {
        str: ("string",), bool: ("boolean",), list: ("array",), dict: ("object",), type(None): ("null",),
        int: ("integer", "number"),
    }.get(type(value), ())  # fmt: skip
    if isinstance(value, float):
        found = ("number", "integer") if value.is_integer() else ("number",)
    return not {names}.isdisjoint(found) if isinstance(names, str) else not set(names).isdisjoint(found)


def _number_problem(schema: Mapping[str, Any], value: int | float) -> _Message | None:
    if "minimum" in schema and value < schema["minimum"]:
        return lambda: f"{brief(value)} is less than the minimum of {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        return lambda: f"{brief(value)} is greater than the maximum of {schema['maximum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return lambda: f"{brief(value)} is less than or equal to the minimum of {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        return lambda: f"{brief(value)} is greater than or equal to the maximum of {schema['exclusiveMaximum']}"
    if "multipleOf" in schema and not _is_multiple(value, schema["multipleOf"]):
        return lambda: f"{brief(value)} is not a multiple of {schema['multipleOf']}"
    return None


def _is_multiple(value: int | float, of: int | float) -> bool:
    if isinstance(value, int) and isinstance(of, int):
        return value % of == 0
    try:
        quotient = value / of
    except OverflowError:  # an integer beyond every float
        return False
    return math.isfinite(quotient) and abs(quotient - round(quotient)) <= 1e-9 * max(1.0, abs(quotient))


def _size_problem(schema: Mapping[str, Any], value: Any, least: str, most: str) -> _Message | None:
    if least in schema and len(value) < schema[least]:
        return lambda: f"{brief(value)} is too short"
    if most in schema and len(value) > schema[most]:
        return lambda: f"{brief(value)} is too long"
    return None
