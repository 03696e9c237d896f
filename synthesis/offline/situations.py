"""Situations of conversations of several turns: the next action of the agent, and the next words of the user.

The offline agent does what a situation says, the offline judges hold it against one: so both read the same words, which
are those of `behaviour_words`, the grammar and the templates.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synthesis.core.records import Dialogue, Language, Message, ToolSpec
from synthesis.offline import behaviour_words as words
from synthesis.offline import grammar, plans
from synthesis.offline.facts.catalog import KINDS
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.intents import FactIntent, Intent, JointIntent, TemplateIntent, replay, understand
from synthesis.offline.plans import Value
from synthesis.offline.wording import FRAMES, without_persona
from synthesis.trajectories.teacher_answers import Standing
from synthesis.trajectories.todo_fixture import WRITES

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
        return words.ACTS[language][self.tool].format(self.entry, self.on)


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

        def heard(what: words.Said) -> tuple[str, ...] | None:
            return words.heard(what, text, language)

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
            if rest != words.THAT[language]:
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
            if found := words.heard(tool, text, language):  # type: ignore[arg-type]
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

    def _speaks(self, what: words.Said, *gaps: str, standing: Standing = "servable") -> Situation:
        return Situation((), None, words.ways(what, self.language, *gaps), standing)


def situations(messages: Sequence[Message], tools: Sequence[ToolSpec], language: Language) -> list[Situation]:
    """One for each message of the user.

    Raises:
        ValueError: there is none, or one is not understood.
    """
    policy = messages[0].content.splitlines() if messages and messages[0].role == "system" else []
    forbidden = [found[0] for line in policy if (found := words.heard("forbids", line, language))]
    confirms = any(words.heard("confirms", line, language) is not None for line in policy)
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
    return words.SOME[language].format(_noun(path, language))


def _noun(path: Path, language: Language) -> str:
    if language == "zh":
        return "对象"
    return KINDS[all_relations()[path[0]].subject].parameter.replace("_", " ")


def _open_path(text: str, language: Language) -> Path:
    """The chain that a request asks for of a subject that it leaves open; empty where it does not."""
    if words.SOME[language].partition("{")[0] not in text:
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
        if reply.rstrip().endswith(words.QUESTIONS) and asked < len(when_asked):
            message, asked = (when_asked[asked],), asked + 1
        elif goal + 1 < len(dialogue.goals):
            goal, asked = goal + 1, 0
            message = (dialogue.goals[goal].utterance,)
        else:
            message, finished = words.ways("thanks", language) if dialogue.thanks else ("",), True
    return message, finished
