"""One normal form of JSON schemas, whatever draft or OpenAPI version they were written for.

References are resolved, and schemas that apply at once are merged. Unknown keywords are dropped, and type names are
spelled as in JSON Schema (Draft 2020-12). Null stays where a document allows it. Keywords that
`synthesis.core.tool_schemas` does not check have no normal form: arguments could not be checked. The normal form of a
normal form is itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

from synthesis.core.intersections import Contradiction, intersection, nullable, type_names
from synthesis.core.parameter_forms import OTHER_WORDS, missing_properties, object_form, read_type
from synthesis.core.schema_keywords import (
    UNFIT,
    as_type,
    fix_limits,
    fix_required,
    implied_type,
    is_number,
    list_of,
    plain_value,
    unique_names,
)
from synthesis.core.tool_schemas import (
    CHECKED,
    KEYWORDS,
    MOST_DEPTH,
    MOST_VALUES,
    WORDS,
    UncheckableSchema,
    brief,
    check_schema,
    check_size,
    has_type,
    value_error,
)

_REFERENCES = 16
"""Maximum number of references on the way to a place in a schema."""
_UNROLLED = (2, 1)
"""Maximum number of times that a recursive schema is expanded; fewer if it becomes too large."""
_UNCHECKED = {"dependencies", "dependentSchemas", "dependentRequired", "if", "then", "else", "contains", "minContains",
              "maxContains", "extends", "disallow", "divisibleBy"}  # fmt: skip
"""Keywords of JSON Schema that nothing here checks; none of the 9,978 tools of 1,704 public MCP servers has one."""
_KNOWN = (KEYWORDS | {"additionalItems"}) - {"$schema", "$id", "$comment", "example", "readOnly", "writeOnly"}
"""Keywords that are kept: all but those without meaning for a model."""
_MAY_BE_NULL = {"type", "const", "default"}
"""Keywords whose value may be null; Go and Python also write null for absent keywords."""
_SAYS_NOTHING = {"id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "unevaluatedProperties", "unevaluatedItems",
                 "x-nullable", "propertyOrdering", "contentSchema", "collectionFormat", "allowEmptyValue", "style",
                 "explode", "allowReserved"} | KEYWORDS | OTHER_WORDS  # fmt: skip
"""Keywords that are read elsewhere, or that do not constrain values."""
_COMBINED = {"$ref", "$recursiveRef", "anyOf", "oneOf", "allOf"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
            "minItems", "maxItems", "minProperties", "maxProperties"}  # fmt: skip
"""Keywords whose value is a number, which protobuf's JSON (Gemini) writes as a text."""
_ANY_NAME = {"", ".*", "^.*$", "^(.*)$", "(.*)", ".+", "^.+$", "^", "^[\\s\\S]*$"}
"""Patterns that match every property name."""
_LONGEST_REFERENCE = 1_000
_MOST_PARTS = 64
_MOST_SEARCHED = 100_000
"""Maximum number of objects and lists of a document that are searched for a schema's `$id`."""
_ONE = {"additionalProperties", "additionalItems", "propertyNames", "not"}
"""Keywords whose value is a schema."""


class Unmappable(Exception):
    """Raised for a schema that has no normal form.

    Attributes:
        reason: code by which it is counted.
        detail: one line for a person.
        path: names of the properties that lead to the schema at fault.
    """

    def __init__(self, reason: str, detail: str, path: Sequence[str] = ()) -> None:
        super().__init__(detail)
        where = f"{brief('.'.join(path[-4:])):.100}: " if path else ""
        self.reason, self.detail, self.path = reason, where + " ".join(detail.split())[: 300 - len(where)], path

    def inside(self, name: str) -> Unmappable:
        """Return the same error for a schema that has this one as its property `name`."""
        if self.reason == "schema_too_large":  # the whole is
            return self
        return Unmappable(self.reason, str(self), [name, *self.path])


def normal_schema(
    schema: Mapping[str, Any], *, root: Any = None, changes: MutableMapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the schema without `$schema`, titles and references, with JSON Schema's type names.

    Args:
        schema: of any draft from 3 on, or of OpenAPI 2 and 3.
        root: the document that references (`#/components/schemas/Pet`) point into; the schema itself when None.
        changes: receives the differences between normal form and schema: kind of change → one line about it.

    Raises:
        Unmappable: foreign references, schemas that contradict each other, unknown types, too large or deep.
    """
    for number in _UNROLLED:
        made: dict[str, str] = {}
        try:
            normal = _Normalizer(schema if root is None else root, number, made).schema(schema, (), 0)
            check_size(normal)
        except (Unmappable, UncheckableSchema) as error:
            problem = error if isinstance(error, Unmappable) else Unmappable("schema_too_large", str(error))
            if problem.reason != "schema_too_large" or "recursive_schema" not in made or number == _UNROLLED[-1]:
                raise problem from None
        else:
            break
    if not isinstance(normal, dict):
        raise Unmappable("invalid_schema", f"a schema must be an object, found {normal!r}")
    if changes is not None:
        changes.update(made)
    plain: dict[str, Any] = json.loads(json.dumps(normal))  # numbers lose how they were written
    return plain


def object_schema(
    schema: Any, *, required: Any = None, changes: MutableMapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the normal form of a tool's parameters: an object schema that Draft 2020-12 allows.

    Args:
        schema: a JSON schema, or another form of `synthesis.core.parameter_forms`; None and `{}`: no parameters.
        required: names of required parameters that stand beside a schema of another form.
        changes: see `normal_schema`.

    Raises:
        Unmappable: as in `normal_schema`; or it is not an object schema, not a schema at all, or says nothing of
            parameters (`no_parameters_found`).
    """
    changes = {} if changes is None else changes
    if schema is None or schema == {} or schema == []:
        changes["no_parameters"] = "the document has no parameters; the tool takes none"
        return {"type": "object", "properties": {}}
    if (form := object_form(schema, required=required)) is not None:
        changes["parameters_rewritten"] = f"parameters in another form are read as JSON schema: {brief(schema):.100}"
        schema = form
    if not isinstance(schema, Mapping):
        raise Unmappable("no_schema", f"the parameters are {brief(schema):.80}; write a JSON schema of type object")
    parameters = normal_schema(schema, changes=changes)
    if "type" not in parameters and not set(parameters) & {"additionalProperties", "anyOf", "required"}:
        raise Unmappable(
            "no_parameters_found", f"the parameters have no type and no properties: {brief(schema):.150}; add them"
        )
    if "object" not in type_names({"type": "object", **parameters}):
        raise Unmappable("not_an_object", f"the parameter schema is of type {parameters['type']!r}")
    parameters["type"] = "object"
    parameters.setdefault("properties", {})
    unread = [key for key in schema if key not in KEYWORDS | _COMBINED and isinstance(schema[key], Mapping | list)]
    unread = [key for key in unread if key not in _SILENT and not str(key).startswith("x-")]
    if unread and not parameters["properties"]:
        raise Unmappable("no_parameters_found", f"{brief(unread[0]):.80} is no keyword of a schema; use `properties`")
    try:
        check_schema(parameters)
    except UncheckableSchema as error:
        raise Unmappable("invalid_schema", str(error)) from None
    if unknown := [key for key in parameters.get("required", []) if key not in parameters["properties"]]:
        raise Unmappable("invalid_schema", f"required parameter {unknown[0]!r} is not among the properties")
    return parameters


_SILENT = {"$defs", "definitions", "patternProperties", "unevaluatedProperties", "propertyOrdering", "annotations"}
"""Names beside `properties` that are not parameters."""


def resolve(reference: Any, root: Any) -> Any:
    """Return the target of a local reference (`#/a/b`, RFC 6901).

    Raises:
        Unmappable: `foreign_reference`: it points elsewhere, or to nothing.
    """
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > _LONGEST_REFERENCE:
        raise Unmappable("foreign_reference", f"{brief(reference):.100} is not defined in the schema")
    value = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        key = key if isinstance(value, Mapping) and key in value else unquote(key)
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise Unmappable("foreign_reference", f"{brief(reference):.100} is not defined in the schema")
    return value


class _Normalizer:
    def __init__(self, root: Any, unrolled: int, changes: MutableMapping[str, str]) -> None:
        self.root, self.unrolled, self.changes, self.nodes = root, unrolled, changes, 0
        self.names: dict[str, Any] | None = None

    def schema(self, schema: Any, trail: tuple[str, ...], depth: int) -> Any:
        """Return the normal form of a schema; `trail` holds the references that led here."""
        self.count(depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Unmappable("invalid_schema", f"a schema must be an object, found {brief(schema):.80}")
        if "$dynamicRef" in schema:
            raise Unmappable("recursive_schema", "$dynamicRef has no plain form")
        if None in schema.values():
            schema = {key: value for key, value in schema.items() if value is not None or key in _MAY_BE_NULL}
        if (wrapped := missing_properties(schema)) is not None:
            self.changes["parameters_rewritten"] = f"`properties` was missing around {brief(list(schema)):.100}"
            schema = wrapped
        try:
            merged = self.merged(schema, trail, depth)
        except Contradiction as problem:
            raise Unmappable("all_of", str(problem)) from None
        if not isinstance(merged, dict):
            return merged
        self.note_left_out(schema, merged)
        if schema.get("nullable") is True or schema.get("x-nullable") is True or schema.get("default", 0) is None:
            merged = nullable(merged)
        for key, closed in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in schema and closed not in merged:
                if set(merged) & {"anyOf", "allOf"}:
                    self.changes["unchecked_keyword"] = f"{key} beside anyOf is not checked"
                elif closed != "items" or "prefixItems" in merged:
                    merged[closed] = self.schema(schema[key], trail, depth + 1)
        return self.fitted(merged, is_merged=True)

    def merged(self, schema: Mapping[str, Any], trail: tuple[str, ...], depth: int) -> Any:
        """Merge a schema with its references and its `allOf`, `anyOf` and `oneOf` into one."""
        merged: Any = True
        for key in ("$ref", "$recursiveRef"):
            if key in schema:
                merged = intersection(merged, self.reference(schema[key], trail, depth))
        for option in self.listed(schema, "allOf"):
            merged = intersection(merged, self.schema(option, trail, depth + 1))
        merged = intersection(merged, self.own(schema, trail, depth))
        for key in ("anyOf", "oneOf"):
            options = [self.schema(option, trail, depth + 1) for option in self.listed(schema, key)]
            if options:
                merged = self.alternatives(merged, options)
        return merged

    def note_left_out(self, schema: Mapping[str, Any], merged: dict[str, Any]) -> None:
        """Record properties that `merged` lacks: read-only ones, and those forbidden by an `allOf` beside them."""
        left: dict[str, Any] = {}
        for part in self.parts(schema):
            if isinstance(named := part.get("properties"), Mapping):
                left |= {name: one for name, one in named.items() if isinstance(one, Mapping | bool)}
        for name in [name for name in left if name not in merged.get("properties", {})]:
            if self.is_read_only(left[name]):
                self.changes["read_only_property"] = f"property {brief(name):.80} is readOnly and is left out"
                if isinstance(required := merged.get("required"), list):
                    merged["required"] = [one for one in required if one != name]
            elif left[name] is not False and merged.get("additionalProperties") is False:
                line = f"property {brief(name):.80} is left out: additionalProperties is false in a schema beside it"
                if not merged.get("properties"):
                    raise Unmappable("all_of", f"{line}, and no other is left; remove additionalProperties there")
                self.changes["closed_by_all_of"] = line

    def parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """Return the schema and the schemas that apply together with it, at most `_MOST_PARTS`."""
        found: list[Mapping[str, Any]] = []
        waiting = [schema]
        while waiting and len(found) < _MOST_PARTS:
            one = waiting.pop(0)
            if not isinstance(one, Mapping) or any(one is part for part in found):
                continue
            found.append(one)
            if (reference := one.get("$ref")) is not None:
                waiting.append(self.identified(reference) or resolve(reference, self.root))
            others = one.get("allOf")
            waiting += others[:_MOST_PARTS] if isinstance(others, list) else []
        return found

    def is_read_only(self, schema: Any) -> bool:
        return any(part.get("readOnly") is True for part in self.parts(schema))

    def listed(self, schema: Mapping[str, Any], key: str) -> list[Any]:
        listed = schema.get(key, [])
        if not isinstance(listed, list) or (key in schema and not listed):
            raise Unmappable("invalid_schema", f"{key} is {brief(listed):.80}, not a list of schemas")
        return listed

    def alternatives(self, merged: Any, options: list[Any]) -> Any:
        """Return a schema with `anyOf`; `oneOf` becomes one too, as alternatives may differ in unchecked keywords
        (`format`)."""
        different = list({json.dumps(option, sort_keys=True): option for option in reversed(options)}.values())[::-1]
        others = [option for option in different if option != {"type": "null"}]
        if len(others) == 1:
            return intersection(others[0] if len(different) == 1 else nullable(others[0]), merged)
        return intersection(merged, {"anyOf": different})

    def own(self, schema: Mapping[str, Any], trail: tuple[str, ...], depth: int) -> dict[str, Any]:
        """Return the normal form of a schema without its references and alternatives."""
        normal: dict[str, Any] = {}
        for key, value in schema.items():
            if not isinstance(key, str):
                raise Unmappable("invalid_schema", f"the keyword {brief(key):.80} is not a text")
            if key in _UNCHECKED:
                raise Unmappable("unsupported_keyword", f"{key!r} is no keyword that tools may use; leave it out")
            if key not in _SAYS_NOTHING | _COMBINED and not key.startswith("x-"):
                self.changes["unknown_keyword"] = f"{key:.80} is no keyword of a schema and is left out"
            if key not in _KNOWN or key in _COMBINED or (key == "title" and isinstance(value, str)):
                continue
            if key == "enum" and value == []:
                self.changes["empty_enum"] = "enum lists no value and is left out"
                continue
            if key in WORDS and not WORDS[key][0](value):
                self.changes["malformed_annotation"] = f"{key} {brief(value):.80} is left out: not {WORDS[key][1]}"
            elif key == "properties":
                if not isinstance(value, Mapping):
                    raise Unmappable("invalid_schema", f"properties is {brief(value):.80}, not schemas by name")
                named = _named(key, value)
                if isinstance(value.get("required"), list):  # put one level too deep
                    named = [(name, one) for name, one in named if name != "required"]
                    self.changes["parameters_rewritten"] = "the list `required` in `properties` is read as beside it"
                normal[key] = {}
                for name, one in named:
                    try:
                        if not self.is_read_only(one):
                            normal[key][name] = self.schema(one, trail, depth + 1)
                    except Unmappable as problem:
                        raise problem.inside(name) from None
            elif key in _ONE:
                normal[key] = self.schema(value, trail, depth + 1)
            elif key in ("items", "prefixItems"):
                if key == "prefixItems" and not isinstance(value, list):
                    raise Unmappable("invalid_schema", f"prefixItems is {brief(value):.80}, not a list of schemas")
                if isinstance(value, list):  # before Draft 2020-12 a list in `items` was what prefixItems is now
                    normal["prefixItems"] = [self.schema(one, trail, depth + 1) for one in value]
                else:
                    normal[key] = self.schema(value, trail, depth + 1)
            elif key == "required" and isinstance(value, list):
                normal[key] = [
                    as_type(one, ["string"]) if is_number(one) else one for one in self.plain(value, depth + 1)
                ]
            elif key == "type" and (value is not None or schema.keys() - WORDS.keys() == {"type"}):
                normal = {**_type(value), **normal} if "type" not in normal else normal
            elif key in _NUMBERS and isinstance(value, str) and re.fullmatch(r"-?\d{1,15}(?:\.\d{1,15})?", value):
                normal[key] = json.loads(value) if not re.match(r"-?0\d", value) else value
            elif key != "type":
                normal[key] = self.plain(value, depth + 1)
        if normal.get("propertyNames") in (True, {}, {"type": "string"}):
            del normal["propertyNames"]
        if "patternProperties" in schema:
            self.name_patterns(normal, schema["patternProperties"], trail, depth)
        limits = normal.get("propertyNames")
        for one in (limits, *limits.get("anyOf", [])) if isinstance(limits, dict) else ():
            if isinstance(one, dict) and "pattern" in one:
                self.changes["unchecked_name_pattern"] = f"no name is checked against {brief(one['pattern']):.80}"
        fix_required(normal, schema.get("properties"))
        fix_limits(normal)
        if "type" not in normal and (names := implied_type(normal)):
            normal["type"] = names
        for key in normal.keys() & CHECKED.keys():
            is_right, what = CHECKED[key]
            if not is_right(normal[key]):
                raise Unmappable("invalid_schema", f"{key} must be {what}, not {brief(normal[key]):.80}")
        if None in normal.get("enum", []) and "null" not in type_names(normal):
            normal = nullable(normal)
        return self.fitted(normal, is_merged=False)

    def name_patterns(self, normal: dict[str, Any], patterns: Any, trail: tuple[str, ...], depth: int) -> None:
        """Normalise properties by name pattern: patterns are only shown to the model, values are checked."""
        if not isinstance(patterns, Mapping):
            raise Unmappable("invalid_schema", f"patternProperties is {brief(patterns):.80}, not schemas by pattern")
        schemas = [self.schema(one, trail, depth + 1) for _, one in _named("patternProperties", patterns)]
        if not schemas:
            return
        further = normal.get("additionalProperties")
        is_whole = any(pattern in _ANY_NAME for pattern in patterns) or further is False or further is None
        options = schemas if is_whole else [*schemas, further]
        different = [one for i, one in enumerate(options) if one not in options[:i]]
        normal["additionalProperties"] = different[0] if len(different) == 1 else self.alternatives(True, different)
        if {} in different or True in different:
            normal["additionalProperties"] = True
        limited = [pattern for pattern in patterns if pattern not in _ANY_NAME]
        if len(limited) == len(patterns) and further in (None, False):
            names: list[Any] = [{"pattern": pattern} for pattern in limited]
            if known := list(normal.get("properties", {})):
                names.append({"enum": known, "type": "string"})
            normal["propertyNames"] = names[0] if len(names) == 1 else {"anyOf": names}

    def reference(self, reference: Any, trail: tuple[str, ...], depth: int) -> Any:
        target = self.identified(reference) or resolve(reference, self.root)
        if reference in trail and (
            trail.count(reference) >= self.unrolled or len(trail) >= _REFERENCES or _only_refers(target)
        ):
            if _only_refers(target):
                raise Unmappable("recursive_schema", f"{reference} refers to nothing but itself")
            line = f"{reference} contains itself; {self.unrolled} levels are written out, below is any value"
            self.changes["recursive_schema"] = line
            return {}
        if len(trail) >= _REFERENCES:
            raise Unmappable("recursive_schema", f"references nest deeper than {_REFERENCES}")
        return self.schema(target, (*trail, reference), depth + 1)

    def identified(self, reference: Any) -> Any:
        """Return the schema whose `$id` or `$anchor` a reference names; None if it is a path, or there is none."""
        if not isinstance(reference, str) or reference.startswith("#/") or reference == "#":
            return None
        if self.names is None:
            self.names, waiting, seen = {}, [self.root], set[int]()
            while waiting and len(seen) < _MOST_SEARCHED:
                one = waiting.pop()
                if isinstance(one, Mapping | list) and id(one) not in seen:
                    seen.add(id(one))
                    waiting += one.values() if isinstance(one, Mapping) else one
                if isinstance(one, Mapping):
                    given = [one.get(key) for key in ("$id", "id", "$anchor")]
                    names = [name for name in given if isinstance(name, str)] + [f"#{name}" for name in given[2:]]
                    self.names |= {name: one for name in names if name not in self.names}
        return self.names.get(reference)

    def fitted(self, schema: dict[str, Any], *, is_merged: bool) -> dict[str, Any]:
        """Return the schema with `enum`, `const`, `default` and `examples` of its type.

        Values of another type are converted to it. In a merged schema, values that only one part allows are dropped.
        """
        names = type_names(schema)
        if not names or not all(isinstance(name, str) for name in names):
            return schema
        for key, is_list in (("enum", True), ("const", False), ("default", False), ("examples", True)):
            if key not in schema or (key == "default" and schema[key] is None):  # which makes the schema nullable
                continue
            given = list_of(schema[key]) if is_list else [schema[key]]
            of_type = [one for one in given if has_type(plain_value(one), names)] if key == "enum" and is_merged else []
            values = [as_type(value, names) for value in of_type or given]
            if UNFIT in values:
                line = f"{key} is {brief(schema[key]):.80} and type is {schema['type']!r}"
                if key in ("enum", "const"):
                    raise Unmappable("all_of" if is_merged else "enum_of_other_type", f"{line}; correct one of them")
                self.changes[f"{key}_of_other_type"] = f"{line}; {key} is left out"
                values = [value for value in values if value is not UNFIT]
            if values:
                schema[key] = unique_names(values) if is_list else values[0]
            else:
                del schema[key]
        if schema.get("default") is not None and (problem := value_error(schema, schema["default"])):
            self.changes["default_does_not_fit"] = f"default is {brief(schema.pop('default')):.80}: {problem}; left out"
        return schema

    def plain(self, value: Any, depth: int) -> Any:
        """Return a keyword's value that is not a schema; it must be JSON, which YAML and Python values need not be."""
        self.count(depth)
        if isinstance(value, Mapping):
            return {name: self.plain(one, depth + 1) for name, one in _named("a value", value)}
        if isinstance(value, list):
            return [self.plain(one, depth + 1) for one in value]
        if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise Unmappable("invalid_schema", f"{brief(value):.80} is not a JSON value")

    def count(self, depth: int) -> None:
        self.nodes += 1
        if depth > MOST_DEPTH:
            raise Unmappable("schema_too_large", f"the schema nests deeper than {MOST_DEPTH}")
        if self.nodes > MOST_VALUES:  # a page of references to references would otherwise grow without end
            raise Unmappable(
                "schema_too_large", f"the schema has more than {MOST_VALUES} values once references are in"
            )


def _named(key: str, value: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    if unnamed := [name for name in value if not isinstance(name, str)]:
        raise Unmappable("invalid_schema", f"{key} has the name {brief(unnamed[0]):.80}, which is not a text")
    return list(value.items())


def _only_refers(target: Any) -> bool:
    return isinstance(target, Mapping) and set(target) <= {"$ref", "description", "title"} and "$ref" in target


def _type(value: Any) -> dict[str, Any]:
    """Return the keywords of JSON Schema that a `type` stands for: `List[int]` also gives `items`.

    YAML reads `null` without quotes as the value.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        found = [_type(one) for one in value]
        if not found or not all(found):
            return {}
        names = [name for one in found for name in type_names(one)]
        return {"type": list(dict.fromkeys(names))} if len(set(names)) > 1 else found[0]
    if value is None:
        return {"type": "null"}
    if not isinstance(value, str):
        raise Unmappable("invalid_schema", f"type is {brief(value):.80}")
    schema, _ = read_type(value)
    if schema is None:
        raise Unmappable("unknown_type", f"type {brief(value):.80} is not a JSON Schema type")
    return schema
