"""Solve to verify: a finished environment is played, rightly and wrongly, before it is stored.

A scripted solver makes the reference calls in the order of the dependencies. Each gives its answer as stored, uses what
the steps it waits for have found, and the last ones hold the final answer: F1 reward 1. Three wrong policies (those of
worlds are in `world_proof`; imported environments are only solved) then get what the formula (paper eq. 30-31) says:
calling everything pays for each call too many, calling nothing and calling with wrong arguments earn nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from synthesis.core.matching import contains, match
from synthesis.core.plays import call, play
from synthesis.core.readings import NormalizedOutput
from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment
from synthesis.core.reward import MadeCall, answered_by, score, sub_tasks_by_tool
from synthesis.core.stages import Rejected
from synthesis.environments import dependency_graph
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import ToolsetDraft
from synthesis.environments.proof import Case, check_arguments, perturbed, short, shown, translated
from synthesis.environments.world_proof import verify_world
from synthesis.pipeline.demo import license_of_facts
from synthesis.pipeline.teacher import follows_rules

if TYPE_CHECKING:
    from sandbox import Sandbox


async def finish(built: ToolsetDraft, context: EnvironmentContext) -> list[ToolEnvironment]:
    """Return the environment as it is stored, verified.

    Raises:
        Rejected: `name_collision`, or see `verify` and `world_proof.verify_world`.
        Transient: the sandbox itself failed.
    """
    environment = assembled(built)
    others = {
        call.sub_question: wrong
        for one in built.tools
        for call, wrong in zip(one.calls, one.negative_arguments, strict=True)
    }
    async with context.proofs:
        proof = verify if environment.world is msgspec.UNSET else verify_world
        await context.in_sandbox(proof, environment, others)
    # Without a model every answer is computed from the tables.
    license = context.config.license or (license_of_facts() if follows_rules(context.teacher) else "")
    return [
        msgspec.structs.replace(
            environment, provenance=context.provenance(license, environment.id, ("author", "judge"))
        )
    ]


def assembled(built: ToolsetDraft) -> ToolEnvironment:
    """Return the record of an environment.

    Raises:
        Rejected: `name_collision`.
    """
    one = built.draft.decomposition
    tools = [tool.tool for tool in built.tools]
    names = [tool.spec.name for tool in [*tools, *(tool for band in built.distractors.values() for tool in band)]]
    if len(set(names)) != len(names):
        raise Rejected("name_collision", f"tools share a name: {sorted(names)}")
    return ToolEnvironment(
        id=one.id,
        language=one.language,
        domain=one.domain,
        structure=one.structure,
        question=one.question,
        answer=one.answer,
        sub_questions=one.sub_questions,
        tools=tools,
        reference_calls=sorted(
            (made for tool in built.tools for made in tool.calls), key=lambda made: made.sub_question
        ),
        distractors=built.distractors,
        entities=one.entities,
        signature=one.signature,
        split=built.draft.split,
        mode=built.draft.mode,
        quality=one.quality,
        difficulty=dependency_graph.difficulty_of(one.sub_questions, built.closeness),
        world=built.world,
    )


async def verify(environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]], sandbox: Sandbox) -> None:
    """Play the environment with the solver and with the three wrong policies.

    Args:
        others: by sub-question, arguments of its tool that are not its answer's.

    Raises:
        Rejected: a reason of `solve`, `not_solved`, `wrong_policy_scores`.
        Transient: the sandbox itself failed.
    """
    right = await solve(environment, sandbox)
    if (reward := score(environment, right, epsilon=0.0).value) != 1.0:
        raise Rejected("not_solved", f"{environment.id}: the solver's reward is {reward}")
    if score(environment, []).value != 0.0:
        raise Rejected("wrong_policy_scores", f"{environment.id}: calling nothing is rewarded")
    extra = await _everything(environment, others, sandbox)
    n, c = len(right), len(right) + len(extra)
    reward, expected = score(environment, [*right, *extra], epsilon=0.0).value, 2 * n / (n + c)
    if abs(reward - expected) > 1e-9:
        raise Rejected("wrong_policy_scores", f"{environment.id}: calling everything gives {reward}, not {expected}")
    if (reward := score(environment, await _shuffled(environment, others, sandbox)).value) != 0.0:
        raise Rejected("wrong_policy_scores", f"{environment.id}: calls with wrong arguments give {reward}")


async def solve(environment: ToolEnvironment, sandbox: Sandbox) -> list[MadeCall]:
    """Make the reference calls in the order of the dependencies.

    Raises:
        Rejected: `bad_call` or `bad_schema` for a call that an episode would refuse, `replay_failed` for one that does
            not give its stored output and its answer, `dependency_unused` for one whose arguments hold nothing that the
            steps it waits for have found, `shared_call` where one call answers two sub-questions (it would solve
            neither), `answer_not_reached` where the last steps do not hold the final answer.
        Transient: the sandbox itself failed.
    """
    tools = {tool.spec.name: tool for tool in environment.tools}
    by_step = {made.sub_question: made for made in environment.reference_calls}
    found: dict[int, Any] = {}
    calls: list[MadeCall] = []
    dependencies = dependency_graph.graph_of(environment.sub_questions)
    sub_tasks = sub_tasks_by_tool(environment)
    for step in sorted(environment.sub_questions, key=lambda step: (step.hop, step.id)):
        reference = by_step.get(step.id)
        if reference is None:  # it needs no tool: its answer follows from the outputs
            found[step.id] = step.answer.value
            continue
        check_arguments(tools[reference.tool].spec, reference.arguments)
        _check_dependencies(environment, step, reference, found)
        output = await _replayed(environment, step, reference, tools[reference.tool], sandbox)
        found[step.id] = output
        calls.append(MadeCall(reference.tool, True, output, reference.arguments))
        answered = answered_by(sub_tasks, reference.tool, output, environment.language, reference.arguments)
        if len(answered) > 1:
            raise Rejected(
                "shared_call", f"{environment.id}: one call of {reference.tool} answers sub-questions {answered}"
            )
    ends = [found[id_] for id_ in dependencies if dependencies.out_degree(id_) == 0]
    if not contains(ends, environment.answer, environment.language):
        raise Rejected(
            "answer_not_reached",
            f"{environment.id}: {environment.answer.value!r} is not in the last outputs {short(ends)}",
        )
    return calls


async def _replayed(
    environment: ToolEnvironment, step: SubQuestion, reference: ReferenceCall, tool: CodeTool, sandbox: Sandbox
) -> Any:
    result = await call(tool, reference.arguments, sandbox)
    rule = match(result.value, step.answer, environment.language) if result.ok else None
    if rule is None or result.value != reference.output or rule != reference.rule:
        raise Rejected(
            "replay_failed",
            f"{environment.id}: {shown(tool, reference.arguments)} gave {short(result.value)}, rule {rule}",
        )
    return result.value


def _check_dependencies(
    environment: ToolEnvironment, step: SubQuestion, reference: ReferenceCall, found: Mapping[int, Any]
) -> None:
    given = [value for value in reference.arguments.values() if value is not None]
    for dependency in step.depends_on:
        known = found[dependency]
        reading = NormalizedOutput(known, environment.language)
        if not any(contains(reading, Answer(value)) or _among(known, value, environment.language) for value in given):
            raise Rejected(
                "dependency_unused",
                f"{environment.id}: sub-question {step.id} is asked with {reference.arguments}; none of these is in "
                f"{short(known)}, the output of sub-question {dependency}",
            )


def _among(output: Any, value: Any, language: str) -> bool:
    """Return whether an argument is a rewording of an output: a code or name inside it, or it inside a longer
    argument."""
    return (
        isinstance(value, str)
        and isinstance(output, str)
        and bool(output)
        and contains(value, Answer(output), language)
    )


async def _everything(
    environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]], sandbox: Sandbox
) -> list[MadeCall]:
    """One call too many of every tool: of a needed one with wrong arguments, of an irrelevant one with any that fit."""
    irrelevant = [tool for band in environment.distractors.values() for tool in band]
    calls = {made.tool: others[made.sub_question] for made in environment.reference_calls}
    for tool in irrelevant:
        calls[tool.spec.name] = next(_fitting(environment, environment.reference_calls, tool), {})
    made = await play([*environment.tools, *irrelevant], list(calls.items()), sandbox)
    return [one._replace(arguments=calls[one.tool]) for one in made]


async def _shuffled(
    environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]], sandbox: Sandbox
) -> list[MadeCall]:
    """Make every reference call with wrong arguments: those of another call if they fit, else others of its kind.

    Another subject may have the same value by chance, so the first that does not score is taken; a tool with which all
    score is what must not be.
    """
    tools = {tool.spec.name: tool for tool in environment.tools}
    answers = {step.id: step.answer for step in environment.sub_questions}
    references = environment.reference_calls
    calls: list[tuple[str, Mapping[str, Any]]] = []
    whose: list[int] = []
    for index, reference in enumerate(references):
        tool, id_ = tools[reference.tool], reference.sub_question
        own = [made.arguments for made in references if made.tool == reference.tool]
        foreign = _fitting(environment, [*references[index + 1 :], *references[:index]], tool)
        proven = perturbed(tool, Case(id_, reference.arguments, others[id_], answers[id_], environment.language))
        wrong = [one for one in [*foreign, *proven] if one and one not in own]
        calls += [(reference.tool, arguments) for arguments in wrong]
        whose += [id_] * len(wrong)
    chosen: dict[int, MadeCall] = {}
    every = await play(environment.tools, calls, sandbox)
    for id_, (_, given), made in zip(whose, calls, every, strict=True):
        if id_ not in chosen or score(environment, [chosen[id_]]).value:
            chosen[id_] = made._replace(arguments=given)
    return list(chosen.values())


def _fitting(
    environment: ToolEnvironment, references: Sequence[ReferenceCall], tool: CodeTool
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of reference calls that a tool's schema takes."""
    specs = {one.spec.name: one.spec for one in environment.tools}
    for reference in references:
        if (arguments := translated(reference.arguments, specs[reference.tool], tool.spec)) is not None:
            yield arguments
