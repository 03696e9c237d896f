"""Interface of the environments of rollouts: a question, tools and a score.

Environments of ours are records (`ToolEnvironment`): code in the sandbox, scored by rules (F1). Anything else is an
`Environment`: a user's object (`own_objects.py`), an MCP server, an OpenEnv server, a task of a verifiers taskset
(`synthesis/servers`). Each episode has its own session, which sees no other episode's state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.typed import convert_to
from sandbox.json_values import NotJsonError, to_json
from synthesis.core.agent_loop import Finish
from synthesis.core.final_answers import states_answer
from synthesis.core.records import Answer, Message, ToolEnvironment, ToolSpec, encode

_STATED: Final = str | int | float | bool | list[str | int | float | bool]


class ToolsUnavailable(Exception):
    """An environment failed for a reason that is not the policy's: the episode is masked."""


class EnvironmentDied(Exception):
    """A call has ended its environment: it timed out, or its process died. The episode is scored.

    The policy may have chosen the arguments for that. So the environment's own score is the lowest, and nothing is
    masked.
    """


class CallRecord(msgspec.Struct, frozen=True):
    """Record of one call.

    Attributes:
        turn: the assistant turn that made it, from 0.
        name: the called tool; empty when the call could not be read.
        outcome: the sandbox's outcome (`ok`, `tool_error`, ...), or that of `tool_results.refusal` (`malformed`,
            `unknown_tool`, `invalid_arguments`), or `bad_schema`: the tool's schema cannot be checked.
        output: text shown to the policy.
        solved: ids of the sub-questions whose answer the output contains.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    outcome: str
    output: str
    solved: list[int] = []

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True)
class PlayedEpisode:
    """A finished episode, as rewards see it.

    Attributes:
        environment: the episode's environment: the record, the environment, or the user's object behind it.
        expected: expected final answer, if there is exactly one.
        messages: the conversation, from the prompt on, with calls, results and thoughts.
        calls: in the order in which they were made, with their outcomes.
        finish: why it ended; `answered`: the model made no more calls.
        is_answered_with_calls: True if tools are offered and, for a record, a sub-question needs one.
    """

    environment: Any
    expected: Answer | None
    messages: Sequence[Message]
    calls: Sequence[CallRecord]
    finish: Finish
    is_answered_with_calls: bool = True

    @property
    def answer(self) -> str:
        """Return the model's last message, without its thoughts; "" if a limit ended the episode."""
        return self.messages[-1].content if self.finish == "answered" and self.messages else ""

    def says(self, value: Any) -> bool:
        """Return whether the final answer states a value and commits to it (`core.final_answers`).

        It is read in the `language` of the environment. Lists of guesses, negations and contradictions state nothing.

        Args:
            value: the expected value, as `expected_answer` takes it.

        Raises:
            InputError: no final answer can state the value.
        """
        return states_answer(self.answer, expected_answer(value), language_of(self.environment))


def expected_answer(value: Any) -> Answer:
    """Convert a user's value to an `Answer`.

    Args:
        value: a number, text, truth value or a list of these; one of numpy's, a date, a set or another type that
            `sandbox.json_values` converts to these; or an `Answer`, with a unit, a tolerance or aliases.

    Raises:
        InputError: no final answer can state the value.
    """
    stated = value.value if isinstance(value, Answer) else value
    try:
        plain = convert_to(to_json(stated), _STATED)
    except (NotJsonError, msgspec.ValidationError) as error:
        raise InputError(
            f"the expected answer is {_shown(stated)}; give a number, text, truth value or list of these"
        ) from error
    return msgspec.structs.replace(value, value=plain) if isinstance(value, Answer) else Answer(plain)


def _shown(value: Any) -> str:
    if callable(value):
        return f"the method {value.__name__}" if hasattr(value, "__name__") else "a function"
    try:
        return f"{value!r:.80}"
    except Exception:  # of the value's own methods
        return f"a {type(value).__name__}"


def language_of(environment: Any) -> str:
    """Return the ISO 639-1 code of a record's or an object's language; English if it has none."""
    return str(getattr(environment, "language", "en"))


class ToolAnswer(NamedTuple):
    """Result of a tool.

    Attributes:
        text: JSON, or any other text; it is shown as `tool_results.server_text` formats it.
        ok: True if the call succeeded; else the text is the error, and the policy is shown that.
    """

    text: str
    ok: bool = True


class EnvironmentSession(Protocol):
    """One episode of an environment. Its methods are called one after the other."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Execute a call to an existing tool, with arguments that fit its schema.

        Raises:
            ToolsUnavailable: it could not be tried.
        """
        ...

    async def score(self, episode: PlayedEpisode) -> float:
        """Return the score of the episode, in [0, 1]; called once, after its end.

        Raises:
            ToolsUnavailable: there is no score.
        """
        ...

    async def close(self) -> None:
        """Release the resources of the episode; called once, whatever has happened before."""
        ...


class Environment(Protocol):
    """A question, tools, and sessions to play in."""

    @property
    def id(self) -> str:
        """Name that is unique in a run."""
        ...

    @property
    def prompt(self) -> Sequence[Message]:
        """Messages at the start of an episode: a user's message, or a system's and a user's."""
        ...

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """Tools that it offers, with unique names; may be empty."""
        ...

    @property
    def answer(self) -> Answer | None:
        """Expected final answer, if there is exactly one; the reward `answer` compares with it."""
        ...

    @property
    def subject(self) -> Any:
        """Object that reward functions receive as the episode's environment."""
        ...

    async def begin(self) -> EnvironmentSession:
        """Start a new episode.

        Raises:
            ToolsUnavailable: it cannot be started.
        """
        ...


AnyEnvironment = ToolEnvironment | Environment


def fingerprint(environment: AnyEnvironment) -> bytes:
    """Return the digest by which a resumed run notices that an environment has changed: of a record all of it; of any
    other environment the prompt and tools shown at the start, and the solve rate, if it has one."""
    if isinstance(environment, ToolEnvironment):
        return hashlib.sha256(encode(environment)).digest()
    shown = [environment.id, msgspec.to_builtins([*environment.prompt]), msgspec.to_builtins([*environment.tools])]
    if (rate := solve_rate_of(environment)) is not None:
        shown.append(rate)
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).digest()


def prompt_of(environment: AnyEnvironment) -> Sequence[Message]:
    """Return the messages that an episode starts with."""
    if isinstance(environment, ToolEnvironment):
        return [Message("user", environment.question)]
    return environment.prompt


def kind_of(environment: AnyEnvironment) -> str:
    """Return the kind of task, by which results are reported: the structure of a record's question, the `kind` of
    another environment that has one, else the name of its class."""
    if isinstance(environment, ToolEnvironment):
        return environment.structure
    kind = getattr(environment, "kind", None)
    return kind if isinstance(kind, str) and kind else type(environment).__name__


class RatedEnvironment:
    """An environment that is no record, with its recorded solve rate; the rest is delegated to the environment."""

    def __init__(self, environment: Environment, solve_rate: float) -> None:
        self._environment, self.solve_rate = environment, solve_rate
        self.id, self.prompt, self.tools = environment.id, environment.prompt, environment.tools
        self.answer, self.subject, self.kind = environment.answer, environment.subject, kind_of(environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def begin(self) -> EnvironmentSession:
        """Start an episode of the environment. Raises `ToolsUnavailable`."""
        return await self._environment.begin()


def solve_rate_of(environment: AnyEnvironment) -> float | None:
    """Return the recorded solve rate, 0 to 1; None if none was measured (`astra difficulty`)."""
    if isinstance(environment, ToolEnvironment):
        return None if environment.difficulty is None else environment.difficulty.solve_rate
    return environment.solve_rate if isinstance(environment, RatedEnvironment) else None
