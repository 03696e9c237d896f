"""Request an answer of a type from an endpoint, and read it back from the text.

Endpoints differ in the form that they enforce. `json_schema` is strict structured output. Hosted services refuse a
schema that is not closed (`additionalProperties: false`) or not complete (every property is required), and some
keywords. So an optional field is nullable there, and its null is read back as absent. `json_object` promises only JSON,
and `text` nothing; for both the prompt contains the schema. In all forms the answer is searched in the surrounding text
(reasoning, prose, a code fence), and checked against its type.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.inspect

from astra_jax.base.typed import decode_any_json, decode_json
from synthesis.core.loose_json import read_loosely, unfenced
from synthesis.core.markup import THINK_END
from synthesis.core.normal_text import fold, normalized

StructuredOutput = Literal["json_schema", "json_object", "text"]

T = TypeVar("T", bound=msgspec.Struct)

_MOST_STARTS = 16
"""Braces at which an answer may begin: each costs one pass over the text."""
_SEVERAL = re.compile(r"[,，、;；\n]")
"""Between the elements of a list that was written as a text."""
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?", re.ASCII)
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_MOST_CHOICES = 64
"""Integers within bounds that are written out one by one, since strict output knows no bounds."""
_DROPPED = frozenset({"title", "default", "minimum", "maximum"})


class BadAnswer(Exception):
    """A text is not an answer of its type; the message gives the reason, for the model that wrote it."""


class _Remark(msgspec.Struct, frozen=True):
    text: str
    note: str = ""


class Probe(msgspec.Struct, frozen=True):
    """An answer whose schema has all that the schemas of real answers have: what an endpoint does with it, it does with
    those."""

    remarks: list[_Remark]
    value: str | int | float | bool | list[str]
    rating: Annotated[int, msgspec.Meta(ge=1, le=5)]
    verdict: Literal["no", "yes"]
    aliases: list[str] = []


# ---------------------------------------------------------------------------------------------------------------------
# Asking


@cache
def prompt_name(answer: type[msgspec.Struct]) -> str:
    """`TaskScoresAnswer` -> `task_scores_answer`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", answer.__name__).lower()


@cache
def response_format(answer: type[msgspec.Struct], form: StructuredOutput) -> msgspec.Raw | None:
    """Return a request's `response_format` for an answer type, or None. It is encoded once, since a schema is larger
    than many prompts."""
    if form == "text":
        return None
    if form == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    schema = {"name": prompt_name(answer), "schema": strict_schema(answer), "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


@cache
def open_format(answer: type[msgspec.Struct]) -> msgspec.Raw:
    """Return the `response_format` of versions up to 0.1, which is part of the keys in their recordings."""
    (reference,), definitions = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    root = dict(definitions[reference["$ref"].rpartition("/")[2]])
    root["$defs"] = definitions
    schema = {"name": prompt_name(answer), "schema": root, "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


@cache
def strict_schema(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of an answer, closed and complete, with its definitions.

    Raises:
        TypeError: the type has an object with arbitrary names, which strict output does not support.
    """
    (reference,), definitions = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    name = reference["$ref"].rpartition("/")[2]
    root = _strict(definitions.pop(name))
    if definitions:
        root["$defs"] = {other: _strict(schema) for other, schema in definitions.items()}
    return root


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:  # nothing may stand beside it
        return {"$ref": schema["$ref"]}
    kept = {keyword: value for keyword, value in schema.items() if keyword not in _DROPPED}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if schema.get("type") == "object":
        if "properties" not in schema:
            raise TypeError(f"{schema}: an answer holds an object of any names; use a list of named values")
        required = schema.get("required", [])
        properties = {name: _strict(one) for name, one in schema["properties"].items()}
        kept["properties"] = {name: one if name in required else _or_null(one) for name, one in properties.items()}
        kept |= {"required": list(properties), "additionalProperties": False}
    if "items" in schema:
        kept["items"] = _strict(schema["items"])
    if "anyOf" in schema:
        kept["anyOf"] = [_strict(one) for one in schema["anyOf"]]
    if "enum" in schema:
        kept["type"] = "string" if all(isinstance(one, str) for one in schema["enum"]) else "integer"
    if schema.get("type") == "integer" and {"minimum", "maximum"} <= set(schema):
        choices = range(schema["minimum"], schema["maximum"] + 1)
        if len(choices) <= _MOST_CHOICES:
            kept["enum"] = list(choices)
    return kept


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_answer(text: str, answer: type[T]) -> tuple[T, str]:
    """Return the answer in a model's text, and its JSON.

    Reasoning before the answer is ignored. Of several JSON objects the answer is the first that fits the type. JSON is
    repaired as in `loose_json`, and values as in `_fitted`. A type checks what a schema cannot express, for example
    that a text is JSON itself, in `check`, which raises `ValueError`.

    Raises:
        BadAnswer: no object fits, or two different ones do.
    """
    text = text.strip()
    try:
        return _decoded(text, answer), text
    except BadAnswer as error:
        problem = error
    if (behind := text.rpartition(THINK_END)[2].strip()) != text:
        return read_answer(behind, answer)
    found: dict[str, T] = {}
    for part in (*_objects(text), *_blocks(text)):
        try:
            one = _decoded(part, answer)
        except BadAnswer as error:
            problem = error
        else:
            if one not in found.values():
                found[part] = one
    if len(found) > 1:
        raise BadAnswer("the answer holds two different JSON objects of its schema; give one")
    if not found:
        raise problem
    ((part, one),) = found.items()
    return one, part


def is_exact(text: str, answer: type[msgspec.Struct]) -> bool:
    """Return whether a model's text, apart from thinking before it, is an answer without any repair."""
    for part in (text, text.rpartition(THINK_END)[2]):
        with contextlib.suppress(ValueError, RecursionError):
            decode_json(part.strip(), answer)
            return True
    return False


def _blocks(text: str) -> list[str]:
    """Return the contents of a text's code blocks."""
    inside = text.split("```")[1 : 2 * _MOST_STARTS : 2]
    return [found for part in inside if (found := unfenced(f"```{part}```")) is not None]


def _objects(text: str) -> Iterator[str]:
    """Yield the outermost JSON objects of a text."""
    decoder = json.JSONDecoder()
    start = -1
    for _ in range(_MOST_STARTS):
        start = text.find("{", start + 1)
        if start < 0:
            return
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield text[start:end]
        start = end - 1


def _decoded(text: str, answer: type[T]) -> T:
    try:
        return _checked(decode_json(text, answer))
    except (ValueError, RecursionError) as error:
        problem: Exception = error
    try:
        value = decode_any_json(text)
    except (msgspec.DecodeError, RecursionError):
        try:
            value, _ = read_loosely(text)
        except (ValueError, RecursionError):
            raise _bad(problem) from None
    try:
        fitted = _fitted(value, msgspec.inspect.type_info(answer), top=True)
        return _checked(decode_json(msgspec.json.encode(fitted), answer))
    except (ValueError, RecursionError) as error:
        raise _bad(error) from None


def _checked(given: T) -> T:
    """Return the answer. Raises `ValueError`: its own check refuses it."""
    if (check := getattr(given, "check", None)) is not None:
        check()
    return given


def _bad(error: Exception) -> BadAnswer:
    if isinstance(error, msgspec.ValidationError):
        return BadAnswer(f"the answer does not fit its schema: {error}")
    if isinstance(error, msgspec.DecodeError):
        return BadAnswer(f"the answer is not JSON: {error}")
    if isinstance(error, RecursionError):
        return BadAnswer("the answer is nested too deeply")
    return BadAnswer(f"the answer is no good: {error}")


def _fitted(value: Any, kind: msgspec.inspect.Type, *, top: bool = False) -> Any:
    """Convert a JSON value to a type if only one reading is possible; return anything else unchanged, for the decoder
    to refuse.

    A null is an absent field. Numbers and booleans may be texts, and choices may differ in case. An object may be a
    list with that object, and a list of one may be its element. A text that must be JSON may be the value itself.
    """
    inspect = msgspec.inspect
    match kind:
        case inspect.Metadata(type=inspect.StrType(), extra={"json": True}):
            return _json_text(value)
        case inspect.Metadata(type=inner):
            return _fitted(value, inner)
        case inspect.StructType():
            return _fitted_object(value, kind, top)
        case inspect.ListType(item_type=item):
            if isinstance(value, str) and value.strip().startswith("["):
                value = _opened(value)
            if isinstance(value, dict) or (isinstance(value, str) and not _SEVERAL.search(value)):
                value = [value]
            return [_fitted(one, item) for one in value] if isinstance(value, list) else value
        case inspect.LiteralType(values=choices):
            alike = [choice for choice in choices if _folded(choice) == _folded(value)]
            return alike[0] if len(alike) == 1 else value
        case inspect.BoolType():
            return _TRUTH.get(_folded(value), value)
        case inspect.IntType() | inspect.FloatType():
            if isinstance(value, str) and _NUMBER.fullmatch(text := normalized("NFKC", value).strip()):
                value = float(text) if "." in text else int(text)
            return int(value) if isinstance(value, float) and value.is_integer() else value
    return value


def _fitted_object(value: Any, kind: msgspec.inspect.StructType, top: bool) -> Any:
    if isinstance(value, str) and value.strip().startswith("{"):
        value = _opened(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        return value
    fields = {_folded(field.encode_name): field for field in kind.fields}
    if top and len(value) == 1 and _folded(name := next(iter(value))) not in fields:
        return _fitted(value[name], kind)  # the type's name, or a word for an answer, is around it
    given: dict[str, Any] = {}
    for name, one in value.items():
        if one is None:
            continue
        field = fields.get(_folded(name))
        named = name if field is None else field.encode_name
        if named in given:  # two spellings of one name
            return value
        given[named] = one if field is None else _fitted(one, field.type)
    return given


def _json_text(value: Any) -> Any:
    """JSON as text, of a value or of a text that holds JSON in a code block or the like."""
    if isinstance(value, str):
        opened = _opened(value)
        return value if opened is value else json.dumps(opened, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _opened(text: str) -> Any:
    """Return the value of a JSON text, or the text."""
    try:
        return read_loosely(text)[0]
    except (ValueError, RecursionError):
        return text


def _folded(value: Any) -> str:
    """Return a choice or a name in a normal form, without case and width, and with equal spaces, hyphens and
    underscores."""
    if not isinstance(value, str):
        return "true" if value is True else "false" if value is False else json.dumps(value)
    return re.sub(r"[\s_-]", "_", fold(value))
