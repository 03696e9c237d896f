"""Tasks (paper 2.1.3): chain-conditioned and server-only requests, augmented, scored, without near-duplicates."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from synthesis.records import Language, Task, TaskScores, ToolServer
from synthesis.runner import Rejected, rng_for
from synthesis.teacher import Teacher, TeacherError
from synthesis.trajectories.answers import ChainTask, ServerTask, TaskRating, TaskVariation

Augmentation = Literal["diverse", "complicate", "persona"]
T = TypeVar("T", bound=msgspec.Struct)

_UNSCORED = TaskScores(0, 0, 0)


class TaskSeed(msgspec.Struct, frozen=True):
    """What one task shall be like: a chain (mode `chain`), or a number of different tools (mode `server`)."""

    id: str
    server_id: str
    language: Language
    chain: list[str]
    tool_count: int

    @property
    def mode(self) -> Literal["chain", "server"]:
        return "chain" if self.chain else "server"


async def write_task(
    seed_task: TaskSeed, server: ToolServer, *, teacher: Teacher, seed: int, extra: Mapping[str, Any]
) -> list[Task]:
    """An original task, not scored yet.

    Args:
        extra: what a rule-based teacher may use beside the prompt (`partition`: entities to leave alone).

    Raises:
        Rejected: `teacher_failed`, `unknown_tool`, `empty_question` or `names_a_tool`.
    """
    number = rng_for(seed, "task", seed_task.id).getrandbits(31)
    chain = seed_task.chain
    if seed_task.mode == "chain":
        variables = {"server": server, "chain": chain, **extra}
        question = (await _ask(teacher, ChainTask, variables, seed_task.language, number)).question
        tools = chain
    else:
        variables = {"server": server, "tool_count": seed_task.tool_count, **extra}
        chosen = await _ask(teacher, ServerTask, variables, seed_task.language, number)
        question, tools = chosen.question, chosen.tools
        known = {tool.name for tool in server.tools}
        if unknown := [name for name in tools if name not in known]:
            raise Rejected("unknown_tool", f"{seed_task.id}: {unknown[0]!r} is not a tool of {server.id}")
    question = _checked(question, server, seed_task.id)
    return [
        Task(seed_task.id, server.id, seed_task.language, seed_task.mode, "original", question, list(tools), _UNSCORED)
    ]


async def augment(
    task: Task, mode: Augmentation, server: ToolServer, *, persona: str, teacher: Teacher, seed: int,
    extra: Mapping[str, Any],
) -> list[Task]:  # fmt: skip
    """A variation of a task that needs the same tools, in the same language.

    Raises:
        Rejected: `teacher_failed`, `empty_question`, `names_a_tool` or `language_changed`.
    """
    number = rng_for(seed, "augment", task.id, mode).getrandbits(31)
    variables = {"server": server, "task": task, "mode": mode, "persona": persona, **extra}
    given = await _ask(teacher, TaskVariation, variables, task.language, number)
    question = _checked(given.question, server, task.id)
    if language_of(question) != language_of(task.question):
        raise Rejected("language_changed", f"{task.id}: {question!r} is not in the language of the original")
    return [msgspec.structs.replace(task, id=f"{task.id}-{mode}", augmentation=mode, question=question)]


async def score(task: Task, server: ToolServer, *, teacher: Teacher, seed: int, thresholds: TaskScores) -> list[Task]:
    """The task with its scores.

    Raises:
        Rejected: `teacher_failed`, or `low_<score>` for the first score below its threshold.
    """
    number = rng_for(seed, "score", task.id).getrandbits(31)
    given = await _ask(teacher, TaskRating, {"server": server, "task": task}, task.language, number)
    scores = TaskScores(given.question_quality, given.scenario_realism, given.tool_necessity)
    for field in TaskScores.__struct_fields__:
        if getattr(scores, field) < getattr(thresholds, field):
            raise Rejected(f"low_{field}", f"{task.id}: {getattr(scores, field)}, {given.reason}")
    return [msgspec.structs.replace(task, scores=scores)]


def without_duplicates(tasks: Sequence[Task]) -> list[Task]:
    """The tasks without those whose normalised question an earlier task of the same server has."""
    seen: set[tuple[str, str]] = set()
    kept: list[Task] = []
    for task in tasks:
        key = (task.server_id, normal_text(task.question))
        if key not in seen:
            seen.add(key)
            kept.append(task)
    return kept


def normal_text(text: str) -> str:
    """The text without differences of case, width, spaces and final punctuation."""
    return re.sub(r"[\s?!.,。？！，、]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def language_of(text: str) -> Language | None:
    """`zh` from one Chinese character for four Latin words on: names stay Latin. None without letters."""
    chinese = len(re.findall(r"[\u3400-\u9fff]", text))
    words = len(re.findall(r"[A-Za-z]+", text))
    if not chinese and not words:
        return None
    return "zh" if chinese >= words / 4 and chinese else "en"


def _checked(question: str, server: ToolServer, where: str) -> str:
    question = question.strip()
    if not question:
        raise Rejected("empty_question", where)
    for tool in server.tools:
        if "_" in tool.name and tool.name in question:
            raise Rejected("names_a_tool", f"{where}: the question names {tool.name!r}")
    return question


async def _ask(teacher: Teacher, answer: type[T], variables: Mapping[str, Any], language: Language, seed: int) -> T:
    try:
        return await teacher.ask(answer, variables, language=language, seed=seed)
    except TeacherError as error:
        raise Rejected("teacher_failed", str(error)) from error
