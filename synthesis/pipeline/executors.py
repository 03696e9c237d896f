"""Where a run's stages are worked on, and with what: in this process, or in Ray's workers (`ray_executor`).

A stage is a function `(record, context) -> records`. Its context is made, once in each process that works on records,
by a function of that process's `Resources`. Both can be pickled, so the same stage runs anywhere; what it needs beside
the record and the context is bound to it with `functools.partial`, and is sent once a stage, not with each record.

    async with executor.workers(partial(open_context, config=config)) as workers:
        result = await run_on(workers, "tasks", partial(write, servers=servers), seeds, concurrency=32, ...)

The journal, retries and the progress bar stay with `synthesis.core.stages.run_stage`, in the process of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from synthesis.core.rate_limits import Spent
from synthesis.core.records import Language
from synthesis.core.refusals import InputError
from synthesis.core.stages import StageResult, run_stage
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.pipeline.preview import Preview
from synthesis.pipeline.teacher import OpenAITeacher, Teacher, description

if TYPE_CHECKING:
    from sandbox import Sandbox

In = TypeVar("In")
Out = TypeVar("Out")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


@dataclass(frozen=True)
class Resources:
    """What one process works with.

    Attributes:
        teacher: whom its stages ask.
        sandbox: an open one.
        embedder: of tool documents.
        worker: the process's number among Ray's workers; None in the process of the run.
    """

    teacher: Teacher
    sandbox: Sandbox
    embedder: Embedder
    worker: int | None = None


MakeContext = Callable[[Resources], AbstractAsyncContextManager[C]]


class Workers(Protocol[C_co]):
    """Whoever works on records, each with a context.

    Attributes:
        count: processes, as many as there are at the moment.
        teacher: see `pipeline.teacher.description`.
    """

    @property
    def count(self) -> int: ...

    @property
    def teacher(self) -> Mapping[str, Any]: ...

    def bound(
        self, function: Callable[[In, C_co], Awaitable[Sequence[Out]]], concurrency: int
    ) -> Callable[[In], Awaitable[Sequence[Any]]]:
        """The stage as `run_stage` wants it: outputs in a form of which the JSON is that of `Out`.

        Args:
            concurrency: records in work at most in each process.
        """
        ...

    async def costs(self) -> Mapping[str, Spent]:
        """What the teacher's endpoint was asked, by stage, in this run and those before it; empty without one."""
        ...


class Executor(Protocol):
    """Makes workers.

    Attributes:
        embedder: for what the process of the run embeds itself.
        by_rules: whether the teacher follows rules, as the offline teacher does, and is no model.
    """

    embedder: Embedder
    by_rules: bool

    def workers(self, make_context: MakeContext[C]) -> AbstractAsyncContextManager[Workers[C]]:
        """Workers, each with a context that is made there and closed at the end."""
        ...


class LocalExecutor:
    """Works in this process, on this event loop."""

    def __init__(self, teacher: Teacher, sandbox: Sandbox, embedder: Embedder | None = None) -> None:
        self.embedder = embedder or SentenceEmbedder()
        self.by_rules = follows_rules(teacher)
        self._means = Resources(teacher, sandbox, self.embedder)

    def watch(self, preview: Preview) -> None:
        """Let a preview see what is asked of endpoints."""
        if isinstance(self._means.teacher, OpenAITeacher):
            for endpoint in self._means.teacher.endpoints:
                endpoint.watch = preview.note

    @asynccontextmanager
    async def workers(self, make_context: MakeContext[C]) -> AsyncIterator[Workers[C]]:
        """See `Executor.workers`."""
        teacher = self._means.teacher
        try:
            async with make_context(self._means) as context:
                yield _Here(context, teacher)
        finally:
            if isinstance(teacher, OpenAITeacher):  # it opens its connections again when it is asked again
                await teacher.close()


def follows_rules(teacher: object) -> bool:
    """What a teacher, or its class, says of itself in `BY_RULES`; a model says nothing."""
    return bool(getattr(teacher, "BY_RULES", False))


def check_spoken(languages: Mapping[Language, float], *, by_rules: bool) -> None:
    """Refuse languages that the teacher cannot write.

    Args:
        languages: weights; 0 asks for none.

    Raises:
        InputError: rules know no such language.
    """
    foreign = [one for one, weight in languages.items() if weight and one not in PACKAGED_LANGUAGES]
    if by_rules and foreign:
        raise InputError(
            f"languages: the offline teacher writes {' and '.join(PACKAGED_LANGUAGES)}, not {', '.join(foreign)}; "
            "leave it out, or give --teacher_url"
        )


@dataclass
class _Here:
    context: Any
    asked: Teacher
    count: int = 1

    @property
    def teacher(self) -> Mapping[str, Any]:
        return description(self.asked)

    def bound(
        self, function: Callable[[In, C], Awaitable[Sequence[Out]]], concurrency: int
    ) -> Callable[[In], Awaitable[Sequence[Any]]]:
        return lambda item: function(item, self.context)

    async def costs(self) -> Mapping[str, Spent]:
        return self.asked.spent_by_stage if isinstance(self.asked, OpenAITeacher) else {}


async def run_on(
    workers: Workers[C],
    name: str,
    function: Callable[[In, C], Awaitable[Sequence[Out]]],
    inputs: Iterable[In],
    *,
    concurrency: int,
    **options: Any,
) -> StageResult[Out]:
    """`run_stage` on workers.

    Args:
        concurrency: records in work at a time in each of them.
        options: those of `run_stage`.
    """
    bound = workers.bound(function, concurrency)
    return await run_stage(name, bound, inputs, concurrency=concurrency * workers.count, **options)
