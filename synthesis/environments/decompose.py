"""Decompose: a question with its answer and the graph of sub-questions that leads there (paper §2.2.1)."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, isnan, nan
from typing import Any, Literal, TypeVar

import msgspec

from synthesis.core.matching import fold
from synthesis.core.records import (
    Answer,
    Decomposition,
    DocumentPassage,
    Language,
    Mode,
    Structure,
    SubQuestion,
    ToolEnvironment,
)
from synthesis.core.stages import Rejected, rng_for
from synthesis.core.stored import Records, Select
from synthesis.environments import dependency_graph
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import Draft
from synthesis.environments.leaks import check_questions
from synthesis.environments.sources import Source, sources_of
from synthesis.environments.teacher_answers import DecompositionAnswer, SubQuestionAnswer, WorldStep
from synthesis.pipeline.languages import check_language
from synthesis.pipeline.partition import Split

Choice = TypeVar("Choice", bound=str)


class QuestionSeed(msgspec.Struct, frozen=True, rename={"split": "side"}):  # journals and a run's name have `side`
    """Plan of one question; empty fields are left to the teacher.

    `question` is set if it only has to be decomposed; `environment` is the id of the one whose tools it needs.
    """

    id: str
    language: Language
    structure: Structure | Literal[""]
    domain: str
    split: Split
    mode: Mode = "unconditional"
    question: str = ""
    knowledge: str = ""
    environment: str = ""
    document: DocumentPassage | msgspec.UnsetType = msgspec.UNSET
    """Place of `knowledge` in a document. Unset fields are not encoded, so earlier runs' keys stay."""


def question_seeds(
    config: EnvironmentsConfig,
    seed: int,
    environments: Sequence[ToolEnvironment] = (),
    worlds_in: Language | None = None,
    passages: Sequence[Source] = (),
) -> list[QuestionSeed]:
    """`config.count` seeds, each of a source if the configuration names any, every source as often as every other.

    Languages (where sources do not decide), structures and splits have the configured shares, exactly but for rounding.

    Args:
        environments: those whose tools new questions shall need, each as often as it has tools.
        worlds_in: the one language of worlds; None: as all others.
        passages: of documents, in place of the sources that the configuration names.

    Raises:
        SourceError: see `sources.sources_of`.
    """
    rng = rng_for(seed, "question_seeds")
    n = config.count
    splits: dict[Split, float] = {"held_out": config.held_out_fraction, "train": 1 - config.held_out_fraction}
    columns: list[list[Any]] = [apportion(config.languages, n), apportion(config.structures, n), apportion(splits, n)]
    for column in columns:
        rng.shuffle(column)
    domains = [rng.choice(config.domains) if config.domains else "" for _ in range(n)]
    seeds = [
        QuestionSeed(f"env-{seed}-{index:06d}", language, structure, domain, split)
        for index, (language, structure, split, domain) in enumerate(zip(*columns, domains, strict=True))
    ]
    if environments:
        chosen = rng.choices(environments, [len(one.tools) for one in environments], k=n)
        return [
            msgspec.structs.replace(
                one, language=of.language, domain=of.domain, split=of.split, mode="augmented", environment=of.id
            )
            for one, of in zip(seeds, chosen, strict=True)
        ]
    if config.split_by == "source":  # a teacher's own ideas have none, and train
        seeds = [msgspec.structs.replace(one, split="train") for one in seeds]
    sources = list(passages) or sources_of(config)
    rng.shuffle(sources)
    for index, one in enumerate(seeds if sources else ()):
        source = sources[index % len(sources)]
        knowledge = source.knowledge
        if source.examples and rng.random() >= config.mask_examples:
            knowledge += f"\n{rng.choice(source.examples)}"
        given: dict[str, Any] = {"mode": "question", "structure": ""} if source.question else {}
        if config.split_by == "source":
            row = "\x1f".join((source.domain, source.question, source.knowledge))
            given["split"] = config.partition.split_of_source(row, config.held_out_fraction)
        seeds[index] = msgspec.structs.replace(
            one,
            language=source.language or one.language,
            domain=source.domain,
            question=source.question,
            knowledge=knowledge,
            document=source.document,
            **given,
        )
    stateful = rng_for(seed, "stateful").sample(range(n), round(n * config.stateful_share))
    for index in stateful:
        one = seeds[index]
        seeds[index] = QuestionSeed(one.id, worlds_in or one.language, "", domains[index], one.split, "world")
    return seeds


def apportion(weights: Mapping[Choice, float], n: int) -> list[Choice]:
    """`n` choices in proportion to their weights, in the order of the weights."""
    total = sum(weights.values())
    bounds = [0, *(round(n * share / total) for share in accumulate(weights.values()))]
    return [choice for i, choice in enumerate(weights) for _ in range(bounds[i + 1] - bounds[i])]


async def decompose(seed: QuestionSeed, context: EnvironmentContext) -> list[Draft]:
    """One decomposition, well formed as a graph.

    Raises:
        Rejected: see `dependency_graph.check`; or `question_rewritten` where a given question came back as another,
            `no_subject`, `answer_in_question`, `wrong_language`, `mixed_split`, `teacher_failed`.
    """
    config, context = context.config, context.route(seed.id)

    async def check(given: DecompositionAnswer) -> Draft:
        if seed.question and fold(given.question) != fold(seed.question):
            raise Rejected("question_rewritten", f"the question is {seed.question!r}; give it back as it is")
        return drafted(given.question, given.answer, given.domain, given.sub_questions, seed, config)

    variables = {**prompt_vars(seed, config), "question": seed.question, "knowledge": seed.knowledge}
    draft = await context.ask(DecompositionAnswer, variables, language=seed.language, key=seed.id, check=check)
    return [assign_split(draft, config)]


def prompt_vars(seed: QuestionSeed, config: EnvironmentsConfig) -> dict[str, Any]:
    """Return the wishes that every request for a question contains."""
    return {
        "structure": seed.structure,
        "min_hops": config.min_hops,
        "max_hops": config.max_hops,
        "min_branches": config.min_branches,
        "max_branches": config.max_branches,
        "domain": seed.domain,
        "relations": config.relations,
        # A model cannot use these two (it does not know the hash); what it puts into neither split is dropped.
        "split": seed.split,
        "partition": config.partition,
        "informative_joins": config.informative_joins,
    }


def drafted(
    question: str,
    answer: Answer,
    domain: str,
    steps: Sequence[SubQuestionAnswer],
    seed: QuestionSeed,
    config: EnvironmentsConfig,
) -> Draft:
    """Return the teacher's answer as a draft, checked as a graph.

    Raises:
        Rejected: see `dependency_graph.check`; `no_subject` for a step that names nothing it is about;
            `answer_in_question`; `wrong_language`.
    """
    structure = dependency_graph.check(
        steps,
        answer,
        seed.structure or None,
        min_hops=config.min_hops,
        max_hops=config.max_hops,
        question=question,
        language=seed.language,
    )
    if nameless := [step.id for step in steps if not any(subject.strip() for subject in step.subjects)]:
        raise Rejected("no_subject", f"sub-questions {nameless} have no subjects; name what each is about")
    check_questions(question, steps, seed.language)
    check_language([question], seed.language, "the question")
    check_language((step.question for step in steps), seed.language, "a sub-question")
    subjects = (subject for step in steps for subject in step.subjects)
    decomposition = Decomposition(
        id=seed.id,
        language=seed.language,
        domain=domain,
        structure=structure,
        question=question,
        answer=answer,
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
                check=step.check if isinstance(step, WorldStep) and step.check else msgspec.UNSET,
            )
            for step in steps
        ],
        # The subject of a later step is the answer of an earlier one: these are the leaf subjects and the intermediate
        # values, in the order of the steps.
        entities=list(dict.fromkeys(subjects)),
        signature=dependency_graph.signature_of(steps),
    )
    return Draft(decomposition, [step.domain for step in steps], seed.split, seed.mode)


def assign_split(draft: Draft, config: EnvironmentsConfig) -> Draft:
    """Return the draft with the split in which all of it lies.

    Raises:
        Rejected: `mixed_split`; asking again would give no better chance than another question.
    """
    one = draft.decomposition
    if config.partition.by == "source":
        return draft
    split = config.partition.split(one.entities, one.signature)
    if split is None:
        raise Rejected("mixed_split", f"{one.signature} of {one.entities}")
    return msgspec.structs.replace(draft, split=split)


def distinct(drafts: Sequence[Draft]) -> tuple[Records[Draft], Counter[str]]:
    """Return the drafts without repetitions, the first of each kept, and how many were dropped, as `duplicate`.

    Two drafts repeat each other when they ask the same of the same entities in the same language, in whatever words.
    """
    seen: set[bytes] = set()
    kept = array("Q")
    for position, draft in enumerate(drafts):
        one = draft.decomposition
        meaning = _digest(one.language, one.signature, *sorted(set(map(fold, one.entities))))
        question = _digest(fold(one.question))
        if meaning in seen or question in seen:
            continue
        seen |= {meaning, question}
        kept.append(position)
    dropped = len(drafts) - len(kept)
    return Select(drafts, kept), Counter({"duplicate": dropped} if dropped else {})


def _digest(*texts: str) -> bytes:
    """16 bytes that stand for what is compared, of which a run has millions."""
    return hashlib.blake2b(msgspec.json.encode(texts), digest_size=16).digest()


def best(drafts: Sequence[Draft], percentile: float) -> tuple[Records[Draft], Counter[str]]:
    """Return the judged drafts that are at least as good as the one at the percentile, and how many were dropped, as
    `below_percentile`.

    Args:
        percentile: 0 to 1, as in `EnvironmentsConfig.quality_percentile`; of 100 drafts, 0.9 keeps at least the ten
            best.
    """
    means = array("d", (one.mean if (one := draft.decomposition.quality) else nan for draft in drafts))
    scores = sorted(mean for mean in means if not isnan(mean))
    if not scores or percentile <= 0:
        return Select(drafts, range(len(drafts))), Counter()
    cut = scores[min(len(scores) - 1, ceil(percentile * len(scores)))]
    kept = [position for position, mean in enumerate(means) if mean >= cut]
    dropped = len(drafts) - len(kept)
    return Select(drafts, kept), Counter({"below_percentile": dropped} if dropped else {})
