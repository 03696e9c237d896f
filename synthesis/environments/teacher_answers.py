"""Answers of the teacher in the environment pipeline: one struct a request, whose JSON schema the endpoint enforces.

The docstrings of the structs are in these schemas, so the teacher reads them. Reasons stand before verdicts, so that a
model argues before it decides. Parameters and arguments are lists of named values, not free-form objects: strict
structured output allows no open objects.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from synthesis.core.endpoint_settings import Role
from synthesis.core.records import Answer, ToolSpec

ParameterType = Literal["string", "integer", "number", "boolean"]


class SubQuestionAnswer(msgspec.Struct, frozen=True):
    """One step: a question that one atomic tool call answers."""

    id: int
    question: str
    answer: Answer
    depends_on: list[int]
    hop: int
    intent: str
    """Snake-case name of what is looked up, without the subject: `capital_of_country`."""
    domain: str
    subjects: list[str]
    """The named things the question is about, as the main question or an earlier answer spells them."""


class DecompositionAnswer(msgspec.Struct, frozen=True):
    """A question, its answer and the steps that lead there."""

    question: str
    answer: Answer
    domain: str
    sub_questions: list[SubQuestionAnswer]


class Argument(msgspec.Struct, frozen=True):
    name: str
    value: str | int | float | bool


class AugmentedStep(SubQuestionAnswer, frozen=True, kw_only=True):
    """One step of a new question over given tools: which of them answers it, with which arguments.

    `other_arguments` are those of a valid call with another answer.
    """

    tool: str
    arguments: list[Argument]
    other_arguments: list[Argument]


class AugmentedQuestionAnswer(msgspec.Struct, frozen=True):
    """A new question over given tools, its answer and the steps that lead there."""

    question: str
    answer: Answer
    domain: str
    sub_questions: list[AugmentedStep]


class Necessity(msgspec.Struct, frozen=True):
    id: int
    reason: str
    tool_needed: bool


class ToolNecessityAnswer(msgspec.Struct, frozen=True):
    """One entry for each sub-question, in their order."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    steps: list[Necessity]


class DependencyConsistencyAnswer(msgspec.Struct, frozen=True):
    """Whether the dependencies that it lists supply exactly what one sub-question refers to."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    reason: str
    verdict: Literal["matched", "missing", "redundant"]


class Atomicity(msgspec.Struct, frozen=True):
    id: int
    reason: str
    atomic: bool


class AtomicityAnswer(msgspec.Struct, frozen=True):
    """One entry for each sub-question, in their order."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    steps: list[Atomicity]


class SequentialRationalityAnswer(msgspec.Struct, frozen=True):
    """Steps that wait for others without need."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    reason: str
    needlessly_sequential: list[int]


class CompletenessAnswer(msgspec.Struct, frozen=True):
    """Whether the sub-questions cover all that the main question asks."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    requirements: list[str]
    missing: list[str]
    complete: bool


class Parameter(msgspec.Struct, frozen=True):
    name: str
    type: ParameterType
    description: str
    required: bool
    enum: list[str] = []


class ToolDocumentAnswer(msgspec.Struct, frozen=True):
    """A general tool that can answer the sub-question."""

    name: str
    description: str
    parameters: list[Parameter]


class HarderToolDocumentAnswer(msgspec.Struct, frozen=True):
    """The same tool, harder to use: every call of the plain one stays valid, optional parameters are added."""

    name: str
    description: str
    parameters: list[Parameter]


class ReferenceCallAnswer(msgspec.Struct, frozen=True):
    """The call that answers the sub-question, and the arguments of a call to the same tool with a different answer."""

    arguments: list[Argument]
    other_arguments: list[Argument]


class ToolCodeAnswer(msgspec.Struct, frozen=True):
    """A Python module, standard library only, with a function of the tool's name."""

    code: str


class Cluster(msgspec.Struct, frozen=True):
    intent: str
    ids: list[int]


class IntentClustersAnswer(msgspec.Struct, frozen=True):
    """Every sub-question in exactly one cluster; one cluster asks the same of different subjects."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    clusters: list[Cluster]


class MergedToolAnswer(msgspec.Struct, frozen=True):
    """One module for a cluster, and the call that answers each member, in the members' order."""

    code: str
    calls: list[list[Argument]]


class WorldColumn(msgspec.Struct, frozen=True):
    name: str
    type: ParameterType


class WorldTable(msgspec.Struct, frozen=True):
    name: str
    columns: list[WorldColumn]


class WorldRow(msgspec.Struct, frozen=True):
    """One row at the beginning; it has a cell for each column of its table."""

    table: str
    id: str
    cells: list[Argument]


class WorldStep(SubQuestionAnswer, frozen=True, kw_only=True):
    """One step of a task in a world: a look-up, or a call that changes the state.

    `check` is the source of a function `check(before, after)` over the tables, which says whether the change is there;
    "" for a look-up. `other_arguments` are those of a valid call that looks up, or changes, something else.
    """

    tool: str
    arguments: list[Argument]
    other_arguments: list[Argument]
    check: str


class WorldAnswer(msgspec.Struct, frozen=True):
    """A small database with tools that read and write it, and a task that asks for another state of it.

    `code` is a Python module over the global `STATE` (table → id → column → value): a function for each tool, and
    `broken()`, which lists the invariants that do not hold. `open` names as `table.column` what the task leaves open or
    what follows from other columns.
    """

    question: str
    domain: str
    tables: list[WorldTable]
    rows: list[WorldRow]
    tools: list[ToolDocumentAnswer]
    code: str
    sub_questions: list[WorldStep]
    open: list[str]


ANSWERS: tuple[type[msgspec.Struct], ...] = (
    DecompositionAnswer,
    AugmentedQuestionAnswer,
    ToolNecessityAnswer,
    DependencyConsistencyAnswer,
    AtomicityAnswer,
    SequentialRationalityAnswer,
    CompletenessAnswer,
    ToolDocumentAnswer,
    HarderToolDocumentAnswer,
    ReferenceCallAnswer,
    ToolCodeAnswer,
    IntentClustersAnswer,
    MergedToolAnswer,
    WorldAnswer,
)
"""Every request of this pipeline; each has a prompt in `prompts/en` and `prompts/zh`."""


def arguments(given: list[Argument]) -> dict[str, Any]:
    """Return the arguments of a call as the mapping the sandbox takes."""
    return {one.name: one.value for one in given}


def argument_list(given: dict[str, Any]) -> list[Argument]:
    """Invert `arguments`."""
    return [Argument(name, value) for name, value in given.items()]


def to_spec(document: ToolDocumentAnswer | HarderToolDocumentAnswer) -> ToolSpec:
    """Return the document as an OpenAI tool."""
    properties: dict[str, Any] = {}
    for one in document.parameters:
        properties[one.name] = {"type": one.type, "description": one.description}
        if one.enum:
            properties[one.name]["enum"] = one.enum
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [one.name for one in document.parameters if one.required],
        "additionalProperties": False,
    }
    return ToolSpec(document.name, document.description, parameters)


def to_parameters(spec: ToolSpec) -> list[Parameter]:
    """Invert `to_spec`, for tools of flat parameters."""
    required = spec.parameters.get("required", [])
    return [
        Parameter(name, schema["type"], schema.get("description", ""), name in required, schema.get("enum", []))
        for name, schema in spec.parameters["properties"].items()
    ]
