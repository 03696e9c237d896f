"""Tasks (paper 2.1.3): chain-conditioned and server-only requests, augmented, scored, without near-duplicates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from synthesis.core.records import Language, Task, TaskScores, ToolServer
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.teacher import Teacher, TeacherError
from synthesis.trajectories.near_duplicates import near_duplicates
from synthesis.trajectories.personas import Persona
from synthesis.trajectories.teacher_answers import BackTranslatedChain, ChainTask, ServerTask, TaskRating, TaskVariation

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
        Rejected: `teacher_failed`, `no_tools`, `unknown_tool`, `empty_question`, `names_a_tool` or `wrong_language`.
    """
    number = rng_for(seed, "task", seed_task.id).getrandbits(31)
    chain = seed_task.chain
    if seed_task.mode == "chain":
        variables = {"server": server, "chain": chain, **extra}
        question = (await _ask(teacher, ChainTask, variables, seed_task.language, number)).question
        tools = list(chain)
    else:
        variables = {"server": server, "tool_count": seed_task.tool_count, **extra}
        chosen = await _ask(teacher, ServerTask, variables, seed_task.language, number)
        question, tools = chosen.question, list(dict.fromkeys(chosen.tools))
        if not tools:
            raise Rejected("no_tools", f"{seed_task.id}: the task {question!r:.200} names no tool that it needs")
        known = {tool.name for tool in server.tools}
        if unknown := [name for name in tools if name not in known]:
            raise Rejected("unknown_tool", f"{seed_task.id}: {unknown[0]!r} is not a tool of {server.id}")
    question = _checked(question, server, seed_task.id)
    if language_of(question) != seed_task.language:
        raise Rejected("wrong_language", f"{seed_task.id}: {question!r} is not in the language {seed_task.language}")
    return [Task(seed_task.id, server.id, seed_task.language, seed_task.mode, "original", question, tools, _UNSCORED)]


async def augment(
    task: Task, mode: Augmentation, server: ToolServer, *, persona: str | Persona, teacher: Teacher, seed: int,
    extra: Mapping[str, Any],
) -> list[Task]:  # fmt: skip
    """A variation of a task that needs the same tools, in the same language (paper, section 2.1.3).

    Whether it still needs the tools is asked back: the teacher sees the variation alone and says which tools serve it,
    and a rule compares them. A prompt that only asks to keep the intent cannot know whether it was kept; and the
    rule-based teacher answers the same request by parsing, so one check serves both.

    Args:
        persona: who asks, for the mode `persona`: a phrase or a person of a file.

    Raises:
        Rejected: `teacher_failed`, `empty_question`, `names_a_tool`, `language_changed` or `intent_changed`.
    """
    number = rng_for(seed, "augment", task.id, mode).getrandbits(31)
    variables = {"server": server, "task": task, "mode": mode, "persona": persona, **extra}
    given = await _ask(teacher, TaskVariation, variables, task.language, number)
    question = _checked(given.question, server, task.id)
    if language_of(question) != task.language:
        raise Rejected("language_changed", f"{task.id}: {question!r} is not in the language of the original")
    back = await _ask(teacher, BackTranslatedChain, {"server": server, "query": question}, task.language, number)
    # The order is part of a chain; tools that were chosen without one have none.
    kept = back.chain == task.tools if task.mode == "chain" else set(back.chain) == set(task.tools)
    if not kept:
        raise Rejected(
            "intent_changed", f"{task.id}: {question!r} needs {', '.join(back.chain)}, not {', '.join(task.tools)}"
        )
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


def repeated_tasks(tasks: Sequence[Task], threshold: float) -> dict[str, str]:
    """The ids of tasks that say nearly what an earlier task of the same server says → one line for a person.

    Args:
        threshold: see `near_duplicates.near_duplicates`.
    """
    earlier = near_duplicates(((task.server_id, task.question) for task in tasks), threshold)
    return {
        task.id: f"{task.id}: {task.question!r} is nearly {tasks[index].question!r}"
        for task, index in zip(tasks, earlier, strict=True)
        if index is not None
    }


def without_duplicates(tasks: Sequence[Task], threshold: float = 0.8) -> list[Task]:
    """The tasks without the repeated ones."""
    repeated = repeated_tasks(tasks, threshold)
    return [task for task in tasks if task.id not in repeated]


def _checked(question: str, server: ToolServer, where: str) -> str:
    question = question.strip()
    if not question:
        raise Rejected("empty_question", where)
    for tool in server.tools:
        if named := named_tool(question, tool.name):
            raise Rejected("names_a_tool", f"{where}: the question says {named!r}")
    return question


def named_tool(question: str, tool: str) -> str | None:
    """What in a question names the tool, if anything.

    A name that could be an ordinary word (`search`) counts only where it is marked as a name: quoted as code, called,
    or with the word "tool" beside it. Any other (`get_weather`, `getWeather`) counts wherever it stands.
    """
    name = re.escape(tool)
    ordinary = re.fullmatch(r"[a-z]+|[A-Z][a-z]*", tool)
    word = rf"(?<![A-Za-z0-9_-]){name}(?![A-Za-z0-9_-])"
    marked = rf"`{name}`|{word}\(|{word}\s?(?:tool|function|工具|函数)|(?:tool|function|工具|函数)\s?{word}"
    found = re.search(marked if ordinary else word, question, re.IGNORECASE)
    return found[0] if found else None


async def _ask(teacher: Teacher, answer: type[T], variables: Mapping[str, Any], language: Language, seed: int) -> T:
    try:
        return await teacher.ask(answer, variables, language=language, seed=seed)
    except TeacherError as error:
        raise Rejected("teacher_failed", str(error)) from error
