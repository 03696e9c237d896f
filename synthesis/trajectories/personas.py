"""Personas of users: the built-in ones, and files of richer ones (paper 2.1.3, augmentation by persona).

A file has one JSON object a line, in the columns of Nemotron-Personas; only `occupation` is needed:

    {"occupation": "nurse", "age": 34, "education_level": "bachelors", "professional_persona": "…",
     "skills_and_expertise_list": ["triage"], "hobbies_and_interests_list": ["chess"], "language": "en"}

Name, sex, origin and place are never read: they would add stereotypes, not another way to ask.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.typed import decode_json
from synthesis.core.mirror import fetched
from synthesis.core.records import Language
from synthesis.pipeline.languages import language_of

PERSONAS: Mapping[Language, tuple[str, ...]] = {
    "en": ("a travel agent", "a teacher", "a student", "a journalist", "a software developer", "a help desk clerk"),
    "zh": ("旅行社职员", "老师", "学生", "记者", "软件开发人员", "客服人员"),
}
"""The built-in personas by language."""
_PROFESSION_CHARACTERS = 200
_LISTED = 5
_WORDS: Mapping[Language, Mapping[str, str]] = {
    "en": {"occupation": "a person who works as {}", "age": "{} years old", "education": "education: {}",
           "profession": "at work: {}", "skills": "skills: {}", "hobbies": "hobbies: {}", "comma": ", ", "end": "; "},
    "zh": {"occupation": "职业为{}的人", "age": "{}岁", "education": "学历：{}",
           "profession": "工作：{}", "skills": "技能：{}", "hobbies": "爱好：{}", "comma": "、", "end": "；"},
}  # fmt: skip


class Persona(msgspec.Struct, frozen=True):
    """A person from a file; its text is a phrase for a prompt."""

    language: Language
    occupation: str
    age: int | None = None
    education: str = ""
    profession: str = ""
    skills: list[str] = []
    hobbies: list[str] = []

    def __str__(self) -> str:
        words = _WORDS.get(self.language, _WORDS["en"])
        parts = {
            "occupation": self.occupation,
            "age": "" if self.age is None else str(self.age),
            "education": self.education,
            "profession": self.profession[:_PROFESSION_CHARACTERS],
            "skills": words["comma"].join(self.skills[:_LISTED]),
            "hobbies": words["comma"].join(self.hobbies[:_LISTED]),
        }
        return words["end"].join(words[name].format(text) for name, text in parts.items() if text)


class _Row(msgspec.Struct):
    occupation: str
    age: int | None = None
    education_level: str = ""
    professional_persona: str = ""
    skills_and_expertise_list: list[str] | str = ""
    hobbies_and_interests_list: list[str] | str = ""
    language: Language | None = None


def read_personas(path: Path | str) -> dict[Language, list[Persona]]:
    """Read the personas of a file, by language; a row's language is its `language`, else that of its texts.

    Raises:
        ValueError: the file is missing, a row is broken, or there is no row; the message names the file and the line.
    """
    path = fetched(path)
    if not path.is_file():
        raise InputError(f"personas: there is no file {path}; give JSON lines with `occupation`, or leave it empty")
    found: dict[Language, list[Persona]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                persona = _persona(decode_json(line, _Row))
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                raise InputError(f"personas: {path}:{number}: {error}; correct the line or delete it") from None
            found.setdefault(persona.language, []).append(persona)
    if not found:
        raise InputError(f"personas: {path} is empty; give JSON lines with `occupation`, or leave the field empty")
    return found


def _persona(row: _Row) -> Persona:
    occupation = _plain(row.occupation)
    if not occupation:
        raise InputError("`occupation` is empty")
    if row.age is not None and not 0 < row.age < 130:
        raise InputError(f"`age` is {row.age}; give years")
    return Persona(
        row.language or language_of(f"{row.occupation} {row.professional_persona}"),
        occupation,
        row.age,
        _plain(row.education_level),
        " ".join(row.professional_persona.split()),
        _listed("skills_and_expertise_list", row.skills_and_expertise_list),
        _listed("hobbies_and_interests_list", row.hobbies_and_interests_list),
    )


def _plain(text: str) -> str:
    """Return `registered_nurse` as `registered nurse`, on one line."""
    return " ".join(text.replace("_", " ").split())


def _listed(name: str, given: list[str] | str) -> list[str]:
    """Return a list, also from the text of a Python list, as in the released files; text is never evaluated."""
    every: object = given
    if isinstance(given, str):
        try:
            every = ast.literal_eval(given.strip() or "[]")
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            every = [given]
    if not isinstance(every, list) or not all(isinstance(one, str) for one in every):
        raise InputError(f"`{name}` is not a list of texts")
    return [" ".join(one.split()) for one in every]
