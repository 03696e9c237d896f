"""Where a run's stages are worked on, and with what: in this process, or in Ray's workers (`ray_executor`).

A stage is a function `(record, context) -> records`. Its context is made, once in each process that works on records,
by a function of that process's `Resources`. Both can be pickled, so the same stage runs anywhere; what it needs beside
the record and the context is bound to it with `functools.partial`, and is sent once a stage, not with each record.

    async with executor.workers(partial(open_context, config=config)) as workers:
        result = await run_on(workers, "tasks", partial(write, servers=servers), seeds, concurrency=32, ...)

The journal, retries and the progress bar stay with `synthesis.core.stages.run_stage`, in the process of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from synthesis.core.stages import StageResult, run_stage
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.teacher import Teacher

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
        count: processes.
        teacher_name: the type of the teacher, for the datasets' cards.
    """

    count: int
    teacher_name: str

    def bound(
        self, function: Callable[[In, C_co], Awaitable[Sequence[Out]]], concurrency: int
    ) -> Callable[[In], Awaitable[Sequence[Any]]]:
        """The stage as `run_stage` wants it: outputs in a form of which the JSON is that of `Out`.

        Args:
            concurrency: records in work at most in each process.
        """
        ...


class Executor(Protocol):
    """Makes workers. `embedder` is for what the process of the run embeds itself."""

    embedder: Embedder

    def workers(self, make_context: MakeContext[C]) -> AbstractAsyncContextManager[Workers[C]]:
        """Workers, each with a context that is made there and closed at the end."""
        ...


class LocalExecutor:
    """Works in this process, on this event loop."""

    def __init__(self, teacher: Teacher, sandbox: Sandbox, embedder: Embedder | None = None) -> None:
        self.embedder = embedder or SentenceEmbedder()
        self._means = Resources(teacher, sandbox, self.embedder)

    @asynccontextmanager
    async def workers(self, make_context: MakeContext[C]) -> AsyncIterator[Workers[C]]:
        """See `Executor.workers`."""
        async with make_context(self._means) as context:
            yield _Here(context, type(self._means.teacher).__name__)


@dataclass
class _Here:
    context: Any
    teacher_name: str
    count: int = 1

    def bound(
        self, function: Callable[[In, C], Awaitable[Sequence[Out]]], concurrency: int
    ) -> Callable[[In], Awaitable[Sequence[Any]]]:
        return lambda item: function(item, self.context)


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
