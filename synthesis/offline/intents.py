"""Intents: a request as calls. The offline agent follows one, and the offline judges compare a run with it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from synthesis.core.records import Language, Message, ToolCall
from synthesis.offline import grammar, plans, templates
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.plans import Plan, Value
from synthesis.offline.wording import BESIDES, without_complication, without_persona

ATTEMPTS = 3
"""Tries of a call before the agent reports the failure."""


class Intent(Protocol):
    """Steps, each one call; later ones may need the values of earlier ones."""

    @property
    def tools(self) -> list[str]:
        """The tool of each step."""
        ...

    def arguments(self, step: int, values: Mapping[int, Value]) -> dict[str, Any] | None:
        """The arguments of a step, or None while a value it needs is unknown."""
        ...

    def read(self, step: int, content: str) -> Value | None:
        """The value of a step in its tool result, or None when the result is a failure."""
        ...

    def terminals(self) -> list[int]:
        """The steps whose values the request asks for."""
        ...

    def truth(self) -> dict[int, Value] | None:
        """The true values, where they are known without a tool."""
        ...

    def phrase(self, step: int, values: Mapping[int, Value], language: Language) -> str:
        """The look-up of a step in words."""
        ...


@dataclass(frozen=True)
class FactIntent:
    """A plan over relations; the relation's id is the tool's name."""

    plan: Plan

    @property
    def tools(self) -> list[str]:
        return [step.relation for step in self.plan]

    def arguments(self, step: int, values: Mapping[int, Value]) -> dict[str, Any] | None:
        relation = all_relations()[self.plan[step].relation]
        subject = self._subject(step, values)
        return None if subject is None else {relation.parameter: relation.argument(subject)}

    def read(self, step: int, content: str) -> Value | None:
        try:
            result = json.loads(content)
        except (ValueError, RecursionError):  # the latter: a server's text that is nested too deep
            return None
        key = all_relations()[self.plan[step].relation].result
        return result.get(key) if isinstance(result, dict) else None

    def terminals(self) -> list[int]:
        return plans.terminals(self.plan)

    def truth(self) -> dict[int, Value]:
        return dict(enumerate(plans.evaluate(self.plan)))

    def phrase(self, step: int, values: Mapping[int, Value], language: Language) -> str:
        relation = all_relations()[self.plan[step].relation]
        return relation.phrases[language][0].replace("{x}", self._subject(step, values) or "")

    def _subject(self, step: int, values: Mapping[int, Value]) -> str | None:
        argument = self.plan[step].argument
        if isinstance(argument, str):
            return argument
        return str(values[argument]) if argument in values else None


@dataclass(frozen=True)
class TemplateIntent:
    """A filled template for a real MCP server."""

    template: templates.Template
    slots: tuple[tuple[str, str], ...]

    @property
    def tools(self) -> list[str]:
        return self.template.chain

    def arguments(self, step: int, values: Mapping[int, Value]) -> dict[str, Any] | None:
        one = self.template.steps[step]
        if any(index not in values for index in one.needs()):
            return None
        return {
            name: self._filled(value, values) if isinstance(value, str) else value
            for name, value in one.arguments.items()
        }

    def read(self, step: int, content: str) -> Value | None:
        found = re.search(self.template.steps[step].reads, content)
        return found.group(1) if found else None

    def terminals(self) -> list[int]:
        return [index for index, step in enumerate(self.template.steps) if step.terminal]

    def truth(self) -> None:
        return None

    def phrase(self, step: int, values: Mapping[int, Value], language: Language) -> str:
        return self._filled(self.template.steps[step].phrase[language], values)

    def _filled(self, text: str, values: Mapping[int, Value]) -> str:
        # One pass: a value that looks like a slot stays as it is.
        known = {**dict(self.slots), **{str(index): str(value) for index, value in values.items()}}
        return re.sub(r"\{(\w+)\}", lambda slot: known[slot[1]], text)


@dataclass(frozen=True)
class JointIntent:
    """Two requests of one message; the second one's steps are counted after the first one's."""

    first: FactIntent | TemplateIntent
    second: FactIntent | TemplateIntent

    @property
    def tools(self) -> list[str]:
        return [*self.first.tools, *self.second.tools]

    def part(self, step: int) -> tuple[FactIntent | TemplateIntent, int]:
        """The part that a step belongs to, and its number there."""
        own = len(self.first.tools)
        return (self.first, step) if step < own else (self.second, step - own)

    def arguments(self, step: int, values: Mapping[int, Value]) -> dict[str, Any] | None:
        part, own = self.part(step)
        return part.arguments(own, self._values(step - own, values))

    def read(self, step: int, content: str) -> Value | None:
        part, own = self.part(step)
        return part.read(own, content)

    def terminals(self) -> list[int]:
        return [*self.first.terminals(), *(len(self.first.tools) + step for step in self.second.terminals())]

    def truth(self) -> dict[int, Value] | None:
        first, second = self.first.truth(), self.second.truth()
        if first is None or second is None:
            return None
        return {**first, **{len(self.first.tools) + step: value for step, value in second.items()}}

    def phrase(self, step: int, values: Mapping[int, Value], language: Language) -> str:
        part, own = self.part(step)
        return part.phrase(own, self._values(step - own, values), language)

    @staticmethod
    def _values(start: int, values: Mapping[int, Value]) -> dict[int, Value]:
        """As the part that begins at a step counts them."""
        return {step - start: value for step, value in values.items() if step >= start}


@functools.lru_cache(maxsize=65_536)
def understand(question: str, language: Language) -> Intent:
    """The intent of a request of the templates or of the grammar, or of two in one message.

    Raises:
        ValueError: neither knows these words.
    """
    text = without_complication(without_persona(question.strip(), language), language)
    first, besides, second = text.partition(BESIDES[language])
    if besides:
        return JointIntent(_single(first, language), _single(second, language))
    return _single(text, language)


def _single(text: str, language: Language) -> FactIntent | TemplateIntent:
    if found := templates.match(text.strip(), language):
        return TemplateIntent(found[0], tuple(found[1].items()))
    return FactIntent(grammar.parse(text, language))


# ---------------------------------------------------------------------------------------------------------------------
# Where a run stands

Kind = Literal["new", "retry", "redundant", "wrong"]


@dataclass(frozen=True)
class JudgedCall:
    """A call of a run: the step it is for (None if for none), and what it was when it was made."""

    call: ToolCall
    step: int | None
    kind: Kind


@dataclass
class ConversationProgress:
    """State of a conversation: values found, failures by step, every call, and the calls of the last assistant turn."""

    values: dict[int, Value] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    calls: list[JudgedCall] = field(default_factory=list)
    last_turn: list[JudgedCall] = field(default_factory=list)

    def exhausted(self) -> list[int]:
        """Steps that failed so often that nobody would try again."""
        return [step for step, n in self.failures.items() if n >= ATTEMPTS and step not in self.values]


def replay(intent: Intent, messages: Sequence[Message]) -> ConversationProgress:
    """Follow a run message by message."""
    progress = ConversationProgress()
    pending: dict[str, int | None] = {}
    for message in messages:
        if message.role == "assistant":
            progress.last_turn = []
            for call in message.tool_calls:
                judged = _judged(intent, call, progress)
                progress.last_turn.append(judged)
                pending[call.id] = judged.step
            progress.calls += progress.last_turn
        elif message.role == "tool":
            step = pending.get(message.tool_call_id)
            if step is None:
                continue
            value = intent.read(step, message.content)
            if value is not None:
                progress.values[step] = value
            elif step not in progress.values:
                progress.failures[step] = progress.failures.get(step, 0) + 1
    return progress


def ready(intent: Intent, progress: ConversationProgress) -> dict[int, dict[str, Any]]:
    """The steps that can be called now, and are not done or given up, with their arguments."""
    done = {*progress.values, *progress.exhausted()}
    calls = {step: intent.arguments(step, progress.values) for step in range(len(intent.tools)) if step not in done}
    return {step: arguments for step, arguments in calls.items() if arguments is not None}


def _judged(intent: Intent, call: ToolCall, progress: ConversationProgress) -> JudgedCall:
    for step, tool in enumerate(intent.tools):
        if tool == call.name and intent.arguments(step, progress.values) == call.arguments:
            if step in progress.values or any(other.step == step for other in progress.last_turn):
                return JudgedCall(call, step, "redundant")
            if (failures := progress.failures.get(step, 0)) >= ATTEMPTS:
                return JudgedCall(call, step, "redundant")
            return JudgedCall(call, step, "retry" if failures else "new")
    return JudgedCall(call, None, "wrong")
