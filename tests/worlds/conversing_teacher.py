"""A teacher that writes, plays and judges conversations of several turns by rules, over the facts of the demo.

The offline teacher knows conversations of one request alone. This one knows all that `Behaviour` names, so that the
pipeline's own rules for them are run on real records: who calls what and when, what a user may say, who is to blame.

Sentences are data: each is written by `say` and read back by `heard_as`, and none may be taken for another. A
`Situation` is what an agent should do next; the agent does it, and the judges hold a run against it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.records import Behaviour, Dialogue, Language, Message, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import rng_for
from synthesis.offline import grammar, judges, plans, sampling, trajectory_author
from synthesis.offline.facts.catalog import KINDS
from synthesis.offline.facts.relations import all_relations, joinable
from synthesis.offline.intents import FactIntent, Intent, JointIntent, TemplateIntent, replay, understand
from synthesis.offline.plans import Value
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.trajectory_author import TRIES, Keep, Variables, chain_plan, chain_question, keep_of, paths
from synthesis.offline.wording import FRAMES, PERSONAS, without_persona
from synthesis.pipeline.teacher import TeacherError
from synthesis.trajectories import teacher_answers as a
from synthesis.trajectories.teacher_answers import Standing
from synthesis.trajectories.todo_fixture import WRITES

# ---------------------------------------------------------------------------------------------------------------------
# Sentences

Said = Literal[
    # by the user
    "value", "changed", "follow_up", "correct", "add_entry", "remove_entry", "move_entry", "yes", "instead", "leave",
    "thanks", "again",
    # by the agent
    "which", "shall", "missing", "read_only", "not_allowed", "untouched", "welcome", "done", "unknown",
    # by the policy
    "forbids", "confirms",
]  # fmt: skip
"""The act of a sentence."""

SENTENCES: Mapping[Language, Mapping[Said, tuple[str, ...]]] = {
    "en": {
        "value": ("I mean {}.", "It is {}."),
        "changed": ("Sorry, I meant {}.", "No, I wanted it for {}."),
        "follow_up": ("And what is {}?", "Thanks. Now tell me {}."),
        "correct": ("Please correct {} in the records to {}.", "Set {} to {}, please."),
        "add_entry": ("Put “{}” on my list “{}”.", "Please add “{}” to the list “{}”."),
        "remove_entry": ("Take “{}” off my list “{}”.", "Please delete “{}” from the list “{}”."),
        "move_entry": ("Move “{}” to my list “{}”.", "Please shift “{}” over to the list “{}”."),
        "yes": ("Yes, please.", "Yes, do that.", "That is right, go ahead."),
        "instead": ("No, I mean the list “{}”.", "Make that the list “{}”."),
        "leave": ("No, leave it as it is.", "I have changed my mind, do nothing."),
        "thanks": ("Thank you, that is all.", "That was everything, thanks."),
        "again": ("You have more tools now. Please try it again.", "I have added what you lacked, so try once more."),
        "which": ("Which {} do you mean?", "For which {}?"),
        "shall": ("I would {}. Shall I?", "That means: I {}. Is that right?"),
        "missing": ("I cannot answer that: I have no tool that finds {}.",
                    "None of my tools finds {}, so I cannot say."),
        "read_only": ("I cannot do that: my tools look things up and change nothing.",
                      "That is not possible here: I can look up records, and not change them."),
        "not_allowed": ("I am not allowed to look up {}.", "I may not give out {}."),
        "untouched": ("Then I change nothing.", "All right, everything stays as it is."),
        "welcome": ("You are welcome.", "Glad to help."),
        "done": ("Done: “{}”, list “{}”.",),
        "unknown": ("I cannot tell what you mean without an earlier answer.",),
        "forbids": ("Never call {}. Where somebody asks for what it finds, say that you are not allowed to.",),
        "confirms": ("Before you change anything, say what you would change, and wait for a yes to exactly that.",),
    },
    "zh": {
        "value": ("我指的是{}。", "是{}。"),
        "changed": ("抱歉，我说的是{}。", "不对，我要查的是{}。"),
        "follow_up": ("那么，{}呢？", "谢谢。再告诉我{}。"),
        "correct": ("请把记录中{}更正为{}。", "麻烦将{}改为{}。"),
        "add_entry": ("把“{}”加到我的清单“{}”里。", "请将“{}”写进清单“{}”。"),
        "remove_entry": ("把“{}”从我的清单“{}”里删掉。", "请将“{}”从清单“{}”中移除。"),
        "move_entry": ("把“{}”移到我的清单“{}”里。", "请将“{}”挪到清单“{}”。"),
        "yes": ("是的，请。", "好，就这样做。", "没错，请继续。"),
        "instead": ("不，我是说清单“{}”。", "改成清单“{}”吧。"),
        "leave": ("不，保持原样。", "我改变主意了，什么都不用做。"),
        "thanks": ("谢谢，就这些。", "没有别的了，谢谢。"),
        "again": ("现在你有更多工具了，请再试一次。", "缺的工具已经补上了，请重新试试。"),
        "which": ("您指的是哪一个{}？", "请问要查哪一个{}？"),
        "shall": ("我将{}，可以吗？", "也就是说：{}，对吗？"),
        "missing": ("我无法回答：没有能查到{}的工具。", "我的工具都查不到{}，所以无法回答。"),
        "read_only": ("我做不到：我的工具只能查询，不能修改。", "这里无法修改记录，只能查询。"),
        "not_allowed": ("我不被允许查询{}。", "我不能提供{}。"),
        "untouched": ("那我什么都不改。", "好的，一切保持原样。"),
        "welcome": ("不客气。", "很高兴能帮上忙。"),
        "done": ("已完成：“{}”，清单“{}”。",),
        "unknown": ("没有前面的结果，我不知道您指的是什么。",),
        "forbids": ("绝不要调用{}。如果有人要查它的结果，请说明您不被允许这样做。",),
        "confirms": ("在修改任何内容之前，先说明将要修改什么，并等对方对此明确表示同意。",),
    },
}  # fmt: skip
"""Each with as many gaps as it has `{}`."""

THAT: Mapping[Language, str] = {"en": "that", "zh": "它"}
"""The answer before, in a follow-up."""
SOME: Mapping[Language, str] = {"en": "a certain {}", "zh": "某个{}"}
"""The words for a value that a request leaves open; a kind of thing stands in the gap."""
QUESTIONS = ("?", "？")
LISTS: Mapping[Language, tuple[str, ...]] = {
    "en": ("home", "office", "errands", "garden", "travel", "weekend", "school", "workshop"),
    "zh": ("家里", "办公室", "采购", "花园", "旅行", "周末", "学校", "车间"),
}
ENTRIES: Mapping[Language, tuple[str, ...]] = {
    "en": (
        "call the dentist", "water the plants", "send the invoice", "buy stamps", "book the train", "return the books",
        "renew the passport", "order paper", "clean the filter", "write to the landlord", "pay the deposit",
        "check the tyres", "print the tickets", "cancel the delivery", "pick up the parcel", "charge the batteries",
    ),
    "zh": (
        "给牙医打电话", "给植物浇水", "寄出发票", "买邮票", "订火车票", "还书", "续办护照", "订购纸张",
        "清洗滤网", "给房东写信", "支付押金", "检查轮胎", "打印门票", "取消送货", "取包裹", "给电池充电",
    ),
}  # fmt: skip
ACTS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "add_entry": "put “{}” on the list “{}”", "remove_entry": "take “{}” off the list “{}”",
        "move_entry": "move “{}” to the list “{}”",
    },
    "zh": {
        "add_entry": "把“{}”加到清单“{}”", "remove_entry": "把“{}”从清单“{}”删除", "move_entry": "把“{}”移到清单“{}”",
    },
}  # fmt: skip
"""A write in words."""


def say(what: Said, rng: random.Random, language: Language, *gaps: str) -> str:
    """One of the sentences that do this."""
    return rng.choice(SENTENCES[language][what]).format(*gaps)


def ways(what: Said, language: Language, *gaps: str) -> tuple[str, ...]:
    """All of them."""
    return tuple(sentence.format(*gaps) for sentence in SENTENCES[language][what])


def heard_as(what: Said, text: str, language: Language) -> tuple[str, ...] | None:
    """Return the contents of the gaps of a text that does this, else None: the inverse of `say`."""
    for sentence in SENTENCES[language][what]:
        parts = sentence.split("{}")
        if (found := _between(text.strip(), parts)) is not None:
            return found
    return None


def _between(text: str, parts: Sequence[str]) -> tuple[str, ...] | None:
    first, *rest = parts
    if not text.startswith(first):
        return None
    if not rest:
        return () if text == first else None
    text, gaps = text[len(first) :], []
    for number, part in enumerate(rest, start=1):
        # The last one ends the text; so a gap may hold what looks like it.
        place = (len(text) - len(part) if text.endswith(part) else -1) if number == len(rest) else text.find(part)
        if place <= 0:
            return None
        gaps.append(text[:place])
        text = text[place + len(part) :]
    return tuple(gaps)


# ---------------------------------------------------------------------------------------------------------------------
# Situations

_RESULTS = dict(zip(WRITES, ("added", "removed", "moved"), strict=True))
Path = tuple[str, ...]


@dataclass(frozen=True)
class WriteIntent:
    """One change, as the user agreed to it."""

    tool: str
    entry: str
    on: str
    """The name of the list."""

    @property
    def tools(self) -> list[str]:
        return [self.tool]

    def arguments(self, step: int, values: Mapping[int, Value]) -> dict[str, Any] | None:
        return {"list": self.on, "entry": self.entry}

    def read(self, step: int, content: str) -> Value | None:
        try:
            result = json.loads(content)
        except (ValueError, RecursionError):  # the latter: a server's text that is nested too deep
            return None
        return result.get(_RESULTS[self.tool]) if isinstance(result, dict) else None

    def terminals(self) -> list[int]:
        return [0]

    def truth(self) -> dict[int, Value]:
        return {0: self.entry}

    def phrase(self, step: int, values: Mapping[int, Value], language: Language) -> str:
        return ACTS[language][self.tool].format(self.entry, self.on)


@dataclass(frozen=True)
class Situation:
    """The wish in the last message of the user, as far as the agent can know.

    Attributes:
        messages: from that message on.
        intent: what is to be called for it; None: nothing may be.
        says: what the agent may say instead, any of it.
        standing: what a judge calls it.
    """

    messages: Sequence[Message]
    intent: Intent | None
    says: tuple[str, ...] = ()
    standing: Standing = "servable"

    def is_said(self, message: Message) -> bool:
        """Return whether an agent that may call nothing said what it should, and called nothing."""
        return not message.tool_calls and message.content in self.says


@dataclass(frozen=True)
class _Past:
    """Context that a message may refer to: the earlier question and answer, an open value, a proposal, the last
    request."""

    path: Path = ()
    value: Value | None = None
    pending: Path = ()
    proposal: WriteIntent | None = None
    asked: Intent | None = None


@dataclass(frozen=True)
class _Reader:
    language: Language
    offered: Collection[str]
    forbidden: Collection[str]
    confirms: bool

    def read(self, text: str, past: _Past) -> tuple[Situation, _Past]:
        """A message of the user, and what the next one may refer to.

        Raises:
            ValueError: it is not understood.
        """
        language = self.language
        text = without_persona(text.strip(), language).strip()

        def heard(what: Said) -> tuple[str, ...] | None:
            return heard_as(what, text, language)

        if heard("thanks") is not None:
            return self._speaks("welcome"), past
        if (past.proposal or past.pending) and heard("leave") is not None:
            return self._speaks("untouched"), replace(past, proposal=None, pending=())
        if past.proposal is not None:
            if heard("yes") is not None:
                return self._works(past.proposal), replace(past, proposal=None)
            if found := heard("instead"):
                return self._proposes(replace(past.proposal, on=found[0]), past)
        if past.asked is not None and heard("again") is not None:
            return self._works(past.asked), past
        if past.pending and (found := heard("value")):
            return self._looks_up(found[0], past.pending)
        if past.path and (found := heard("changed")):
            return self._looks_up(found[0], past.path)
        if found := heard("follow_up"):
            rest, path = grammar.unravel(found[0], language)
            if rest != THAT[language]:
                raise ValueError(f"{text!r} does not refer to an answer")
            if past.value is None:
                return self._speaks("unknown"), past
            return self._looks_up(str(past.value), path)
        if pending := _open_path(text, language):
            noun = _noun(pending, language)
            return self._speaks("which", noun, standing="value_missing"), replace(past, pending=pending)
        if found := heard("correct"):
            grammar.unravel(found[0], language)
            return self._speaks("read_only", standing="impossible"), past
        for tool in WRITES:
            if found := heard_as(tool, text, language):  # type: ignore[arg-type]
                return self._proposes(WriteIntent(tool, *found), past)
        intent = understand(text, language)
        if isinstance(intent, FactIntent) and len(plans.chains(intent.plan)) == 1:
            return self._looks_up(*plans.chains(intent.plan)[0])
        return self._works(intent), _Past(asked=intent)

    def _looks_up(self, subject: str, path: Path) -> tuple[Situation, _Past]:
        if subject not in all_relations()[path[0]].rows:
            raise ValueError(f"{path[0]} has no row for {subject!r}")
        intent = FactIntent(plans.from_chains([(subject, path)]))
        return self._works(intent), _Past(path, asked=intent)

    def _proposes(self, write: WriteIntent, past: _Past) -> tuple[Situation, _Past]:
        if not self.confirms or write.tool not in self.offered:
            return self._works(write), past
        proposed = self._speaks("shall", write.phrase(0, {}, self.language), standing="unconfirmed")
        return proposed, replace(past, proposal=write)

    def _works(self, intent: Intent) -> Situation:
        for step, tool in enumerate(intent.tools):
            if tool in self.forbidden:
                return self._speaks("not_allowed", whole_phrase(intent, step, self.language), standing="forbidden")
        for step, tool in enumerate(intent.tools):
            if tool not in self.offered:
                return self._speaks("missing", whole_phrase(intent, step, self.language), standing="tool_missing")
        return Situation((), intent)

    def _speaks(self, what: Said, *gaps: str, standing: Standing = "servable") -> Situation:
        return Situation((), None, ways(what, self.language, *gaps), standing)


def situations(messages: Sequence[Message], tools: Sequence[ToolSpec], language: Language) -> list[Situation]:
    """One for each message of the user.

    Raises:
        ValueError: there is none, or one is not understood.
    """
    policy = messages[0].content.splitlines() if messages and messages[0].role == "system" else []
    forbidden = [found[0] for line in policy if (found := heard_as("forbids", line, language))]
    confirms = any(heard_as("confirms", line, language) is not None for line in policy)
    reader = _Reader(language, {tool.name for tool in tools}, forbidden, confirms)
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if not starts:
        raise ValueError("the user has said nothing")
    every: list[Situation] = []
    past = _Past()
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        part = messages[start:end]
        one, past = reader.read(messages[start].content, past)
        every.append(replace(one, messages=part))
        if one.intent is not None and past.path and past.value is None:
            past = replace(past, value=replay(one.intent, part).values.get(one.intent.terminals()[0]))
    return every


def situation(messages: Sequence[Message], tools: Sequence[ToolSpec], language: Language) -> Situation:
    """The last of `situations`; raises the same."""
    return situations(messages, tools, language)[-1]


def whole_phrase(intent: Intent, step: int, language: Language) -> str:
    """The look-up of a step in words, without the values of the steps before it."""
    if isinstance(intent, JointIntent):
        return whole_phrase(*intent.part(step), language)
    if not isinstance(intent, FactIntent):
        return intent.phrase(step, {}, language) if isinstance(intent, TemplateIntent | WriteIntent) else ""
    path: list[str] = []
    at: str | int = step
    while isinstance(at, int):
        path.append(intent.plan[at].relation)
        at = intent.plan[at].argument
    return plain_phrase(at, tuple(reversed(path)), language)


def plain_phrase(subject: str, path: Path, language: Language) -> str:
    """The noun phrase of a chain, in the first of its wordings."""
    for relation in path:
        subject = all_relations()[relation].phrases[language][0].replace("{x}", subject)
    return subject


def open_subject(path: Path, language: Language) -> str:
    """The words for the subject of a chain in a request that leaves it open."""
    return SOME[language].format(_noun(path, language))


def _noun(path: Path, language: Language) -> str:
    if language == "zh":
        return "对象"
    return KINDS[all_relations()[path[0]].subject].parameter.replace("_", " ")


def _open_path(text: str, language: Language) -> Path:
    """The chain that a request asks for of a subject that it leaves open; empty where it does not."""
    if SOME[language].partition("{")[0] not in text:
        return ()
    for frame in (one for frames in FRAMES[language].values() for one in frames if one.accepts(1)):
        if text.startswith(frame.before) and text.endswith(frame.after):
            inside = text[len(frame.before) : len(text) - len(frame.after)]
            try:
                rest, path = grammar.unravel(inside, language)
            except ValueError:
                continue
            if rest == open_subject(path, language):
                return path
    return ()


# ---------------------------------------------------------------------------------------------------------------------
# The user


def replies(messages: Sequence[Message]) -> list[str]:
    """The last words of the agent before each further message of the user, and at the end."""
    found = [
        before.content
        for before, after in zip(messages, messages[1:], strict=False)
        if before.role == "assistant" and after.role == "user"
    ]
    return [*found, messages[-1].content] if messages and messages[-1].role == "assistant" else found


def next_words(dialogue: Dialogue, said: Sequence[str], language: Language) -> tuple[tuple[str, ...], bool]:
    """Return the possible next messages of a user after these replies, and whether it wants nothing more."""
    goal = asked = 0
    message: tuple[str, ...] = (dialogue.goals[0].utterance,)
    finished = False
    for reply in said:
        when_asked = dialogue.goals[goal].when_asked
        if reply.rstrip().endswith(QUESTIONS) and asked < len(when_asked):
            message, asked = (when_asked[asked],), asked + 1
        elif goal + 1 < len(dialogue.goals):
            goal, asked = goal + 1, 0
            message = (dialogue.goals[goal].utterance,)
        else:
            message, finished = ways("thanks", language) if dialogue.thanks else ("",), True
    return message, finished


# ---------------------------------------------------------------------------------------------------------------------
# The author

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
    """Goals for `turns` messages: a chain, perhaps of a subject that is only said when asked; then what follows from
    the answer, the same of another subject, or something else; and, where a tool is forbidden, what that would find."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The agent and its judges

MEDDLE = 0.04
"""Share of the turns in which an agent that may call nothing calls something."""
_SAYS: Mapping[Language, Mapping[str, str]] = {
    "en": {"try": "I try a tool.", "agreed": "It is agreed to.", "have": "I have the answer."},
    "zh": {"try": "我试一个工具。", "agreed": "已经得到同意。", "have": "我有答案了。"},
}
_RESTRAINED: Mapping[Language, Mapping[Standing, str]] = {
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
    """The agent's next turn."""
    where = situation(messages, tools, language)
    if where.intent is None:
        return _restrained(where, tools, language, rng)
    turn = asking(trajectory_author, where, lambda: trajectory_author.agent(messages, language, rng))
    if not isinstance(where.intent, WriteIntent):
        return turn
    if turn.calls:
        return replace(turn, reasoning=_SAYS[language]["agreed"])
    return AssistantTurn(_SAYS[language]["have"], say("done", rng, language, where.intent.entry, where.intent.on))


def _restrained(where: Situation, tools: Sequence[ToolSpec], language: Language, rng: random.Random) -> AssistantTurn:
    """The turn of an agent that may call nothing. A careless one does: what it asks about is made up."""
    known = [relation for tool in tools if (relation := all_relations().get(tool.name)) is not None]
    meddled = any(message.tool_calls for message in where.messages)
    if rng.random() < MEDDLE and known and not meddled:
        relation = rng.choice(known)
        arguments = {relation.parameter: relation.argument(rng.choice(sampling.subjects((relation.id,))))}
        return AssistantTurn(_SAYS[language]["try"], "", [ToolCall("", relation.id, arguments)])
    return AssistantTurn(_RESTRAINED[language][where.standing], rng.choice(where.says))


def asking(module: Any, where: Situation, made: Callable[[], Any]) -> Any:
    """What a rule of the offline teacher makes where the one request is what a situation says."""
    plain = module.request_of
    module.request_of = lambda messages, language: (where.intent, where.messages)
    try:
        return made()
    finally:
        module.request_of = plain


def _of_restraint(name: str, where: Situation) -> msgspec.Struct:
    """The verdict on an agent that may call nothing."""
    right = where.is_said(where.messages[-1])
    no, yes = "it does something where there is nothing to be done", "it says why it calls nothing, or asks"
    match name:
        case "QueryUnderstandingScore":
            return a.QueryUnderstandingScore(yes if right else no, "yes" if right else "no")
        case "QueryPlanningScore":
            return a.QueryPlanningScore(yes if right else no, "yes" if right else "no")
        case "ToolUnderstandingScore":
            return a.ToolUnderstandingScore("there should be no result to react to", "no")
        case "ToolPlanningScore":
            return a.ToolPlanningScore("there is nothing to be called", "no")
    return a.FinalAnswerScore(yes if right else no, "yes" if right else "no", "yes" if right else "no")


def _judged_by(name: str) -> Callable[[Variables, Language, random.Random], msgspec.Struct]:
    rule = trajectory_author.HANDLERS[name]

    def judge(variables: Variables, language: Language, rng: random.Random) -> msgspec.Struct:
        where = situation(variables["messages"], variables["tools"], language)
        if where.intent is None:
            return _of_restraint(name, where)
        return asking(judges, where, lambda: rule(variables, language, rng))

    return judge


def conciseness(variables: Variables, language: Language, rng: random.Random) -> a.ConcisenessScore:
    judged: list[a.CallNecessity] = []
    for where in situations(variables["messages"], variables["tools"], language):
        if where.intent is None:
            every = [call for message in where.messages for call in message.tool_calls]
            judged += [a.CallNecessity(call.id, "nothing is to be called for this", False) for call in every]
            continue
        judged += asking(judges, where, lambda: judges.conciseness(variables, language, rng)).calls
    return a.ConcisenessScore(judged)


class ConversingTeacher(OfflineTeacher):
    """The offline teacher, and conversations by rules. To a run it is as a model that knows of all behaviours."""

    BY_RULES = False

    def __init__(self) -> None:
        super().__init__()
        axes = ("QueryUnderstanding", "QueryPlanning", "ToolUnderstanding", "ToolPlanning", "FinalAnswer")
        self._handlers |= {f"{axis}Score": _judged_by(f"{axis}Score") for axis in axes} | {
            "ConcisenessScore": conciseness, "RestrainedTask": restrained_task, "DialoguePlan": dialogue_plan,
            "ConductRating": conduct_rating, "UserTurn": user_turn, "UserScore": user_score,
        }  # fmt: skip

    async def act(self, messages, tools, *, language, seed, sent=()):
        try:
            return agent(messages, tools, language, rng_for(seed, "AgentTurn"))
        except ValueError as error:
            raise TeacherError(f"the agent: {error}") from error
