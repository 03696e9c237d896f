"""An endpoint that Ray's workers share: one actor on the driver's machine makes every request of theirs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.progress import TRAFFIC, Traffic
from synthesis.core.rate_limits import STAGE, Spent
from synthesis.core.records import Language, Message, ToolSpec
from synthesis.core.stages import Stopped
from synthesis.pipeline.casting import Casting
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.teacher import OpenAITeacher, TeacherError

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

About = tuple[str, str | None]
"""For which stage something is asked, and for which record (`Casting`)."""


class EndpointActor:
    """Asks an endpoint for all workers."""

    COMMIT_SECONDS = 0.05

    def __init__(self, make: Callable[[], OpenAITeacher]) -> None:
        self._make = make
        self._made: OpenAITeacher | None = None
        self._commit: asyncio.Task[None] | None = None

    def described(self) -> tuple[Mapping[str, Any], Casting, Prompts]:
        teacher = self._teacher()
        return teacher.description, teacher.casting, teacher.prompts

    def traffic(self) -> Traffic:
        return TRAFFIC

    async def costs(self) -> Mapping[str, Spent]:
        return self._teacher().spent_by_stage

    async def answer(
        self, answer: type[T], prompt: str, language: Language, seed: int, about: About
    ) -> T | TeacherError | Stopped:
        """`OpenAITeacher.answer`, for a stage of the run and a record."""
        return await self._asked(lambda teacher: teacher.answer(answer, prompt, language, seed), about)

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], language: Language, seed: int, about: About
    ) -> AssistantTurn | TeacherError | Stopped:
        """`OpenAITeacher.act`, likewise."""
        return await self._asked(lambda teacher: teacher.act(messages, tools, language=language, seed=seed), about)

    async def _asked(self, ask: Callable[[OpenAITeacher], Awaitable[R]], about: About) -> R | TeacherError | Stopped:
        stage, record = about
        STAGE.set(stage)  # of this call alone
        teacher = self._teacher() if record is None else self._teacher().cast(record)
        given: R | TeacherError | Stopped
        try:
            given = await ask(teacher)
        except (TeacherError, Stopped) as problem:
            given = problem
        if teacher.mode == "record":
            # The journal is another process's: an answer that it may build on has to be on the disk before.
            self._commit = self._commit or asyncio.create_task(self._soon(teacher))
            await self._commit
        return given

    async def _soon(self, teacher: OpenAITeacher) -> None:
        await asyncio.sleep(self.COMMIT_SECONDS)  # one commit for many answers
        self._commit = None
        if teacher.recording is not None:
            teacher.recording.commit()

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()
            if self._made.recording is not None:
                self._made.recording.close()

    def _teacher(self) -> OpenAITeacher:
        self._made = self._made or self._make()
        return self._made


class SharedTeacher:
    """A `Teacher` that has its requests made by the actor of the endpoint."""

    def __init__(self, actor: Any, described: tuple[Mapping[str, Any], Casting, Prompts]) -> None:
        self._actor = actor
        self.description, self.casting, self.prompts = described
        self._about: str | None = None

    def cast(self, record: str) -> SharedTeacher:
        """See `OpenAITeacher.cast`."""
        teacher = copy.copy(self)
        teacher._about = record
        return teacher

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """See `OpenAITeacher.ask`."""
        prompt = self.prompts.render(answer, variables, language)
        given = await self._actor.answer.remote(answer, prompt, language, seed, (STAGE.get(), self._about))
        if isinstance(given, Exception):
            raise given
        return given

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, language: Language, seed: int
    ) -> AssistantTurn:
        """See `OpenAITeacher.act`."""
        given = await self._actor.act.remote(list(messages), list(tools), language, seed, (STAGE.get(), self._about))
        if isinstance(given, Exception):
            raise given
        return given
