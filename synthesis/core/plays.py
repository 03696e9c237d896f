"""Calls of an environment's tools, many in one process of the sandbox; and guesses, none of which may earn anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from astra_jax.base.typed import convert_to
from sandbox import Outcome
from synthesis.core.echoes import guesses, is_evidence
from synthesis.core.records import CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, World
from synthesis.core.reward import MadeCall
from synthesis.core.stages import Transient
from synthesis.core.worlds import PLAYS, FoundPlay, module_of

if TYPE_CHECKING:
    from sandbox import CallResult, Sandbox

_MOST_TIMEOUTS = 2
_PLAY = "play"
# The tools come as arguments, so that this one module serves all of them: opening a sandbox process for a module costs
# several times a call.
# Each tool runs as it would alone, as the module "tool", by which its definitions may look themselves up. If one does
# not load, all fail, and each is called alone: only that shows which one fails.
_PLAY_CODE = """
import sys
import types

def play(sources, calls):
    modules, results = {}, []
    for name, arguments in calls:
        if name not in modules:
            modules[name] = sys.modules["tool"] = types.ModuleType("tool")
            modules[name].__file__ = "<tool>"
            exec(sources[name], modules[name].__dict__)
        sys.modules["tool"] = modules[name]
        try:
            results.append([True, getattr(modules[name], name)(**arguments)])
        except Exception as error:
            results.append([False, f"{type(error).__name__}: {error}"])
    return results
"""


async def play(
    tools: Sequence[CodeTool], calls: Sequence[tuple[str, Mapping[str, Any]]], sandbox: Sandbox
) -> list[MadeCall]:
    """Make calls of several tools, given as (name, arguments), in one process of the sandbox, or in one each where
    that fails.

    Results are not proven yet. A tool that twice ran out of CPU time is not called again: it has failed.

    Raises:
        Transient: the sandbox itself failed.
    """
    if not calls:
        return []
    sources = {tool.spec.name: tool.code for tool in tools}
    together = await sandbox.call(_PLAY_CODE, _PLAY, {"sources": sources, "calls": [list(one) for one in calls]})
    if together.ok and isinstance(together.value, list) and len(together.value) == len(calls):
        pairs = zip(calls, together.value, strict=True)
        return [MadeCall(name, *made) for (name, _), made in pairs]
    # One call that crashes, runs out of time or returns no JSON would hide the others.
    by_name = {tool.spec.name: tool for tool in tools}
    made: list[MadeCall] = []
    timeouts: Counter[str] = Counter()
    for name, arguments in calls:
        if timeouts[name] >= _MOST_TIMEOUTS:
            made.append(MadeCall(name, False))
            continue
        result = await call(by_name[name], arguments, sandbox)
        timeouts[name] += result.kind is Outcome.CPU_TIMEOUT
        made.append(made_call(by_name[name], result))
    return made


async def call(tool: CodeTool, arguments: Mapping[str, Any], sandbox: Sandbox) -> CallResult:
    """Make one call in the sandbox.

    Raises:
        Transient: the sandbox itself failed.
    """
    return settled(await sandbox.call(tool.code, tool.spec.name, arguments))


def made_call(tool: CodeTool, result: CallResult) -> MadeCall:
    """Return a result as the reward reads it."""
    return MadeCall(tool.spec.name, result.ok, result.value if result.ok else result.error)


def settled(result: CallResult) -> CallResult:
    """Return the result of a call.

    Raises:
        Transient: the sandbox itself failed.
    """
    if result.is_infrastructure:
        raise Transient(f"sandbox: {result.kind}: {result.error}")
    return result


class PaidGuess(NamedTuple):
    """A call that states an answer, more or less, and whose output counts as evidence of it."""

    step: SubQuestion
    tool: str
    arguments: Mapping[str, Any]
    output: Any


async def paid_guesses(environment: ToolEnvironment, sandbox: Sandbox) -> list[PaidGuess]:
    """Call each tool with guesses of its answers (`echoes.guesses`); return the calls that would be rewarded.

    Raises:
        Transient: the sandbox itself failed.
    """
    steps = {step.id: step for step in environment.sub_questions if step.needs_tool}
    tools = {tool.spec.name: tool for tool in environment.tools}
    wanted: list[tuple[SubQuestion, ReferenceCall, Mapping[str, Any], list[ReferenceCall]]] = []
    for position, reference in enumerate(environment.reference_calls):
        step = steps.get(reference.sub_question)
        if step is None or step.asks_state:
            continue
        parameters = tools[reference.tool].spec.parameters
        before = environment.reference_calls[:position]
        wanted += [(step, reference, one, before) for one in guesses(parameters, reference.arguments, step.answer)]
    if not wanted:
        return []
    if isinstance(environment.world, World):
        plays = [[(one.tool, one.arguments) for one in before] + [(made.tool, one)] for _, made, one, before in wanted]
        made = await _last_calls(environment.world, plays, sandbox)
    else:
        made = await play(environment.tools, [(reference.tool, one) for _, reference, one, _ in wanted], sandbox)
    return [
        PaidGuess(step, reference.tool, arguments, call.output)
        for (step, reference, arguments, _), call in zip(wanted, made, strict=True)
        if call.ok and is_evidence(call.output, step.answer, arguments, reference.arguments, environment.language)
    ]


async def _last_calls(
    world: World, plays: Sequence[Sequence[tuple[str, Mapping[str, Any]]]], sandbox: Sandbox
) -> list[MadeCall]:
    """Return the last call of each play; each starts with the world's own rows."""
    given = [[[name, dict(arguments)] for name, arguments in calls] for calls in plays]
    result = await sandbox.call(module_of(world), PLAYS, {"plays": given, "checks": [], "closely": False})
    try:
        found = convert_to(settled(result).value, list[FoundPlay])
    except msgspec.ValidationError:
        return [MadeCall(calls[-1][0], False) for calls in plays]
    lasts = [one.outputs[-1] for one in found]
    return [MadeCall(calls[-1][0], not one.error, one.value) for calls, one in zip(plays, lasts, strict=True)]
