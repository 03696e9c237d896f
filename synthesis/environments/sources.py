"""Sources of questions: the teacher's choice, domains and texts, a taxonomy, or given questions.

Passages of documents are domains and texts too; `documents.py` reads them.

Texts and questions are JSON lines, gzipped or not, in the original's columns; a taxonomy is nested JSON.

    {"domain": "weather", "knowledge_corpus": "background: …"}            knowledge; the text may be empty
    {"question": "How much …?", "domain": "flights"}                      questions; `domain` may be left out
    {"Travel": {"Rail": {"description": "…", "examples": [{"query": "…"}]}}}    taxonomy; a leaf has a description
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.files import unpacked_lines
from astra_jax.base.nesting import check_nesting
from astra_jax.base.typed import convert_to, decode_json
from synthesis.core.mirror import fetched
from synthesis.core.records import DocumentPassage, Language
from synthesis.environments.config import EnvironmentsConfig
from synthesis.pipeline.languages import language_of


class SourceError(InputError):
    """A file of questions, texts or a taxonomy cannot be used; the message names the place and the remedy."""


class Source(msgspec.Struct, frozen=True):
    """Source of a question; empty fields are left to the teacher."""

    domain: str = ""
    language: Language | None = None
    question: str = ""
    knowledge: str = ""
    examples: list[str] = []
    """Examples from the taxonomy; one of them, or none, is shown to the teacher."""
    document: DocumentPassage | msgspec.UnsetType = msgspec.UNSET
    """Place of `knowledge` in a document."""


class _QuestionRow(msgspec.Struct):
    question: str
    domain: str = ""
    language: Language | None = None


class _KnowledgeRow(msgspec.Struct):
    domain: str
    knowledge_corpus: str = ""
    language: Language | None = None


def sources_of(config: EnvironmentsConfig) -> list[Source]:
    """Return the sources that the configuration names, in the file's order; empty if it names none.

    Raises:
        SourceError: a file is missing, holds nothing, or a row of it is not of its form.
    """
    if config.questions:
        return list(_questions(fetched(config.questions)))
    if config.knowledge:
        return list(_knowledge(fetched(config.knowledge)))
    if config.taxonomy:
        return list(_taxonomy(fetched(config.taxonomy)))
    return []


def _questions(path: Path) -> Iterator[Source]:
    for where, row in _rows(path, _QuestionRow):
        if not row.question.strip():
            raise SourceError(f"{where}: question is empty; write one, or leave the line out")
        yield Source(row.domain, row.language or language_of(row.question), question=row.question.strip())


def _knowledge(path: Path) -> Iterator[Source]:
    for where, row in _rows(path, _KnowledgeRow):
        if not row.domain.strip():
            raise SourceError(f"{where}: domain is empty; name one, or leave the line out")
        language = row.language or language_of(row.knowledge_corpus or row.domain)
        yield Source(row.domain, language, knowledge=row.knowledge_corpus)


def _rows(path: Path, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of JSON lines, each with the place where it stands."""
    found = False
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where, found = f"{path}, line {number}", True
            try:
                yield where, decode_json(line, kind)
            except msgspec.MsgspecError as error:
                fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
                raise SourceError(f"{where}: {error}; a line is a JSON object of {fields}") from None
    if not found:
        raise SourceError(f"{path} holds no rows")


def _lines(path: Path) -> Iterator[str]:
    try:
        for line in unpacked_lines(path):
            yield line.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, InputError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _taxonomy(path: Path) -> Iterator[Source]:
    try:
        root = check_nesting(json.loads("".join(_lines(path))))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}") from None
    if not isinstance(root, dict) or not root:
        raise SourceError(f"{path} holds no taxonomy; it is an object of named branches")
    yield from _leaves(root, (), path)


def _leaves(node: Any, names: tuple[str, ...], path: Path) -> Iterator[Source]:
    where = f"{path}, {' > '.join(names) or 'the root'}"
    if not isinstance(node, dict) or not node:
        raise SourceError(f"{where}: a branch holds branches, a leaf a description; found {node!r:.80}")
    if not isinstance(description := node.get("description"), str):
        for name, child in node.items():
            yield from _leaves(child, (*names, name), path)
        return
    try:
        examples = [one.query for one in convert_to(node.get("examples", []), list[_Example])]
    except msgspec.ValidationError as error:
        raise SourceError(f'{where}: examples: {error}; they are [{{"query": "…"}}]') from None
    domain = " > ".join(names)
    yield Source(domain, language_of(description or domain), knowledge=description, examples=examples)


class _Example(msgspec.Struct):
    query: str
