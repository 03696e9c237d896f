"""Typed records: the one contract between `synthesis` (which writes them) and `astra_jax` (which reads them).

Every record is a `msgspec.Struct`, JSON-encoded, one per ArrayRecord entry (`group_size:1`, so that Grain can read at
random). Messages and tools follow OpenAI's chat-completions format. Reading and writing datasets, with their
`dataset_card.json`, is `synthesis.core.datasets`.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from astra_jax.base.settings import Bound
from synthesis.core.chat_messages import Message as Message
from synthesis.core.chat_messages import ToolCall as ToolCall
from synthesis.core.compat import decode_stored
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

SCHEMA_VERSION = 1
"""Increased by one when a record changes in a way that old readers would misread."""

Language = Literal[
    "af", "ar", "az", "be", "bg", "bn", "bs", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi",
    "fr", "ga", "gl", "gu", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "ka", "kk", "km", "kn", "ko", "ky",
    "lo", "lt", "lv", "mk", "ml", "mn", "mr", "ms", "my", "ne", "nl", "no", "pa", "pl", "ps", "pt", "ro", "ru", "si",
    "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "uz", "vi", "zh",
]  # fmt: skip
"""ISO 639-1 code of a language. The offline teacher and the facts know `en` and `zh`."""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Origin of a record: the models, the source and the code that made it. Fields that do not apply are left out.

    Attributes:
        teacher: the type of the teacher that answered.
        model: its name, as it is served.
        endpoint: URL of the teacher, without secrets.
        prompts: digest of all prompts.
        temperature: sampling temperature.
        max_tokens: limit for one answer.
        license: license of the record's source, as the source's document or the settings name it.
        code: commit or version of this code.
        models: role → model, where several models took part; the judge judged the record's input.
        document: place of the text that the record is about, in one of the user's documents.
    """

    teacher: str
    model: str = ""
    endpoint: str = ""
    prompts: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    license: str = ""
    code: str = ""
    models: dict[str, str] = {}
    document: DocumentPassage | msgspec.UnsetType = msgspec.UNSET

    @property
    def judged_its_own(self) -> bool:
        """Return whether the judge is the model that wrote the record: the agent if there is one, else the author."""
        writer = self.models.get("agent", self.models.get("author"))
        return writer is not None and self.models.get("judge") == writer


class DocumentPassage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Place of the text that a question is about.

    Attributes:
        file: name of the document, as the user gave it.
        heading: headings above the text, from the outermost; "" without headings.
        page: page of a PDF, from 1; 0 for other documents.
        start: first character of the text in the file, or in the page's text, from 0; a line end is one character.
        end: first character after it.
    """

    file: str
    heading: str = ""
    page: int = 0
    start: int = 0
    end: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# Tools and servers


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool in OpenAI's function form; `name` matches `[a-zA-Z0-9_-]{1,64}`, `parameters` is an object schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """Return the `tools=[...]` entry of a chat-completions request."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class CodeTool(msgspec.Struct, frozen=True):
    """A tool together with the Python module that implements it.

    The module defines a function of the tool's name that takes the schema's properties as keyword arguments and returns
    a JSON value. It runs in the sandbox only. Empty code: the tool is a function of its environment's world.
    """

    spec: ToolSpec
    code: str


class ToolServer(msgspec.Struct, frozen=True):
    """Tools of one origin, normalised (paper §2.1.1), or the tools of a group of servers for tasks over several."""

    id: str
    title: str
    description: str
    domain: str
    language: Language
    tools: list[ToolSpec]
    execution: Execution
    license: str = ""
    """License as the server or its document names it; "" if it names none."""
    resources: list[ServedResource] | msgspec.UnsetType = msgspec.UNSET
    """Resources of a running server; unset if it offers none. Nothing reads them: tasks are about tools."""
    prompts: list[ServedPrompt] | msgspec.UnsetType = msgspec.UNSET

    def origin(self, tool: str) -> ToolOrigin:
        """Return the server of a tool: this one, or a member of this group. An unknown name belongs to this server."""
        own = ToolOrigin(self.id, tool)
        return self.execution.tools.get(tool, own) if isinstance(self.execution, GroupExecution) else own

    @property
    def servers(self) -> list[str]:
        """Return the ids of the servers whose tools it has, in the order of the tools; a group has more than one."""
        return list(dict.fromkeys(self.origin(tool.name).server_id for tool in self.tools))


# ---------------------------------------------------------------------------------------------------------------------
# The SFT track: chains, tasks, trajectories


class Verdict(msgspec.Struct, frozen=True):
    """Decision of one verification operator, with the reason."""

    valid: bool
    reason: str


class ToolChain(msgspec.Struct, frozen=True):
    """An ordered tool sequence, sampled by a weighted walk over its server's transition graph (paper §2.1.2)."""

    id: str
    server_id: str
    tools: list[str]
    weight: float
    """Product of the walk's transition probabilities."""
    verdicts: dict[str, Verdict]


Score = Annotated[int, Bound(least=1, most=5)]


class TaskScores(msgspec.Struct, frozen=True):
    """Scores of a task, each from 1 (worst) to 5 (best) (paper §2.1.3)."""

    question_quality: Score
    scenario_realism: Score
    tool_necessity: Score


Behaviour = Literal[
    "missing_tool", "irrelevant_tools", "missing_parameter", "infeasible", "refused", "confirmation", "done",
    "dialogue", "later_tool",
]  # fmt: skip
"""Behaviour that a conversation teaches beside calling tools. Make no call: the tool is missing, all tools are off
topic, no tool can do it (`infeasible`), or the policy forbids it (`refused`). Ask: for a missing value, or to confirm a
change. Stop when the user has everything (`done`). Serve a user over several turns. Call a missing tool once it is
there."""


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that a simulated user wants.

    Attributes:
        utterance: the user's request.
        tools: needed for the goal; empty: no tool may be called for it.
        when_asked: replies that the user gives only when the agent asks, one at a time: a value, a yes, another wish.
    """

    utterance: str
    tools: list[str] = []
    when_asked: list[str] = []


class Dialogue(msgspec.Struct, frozen=True, omit_defaults=True):
    """Plan of a conversation, fixed before it starts.

    Attributes:
        goals: of the user, in order; `utterance` of the first opens the conversation.
        user_turns: maximum number of user messages; 1: nobody answers the agent.
        persona: who the user is.
        policy: instructions in the agent's system message.
        forbids: tools that the policy forbids; a goal of one has no tools.
        writes: tools that change something; the user must agree to such a call first.
        hidden_tools: tools of the server that the agent is not offered (see `restored_at_turn`).
        restored_at_turn: number of the user message, from 2, with which `hidden_tools` are offered; 0: never.
        thanks: the user says at the end that it has all.
    """

    behaviour: Behaviour
    goals: list[Goal]
    user_turns: int = 1
    persona: str = ""
    policy: str = ""
    writes: list[str] = []
    hidden_tools: list[str] = []
    thanks: bool = False
    restored_at_turn: int = 0
    forbids: list[str] = []

    def hidden_at(self, user_turns: int) -> list[str]:
        """Return the names of the tools that the agent is not offered after so many user messages."""
        return [] if self.restored_at_turn and user_turns >= self.restored_at_turn else self.hidden_tools


class Task(msgspec.Struct, frozen=True):
    """A user request for one server, or for a group of them.

    `tools` is the needed chain (mode `chain`), the expected set (`server`), or the expected set of all goals
    (`dialogue`). It is empty if the task deliberately needs no tool (`no_tool`).
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
    """Plan of the conversation, if it is more than a request and its answer."""
    servers: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the servers whose tools the task offers, if there are several; `server_id` is then the id of the group."""

    @property
    def family(self) -> str:
        """Return the id of the original task, which selects the models for the original and all its variations."""
        return self.id.removesuffix(f"-{self.augmentation}")


class AxisScore(msgspec.Struct, frozen=True):
    """Score on one of the seven reward axes (paper §2.1.5). `score` is in [0, 1]."""

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
    """Scores of the judged axes. A trajectory without calls has no results to understand, so that axis is absent.
    Records of older versions have 1 there."""
    reward: float | None
    """Mean of the axis scores; None if nothing was judged."""
    failures: list[InjectedFailure] = []
    """The injected failures, one entry a call; records of older versions have only their number."""
    errors: list[CallError] = []
    """The calls that failed by themselves; records of older versions do not have them."""
    needs: list[str] | None = None
    """Tools that the task names; the run called all of them. Empty: the task deliberately needs none, and the run
    called none. None: unknown, in foreign records and those of older versions."""
    dialogue: Dialogue | msgspec.UnsetType = msgspec.UNSET
    """Plan of the conversation, with its goals; unset for a single request."""
    servers: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the servers whose tools are offered, if there are several; `server_id` is then the id of the group."""
    repaired: dict[str, list[str]] | msgspec.UnsetType = msgspec.UNSET
    """Call id → repairs that were needed to read the call (`core/loose_json.py`); unset if no call needed one."""
    unfinished: bool | msgspec.UnsetType = msgspec.UNSET
    """True if a limit cut off the last turn, whose end must not be learnt; unset otherwise."""
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET
    """Unset in foreign records and in those of older versions."""

    def tools_once(self, spoken: int) -> list[ToolSpec]:
        """Return the tools of `tools` that the agent has after `spoken` user messages."""
        hidden = self.dialogue.hidden_at(spoken) if self.dialogue and self.dialogue.restored_at_turn else ()
        return [tool for tool in self.tools if tool.name not in hidden] if hidden else self.tools


# ---------------------------------------------------------------------------------------------------------------------
# The RL track: decompositions, environments


class Answer(msgspec.Struct, frozen=True):
    """A typed expected value; `synthesis.core.matching` decides whether a tool's output contains it."""

    value: str | int | float | bool | list[str]
    unit: str = ""
    tolerance: float = 0.0
    """Absolute tolerance; for numbers only."""
    aliases: list[str] = []


Structure = Literal["single_hop", "parallel_single_hop", "multi_hop", "parallel_multi_hop"]

Mode = Literal["unconditional", "question", "augmented", "imported", "world"]
"""Source of a question: a domain or a text, a given question, the tools of another environment, a foreign record, or a
world with state. Older versions, which do not know worlds, refuse `world` by this name."""


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
    """Source of a function `check(before, after)` over the rows of the environment's world. It returns whether the
    wanted state is reached, and runs in the sandbox only. Such a sub-task is solved by the state after the calls, not
    by their output: its `answer` is true, and no output is searched for it."""

    @property
    def asks_state(self) -> bool:
        return self.check is not msgspec.UNSET


class QualityScores(msgspec.Struct, frozen=True):
    """The paper's four indicators (eq. 13-21), each in [0, 1]; None: nothing to judge."""

    dependency_consistency: float | None
    atomicity: float
    sequential_rationality: float
    completeness: float

    @property
    def mean(self) -> float:
        """Return the mean of the indicators that were judged."""
        every = (self.dependency_consistency, self.atomicity, self.sequential_rationality, self.completeness)
        return fmean(one for one in every if one is not None)


class Decomposition(msgspec.Struct, frozen=True):
    """A question, its answer, and the sub-questions that lead to the answer."""

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
    """The question's structure without entities, e.g. `capital_of>population_of`; splits keep structures apart too."""
    quality: QualityScores | None = None


class ReferenceCall(msgspec.Struct, frozen=True):
    """The call that answers one sub-question, proven in the sandbox.

    `rule` is the rule of `synthesis.core.matching` by which the output contains the answer (`number`, `date`, `string`
    …). It is `state` if the sub-question's own check decides.
    """

    sub_question: int
    tool: str
    arguments: dict[str, Any]
    output: Any
    rule: str = ""


class Difficulty(msgspec.Struct, frozen=True):
    """Difficulty of an environment, known before training; used for curricula."""

    hops: int
    """Number of calls on the longest path to the answer."""
    parallel_share: float
    """Share of the sub-questions that share their hop level with another, 0 to 1."""
    distractor_closeness: float
    """Largest cosine similarity of an irrelevant tool's document to a needed one's, -1 to 1; 0 without any."""
    solve_rate: float | None = None
    """Mean F1 reward of a policy over its episodes, 0 to 1; None until it is measured."""
    policy: str = ""
    """Name of the policy of `solve_rate`."""


Cell = str | int | float | bool
Rows = dict[str, dict[str, dict[str, Cell]]]
"""State of a world: table → id → column → value."""
ColumnType = Literal["string", "integer", "number", "boolean"]


class StateChange(msgspec.Struct, frozen=True):
    """A row that differs from the initial state. None: the row was absent before, or is absent after."""

    table: str
    id: str
    before: dict[str, Cell] | None
    after: dict[str, Cell] | None


class World(msgspec.Struct, frozen=True):
    """A small database that the calls of an episode read and write; each episode starts with its own copy of `rows`."""

    tables: dict[str, dict[str, ColumnType]]
    """The schema: table → column → type. Every row has every column."""
    rows: Rows
    code: str
    """Source of a module over the global `STATE` (the rows). It has one function per tool, and `broken()`, which
    returns the list of violated invariants."""
    changes: list[StateChange]
    """Differences after all reference calls; any other change that an episode makes is harm."""
    open: list[str] = []
    """`table.column` of columns that the task leaves open or that follow from others; changes there are no harm."""


class ToolEnvironment(msgspec.Struct, frozen=True):
    """An executable, self-checking environment for one question (paper §2.2).

    `tools` are the needed tools, or all tools of its world; `distractors` are irrelevant but executable, by band of
    embedding similarity (`high`, `medium`, `low`). Tool names are unique over both.
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
    """Unset in foreign records and in those of older versions."""
    world: World | msgspec.UnsetType = msgspec.UNSET
    """State that the calls of an episode share and change; unset if the calls are independent."""


Record = TypeVar("Record", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """Return canonical JSON bytes: equal records always give equal bytes."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[Record]) -> Record:
    """Decode one record.

    Raises:
        msgspec.ValidationError: the bytes are JSON but not a `kind`; the message names the field.
        msgspec.DecodeError: the bytes are not JSON.
    """
    return decode_stored(data, kind)
