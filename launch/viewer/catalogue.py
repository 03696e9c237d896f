"""What people see of a dataset of environments: its pages, each environment's tools, and what a call solves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.viewer.listing import Page, arranged, part
from synthesis.core.matching import match
from synthesis.core.records import CodeTool, ReferenceCall, SubQuestion, ToolEnvironment
from synthesis.core.refusals import InputError
from synthesis.core.reward import solved_by, sub_tasks_by_tool

ENVIRONMENT_KEYS: Mapping[str, Callable[[ToolEnvironment], Any]] = {
    "question": lambda one: one.question.casefold(),
    "id": lambda one: one.id,
    "domain": lambda one: one.domain,
    "structure": lambda one: one.structure,
    "sub-questions": lambda one: len(one.sub_questions),
}
"""What the list can be sorted by."""


@dataclass(frozen=True)
class EnvironmentFilter:
    """Which environments to list; what is empty lets all pass.

    Attributes:
        text: in the question, the id or the domain, whatever its case.
        sort: one of `ENVIRONMENT_KEYS`, or with a minus; "": the dataset's order.
    """

    text: str = ""
    structure: str = ""
    language: str = ""
    sort: str = ""

    def passes(self, environment: ToolEnvironment) -> bool:
        """Whether an environment is one of those."""
        wanted = self.text.strip().casefold()
        return (
            self.structure in ("", environment.structure)
            and self.language in ("", environment.language)
            and any(wanted in text.casefold() for text in (environment.question, environment.id, environment.domain))
        )


@dataclass(frozen=True)
class ShownParameter:
    """One property of a tool's schema, as text."""

    name: str
    type: str
    required: bool
    description: str
    values: list[Any]


@dataclass(frozen=True)
class ShownReference:
    """A stored call, the sub-question that it answers (None: there is none of its id), and the rule by which."""

    call: ReferenceCall
    sub_question: SubQuestion | None
    rule: str


@dataclass(frozen=True)
class Tool:
    """A tool as it is shown.

    Attributes:
        arguments: to begin with: those of its first reference call, else the least that its schema asks for.
    """

    tool: CodeTool
    parameters: list[ShownParameter]
    references: list[ShownReference]
    arguments: Any


@dataclass(frozen=True)
class Solved:
    """A sub-question that an output answers, and the rule of `synthesis.core.matching` by which."""

    sub_question: int
    rule: str


class Catalogue:
    """The environments of a dataset, in its order.

    Attributes:
        structures: those that occur, sorted.
        languages: those that occur, sorted.

    Raises:
        ValueError: two of them have one id.
    """

    def __init__(self, environments: Sequence[ToolEnvironment]) -> None:
        self._by_id: dict[str, ToolEnvironment] = {}
        for one in environments:
            if self._by_id.setdefault(one.id, one) is not one:
                raise InputError(f"two environments have the id {one.id!r}; synthesise or import the dataset again")
        self.structures = sorted({one.structure for one in environments})
        self.languages = sorted({one.language for one in environments})

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id: str) -> ToolEnvironment | None:
        """The environment of an id, or None."""
        return self._by_id.get(id)

    def chosen(self, wanted: EnvironmentFilter) -> list[ToolEnvironment]:
        """What passes a filter, in its order."""
        return arranged(filter(wanted.passes, self._by_id.values()), wanted.sort, ENVIRONMENT_KEYS)

    def page(self, wanted: EnvironmentFilter, number: int, size: int = 50) -> Page[ToolEnvironment]:
        """Page `number`, from 1, of those; the last one where there are not so many."""
        return part(self.chosen(wanted), number, size)


def shown_tools(environment: ToolEnvironment, tools: Sequence[CodeTool]) -> list[Tool]:
    """Some of an environment's tools, with what it says of them."""
    subs = {sub.id: sub for sub in environment.sub_questions}
    shown = []
    for tool in tools:
        references = [
            ShownReference(
                call, subs.get(call.sub_question), _rule(call, subs.get(call.sub_question), environment.language)
            )
            for call in environment.reference_calls
            if call.tool == tool.spec.name
        ]
        arguments = references[0].call.arguments if references else skeleton(tool.spec.parameters)
        shown.append(Tool(tool, parameters_of(tool.spec.parameters), references, arguments))
    return shown


def code_tools(environment: ToolEnvironment) -> dict[str, CodeTool]:
    """Every tool that an environment can run, by name."""
    irrelevant = [tool for tools in environment.distractors.values() for tool in tools]
    return {tool.spec.name: tool for tool in (*environment.tools, *irrelevant)}


def solved(environment: ToolEnvironment, tool: str, output: Any, arguments: Mapping[str, Any]) -> list[Solved]:
    """Return what a successful call solves, decided as the RL reward does.

    Raises:
        ValueError: the environment cannot be scored; the message says why.
    """
    sub_tasks = sub_tasks_by_tool(environment)
    answers = {sub.id: sub.answer for sub in environment.sub_questions}
    language = environment.language
    ids = solved_by(sub_tasks, tool, output, language, arguments=arguments)
    return [Solved(id, match(output, answers[id], language) or "") for id in ids]


def _rule(call: ReferenceCall, sub: SubQuestion | None, language: str) -> str:
    """The stored one; records of before it was stored have none, so then it is found again."""
    return call.rule or (sub and match(call.output, sub.answer, language)) or "none"


# ---------------------------------------------------------------------------------------------------------------------
# Schemas, which are whatever JSON a record holds


def parameters_of(schema: Mapping[str, Any]) -> list[ShownParameter]:
    """The properties of an object schema; what is not written as JSON Schema wants it counts as left out."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [
        ShownParameter(
            name=name,
            type=" or ".join(map(str, _types(one))) or "any",
            required=name in names,
            description=str(one.get("description", "")),
            values=one["enum"] if isinstance(one.get("enum"), list) else [],
        )
        for name, one in _properties(schema).items()
    ]


def skeleton(schema: Any) -> Any:
    """The least value of a JSON schema: required properties only, each its default, its first choice, or empty."""
    if not isinstance(schema, dict):
        return None
    for name in ("default", "const"):
        if name in schema:
            return schema[name]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kinds = [kind for kind in _types(schema) if kind != "null"]
    if "object" in kinds or "properties" in schema:
        return {one.name: skeleton(_properties(schema)[one.name]) for one in parameters_of(schema) if one.required}
    if kinds and kinds[0] in ("integer", "number"):
        return schema.get("minimum", 0)
    return {"string": "", "boolean": False, "array": []}.get(str(kinds[0])) if kinds else None


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: one if isinstance(one, dict) else {} for name, one in properties.items()}


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]
