"""What the stages of a run are given, and the one way in which they ask the teacher."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from synthesis.core.records import Language
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.teacher import Teacher, TeacherError

if TYPE_CHECKING:
    from sandbox import Sandbox

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

Key = str | tuple[object, ...]
"""What a request is about: a text, or parts that have one."""


class TrackSettings(Protocol):
    """What every track's configuration has.

    Attributes:
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
    """

    @property
    def attempts(self) -> int: ...


S = TypeVar("S", bound=TrackSettings)


@dataclass(frozen=True)
class Context(Generic[S]):
    """What every stage of one run is given; each track adds its own."""

    config: S
    teacher: Teacher
    sandbox: Sandbox
    seed: int
    embedder: Embedder = field(default_factory=SentenceEmbedder)

    async def ask(
        self,
        answer: type[T],
        variables: Mapping[str, Any],
        *,
        language: Language,
        key: Key,
        check: Callable[[T], Awaitable[R]],
        attempts: int | None = None,
        failed: str = "teacher_failed",
    ) -> R:
        """Ask the teacher until `check` accepts: its `Rejected` goes back to the teacher as the variable `feedback`.

        Args:
            key: what the request is about; see `request_seed`.
            check: turns the answer into what the stage wants, or raises `Rejected`.
            attempts: instead of the configured number.
            failed: the reason of a rejection where the teacher has no valid answer.

        Raises:
            Rejected: `failed`, or what the check said of the last attempt.
        """
        feedback = str(variables.get("feedback", ""))
        for attempt in range(attempts or self.config.attempts):
            seed = self.request_seed(answer, key, attempt)
            try:
                given = await self.teacher.ask(
                    answer, {**variables, "feedback": feedback}, language=language, seed=seed
                )
            except TeacherError as error:
                raise Rejected(failed, str(error)) from error
            try:
                return await check(given)
            except Rejected as rejection:
                if rejection.reason == "teacher_failed":  # of a request that the check made: nothing to mend here
                    raise
                last = rejection
                feedback = rejection.detail or rejection.reason
        raise last

    def request_seed(self, answer: type[msgspec.Struct], key: Key, attempt: int) -> int:
        """The seed of a request: of the run's seed, the answer's type, what it is about and the attempt."""
        return rng_for(self.seed, answer.__name__, key, attempt).getrandbits(31)


async def accept(given: T) -> T:
    """The check that takes every answer."""
    return given
