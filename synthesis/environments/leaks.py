"""Leak checks: no text shown to a policy or a judge may state the answer that it asks for.

A question may not reveal the answer of any of its steps. A sub-question and a reference call may not reveal their own,
and a tool's document may not reveal that of any step of its environment. An answer is recognised as
`synthesis.core.matching` would find it in an output. So are numbers in words (`number_words`) or in
another unit, and spaced letters ("O-S-L-O").

One kind of answer cannot be kept out of its question, a choice ("Which of Oslo and Bergen has more inhabitants?"). Such
a step compares the results of earlier steps about things that the question names, and answers with one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from synthesis.core.dates import whole_date
from synthesis.core.matching import contains
from synthesis.core.normal_text import fold
from synthesis.core.quantities import plain, whole_quantity
from synthesis.core.readings import NormalizedOutput
from synthesis.core.records import Answer, Decomposition, Language, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.stages import Rejected
from synthesis.core.units import UNITS, Quantity, same_quantity
from synthesis.environments.number_words import (
    SMALL,
    has_number,
    has_rank,
    number_of,
    rank_of,
    spells,
    with_day_in_digits,
)
from synthesis.environments.teacher_answers import SubQuestionAnswer, WorldStep


def check_questions(question: str, steps: Sequence[SubQuestionAnswer], language: Language) -> None:
    """Refuse a question that states the answer of a step, and a sub-question that states its own.

    Raises:
        Rejected: `answer_in_question`; the detail says which.
    """
    by_id = {step.id: step for step in steps}
    asked = _Text(question, language)
    for step in steps:
        if _is_choice(step, by_id) or (isinstance(step, WorldStep) and step.check):
            continue
        if asked.says(step.answer, asked=step.question):
            raise Rejected(
                "answer_in_question",
                f"the question states the answer of sub-question {step.id}, {step.answer.value!r}: {question!r}; ask "
                "so that it has to be looked up",
            )
        if _Text(step.question, language).says(step.answer):
            raise Rejected(
                "answer_in_question",
                f"sub-question {step.id} states its own answer, {step.answer.value!r}: {step.question!r}; leave it out",
            )


def answers_of(asked: Decomposition | ToolEnvironment) -> list[Answer]:
    """Return the answers that must be found: those of all steps that look something up, and the final one if it is not
    a state."""
    found = [step.answer for step in asked.sub_questions if not step.asks_state]
    return found if len(found) < len(asked.sub_questions) else [asked.answer, *found]


def _is_choice(step: SubQuestionAnswer, by_id: Mapping[int, SubQuestionAnswer]) -> bool:
    """Return whether a step answers with one of the things that its two or more earlier steps are about."""
    named = {fold(subject) for before in step.depends_on for subject in by_id[before].subjects}
    values = step.answer.value if isinstance(step.answer.value, list) else [step.answer.value]
    return len(step.depends_on) > 1 and len(named) > 1 and all(fold(str(value)) in named for value in values)


def check_arguments_ask(arguments: Mapping[str, object], step: SubQuestion, of: Decomposition) -> None:
    """Refuse a reference call that states what it asks for: a tool that repeats its argument would answer it.

    What the questions name, or a step before has found, may stand there: a choice is one of them.

    Raises:
        Rejected: `answer_in_call`.
    """
    given = [one for one in leaves(arguments) if contains(one, step.answer, of.language)]
    if not given:
        return
    questions = _Text(of.question, of.language), _Text(step.question, of.language)
    by_id = {one.id: one for one in of.sub_questions}
    for one in given:
        named = any(text.names(one) for text in questions)
        known = [by_id[before].answer for before in step.depends_on]
        if not named and not any(contains(one, it) and contains(it.value, step.answer) for it in known):
            raise Rejected(
                "answer_in_call",
                f"the call for sub-question {step.id} states its answer, {step.answer.value!r}, in an argument: "
                f"{one!r}; call the tool with what the question names or an earlier step found",
            )


def leaves(value: object) -> Iterable[str | int | float]:
    """Texts and numbers of the arguments. A truth value is a way to ask: that an answer is one too says nothing."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def states(text: str, answer: Answer, language: Language) -> bool:
    """Return whether a text that asks nothing, such as an error, states an answer other than yes or no."""
    is_truth = any(contains(answer.value, Answer(truth), language) for truth in (True, False))
    return not is_truth and _Text(text, language).says(answer, asked="")


def leaked(spec: ToolSpec, answers: Iterable[Answer], language: Language) -> str:
    """Return the string of a tool's document that states one of these answers; "" if none does."""
    wanted = list(answers)
    for text in (spec.name.replace("_", " "), spec.description, *_strings_of(spec.parameters)):
        read = _Text(text, language)
        if any(read.says(answer, asked="") for answer in wanted):
            return text
    return ""


_LETTERS: Final = re.compile(r"(?<!\w)\w(?:[-.·_* ]\w(?!\w)){2,40}(?!\w)")
_APART: Final = re.compile(r"[-.·_* ]")
_SENTENCES: Final = re.compile(r"(?<=[.!?。！？])\s*")


_NUMERALS: Final = re.compile(r"[二两三四五六七八九十]+")
_PART, _OVERLAP = 1_500, 150
"""Characters that are read at a time."""
_SENTENCE: Final = "· · · · · · {} 。"
"""Template that turns a few words into a sentence, and contains no other answer."""


def _read(text: str, language: Language) -> list[NormalizedOutput]:
    starts = range(0, max(1, len(text) - _OVERLAP), _PART - _OVERLAP)
    parts = [text[start : start + _PART] for start in starts]
    return [NormalizedOutput(form.format(part), language) for part in parts for form in ("{}", _SENTENCE)]


class _Text:
    """A text in which answers are looked for.

    `matching` takes a few words for one value, which equals an answer or not, and nothing from an output that is too
    large to be one answer. Here "City, e.g. Oslo" says Oslo, and so does whatever is long enough to hide it.
    """

    WORDS = 3
    """Words of a sentence that may be an answer by itself: "Yes."."""
    DIGITS = 3
    """Digits of a number that is searched in other units: 8849 in "8.849 km", but not 2 in "2,000 m"."""

    def __init__(self, text: str, language: Language) -> None:
        self._text, self.language = text, language
        self._readings = _read(text, language)
        joined = _LETTERS.sub(lambda one: _APART.sub("", one[0]), text[:_PART])
        sentences = _SENTENCES.split(text[:_PART])
        alone = [one.strip(" .。!！") for one in sentences if not one.rstrip().endswith(("?", "？"))]
        self._alone = [NormalizedOutput(one, language) for one in alone if one and len(one.split()) <= self.WORDS]
        self._readings += [NormalizedOutput(joined, language)] if joined != text[:_PART] else []

    def says(self, answer: Answer, *, asked: str | None = None) -> bool:
        """Return whether the text states an answer.

        Args:
            asked: the question of the answer, which number words must count; None: the text; empty: nothing is asked.
        """
        if any(contains(read, answer) for read in (*self._readings_for(answer.value), *self._alone)):
            return True
        values = answer.value if isinstance(answer.value, list) else [answer.value]
        numbers = [self._numbers(value, answer) for value in values]
        if numbers and all(any(self._states(one, asked) for one in ones) for ones in numbers):
            return True
        if any(map(self._has_rank_or_day, values[:1] if len(values) == 1 else ())):
            return True
        return any(self.says(Answer(alias), asked=asked) for alias in answer.aliases)

    def names(self, value: str | float) -> bool:
        """Return whether the text has an argument of a call: numbers in words count whatever they count."""
        if any(contains(read, Answer(value)) for read in self._readings):
            return True
        numbers = self._numbers(value, Answer(value))
        return any(has_number(self._text, one.value, self.language) for one in numbers)

    def _readings_for(self, value: object) -> list[NormalizedOutput]:
        """Return the readings in which a value is searched. Small numbers in Chinese are words, see `number_words`."""
        is_small = isinstance(value, int) and not isinstance(value, bool) and value < SMALL
        return self._without_numerals if is_small else self._readings

    @cached_property
    def _without_numerals(self) -> list[NormalizedOutput]:
        text = _NUMERALS.sub("·", self._text)
        return self._readings if text == self._text else _read(text, self.language)

    def _numbers(self, value: object, answer: Answer) -> list[Quantity]:
        """Return the numbers that a value may be stated as."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return []
        found = Quantity(value, answer.unit) if not isinstance(value, str) else whole_quantity(plain(value))
        if found is None:
            spelled = number_of(str(value), self.language)
            return [] if spelled is None else [Quantity(spelled)]
        if not math.isfinite(found.value):
            return []
        if found.unit == "%":
            return [found, Quantity(round(found.value / 100, 9))]
        return [found, Quantity(round(found.value * 100, 9), "%")] if 0 < found.value < 1 else [found]

    def _states(self, number: Quantity, asked: str | None) -> bool:
        """Return whether the text has a number, in words or in another unit than its own."""
        wanted = Answer(number.value, unit=number.unit)
        if any(contains(read, wanted) for read in self._readings_for(number.value)):
            return True
        if not number.unit and len(f"{number.value:g}".strip("0").replace(".", "")) >= self.DIGITS:
            quantities = [one for read in self._readings for one in read.numbers if one.unit in UNITS]
            units = {unit for one in quantities for unit in UNITS if UNITS[unit][0] == UNITS[one.unit][0]}
            if any(same_quantity(one, Quantity(number.value, unit), 0.0) for one in quantities for unit in units):
                return True
        return spells(self._text, number.value, self.language, asked=asked, unit=number.unit)

    def _has_rank_or_day(self, value: object) -> bool:
        """Return whether the text has the rank or the day that a string is, in letters: "second", "fourth of July"."""
        if not isinstance(value, str):
            return False
        if (day := whole_date(value)) is not None:
            text = with_day_in_digits(self._text[:_PART], day.day, self.language)
            return contains(NormalizedOutput(text, self.language), Answer(value))
        rank = rank_of(value, self.language)
        return rank is not None and has_rank(self._text, rank, self.language)


def prose(spec: ToolSpec) -> list[str]:
    """Return the sentences in a tool's document."""
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
