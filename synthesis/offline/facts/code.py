"""Python source of tool modules: one function per relation, over a table that is part of the module.

The code reads as an engineer would write it, uses the standard library only, and gives the same bytes for the same
arguments. A function returns `{<result>: value}`, for example `{"capital": "Tokyo"}`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence

from synthesis.offline.facts.relations import Relation

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}", re.IGNORECASE)
_WIDTH = 120

_LOOKUP_TEXT = '''
def _lookup(table, kind, value):
    """Return the table's entry for value. Spaces around the value and its case do not matter."""
    if not isinstance(value, str):
        raise TypeError(f"{kind} must be a string, not {type(value).__name__}")
    key = " ".join(value.split()).casefold()
    if not key:
        raise ValueError(f"{kind} must not be empty")
    if key not in table:
        raise ValueError(f"unknown {kind}: {value!r}")
    return table[key]
'''

_LOOKUP_INTEGER = '''
def _lookup_integer(table, kind, value):
    """Return the table's entry for a whole number, which may be given as digits."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{kind} must be an integer, not {type(value).__name__}")
    if value not in table:
        raise ValueError(f"unknown {kind}: {value}")
    return table[value]
'''


def module_source(
    relations: Sequence[Relation],
    subjects: Mapping[str, Sequence[str]] | None = None,
    *,
    names: Mapping[str, str] | None = None,
) -> str:
    """Source of one module with one function per relation.

    Args:
        relations: the relations, in the order of the functions.
        subjects: relation id → the subjects to embed; all of them where the id is absent or the mapping is None.
        names: relation id → name of its function; the relation's id by default.

    Raises:
        ValueError: no relations, a function name that is invalid or used twice, or a subject that has no row.
    """
    if not relations:
        raise ValueError("relations: empty; a module needs at least one")
    functions: set[str] = set()
    blocks: list[str] = []
    for relation in relations:
        name = (names or {}).get(relation.id, relation.id)
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in functions:
            raise ValueError(f"names[{relation.id!r}]: {name!r} is not a free Python function name; choose another")
        functions.add(name)
        blocks.append(_function(relation, name, (subjects or {}).get(relation.id)))
    helpers = [
        text for kind, text in (("string", _LOOKUP_TEXT), ("integer", _LOOKUP_INTEGER)) if _uses(relations, kind)
    ]
    return "\n\n".join([f'"""{_title(relations)}"""\n', *(text.strip() + "\n" for text in helpers), *blocks])


def _uses(relations: Sequence[Relation], kind: str) -> bool:
    return any(relation.parameter_type == kind for relation in relations)


def _title(relations: Sequence[Relation]) -> str:
    if len(relations) == 1:
        return relations[0].description["en"]
    return "Lookups over reference data: " + ", ".join(r.id.replace("_", " ") for r in relations[:3]) + "."


def _function(relation: Relation, name: str, subjects: Sequence[str] | None) -> str:
    rows = relation.rows
    if subjects is not None:
        missing = [subject for subject in subjects if subject not in rows]
        if missing:
            raise ValueError(f"subjects[{relation.id!r}]: {missing[0]!r} has no row; use subjects of the relation")
        rows = {subject: rows[subject] for subject in subjects}
    integer = relation.parameter_type == "integer"
    lookup, annotation = ("_lookup_integer", "int") if integer else ("_lookup", "str")
    table = f"_{name.upper()}"
    entries = [f"{subject if integer else _literal(subject.casefold())}: {_literal(rows[subject])}" for subject in rows]
    kind = relation.parameter.replace("_", " ")
    unit = f"  # {relation.unit}" if relation.unit else ""
    return (
        f"{table} = {{{unit}\n{_wrapped(entries)}\n}}\n\n\n"
        f"def {name}({relation.parameter}: {annotation}) -> dict:\n"
        f'    """{relation.description["en"]}"""\n'
        f'    return {{"{relation.result}": {lookup}({table}, "{kind}", {relation.parameter})}}\n'
    )


def _literal(value: str | int | float) -> str:
    # JSON's strings and finite numbers are Python literals.
    return json.dumps(value)


def _wrapped(entries: list[str]) -> str:
    """The entries as indented lines of at most `_WIDTH` characters."""
    lines, line = [], "   "
    for entry in entries:
        if len(line) + len(entry) + 2 > _WIDTH and line.strip():
            lines.append(line)
            line = "   "
        line += f" {entry},"
    return "\n".join([*lines, line])
