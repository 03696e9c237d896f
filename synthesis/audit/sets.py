"""Rules for many records together: duplicates, and what training data share with held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from synthesis.audit import text_claims as texts
from synthesis.audit.conversations import calls_of
from synthesis.audit.findings import AuditFinding
from synthesis.core.records import ToolEnvironment, Trajectory

OWN_RULES: Final = ("exact_duplicate", "near_duplicate", "duplicate_id")
LEAK_RULES: Final = ("leaked_call", "leaked_question", "leaked_entity")
_Key = tuple[str, str]


@dataclass(frozen=True)
class Digest:
    """The parts of a record that these rules compare.

    Attributes:
        question: all user messages, or the environment's question.
        calls: tool and arguments of successful calls, or of reference calls; calls without arguments are left out.
        entities: named subjects in normal form: the environment's, or all arguments of a trajectory's calls.
        held_out: it is evaluation data.
    """

    dataset: str
    id: str
    question: str
    calls: frozenset[_Key]
    entities: frozenset[str]
    held_out: bool


def digest_of(record: Trajectory | ToolEnvironment, dataset: str, *, held_out: bool) -> Digest:
    """Return the digest of a record."""
    if isinstance(record, ToolEnvironment):
        made = [(call.tool, call.arguments) for call in record.reference_calls]
        question, named = record.question, record.entities
    else:
        made = [(call.name, dict(call.arguments)) for call in calls_of(record) if not call.failed]
        question = "\n".join(one.content for one in record.messages if one.role == "user")
        named = [str(one) for _, arguments in made for one in texts.leaves(arguments)]
    calls = frozenset((name, texts.canonical(arguments)) for name, arguments in made if arguments)
    entities = frozenset(plain for one in named if _is_telling(plain := texts.normal(one)))
    return Digest(dataset, record.id, question, calls, entities, held_out)


def _is_telling(entity: str) -> bool:
    """Return whether an entity would not be shared by chance, as small numbers and short codes are."""
    return len(entity) >= 4 and (entity.isdigit() or any(sign.isalpha() for sign in entity))


@dataclass
class Duplicates:
    """Duplicates within each dataset."""

    findings: list[AuditFinding] = field(default_factory=list)
    similar: dict[str, int] = field(default_factory=dict)
    """Dataset → records that are an exact or a near duplicate."""


def duplicates(digests: Sequence[Digest]) -> Duplicates:
    """Return repeated ids and questions. A near duplicate is counted for the later record."""
    found = Duplicates()
    for dataset in dict.fromkeys(one.dataset for one in digests):
        own = [one for one in digests if one.dataset == dataset]
        first: dict[str, Digest] = {}
        ids: set[str] = set()
        for one in own:
            if one.id in ids:
                found.findings.append(AuditFinding("duplicate_id", dataset, one.id, "an earlier record has this id"))
            ids.add(one.id)
            plain = texts.normal(one.question)
            if earlier := first.get(plain):
                found.findings.append(
                    AuditFinding("exact_duplicate", dataset, one.id, f"as {earlier.id}: {one.question:.160}")
                )
            elif plain:
                first[plain] = one
        left = list(first.values())
        for number, other, similarity in texts.near_pairs([one.question for one in left]):
            detail = f"{similarity:.2f} to {left[other].id}: {left[number].question:.120} | {left[other].question:.120}"
            found.findings.append(AuditFinding("near_duplicate", dataset, left[number].id, detail))
        found.similar[dataset] = sum(
            one.dataset == dataset and one.rule in ("exact_duplicate", "near_duplicate") for one in found.findings
        )
    return found


def leaks(digests: Iterable[Digest]) -> Iterator[AuditFinding]:
    """Yield for each held-out record what training data share with it."""
    held = [one for one in digests if one.held_out]
    trained = [one for one in digests if not one.held_out]
    calls = {call: one for one in reversed(trained) for call in one.calls}
    questions = {texts.normal(one.question): one for one in reversed(trained)}
    entities = {entity: one for one in reversed(trained) for entity in one.entities}
    for record in held:
        if shared := sorted(record.calls & calls.keys()):
            where = calls[shared[0]]
            yield AuditFinding("leaked_call", record.dataset, record.id,
                          f"{shared[0][0]}{shared[0][1]:.120} is in {where.dataset}, {where.id}")  # fmt: skip
        if (same := questions.get(texts.normal(record.question))) and record.question.strip():
            yield AuditFinding("leaked_question", record.dataset, record.id,
                          f"{same.dataset}, {same.id} asks {record.question:.160}")  # fmt: skip
        if named := sorted(record.entities & entities.keys()):
            where = entities[named[0]]
            yield AuditFinding("leaked_entity", record.dataset, record.id,
                          f"{named[0]} is in {where.dataset}, {where.id}")  # fmt: skip
