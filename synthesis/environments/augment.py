"""Augment: new questions over the tools of an environment that is there (the original's hidden third mode).

No tool is written: the teacher sees the tools with their code, and asks what they can answer. Every step names its tool
and its arguments, which are proven in the sandbox like those of a new tool.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from synthesis.core.records import CodeTool, Decomposition, ToolEnvironment
from synthesis.core.stages import Rejected
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, assign_split, drafted, prompt_vars
from synthesis.environments.drafts import Draft, NeededTool, ToolsetDraft
from synthesis.environments.leaks import check_arguments_ask, leaked
from synthesis.environments.proof import Case, check_arguments, prove
from synthesis.environments.teacher_answers import AugmentedQuestionAnswer, AugmentedStep, arguments


async def augment(
    seed: QuestionSeed, context: EnvironmentContext, environments: Mapping[str, ToolEnvironment]
) -> list[ToolsetDraft]:
    """Return a new question with the tools that it needs, all of the seed's environment.

    Args:
        environments: by id.

    Raises:
        Rejected: `not_new` for the environment's own question, `unknown_tool`, `bad_call`, `answer_in_call`,
            `answer_leaked`, a reason of `decompose.drafted` or `proof.prove`, `mixed_split`, or `teacher_failed`.
        Transient: the sandbox itself failed.
    """
    environment = environments[seed.environment]
    config, context = context.config, context.route(seed.id)

    async def check(given: AugmentedQuestionAnswer) -> ToolsetDraft:
        draft = drafted(given.question, given.answer, given.domain, given.sub_questions, seed, config)
        one = draft.decomposition
        if (one.signature, set(one.entities)) == (environment.signature, set(environment.entities)):
            raise Rejected(
                "not_new", f"this is what is asked already: {environment.question!r}; ask for something else"
            )
        tools = {tool.spec.name: tool for tool in environment.tools}
        by_tool: dict[str, list[AugmentedStep]] = {}
        for step in given.sub_questions:
            _check_call(step, tools, one)
            by_tool.setdefault(step.tool, []).append(step)
        needed = []
        for name, steps in by_tool.items():
            others = [arguments(step.other_arguments) for step in steps]
            cases = [
                Case(step.id, arguments(step.arguments), other, step.answer, seed.language)
                for step, other in zip(steps, others, strict=True)
            ]
            calls = await prove(tools[name], cases, context)
            needed.append(NeededTool(steps[0].intent, steps[0].domain, tools[name], calls, others))
        return ToolsetDraft(draft, needed)

    variables = {**prompt_vars(seed, config), "environment": environment, "seed": context.seed}
    built = await context.ask(AugmentedQuestionAnswer, variables, language=seed.language, key=seed.id, check=check)
    return [msgspec.structs.replace(built, draft=assign_split(built.draft, config))]


def _check_call(step: AugmentedStep, tools: Mapping[str, CodeTool], of: Decomposition) -> None:
    if step.tool not in tools:
        raise Rejected("unknown_tool", f"sub-question {step.id} wants {step.tool!r}; the tools are {', '.join(tools)}")
    tool = tools[step.tool]
    for given in (step.arguments, step.other_arguments):
        check_arguments(tool.spec, arguments(given))
    asked = next(one for one in of.sub_questions if one.id == step.id)
    check_arguments_ask(arguments(step.arguments), asked, of)
    if text := leaked(tool.spec, [of.answer, *(one.answer for one in of.sub_questions)], of.language):
        raise Rejected("answer_leaked", f"the document of {step.tool} gives an answer away: {text!r}; ask otherwise")


def validated(built: ToolsetDraft, draft: Draft) -> ToolsetDraft:
    """Return the tools with the judged draft; calls of steps that need no tool are left out."""
    needed = {step.id for step in draft.decomposition.sub_questions if step.needs_tool}
    tools = []
    for tool in built.tools:
        kept = [
            (made, other)
            for made, other in zip(tool.calls, tool.negative_arguments, strict=True)
            if made.sub_question in needed
        ]
        if kept:
            calls, others = zip(*kept, strict=True)
            tools.append(msgspec.structs.replace(tool, calls=list(calls), negative_arguments=list(others)))
    return msgspec.structs.replace(built, draft=draft, tools=tools)
