"""Proofs of worlds: the reference play reaches the state that is asked for, and no wrong play does.

Everything is played in the sandbox, where the checks are asked too. A play is a list of calls from the world's own
beginning; what it is worth is decided by the reward that policies get.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from astra_jax.base.typed import convert_to
from sandbox import Reason, validate_call
from sandbox.validation import ANOTHER_TIME
from synthesis.core.echoes import guesses, is_evidence
from synthesis.core.matching import contains, match
from synthesis.core.records import CodeTool, ReferenceCall, StateChange, SubQuestion, ToolEnvironment, World
from synthesis.core.reward import MadeCall, answered_by, score, sub_tasks_by_tool
from synthesis.core.stages import Rejected, Transient, rng_for
from synthesis.core.tool_schemas import argument_error
from synthesis.core.worlds import PLAYS, EpisodeCalls, FoundPlay, checks_of, forms_of, graded, module_of
from synthesis.environments.proof import Case, guess_paid, perturbed, searches, short, shown, translated

if TYPE_CHECKING:
    from sandbox import Sandbox

RANDOM_CALLS = 300
Call = tuple[str, Mapping[str, Any]]


class ProvenWorld(msgspec.Struct, frozen=True):
    """Result of a world's proof: the reference calls with their outputs, and the world with their changes."""

    calls: list[ReferenceCall]
    world: World


async def prove_world(
    environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]], sandbox: Sandbox
) -> ProvenWorld:
    """Prove an environment with a world, whose reference calls have no recorded outputs and changes yet.

    The reference calls succeed in the order of the dependencies. Each look-up gives its answer and changes nothing.
    Each other call makes its own check hold, which did not hold before and holds to the end. They pass
    `sandbox.validate_call`: no clock, no chance, no network. Played twice in one process they give the same: no state
    is hidden outside `STATE`. A faulty play gets a lower grade: it leaves a call out, makes it with other arguments,
    swaps a call and one that waits for it, or writes something else besides. Calling nothing is worth nothing. The
    invariants and the schema hold at the start, after every call of these plays, and after random calls with hostile
    arguments.

    Args:
        others: by sub-question, arguments of its tool that look up, or change, something else.

    Raises:
        Rejected: `world_failed`, `broken_invariant`, `tool_failed`, `wrong_answer`, `shared_call`, `read_tool_mutates`,
            `bad_check`, `already_satisfied`, `not_reached`, `hidden_state`, `ignores_arguments`, `reached_without`,
            `unneeded_dependency`, `side_effect_undetected`, `no_wrong_write`, `wrong_policy_scores`, or a
            `sandbox.Reason`; the detail is for the teacher.
        Transient: the sandbox itself failed.
    """
    proof = _Proof(environment, sandbox)
    proven = await proof.right()
    await proof.wrong(msgspec.structs.replace(environment, world=proven.world), others)
    await proof.hostile()
    return proven


def ordered(environment: ToolEnvironment) -> list[tuple[SubQuestion, ReferenceCall]]:
    """Return the steps that need a call, with it, in the order of the dependencies."""
    by_step = {made.sub_question: made for made in environment.reference_calls}
    steps = sorted(environment.sub_questions, key=lambda step: (step.hop, step.id))
    return [(step, by_step[step.id]) for step in steps if step.needs_tool]


class _Proof:
    def __init__(self, environment: ToolEnvironment, sandbox: Sandbox) -> None:
        assert isinstance(environment.world, World)
        self._environment, self._world, self._sandbox = environment, environment.world, sandbox
        self._module = module_of(environment.world)
        self._steps = ordered(environment)
        self._reference: list[Call] = [(made.tool, made.arguments) for _, made in self._steps]
        self._checks = [list(one) for one in checks_of(environment.sub_questions)]
        self._tools = {tool.spec.name: tool for tool in environment.tools}

    async def right(self) -> ProvenWorld:
        """Play the reference calls, with a check after each call."""
        arguments = self._asked([self._reference], closely=True)
        validation = await validate_call(self._sandbox, self._module, PLAYS, arguments)
        result, finding = validation.result, validation.finding
        if result.is_infrastructure:
            raise Transient(f"sandbox: {result.kind}: {result.error}")
        if finding is not None:
            reason = "world_failed" if finding.reason is Reason.FAILS else finding.reason.value
            raise Rejected(reason, f"the world's module, when its calls are played: {finding.detail}")
        (play,) = _read(result.value)
        if play.broken:
            raise Rejected("broken_invariant", f"the reference calls break what must hold: {play.broken}")
        sub_tasks = sub_tasks_by_tool(self._environment)
        met: set[int] = set()
        forms: Counter[str] = Counter()
        kept: list[StateChange] = []
        calls: list[ReferenceCall] = []
        changed: list[StateChange] = []
        for (step, made), output, grade in zip(self._steps, play.outputs, play.grades, strict=True):
            what = self._shown(made.tool, made.arguments)
            if output.error:
                raise Rejected("tool_failed", f"{what} failed: {output.error}")
            if grade.failed or grade.misfits:
                raise Rejected("bad_check", f"after {what}: {grade.failed or grade.misfits}")
            language = self._environment.language
            if answers := answered_by(sub_tasks, made.tool, output.value, language, made.arguments):
                rule = match(output.value, step.answer, language)
                if answers != [step.id]:
                    raise Rejected("shared_call", f"{what} answers sub-questions {answers}, not {step.id} alone")
            elif not step.asks_state:
                raise Rejected("wrong_answer", f"{what} returned {short(output.value)}, not {step.answer.value!r}")
            new = set(grade.met) - met
            if not step.asks_state and (grade.changes != changed or new):
                raise Rejected("read_tool_mutates", f"{what} looks something up, and changes {_shown(grade.changes)}")
            if step.asks_state and step.id in met:
                raise Rejected("already_satisfied", f"the check of sub-question {step.id} holds before {what}")
            if step.asks_state and (new != {step.id} or not met <= set(grade.met)):
                raise Rejected(
                    "not_reached",
                    f"after {what} the checks of {sorted(grade.met)} hold; of sub-question {step.id} it must, and of "
                    f"those before, {sorted(met)}; it changed {_shown(grade.changes)}",
                )
            met, changed = set(grade.met), grade.changes
            calls.append(
                msgspec.structs.replace(made, output=output.value, rule="state" if step.asks_state else str(rule))
            )
            # As many equal rows are allowed as exist after any one call.
            for one in changed:
                (form,) = forms_of([one], self._world) or [""]
                there = sum(form in forms_of([other], self._world) for other in changed)
                if forms[form] < there:
                    forms[form] += 1
                    kept.append(one)
        return ProvenWorld(calls, msgspec.structs.replace(self._world, changes=kept))

    async def wrong(self, environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]]) -> None:
        """Play faulty versions, which must get a lower grade than the reference play."""
        reference = self._reference
        wrong: list[tuple[str, int, list[Call]]] = [("same", 0, reference), ("same", 0, reference), ("empty", 0, [])]
        for position, (step, made) in enumerate(self._steps):
            before, after = reference[:position], reference[position + 1 :]
            wrong.append(("without", position, [*before, *after]))
            wrong.append(("other", position, [*before, (made.tool, others[step.id]), *after]))
            if step.asks_state:
                wrong.append(("extra", position, [*reference, (made.tool, others[step.id])]))
                wrong += [("swapped", position, play) for play in self._swapped(position)]
            else:
                tool = CodeTool(self._tools[made.tool].spec, self._world.code)
                case = Case(step.id, made.arguments, others[step.id], step.answer, environment.language)
                tried = [*perturbed(tool, case), *searches(tool, case)]
                wrong += [("other", position, [*before, (made.tool, one)]) for one in tried]
                stated = guesses(tool.spec.parameters, made.arguments, step.answer)
                wrong += [("guess", position, [*before, (made.tool, one)]) for one in stated]
        plays = await self._played([play for _, _, play in wrong])
        harmful = 0
        whole = plays[0]
        assert isinstance(environment.world, World)
        for (kind, position, calls), play in zip(wrong, plays, strict=True):
            step, made = self._steps[position]
            text = "; ".join(self._shown(*call) for call in calls) or "no call"
            if play.broken:
                raise Rejected("broken_invariant", f"{text} break what must hold: {play.broken}")
            outputs = zip(calls, play.outputs, strict=True)
            calls_made = [MadeCall(name, not output.error, output.value, given) for (name, given), output in outputs]
            grade = graded(play.grades[-1], environment.world)
            reward = score(environment, calls_made, grade, epsilon=0.0).value
            if kind == "same":
                if reward != 1.0 or play != whole:
                    raise Rejected("hidden_state", f"{text}: played again in one process they do not give the same")
                continue
            if kind == "extra" and not play.outputs[-1].error:
                harmful += 1
                if not grade.harm:
                    raise Rejected("side_effect_undetected", f"{text}: the last call changes nothing that is not open")
            if kind == "other" and not step.asks_state:
                found = play.outputs[position]
                if not found.error and contains(found.value, step.answer, environment.language):
                    raise Rejected(
                        "ignores_arguments", f"{self._shown(*calls[position])} returned {step.answer.value!r} as well"
                    )
            if kind == "guess" and position + 1 == len(calls):
                found, guess = play.outputs[position], calls[position][1]
                if not found.error and is_evidence(
                    found.value, step.answer, guess, made.arguments, environment.language
                ):
                    answered = guess_paid(self._tools[made.tool], guess, found.value, step.answer)
                    raise Rejected("ignores_arguments", answered)
            if kind in ("without", "other") and step.asks_state and step.id in grade.met:
                reason = "reached_without" if kind == "without" else "ignores_arguments"
                raise Rejected(reason, f"the check of sub-question {step.id} holds after {text}")
            if kind == "swapped" and reward == 1.0:
                raise Rejected(
                    "unneeded_dependency", f"sub-question {step.id} waits for one that it does not need: {text}"
                )
            if reward >= 1.0 or (kind == "empty" and (reward or grade.met)):
                raise Rejected("wrong_policy_scores", f"{text} is worth {reward}; the checks of {set(grade.met)} hold")
        if not harmful:
            raise Rejected("no_wrong_write", "no call with other arguments can be made after the task; give some")

    def _swapped(self, position: int) -> Iterator[list[Call]]:
        """Yield the reference play with a call before one that it waits for only because of the state."""
        step, _ = self._steps[position]
        for earlier in range(position):
            if self._steps[earlier][0].id in step.depends_on and self._steps[earlier][0].asks_state:
                play = list(self._reference)
                play.insert(earlier, play.pop(position))
                yield play

    async def hostile(self) -> None:
        """Play random calls that fit the schemas: the invariants must hold after each."""
        calls = list(random_calls(self._environment, RANDOM_CALLS))
        (play,) = await self._played([calls])
        if play.broken:
            raise Rejected("broken_invariant", f"random calls break what must hold: {play.broken}")

    async def _played(self, plays: Sequence[Sequence[Call]]) -> list[FoundPlay]:
        result = await self._sandbox.call(self._module, PLAYS, self._asked(plays, closely=False))
        if result.is_infrastructure:
            raise Transient(f"sandbox: {result.kind}: {result.error}")
        if not result.ok:
            raise Rejected("world_failed", f"the world's module, when wrong calls are played: {result.error}")
        return _read(result.value)

    def _asked(self, plays: Sequence[Sequence[Call]], *, closely: bool) -> dict[str, Any]:
        given = [[[name, dict(arguments)] for name, arguments in play] for play in plays]
        return {"plays": given, "checks": self._checks, "closely": closely}

    def _shown(self, tool: str, arguments: Mapping[str, Any]) -> str:
        return shown(self._tools[tool], arguments)


def _read(value: Any) -> list[FoundPlay]:
    try:
        return convert_to(value, list[FoundPlay])
    except msgspec.ValidationError as error:
        raise Rejected("world_failed", f"the world's module gave no account of its calls: {error}") from None


def _shown(changes: Sequence[StateChange]) -> str:
    return short([f"{one.table} {one.id}" for one in changes])


# ---------------------------------------------------------------------------------------------------------------------
# Hostile calls

HOSTILE_TEXTS = (
    "", " ", "zzqx 00", "%", "*", "' OR 1=1 --", "None", "-1", "2026-02-30", "9999-99-99", "\u202e\u0000", "é" * 500,
    "__class__", "{0}", "NaN",
)  # fmt: skip
HOSTILE_NUMBERS = (0, 1, -1, 2, 7, 10**6, 10**18, -(10**9))
_SENSIBLE = 0.7
"""Share of the arguments that are something of the world; with fewer hardly a random call would get anywhere."""


def random_calls(environment: ToolEnvironment, count: int) -> Iterator[Call]:
    """Calls to a world's tools that fit their schemas; the same environment gives the same ones."""
    assert isinstance(environment.world, World)
    rng = rng_for(0, "random calls", environment.id)
    rows = environment.world.rows
    cells = [cell for table in rows.values() for row in table.values() for cell in row.values()]
    texts = [*(id for table in rows.values() for id in table), *(one for one in cells if isinstance(one, str))]
    numbers = [one for one in cells if isinstance(one, int) and not isinstance(one, bool)] or [1]
    used = {made.tool: dict(made.arguments) for made in environment.reference_calls}

    def value(schema: Mapping[str, Any]) -> Any:
        sensible = rng.random() < _SENSIBLE
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "string":
                return rng.choice(texts if sensible else HOSTILE_TEXTS)
            case "integer":
                return rng.choice([*numbers, 1, 2, 3] if sensible else HOSTILE_NUMBERS)
            case "number":
                return rng.choice([*numbers, 0.5, 2.25] if sensible else [*HOSTILE_NUMBERS, 1e-9, 1e300, -0.5])
            case _:
                return rng.random() < 0.5

    tools = [tool for tool in environment.tools if not tool.code]
    for _ in range(count):
        tool = rng.choice(tools)
        given = _drawn(tool, used.get(tool.spec.name, {}), value, rng)
        if not argument_error(tool.spec.parameters, given):
            yield tool.spec.name, given


def _drawn(tool: CodeTool, known: Mapping[str, Any], value: Any, rng: random.Random) -> dict[str, Any]:
    """Arguments of a call: of the reference call some, so that single wrong ones are tried too."""
    schema = tool.spec.parameters
    required = schema.get("required", [])
    names = [name for name in schema["properties"] if name in required or rng.random() < 0.5]
    return {
        name: known[name] if name in known and rng.random() < 0.5 else value(schema["properties"][name])
        for name in names
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is stored


async def verify_world(environment: ToolEnvironment, others: Mapping[int, Mapping[str, Any]], sandbox: Sandbox) -> None:
    """Play the finished environment as an episode does: the same, bit by bit, under another seed and at another time.

    Raises:
        Rejected: `replay_failed`, `dependency_unused`, `not_solved`, `wrong_policy_scores`.
        Transient: the sandbox itself failed.
    """
    steps = ordered(environment)
    for seed, now in ((0, None), (1, ANOTHER_TIME)):
        run = EpisodeCalls(sandbox, environment, seed=seed, now=now)
        made = []
        found: dict[int, Any] = {}
        for step, reference in steps:
            _check_dependencies(environment, step, reference, found)
            made.append(await _call(run, environment, reference.tool, reference.arguments))
            found[step.id] = made[-1].output
            if not made[-1].ok or made[-1].output != reference.output:
                raise Rejected("replay_failed", f"{environment.id}: {reference.tool} gave {short(made[-1].output)}")
        reward = score(environment, made, await _grade(run), epsilon=0.0).value
        if reward != 1.0:
            raise Rejected("not_solved", f"{environment.id}: the reference play's reward is {reward}")
    for tool in (tool for band in environment.distractors.values() for tool in band):
        made.append(await _call(run, environment, tool.spec.name, _fitting(environment, tool)))
    reward, expected = score(environment, made, await _grade(run), epsilon=0.0).value, 2 * len(steps)
    if abs(reward - expected / (len(steps) + len(made))) > 1e-9:
        raise Rejected("wrong_policy_scores", f"{environment.id}: calling everything gives {reward}")
    run = EpisodeCalls(sandbox, environment)
    made = [await _call(run, environment, reference.tool, others[step.id]) for step, reference in steps]
    if (reward := score(environment, made, await _grade(run)).value) != 0.0:
        raise Rejected("wrong_policy_scores", f"{environment.id}: calls with other arguments give {reward}")


async def _call(run: EpisodeCalls, environment: ToolEnvironment, name: str, arguments: Mapping[str, Any]) -> MadeCall:
    every = [*environment.tools, *(tool for band in environment.distractors.values() for tool in band)]
    result = await run.call(next(tool for tool in every if tool.spec.name == name), arguments)
    if result.is_infrastructure:
        raise Transient(f"sandbox: {result.kind}: {result.error}")
    return MadeCall(name, result.ok, result.value, arguments)


async def _grade(run: EpisodeCalls) -> Any:
    grade = await run.grade()
    if grade is None:
        raise Transient("sandbox: the checks could not be asked")
    return grade


def _fitting(environment: ToolEnvironment, tool: CodeTool) -> dict[str, Any]:
    """Return the arguments of the first reference call that a tool's schema takes."""
    specs = {one.spec.name: one.spec for one in environment.tools}
    given = (translated(made.arguments, specs[made.tool], tool.spec) for made in environment.reference_calls)
    return next((one for one in given if one is not None), {})


def _check_dependencies(
    environment: ToolEnvironment, step: SubQuestion, reference: ReferenceCall, found: Mapping[int, Any]
) -> None:
    """Check that a step uses the steps that it waits for, except states, which may have to be there first
    (`unneeded_dependency`)."""
    states = {one.id for one in environment.sub_questions if one.asks_state}
    given = set(map(str, reference.arguments.values()))
    for one in step.depends_on:
        if one not in states and not given & set(_leaves(found[one])):
            raise Rejected(
                "dependency_unused",
                f"{environment.id}: sub-question {step.id} is called with {reference.arguments}; none of these is in "
                f"{short(found[one])}, the output of sub-question {one}",
            )


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield str(value)
