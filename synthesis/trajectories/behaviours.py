"""Tasks that teach something beside calling tools (`core.records.Behaviour`), and rules on what their runs must not do.

A task fixes which calls are forbidden before any agent sees it. Rules check a run against it before any judge is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from synthesis.core.normal_text import normalized
from synthesis.core.records import Behaviour, Dialogue, Goal, Language, Message, Task, TaskScores, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.context import no_check
from synthesis.pipeline.languages import check_language
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.personas import Persona
from synthesis.trajectories.runs import AgentRun, Ending
from synthesis.trajectories.tasks import UNSCORED, TaskSeed, check_scores, checked_question, score_task, write_task
from synthesis.trajectories.teacher_answers import ConductRating, DialoguePlan, RestrainedTask, Standing
from synthesis.trajectories.todo_fixture import WRITES, is_todo_server

PRECONDITIONS: Mapping[Behaviour, tuple[Standing, ...]] = {
    "missing_tool": ("tool_missing",),
    "irrelevant_tools": ("tool_missing",),
    "missing_parameter": ("value_missing",),
    "infeasible": ("impossible",),
    "refused": ("forbidden",),
    "confirmation": ("unconfirmed",),
    "done": ("servable",),
    "dialogue": ("servable", "value_missing"),
    "later_tool": ("tool_missing",),
}
"""Behaviour → allowed standings of the user's first message, given the agent's tools and instructions."""
UNANSWERED = 1 / 3
"""Share of the conversations with a missing value in which nobody answers the agent's question."""
_PERSONAS = Mapping[Language, Sequence[str | Persona]]


def offered(task: Task, server: ToolServer, spoken: int = 1) -> list[ToolSpec]:
    """Return the tools that the agent of a task may call after `spoken` user messages."""
    withheld = task.dialogue.hidden_at(spoken) if task.dialogue else ()
    return [tool for tool in server.tools if tool.name not in withheld] if withheld else server.tools


# ---------------------------------------------------------------------------------------------------------------------
# Writing and rating


async def write_any(one: TaskSeed, context: TrajectoryContext, servers: Servers, personas: _PERSONAS) -> list[Task]:
    """Write a task, as `write_task`, or one that teaches something beside calling tools.

    Raises:
        Rejected: as `write_task`; `no_tool_left`, `no_policy`, `not_refused`, `needs_forbidden`, `no_clarification`,
            `opening_leaks_answer`, `too_few_turns` or `too_many_turns`.
    """
    if not one.behaviour:
        return await write_task(one, context, servers)
    server = servers[one.server_id]
    if one.behaviour in ("missing_tool", "irrelevant_tools", "done"):
        (task,) = await write_task(one, context, servers)
        return [_without_calls(one, task, server, context, personas)]
    context = context.route(one.id)
    ask = _dialogue if one.behaviour == "dialogue" else _restrained
    return [await ask(one, one.behaviour, server, context, personas)]


def _without_calls(
    one: TaskSeed, task: Task, server: ToolServer, context: TrajectoryContext, personas: _PERSONAS
) -> Task:
    """Return a task whose request is shown to an agent that lacks the tool, or is served and followed by thanks."""
    assert one.behaviour
    replace = msgspec.structs.replace
    if one.behaviour == "done":
        goal = Goal(task.question, task.tools)
        dialogue = Dialogue(
            "done", [goal], context.config.user_turns, persona=_persona(one, context, personas), thanks=True
        )
        return replace(task, mode="dialogue", dialogue=dialogue)
    withheld: list[str] = []
    if one.behaviour == "missing_tool":
        withheld = [rng_for(context.seed, "withheld", one.id).choice(task.tools)]
        if len(server.tools) < 2:
            raise Rejected("no_tool_left", f"{one.id}: {server.id} has no tool beside {withheld[0]}")
    dialogue = Dialogue(one.behaviour, [Goal(task.question)], hidden_tools=withheld)
    return replace(task, server_id=one.offered_server or server.id, mode="no_tool", tools=[], dialogue=dialogue)


async def _restrained(
    one: TaskSeed, behaviour: Behaviour, server: ToolServer, context: TrajectoryContext, personas: _PERSONAS
) -> Task:
    asks = behaviour in ("missing_parameter", "confirmation", "later_tool")

    async def check(given: RestrainedTask) -> Task:
        question, when_asked = _checked([given.question], given.when_asked if asks else [], server, one)
        if asks and not when_asked:
            raise Rejected("no_clarification", f"{one.id}: `when_asked` is empty; say what the user answers")
        policy = given.policy.strip() if behaviour in ("refused", "confirmation") else ""
        if behaviour in ("refused", "confirmation") and not policy:
            raise Rejected("no_policy", f"{one.id}: `policy` is empty; say what the agent is told")
        check_language([policy], one.language, f"{one.id}: the policy")
        tools = _known(given.tools, server, one) if asks else []
        if behaviour in ("missing_parameter", "later_tool") and not tools:
            raise Rejected("no_tools", f"{one.id}: {question[0]!r:.200} names no tool that it needs")
        turns = 1 + len(when_asked) if asks else 1
        if turns > context.config.user_turns:
            raise Rejected(
                "too_many_turns", f"{one.id}: {turns} turns of the user, {context.config.user_turns} at most"
            )
        if behaviour == "missing_parameter" and rng_for(context.seed, "unanswered", one.id).random() < UNANSWERED:
            tools, turns = [], 1
        if behaviour == "later_tool":
            return _later(one, question[0], when_asked, tools, server, context, personas)
        dialogue = Dialogue(
            behaviour, [Goal(question[0], tools, when_asked)], turns if turns == 1 else context.config.user_turns,
            persona=_persona(one, context, personas) if turns > 1 else "", policy=policy,
            writes=[tool.name for tool in server.tools if tool.name in WRITES] if is_todo_server(server.id) else [],
        )  # fmt: skip
        mode: Literal["dialogue", "no_tool"] = "dialogue" if tools else "no_tool"
        return Task(one.id, server.id, one.language, mode, "original", question[0], tools, UNSCORED, dialogue)

    variables = {"server": server, "conduct": behaviour, "chain": one.chain, **context.extra}
    return await context.ask(RestrainedTask, variables, language=one.language, key=("task", one.id), check=check)


def _later(
    one: TaskSeed, question: str, again: Sequence[str], tools: list[str], server: ToolServer,
    context: TrajectoryContext, personas: _PERSONAS,
) -> Task:  # fmt: skip
    """Return a task for which one tool is missing, until the user says that it is available and repeats the request."""
    if len(again) > 1:
        raise Rejected("too_many_turns", f"{one.id}: `when_asked` has {len(again)} sentences; it must have one")
    if len(server.tools) < 2:
        raise Rejected("no_tool_left", f"{one.id}: {server.id} has no tool beside {tools[0]}")
    dialogue = Dialogue(
        "later_tool", [Goal(question), Goal(again[0], tools)], 2, persona=_persona(one, context, personas),
        hidden_tools=[rng_for(context.seed, "withheld", one.id).choice(tools)], restored_at_turn=2,
    )  # fmt: skip
    return Task(one.id, server.id, one.language, "dialogue", "original", question, tools, UNSCORED, dialogue)


async def _dialogue(
    one: TaskSeed, behaviour: Behaviour, server: ToolServer, context: TrajectoryContext, personas: _PERSONAS
) -> Task:
    rng = rng_for(context.seed, "dialogue", one.id)
    most = context.config.user_turns
    thanks = most > 2 and rng.random() < 0.5
    turns = rng.randint(2, most - thanks)
    persona = _persona(one, context, personas)
    forbidden = _forbidden(one, server, context)

    async def check(given: DialoguePlan) -> Task:
        goals: list[Goal] = []
        for goal in given.goals:
            says, when_asked = _checked([goal.says], goal.when_asked, server, one)
            tools = _known(goal.tools, server, one)
            if not tools and not (forbidden and goals):
                raise Rejected("no_tools", f"{one.id}: {says[0]!r:.200} names no tool that it needs")
            if forbidden in tools:
                raise Rejected("needs_forbidden", f"{one.id}: {says[0]!r:.200} needs {forbidden}, which is forbidden")
            goals.append(Goal(says[0], tools, when_asked))
        policy = given.policy.strip() if forbidden else ""
        if forbidden and not policy:
            raise Rejected("no_policy", f"{one.id}: `policy` is empty; say what the agent is told")
        if forbidden and sum(not goal.tools for goal in goals) != 1:
            raise Rejected("not_refused", f"{one.id}: exactly one of the goals must be what the policy forbids")
        check_language([policy], one.language, f"{one.id}: the policy")
        count = sum(1 + len(goal.when_asked) for goal in goals)
        if count < 2:
            raise Rejected("too_few_turns", f"{one.id}: the user speaks {count} times; let it speak {turns} times")
        if count > most - thanks:
            raise Rejected("too_many_turns", f"{one.id}: the user speaks {count} times; let it speak {turns} times")
        tools = list(dict.fromkeys(tool for goal in goals for tool in goal.tools))
        forbids = [forbidden] if forbidden else []
        dialogue = Dialogue(behaviour, goals, most, persona=persona, thanks=thanks, policy=policy, forbids=forbids)
        return Task(
            one.id, server.id, one.language, "dialogue", "original", goals[0].utterance, tools, UNSCORED, dialogue
        )

    variables = {"server": server, "chain": one.chain, "turns": turns, "persona": persona, "forbidden": forbidden}
    variables |= context.extra
    return await context.ask(DialoguePlan, variables, language=one.language, key=("task", one.id), check=check)


def _forbidden(one: TaskSeed, server: ToolServer, context: TrajectoryContext) -> str:
    """Return the tool that the agent's policy forbids, none of the first request's; "" if there is no policy."""
    rng = rng_for(context.seed, "policy", one.id)
    others = [tool.name for tool in server.tools if tool.name not in one.chain]
    return rng.choice(others) if others and rng.random() < context.config.policies else ""


def _checked(
    says: Sequence[str], when_asked: Sequence[str], server: ToolServer, one: TaskSeed
) -> tuple[list[str], list[str]]:
    """Return the user's first messages about a goal, and the replies when the agent asks, both checked: neither names a
    tool, and the first do not contain the second."""
    first, later = ([checked_question(text, server, one.id) for text in texts] for texts in (says, when_asked))
    check_language([*first, *later], one.language, f"{one.id}: what the user says")
    opening = normalized("NFKC", " ".join(first)).casefold()
    for text in later:
        known = normalized("NFKC", text).casefold().strip(" .。!！")
        if re.search(rf"(?<![a-z0-9])(?<!\d[.,:]){re.escape(known)}(?![a-z0-9]|[.,:]\d)", opening):
            raise Rejected(
                "opening_leaks_answer", f"{one.id}: {first[0]!r:.200} says already {text!r:.200}; leave it out"
            )
    return first, later


def _known(names: Sequence[str], server: ToolServer, one: TaskSeed) -> list[str]:
    known = {tool.name for tool in server.tools}
    if unknown := [name for name in names if name not in known]:
        raise Rejected("unknown_tool", f"{one.id}: {unknown[0]!r} is not a tool of {server.id}")
    return list(dict.fromkeys(names))


def _persona(one: TaskSeed, context: TrajectoryContext, personas: _PERSONAS) -> str:
    return str(rng_for(context.seed, "user", one.id).choice(personas.get(one.language) or personas["en"]))


async def score_any(task: Task, context: TrajectoryContext, servers: Servers) -> list[Task]:
    """Score a task as `score_task`; if it has a dialogue, check its behaviour.

    A judge states how the opening stands with the agent's tools and instructions. A rule compares that with the
    behaviour.

    Raises:
        Rejected: as `score_task`; `precondition_mismatch`.
    """
    if not task.dialogue:
        return await score_task(task, context, servers)
    dialogue, context = task.dialogue, context.route(task.family)
    variables = {"task": task, "dialogue": dialogue, "tools": offered(task, servers[task.server_id])}
    given = await context.ask(ConductRating, variables, language=task.language, key=("score", task.id), check=no_check)
    if given.standing not in (meant := PRECONDITIONS[dialogue.behaviour]):
        raise Rejected("precondition_mismatch", f"{task.id}: {given.standing}, meant as {meant[0]}: {given.reason}")
    # Whether tools are needed is what the rule has just decided.
    scores = TaskScores(given.question_quality, given.scenario_realism, 5)
    return [check_scores(task, scores, context.config.thresholds, given.reason)]


# ---------------------------------------------------------------------------------------------------------------------
# What a run must not do


def rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """Split the conversation at the user's messages; messages before the first are left out."""
    found: list[list[Message]] = []
    for message in messages:
        if message.role == "user":
            found.append([])
        if found:
            found[-1].append(message)
    return found


def check_behaviour(run: AgentRun) -> None:
    """Check that a run called nothing too early, too late or without consent.

    Raises:
        Rejected: `unneeded_call`: of a task that needs no tool; `called_too_early`: before the user gave the missing
            value; `unconfirmed_write`: before the user agreed; `forbidden_call`: of a tool that the policy forbids;
            `called_after_the_end`: after the user said that it has everything.
    """
    task = run.task
    called = [[call.name for message in part for call in message.tool_calls] for part in rounds(run.messages)]
    every = [name for names in called for name in names]
    if task.mode == "no_tool" and every:
        raise Rejected("unneeded_call", f"{task.id}: {every[0]} was called, and no tool serves")
    if not task.dialogue:
        return
    dialogue = task.dialogue
    answers = len(dialogue.goals[0].when_asked)
    if dialogue.behaviour == "missing_parameter" and called[0]:
        raise Rejected(
            "called_too_early", f"{task.id}: {called[0][0]} was called before the user said what was missing"
        )
    if dialogue.restored_at_turn and (
        before := [name for names in called[: dialogue.restored_at_turn - 1] for name in names]
    ):
        raise Rejected("called_too_early", f"{task.id}: {before[0]} was called before the tools served the request")
    if broken := [name for name in every if name in dialogue.forbids]:
        raise Rejected("forbidden_call", f"{task.id}: {broken[0]} was called, which the agent's policy forbids")
    early = [name for names in called[:answers] for name in names if name in dialogue.writes]
    if early:
        raise Rejected("unconfirmed_write", f"{task.id}: {early[0]} was called before the user had agreed")
    if run.ended is Ending.USER_CLOSED and called[-1]:
        raise Rejected("called_after_the_end", f"{task.id}: {called[-1][0]} was called after the user had all")
