"""Questions of plans, and the parser that gets the plan back from the question.

    plan = (Step("capital_of_country", "Japan"), Step("population_of_city", 0))
    question(plan, rng, "en")   # "What is the city population of the capital of Japan?"

Every terminal of the plan is one noun phrase, nested as deep as its chain. English phrases are prefixes and Chinese
phrases are suffixes, none the prefix (suffix) of another, so `parse` needs no search. For every style, wording and
language, `parse(question(plan, …), language)` is the plan with equal steps merged.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from typing import Literal, get_args

from synthesis.core.records import Language
from synthesis.offline.facts.relations import all_relations, joinable
from synthesis.offline.plans import Chain, Plan, chains, evaluate, from_chains
from synthesis.offline.wording import (
    COMPLICATIONS,
    FRAMES,
    PERSONAS,
    Frame,
    listed,
    without_complication,
    without_persona,
)

Style = Literal["plain", "diverse", "persona", "complicate"]
STYLES: tuple[Style, ...] = get_args(Style)


# ---------------------------------------------------------------------------------------------------------------------
# Plans to questions


def question(plan: Plan, rng: random.Random, language: Language, style: Style = "plain") -> str:
    """Return a natural question for the plan's terminal values; `rng` chooses the wording.

    Styles: `plain`; `diverse` (other frames); `persona` (starts with who asks); `complicate` (ends with a sentence that
    changes nothing).

    Raises:
        ValueError: unknown style, or an empty plan.
    """
    if style not in STYLES:
        raise ValueError(f"style: unknown {style!r}; use one of {', '.join(STYLES)}")
    if not plan:
        raise ValueError("plan: empty; it needs at least one step")
    phrases = [phrase(relations, entity, rng, language) for entity, relations in chains(plan)]
    frames = FRAMES[language]["diverse" if style == "diverse" else "plain"]
    return styled(framed(phrases, frames, rng, language), style, rng, language)


def styled(text: str, style: Style, rng: random.Random, language: Language) -> str:
    """A request with the sentence of its style before it (`persona`) or behind it (`complicate`)."""
    space = " " if language == "en" else ""
    if style == "persona":
        return f"{rng.choice(PERSONAS[language])}{space}{text}"
    if style == "complicate":
        return f"{text}{space}{rng.choice(COMPLICATIONS[language])}"
    return text


def sub_question(plan: Plan, index: int, rng: random.Random, language: Language) -> str:
    """The question for one step alone, with the actual value as argument: `What is the city population of Tokyo?`"""
    step = plan[index]
    argument = step.argument if isinstance(step.argument, str) else str(evaluate(plan)[step.argument])
    return framed([phrase((step.relation,), argument, rng, language)], FRAMES[language]["plain"], rng, language)


def phrase(relations: Sequence[str], entity: str, rng: random.Random, language: Language) -> str:
    """Return the noun phrase of a chain; `rng` chooses the wording."""
    text = entity
    for relation in relations:
        text = rng.choice(all_relations()[relation].phrases[language]).replace("{x}", text)
    return text


def framed(phrases: list[str], frames: Sequence[Frame], rng: random.Random, language: Language) -> str:
    """A request for noun phrases, in one of the frames."""
    frame = rng.choice([f for f in frames if f.accepts(len(phrases))])
    return f"{frame.before}{listed(phrases, language)}{frame.after}"


# ---------------------------------------------------------------------------------------------------------------------
# Questions to plans

# English phrases all start with "the" and no entity contains " and the ", so "Trinidad and Tobago" stays whole.
_SEPARATOR = {"en": re.compile(r"(?:, and |, | and )(?=the )"), "zh": re.compile(r"[、和]")}


def parse(question: str, language: Language) -> Plan:
    """The plan that the question asks for, with equal steps merged: the inverse of `question` and of `sub_question`.

    Raises:
        ValueError: the text is not a question of this grammar; the message holds the part that was not understood.
    """
    text = _without_style(question.strip(), language)
    error: ValueError | None = None
    for frame in (f for frames in FRAMES[language].values() for f in frames):
        if not (text.startswith(frame.before) and text.endswith(frame.after)):
            continue
        inside = text[len(frame.before) : len(text) - len(frame.after)]
        phrases = _SEPARATOR[language].split(inside)
        if not frame.accepts(len(phrases)):
            continue
        try:
            return from_chains([_parse_phrase(phrase, language) for phrase in phrases])
        except ValueError as e:
            error = e  # another frame may share this one's words
    raise error or ValueError(
        f"question: no wording fits {question!r}; ask for example 'What is the capital of Japan?'"
    )


def _without_style(text: str, language: Language) -> str:
    return without_complication(without_persona(text, language), language).strip()


@functools.cache
def _heads(language: Language) -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern that splits the outermost relation's words from the rest, and the relation of those words."""
    words: dict[str, str] = {}
    for relation in all_relations().values():
        for phrase in relation.phrases[language]:
            head = phrase.replace("{x}", "")
            if head in words:
                raise ValueError(
                    f"relations {words[head]!r} and {relation.id!r} share the phrase {phrase!r}; reword one"
                )
            words[head] = relation.id
    union = "|".join(re.escape(head) for head in sorted(words, key=len, reverse=True))
    pattern = rf"(?P<head>{union})(?P<rest>.+)" if language == "en" else rf"(?P<rest>.+)(?P<head>{union})"
    return re.compile(pattern), words


def unravel(phrase: str, language: Language) -> Chain:
    """Return the innermost words of a phrase, and the relations around them in order of evaluation.

    Raises:
        ValueError: there is no relation in it.
    """
    pattern, relation_of = _heads(language)
    relations: list[str] = []
    rest = phrase
    while match := pattern.fullmatch(rest):
        relations.append(relation_of[match["head"]])
        rest = match["rest"]
    if not relations:
        raise ValueError(f"question: no relation is called {phrase!r}")
    return rest, tuple(reversed(relations))


def _parse_phrase(phrase: str, language: Language) -> Chain:
    rest, relations = unravel(phrase, language)
    table = all_relations()
    if rest not in table[relations[0]].rows:
        raise ValueError(f"question: {relations[0]} has no row for {rest!r} in {phrase!r}")
    for first, second in zip(relations, relations[1:], strict=False):
        if not joinable(table[first], table[second]):
            raise ValueError(f"question: {second} does not apply to a value of {first} in {phrase!r}")
    return rest, relations
