"""How an endpoint is asked for an answer of a type, and how its text is read back.

Endpoints differ in what they enforce. `json_schema` is strict structured output: the hosted services refuse a schema
that is not closed (`additionalProperties: false`) and complete (every property is required), or that has keywords which
their rules leave out; so an optional field is nullable there, and its null is read back as absent. `json_object`
promises JSON and no more, `text` nothing: for both the schema stands in the prompt. Whatever was promised, the answer
is found among whatever surrounds it (thinking, prose, a code fence), and checked as the type it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from synthesis.core.typed import decode_any_json, decode_json

Form = Literal["json_schema", "json_object", "text"]

T = TypeVar("T", bound=msgspec.Struct)

_MOST_STARTS = 16
"""Braces at which an answer may begin: each costs one pass over the text."""
_MOST_CHOICES = 64
"""Integers within bounds that are written out one by one, since strict output knows no bounds."""
_DROPPED = frozenset({"title", "default", "minimum", "maximum"})


class BadAnswer(Exception):
    """A text is no answer of its type; the message says why, to the model that wrote it."""


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
def response_format(answer: type[msgspec.Struct], form: Form) -> msgspec.Raw | None:
    """What a request says of the form of its answer; None: nothing. Encoded once: a schema outweighs many a prompt."""
    if form == "text":
        return None
    if form == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    schema = {"name": prompt_name(answer), "schema": strict_schema(answer), "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


@cache
def open_format(answer: type[msgspec.Struct]) -> msgspec.Raw:
    """The `response_format` of versions up to 0.1, by which their recordings know a request."""
    (reference,), definitions = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    root = dict(definitions[reference["$ref"].rpartition("/")[2]])
    root["$defs"] = definitions
    schema = {"name": prompt_name(answer), "schema": root, "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


@cache
def strict_schema(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of an answer, closed and complete, with its definitions beside it.

    Raises:
        TypeError: the type holds an object of any names, which strict output does not know.
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
    """The answer in a model's text, and its JSON.

    Thinking comes before it and does not count. Of several JSON objects the one that fits the type is the answer. What
    no schema can say, such as that a text is JSON itself, a type says in `check`, which raises `ValueError`.

    Raises:
        BadAnswer: none fits, or two do and differ.
    """
    text = text.rpartition("</think>")[2].strip()
    try:
        return _decoded(text, answer), text
    except BadAnswer as error:
        problem = error
    found: dict[str, T] = {}
    for part in _objects(text):
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


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of a text that are in no other."""
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
        given = _fitting(text, answer)
        if (check := getattr(given, "check", None)) is not None:
            check()
    except msgspec.ValidationError as error:
        raise BadAnswer(f"the answer does not fit its schema: {error}") from None
    except msgspec.DecodeError as error:
        raise BadAnswer(f"the answer is not JSON: {error}") from None
    except RecursionError:
        raise BadAnswer("the answer is nested too deeply") from None
    except ValueError as error:
        raise BadAnswer(f"the answer is no good: {error}") from None
    return given


def _fitting(text: str, answer: type[T]) -> T:
    try:
        return decode_json(text, answer)
    except msgspec.ValidationError:
        given = decode_any_json(text)
        if (kept := _without_nulls(given)) == given:
            raise
    return decode_json(msgspec.json.encode(kept), answer)


def _without_nulls(value: Any) -> Any:
    """A null stands for an optional field that was left out; where a field is required it is still missed."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
