"""An environment that somebody writes down: a question, its steps, and the functions that answer them.

    one = await own_environment(question, answer, steps, code=SOURCE, sandbox=sandbox)

It is proven as one that is synthesised is: every function is called in the sandbox, each call gives its step's answer,
and an episode of just these calls has reward 1. docs/environments.md has a whole example.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.matching import match
from synthesis.core.plays import call, paid_guesses
from synthesis.core.records import Answer, CodeTool, Language, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.reward import score
from synthesis.core.stages import Rejected
from synthesis.environments import dependency_graph
from synthesis.environments.proof import check_arguments, guess_paid, short, shown
from synthesis.environments.verify import solve

if TYPE_CHECKING:
    from sandbox import Sandbox

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


@dataclass(frozen=True)
class OwnStep:
    """One sub-question.

    Attributes:
        question: in words.
        answer: a value, or an `Answer` with unit, tolerance or aliases.
        tool: the function whose output holds it; "": it follows from the steps before.
        arguments: of the call.
        after: numbers of the steps, from 1, that it needs.
    """

    question: str
    answer: Any
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    after: Sequence[int] = ()


async def own_environment(
    question: str,
    answer: Any,
    steps: Sequence[OwnStep],
    *,
    code: str,
    sandbox: Sandbox,
    language: Language = "en",
    domain: str = "own",
    split: Literal["train", "held_out"] = "train",
) -> ToolEnvironment:
    """Return the proven record.

    Args:
        code: a Python module; each function without a leading underscore is a tool, with its docstring as the document
            and its annotated parameters (str, int, float, bool) as the schema.

    Raises:
        InputError: it is none: what is wrong with the code, a step or the proof.
        Transient: the sandbox itself failed.
    """
    name = hashlib.sha256(f"{question}\0{code}".encode()).hexdigest()[:12]
    try:
        tools = _tools(code)
        made = [_sub_question(number, step) for number, step in enumerate(steps, start=1)]
        levels = dependency_graph.hops(dependency_graph.graph_of(made))
        made = [msgspec.structs.replace(one, hop=levels[one.id]) for one in made]
        goal = _answer(answer)
        structure = dependency_graph.check(
            made, goal, None, min_hops=1, max_hops=len(made), question=question, language=language
        )
        numbered = [(number, step) for number, step in enumerate(steps, start=1) if step.tool]
        calls = [await _called(number, step, tools, sandbox, language) for number, step in numbered]
        environment = ToolEnvironment(
            id=f"own-{name}",
            language=language,
            domain=domain,
            structure=structure,
            question=question,
            answer=goal,
            sub_questions=made,
            tools=list(tools.values()),
            reference_calls=calls,
            distractors={},
            entities=[],
            signature=f"own:{name}",
            split=split,
            mode="question",
            difficulty=dependency_graph.difficulty_of(made),
        )
        reward = score(environment, await solve(environment, sandbox), epsilon=0.0).value
        for guess in await paid_guesses(environment, sandbox):
            detail = guess_paid(tools[guess.tool], guess.arguments, guess.output, guess.step.answer)
            raise Rejected("ignores_arguments", f"step {guess.step.id}: {detail}")
    except Rejected as rejection:
        raise InputError(f"{question!r:.80}: {rejection.reason}: {rejection.detail}") from None
    if reward != 1.0:
        raise InputError(f"{question!r:.80}: its own calls have reward {reward}, not 1; each call answers one step")
    return environment


def _answer(value: Any) -> Answer:
    return value if isinstance(value, Answer) else Answer(value)


def _sub_question(number: int, step: OwnStep) -> SubQuestion:
    return SubQuestion(
        id=number,
        question=step.question,
        answer=_answer(step.answer),
        depends_on=list(step.after),
        hop=1,
        needs_tool=bool(step.tool),
        intent=step.tool or f"step_{number}",
    )


async def _called(
    number: int, step: OwnStep, tools: Mapping[str, CodeTool], sandbox: Sandbox, language: str
) -> ReferenceCall:
    if step.tool not in tools:
        raise Rejected("no_such_tool", f"step {number} calls {step.tool!r}; the code has {', '.join(tools) or 'none'}")
    result = await call(tools[step.tool], step.arguments, sandbox)
    rule = match(result.value, _answer(step.answer), language) if result.ok else None
    if rule is None:
        said = short(result.value) if result.ok else f"{result.kind}: {result.error}"
        raise Rejected(
            "wrong_answer", f"step {number}: {shown(tools[step.tool], step.arguments)} gave {said}, not {step.answer!r}"
        )
    try:
        check_arguments(tools[step.tool].spec, step.arguments)
    except Rejected as rejection:
        raise Rejected(
            rejection.reason,
            f"step {number}: {rejection.detail}; annotate the function as it is called, or call it as it is annotated",
        ) from None
    return ReferenceCall(number, step.tool, dict(step.arguments), result.value, rule)


def _tools(code: str) -> dict[str, CodeTool]:
    try:
        functions = [one for one in ast.parse(code).body if isinstance(one, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected("bad_code", f"it is no Python module ({error})") from None
    found = {}
    for one in functions:
        if one.name.startswith("_"):
            continue
        found[one.name] = CodeTool(ToolSpec(one.name, ast.get_docstring(one) or "", _parameters(one)), code)
    return found


def _parameters(function: ast.FunctionDef) -> dict[str, Any]:
    given = function.args
    if given.vararg or given.kwarg or given.posonlyargs:
        raise Rejected("bad_code", f"{function.name}: a tool's parameters have names; leave out *, ** and /")
    properties: dict[str, Any] = {}
    for one in [*given.args, *given.kwonlyargs]:
        kind = ast.unparse(one.annotation) if one.annotation else "nothing"
        if kind not in _TYPES:
            raise Rejected("bad_code", f"{function.name}: {one.arg} is annotated with {kind}; use {', '.join(_TYPES)}")
        properties[one.arg] = {"type": _TYPES[kind]}
    open_ones = [one.arg for one in given.args[: len(given.args) - len(given.defaults)]]
    open_ones += [one.arg for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is None]
    return {"type": "object", "properties": properties, "required": open_ones}
