"""Decompose: a question with its answer and the graph of sub-questions that leads there (paper §2.2.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from synthesis.environments import graph
from synthesis.environments.answers import DecompositionAnswer
from synthesis.environments.config import Context, Draft, EnvironmentsConfig
from synthesis.environments.partition import Side
from synthesis.matching import fold
from synthesis.records import Decomposition, Language, Structure, SubQuestion
from synthesis.runner import rng_for

Choice = TypeVar("Choice", bound=str)


class QuestionSeed(msgspec.Struct, frozen=True):
    """What one question shall be like. `domain` "" leaves the domain to the teacher."""

    id: str
    language: Language
    structure: Structure
    domain: str
    side: Side


def question_seeds(config: EnvironmentsConfig, seed: int) -> list[QuestionSeed]:
    """`config.count` seeds. Languages, structures and sides have the configured shares, exactly but for rounding."""
    rng = rng_for(seed, "question_seeds")
    n = config.count
    sides: dict[Side, float] = {"held_out": config.held_out_fraction, "train": 1 - config.held_out_fraction}
    columns: list[list[Any]] = [apportion(config.languages, n), apportion(config.structures, n), apportion(sides, n)]
    for column in columns:
        rng.shuffle(column)
    domains = [rng.choice(config.domains) if config.domains else "" for _ in range(n)]
    return [
        QuestionSeed(f"env-{seed}-{index:06d}", language, structure, domain, side)
        for index, (language, structure, side, domain) in enumerate(zip(*columns, domains, strict=True))
    ]


def apportion(weights: Mapping[Choice, float], n: int) -> list[Choice]:
    """`n` choices in proportion to their weights, in the order of the weights."""
    total = sum(weights.values())
    bounds = [0, *(round(n * share / total) for share in accumulate(weights.values()))]
    return [choice for i, choice in enumerate(weights) for _ in range(bounds[i + 1] - bounds[i])]


async def decompose(seed: QuestionSeed, context: Context) -> list[Draft]:
    """One decomposition, well formed as a graph.

    Raises:
        Rejected: see `graph.check`; or `no_subject`, `teacher_failed`.
    """
    config = context.config
    variables = {
        "structure": seed.structure,
        "min_hops": config.min_hops,
        "max_hops": config.max_hops,
        "min_branches": config.min_branches,
        "max_branches": config.max_branches,
        "domain": seed.domain,
        "knowledge": "",
        "relations": config.relations,
        # A model cannot use these two (it does not know the hash); `split` drops what it puts on neither side.
        "side": seed.side,
        "partition": config.partition,
    }

    async def check(given: DecompositionAnswer) -> Draft:
        graph.check(
            given.sub_questions,
            given.answer,
            seed.structure,
            min_hops=config.min_hops,
            max_hops=config.max_hops,
            question=given.question,
        )
        return _draft(given, seed)

    return [await context.ask(DecompositionAnswer, variables, language=seed.language, key=seed.id, check=check)]


def _draft(given: DecompositionAnswer, seed: QuestionSeed) -> Draft:
    steps = given.sub_questions
    subjects = (subject for step in steps for subject in step.subjects)
    decomposition = Decomposition(
        id=seed.id,
        language=seed.language,
        domain=given.domain,
        structure=seed.structure,
        question=given.question,
        answer=given.answer,
        sub_questions=[
            SubQuestion(
                id=step.id,
                question=step.question,
                answer=step.answer,
                depends_on=sorted(step.depends_on),
                hop=step.hop,
                # Until `validate` has asked, every step needs one.
                needs_tool=True,
                intent=step.intent,
            )
            for step in steps
        ],
        # The subject of a later step is the answer of an earlier one: these are the leaf subjects and the intermediate
        # values, in the order of the steps.
        entities=list(dict.fromkeys(subjects)),
        signature=graph.signature_of(steps),
    )
    return Draft(decomposition, [step.domain for step in steps])


def distinct(drafts: Sequence[Draft]) -> tuple[list[Draft], Counter[str]]:
    """The drafts without repetitions, the first of each kept, and how many were dropped, as `duplicate`.

    Two drafts repeat each other when they ask the same of the same entities in the same language, in whatever words.
    """
    seen: set[tuple[str, str, frozenset[str]] | str] = set()
    kept: list[Draft] = []
    for draft in drafts:
        one = draft.decomposition
        meaning = (one.language, one.signature, frozenset(map(fold, one.entities)))
        if meaning in seen or fold(one.question) in seen:
            continue
        seen |= {meaning, fold(one.question)}
        kept.append(draft)
    dropped = len(drafts) - len(kept)
    return kept, Counter({"duplicate": dropped} if dropped else {})
