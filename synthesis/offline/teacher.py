"""The offline teacher: a `Teacher` that answers by rules over real relational facts, with no model endpoint.

It is a mode of its own (relational synthesis): every answer it gives is computed from tables of well-kept packages, so
it is true and can be checked. Each track keeps its rules beside this file, one handler for each answer type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.records import Language, Message, ToolSpec
from synthesis.core.stages import rng_for
from synthesis.offline import behaviour_author, environment_author, trajectory_author, world_author
from synthesis.pipeline.teacher import TeacherError

T = TypeVar("T", bound=msgspec.Struct)

Handler = Callable[[Mapping[str, Any], Language, random.Random], msgspec.Struct]


class OfflineTeacher:
    """Dispatches a request to the handler that is named after its answer type."""

    BY_RULES = True

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {
            **trajectory_author.HANDLERS,
            **behaviour_author.HANDLERS,
            **environment_author.HANDLERS,
            **world_author.HANDLERS,
        }

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """See `pipeline.teacher.Teacher.ask`. A `ValueError` of a rule means that it has no true answer to give."""
        try:
            handler = self._handlers[answer.__name__]
        except KeyError:
            raise TeacherError(f"the offline teacher has no rule for {answer.__name__}") from None
        try:
            result = handler(variables, language, rng_for(seed, answer.__name__))
        except ValueError as error:
            raise TeacherError(f"{answer.__name__}: {error}") from error
        if not isinstance(result, answer):
            raise TypeError(f"the rule for {answer.__name__} returned a {type(result).__name__}")
        return result

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, language: Language, seed: int,
        sent: Sequence[dict[str, Any] | None] = (),
    ) -> AssistantTurn:  # fmt: skip
        """See `pipeline.teacher.Teacher.act`."""
        try:
            # "AgentTurn": how its draws have been named since the first version.
            return trajectory_author.agent(messages, tools, language, rng_for(seed, "AgentTurn"))
        except ValueError as error:
            raise TeacherError(f"the agent: {error}") from error
