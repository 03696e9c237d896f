"""Keywords of older drafts in the form of Draft 2020-12, and values in the form of the type beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from synthesis.core.tool_schemas import has_type

_LONGEST_VALUE = 1_000
"""Characters of a text that is read as a list or an object."""


def fix_required(normal: dict[str, Any], raw: Any) -> None:
    """Make `required` a list of names, in place: Draft 3 marked the property itself."""
    if isinstance(normal.get("required"), bool):
        del normal["required"]
    properties = normal.get("properties")
    if not isinstance(properties, dict) or not isinstance(raw, Mapping):
        return
    required = normal.get("required", [])
    if not isinstance(required, list):
        return  # the check of the whole schema says what is wrong
    if isinstance(raw.get("required"), list):
        required = [*required, *(name for name in raw["required"] if name in properties)]
    marked = [name for name, one in raw.items() if isinstance(one, Mapping) and one.get("required") is True]
    wanted = unique_names([*required, *(name for name in marked if name in properties)])
    if "required" in normal or wanted:
        normal["required"] = wanted


def unique_names(names: list[Any]) -> list[Any]:
    """Return each name once; a list that holds what is no name as it is, for the check of the whole schema."""
    return list(dict.fromkeys(names)) if all(isinstance(name, str) for name in names) else names


def fix_limits(normal: dict[str, Any]) -> None:
    """Rewrite Draft 4's `exclusiveMinimum: true` beside `minimum`, and `additionalItems`, in place."""
    further = normal.pop("additionalItems", None)
    if further is not None and "prefixItems" in normal:
        normal.setdefault("items", further)
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(normal.get(exclusive), bool) and normal.pop(exclusive) and limit in normal:
            normal[exclusive] = normal.pop(limit)


def implied_type(normal: Mapping[str, Any]) -> str | list[str]:
    """Return the type of a schema that leaves it out but leaves no doubt."""
    if "properties" in normal:
        return "object"
    if "items" in normal or "prefixItems" in normal:
        return "array"
    values = list_of(normal.get("enum"))
    if not values or not all(one is None or isinstance(one, str) for one in values) or set(values) == {None}:
        return ""
    return ["string", "null"] if None in values else "string"


UNFIT: Any = object()
"""A value that has no form of the type that is wanted."""


def list_of(value: Any) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def plain_value(value: Any) -> Any:
    """Return a number of a YAML document without how it is `written` there: 0o17, 1.10."""
    return value if not hasattr(value, "written") else int(value) if isinstance(value, int) else float(value)


def as_type(value: Any, names: list[str]) -> Any:
    """Return the value as one of the types, where nothing of it is lost by that: `1` and "1"; else `UNFIT`."""
    written, plain = getattr(value, "written", None), plain_value(value)
    if has_type(plain, names):
        return plain
    if "string" in names and isinstance(plain, bool | int | float):
        return written if isinstance(written, str) else json.dumps(plain)
    if not isinstance(value, str):
        return UNFIT
    if "boolean" in names and value.casefold() in ("true", "false"):
        return value.casefold() == "true"
    written_number = re.fullmatch(r"-?(?:0|[1-9]\d{0,15})(?:\.\d{1,15})?", value)
    if written_number or (value[:1] in ("[", "{") and len(value) <= _LONGEST_VALUE):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return UNFIT
        if has_type(parsed, names):
            return parsed
    return UNFIT


def name_text(value: Any) -> str | None:
    """Return a name as a text: a number as YAML has it written; None for anything else."""
    text = value if isinstance(value, str) else as_type(value, ["string"]) if is_number(value) else None
    return text if isinstance(text, str) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a number, as YAML reads the name `404`."""
    return isinstance(value, int | float) and not isinstance(value, bool)
