"""Make tools of an object's public methods: documents for the model, conversion of arguments, and what is left out.

A tool is a public attribute of the class that can be called: a method, static, class or partial, cached or decorated.
Annotations become JSON schemas, and arguments are converted to what they say, both by pydantic.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from synthesis.core.records import ToolSpec
from synthesis.core.tool_schemas import UncheckableSchema, check_schema

RESERVED: Final = ("score", "close")
"""Public methods that are not tools."""
_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_MOST_INLINED: Final = 40


@dataclass(frozen=True)
class ObjectTools:
    """The tools of a class.

    Attributes:
        specs: their documents, methods of base classes first, each in the order in which they are written.
        left_out: public callables that are not offered, with the reason.
        annotations: of each tool's parameters, evaluated.
        adapters: what converts to them.
    """

    specs: Sequence[ToolSpec]
    left_out: Mapping[str, str]
    annotations: Mapping[str, Mapping[str, Any]]
    adapters: Mapping[str, Mapping[str, TypeAdapter[Any]]]

    def converted(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arguments that fit the tool's schema to its annotations.

        Raises:
            ValueError: a value cannot be converted; names the parameter and the reason.
        """
        adapters, found = self.adapters[tool], dict[str, Any]()
        for name, value in arguments.items():
            try:
                found[name] = adapters[name].validate_python(value)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, [name, *first["loc"]]))
                raise ValueError(f"{where}: {first['msg']}") from None
        return found


_known: WeakKeyDictionary[type, ObjectTools] = WeakKeyDictionary()


def object_tools(subject: Any) -> ObjectTools:
    """Return the tools of an object; read once for each class.

    Raises:
        InputError: a method has no docstring, or a parameter of which no schema can be written.
    """
    kind = type(subject)
    if kind not in _known:
        _known[kind] = _read(subject, kind)
    return _known[kind]


def note_tools(annotations: Mapping[type, Mapping[str, Mapping[str, Any]]]) -> None:
    """Note the annotations of classes that were read in another process.

    A class that was pickled by value cannot evaluate annotations that are texts: it has lost the names in them.
    """
    for kind, tools in annotations.items():
        adapters = {tool: {name: TypeAdapter(one) for name, one in given.items()} for tool, given in tools.items()}
        _known[kind] = ObjectTools([], {}, tools, adapters)


def _read(subject: Any, kind: type) -> ObjectTools:
    specs, adapters, left_out = list[ToolSpec](), dict[str, Mapping[str, TypeAdapter[Any]]](), dict[str, str]()
    annotations = dict[str, Mapping[str, Any]]()
    written = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    for name, value in written.items():
        if name.startswith("_") or name in RESERVED or isinstance(value, property | functools.cached_property):
            continue
        method = getattr(subject, name, None)
        if not callable(method):
            continue
        if reason := _reason_to_leave_out(value, method):
            left_out[name] = reason
        else:
            spec, annotations[name], adapters[name] = _tool(f"environment {kind.__name__}: {name}", name, method)
            specs.append(spec)
    for name, value in getattr(subject, "__dict__", {}).items():
        if callable(value) and not name.startswith("_") and name not in (*RESERVED, *adapters):
            left_out[name] = "it is set on the object; write a method in the class"
    return ObjectTools(specs, left_out, annotations, adapters)


def _reason_to_leave_out(written: Any, method: Callable[..., Any]) -> str:
    """Why a public callable of a class is not a tool; "" where it is."""
    if inspect.isclass(method):
        return "it is a class"
    if hasattr(type(written), "__get__") or isinstance(written, functools.partial) or hasattr(written, "__wrapped__"):
        return ""  # a function, or what a decorator made of one
    if not _document(method):
        return f"it is a {type(method).__name__} without a docstring"
    return ""


def _function(method: Callable[..., Any]) -> Any:
    """Return the original function, below partials and decorators."""
    while True:
        inner = inspect.unwrap(method)
        inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__func__", inner)
        if inner is method:
            return inner
        method = inner


def _document(method: Callable[..., Any]) -> str:
    function = _function(method)
    if inspect.isroutine(function):
        return inspect.getdoc(function) or inspect.getdoc(method) or ""
    # Not `getdoc`, which for a class without a docstring gives that of `object`.
    return inspect.cleandoc(function.__doc__ or type(function).__call__.__doc__ or "")


def _tool(
    where: str, name: str, method: Callable[..., Any]
) -> tuple[ToolSpec, Mapping[str, Any], Mapping[str, TypeAdapter[Any]]]:
    """Convert a method to a tool. Raises `InputError`, as `object_tools`."""
    document = _document(method)
    if not document:
        raise InputError(f"{where} has no docstring, which is what the model reads of it; write one")
    function = _function(method)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"{where} yields its results one by one; return a list")
    parameters = _parameters(where, method, function)
    if unnamed := [one for one in parameters if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]:
        raise InputError(f"{where}: parameter {unnamed[0]} cannot be given by name; leave out *, ** and /")
    adapters = {one.name: _adapter(one, f"{where}: {one.name}") for one in parameters}
    schema = {
        "type": "object",
        "properties": {
            one.name: _schema(adapters[one.name], one.annotation, f"{where}: {one.name}") for one in parameters
        },
        "required": [one.name for one in parameters if one.default is one.empty],
    }
    return ToolSpec(name, document, schema), {one.name: one.annotation for one in parameters}, adapters


def _parameters(where: str, method: Callable[..., Any], function: Any) -> Sequence[inspect.Parameter]:
    """Return the parameters with evaluated annotations. The return annotation may be of something that is not there."""
    try:
        written = inspect.signature(method).parameters.values()
        own = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # a function without `self`; a builtin without a signature
        raise InputError(
            f"{where}: its parameters cannot be read ({first_line(error)}); the first one of a method is `self`"
        ) from error
    first = next(iter(own), None)
    if len(own) > len(written) and first is not None and first.annotation is not first.empty:
        raise InputError(f"{where}: {first.name} receives the object; write `self` before it, or use @staticmethod")
    with contextlib.suppress(Exception):
        return [*inspect.signature(method, eval_str=True).parameters.values()]
    return [_evaluated(one, function, f"{where}: {one.name}") for one in written]


def _evaluated(parameter: inspect.Parameter, function: Any, where: str) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, getattr(function, "__globals__", {})))
    except Exception as error:  # the annotation is of something that is not there, or no expression
        raise InputError(_unsupported(where, repr(parameter.annotation), error)) from error


def _adapter(parameter: inspect.Parameter, where: str) -> TypeAdapter[Any]:
    annotation = parameter.annotation
    if annotation is parameter.empty or inspect.isroutine(annotation):  # pydantic would call the latter
        raise InputError(_unsupported(where, annotation))
    try:
        return TypeAdapter(annotation)
    except Exception as error:  # pydantic's own, and those of somebody's hooks
        raise InputError(_unsupported(where, annotation, error)) from error


def _schema(adapter: TypeAdapter[Any], annotation: Any, where: str) -> dict[str, Any]:
    try:
        written = adapter.json_schema(schema_generator=_Schemas)
        schema: dict[str, Any] = _inlined(written, written.get("$defs", {}), 0)
        check_schema(schema)
    except Exception as error:  # pydantic's own, and those of somebody's hooks
        raise InputError(_unsupported(where, annotation, error)) from error
    return schema


def _unsupported(where: str, annotation: Any, error: Exception | None = None) -> str:
    said = "nothing" if annotation is inspect.Parameter.empty else getattr(annotation, "__name__", str(annotation))
    foreign = isinstance(
        error, PydanticSchemaGenerationError | PydanticInvalidForJsonSchema
    )  # says how to use pydantic
    why = "" if error is None or foreign else f" ({first_line(error)})"
    return (
        f"{where} is annotated with {said}; use {', '.join(one.__name__ for one in _TYPES)}, list[…], dict[…], "
        f"Literal[…], unions of them, dates, enumerations, dataclasses or TypedDict{why}"
    )


class _Schemas(GenerateJsonSchema):
    """The schemas of pydantic in the order and the form in which they always were here."""

    def sort(self, value: dict[str, Any], parent_key: str | None = None) -> dict[str, Any]:
        return value

    def field_title_should_be_set(self, schema: Any) -> Literal[False]:
        return False

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        return _listed(schema["expected"])

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        return _listed([member.value for member in schema["members"]])

    def list_schema(self, schema: Any) -> dict[str, Any]:
        return {name: value for name, value in super().list_schema(schema).items() if (name, value) != ("items", {})}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        found = super().dict_schema(schema).items()
        return {name: value for name, value in found if (name, value) != ("additionalProperties", True)}


def _listed(values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of values to choose from."""
    if None in values and len(values) > 1:
        return {"anyOf": [_listed([one for one in values if one is not None]), {"type": "null"}]}
    kinds = {type(one) for one in values}
    kind = _TYPES.get(kinds.pop()) if len(kinds) == 1 else None
    return {"type": kind, "enum": [*values]} if kind else {"enum": [*values]}


def _inlined(schema: Any, definitions: Mapping[str, Any], level: int) -> Any:
    """Return a schema with what its references refer to in their place, and without the names of classes.

    Raises:
        UncheckableSchema: a type contains itself.
    """
    if level > _MOST_INLINED:
        raise UncheckableSchema("the type contains itself; flatten it")
    if isinstance(schema, list):
        return [_inlined(one, definitions, level) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        return _inlined(definitions[reference.rpartition("/")[2]] | beside, definitions, level + 1)
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("$defs", "title", "discriminator"):
            continue
        if keyword == "properties":
            found[keyword] = {name: _inlined(one, definitions, level + 1) for name, one in value.items()}
        elif keyword in ("enum", "const", "default", "examples", "required"):
            found[keyword] = value
        else:
            found[keyword] = _inlined(value, definitions, level + 1)
    return found
