"""Proofs in the sandbox: a tool gives the right answer to its reference call, and only to it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox import Outcome, Reason, validate_call
from synthesis.environments.config import Context
from synthesis.matching import contains
from synthesis.records import Answer, CodeTool, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.runner import Rejected, Transient

if TYPE_CHECKING:
    from sandbox import CallResult, Sandbox

_TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


@dataclass(frozen=True)
class Case:
    """A call to prove: its answer, and other arguments of the same tool that must not give it."""

    arguments: Mapping[str, Any]
    other_arguments: Mapping[str, Any]
    answer: Answer


async def prove(tool: CodeTool, cases: Sequence[Case], context: Context) -> list[Any]:
    """Outputs of the reference calls, in the order of the cases, all proven.

    Each reference call must succeed, contain its answer, and stand `sandbox.validate_call`: the same output under
    another random seed and at another time, no clock, no network, no import that a tool may not make. The
    other arguments, arguments that name nothing, and no arguments at all must fail or give another answer: a tool that
    ignores its arguments would let a policy score without solving what the call depends on.

    Raises:
        Rejected: `tool_failed`, `wrong_answer`, `ignores_arguments`, or a `sandbox.Reason`; the detail is for the
            teacher.
        Transient: the sandbox itself failed.
    """
    async with context.proofs:
        return [await prove_case(tool, case, context.pool) for case in cases]


async def prove_case(tool: CodeTool, case: Case, pool: Sandbox) -> Any:
    """The output of one reference call, proven; see `prove`, whose errors it raises."""
    validation = await validate_call(pool, tool.code, tool.spec.name, case.arguments)
    first, finding = _settled(validation.result), validation.finding
    if finding is not None and finding.reason is Reason.FAILS:
        raise Rejected("tool_failed", f"{shown(tool, case.arguments)} failed: {first.kind}: {first.error}")
    if finding is not None:
        raise Rejected(finding.reason.value, f"{shown(tool, case.arguments)} {finding.detail}")
    if not contains(first.value, case.answer):
        raise Rejected(
            "wrong_answer",
            f"{shown(tool, case.arguments)} returned {_short(first.value)}, expected {case.answer.value!r} in it",
        )
    for wrong in perturbed(tool, case):
        result = await _call(tool, wrong, pool)
        if result.ok and contains(result.value, case.answer):
            raise Rejected(
                "ignores_arguments",
                f"{shown(tool, wrong)} returned {_short(result.value)}, which holds the answer {case.answer.value!r} "
                f"of another call, {shown(tool, case.arguments)}; wrong arguments must raise an error",
            )
    return first.value


def perturbed(tool: CodeTool, case: Case) -> list[dict[str, Any]]:
    """Wrong arguments for a case: the other subject, each required free argument made nonsense, and none at all."""
    wrong: list[dict[str, Any]] = [dict(case.other_arguments)]
    required = tool.spec.parameters.get("required", [])
    for name in required:
        other = nonsense(case.arguments[name])
        if "enum" in tool.spec.parameters["properties"][name] or other == case.arguments[name]:
            continue  # every value of a closed set is a sensible one
        wrong.append({**case.arguments, name: other})
    # Python itself refuses a call without them where they have no default; no need to try.
    return wrong if set(required) & without_default(tool) else [*wrong, {}]


def nonsense(value: Any) -> Any:
    """A value of the same type that names nothing: each value of a list or an object, and a boolean as it is."""
    if isinstance(value, str):
        return "zzqx 00"
    if isinstance(value, list):
        return [nonsense(one) for one in value]
    if isinstance(value, dict):
        return {name: nonsense(one) for name, one in value.items()}
    return value + 7_654_321 if isinstance(value, int | float) and not isinstance(value, bool) else value


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


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call by the tool's schema; "" when nothing is."""
    properties = spec.parameters["properties"]
    for name in spec.parameters.get("required", []):
        if name not in arguments:
            return f"the required argument {name!r} of {spec.name} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"{spec.name} has no parameter {name!r}; it has {', '.join(properties)}"
        schema = properties[name]
        boolean_as_number = isinstance(value, bool) and schema["type"] != "boolean"
        if boolean_as_number or not isinstance(value, _TYPES[schema["type"]]):
            return f"{name} of {spec.name} must be of type {schema['type']}, not {type(value).__name__}"
        if "enum" in schema and value not in schema["enum"]:
            return f"{name} of {spec.name} must be one of {schema['enum']}, not {value!r}"
    return ""


def leaked(spec: ToolSpec, step: SubQuestion) -> str:
    """The string of a tool's document that gives the answer of a sub-question away; "" when none does."""

    texts = [spec.description]
    for schema in spec.parameters["properties"].values():
        texts += [schema.get("description", ""), *map(str, schema.get("enum", []))]
        texts += [str(schema["default"])] if "default" in schema else []
    return next((text for text in texts if contains(text, step.answer)), "")


async def replay(environment: ToolEnvironment, pool: Sandbox) -> list[str]:
    """Run every reference call of a finished environment; returns what went wrong, nothing when all is well."""
    tools = {tool.spec.name: tool for tool in environment.tools}
    steps = {step.id: step for step in environment.sub_questions}
    problems: list[str] = []
    for call in environment.reference_calls:
        result = await _call(tools[call.tool], call.arguments, pool)
        if not result.ok or result.value != call.output or not contains(result.value, steps[call.sub_question].answer):
            problems.append(f"{environment.id}: {shown(tools[call.tool], call.arguments)} gave {_short(result.value)}")
    return problems


_MANY = "astra_many_calls"
# Thousands of look-ups a tool, many in one process of the sandbox. State that a tool keeps between them may change what
# it answers, so what is found this way is not proven yet.
_MANY_CODE = f"""

def {_MANY}(calls):
    results = []
    for arguments in calls:
        try:
            results.append([{{name}}(**arguments)])
        except Exception:
            results.append([])
    return results
"""


async def call_many(
    tool: CodeTool, calls: Sequence[Mapping[str, Any]], pool: Sandbox, *, most_timeouts: int | None = None
) -> list[list[Any]]:
    """For each call a list that holds its output, or is empty where it failed.

    Args:
        tool: called in one process of the sandbox, or in one for each call where that fails.
        calls: arguments.
        pool: where it runs.
        most_timeouts: once this many calls ran out of CPU time, the rest count as failed; None tries all.

    Raises:
        Transient: the sandbox itself failed.
    """
    together = await pool.call(tool.code + _MANY_CODE.format(name=tool.spec.name), _MANY, {"calls": list(calls)})
    if together.ok and isinstance(together.value, list) and len(together.value) == len(calls):
        return together.value
    # One call that crashes, runs out of time or returns no JSON would hide the others.
    outputs: list[list[Any]] = []
    timeouts = 0
    for arguments in calls:
        if most_timeouts is not None and timeouts >= most_timeouts:
            outputs.append([])
            continue
        result = await _call(tool, arguments, pool)
        timeouts += result.kind is Outcome.CPU_TIMEOUT
        outputs.append([result.value] if result.ok else [])
    return outputs


async def _call(tool: CodeTool, arguments: Mapping[str, Any], pool: Sandbox) -> CallResult:
    return _settled(await pool.call(tool.code, tool.spec.name, arguments))


def _settled(result: CallResult) -> CallResult:
    if result.is_infrastructure:
        raise Transient(f"sandbox: {result.kind}: {result.error}")
    return result


def shown(tool: CodeTool, arguments: Mapping[str, Any]) -> str:
    """The call as Python writes it."""
    return f"{tool.spec.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}…"
