"""The offline teacher's judges: six of the seven reward axes, by rules over what a run should have done."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from synthesis.core.final_answers import states_answer
from synthesis.core.matching import contains
from synthesis.core.records import Answer, Language
from synthesis.offline.intents import Intent, ready, replay
from synthesis.offline.plans import Value
from synthesis.offline.situations import Situation, situation, situations
from synthesis.offline.wording import SORRY
from synthesis.trajectories import teacher_answers as a

Variables = Mapping[str, Any]


def _last(variables: Variables, language: Language) -> Situation:
    """The situation since the user spoke last."""
    return situation(variables["messages"], variables["tools"], language)


def understanding(variables: Variables, language: Language, rng: random.Random) -> a.QueryUnderstandingScore:
    where = _last(variables, language)
    if where.intent is None:
        if where.is_said(where.messages[-1]):
            return a.QueryUnderstandingScore("it says why it calls nothing, or asks for what it needs", "yes")
        return a.QueryUnderstandingScore("nothing is to be called for this, and it does not say so", "no")
    calls = replay(where.intent, where.messages).calls
    if calls and all(call.kind == "wrong" for call in calls):
        return a.QueryUnderstandingScore("no call is about what the user asked", "no")
    return a.QueryUnderstandingScore("the calls are about what the user asked", "yes")


def planning(variables: Variables, language: Language, rng: random.Random) -> a.QueryPlanningScore:
    where = _last(variables, language)
    if where.intent is None:
        if where.is_said(where.messages[-1]):
            return a.QueryPlanningScore("there is nothing to be called, and it calls nothing", "yes")
        return a.QueryPlanningScore("it does something where there is nothing to be done", "no")
    intent = where.intent
    calls = replay(intent, where.messages).calls
    wanted = set(ready(intent, replay(intent, where.messages[:-1])))
    right = {call.step for call in calls if call.kind == "new"}
    if right == wanted and len(calls) == len(right):
        return a.QueryPlanningScore("it starts with every call that can be made now, and no other", "yes")
    if right:
        return a.QueryPlanningScore("calls are missing or too many at the start", "partly")
    return a.QueryPlanningScore("no call leads to the answer", "no")


def tool_understanding(variables: Variables, language: Language, rng: random.Random) -> a.ToolUnderstandingScore:
    where = _last(variables, language)
    intent, reaction = where.intent, where.messages[-1]
    if intent is None:
        return a.ToolUnderstandingScore("there should be no result to react to", "no")
    before = replay(intent, where.messages[:-1])
    if not reaction.tool_calls:
        missing = [step for step in intent.terminals() if step not in before.values]
        if not missing:
            return _said(intent, before.values, reaction.content, language)
        if before.exhausted():
            return a.ToolUnderstandingScore("it reports the failure after several tries", "yes")
        return a.ToolUnderstandingScore("it gives up although the failure could pass", "partly")
    kinds = {call.kind for call in replay(intent, where.messages).last_turn}
    if "redundant" in kinds:
        return a.ToolUnderstandingScore("it repeats a call whose result it has", "no")
    if "wrong" in kinds:
        return a.ToolUnderstandingScore("an argument is neither in the request nor in a result", "no")
    return a.ToolUnderstandingScore("it uses what the results say", "yes")


def _said(intent: Intent, values: Mapping[int, Value], content: str, language: Language) -> a.ToolUnderstandingScore:
    if _states(content, [values[step] for step in intent.terminals()], language):
        return a.ToolUnderstandingScore("it states what the results say", "yes")
    return a.ToolUnderstandingScore("it leaves out a result", "partly")


def _states(content: str, values: Sequence[Value], language: Language) -> bool:
    """Return whether a text states all of some values, and no others in their place."""
    return states_answer(content, Answer(values[0] if len(values) == 1 else [str(one) for one in values]), language)


def tool_planning(variables: Variables, language: Language, rng: random.Random) -> a.ToolPlanningScore:
    where = _last(variables, language)
    if where.intent is None:
        return a.ToolPlanningScore("there is nothing to be called", "no")
    calls = replay(where.intent, where.messages).last_turn
    right = sum(call.kind in ("new", "retry") for call in calls)
    if right == len(calls):
        return a.ToolPlanningScore("every call is right", "yes")
    return a.ToolPlanningScore(f"{right} of {len(calls)} calls are right", "partly" if right else "no")


def conciseness(variables: Variables, language: Language, rng: random.Random) -> a.ConcisenessScore:
    reasons = {
        "new": "it finds a value that is needed", "retry": "the call before it failed",
        "redundant": "its result was known", "wrong": "nothing needs its result",
    }  # fmt: skip
    judged: list[a.CallNecessity] = []
    for where in situations(variables["messages"], variables["tools"], language):
        if where.intent is None:
            every = [call for message in where.messages for call in message.tool_calls]
            judged += [a.CallNecessity(call.id, "nothing is to be called for this", False) for call in every]
            continue
        calls = replay(where.intent, where.messages).calls
        judged += [a.CallNecessity(one.call.id, reasons[one.kind], one.kind in ("new", "retry")) for one in calls]
    return a.ConcisenessScore(judged)


def final_answer(variables: Variables, language: Language, rng: random.Random) -> a.FinalAnswerScore:
    where = _last(variables, language)
    intent, content = where.intent, where.messages[-1].content
    if intent is None:
        if where.is_said(where.messages[-1]):
            return a.FinalAnswerScore("it says why it does nothing, or asks for what it needs", "yes", "yes")
        return a.FinalAnswerScore("it says something else than that there is nothing to be done", "no", "no")
    found = replay(intent, where.messages).values
    truth = intent.truth() or found
    terminals = intent.terminals()
    right = [step for step in terminals if step in truth and contains(content, Answer(truth[step]))]
    if len(right) == len(terminals) and _states(content, [truth[step] for step in terminals], language):
        # True, but only faithful if the results say so: a lucky guess is not.
        seen = all(found.get(step) == truth[step] for step in terminals)
        return a.FinalAnswerScore("it states every value", "yes", "yes" if seen else "no")
    if content in SORRY.values():
        done = all(step in found for step in terminals)
        return a.FinalAnswerScore("it says that it has no answer", "no", "no" if done else "yes")
    reason = f"it states {len(right)} of {len(terminals)} values"
    return a.FinalAnswerScore(reason, "partly" if right else "no", "partly" if right else "no")
