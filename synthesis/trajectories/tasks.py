"""Tasks (paper 2.1.3): chain-conditioned and server-only requests, augmented, scored, without near-duplicates."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from synthesis.core.records import Behaviour, Language, Task, TaskScores, ToolServer
from synthesis.core.stages import Rejected, rng_for
from synthesis.core.stored import Select
from synthesis.pipeline.context import no_check
from synthesis.pipeline.languages import NAMES, check_language, strays
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.groups import crosses, several
from synthesis.trajectories.near_duplicates import near_duplicates
from synthesis.trajectories.personas import Persona
from synthesis.trajectories.teacher_answers import BackTranslatedChain, ChainTask, ServerTask, TaskRating, TaskVariation

UNSCORED = TaskScores(0, 0, 0)


class TaskSeed(msgspec.Struct, frozen=True, rename={"behaviour": "conduct", "offered_server": "shown"}):
    """Plan of one task: a chain (mode `chain`) or a number of different tools (mode `server`), and the behaviour that
    it teaches. Keys of stages in journals have its encoded names."""

    id: str
    server_id: str
    language: Language
    chain: list[str]
    tool_count: int
    behaviour: Behaviour | msgspec.UnsetType = msgspec.UNSET
    offered_server: str | msgspec.UnsetType = msgspec.UNSET
    """Id of the server whose tools the agent is offered, if it is another."""

    @property
    def mode(self) -> Literal["chain", "server"]:
        return "chain" if self.chain else "server"


async def write_task(one: TaskSeed, context: TrajectoryContext, servers: Servers) -> list[Task]:
    """Write an original task, not scored yet.

    Raises:
        Rejected: `teacher_failed`, `no_tools`, `unknown_tool`, `single_server`, `empty_question`, `names_a_tool` or
            `wrong_language`.
    """
    server, context = servers[one.server_id], context.route(one.id)

    def task(question: str, tools: Sequence[str]) -> Task:
        question = checked_question(question, server, one.id)
        check_language([question], one.language, f"{one.id}: the question")
        return Task(
            one.id, server.id, one.language, one.mode, "original", question, list(tools), UNSCORED,
            servers=several(server),
        )  # fmt: skip

    async def check_chain(given: ChainTask) -> Task:
        return task(given.question, one.chain)

    async def check_server(given: ServerTask) -> Task:
        tools = list(dict.fromkeys(given.tools))
        if not tools:
            raise Rejected("no_tools", f"{one.id}: the task {given.question!r:.200} names no tool that it needs")
        known = {tool.name for tool in server.tools}
        if unknown := [name for name in tools if name not in known]:
            raise Rejected("unknown_tool", f"{one.id}: {unknown[0]!r} is not a tool of {server.id}")
        if not crosses(server, tools):
            raise Rejected(
                "single_server", f"{one.id}: {', '.join(tools)} are of one server; take tools of two at least"
            )
        return task(given.question, tools)

    asked: dict[str, Any] = {"language": one.language, "key": ("task", one.id)}
    variables = {"server": server, **context.extra}
    if one.mode == "chain":
        return [await context.ask(ChainTask, {**variables, "chain": one.chain}, **asked, check=check_chain)]
    return [await context.ask(ServerTask, {**variables, "tool_count": one.tool_count}, **asked, check=check_server)]


async def augment_task(
    task: Task, context: TrajectoryContext, servers: Servers, personas: Mapping[Language, Sequence[str | Persona]]
) -> list[Task]:
    """Return a variation of a task that needs the same tools, in the same language (paper, section 2.1.3).

    Its mode, and the persona for the mode `persona`, are sampled. A second request checks that the tools are still
    needed: the teacher sees the variation alone and names the tools for it, and a rule compares them. A prompt that
    only asks to keep the intent cannot check that. The rule-based teacher answers the same request by parsing, so one
    check serves both.

    Args:
        personas: who may ask, phrases or persons of a file.

    Raises:
        Rejected: `teacher_failed`, `empty_question`, `names_a_tool`, `language_changed` or `intent_changed`.
    """
    server, context = servers[task.server_id], context.route(task.family)
    rng = rng_for(context.seed, "variation", task.id)
    mode, persona = rng.choice(context.config.augmentations), rng.choice(personas.get(task.language) or personas["en"])
    asked: dict[str, Any] = {"language": task.language, "key": ("augment", task.id, mode)}

    async def check(given: TaskVariation) -> str:
        question = checked_question(given.question, server, task.id)
        if (found := strays(question, task.language)) is not None:
            raise Rejected(
                "language_changed",
                f"{task.id}: {question!r} is in {NAMES[found]}; keep the original's language, {NAMES[task.language]}",
            )
        query = {"server": server, "query": question}
        back = await context.ask(BackTranslatedChain, query, **asked, check=no_check)
        # The order is part of a chain; tools that were chosen without one have none.
        kept = back.chain == task.tools if task.mode == "chain" else set(back.chain) == set(task.tools)
        if not kept:
            raise Rejected(
                "intent_changed", f"{task.id}: {question!r} needs {', '.join(back.chain)}, not {', '.join(task.tools)}"
            )
        return question

    variables = {"server": server, "task": task, "mode": mode, "persona": persona, **context.extra}
    question = await context.ask(TaskVariation, variables, **asked, check=check)
    return [msgspec.structs.replace(task, id=f"{task.id}-{mode}", augmentation=mode, question=question)]


async def score_task(task: Task, context: TrajectoryContext, servers: Servers) -> list[Task]:
    """Return the task with its scores.

    Raises:
        Rejected: `teacher_failed`, or `low_<score>` for the first score below its threshold.
    """
    variables = {"server": servers[task.server_id], "task": task}
    context = context.route(task.family)
    given = await context.ask(TaskRating, variables, language=task.language, key=("score", task.id), check=no_check)
    scores = TaskScores(given.question_quality, given.scenario_realism, given.tool_necessity)
    return [check_scores(task, scores, context.config.thresholds, given.reason)]


def check_scores(task: Task, scores: TaskScores, thresholds: TaskScores, reason: str) -> Task:
    """Return the task with the given scores.

    Raises:
        Rejected: `low_<score>` for the first score below its threshold.
    """
    for field in TaskScores.__struct_fields__:
        if getattr(scores, field) < getattr(thresholds, field):
            scored = msgspec.structs.replace(task, scores=scores)
            raise Rejected(f"low_{field}", f"{task.id}: {getattr(scores, field)}, {reason}", scored)
    return msgspec.structs.replace(task, scores=scores)


def repeated_tasks(tasks: Sequence[Task], threshold: float) -> dict[str, str]:
    """Return the ids of tasks that nearly repeat an earlier task of the same server → one line for a person.

    Groups of servers overlap, so that tasks of all groups are compared.

    Args:
        threshold: see `near_duplicates.near_duplicates`.
    """
    groups: dict[str, array[int]] = defaultdict(lambda: array("Q"))
    for position, task in enumerate(tasks):
        groups["" if task.servers else task.server_id].append(position)
    found: list[tuple[int, int]] = []
    for positions in groups.values():  # one group's texts at a time
        texts = ((0, task.question) for task in Select(tasks, positions))
        for position, earlier in zip(positions, near_duplicates(texts, threshold), strict=True):
            if earlier is not None:
                found.append((position, positions[earlier]))
    found.sort()
    repeating = Select(tasks, (position for position, _ in found))
    repeated = Select(tasks, (position for _, position in found))
    return {
        one.id: f"{one.id}: {one.question!r} is nearly {other.question!r}"
        for one, other in zip(repeating, repeated, strict=True)
    }


def checked_question(question: str, server: ToolServer, where: str) -> str:
    """Return a user's question without surrounding spaces.

    Raises:
        Rejected: `empty_question`, `names_a_tool`.
    """
    question = question.strip()
    if not question:
        raise Rejected("empty_question", f"{where}: the question is empty")
    for tool in server.tools:
        if named := named_tool(question, tool.name):
            raise Rejected("names_a_tool", f"{where}: the question says {named!r}")
    return question


def named_tool(question: str, tool: str) -> str | None:
    """Return the part of a question that names the tool, or None.

    A name that could be an ordinary word (`search`) counts only if it is marked as a name: quoted as code, called, or
    with the word "tool" beside it. Any other (`get_weather`, `getWeather`) counts anywhere.
    """
    name = re.escape(tool)
    ordinary = re.fullmatch(r"[a-z]+|[A-Z][a-z]*", tool)
    word = rf"(?<![A-Za-z0-9_-]){name}(?![A-Za-z0-9_-])"
    marked = rf"`{name}`|{word}\(|{word}\s?(?:tool|function|工具|函数)|(?:tool|function|工具|函数)\s?{word}"
    found = re.search(marked if ordinary else word, question, re.IGNORECASE)
    return found[0] if found else None
