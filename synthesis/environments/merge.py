"""Merge: sub-questions that ask the same of different subjects get one tool (paper §2.2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from synthesis.core.records import CodeTool, Decomposition, ReferenceCall
from synthesis.core.reward import SubTask, answered_by
from synthesis.core.stages import Rejected
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import NeededTool, ToolsetDraft
from synthesis.environments.implement import read_source
from synthesis.environments.leaks import check_arguments_ask, leaked
from synthesis.environments.proof import Case, check_arguments, prove
from synthesis.environments.teacher_answers import Cluster, IntentClustersAnswer, MergedToolAnswer, arguments
from synthesis.pipeline.embedding import document_text


async def merge(built: ToolsetDraft, context: EnvironmentContext) -> list[ToolsetDraft]:
    """Return the environment with one tool for each intent. All reference calls are proven against the merged code.

    Raises:
        Rejected: `bad_clusters`, `different_schemas`, `different_tools`, `shared_call`, `name_collision`,
            `answer_leaked`, `bad_call`, `answer_in_call`, `bad_code`, a reason of `proof.prove`, or `teacher_failed`. A
            failed merge rejects the whole environment: half of it could not be answered.
    """
    tools, context = built.tools, context.route(built.draft.decomposition.id)
    if len(tools) > 1:
        clusters = await _clusters(built, context)
        by_step = {tool.calls[0].sub_question: tool for tool in tools}
        members = [[by_step[id_] for id_ in cluster.ids] for cluster in clusters]
        tools = [group[0] if len(group) == 1 else await _merged(built, group, context) for group in members]
    names = [tool.tool.spec.name for tool in tools]
    if len(set(names)) != len(names):
        raise Rejected("name_collision", f"tools of different intents share a name: {sorted(names)}")
    return [msgspec.structs.replace(built, tools=tools)]


async def _clusters(built: ToolsetDraft, context: EnvironmentContext) -> list[Cluster]:
    decomposition = built.draft.decomposition
    ids = [tool.calls[0].sub_question for tool in built.tools]
    by_step = dict(zip(ids, built.tools, strict=True))
    steps = [step for step in decomposition.sub_questions if step.id in ids]

    async def check(given: IntentClustersAnswer) -> list[Cluster]:
        found = sorted(id_ for cluster in given.clusters for id_ in cluster.ids)
        if found != sorted(ids) or not all(cluster.ids for cluster in given.clusters):
            raise Rejected("bad_clusters", f"clusters hold {found}; each of {ids} must be in exactly one")
        for cluster in given.clusters:
            group = [by_step[id_] for id_ in cluster.ids]
            await _check_homogeneous(group, context)
            calls = [tool.calls[0] for tool in group]
            _check_one_answer(calls, decomposition, "put these sub-questions into different clusters")
        return given.clusters

    variables = {"steps": steps, "tools": [tool.tool.spec for tool in built.tools]}
    return await context.ask(
        IntentClustersAnswer, variables, language=decomposition.language, key=decomposition.id, check=check
    )


async def _merged(built: ToolsetDraft, group: list[NeededTool], context: EnvironmentContext) -> NeededTool:
    """One tool with the first member's document and the union of the members' data."""
    decomposition = built.draft.decomposition
    steps = {step.id: step for step in decomposition.sub_questions}
    members = [steps[tool.calls[0].sub_question] for tool in group]
    # Keep the document with the most parameters, so that a hardened tool stays hard; but none that reveals an answer.
    documents = sorted((tool.tool.spec for tool in group), key=lambda spec: -len(spec.parameters["properties"]))
    answers = [decomposition.answer, *(step.answer for step in decomposition.sub_questions)]
    base = next((spec for spec in documents if not leaked(spec, answers, decomposition.language)), None)
    if base is None:
        raise Rejected("answer_leaked", f"every document of {documents[0].name} gives an answer away")

    async def check(given: MergedToolAnswer) -> NeededTool:
        if len(given.calls) != len(members):
            raise Rejected("bad_call", f"{len(given.calls)} calls for {len(members)} sub-questions; give one for each")
        tool = CodeTool(base, read_source(given.code, base.name))
        calls = [arguments(call) for call in given.calls]
        for call, step in zip(calls, members, strict=True):
            check_arguments(base, call)
            check_arguments_ask(call, step, decomposition)
        cases = [
            Case(step.id, call, own.negative_arguments[0], step.answer, decomposition.language)
            for call, own, step in zip(calls, group, members, strict=True)
        ]
        references = await prove(tool, cases, context)
        _check_one_answer(references, decomposition, "return only what its own call asks for")
        return NeededTool(
            group[0].intent, group[0].domain, tool, references, [own.negative_arguments[0] for own in group]
        )

    variables = {
        "steps": members,
        "document": base,
        "tools": [tool.tool for tool in group],
        "calls": [tool.calls[0] for tool in group],
        "table_rows": context.config.table_rows,
        "seed": context.seed,
    }
    key = f"{decomposition.id}/{'+'.join(str(member.id) for member in members)}"
    return await context.ask(MergedToolAnswer, variables, language=decomposition.language, key=key, check=check)


def _check_one_answer(calls: Sequence[ReferenceCall], decomposition: Decomposition, remedy: str) -> None:
    """Check that no call of one tool answers two sub-questions: it would solve neither.

    Raises:
        Rejected: `shared_call`.
    """
    steps = {step.id: step for step in decomposition.sub_questions}
    tasks = [SubTask(**msgspec.structs.asdict(steps[one.sub_question]), given=one.arguments) for one in calls]
    for call in calls:
        answered = answered_by({"": tasks}, "", call.output, decomposition.language, call.arguments)
        if len(answered) > 1:
            raise Rejected(
                "shared_call",
                f"the output for sub-question {call.sub_question} answers sub-questions {answered}; {remedy}",
            )


async def _check_homogeneous(group: list[NeededTool], context: EnvironmentContext) -> None:
    """Check that tools may become one: they require the same parameters, and their documents are similar.

    Raises:
        Rejected: `different_schemas`, `different_tools`.
    """
    ids = [tool.calls[0].sub_question for tool in group]
    schemas = {tuple(sorted(_required(tool).items())) for tool in group}
    if len(schemas) > 1:
        raise Rejected("different_schemas", f"the tools for {ids} require different parameters: {schemas}; part them")
    texts = list(dict.fromkeys(document_text(tool.tool.spec) for tool in group))
    if len(texts) > 1:
        vectors = await context.embedder.embed(texts)
        if (least := float((vectors @ vectors.T).min())) < (wanted := context.config.merge_similarity):
            names = sorted({tool.tool.spec.name for tool in group})
            raise Rejected(
                "different_tools",
                f"the tools for {ids}, {names}, have a similarity of {least:.2f} < {wanted}; part them",
            )


def _required(tool: NeededTool) -> dict[str, Any]:
    schema = tool.tool.spec.parameters
    return {name: schema["properties"][name]["type"] for name in schema["required"]}
