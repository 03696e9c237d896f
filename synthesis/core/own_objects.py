"""An environment of one's own, as an object: its public methods are the tools, `score` judges.

    class Warehouse:
        question = "How many bolts are in the warehouse?"

        def stock_of(self, item: str) -> int:
            "How many pieces of an item are in the warehouse."
            return {"bolt": 40, "nut": 7}[item]

        def score(self, episode) -> float:
            return float(episode.says(40))

Beside `question` it may have `system` (a system message), `id`, `answer` (what the final answer should say) and
`language` (ISO 639-1 code of the final answer's language; English without it). Every episode plays on a deep copy of
its own, so a method may keep state in `self`. The methods run in the trainer's process, with its rights: they are the
operator's code. Their arguments are whatever a model wrote, checked against the annotations and nothing else.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from synthesis.core.environment import Environment, EnvironmentSession, PlayedEpisode, ToolAnswer, ToolsUnavailable
from synthesis.core.files import first_line
from synthesis.core.records import Answer, Message, ToolSpec
from synthesis.core.refusals import InputError
from synthesis.core.rewards import called

_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_RESERVED: Final = ("score", "close")
"""Public methods that are no tools."""


class OwnEnvironment:
    """An object as an `Environment`.

    Raises:
        InputError: it is none: says what is missing, or which method cannot be a tool, and why.
    """

    def __init__(self, subject: Any) -> None:
        kind = type(subject).__name__
        question = getattr(subject, "question", None)
        if not (isinstance(question, str) and question.strip()):
            raise InputError(f"environment {kind}: give it `question`, the text that an episode begins with")
        if not callable(getattr(subject, "score", None)):
            raise InputError(f"environment {kind}: give it `score(self, episode)`, which returns a number from 0 to 1")
        system, answer = getattr(subject, "system", ""), getattr(subject, "answer", None)
        self.subject = subject
        self.prompt: Sequence[Message] = [
            *([Message("system", str(system))] if system else []),
            Message("user", question),
        ]
        name = hashlib.sha256(f"{system}\0{question}".encode()).hexdigest()[:12]
        self.id = str(getattr(subject, "id", "") or f"{kind}-{name}")
        self.language = str(getattr(subject, "language", "en"))
        self.answer = answer if answer is None or isinstance(answer, Answer) else Answer(answer)
        self._methods = _methods(type(subject))
        self.tools: Sequence[ToolSpec] = [_tool(kind, name, method) for name, method in self._methods.items()]
        try:
            copy.deepcopy(subject)
        except Exception as error:  # whatever __deepcopy__ and __reduce__ raise
            raise InputError(
                f"environment {self.id}: it cannot be copied, and each episode plays on a copy of its own "
                f"({type(error).__name__}: {first_line(error)}); give it a __deepcopy__, or open what it holds later"
            ) from error

    async def begin(self) -> EnvironmentSession:
        """An episode on a copy of the object."""
        return _OwnSession(self.id, copy.deepcopy(self.subject))


class _OwnSession:
    def __init__(self, id: str, subject: Any) -> None:
        self._id, self._subject = id, subject

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """What a method returned, as JSON; what it raised is the policy's to see."""
        try:
            value = await called(getattr(self._subject, tool), **arguments)
        except Exception as error:
            return ToolAnswer(f"{type(error).__name__}: {first_line(error)}", ok=False)
        try:
            return ToolAnswer(msgspec.json.encode(value).decode())
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise ToolsUnavailable(
                f"environment {self._id}: {tool} returned a {type(value).__name__}, which is no JSON value ({error})"
            ) from error

    async def score(self, episode: PlayedEpisode) -> float:
        """What the object says; it sees its own state as the episode left it."""
        found: float = await called(self._subject.score, episode)
        return found

    async def close(self) -> None:
        """The copy goes by itself; an object that holds more has a `close`."""
        if callable(close := getattr(self._subject, "close", None)):
            await called(close)


def own_environments(found: Any, name: str) -> list[Environment]:
    """The environments that a name of one's own stands for: one or several, or a function that makes them.

    Args:
        found: what the name refers to. What has `begin` is an `Environment` already; anything else becomes one.

    Raises:
        InputError: it holds none, or one that cannot be used; or two have one id.
    """
    made: Any = found() if inspect.isfunction(found) or inspect.isclass(found) else found
    several = isinstance(made, Iterable) and not (hasattr(made, "question") or hasattr(made, "begin"))
    listed: Sequence[Any] = list(made) if several else [made]
    environments: list[Environment] = [one if hasattr(one, "begin") else OwnEnvironment(one) for one in listed]
    if not environments:
        raise InputError(f"{name} holds no environments")
    check_ids(environments, name)
    return environments


def check_ids(environments: Sequence[Environment], name: str) -> None:
    """Raises `InputError`: two environments have one id."""
    seen: set[str] = set()
    for one in environments:
        if one.id in seen:
            raise InputError(f"{name}: two environments have the id {one.id!r:.80}; give each an `id` of its own")
        seen.add(one.id)


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public ones, those of base classes first, each in the order in which they are written."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= {name: value for name, value in vars(base).items() if inspect.isfunction(value)}
    return {name: value for name, value in found.items() if not name.startswith("_") and name not in _RESERVED}


def _tool(kind: str, name: str, method: Callable[..., Any]) -> ToolSpec:
    """A method as a tool. Raises `InputError`: it has no docstring, or a parameter that no schema can be written of."""
    where = f"environment {kind}: {name}"
    document = inspect.getdoc(method)
    if not document:
        raise InputError(f"{where} has no docstring, which is what the model reads of it; write one")
    try:
        hints = typing.get_type_hints(method)
    except Exception as error:  # an annotation of something that is not there
        raise InputError(f"{where}: its annotations cannot be read ({first_line(error)})") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for one in list(inspect.signature(method).parameters.values())[1:]:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise InputError(f"{where}: a tool's parameters have names; leave out *, ** and /")
        properties[one.name] = _schema(hints.get(one.name), f"{where}: {one.name}")
        if one.default is one.empty:
            required.append(one.name)
    return ToolSpec(name, document, {"type": "object", "properties": properties, "required": required})


def _schema(annotation: Any, where: str) -> dict[str, Any]:
    """The JSON schema of what an annotation allows."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        kinds = {type(one) for one in parts}
        if len(kinds) == 1 and (kind := _TYPES.get(kinds.pop())):
            return {"type": kind, "enum": list(parts)}
    elif origin in (typing.Union, types.UnionType):
        wanted = [_schema(one, where) for one in parts if one is not types.NoneType]
        wanted += [{"type": "null"}] if types.NoneType in parts else []
        return {"anyOf": wanted}
    elif origin is list:
        return {"type": "array", "items": _schema(parts[0], where)}
    elif origin is dict:
        return {"type": "object", "additionalProperties": _schema(parts[1], where)}
    elif annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    said = "nothing" if annotation is None else getattr(annotation, "__name__", str(annotation))
    raise InputError(
        f"{where} is annotated with {said}; use {', '.join(one.__name__ for one in _TYPES)}, list[…], dict[str, …], "
        "Literal[…] or a union of them"
    )
