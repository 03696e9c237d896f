"""Rules of the offline teacher for the trajectory pipeline: proposals, tasks, the agent and the emulator.

The grammar and the templates write requests, and parse them again. The agent follows the parsed request, and the judges
(`synthesis.offline.judges`) compare a run with it. A small seeded share of the agent's turns is careless, so that the
filter has work to do.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.records import Language, Message, Task, ToolCall, ToolServer, ToolSpec
from synthesis.offline import behaviour_words, grammar, judges, plans, sampling, templates
from synthesis.offline.facts.relations import all_relations, joinable
from synthesis.offline.intents import FactIntent, JointIntent, TemplateIntent, ready, replay, understand
from synthesis.offline.plans import Plan, Value
from synthesis.offline.situations import Situation, WriteIntent, situation
from synthesis.offline.wording import BESIDES, SAYS, SORRY, introduction, listed
from synthesis.pipeline.partition import Partition
from synthesis.trajectories import teacher_answers as a
from synthesis.trajectories.groups import crosses, is_group
from synthesis.trajectories.personas import Persona

Variables = Mapping[str, Any]
Path = tuple[str, ...]

REDUNDANT, GIVE_UP, FORGET, MEDDLE = 0.02, 0.04, 0.02, 0.04
"""Shares of careless turns: a call repeated for nothing, a failure not retried, an answer that leaves something out, a
call where none may be made."""
_MAX_HOPS = 3
TRIES = 200


# ---------------------------------------------------------------------------------------------------------------------
# Chains


@functools.cache
def paths(relations: Path) -> tuple[Path, ...]:
    """All chains of up to three joinable relations among the given ones that some subject makes sense of."""
    table = all_relations()
    every: list[Path] = []
    last: list[Path] = [(one,) for one in relations]
    for _ in range(_MAX_HOPS):
        last = [path for path in last if sampling.subjects(path)]
        every += last
        last = [(*p, one) for p in last for one in relations if one not in p and joinable(table[p[-1]], table[one])]
    return tuple(every)


def _relations(server: ToolServer) -> Path:
    return tuple(tool.name for tool in server.tools if tool.name in all_relations())


def _templates(server: ToolServer) -> list[templates.Template]:
    return templates.usable([tool.name for tool in server.tools])


def propose(variables: Variables, language: Language, rng: random.Random) -> a.TaskChainProposals:
    server: ToolServer = variables["server"]
    chains = [path for path in paths(_relations(server)) if len(path) > 1] or list(paths(_relations(server)))
    fixed = [one for one in _templates(server) if one.dependent]
    if is_group(server):  # a template is of one server
        chains, fixed = [path for path in chains if crosses(server, path)], []
        if not chains:
            return a.TaskChainProposals([])
    if not chains and not fixed:
        raise ValueError(f"server {server.id}: none of its tools is known")
    pairs: list[a.ProposedTask] = []
    for _ in range(variables["count"]):
        if chains:
            path = rng.choice(chains)
            plan = plans.from_chains([(rng.choice(sampling.subjects(path)), path)])
            pairs.append(a.ProposedTask(grammar.question(plan, rng, language), list(path)))
        else:
            template = rng.choice(fixed)
            slots = templates.draw_slots(template, rng, lambda _: True)
            pairs.append(a.ProposedTask(templates.fill(template, slots, rng, language), template.chain))
    return a.TaskChainProposals(pairs)


def vote(variables: Variables, language: Language, rng: random.Random) -> a.ChainVote:
    try:
        query = chain_question(variables, language, rng)
    except ValueError as error:
        return a.ChainVote(str(error), "", False)
    return a.ChainVote("every call has its argument from the request or from the call before", query, True)


def back_translated_query(variables: Variables, language: Language, rng: random.Random) -> a.BackTranslatedQuery:
    try:
        return a.BackTranslatedQuery("", chain_question(variables, language, rng), True)
    except ValueError as error:
        return a.BackTranslatedQuery(str(error), "", False)


def back_translated_chain(variables: Variables, language: Language, rng: random.Random) -> a.BackTranslatedChain:
    return a.BackTranslatedChain("", understand(variables["query"], language).tools)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


def chain_task(variables: Variables, language: Language, rng: random.Random) -> a.ChainTask:
    return a.ChainTask("", chain_question(variables, language, rng))


def chain_question(variables: Variables, language: Language, rng: random.Random) -> str:
    """A request that needs exactly the chain.

    Raises:
        ValueError: nobody would ask for it, or it is held out for evaluation.
    """
    server: ToolServer = variables["server"]
    path: Path = tuple(variables["chain"])
    keep = keep_of(variables)
    if set(path) <= set(all_relations()):
        return grammar.question(chain_plan(path, keep, rng), rng, language)
    fitting = [one for one in _templates(server) if one.chain == list(path) and one.dependent]
    if not fitting:
        raise ValueError(f"no request needs {'>'.join(path)} in this order")
    template = rng.choice(fitting)
    return templates.fill(template, templates.draw_slots(template, rng, keep.entity), rng, language)


def chain_plan(path: Path, keep: Keep, rng: random.Random) -> Plan:
    """The chain, of a subject that may be asked about.

    Raises:
        ValueError: nobody would ask for it, or it is held out for evaluation.
    """
    table = all_relations()
    for one, two in zip(path, path[1:], strict=False):
        if not joinable(table[one], table[two]):
            raise ValueError(f"{two} needs no value of {one}")
    every = sampling.subjects(path)
    if not every:
        raise ValueError(f"{'>'.join(path)} leads back to where it started, or nowhere")
    if not keep.joins(path):
        raise ValueError(f"{'>'.join(path)}: nearly all that it finds is the same")
    if not keep.signature(">".join(path)):
        raise ValueError(f"{'>'.join(path)} is held out for evaluation")
    for _ in range(TRIES):
        plan = plans.from_chains([(rng.choice(every), path)])
        if keep.plan(plan):
            return plan
    raise ValueError(f"{'>'.join(path)}: every subject tried is held out for evaluation, or can skip a hop")


class Keep:
    """A filter of entities and structures: all of them, all but the held-out ones, or informative joins."""

    def __init__(self, partition: Partition | None, informative: bool = False) -> None:
        self._partition, self._informative = partition, informative

    def entity(self, entity: str) -> bool:
        return self._partition is None or self._partition.split_of_entity(entity) == "train"

    def signature(self, signature: str) -> bool:
        return self._partition is None or self._partition.split_of_signature(signature) == "train"

    def joins(self, path: Path) -> bool:
        return not (self._informative and any(map(sampling.tells_nothing, path, path[1:])))

    def plan(self, plan: Plan) -> bool:
        if self._informative and not sampling.informative(plan):
            return False
        if self._partition is None:
            return True
        return self.signature(plans.signature(plan)) and all(map(self.entity, plans.entities(plan)))


def keep_of(variables: Variables) -> Keep:
    """The filter that a request asks for."""
    return Keep(variables.get("partition"), variables.get("informative_joins", False))


def server_task(variables: Variables, language: Language, rng: random.Random) -> a.ServerTask:
    server: ToolServer = variables["server"]
    count: int = variables["tool_count"]
    relations = _relations(server)
    if is_group(server):
        return _several_servers(server, count, keep_of(variables), language, rng)
    if relations:
        plan = _parallel_plan(paths(relations), count, keep_of(variables), rng)
        return a.ServerTask("", list(dict.fromkeys(FactIntent(plan).tools)), grammar.question(plan, rng, language))
    fixed = [one for one in _templates(server) if len(one.steps) > 1 and not one.dependent]
    fitting = [one for one in fixed if len(set(one.chain)) == count] or fixed
    if not fitting:
        raise ValueError(f"server {server.id}: no request needs {count} of its tools")
    template = rng.choice(fitting)
    slots = templates.draw_slots(template, rng, keep_of(variables).entity)
    return a.ServerTask("", list(dict.fromkeys(template.chain)), templates.fill(template, slots, rng, language))


def _several_servers(
    server: ToolServer, count: int, keep: Keep, language: Language, rng: random.Random
) -> a.ServerTask:
    """A request over a group: parallel chains of facts; or, where a server has templates, one of them and a request of
    another server.

    Raises:
        ValueError: there is none of so many tools.
    """
    relations, fixed = _relations(server), _templates(server)
    if not fixed:
        plan = _parallel_plan(paths(relations), count, keep, rng, lambda tools: crosses(server, tools))
        return a.ServerTask("", list(dict.fromkeys(FactIntent(plan).tools)), grammar.question(plan, rng, language))

    def by_template(one: templates.Template) -> str:
        return templates.fill(one, templates.draw_slots(one, rng, keep.entity), rng, language)

    def by_chain(path: Path) -> str:
        return grammar.question(chain_plan(path, keep, rng), rng, language)

    asked: list[tuple[list[str], Callable[[], str]]] = [(one.chain, partial(by_template, one)) for one in fixed]
    asked += [(list(path), partial(by_chain, path)) for path in paths(relations)]
    for _ in range(TRIES):
        (first, say_first), (second, say_second) = asked[rng.randrange(len(fixed))], rng.choice(asked)
        tools = list(dict.fromkeys([*first, *second]))
        apart = not {server.origin(one).server_id for one in first} & {server.origin(one).server_id for one in second}
        if apart and len(tools) == count:
            try:
                return a.ServerTask("", tools, f"{say_first()}{BESIDES[language]}{say_second()}")
            except ValueError:  # of this chain every subject is held out
                continue
    raise ValueError(f"server {server.id}: no request over {count} tools was found in {TRIES} tries")


def _parallel_plan(
    every: Sequence[Path], count: int, keep: Keep, rng: random.Random,
    fits: Callable[[set[str]], bool] = lambda tools: True,
) -> Plan:  # fmt: skip
    """Two or three independent chains over `count` different tools; about half of them ask of the same subject."""
    single = [path for path in every if len(path) == 1]
    for _ in range(TRIES):
        branches = rng.choice((2, 2, 3))
        chosen = [rng.choice(single)] * branches if count == 1 else rng.choices(every, k=branches)
        tools = {tool for path in chosen for tool in path}
        if len(tools) != count or not fits(tools):
            continue
        first = rng.choice(sampling.subjects(chosen[0]))
        chains = [(first, chosen[0])]
        for path in chosen[1:]:
            shared = path != chosen[0] and rng.random() < 0.7 and first in sampling.subjects(path)
            chains.append((first if shared else rng.choice(sampling.subjects(path)), path))
        plan = plans.from_chains(chains)
        ends = [str(plans.evaluate(plan)[step]).casefold() for step in plans.terminals(plan)]
        if len(set(ends)) == branches and keep.plan(plan):
            return plan
    raise ValueError(f"no parallel request over {count} tools was found in {TRIES} tries")


def variation(variables: Variables, language: Language, rng: random.Random) -> a.TaskVariation:
    task: Task = variables["task"]
    intent = understand(task.question, language)
    assert isinstance(intent, FactIntent | TemplateIntent | JointIntent)
    mode: grammar.Style = variables["mode"]
    keep = keep_of(variables)
    space = " " if language == "en" else ""
    persona: str | Persona = variables["persona"]
    if mode == "persona" and isinstance(persona, Persona):
        return a.TaskVariation("", f"{introduction(persona, language)}{space}{_plain(intent, language, rng)}")
    if isinstance(intent, JointIntent):
        parts = [
            _other_subject(part, keep, rng) if mode == "diverse" else part for part in (intent.first, intent.second)
        ]
        return a.TaskVariation("", grammar.styled(_plain(JointIntent(*parts), language, rng), mode, rng, language))
    if isinstance(intent, FactIntent):
        plan = _other_subjects(intent.plan, keep, rng) if mode == "diverse" else intent.plan
        return a.TaskVariation("", grammar.question(plan, rng, language, mode))
    slots = templates.draw_slots(intent.template, rng, keep.entity) if mode == "diverse" else dict(intent.slots)
    text = templates.fill(intent.template, slots, rng, language)
    return a.TaskVariation("", grammar.styled(text, mode, rng, language))


def _other_subject(intent: FactIntent | TemplateIntent, keep: Keep, rng: random.Random) -> FactIntent | TemplateIntent:
    if isinstance(intent, FactIntent):
        return FactIntent(_other_subjects(intent.plan, keep, rng))
    return TemplateIntent(intent.template, tuple(templates.draw_slots(intent.template, rng, keep.entity).items()))


def _plain(intent: FactIntent | TemplateIntent | JointIntent, language: Language, rng: random.Random) -> str:
    if isinstance(intent, JointIntent):
        return BESIDES[language].join(_plain(part, language, rng) for part in (intent.first, intent.second))
    if isinstance(intent, FactIntent):
        return grammar.question(intent.plan, rng, language)
    return templates.fill(intent.template, dict(intent.slots), rng, language)


def _other_subjects(plan: Plan, keep: Keep, rng: random.Random) -> Plan:
    """Return the same structure for other subjects; chains with a common subject keep having one if possible."""
    chains = plans.chains(plan)
    for _ in range(TRIES):
        renamed: dict[str, str] = {}
        fresh = []
        for subject, path in chains:
            every = sampling.subjects(path)
            if renamed.get(subject) not in every:
                renamed[subject] = rng.choice(every)
            fresh.append((renamed[subject], path))
        candidate = plans.from_chains(fresh)
        if plans.signature(candidate) == plans.signature(plan) and keep.plan(candidate):
            return candidate
    raise ValueError("no other subjects were found for this request")


def rating(variables: Variables, language: Language, rng: random.Random) -> a.TaskRating:
    """Quality: it can be understood and needs the target tools. Realism: few, short, shallow phrases. Necessity: the
    answer does not stand in the request already."""
    task: Task = variables["task"]
    try:
        intent = understand(task.question, language)
    except ValueError as error:
        return a.TaskRating(str(error), 1, 1, 1)
    if set(intent.tools) != set(task.tools):
        return a.TaskRating(f"it needs {', '.join(intent.tools)}, not {', '.join(task.tools)}", 2, 3, 3)
    truth = intent.truth() or {}
    given = [value for step in intent.terminals() if (value := truth.get(step)) and _stands_in(value, task.question)]
    necessity = 2 if given else 5
    ends = len(intent.terminals())
    realism = 5 - (ends > 2) - (len(intent.tools) > 3) - (len(intent.tools) > 5) - (len(task.question) > 200)
    reason = f"the request contains its answer {given[0]!r}" if given else "it needs the tools it was made for"
    return a.TaskRating(reason, 5, max(1, realism), necessity)


def _stands_in(value: Value, question: str) -> bool:
    text = str(value)
    return len(text) > 2 and not text.isdigit() and text.casefold() in question.casefold()


# ---------------------------------------------------------------------------------------------------------------------
# The agent and the emulator

_RESTRAINED: Mapping[Language, Mapping[a.Standing, str]] = {
    "en": {
        "servable": "There is nothing to look up.", "tool_missing": "None of the tools does that.",
        "value_missing": "A value is missing that only the user has.", "impossible": "The tools only look things up.",
        "forbidden": "I am told not to.", "unconfirmed": "This must be confirmed first.",
    },
    "zh": {
        "servable": "没有要查的了。", "tool_missing": "没有能做这件事的工具。",
        "value_missing": "缺少只有用户知道的值。",
        "impossible": "这些工具只能查询。", "forbidden": "规定不允许我这样做。", "unconfirmed": "必须先得到确认。",
    },
}  # fmt: skip
"""The agent's reasoning where it may call nothing."""


def agent(
    messages: Sequence[Message], tools: Sequence[ToolSpec], language: Language, rng: random.Random
) -> AssistantTurn:
    """The agent's next turn in a conversation whose user says what is written here."""
    where = situation(messages, tools, language)
    if where.intent is None:
        return _restrained(where, tools, language, rng)
    intent = where.intent
    progress = replay(intent, where.messages)
    says = SAYS[language]
    careless = rng.random()
    failed = [step for step in progress.failures if step not in progress.values]
    if progress.exhausted() or (failed and careless < GIVE_UP):
        return AssistantTurn(says["broken"], SORRY[language])
    terminals = intent.terminals()
    if all(step in progress.values for step in terminals):
        repeated = [call.call for call in progress.calls if call.kind in ("new", "retry")]
        if careless < REDUNDANT and not any(call.kind == "redundant" for call in progress.calls):
            return AssistantTurn(says["check"], "", [rng.choice(repeated)])
        stated = [progress.values[step] for step in terminals]
        if REDUNDANT <= careless < REDUNDANT + FORGET and len(intent.tools) > 1:
            stated = stated[:-1] or [next(iter(progress.values.values()))]
        if isinstance(intent, WriteIntent):
            return AssistantTurn(says["have"], behaviour_words.say("done", rng, language, intent.entry, intent.on))
        return AssistantTurn(says["have"], final_text(stated, language))
    calls = ready(intent, progress)
    phrases = listed([intent.phrase(step, progress.values, language) for step in calls], language)
    if failed:
        reasoning = says["retry"]
    elif isinstance(intent, WriteIntent):
        reasoning = says["agreed"]
    elif progress.values:
        reasoning = says["next"].format(phrases)
    else:
        reasoning = says["need" if len(calls) == len(intent.tools) else "first"].format(phrases)
    return AssistantTurn(reasoning, "", [ToolCall("", intent.tools[step], args) for step, args in calls.items()])


def _restrained(where: Situation, tools: Sequence[ToolSpec], language: Language, rng: random.Random) -> AssistantTurn:
    """The turn of an agent that may call nothing. A careless one does: what it asks about is made up."""
    known = [relation for tool in tools if (relation := all_relations().get(tool.name)) is not None]
    meddled = any(message.tool_calls for message in where.messages)
    if rng.random() < MEDDLE and known and not meddled:
        relation = rng.choice(known)
        arguments = {relation.parameter: relation.argument(rng.choice(sampling.subjects((relation.id,))))}
        return AssistantTurn(SAYS[language]["try"], "", [ToolCall("", relation.id, arguments)])
    return AssistantTurn(_RESTRAINED[language][where.standing], rng.choice(where.says))


def final_text(values: Sequence[Value], language: Language) -> str:
    """The final answer: one short sentence with the values."""
    says = SAYS[language]
    return says["one" if len(values) == 1 else "many"].format(listed([str(value) for value in values], language))


def emulate(variables: Variables, language: Language, rng: random.Random) -> a.EmulatedResult:
    call: ToolCall = variables["call"]
    relation = all_relations().get(call.name)
    if relation is None:
        raise ValueError(f"no facts are known about the tool {call.name!r}")
    subject = " ".join(str(call.arguments.get(relation.parameter, "")).split())
    value = relation.rows.get(subject)
    if value is None:
        error = f"unknown {relation.parameter.replace('_', ' ')}: {subject!r}"
        return a.EmulatedResult("", json.dumps({"error": error}, ensure_ascii=False), True)
    return a.EmulatedResult("", json.dumps({relation.result: value}, ensure_ascii=False), False)


HANDLERS: dict[str, Callable[[Variables, Language, random.Random], msgspec.Struct]] = {
    "TaskChainProposals": propose,
    "ChainVote": vote,
    "BackTranslatedQuery": back_translated_query,
    "BackTranslatedChain": back_translated_chain,
    "ChainTask": chain_task,
    "ServerTask": server_task,
    "TaskVariation": variation,
    "TaskRating": rating,
    "EmulatedResult": emulate,
    "QueryUnderstandingScore": judges.understanding,
    "QueryPlanningScore": judges.planning,
    "ToolUnderstandingScore": judges.tool_understanding,
    "ToolPlanningScore": judges.tool_planning,
    "ConcisenessScore": judges.conciseness,
    "FinalAnswerScore": judges.final_answer,
}
