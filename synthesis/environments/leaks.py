"""Answers must be found, not read: no text that a policy or a judge is given states the answer that it asks for.

A question gives away the answer of any of its steps, a sub-question and a reference call their own, a tool's document
that of any step of its environment. What `synthesis.core.matching` would take for the answer in an output is the answer
here too. One kind of answer cannot be kept out of its question, a choice ("Which of Oslo and Bergen has more
inhabitants?"): a step that compares what earlier ones found of things that the question names, and answers with one of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from synthesis.core.matching import contains
from synthesis.core.normal_text import fold
from synthesis.core.readings import Reading
from synthesis.core.records import Answer, Decomposition, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.stages import Rejected
from synthesis.environments.teacher_answers import SubQuestionAnswer, WorldStep


def check_questions(question: str, steps: Sequence[SubQuestionAnswer]) -> None:
    """Refuse a question that states the answer of a step, and a sub-question that states its own.

    Raises:
        Rejected: `answer_in_question`; the detail says which.
    """
    by_id = {step.id: step for step in steps}
    asked = _Text(question)
    for step in steps:
        if _is_choice(step, by_id) or (isinstance(step, WorldStep) and step.check):
            continue
        if asked.says(step.answer):
            raise Rejected(
                "answer_in_question",
                f"the question states the answer of sub-question {step.id}, {step.answer.value!r}: {question!r}; ask "
                "so that it has to be looked up",
            )
        if _Text(step.question).says(step.answer):
            raise Rejected(
                "answer_in_question",
                f"sub-question {step.id} states its own answer, {step.answer.value!r}: {step.question!r}; leave it out",
            )


def answers_of(asked: Decomposition | ToolEnvironment) -> list[Answer]:
    """What has to be found: the answers of all steps that look something up, and the final one where that is not a
    state."""
    found = [step.answer for step in asked.sub_questions if not step.asks_state]
    return found if len(found) < len(asked.sub_questions) else [asked.answer, *found]


def _is_choice(step: SubQuestionAnswer, by_id: Mapping[int, SubQuestionAnswer]) -> bool:
    """Whether a step answers with one of the things that the steps before it, two or more, are about."""
    named = {fold(subject) for before in step.depends_on for subject in by_id[before].subjects}
    values = step.answer.value if isinstance(step.answer.value, list) else [step.answer.value]
    return len(step.depends_on) > 1 and len(named) > 1 and all(fold(str(value)) in named for value in values)


def check_arguments_ask(arguments: Mapping[str, object], step: SubQuestion, of: Decomposition) -> None:
    """Refuse a reference call that states what it asks for: a tool that repeats its argument would answer it.

    What the questions name, or a step before has found, may stand there: a choice is one of them.

    Raises:
        Rejected: `answer_in_call`.
    """
    given = [one for one in _leaves(arguments) if contains(one, step.answer)]
    if not given:
        return
    questions = _Text(of.question), _Text(step.question)
    by_id = {one.id: one for one in of.sub_questions}
    for one in given:
        named = any(text.says(Answer(one)) for text in questions)
        known = [by_id[before].answer for before in step.depends_on]
        if not named and not any(contains(one, it) and contains(it.value, step.answer) for it in known):
            raise Rejected(
                "answer_in_call",
                f"the call for sub-question {step.id} states its answer, {step.answer.value!r}, in an argument: "
                f"{one!r}; call the tool with what the question names or an earlier step found",
            )


def _leaves(value: object) -> Iterable[str | int | float]:
    """Texts and numbers of the arguments. A truth value is a way to ask: that an answer is one too says nothing."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def leaked(spec: ToolSpec, answers: Iterable[Answer]) -> str:
    """The string of a tool's document that gives one of these answers away; "" when none does."""
    wanted = list(answers)
    for text in (spec.name.replace("_", " "), spec.description, *_strings_of(spec.parameters)):
        read = _Text(text)
        if any(read.says(answer) for answer in wanted):
            return text
    return ""


class _Text:
    """A text in which answers are looked for.

    `matching` takes a few words for one value, which equals an answer or not, and nothing from an output that is too
    large to be one answer. Here "City, e.g. Oslo" says Oslo, and so does whatever is long enough to hide it.
    """

    PART, OVERLAP = 1_500, 150
    """Characters that are read at a time."""
    SENTENCE = "· · · · · · {} 。"
    """What makes a sentence of a few words, and no other answer."""

    def __init__(self, text: str) -> None:
        starts = range(0, max(1, len(text) - self.OVERLAP), self.PART - self.OVERLAP)
        parts = [text[start : start + self.PART] for start in starts]
        self._readings = [Reading(form.format(part)) for part in parts for form in ("{}", self.SENTENCE)]

    def says(self, answer: Answer) -> bool:
        return any(contains(read, answer) for read in self._readings)


def prose(spec: ToolSpec) -> list[str]:
    """What of it is sentences."""
    schemas = spec.parameters.get("properties", {}).values()
    return [spec.description, *(schema["description"] for schema in schemas if schema.get("description"))]


def _strings_of(schema: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, Mapping):
            for name, one in value.items():
                found += [name.replace("_", " "), *_strings_of(one)]
        elif keyword in ("enum", "examples") and isinstance(value, list):
            found += map(str, value)
        elif keyword in ("description", "default", "const", "example"):
            found.append(str(value))
        elif keyword == "items" and isinstance(value, Mapping):
            found += _strings_of(value)
        elif keyword in ("anyOf", "oneOf") and isinstance(value, list):
            for one in value:
                found += _strings_of(one)
    return found
