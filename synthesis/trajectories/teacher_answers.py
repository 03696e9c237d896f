"""Answers of the teacher in the trajectory pipeline: one struct a request, whose JSON schema the endpoint enforces.

The docstrings of the structs are in these schemas, so the teacher reads them. Reasons stand before verdicts, so that a
model argues before it decides. Verdicts are words, not numbers, so nothing is parsed out of a sentence. Call arguments
are JSON text, as in OpenAI's API: strict structured output allows no open objects.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from synthesis.core.chat_format import parse_json
from synthesis.core.endpoint_settings import Role

Grade = Literal["no", "partly", "yes"]
POINTS: dict[Grade, float] = {"no": 0.0, "partly": 0.5, "yes": 1.0}
Rating = Annotated[int, msgspec.Meta(ge=1, le=5)]
JsonText = Annotated[str, msgspec.Meta(extra={"json": True})]
"""A text that holds JSON; `structured_output` takes the JSON itself for it too."""


# ---------------------------------------------------------------------------------------------------------------------
# Chains


class ProposedTask(msgspec.Struct, frozen=True):
    """A task, and the tools it needs in order: each call needs what an earlier one returned."""

    task: str
    chain: list[str]


class TaskChainProposals(msgspec.Struct, frozen=True):
    """Tasks that one server supports."""

    pairs: list[ProposedTask]


class ChainVote(msgspec.Struct, frozen=True):
    """Whether one sensible task needs exactly this chain."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    reason: str
    user_query: str
    valid: bool


class BackTranslatedQuery(msgspec.Struct, frozen=True):
    """What a user would have asked for to make this chain necessary; `meaningful` is false when nobody would."""

    reason: str
    query: str
    meaningful: bool


class BackTranslatedChain(msgspec.Struct, frozen=True):
    """The chain that a query needs, found without knowing the one it was made from."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    plan: str
    chain: list[str]


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


class ChainTask(msgspec.Struct, frozen=True):
    """A user's request that needs exactly the given chain."""

    analysis: str
    question: str


class ServerTask(msgspec.Struct, frozen=True):
    """A user's request that needs the wanted number of different tools of one server."""

    analysis: str
    tools: list[str]
    question: str


class TaskVariation(msgspec.Struct, frozen=True):
    """The same need in another form: another setting, more constraints, or another person who asks."""

    analysis: str
    question: str


class TaskRating(msgspec.Struct, frozen=True):
    """1 (worst) to 5 (best)."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    reason: str
    question_quality: Rating
    scenario_realism: Rating
    tool_necessity: Rating


# ---------------------------------------------------------------------------------------------------------------------
# Conversations that are more than a request and its answer

Standing = Literal["servable", "tool_missing", "value_missing", "impossible", "forbidden", "unconfirmed"]
"""Standing of a user's first message, given the agent's tools and instructions. It can be served at once, no
tool does it, or a value is missing that only the user has. Or nothing could do it, the instructions forbid it, or the
user must agree first."""


class RestrainedTask(msgspec.Struct, frozen=True):
    """A request of which calling at once would be wrong.

    `when_asked` is what the user says when the agent asks, one at a time; `policy` what the agent is told, or "".
    """

    analysis: str
    question: str
    tools: list[str]
    when_asked: list[str]
    policy: str


class PlannedGoal(msgspec.Struct, frozen=True):
    """One thing that a user wants, as it says it; see `records.Goal`."""

    says: str
    tools: list[str]
    when_asked: list[str]


class DialoguePlan(msgspec.Struct, frozen=True):
    """What a user wants over several turns, in order; `policy` is what the agent is told, or ""."""

    analysis: str
    goals: list[PlannedGoal]
    policy: str


class ConductRating(msgspec.Struct, frozen=True):
    """How a conversation's opening stands; the ratings are 1 (worst) to 5 (best)."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "author"

    reason: str
    standing: Standing
    question_quality: Rating
    scenario_realism: Rating


class UserTurn(msgspec.Struct, frozen=True):
    """What the simulated user says next. `finished`: it wants nothing more; `message` is then its last, or empty."""

    ROLE: ClassVar[Role] = "user"

    reasoning: str
    message: str
    finished: bool


class UserScore(msgspec.Struct, frozen=True):
    """Whether the simulated user kept to its goals."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "user"

    reason: str
    verdict: Literal["fine", "gave_away", "contradicted", "invented", "stopped_early"]


# ---------------------------------------------------------------------------------------------------------------------
# Interaction


class EmulatedResult(msgspec.Struct, frozen=True):
    """What a tool of which only the document exists would have returned."""

    ROLE: ClassVar[Role] = "emulator"

    reasoning: str
    result: JsonText
    is_error: bool

    def check(self) -> None:
        """Raises `ValueError`: the result is no JSON."""
        try:
            parse_json(self.result)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`result` is not JSON: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The judged axes of the reward


class QueryUnderstandingScore(msgspec.Struct, frozen=True):
    """Whether the first assistant turn understands the request."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    reason: str
    verdict: Literal["no", "yes"]


class QueryPlanningScore(msgspec.Struct, frozen=True):
    """Whether the first assistant turn's plan and calls lead to the answer."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    reason: str
    verdict: Grade


class ToolUnderstandingScore(msgspec.Struct, frozen=True):
    """Whether the agent's reaction shows that it understood the last batch of tool results."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    reason: str
    verdict: Grade


class ToolPlanningScore(msgspec.Struct, frozen=True):
    """Whether the calls of the last assistant turn are right, given the results so far."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    reason: str
    verdict: Grade


class CallNecessity(msgspec.Struct, frozen=True):
    call_id: str
    reason: str
    necessary: bool


class ConcisenessScore(msgspec.Struct, frozen=True):
    """One entry for each call of the trajectory, in order."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    calls: list[CallNecessity]


class FinalAnswerScore(msgspec.Struct, frozen=True):
    """Whether the last message solves the request, and whether it is faithful to the tool results."""

    ROLE: ClassVar[Role] = "judge"
    JUDGES: ClassVar[Role] = "agent"

    reason: str
    solves: Grade
    faithful: Grade


ANSWERS: tuple[type[msgspec.Struct], ...] = (
    TaskChainProposals,
    ChainVote,
    BackTranslatedQuery,
    BackTranslatedChain,
    ChainTask,
    ServerTask,
    TaskVariation,
    TaskRating,
    RestrainedTask,
    DialoguePlan,
    ConductRating,
    UserTurn,
    UserScore,
    EmulatedResult,
    QueryUnderstandingScore,
    QueryPlanningScore,
    ToolUnderstandingScore,
    ToolPlanningScore,
    ConcisenessScore,
    FinalAnswerScore,
)
"""Every request of this pipeline; each has a prompt in `prompts/en` and `prompts/zh`."""
