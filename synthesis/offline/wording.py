"""The words around a question's noun phrases: frames, personas, what is said behind a request.

They are data of the grammar (`synthesis.offline.grammar`), which parses every one of them back, in `wording.toml`; they
are not prompts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from synthesis.core.records import Language
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.trajectories.personas import Persona


@dataclass(frozen=True)
class Frame:
    """`before` + noun phrases + `after`. `number` says whether it fits one phrase, several, or either."""

    before: str
    after: str
    number: Literal["one", "many", "any"] = "any"

    def accepts(self, phrases: int) -> bool:
        return self.number == "any" or (self.number == "one") == (phrases == 1)


_FILE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WORDS: Mapping[Language, Mapping[str, Any]] = {language: _FILE[language] for language in PACKAGED_LANGUAGES}
FRAMES: Mapping[Language, Mapping[str, tuple[Frame, ...]]] = {
    language: {style: tuple(Frame(**one) for one in frames) for style, frames in words["frames"].items()}
    for language, words in _WORDS.items()
}
"""Frames of a question by its style."""
PERSONAS: Mapping[Language, Sequence[str]] = {language: words["personas"] for language, words in _WORDS.items()}
"""Sentences in front of a request that say who asks."""
BESIDES: Mapping[Language, str] = {language: words["besides"] for language, words in _WORDS.items()}
"""Between two requests of one message: what different servers are asked for together."""
COMPLICATIONS: Mapping[Language, Sequence[str]] = {
    language: words["complications"] for language, words in _WORDS.items()
}
"""Sentences behind a request that change nothing of what is asked for."""
SAYS: Mapping[Language, Mapping[str, str]] = {language: words["says"] for language, words in _WORDS.items()}
"""Reasoning and answers of the agent."""
SORRY: Mapping[Language, str] = {language: words["sorry"] for language, words in _WORDS.items()}
"""The words with which the agent reports a failure."""
_INTRODUCTION = {"en": re.compile(r"I work as [^.]+\. "), "zh": re.compile(r"我的职业是[^。]+。")}


def introduction(persona: Persona, language: Language) -> str:
    """A sentence in which a person of a file says who he is."""
    alone, with_age = _WORDS[language]["introductions"]
    # Its end must be found again.
    occupation = persona.occupation.replace(".", "").replace("。", "")
    return alone.format(occupation) if persona.age is None else with_age.format(occupation, persona.age)


def without_persona(text: str, language: Language) -> str:
    """The text without the sentence in front that says who asks."""
    for persona in PERSONAS[language]:
        text = text.removeprefix(persona)
    found = _INTRODUCTION[language].match(text)
    return text[found.end() :] if found else text


def without_complication(text: str, language: Language) -> str:
    """The text without the sentence behind it that changes nothing."""
    # The former ones are those of data and journals of 0.1.0.
    for sentence in (*COMPLICATIONS[language], *_WORDS[language]["former"]):
        text = text.removesuffix(sentence)
    return text


def listed(words: Sequence[str], language: Language) -> str:
    """`a, b and c`."""
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} and {last}" if language == "en" else f"{'、'.join(first)}和{last}"
