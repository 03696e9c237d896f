"""Typed records: the one contract between `synthesis` (which writes them) and `astra_jax` (which reads them).

Every record is a `msgspec.Struct`, JSON-encoded, one per ArrayRecord entry (`group_size:1`, so that Grain can read at
random). Messages and tools follow OpenAI's chat-completions format. Reading and writing datasets, with their
`dataset_card.json`, is `synthesis.core.datasets`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sandbox.settings import Bound

SCHEMA_VERSION = 1
"""Raised by one whenever a record changes in a way that old readers would misread."""

Language = Literal["en", "zh"]

# ---------------------------------------------------------------------------------------------------------------------
# Tools and servers


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool in OpenAI's function form; `name` matches `[a-zA-Z0-9_-]{1,64}`, `parameters` is an object schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The `tools=[...]` entry of a chat-completions request."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class CodeTool(msgspec.Struct, frozen=True):
    """A tool together with the Python module that implements it.

    The module defines a function of the tool's name that takes the schema's properties as keyword arguments and returns
    a JSON value. It runs in the sandbox only.
    """

    spec: ToolSpec
    code: str


class StdioExecution(msgspec.Struct, tag="mcp_stdio", frozen=True):
    """Calls go to a real MCP server, started over stdio; `command[0]` is found on PATH or beside the interpreter."""

    command: list[str]
    env: dict[str, str] = {}


class HttpExecution(msgspec.Struct, tag="mcp_http", frozen=True):
    """Calls go to a real MCP server over streamable HTTP (MCP specification, transports).

    `url` and the values of `headers` may name environment variables, `Bearer ${TOKEN}`: they are filled in when the
    connection is opened, so a dataset never holds the secret itself.
    """

    url: str
    headers: dict[str, str] = {}


class CodeExecution(msgspec.Struct, tag="code", frozen=True):
    """Calls run in the sandbox: one module implements all tools of the server."""

    code: str


class EmulatedExecution(msgspec.Struct, tag="emulated", frozen=True):
    """Only a document exists: a stateful emulator (the teacher) answers the calls."""


McpExecution = StdioExecution | HttpExecution
"""A running MCP server, which all runs share."""
Execution = StdioExecution | HttpExecution | CodeExecution | EmulatedExecution


class ToolServer(msgspec.Struct, frozen=True):
    """Tools of one origin, normalised (paper §2.1.1). Chains never cross servers."""

    id: str
    title: str
    description: str
    domain: str
    language: Language
    tools: list[ToolSpec]
    execution: Execution


# ---------------------------------------------------------------------------------------------------------------------
# The SFT track: chains, tasks, trajectories


class Verdict(msgspec.Struct, frozen=True):
    """What one verification operator decided, and why."""

    valid: bool
    reason: str


class ToolChain(msgspec.Struct, frozen=True):
    """An ordered tool sequence drawn by a weighted walk over its server's transition graph (paper §2.1.2)."""

    id: str
    server_id: str
    tools: list[str]
    weight: float
    """Product of the walk's transition probabilities."""
    verdicts: dict[str, Verdict]


Score = Annotated[int, Bound(least=1, most=5)]


class TaskScores(msgspec.Struct, frozen=True):
    """1 (worst) to 5 (best) each (paper §2.1.3)."""

    question_quality: Score
    scenario_realism: Score
    tool_necessity: Score


class Task(msgspec.Struct, frozen=True):
    """A user request for one server; `tools` is the chain it needs (mode `chain`) or the expected set (`server`)."""

    id: str
    server_id: str
    language: Language
    mode: Literal["chain", "server"]
    augmentation: Literal["original", "diverse", "complicate", "persona"]
    question: str
    tools: list[str]
    scores: TaskScores


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message. `reasoning` is the thinking text (OpenAI-compatible servers call it `reasoning_content`)."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    name: str = ""


class AxisScore(msgspec.Struct, frozen=True):
    """One of the seven reward axes (paper §2.1.5). `score` is in [0, 1]."""

    score: float
    reason: str


class InjectedFailure(msgspec.Struct, frozen=True):
    """A call whose result was replaced: `timeout`, `error`, `empty` or `rate_limit` (paper §2.1.4)."""

    call_id: str
    kind: str


class CallError(msgspec.Struct, frozen=True):
    """A call that failed by itself.

    `kind` is `unknown_tool`, `invalid_arguments`, `tool_error` (the tool says so), or how the sandbox ended it
    (`sandbox.outcomes`: `cpu_timeout`, `crash` …).
    """

    call_id: str
    kind: str


class Trajectory(msgspec.Struct, frozen=True):
    """A scored multi-turn agent run. `injected_failures` counts the calls whose result was replaced by a failure."""

    id: str
    task_id: str
    server_id: str
    domain: str
    language: Language
    tools: list[ToolSpec]
    messages: list[Message]
    injected_failures: int
    scores: dict[str, AxisScore]
    reward: float
    """Mean of the seven axis scores."""
    failures: list[InjectedFailure] = []
    """Which calls the injected failures were; records of older versions have only their number."""
    errors: list[CallError] = []
    """Which calls failed by themselves; records of older versions do not say."""


# ---------------------------------------------------------------------------------------------------------------------
# The RL track: decompositions, environments


class Answer(msgspec.Struct, frozen=True):
    """A typed expected value; `synthesis.core.matching` decides whether a tool's output contains it."""

    value: str | int | float | bool | list[str]
    unit: str = ""
    tolerance: float = 0.0
    """Absolute tolerance; numbers only."""
    aliases: list[str] = []


Structure = Literal["single_hop", "parallel_single_hop", "multi_hop", "parallel_multi_hop"]

Mode = Literal["unconditional", "question", "augmented", "imported"]
"""Where a question comes from: a domain or a text, a given question, the tools of another environment, or a foreign
record."""


class SubQuestion(msgspec.Struct, frozen=True):
    """One node of the dependency graph. `depends_on` holds ids of direct dependencies; `hop` starts at 1."""

    id: int
    question: str
    answer: Answer
    depends_on: list[int]
    hop: int
    needs_tool: bool
    intent: str
    """Sub-questions of one intent ask the same relation of different subjects; `merge` makes one tool of them."""


class QualityScores(msgspec.Struct, frozen=True):
    """The paper's four indicators (eq. 13-21), each in [0, 1]."""

    dependency_consistency: float
    atomicity: float
    sequential_rationality: float
    completeness: float

    @property
    def mean(self) -> float:
        return (self.dependency_consistency + self.atomicity + self.sequential_rationality + self.completeness) / 4


class Decomposition(msgspec.Struct, frozen=True):
    """A question, its answer, and the sub-questions that lead there."""

    id: str
    language: Language
    domain: str
    structure: Structure
    question: str
    answer: Answer
    sub_questions: list[SubQuestion]
    entities: list[str]
    """Every named subject in the question or in an intermediate answer; splits keep them apart."""
    signature: str
    """The question's structure without its entities, e.g. `capital_of>population_of`; splits keep these apart too."""
    quality: QualityScores | None = None


class ReferenceCall(msgspec.Struct, frozen=True):
    """The call that answers one sub-question, proven in the sandbox.

    `rule` is the rule of `synthesis.core.matching` by which the output holds the answer (`number`, `date`, `string` …).
    """

    sub_question: int
    tool: str
    arguments: dict[str, Any]
    output: Any
    rule: str = ""


class Difficulty(msgspec.Struct, frozen=True):
    """How hard an environment is, known before any training; for curricula."""

    hops: int
    """Calls on the longest path to the answer."""
    parallel_share: float
    """Share of the sub-questions that share their hop level with another, 0 to 1."""
    distractor_closeness: float
    """Largest cosine similarity of an irrelevant tool's document to a needed one's, -1 to 1; 0 without any."""
    solve_rate: float | None = None
    """Mean F1 reward of a given policy over its episodes, 0 to 1; None until one was measured."""
    policy: str = ""
    """Which policy that was."""


class ToolEnvironment(msgspec.Struct, frozen=True):
    """An executable, self-checking world for one question (paper §2.2).

    `tools` are the needed ones; `distractors` are irrelevant but executable, by band of embedding similarity
    (`high`, `medium`, `low`). Tool names are unique over both.
    """

    id: str
    language: Language
    domain: str
    structure: Structure
    question: str
    answer: Answer
    sub_questions: list[SubQuestion]
    tools: list[CodeTool]
    reference_calls: list[ReferenceCall]
    distractors: dict[str, list[CodeTool]]
    entities: list[str]
    signature: str
    split: Literal["train", "held_out"]
    mode: Mode = "unconditional"
    quality: QualityScores | None = None
    difficulty: Difficulty | None = None


Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """Canonical JSON bytes: the same record always gives the same bytes."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[Record]) -> Record:
    """Decode one record.

    Raises:
        msgspec.ValidationError: the bytes are JSON but not a `kind`; the message names the field.
        msgspec.DecodeError: the bytes are not JSON.
    """
    return msgspec.json.decode(data, type=kind)
