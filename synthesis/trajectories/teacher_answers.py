"""What the teacher answers in the trajectory pipeline: one struct a request, whose JSON schema the endpoint enforces.

Reasons stand before verdicts, so that a model argues before it decides. Verdicts are words, not numbers: nothing has to
be parsed out of a sentence. Call arguments are JSON text, as on OpenAI's wire: strict structured output allows no open
objects.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Grade = Literal["no", "partly", "yes"]
POINTS: dict[Grade, float] = {"no": 0.0, "partly": 0.5, "yes": 1.0}
Rating = Annotated[int, msgspec.Meta(ge=1, le=5)]


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

    reason: str
    question_quality: Rating
    scenario_realism: Rating
    tool_necessity: Rating


# ---------------------------------------------------------------------------------------------------------------------
# Interaction


class AgentCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object as text."""


class AgentTurn(msgspec.Struct, frozen=True):
    """One assistant turn: calls that do not depend on each other, or the final answer."""

    reasoning: str
    tool_calls: list[AgentCall]
    content: str


class EmulatedResult(msgspec.Struct, frozen=True):
    """What a tool of which only the document exists would have returned."""

    reasoning: str
    result: str
    """JSON text."""
    is_error: bool


# ---------------------------------------------------------------------------------------------------------------------
# The judged axes of the reward


class QueryUnderstandingScore(msgspec.Struct, frozen=True):
    """Whether the first assistant turn understands the request."""

    reason: str
    verdict: Literal["no", "yes"]


class QueryPlanningScore(msgspec.Struct, frozen=True):
    """Whether the first assistant turn's plan and calls lead to the answer."""

    reason: str
    verdict: Grade


class ToolUnderstandingScore(msgspec.Struct, frozen=True):
    """Whether the agent's reaction shows that it understood the last batch of tool results."""

    reason: str
    verdict: Grade


class ToolPlanningScore(msgspec.Struct, frozen=True):
    """Whether the calls of the last assistant turn are right, given the results so far."""

    reason: str
    verdict: Grade


class CallNecessity(msgspec.Struct, frozen=True):
    call_id: str
    reason: str
    necessary: bool


class ConcisenessScore(msgspec.Struct, frozen=True):
    """One entry for each call of the trajectory, in order."""

    calls: list[CallNecessity]


class FinalAnswerScore(msgspec.Struct, frozen=True):
    """Whether the last message solves the request, and whether it is faithful to the tool results."""

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
    AgentTurn,
    EmulatedResult,
    QueryUnderstandingScore,
    QueryPlanningScore,
    ToolUnderstandingScore,
    ToolPlanningScore,
    ConcisenessScore,
    FinalAnswerScore,
)
"""Every request of this pipeline; each has a prompt in `prompts/en` and `prompts/zh`."""
