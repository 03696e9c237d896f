"""Proofs in the sandbox: a tool gives the right answer to its reference call, and only to it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox import Reason, validate_call
from synthesis.core.echoes import guesses, is_evidence
from synthesis.core.matching import contains, match
from synthesis.core.plays import call, made_call, play, settled
from synthesis.core.records import Answer, CodeTool, Language, ReferenceCall, ToolSpec
from synthesis.core.reward import MadeCall
from synthesis.core.stages import Rejected
from synthesis.core.tool_schemas import UncheckableSchema, argument_error
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.leaks import leaves, states

if TYPE_CHECKING:
    from sandbox import Sandbox


@dataclass(frozen=True)
class Case:
    """A call to prove: its answer, and other arguments of the same tool that must not give it."""

    sub_question: int
    arguments: Mapping[str, Any]
    other_arguments: Mapping[str, Any]
    answer: Answer
    language: Language = "en"


async def prove(tool: CodeTool, cases: Sequence[Case], context: EnvironmentContext) -> list[ReferenceCall]:
    """Prove the reference calls, and return them with their outputs, in the order of the cases.

    Each reference call must succeed, contain its answer, and pass `sandbox.validate_call`: the same output under
    another random seed and at another time, no clock, no network, no forbidden import. The other arguments, arguments
    that name nothing or anything, and no arguments at all must fail or give another answer. Otherwise a tool that
    ignores its arguments, or searches by a part of them, would let a policy score without solving the call's
    dependencies. So would a tool that finds the answer where the call states it or a part of it (`echoes.guesses`). A
    mere repetition is allowed, since the reward does not count it. Valid calls have results of one shape.

    Raises:
        Rejected: `tool_failed`, `wrong_answer`, `ignores_arguments`, `answer_leaked` (by the error of wrong arguments),
            `unstable_result`, or a `sandbox.Reason`; the detail is for the teacher.
        Transient: the sandbox itself failed.
    """
    async with context.proofs:
        return await context.in_sandbox(prove_cases, tool, cases)


async def prove_cases(tool: CodeTool, cases: Sequence[Case], sandbox: Sandbox) -> list[ReferenceCall]:
    """Return the reference calls, proven one after the other; see `prove`, whose errors it raises."""
    proven = [await prove_case(tool, case, sandbox) for case in cases]
    for one in proven:
        _check_shape(tool, proven[0].output, one.arguments, one.output)
    return proven


async def prove_case(tool: CodeTool, case: Case, sandbox: Sandbox) -> ReferenceCall:
    """One reference call, proven; see `prove`, whose errors it raises."""
    validation = await validate_call(sandbox, tool.code, tool.spec.name, case.arguments)
    first, finding = settled(validation.result), validation.finding
    if finding is not None and finding.reason is Reason.FAILS:
        raise Rejected("tool_failed", f"{shown(tool, case.arguments)} failed: {first.kind}: {first.error}")
    if finding is not None:
        raise Rejected(finding.reason.value, f"{shown(tool, case.arguments)} {finding.detail}")
    rule = match(first.value, case.answer, case.language)
    if rule is None:
        raise Rejected(
            "wrong_answer",
            f"{shown(tool, case.arguments)} returned {short(first.value)}, expected {case.answer.value!r} in it",
        )
    for wrong in perturbed(tool, case):
        result = await call(tool, wrong, sandbox)
        _check_wrong(tool, case, wrong, made_call(tool, result))
        if result.ok and wrong == case.other_arguments:  # nonsense may well be answered with an error message
            _check_shape(tool, first.value, wrong, result.value)
    wide, stated = searches(tool, case), guesses(tool.spec.parameters, case.arguments, case.answer)
    made = await play([tool], [(tool.spec.name, one) for one in (*wide, *stated)], sandbox)
    for wrong, one in zip(wide, made, strict=False):
        _check_wrong(tool, case, wrong, one)
    for guess, one in zip(stated, made[len(wide) :], strict=True):
        if one.ok and is_evidence(one.output, case.answer, guess, case.arguments, case.language):
            raise Rejected("ignores_arguments", guess_paid(tool, guess, one.output, case.answer))
    return ReferenceCall(case.sub_question, tool.spec.name, dict(case.arguments), first.value, rule)


def _check_wrong(tool: CodeTool, case: Case, wrong: Mapping[str, Any], made: MadeCall) -> None:
    if made.ok and contains(made.output, case.answer, case.language):
        raise Rejected(
            "ignores_arguments",
            f"{shown(tool, wrong)} returned {short(made.output)}, which holds the answer {case.answer.value!r} "
            f"of another call, {shown(tool, case.arguments)}; wrong arguments must raise an error",
        )
    if not made.ok:
        error = str(made.output or "")
        for one in leaves(wrong):  # errors repeat what they were given
            error = re.sub(rf"(?<!\w){re.escape(str(one))}(?!\w)", "·", error) if one != "" else error
        if states(error, case.answer, case.language):
            raise Rejected(
                "answer_leaked",
                f"{shown(tool, wrong)} failed with {short(made.output)}, which states the answer {case.answer.value!r} "
                f"of another call, {shown(tool, case.arguments)}; say in errors what is wrong, and nothing of the data",
            )


def guess_paid(tool: CodeTool, guess: Mapping[str, Any], output: Any, answer: Answer) -> str:
    """Return why a tool that answers a guess is refused."""
    return (
        f"{shown(tool, guess)} returned {short(output)}, which holds the answer {answer.value!r} that the call only "
        "guesses; look up exact values, suggest none, and raise an error for all others"
    )


def _check_shape(tool: CodeTool, known: Any, arguments: Mapping[str, Any], output: Any) -> None:
    if not same_shape(known, output):
        raise Rejected(
            "unstable_result",
            f"{shown(tool, arguments)} returned {short(output)}, another call {short(known)}; give every result the "
            "same keys and types",
        )


def same_shape(one: Any, other: Any) -> bool:
    """Return whether two JSON values have the same keys and types. Null fits anything, as does an empty list any
    list."""
    if one is None or other is None:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_shape(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return all(same_shape(a, b) for a in one[:1] for b in [*one, *other]) if one else True
    return _kind(one) == _kind(other)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__


def perturbed(tool: CodeTool, case: Case) -> list[dict[str, Any]]:
    """Wrong arguments for a case: the other subject, each required free argument made nonsense, and none at all."""
    wrong: list[dict[str, Any]] = [dict(case.other_arguments)]
    required = tool.spec.parameters.get("required", [])
    for name in _free(tool):
        if (other := invalid_value(case.arguments[name])) != case.arguments[name]:
            wrong.append({**case.arguments, name: other})
    # Python itself refuses a call without them where they have no default; no need to try.
    return wrong if set(required) & without_default(tool) else [*wrong, {}]


def invalid_value(value: Any) -> Any:
    """Return a value of the same type that names nothing: each value of a list or an object, and a boolean as it is."""
    if isinstance(value, str):
        return "zzqx 00"
    if isinstance(value, list):
        return [invalid_value(one) for one in value]
    if isinstance(value, dict):
        return {name: invalid_value(one) for name, one in value.items()}
    return value + 7_654_321 if isinstance(value, int | float) and not isinstance(value, bool) else value


def searches(tool: CodeTool, case: Case) -> list[dict[str, Any]]:
    """Arguments by which a search would find all there is: each required free one made such, and all of them empty.

    The same again with each other value of an argument that has a closed set of them, a choice or a truth value: one
    may say how the others are looked for ("prefix").
    """
    free, given = _free(tool), case.arguments
    found = [{**given, name: one} for name in free for one in wildcards(given[name]) if one != given[name]]
    emptied = {**given, **{name: _EMPTY.get(type(given[name]), given[name]) for name in free}}
    if len(free) > 1 and emptied != given:  # numbers are not empty
        found.append(emptied)
    options = [(name, value) for name, value in _options(tool) if given.get(name) != value]
    return [*found, *({**one, name: value} for name, value in options[:_MOST_OPTIONS] for one in found)]


def _options(tool: CodeTool) -> list[tuple[str, Any]]:
    """Return all values of the arguments that have a closed set of them."""
    found: list[tuple[str, Any]] = []
    for name, schema in tool.spec.parameters.get("properties", {}).items():
        values = schema.get("enum", [False, True] if schema.get("type") == "boolean" else [])
        found += [(name, value) for value in values]
    return found


def _free(tool: CodeTool) -> list[str]:
    """Return the required arguments that have no closed set of values, each of which would be a sensible one."""
    schema = tool.spec.parameters
    return [name for name in schema.get("required", []) if "enum" not in schema["properties"][name]]


_WILDCARDS = ("", "*", "%", ".*")
_EMPTY: Mapping[type, Any] = {str: "", list: [], dict: {}}
_SHORT_CODE = 3
_MOST_OPTIONS = 32
"""Maximum number of a tool's options that its searches are repeated with: a document with more has lists, not
options."""


def wildcards(value: Any) -> list[Any]:
    """Values of the same type by which a search would find all there is: empty, wildcards, and a letter of the value.

    A letter of a short code may be another code ("N" of "Na"), with a right answer of its own.
    """
    if isinstance(value, str):
        return [*_WILDCARDS, *([value.strip()[:1]] if len(value.strip()) > _SHORT_CODE else [])]
    if isinstance(value, list):
        inside = list(dict.fromkeys(one for item in value[:1] if isinstance(item, str) for one in wildcards(item)))
        return [[], *([one] for one in inside)]
    return [{}] if isinstance(value, dict) else []


def without_default(tool: CodeTool) -> set[str]:
    """Parameters of the tool's function that have no default: what a call cannot leave out."""
    module, name = ast.parse(tool.code), tool.spec.name
    functions = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name]
    names = (one for one in ast.walk(module) if isinstance(one, ast.Name) and one.id == name)
    rebound = any(not isinstance(one.ctx, ast.Load) for one in names)
    if len(functions) != 1 or functions[0].decorator_list or rebound:
        return set()
    given = functions[0].args
    positional = [*given.posonlyargs, *given.args]
    named = positional[: len(positional) - len(given.defaults)]
    named += [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return {one.arg for one in named}


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that an episode would refuse.

    Raises:
        Rejected: `bad_call`: the arguments do not fit the tool's schema; `bad_schema`: nothing can be checked by it.
    """
    try:
        problem = argument_error(spec.parameters, arguments)
    except UncheckableSchema as error:
        raise Rejected("bad_schema", f"{spec.name}: {error}") from None
    if problem:
        raise Rejected("bad_call", f"{spec.name}: {problem}")


_MOST_TRANSLATIONS = 8
"""Maximum number of translations of one call for another tool; each is executed."""
_MOST_WAYS = 120
"""To give five arguments."""


def translations(arguments: Mapping[str, Any], spec: ToolSpec, other: ToolSpec) -> list[dict[str, Any]]:
    """Return the required arguments of a call under the names of another tool, in each way that fits its schema.

    First in its own order, then in others, then as arguments that the other tool may leave out, then none at all where
    it wants none. At most `_MOST_TRANSLATIONS`.
    """
    values = [arguments[name] for name in spec.parameters["required"]]
    required = other.parameters["required"]
    optional = [name for name in other.parameters["properties"] if name not in required]
    found: list[dict[str, Any]] = []
    if len(required) <= len(values) <= len(required) + len(optional):
        names = itertools.permutations([*required, *optional], len(values))
        ways = (one for one in names if set(required) <= set(one))
        for way in itertools.islice(ways, _MOST_WAYS):
            renamed = dict(zip(way, values, strict=True))
            if not argument_error(other.parameters, renamed):
                found.append(renamed)
                if len(found) == _MOST_TRANSLATIONS:
                    return found
    return found if required else [*found, {}]


def translated(arguments: Mapping[str, Any], spec: ToolSpec, other: ToolSpec) -> dict[str, Any] | None:
    """Return the first of `translations` that says anything, or None."""
    return next(filter(None, translations(arguments, spec, other)), None)


def shown(tool: CodeTool, arguments: Mapping[str, Any]) -> str:
    """Return the call as a person would write it."""
    return f"{tool.spec.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def short(value: Any) -> str:
    """Return a JSON value, cut after 200 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}…"
