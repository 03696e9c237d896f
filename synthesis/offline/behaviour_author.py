"""Rules of the offline teacher for conversations that are more than a request and its answer.

Their requests are `behaviour_words` around the grammar's phrases. The user states what its goals contain. It is
careless in a seeded share of its turns, so that its judge has work to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from synthesis.core.records import Behaviour, Dialogue, Language, Message, Task, ToolServer
from synthesis.offline import grammar, plans, sampling
from synthesis.offline.behaviour_words import ENTRIES, LISTS, QUESTIONS, THAT, say
from synthesis.offline.facts.relations import all_relations, joinable
from synthesis.offline.situations import Path, next_words, open_subject, plain_phrase, replies, situation
from synthesis.offline.trajectory_author import TRIES, Keep, Variables, chain_plan, chain_question, keep_of, paths
from synthesis.offline.wording import FRAMES, PERSONAS
from synthesis.trajectories import teacher_answers as a
from synthesis.trajectories.todo_fixture import WRITES

STOPS, CONTRADICTS = 0.04, 0.04
"""Shares of the user's careless turns: it ends with goals left; it takes back what it wants."""
_INTRODUCED = 0.3
"""Share of the conversations whose user says first who it is."""
_OPEN_ENDS = (" of {x}", " in {x}", " after {x}", " using {x}", "{x}的")
"""Phrases whose subject can be left open."""


# ---------------------------------------------------------------------------------------------------------------------
# What calling at once would be wrong for


def restrained_task(variables: Variables, language: Language, rng: random.Random) -> a.RestrainedTask:
    behaviour: Behaviour = variables["conduct"]
    if behaviour == "confirmation":
        return _write(variables["server"], language, rng)
    path: Path = tuple(variables["chain"])
    if behaviour == "refused":
        policy = say("forbids", rng, language, rng.choice(path))
        return a.RestrainedTask("", chain_question(variables, language, rng), [], [], policy)
    if behaviour == "later_tool":
        question = chain_question(variables, language, rng)
        return a.RestrainedTask("", question, list(path), [say("again", rng, language)], "")
    subject, path = _asked(path, keep_of(variables), rng)
    if behaviour == "missing_parameter":
        question = _open_question(path, rng, language)
        return a.RestrainedTask("", question, list(path), [say("value", rng, language, subject)], "")
    phrase = grammar.phrase(path, subject, rng, language)
    other = rng.choice(sorted({str(value) for value in all_relations()[path[-1]].rows.values()}))
    return a.RestrainedTask("", say("correct", rng, language, phrase, other), [], [], "")


def _asked(path: Path, keep: Keep, rng: random.Random) -> tuple[str, Path]:
    """A subject that may be asked about, and the chain.

    Raises:
        ValueError: the chain is not one of facts, or nobody would ask for it.
    """
    if not path or not set(path) <= set(all_relations()):
        raise ValueError(f"{'>'.join(path)}: no facts are known about these tools")
    return plans.chains(chain_plan(path, keep, rng))[0]


def _open_question(path: Path, rng: random.Random, language: Language) -> str:
    """A request of a chain that leaves its subject open.

    Raises:
        ValueError: it cannot be said.
    """
    first, *rest = path
    wordings = [one for one in all_relations()[first].phrases[language] if any(end in one for end in _OPEN_ENDS)]
    if not wordings:
        raise ValueError(f"{first}: no wording of it can leave its subject open")
    inner = rng.choice(wordings).replace("{x}", open_subject(path, language))
    return grammar.framed([grammar.phrase(rest, inner, rng, language)], FRAMES[language]["plain"], rng, language)


def _write(server: ToolServer, language: Language, rng: random.Random) -> a.RestrainedTask:
    offered = [tool.name for tool in server.tools if tool.name in WRITES]
    if not offered:
        raise ValueError(f"server {server.id}: none of its tools is known to change something")
    tool = rng.choice(offered)
    first, second = rng.sample(LISTS[language], 2)
    question = say(tool, rng, language, rng.choice(ENTRIES[language]), first)  # type: ignore[arg-type]
    yes, no = say("yes", rng, language), say("leave", rng, language)
    instead = say("instead", rng, language, second)
    when_asked = rng.choice(([yes], [yes], [instead, yes], [instead, yes], [no]))
    tools = [] if when_asked == [no] else [tool]
    return a.RestrainedTask("", question, tools, when_asked, say("confirms", rng, language))


# ---------------------------------------------------------------------------------------------------------------------
# Several turns


def dialogue_plan(variables: Variables, language: Language, rng: random.Random) -> a.DialoguePlan:
    """Return the goals of a conversation with `turns` user messages.

    The first goal is a chain, perhaps of a subject that the user only names when asked. The others follow from the
    answer, ask the same of another subject, or ask for something else. If a tool is forbidden, one goal needs it.
    """
    server: ToolServer = variables["server"]
    turns: int = variables["turns"]
    forbidden: str = variables.get("forbidden", "")
    keep = keep_of(variables)
    own = tuple(tool.name for tool in server.tools if tool.name in all_relations() and tool.name != forbidden)
    subject, path = _asked(tuple(variables["chain"]), keep, rng)
    goals: list[a.PlannedGoal] = []
    if turns > 2 and rng.random() < 0.5:
        try:
            opening, when_asked = _open_question(path, rng, language), [say("value", rng, language, subject)]
        except ValueError:
            opening, when_asked = _plain(subject, path, rng, language), []
    else:
        opening, when_asked = _plain(subject, path, rng, language), []
    if rng.random() < _INTRODUCED:
        opening = f"{rng.choice(PERSONAS[language])}{' ' if language == 'en' else ''}{opening}"
    goals.append(a.PlannedGoal(opening, list(path), when_asked))
    done = {(subject, path)}
    while sum(1 + len(goal.when_asked) for goal in goals) < turns - bool(forbidden):
        says, subject, path = _next(own, subject, path, done, keep, rng, language)
        done.add((subject, path))
        goals.append(a.PlannedGoal(says, list(path), []))
    if not forbidden:
        return a.DialoguePlan("", goals, "")
    # At the end, since a later request could only refer to what was not answered.
    goals.append(a.PlannedGoal(_plain(*_asked((forbidden,), keep, rng), rng, language), [], []))
    return a.DialoguePlan("", goals, say("forbids", rng, language, forbidden))


def _next(
    own: Path, subject: str, path: Path, done: set[tuple[str, Path]], keep: Keep, rng: random.Random, language: Language
) -> tuple[str, str, Path]:
    """Return the next words of the user, and the chain that they mean.

    Raises:
        ValueError: nothing is left to ask.
    """
    table = all_relations()
    value = str(plans.evaluate(plans.from_chains([(subject, path)]))[-1])
    further = [
        (one,) for one in own
        if one not in path and joinable(table[path[-1]], table[one]) and value in sampling.subjects((one,))
    ]  # fmt: skip
    for _ in range(TRIES):
        kind = rng.choice(("follow_up", "follow_up", "changed", "fresh"))
        if kind == "follow_up" and further:
            new: tuple[str, Path] = (value, rng.choice(further))
            says = say("follow_up", rng, language, grammar.phrase(new[1], THAT[language], rng, language))
        elif kind == "changed":
            new = (rng.choice(sampling.subjects(path)), path)
            says = say("changed", rng, language, new[0])
        else:
            other = rng.choice(paths(own))
            new = (rng.choice(sampling.subjects(other)), other)
            says = _plain(*new, rng, language)
        if new not in done and keep.plan(plans.from_chains([new])):
            return says, *new
    raise ValueError(f"nothing is left to ask after {plain_phrase(subject, path, language)}")


def _plain(subject: str, path: Path, rng: random.Random, language: Language) -> str:
    return grammar.framed([grammar.phrase(path, subject, rng, language)], FRAMES[language]["plain"], rng, language)


def conduct_rating(variables: Variables, language: Language, rng: random.Random) -> a.ConductRating:
    task: Task = variables["task"]
    dialogue: Dialogue = variables["dialogue"]
    opening = [*([Message("system", dialogue.policy)] if dialogue.policy else []), Message("user", task.question)]
    try:
        standing = situation(opening, variables["tools"], language).standing
    except ValueError as error:
        return a.ConductRating(str(error), "impossible", 1, 1)
    return a.ConductRating(f"its opening is {standing}", standing, 5, 5 - (len(task.question) > 200))


# ---------------------------------------------------------------------------------------------------------------------
# The user


def user_turn(variables: Variables, language: Language, rng: random.Random) -> a.UserTurn:
    dialogue: Dialogue = variables["dialogue"]
    said = replies(variables["messages"])
    possible, finished = next_words(dialogue, said, language)
    careless = rng.random()
    if not finished and careless < STOPS:
        return a.UserTurn("I have no time.", "", True)
    if not finished and STOPS <= careless < STOPS + CONTRADICTS and said[-1].endswith(QUESTIONS):
        return a.UserTurn("I would rather not.", say("leave", rng, language), False)
    return a.UserTurn("", rng.choice(possible), finished)


def user_score(variables: Variables, language: Language, rng: random.Random) -> a.UserScore:
    """A user keeps to its goals where each of its messages is what they want after the reply before."""
    dialogue: Dialogue = variables["dialogue"]
    messages: Sequence[Message] = variables["messages"]
    said = replies(messages)
    users = [message.content for message in messages if message.role == "user"]
    for number, text in enumerate(users):
        possible, _ = next_words(dialogue, said[:number], language)
        if text not in possible:
            later = [one for goal in dialogue.goals for one in (goal.utterance, *goal.when_asked)]
            return a.UserScore(f"it says {text!r}", "gave_away" if text in later else "contradicted")
    # What closes a conversation is its last message, or nothing at all.
    _, finished = next_words(dialogue, said[: len(users) - 1] if dialogue.thanks else said, language)
    if not finished:
        return a.UserScore("it ends with something left that it wants", "stopped_early")
    return a.UserScore("it says what it wants, and no more", "fine")


HANDLERS: Mapping[str, Callable[[Variables, Language, random.Random], msgspec.Struct]] = {
    "RestrainedTask": restrained_task,
    "DialoguePlan": dialogue_plan,
    "ConductRating": conduct_rating,
    "UserTurn": user_turn,
    "UserScore": user_score,
}
