"""Context of the stages of a run: its teacher and sandbox, and the one way to ask the teacher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import msgspec

from astra_jax.base.versions import code_version
from synthesis.core.endpoint_settings import Role
from synthesis.core.markup import markup_in
from synthesis.core.openai_messages import texts_of
from synthesis.core.records import Language, Provenance
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.model_router import role_of
from synthesis.pipeline.ray_cluster import RayCluster
from synthesis.pipeline.teacher import Teacher, TeacherError, description, models_of, route

if TYPE_CHECKING:
    from sandbox import Sandbox

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

Key = str | tuple[object, ...]
"""Subject of a request: a text, or parts that have one."""


class PipelineSettings(Protocol):
    """Settings of every pipeline.

    Attributes:
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
    """

    @property
    def attempts(self) -> int: ...


S = TypeVar("S", bound=PipelineSettings)


@dataclass(frozen=True)
class Context(Generic[S]):
    """Context of every stage of one run; each pipeline adds its own fields."""

    config: S
    teacher: Teacher
    sandbox: Sandbox | RayCluster
    seed: int
    embedder: Embedder = field(default_factory=SentenceEmbedder)

    def route(self, record: str) -> Self:
        """Return the context for one record, with the models that are chosen for it."""
        return replace(self, teacher=route(self.teacher, record))

    def provenance(self, license: str, record: str, roles: Sequence[Role]) -> Provenance:
        """Return the provenance of a record that this stage makes.

        Args:
            license: license of its source.
            record: the record that its models were chosen for; see `route`.
            roles: roles that took part in it. The first one wrote the text that is judged.
        """
        found = description(self.teacher)
        given = ("model", "endpoint", "prompts", "temperature", "max_tokens")
        of_model = {name: found[name] for name in given if name in found}
        drawn = models_of(self.teacher, record, roles[0])
        models: dict[str, str] = {role: drawn[role] for role in roles if role in drawn}
        return Provenance(found["name"], **of_model, license=license, code=code_version(), models=models)

    async def in_sandbox(self, work: Callable[..., Awaitable[R]], *arguments: Any) -> R:
        """Await `work(*arguments, sandbox)`; see `in_sandbox`."""
        return await in_sandbox(self.sandbox, work, *arguments)

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
        """Ask the teacher until `check` accepts: its `Rejected` is sent to the teacher as the variable `feedback`.

        Args:
            key: subject of the request; see `request_seed`.
            check: converts the answer to the stage's result, or raises `Rejected`.
            attempts: replaces the configured number.
            failed: reason of a rejection if the teacher has no valid answer.

        Raises:
            Rejected: `failed`, or the check's rejection of the last attempt.
        """
        seeds = (self.request_seed(answer, key, attempt) for attempt in range(attempts or self.config.attempts))
        return await ask_until(
            self.teacher, answer, variables, language=language, seeds=seeds, check=check, failed=failed
        )

    def request_seed(self, answer: type[msgspec.Struct], key: Key, attempt: int) -> int:
        """Return the seed of a request, from the run's seed, the answer's type, the subject and the attempt."""
        return rng_for(self.seed, answer.__name__, key, attempt).getrandbits(31)


async def in_sandbox(sandbox: Sandbox | RayCluster, work: Callable[..., Awaitable[R]], *arguments: Any) -> R:
    """Await `work(*arguments, sandbox)` in this process, or in one of a cluster's.

    Args:
        work: a coroutine function that can be pickled, as its arguments, its result and its exceptions are.

    Raises:
        Rejected: `worker_died`; see `RayCluster.run`.
        Exception: whatever `work` raises.
    """
    if isinstance(sandbox, RayCluster):
        return await sandbox.run(work, *arguments)
    return await work(*arguments, sandbox)


async def ask_until(
    teacher: Teacher,
    answer: type[T],
    variables: Mapping[str, Any],
    *,
    language: Language,
    seeds: Iterable[int],
    check: Callable[[T], Awaitable[R]],
    failed: str,
) -> R:
    """See `Context.ask`.

    Args:
        seeds: of the attempts, one at least.
    """
    feedback = str(variables.get("feedback", ""))
    last: Rejected | None = None
    for seed in seeds:
        try:
            given = await teacher.ask(answer, {**variables, "feedback": feedback}, language=language, seed=seed)
        except TeacherError as error:
            raise Rejected(failed, str(error)) from error
        try:
            _check_markup(given)
            return await check(given)
        except Rejected as rejection:
            if rejection.reason == "teacher_failed":  # of a request that the check made: nothing to mend here
                raise
            last = rejection
            feedback = rejection.detail or rejection.reason
    assert last is not None
    raise last


_NOT_STORED = frozenset({"reason", "reasoning", "analysis", "plan", "code", "check"})
"""Fields of answers that no model is trained on. Code may hold any text."""


def _check_markup(given: msgspec.Struct) -> None:
    """Refuse an answer whose texts hold markup of a chat format: they are stored, and models are trained on them.

    Raises:
        Rejected: `leaked_markup`; of a user or an emulator with the role in front. The detail is for the teacher.
    """
    role = role_of(type(given))
    if role == "judge":
        return
    for name, value in msgspec.to_builtins(given).items():
        for text in texts_of(value, without=_NOT_STORED) if name not in _NOT_STORED else ():
            if found := markup_in(text):
                raise Rejected(
                    f"{role}_leaked_markup" if role in ("user", "emulator") else "leaked_markup",
                    f"`{name}` holds {found}; leave it out, or quote it in backticks where the text is about it",
                )


async def gather_or_cancel(*given: Awaitable[Any]) -> list[Any]:
    """Return the results of all awaitables, in their order.

    A rejection cancels the others, since their record is dropped. After any other exception the others finish first:
    their requests are paid for, and would be sent again.

    Raises:
        Exception: the first one raised.
    """
    tasks = [asyncio.ensure_future(one) for one in given]
    try:
        return list(await asyncio.gather(*tasks))
    except Rejected:
        for task in tasks:
            task.cancel()
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def no_check(given: T) -> T:
    """Return the answer unchanged: a check that accepts every answer."""
    return given
