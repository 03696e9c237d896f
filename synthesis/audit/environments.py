"""Rules for one environment: its graph, its answers, and what its stored code gives when it runs again."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from synthesis.audit import agent_phrases
from synthesis.audit import text_claims as texts
from synthesis.audit.conversations import check_schema, misfit, schema_text
from synthesis.core.records import Answer, ReferenceCall, SubQuestion, ToolEnvironment, World

if TYPE_CHECKING:
    from synthesis.audit.replay import Runner

RULES: Final = (
    "unknown_tool", "invalid_arguments", "bad_schema", "argument_from_nowhere", "contradictory_results",
    "template_tokens", "talk_of_simulation", "wrong_language", "foreign_words", "missing_reference", "bad_graph",
    "answer_not_in_result", "unsupported_answer", "question_has_answer",
)  # fmt: skip
REPLAYED: Final = ("call_not_reproduced", "answer_for_nonsense")
REPLAYED_WORLD: Final = ("call_not_reproduced", "state_not_reached", "unlisted_change")
_NONSENSE: Final = "zxqvk wjjfp"
_REPLAY: Final = """

def _audit_replay(calls, checks):
    import copy
    before, outputs = copy.deepcopy(STATE), []
    for name, arguments in calls:
        try:
            outputs.append([True, globals()[name](**arguments)])
        except Exception as error:
            outputs.append([False, f"{type(error).__name__}: {error}"])
    after, met = copy.deepcopy(STATE), []
    for source in checks:
        names = dict(globals())
        exec(source, names)
        met.append([bool(names["check"](copy.deepcopy(before), copy.deepcopy(one))) for one in (before, after)])
    return {"outputs": outputs, "met": met, "before": before, "after": after}
"""
"""Appended to a world's code: all reference calls in one process, and each check before and after them."""


def has_answer(output: Any, answer: Answer) -> bool:
    """Return whether a result holds an answer: as a value, a whole phrase of a text, or a number in one."""
    wanted = answer.value if isinstance(answer.value, list) else [answer.value]
    forms = [*answer.aliases] if not isinstance(answer.value, list) else []
    leaves = texts.leaves(output)
    if isinstance(output, dict):
        leaves += list(output)
    return all(
        any(_holds(leaf, one, answer.tolerance) for leaf in leaves for one in (value, *forms)) for value in wanted
    )


def _holds(leaf: Any, value: Any, tolerance: float) -> bool:
    if isinstance(value, bool) or isinstance(leaf, bool):
        return leaf is value or texts.normal(str(leaf)) in (("true", "yes") if value is True else ("false", "no"))
    number = _as_number(value)
    if number is not None:
        own = [float(leaf)] if isinstance(leaf, (int, float)) else [
            one for _, readings in texts.numbers(str(leaf)) for one in readings
        ]  # fmt: skip
        close = max(tolerance, 1e-9 * abs(number))
        if any(abs(one - number) <= close or abs(-one - number) <= close for one in own):
            return True
    plain, text = texts.normal(str(value)), texts.normal(str(leaf))
    if plain == text or (plain and _is_phrase(plain, text)):
        return True
    own_words = texts.words(str(value))
    return number is None and len(own_words) > 1 and set(own_words) <= set(texts.words(str(leaf)))


def _as_number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        return float(str(value).replace(",", ""))
    except ValueError:
        return None


def _is_phrase(plain: str, text: str) -> bool:
    """Return whether a phrase occurs with no letter or digit of its own kind directly around it."""
    start = text.find(plain)
    while start >= 0:
        before, after = text[start - 1 : start], text[start + len(plain) : start + len(plain) + 1]
        if not (_joins(before, plain[0]) or _joins(plain[-1], after)):
            return True
        start = text.find(plain, start + 1)
    return False


def _joins(left: str, right: str) -> bool:
    """Return whether two characters belong to one word; scripts without spaces have no such words."""
    return (
        left.isalnum() and right.isalnum() and left.isascii() == right.isascii() and left.isdigit() == right.isdigit()
    )


def findings(record: ToolEnvironment) -> Iterator[tuple[str, str]]:
    """Yield the faults of an environment that can be seen without running its code: rule and detail."""
    yield from _graph_faults(record)
    yield from _call_faults(record)
    yield from _answer_faults(record)
    yield from _text_faults(record)


def _graph_faults(record: ToolEnvironment) -> Iterator[tuple[str, str]]:
    steps = {step.id: step for step in record.sub_questions}
    answered = {call.sub_question for call in record.reference_calls}
    if len(steps) < len(record.sub_questions):
        yield "bad_graph", "two sub-questions have one id"
    for step in record.sub_questions:
        if unknown := [one for one in step.depends_on if one not in steps]:
            yield "bad_graph", f"sub-question {step.id} depends on {unknown[0]}, which is not there"
            return
        if step.needs_tool and step.id not in answered:
            yield "missing_reference", f"sub-question {step.id}: {step.question:.120}"
    try:
        order = list(graphlib.TopologicalSorter({one.id: one.depends_on for one in steps.values()}).static_order())
    except graphlib.CycleError as error:
        yield "bad_graph", f"a circle of {error.args[1]}"
        return
    for id in order:
        hop = 1 + max((steps[one].hop for one in steps[id].depends_on), default=0)
        if steps[id].hop != hop:
            yield "bad_graph", f"sub-question {id} has hop {steps[id].hop}; its dependencies make it {hop}"


def _call_faults(record: ToolEnvironment) -> Iterator[tuple[str, str]]:
    every = [*record.tools, *(tool for band in record.distractors.values() for tool in band)]
    for tool in every:
        if reason := check_schema(tool.spec):
            yield "bad_schema", reason
    tools = {tool.spec.name: tool.spec for tool in record.tools}
    order = {step.id: step.hop for step in record.sub_questions}
    held, reached = texts.HeldText(record.question), 0
    pending: list[str] = []
    results: dict[tuple[str, str], Any] = {}
    for call in sorted(record.reference_calls, key=lambda one: order.get(one.sub_question, 0)):
        if (hop := order.get(call.sub_question, 0)) > reached or isinstance(record.world, World):
            for text in pending:
                held.add(text)
            pending, reached = [], hop
        pending += map(str, texts.leaves(call.output))
        if call.tool not in tools:
            yield "unknown_tool", call.tool
            continue
        if reason := misfit(call.arguments, tools[call.tool]):
            yield "invalid_arguments", f"{call.tool}: {reason}"
        document = texts.HeldText(schema_text(tools[call.tool]))
        for value in texts.leaves(call.arguments):
            if not held.has_value(value) and not document.has_value(value):
                yield "argument_from_nowhere", f"{call.tool}({value!r}) for {record.question:.120}"
        key = (call.tool, texts.canonical(call.arguments))
        if not isinstance(record.world, World) and results.setdefault(key, call.output) != call.output:
            yield "contradictory_results", f"{call.tool}{key[1]}: {results[key]!s:.80}, then {call.output!s:.80}"


def _answer_faults(record: ToolEnvironment) -> Iterator[tuple[str, str]]:
    outputs: dict[int, list[Any]] = {}
    for call in record.reference_calls:
        outputs.setdefault(call.sub_question, []).append(call.output)
    for step in record.sub_questions:
        if step.asks_state:
            continue
        if step.id in outputs and not any(has_answer(one, step.answer) for one in outputs[step.id]):
            yield "answer_not_in_result", f"{step.answer.value!r} is not in {outputs[step.id][0]!s:.120}"
        if _states(step.question, step.answer):
            yield "question_has_answer", f"{step.answer.value!r} in the sub-question {step.question:.120}"
    if record.sub_questions and not all(step.asks_state for step in record.sub_questions):
        if _states(record.question, record.answer):
            yield "question_has_answer", f"{record.answer.value!r} in {record.question:.160}"
        results = [one for group in outputs.values() for one in group]
        stated = [one for step in record.sub_questions for one in texts.leaves(step.answer.value)]
        derived = texts.derived_numbers(results + stated)
        for value in texts.leaves(record.answer.value):
            single = Answer(value, tolerance=record.answer.tolerance, aliases=record.answer.aliases)
            number = _as_number(value)
            if not (
                has_answer(results + stated, single)
                or (number is not None and any(abs(one - number) <= 1e-6 * max(1, abs(one)) for one in derived))
            ):
                yield "unsupported_answer", f"{value!r} for {record.question:.160}"


def _states(question: str, answer: Answer) -> bool:
    """Return whether a question states all of an answer; answers of one or two signs occur by chance."""
    if isinstance(answer.value, bool):
        return False
    values = [str(one) for one in (answer.value if isinstance(answer.value, list) else [answer.value])]
    plain = texts.normal(question)
    parts = [texts.normal(one) for one in values]
    # A path such as Africa/Juba is given away by its last part.
    parts = [one.rpartition("/")[2].replace("_", " ") if "/" in one else one for one in parts]
    return all(len(one) > 2 and _is_phrase(one, plain) for one in parts)


def _text_faults(record: ToolEnvironment) -> Iterator[tuple[str, str]]:
    spoken = [record.question, *(step.question for step in record.sub_questions)]
    outputs = [" ".join(map(str, texts.leaves(call.output))) for call in record.reference_calls]
    allowed = " ".join((record.question, *(schema_text(tool.spec) for tool in record.tools))).lower()
    arguments = (str(one) for call in record.reference_calls for one in texts.leaves(call.arguments))
    values = texts.HeldText(*outputs, *arguments)
    for text in (*spoken, *outputs):
        if match := agent_phrases.TEMPLATE.search(text) or (text in spoken and agent_phrases.UNFILLED.search(text)):
            yield "template_tokens", f"{match[0]} in {text:.120}"
    for text in outputs:
        if talk := agent_phrases.simulation_talk(text, record.language, allowed):
            yield "talk_of_simulation", f"{talk!r} in {text:.160}"
    for text in spoken:
        if texts.is_other_language(text, record.language):
            yield "wrong_language", f"not {record.language}: {text:.160}"
        found = [word for word in texts.foreign_words(text, record.language) if word not in values.words]
        if len(found) > 1:
            yield "foreign_words", f"{', '.join(found[:5])} in {text:.160}"


async def replay(record: ToolEnvironment, runner: Runner) -> list[tuple[str, str]]:
    """Return the faults that running the stored code shows: rule and detail."""
    if isinstance(record.world, World):
        return await _replay_world(record, record.world, runner)
    found = []
    code = {tool.spec.name: tool for tool in record.tools}
    steps = {step.id: step for step in record.sub_questions}
    for call in record.reference_calls:
        if (tool := code.get(call.tool)) is None:
            continue
        result = await runner.call(tool.code, call.tool, call.arguments)
        if not result.ok:
            found.append(("call_not_reproduced", f"{_written(call)} fails: {result.error:.160}"))
        elif not same(result.value, call.output):
            found.append(
                ("call_not_reproduced", f"{_written(call)} gives {result.value!s:.80}, not {call.output!s:.80}")
            )
        fixed = tool.spec.parameters.get("properties", {})
        wrong = {name: _NONSENSE for name, value in call.arguments.items()
                 if isinstance(value, str) and not {"enum", "const"} & set(fixed.get(name, {}))}  # fmt: skip
        step = steps.get(call.sub_question)
        if wrong and step is not None:
            odd = await runner.call(tool.code, call.tool, {**call.arguments, **wrong})
            said = odd.value if odd.ok else odd.error
            if len(str(step.answer.value)) > 2 and has_answer(said, step.answer):
                found.append(("answer_for_nonsense", f"{call.tool}({wrong}) gives {said!s:.120}"))
    return found


async def _replay_world(record: ToolEnvironment, world: World, runner: Runner) -> list[tuple[str, str]]:
    code = f"TABLES = {world.tables!r}\nSTATE = {world.rows!r}\n{world.code}{_REPLAY}"
    checks: list[SubQuestion] = [step for step in record.sub_questions if isinstance(step.check, str)]
    calls = [[call.tool, call.arguments] for call in record.reference_calls]
    result = await runner.call(code, "_audit_replay", {"calls": calls, "checks": [step.check for step in checks]})
    if not result.ok:
        return [("call_not_reproduced", f"the reference calls fail: {result.error:.160}")]
    found = []
    for call, (ok, value) in zip(record.reference_calls, result.value["outputs"], strict=True):
        if not ok or not same(value, call.output):
            found.append(("call_not_reproduced", f"{_written(call)} gives {value!s:.80}, not {call.output!s:.80}"))
    for step, (before, after) in zip(checks, result.value["met"], strict=True):
        if before or not after:
            when = "holds before any call" if before else "fails after the reference calls"
            found.append(("state_not_reached", f"the check of {step.question:.120} {when}"))
    before, after = result.value["before"], result.value["after"]
    places = {(table, id) for rows in (before, after) for table in rows for id in rows[table]}
    made = _changes(
        world, ((*one, before.get(one[0], {}).get(one[1]), after.get(one[0], {}).get(one[1])) for one in places)
    )
    listed = _changes(world, ((one.table, one.id, one.before, one.after) for one in world.changes))
    if made != listed:
        differs = sorted({*made, *listed}, key=str)
        place = next(one for one in differs if made.get(one) != listed.get(one))
        found.append(
            ("unlisted_change", f"{place[0]} {place[1]}: {made.get(place)!s:.80}, listed {listed.get(place)!s:.80}")
        )
    return found


_Cells = dict[str, Any] | None


def _changes(
    world: World, rows: Iterable[tuple[str, str, _Cells, _Cells]]
) -> dict[tuple[str, str], tuple[_Cells, _Cells]]:
    """Return the rows that differ, by table and id, without the columns that the task leaves open."""
    found = {}
    for table, id, *sides in rows:
        before, after = ({name: cell for name, cell in one.items() if f"{table}.{name}" not in world.open}
                         if one is not None else None for one in sides)  # fmt: skip
        if before != after:
            found[table, id] = before, after
    return found


def _written(call: ReferenceCall) -> str:
    return f"{call.tool}({texts.canonical(call.arguments)[1:-1]:.80})"


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 3 and 3.0 are."""
    return texts.canonical({"": one}) == texts.canonical({"": other})
