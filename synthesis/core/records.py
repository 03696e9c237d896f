"""Typed records: the one contract between `synthesis` (which writes them) and `astra_jax` (which reads them).

Every record is a `msgspec.Struct`, JSON-encoded, one per ArrayRecord entry (`group_size:1`, so that Grain can read at
random). Messages and tools follow OpenAI's chat-completions format. Reading and writing datasets, with their
`dataset_card.json`, is `synthesis.core.datasets`.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sandbox.settings import Bound
from synthesis.core.chat_messages import Message as Message
from synthesis.core.chat_messages import ToolCall as ToolCall
from synthesis.core.executions import CodeExecution as CodeExecution
from synthesis.core.executions import EmulatedExecution as EmulatedExecution
from synthesis.core.executions import Execution as Execution
from synthesis.core.executions import GroupExecution as GroupExecution
from synthesis.core.executions import HttpExecution as HttpExecution
from synthesis.core.executions import McpExecution as McpExecution
from synthesis.core.executions import ServedPrompt as ServedPrompt
from synthesis.core.executions import ServedResource as ServedResource
from synthesis.core.executions import StdioExecution as StdioExecution
from synthesis.core.executions import ToolOrigin as ToolOrigin
from synthesis.core.typed import json_decoder

SCHEMA_VERSION = 1
"""Raised by one whenever a record changes in a way that old readers would misread."""

Language = Literal[
    "af", "ar", "az", "be", "bg", "bn", "bs", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi",
    "fr", "ga", "gl", "gu", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "ka", "kk", "km", "kn", "ko", "ky",
    "lo", "lt", "lv", "mk", "ml", "mn", "mr", "ms", "my", "ne", "nl", "no", "pa", "pl", "ps", "pt", "ro", "ru", "si",
    "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "uz", "vi", "zh",
]  # fmt: skip
"""By ISO 639-1 code; the offline teacher and the facts know `en` and `zh`."""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who made a record, of what, with which code; what does not apply is left out.

    Attributes:
        teacher: the type of the teacher that answered.
        model: its name, as it is served.
        endpoint: where it was asked, without what may be secret.
        prompts: digest of all prompts.
        temperature: of sampling.
        max_tokens: of one answer.
        licence: of the source that the record is about, as its document or the settings name it.
        code: commit or version of this code.
        models: by role, who of several models it was; the judge is that of what the record is made of.
    """

    teacher: str
    model: str = ""
    endpoint: str = ""
    prompts: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    licence: str = ""
    code: str = ""
    models: dict[str, str] = {}

    @property
    def judged_its_own(self) -> bool:
        """Whether the judge is the model that wrote the record: the agent where there is one, else the author."""
        writer = self.models.get("agent", self.models.get("author"))
        return writer is not None and self.models.get("judge") == writer


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
    a JSON value. It runs in the sandbox only. Without code it is a function of its environment's world.
    """

    spec: ToolSpec
    code: str


class ToolServer(msgspec.Struct, frozen=True):
    """Tools of one origin, normalised (paper §2.1.1); or those of a group of servers, for tasks over several."""

    id: str
    title: str
    description: str
    domain: str
    language: Language
    tools: list[ToolSpec]
    execution: Execution
    licence: str = ""
    """Of the server or its document, as that names it; "" where it does not."""
    resources: list[ServedResource] | msgspec.UnsetType = msgspec.UNSET
    """Of a running server; not there where it offers none. Nothing reads them: tasks are about tools."""
    prompts: list[ServedPrompt] | msgspec.UnsetType = msgspec.UNSET

    def origin(self, tool: str) -> ToolOrigin:
        """Whose a tool is: this server's, or that of one of its group; a name that it has not is its own."""
        own = ToolOrigin(self.id, tool)
        return self.execution.tools.get(tool, own) if isinstance(self.execution, GroupExecution) else own

    @property
    def servers(self) -> list[str]:
        """The ids of the servers that its tools are of, in the order of the tools: of more than one for a group."""
        return list(dict.fromkeys(self.origin(tool.name).server_id for tool in self.tools))


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


Conduct = Literal[
    "missing_tool", "irrelevant_tools", "missing_parameter", "infeasible", "refused", "confirmation", "done",
    "dialogue", "later_tool",
]  # fmt: skip
"""What a conversation teaches beside calling tools: not to call where the tool that is needed is not there, where all
that are there are about something else, where no tool can do it, or where the agent is told not to; to ask for what is
missing; to have a change confirmed; to stop when the user has all; to serve a user over several turns; and to go on
once the tool that was not there is."""


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that a simulated user wants.

    Attributes:
        says: how it is asked for.
        tools: that it needs; none may be called for one without any.
        when_asked: what the user says of it only when the agent asks, one at a time: a value, a yes, another wish.
    """

    says: str
    tools: list[str] = []
    when_asked: list[str] = []


class Dialogue(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is settled about a conversation before it begins.

    Attributes:
        goals: of the user, in order; the first one's `says` opens the conversation.
        user_turns: most messages of the user; 1: nobody answers the agent.
        persona: who the user is.
        policy: what the agent is told, in its system message.
        forbids: tools that the policy forbids; a goal of one has no tools.
        writes: tools that change something, which the user must have agreed to.
        withheld: tools of the server that the agent is not offered,
        returned: before the user speaks for this time, from 2 on; 0: ever.
        thanks: the user says at the end that it has all.
    """

    conduct: Conduct
    goals: list[Goal]
    user_turns: int = 1
    persona: str = ""
    policy: str = ""
    writes: list[str] = []
    withheld: list[str] = []
    thanks: bool = False
    returned: int = 0
    forbids: list[str] = []

    def lacks(self, spoken: int) -> list[str]:
        """The tools that the agent is not offered once the user has spoken so often."""
        return [] if self.returned and spoken >= self.returned else self.withheld


class Task(msgspec.Struct, frozen=True):
    """A user request for one server, or for a group of them.

    `tools` is the chain it needs (mode `chain`), the expected set (`server`; of all goals: `dialogue`), or empty where
    it is deliberately about none of them (`no_tool`).
    """

    id: str
    server_id: str
    language: Language
    mode: Literal["chain", "server", "no_tool", "dialogue"]
    augmentation: Literal["original", "diverse", "complicate", "persona"]
    question: str
    tools: list[str]
    scores: TaskScores
    dialogue: Dialogue | msgspec.UnsetType = msgspec.UNSET
    """Of a conversation with more to it than a request and its answer."""
    servers: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Whose tools it offers, where these are several servers; `server_id` is then that of the group."""

    @property
    def family(self) -> str:
        """The id of its original: one draws its models, whatever becomes of it."""
        return self.id.removesuffix(f"-{self.augmentation}")


class AxisScore(msgspec.Struct, frozen=True):
    """One of the seven reward axes (paper §2.1.5). `score` is in [0, 1]."""

    score: float
    reason: str


class InjectedFailure(msgspec.Struct, frozen=True):
    """A call whose result was replaced: `timeout`, `error`, `empty` or `rate_limit` (paper §2.1.4)."""

    call_id: str
    kind: str


class CallError(msgspec.Struct, frozen=True):
    """A call that failed by itself. `kind` is `unknown_tool`, `invalid_arguments`, `tool_error` (the tool says so), or
    how the sandbox ended it (`sandbox.outcomes`: `cpu_timeout`, `crash` …)."""

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
    """Of the axes that were judged: one without a call has no results to understand. Records of older versions have 1
    there."""
    reward: float | None
    """Mean of the axis scores; None where nothing was judged."""
    failures: list[InjectedFailure] = []
    """Which calls the injected failures were; records of older versions have only their number."""
    errors: list[CallError] = []
    """Which calls failed by themselves; records of older versions do not say."""
    needs: list[str] | None = None
    """The tools that its task names: the run called all of them. Empty: the task is deliberately for none, and the run
    called none. None: records of older versions, and foreign ones, do not say."""
    dialogue: Dialogue | msgspec.UnsetType = msgspec.UNSET
    """What it teaches beside calling tools, and what its user wanted; not there where that was one request."""
    servers: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Whose tools it offers, where these are several servers; `server_id` is then that of the group."""
    repaired: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET
    """Repairs that calls needed to be read, by call id (`core/loose_json.py`); not there where none did."""
    unfinished: bool | msgspec.UnsetType = msgspec.UNSET
    """Its last turn was broken off by a limit: that it ends there is not to be learnt. Not there where it was not."""
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET
    """Not there in records of older versions, and foreign ones."""

    def tools_once(self, spoken: int) -> list[ToolSpec]:
        """Those of `tools` that the agent had when the user had spoken so often."""
        lacks = self.dialogue.lacks(spoken) if self.dialogue and self.dialogue.returned else ()
        return [tool for tool in self.tools if tool.name not in lacks] if lacks else self.tools


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

Mode = Literal["unconditional", "question", "augmented", "imported", "world"]
"""Where a question comes from: a domain or a text, a given question, the tools of another environment, a foreign
record, or a world with state. Versions that know no worlds refuse those by this name."""


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
    check: str | msgspec.UnsetType = msgspec.UNSET
    """Source of a function `check(before, after)` over the rows of the environment's world: whether the state that was
    asked for is there. It runs in the sandbox only. Such a sub-task is solved by what calls leave behind, not by what
    they return; its `answer` is true, and is looked for nowhere."""

    @property
    def asks_state(self) -> bool:
        return self.check is not msgspec.UNSET


class QualityScores(msgspec.Struct, frozen=True):
    """The paper's four indicators (eq. 13-21), each in [0, 1]; None: there was nothing to judge."""

    dependency_consistency: float | None
    atomicity: float
    sequential_rationality: float
    completeness: float

    @property
    def mean(self) -> float:
        """Of those that were judged."""
        every = (self.dependency_consistency, self.atomicity, self.sequential_rationality, self.completeness)
        return fmean(one for one in every if one is not None)


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

    `rule` is the rule of `synthesis.core.matching` by which the output holds the answer (`number`, `date`, `string` …),
    or `state`, where the sub-question's own check decides.
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


Cell = str | int | float | bool
Rows = dict[str, dict[str, dict[str, Cell]]]
"""A world's state: table → id → column → value."""
ColumnType = Literal["string", "integer", "number", "boolean"]


class StateChange(msgspec.Struct, frozen=True):
    """A row that is otherwise than at the beginning; None where it was not there, or is there no more."""

    table: str
    id: str
    before: dict[str, Cell] | None
    after: dict[str, Cell] | None


class World(msgspec.Struct, frozen=True):
    """A small database that an episode's calls read and write; each episode begins with its own `rows`."""

    tables: dict[str, dict[str, ColumnType]]
    """The schema: table → column → type. Every row has every column."""
    rows: Rows
    code: str
    """A module, over the global `STATE` (the rows): a function for each of the tools, and `broken()`, the list of the
    invariants that do not hold."""
    changes: list[StateChange]
    """What differs after any of the reference calls: all else that an episode changes does harm."""
    open: list[str] = []
    """`table.column` of what the task leaves open, or what follows from other columns: no harm is seen in it."""


class ToolEnvironment(msgspec.Struct, frozen=True):
    """An executable, self-checking world for one question (paper §2.2).

    `tools` are the needed ones, or all of its world; `distractors` are irrelevant but executable, by band of embedding
    similarity (`high`, `medium`, `low`). Tool names are unique over both.
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
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET
    """Not there in records of older versions, and foreign ones."""
    world: World | msgspec.UnsetType = msgspec.UNSET
    """What the calls of an episode share and change; not there where each call stands alone."""


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
    return json_decoder(kind).decode(data)
