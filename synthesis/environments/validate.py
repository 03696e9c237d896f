"""Validate: tool necessity, then four quality indicators and their mean (paper §2.2.2, eq. 13-21).

Every indicator is judged by a request of its own. Fail closed: an answer that names the wrong sub-questions is asked
for again and then rejects the decomposition; nothing is scored as good because it could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from synthesis.core.records import Decomposition, QualityScores, SubQuestion
from synthesis.core.stages import Rejected
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import Draft
from synthesis.environments.teacher_answers import (
    Atomicity,
    AtomicityAnswer,
    CompletenessAnswer,
    DependencyConsistencyAnswer,
    Necessity,
    SequentialRationalityAnswer,
    ToolNecessityAnswer,
)
from synthesis.pipeline.context import gather_or_cancel, no_check


async def validate_draft(draft: Draft, context: EnvironmentContext) -> list[Draft]:
    """Return the draft with its tool necessities and quality scores.

    Raises:
        Rejected: `tool_free_dependency` where a step that others need has no tool, `no_tools` where no step needs one,
            `low_quality` below the threshold, `wrong_ids` where a judge answers for other steps; or `teacher_failed`.
    """
    context = context.route(draft.decomposition.id)
    decomposition = await _with_necessity(draft.decomposition, context)
    quality = QualityScores(
        *await gather_or_cancel(
            _dependency_consistency(decomposition, context),
            _atomicity(decomposition, context),
            _sequential_rationality(decomposition, context),
            _completeness(decomposition, context),
        )
    )
    if quality.mean < context.config.quality_threshold:
        raise Rejected("low_quality", f"{quality.mean:.2f} < {context.config.quality_threshold}: {quality}")
    return [msgspec.structs.replace(draft, decomposition=msgspec.structs.replace(decomposition, quality=quality))]


async def _with_necessity(decomposition: Decomposition, context: EnvironmentContext) -> Decomposition:
    async def check(given: ToolNecessityAnswer) -> ToolNecessityAnswer:
        _same_ids(given.steps, decomposition.sub_questions)
        return given

    answer = await context.ask(ToolNecessityAnswer, **_about(decomposition), check=check)
    consumed = {dependency for step in decomposition.sub_questions for dependency in step.depends_on}
    for verdict in answer.steps:
        if verdict.id in consumed and not verdict.tool_needed:
            raise Rejected("tool_free_dependency", f"others depend on sub-question {verdict.id}, {verdict.reason}")
    if not any(verdict.tool_needed for verdict in answer.steps):
        raise Rejected("no_tools", "no sub-question needs a tool")
    steps = [
        msgspec.structs.replace(step, needs_tool=verdict.tool_needed)
        for step, verdict in zip(decomposition.sub_questions, answer.steps, strict=True)
    ]
    return msgspec.structs.replace(decomposition, sub_questions=steps)


async def _dependency_consistency(decomposition: Decomposition, context: EnvironmentContext) -> float | None:
    """Mean over the sub-questions that have dependencies; None where none has (eq. 14 has nothing to average)."""
    by_id = {step.id: step for step in decomposition.sub_questions}
    dependent = [step for step in decomposition.sub_questions if step.depends_on]

    async def judge(step: SubQuestion) -> bool:
        variables = {
            "question": decomposition.question,
            "step": step,
            "dependencies": [by_id[dependency] for dependency in step.depends_on],
        }
        key = f"{decomposition.id}/{step.id}"
        given = await context.ask(
            DependencyConsistencyAnswer, variables, language=decomposition.language, key=key, check=no_check
        )
        return given.verdict == "matched"

    verdicts = await gather_or_cancel(*map(judge, dependent))
    return sum(verdicts) / len(verdicts) if verdicts else None


async def _atomicity(decomposition: Decomposition, context: EnvironmentContext) -> float:
    async def check(given: AtomicityAnswer) -> float:
        _same_ids(given.steps, decomposition.sub_questions)
        return sum(step.atomic for step in given.steps) / len(given.steps)

    return await context.ask(AtomicityAnswer, **_about(decomposition), check=check)


async def _sequential_rationality(decomposition: Decomposition, context: EnvironmentContext) -> float:
    ids = {step.id for step in decomposition.sub_questions}

    async def check(given: SequentialRationalityAnswer) -> float:
        flagged = set(given.needlessly_sequential)
        if not flagged <= ids:
            raise Rejected("wrong_ids", f"{sorted(flagged - ids)} are no ids of sub-questions; they are {sorted(ids)}")
        return 1 - len(flagged) / len(ids)

    return await context.ask(SequentialRationalityAnswer, **_about(decomposition), check=check)


async def _completeness(decomposition: Decomposition, context: EnvironmentContext) -> float:
    async def check(given: CompletenessAnswer) -> float:
        if given.complete == bool(given.missing):
            raise Rejected("contradictory", f"complete is {given.complete}, and missing is {given.missing}")
        return float(given.complete)

    return await context.ask(CompletenessAnswer, **_about(decomposition), check=check)


def _about(decomposition: Decomposition) -> dict[str, Any]:
    """Return the arguments of a request that judges the whole decomposition."""
    return {
        "variables": {"decomposition": decomposition},
        "language": decomposition.language,
        "key": decomposition.id,
    }


def _same_ids(given: Sequence[Necessity | Atomicity], steps: Sequence[SubQuestion]) -> None:
    wanted, found = [step.id for step in steps], [verdict.id for verdict in given]
    if wanted != found:
        raise Rejected(
            "wrong_ids", f"verdicts for the sub-questions {found}; give one for each of {wanted}, in this order"
        )
