"""Names that earlier versions gave to settings, keys of records and reasons of rejections, beside today's.

Records, cards and journals with former names are read. A setting with its former name is refused with today's name.
Journals find a stage's outputs by a fingerprint of its inputs and settings. It is computed with the former names, so
that a run of an earlier version resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from astra_jax.base.former_settings import FORMER_SYNTHESIS_SETTINGS
from astra_jax.base.typed import convert_to, json_decoder

T = TypeVar("T")
_Names = Mapping[str, Mapping[str, str]]

FORMER_KEYS: _Names = {
    "Provenance": {"licence": "license"},
    "ToolServer": {"licence": "license"},
    "ServerDocument": {"licence": "license"},
    "ServerSource": {"licence": "license"},
    "SuiteInfo": {"licence": "license"},
    "Goal": {"says": "utterance"},
    "Dialogue": {"conduct": "behaviour", "withheld": "hidden_tools", "returned": "restored_at_turn"},
}
"""Name of a struct or dataclass → former key → today's."""
FORMER_REASONS: Mapping[str, str] = {
    "gives_away": "opening_leaks_answer",
    "never_asked": "no_clarification",
    "straddles_split": "mixed_split",
    "one_server": "single_server",
    "other_question": "question_rewritten",
    "reading_writes": "read_tool_mutates",
    "harm_unseen": "side_effect_undetected",
    "check_holds_before": "already_satisfied",
    "needless_order": "unneeded_dependency",
    "standing_changed": "precondition_mismatch",
}
"""Former reason of a rejection → today's."""

_TODAYS_KEYS: _Names = {
    struct: {today: former for former, today in names.items()} for struct, names in FORMER_KEYS.items()
}
_MARKS = (b'"licence":', b'"conduct":')
"""Each record with former keys has one of these: a goal is part of a dialogue, and a dialogue has a conduct."""
_type_of: Callable[[Any], inspect.Type] = lru_cache(256)(inspect.type_info)


def todays_reason(reason: str) -> str:
    """Return today's name of a reason of rejections."""
    return FORMER_REASONS.get(reason, reason)


def former_setting(setting: str) -> str:
    """Return the first name of a setting, which fingerprints have."""
    return next((former for former, today in FORMER_SYNTHESIS_SETTINGS.items() if today == setting), setting)


def todays_card(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataset's card with today's names of settings, reasons of rejections and statistics."""
    found = dict(card)
    if isinstance(config := card.get("config"), dict):
        found["config"] = {FORMER_SYNTHESIS_SETTINGS.get(name, name): value for name, value in config.items()}
    if isinstance(rejected := card.get("rejected"), dict):
        found["rejected"] = {
            stage: {todays_reason(reason): count for reason, count in reasons.items()}
            if isinstance(reasons, dict)
            else reasons
            for stage, reasons in rejected.items()
        }
    for part, former, today in (("provenance", "licences", "licenses"), ("statistics", "conducts", "behaviours")):
        if isinstance(given := card.get(part), dict) and former in given:
            found[part] = {today if name == former else name: value for name, value in given.items()}
    return found


def decode_stored(data: bytes, kind: type[T]) -> T:
    """Decode JSON that this or an earlier version has written.

    Raises:
        msgspec.ValidationError: it is JSON but not a `kind`; the message names the field.
        msgspec.DecodeError: it is not JSON.
    """
    if not any(mark in data for mark in _MARKS):
        return json_decoder(kind).decode(data)
    return convert_stored(msgspec.json.decode(data), kind)


def convert_stored(value: Any, kind: type[T]) -> T:
    """Convert plain JSON that this or an earlier version has written. Raises `msgspec.ValidationError`."""
    return convert_to(_renamed(value, _type_of(kind), FORMER_KEYS), kind)


def encode_for_fingerprint(value: Any) -> bytes:
    """Encode a struct, a list with structs, or plain JSON, with former keys. The order of dictionaries has no
    effect."""
    return msgspec.json.encode(_former(value))


def _former(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_former(one) for one in value]
    plain = msgspec.to_builtins(value, order="deterministic")
    return _renamed(plain, _type_of(type(value)), _TODAYS_KEYS) if isinstance(value, msgspec.Struct) else plain


def _renamed(value: Any, info: inspect.Type | None, names: _Names) -> Any:
    """Return plain JSON of a type with keys of its structs renamed. Keys of other objects, such as a call's arguments,
    stay."""
    match info:
        case inspect.Metadata():
            return _renamed(value, info.type, names)
        case inspect.UnionType():
            return _renamed(value, _member(value, info), names)
        case inspect.StructType() | inspect.DataclassType() if isinstance(value, dict):
            types = {field.encode_name: field.type for field in info.fields}
            own = names.get(info.cls.__name__, {})
            found = {}
            for key, one in value.items():
                to = own.get(key, key)
                found[to] = _renamed(one, types.get(to, types.get(key)), names)
            return found
        case inspect.DictType() if isinstance(value, dict):
            return {key: _renamed(one, info.value_type, names) for key, one in value.items()}
        case inspect.ListType() if isinstance(value, list):
            return [_renamed(one, info.item_type, names) for one in value]
    return value


def _member(value: Any, union: inspect.UnionType) -> inspect.Type | None:
    """Return the type of a union that a value may have: of several structs the one with its tag."""
    if isinstance(value, list):
        return next((one for one in union.types if isinstance(one, inspect.ListType)), None)
    structs = [one for one in union.types if isinstance(one, inspect.StructType)]
    if isinstance(value, dict) and len(structs) > 1:
        structs = [one for one in structs if one.tag_field and value.get(one.tag_field) == one.tag]
    return next(iter(structs), None)
