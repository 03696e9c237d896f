"""The simulated user. It sees its goals, its persona and the dialogue, but neither tools nor calls.

It is judged by its goals alone, before the agent is judged. Runs that it spoils are counted separately, with reasons
that begin with `user_`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from synthesis.core.records import Message, Task
from synthesis.core.stages import Rejected
from synthesis.pipeline.context import no_check
from synthesis.pipeline.languages import NAMES, strays
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.runs import AgentRun, Ending
from synthesis.trajectories.tasks import named_tool
from synthesis.trajectories.teacher_answers import UserScore, UserTurn


def heard(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that the user knows: its own, and the agent's replies to it."""
    said = [message for message in messages if message.role in ("user", "assistant") and message.content]
    return [Message(message.role, message.content) for message in said]


async def speak(task: Task, messages: Sequence[Message], context: TrajectoryContext) -> UserTurn:
    """Return the user's next message.

    Raises:
        Rejected: `user_failed`: no valid answer; `user_silent`, `user_wrong_language`, `user_leaked_markup`.
    """
    assert task.dialogue

    async def check(given: UserTurn) -> UserTurn:
        message = given.message.strip()
        if not message and not given.finished:
            raise Rejected("user_silent", f"{task.id}: the user says nothing, and is not finished")
        if (found := strays(message, task.language)) is not None:
            raise Rejected(
                "user_wrong_language",
                f"{task.id}: {message!r:.200} is in {NAMES[found]}; write in {NAMES[task.language]}",
            )
        return msgspec.structs.replace(given, message=message)

    known = heard(messages)
    variables = {"dialogue": task.dialogue, "messages": known}
    return await context.ask(
        UserTurn, variables, language=task.language, key=("user", task.id, len(known)), check=check,
        failed="user_failed",
    )  # fmt: skip


async def judge_user(run: AgentRun, context: TrajectoryContext, servers: Servers) -> list[AgentRun]:
    """Return the run unchanged, if its user kept to its goals.

    Raises:
        Rejected: `user_never_ended`, `user_repeats`, `user_names_a_tool`; of a judge: `user_gave_away`,
            `user_contradicted`, `user_invented`, `user_stopped_early`; `user_judge_failed`.
    """
    task, context = run.task, context.route(run.task.family)
    assert task.dialogue
    texts = [message.content for message in run.messages if message.role == "user"]
    if run.ended is Ending.TURN_LIMIT:
        raise Rejected("user_never_ended", f"{task.id}: {len(texts)} turns, and the user still wants something")
    if len(texts) < len(task.dialogue.goals) + task.dialogue.thanks:
        raise Rejected("user_stopped_early", f"{task.id}: {len(texts)} turns for {len(task.dialogue.goals)} goals")
    if len(set(texts)) < len(texts):
        raise Rejected("user_repeats", f"{task.id}: the user says the same twice")
    for tool in servers[task.server_id].tools:
        if named := next(filter(None, (named_tool(text, tool.name) for text in texts)), None):
            raise Rejected("user_names_a_tool", f"{task.id}: the user says {named!r}, which it cannot know")
    given = await context.ask(
        UserScore, {"dialogue": task.dialogue, "messages": heard(run.messages)}, language=task.language,
        key=("user_judge", task.id), check=no_check, failed="user_judge_failed",
    )  # fmt: skip
    if given.verdict != "fine":
        raise Rejected(f"user_{given.verdict}", f"{task.id}: {given.reason}")
    return [run]
