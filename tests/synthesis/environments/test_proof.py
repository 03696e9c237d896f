"""Proofs: a tool gives its answer to the reference call, and to no other; a search for everything is no call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from environments_world import CASE, HONEST, SPEC, Rules

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.plays import play
from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.reward import MadeCall, score
from synthesis.core.stages import Rejected
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.proof import Case, prove, searches, translated, translations, wildcards
from synthesis.environments.verify import solve

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


def context(pool: SandboxPool, teacher: Any = None, **config: Any) -> EnvironmentContext:
    return EnvironmentContext(EnvironmentsConfig(**config), teacher or Rules(), pool, seed=0)


FAIL = "def fail(text):\n    raise ValueError(text)\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (HONEST, ""),
        (HONEST.replace("T[c]", "T.get(c, 'unknown')"), ""),
        # The reward counts no repetition of an argument.
        (HONEST.replace("T[c]", "T.get(c, c)"), ""),
        (HONEST.replace("T[c]", "T.get(c, f'unknown: {c.upper()}')"), ""),
        (HONEST.replace("T[c]", "T[c] + 'ite'"), "wrong_answer"),
        (HONEST.replace("T[c]", "'Rome'"), "wrong_answer"),
        (HONEST.replace("T[c]", "T[c.lower()]"), "tool_failed"),
        (HONEST.replace("T[c]", "'Tokyo'"), "ignores_arguments"),
        (HONEST.replace("T[c]", "T"), "ignores_arguments"),
        (HONEST.replace("T[c]", "T.get(c, 'Tokyo')"), "ignores_arguments"),
        (HONEST.replace("(c)", "(c='Japan')"), "ignores_arguments"),
        (HONEST.replace("(c)", "(**k)").replace("T[c]", "T[k.get('c', 'Japan')]"), "ignores_arguments"),
        (HONEST.replace("T[c]", "T[c] if c in T else fail(f'known: {T}')") + FAIL, "answer_leaked"),
        (HONEST.replace("T[c]", "T[c] if c in T else fail(f'the capital is Tokyo for Japan')") + FAIL, "answer_leaked"),
        (HONEST.replace("T[c]", "T[c] if c else fail(str(T))") + FAIL, "answer_leaked"),
        (HONEST.replace("T[c]", "T[c] if c in T else fail(f'no {c!r}; known: {list(T)}')") + FAIL, ""),
        ("import random\n" + HONEST.replace("T[c]", "[T[c], random.random()]"), "nondeterministic"),
        (HONEST.replace("T[c]", "__import__('socket').create_connection(('1.1.1.1', 80))"), "needs_network"),
        ("import os\n" + HONEST, "disallowed_import"),
        ("import urllib.request\n" + HONEST, "needs_network"),
        ("import requests\n" + HONEST, "needs_network"),
        (HONEST.replace("{'capital': T[c]}", "{c: T[c]}"), "unstable_result"),
        (HONEST.replace("{'capital': T[c]}", "{'capital': T[c]} if c == 'Japan' else [T[c]]"), "unstable_result"),
        ("import time\n" + HONEST.replace("T[c]", "[T[c], time.time()][0]"), "reads_clock"),
    ],
)  # fmt: skip
async def test_proofs(pool: SandboxPool, code: str, reason: str) -> None:
    if reason:
        with pytest.raises(Rejected) as rejection:
            await prove(CodeTool(SPEC, code), [CASE], context(pool))
        assert rejection.value.reason == reason and rejection.value.detail
    else:
        assert await prove(CodeTool(SPEC, code), [CASE], context(pool)) == [
            ReferenceCall(1, "capital", {"c": "Japan"}, {"capital": "Tokyo"}, "string")
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Searches

FOUND = """T = {'Japan': 'Tokyo', 'Italy': 'Rome', 'Norway': 'Oslo'}
def capital(c):
    return {'capital': [v for k, v in T.items() if HOLDS]}
"""
SEARCHES = {
    "a part": "c in k",
    "a part of more than a letter": "c in k and len(c) != 1",
    "a beginning": "k.startswith(c) and c",
    "a wildcard": "c in (k, '*')",
    "a wildcard of SQL": "c in (k, '%')",
    "an expression": "c in (k, '.*')",
    "nothing": "c in (k, '')",
}


@pytest.mark.parametrize("holds", SEARCHES.values(), ids=SEARCHES)
async def test_a_tool_that_can_be_asked_for_everything_is_rejected(pool: SandboxPool, holds: str) -> None:
    with pytest.raises(Rejected) as rejection:
        await prove(CodeTool(SPEC, FOUND.replace("HOLDS", holds)), [CASE], context(pool))
    assert rejection.value.reason == "ignores_arguments" and "'Tokyo'" in rejection.value.detail


DATACLASSES = """from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Row:
    country: str
    capital: str

ROWS = [Row('Japan', 'Tokyo'), Row('Italy', 'Rome'), Row('Norway', 'Oslo')]

def capital(c):
    return {'capital': [row.capital for row in ROWS if HOLDS]}
"""


async def test_calls_of_several_tools_run_as_each_would_alone(pool: SandboxPool) -> None:
    """A module that looks itself up loaded in an episode, and not there: its search counted as a call that failed."""
    found = CodeTool(SPEC, DATACLASSES.replace("HOLDS", "c in row.country"))
    assert await play([found], [("capital", {"c": ""})], pool) == [
        MadeCall("capital", True, {"capital": ["Tokyo", "Rome", "Oslo"]})
    ]
    with pytest.raises(Rejected, match="ignores_arguments"):
        await prove(found, [CASE], context(pool))
    exact = CodeTool(SPEC, DATACLASSES.replace("HOLDS", "c == row.country"))
    assert (await prove(exact, [CASE], context(pool)))[0].output == {"capital": ["Tokyo"]}
    # Of one that loads nowhere the others' calls are made all the same.
    broken = CodeTool(msgspec.structs.replace(SPEC, name="broken"), "import nothing_like_it\ndef broken(c): ...")
    made = await play([broken, exact], [("broken", {"c": "Japan"}), ("capital", {"c": "Japan"})], pool)
    assert [one.ok for one in made] == [False, True]


@pytest.mark.parametrize(
    ("option", "holds"),
    [
        ({"type": "string", "enum": ["exact", "prefix"]}, "(k == c if how != 'prefix' else k.startswith(c))"),
        ({"type": "boolean"}, "(k == c if how is not True else c in k)"),
    ],
    ids=["choice", "truth value"],
)
@pytest.mark.parametrize("required", [False, True])
async def test_a_search_behind_an_option_is_one(pool: SandboxPool, option: Any, holds: str, required: bool) -> None:
    properties = {"c": {"type": "string"}, "how": option}
    spec = ToolSpec("capital", "Capital of a country.", {
        "type": "object", "properties": properties, "required": ["c", "how"] if required else ["c"],
    })  # fmt: skip
    given = {"how": option.get("enum", [False])[0]} if required else {}
    case = Case(1, {**CASE.arguments, **given}, {**CASE.other_arguments, **given}, CASE.answer)
    code = FOUND.replace("(c)", "(c, how=None)")
    with pytest.raises(Rejected, match=r"ignores_arguments.*how="):
        await prove(CodeTool(spec, code.replace("HOLDS", holds)), [case], context(pool))
    honest = CodeTool(spec, code.replace("HOLDS", "k == c"))
    assert (await prove(honest, [case], context(pool)))[0].output == {"capital": ["Tokyo"]}


async def test_options_by_which_searches_are_repeated_are_bounded() -> None:
    codes = {"type": "string", "enum": [str(code) for code in range(500)]}
    spec = ToolSpec(
        "f", "F.", {"type": "object", "properties": {"c": {"type": "string"}, "code": codes}, "required": ["c"]}
    )
    given = {"c": "Japan"}
    assert len(searches(CodeTool(spec, "def f(c, code=''): ..."), Case(1, given, given, Answer("Tokyo")))) == 5 * 33


def two(**of: Any) -> ToolSpec:
    required = [name for name, one in of.items() if not one.pop("optional", False)]
    return ToolSpec("f", "F.", {"type": "object", "properties": of, "required": required})


async def test_a_call_is_tried_for_another_tool_in_each_way_that_fits() -> None:
    number, text = {"type": "number"}, {"type": "string"}
    convert, given = two(amount=dict(number), currency=dict(text)), {"amount": 5.0, "currency": "USD"}
    swapped = two(code=dict(text), value=dict(number))
    assert translations(given, convert, swapped) == [{"code": "USD", "value": 5.0}]
    assert translated(given, convert, swapped) == {"code": "USD", "value": 5.0}
    either = two(a=dict(text), b=dict(text))
    assert translations({"a": "x", "b": "y"}, either, two(c=dict(text), d=dict(text))) == [
        {"c": "x", "d": "y"}, {"d": "x", "c": "y"},
    ]  # fmt: skip
    optional = two(code=dict(text), value={**number, "optional": True})
    assert translations(given, convert, optional) == [{"code": "USD", "value": 5.0}]
    nothing = two(value={**number, "optional": True})
    assert translations({"c": "x"}, two(c=dict(text)), nothing) == [{}]
    assert translated({"c": "x"}, two(c=dict(text)), nothing) is None
    assert translations(given, convert, two(c=dict(text))) == []
    many = two(**{f"p{number}": dict(text) for number in range(6)})
    assert len(translations({f"p{number}": "x" for number in range(6)}, many, many)) == 8


async def test_a_search_that_names_its_subject_is_no_search_for_everything(pool: SandboxPool) -> None:
    code = FOUND.replace("HOLDS", "k.casefold() == c.strip().casefold()")
    assert (await prove(CodeTool(SPEC, code), [CASE], context(pool)))[0].output == {"capital": ["Tokyo"]}


async def test_every_required_argument_is_made_one_that_finds_everything() -> None:
    properties: dict[str, Any] = {
        "c": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}, "unit": {"enum": ["m", "km"]},
    }  # fmt: skip
    spec = ToolSpec("f", "F.", {"type": "object", "properties": properties, "required": list(properties)})
    given = {"c": "Japan", "n": 3, "tags": ["Asia"], "unit": "m"}
    wide = searches(CodeTool(spec, "def f(c, n, tags, unit): ..."), Case(1, given, given, Answer("Tokyo")))
    changed = [{name: one[name] for name in one if one[name] != given[name]} for one in wide]
    assert changed == [
        *({"c": one} for one in ("", "*", "%", ".*", "J")),
        *({"tags": one} for one in ([], [""], ["*"], ["%"], [".*"], ["A"])),
        {"c": "", "tags": []},
        *({"c": one, "unit": "km"} for one in ("", "*", "%", ".*", "J")),
        *({"tags": one, "unit": "km"} for one in ([], [""], ["*"], ["%"], [".*"], ["A"])),
        {"c": "", "tags": [], "unit": "km"},
    ]
    numbers = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    }
    given = {"a": 1, "b": 2.5}
    add = CodeTool(ToolSpec("add", "Adds.", numbers), "def add(a, b): ...")
    assert searches(add, Case(1, given, given, Answer(3.5))) == [], "the call itself is no search"
    # A letter of a short code may be another code.
    assert wildcards("Na") == ["", "*", "%", ".*"] and wildcards(5) == [] and wildcards({"a": 1}) == [{}]


def of_search(code: str) -> ToolEnvironment:
    """Three questions to one tool."""
    countries = {"Japan": "Tokyo", "Italy": "Rome", "Norway": "Oslo"}
    steps = [
        SubQuestion(i, f"The capital of {country}?", Answer(capital), [], 1, True, "capital")
        for i, (country, capital) in enumerate(countries.items())
    ]
    calls = [
        ReferenceCall(i, "capital", {"c": c}, {"capital": [v]}, "string") for i, (c, v) in enumerate(countries.items())
    ]
    return ToolEnvironment(
        id="e", language="en", domain="geography", structure="parallel_single_hop", question="Which capitals?",
        answer=Answer(["Tokyo", "Rome", "Oslo"]), sub_questions=steps, tools=[CodeTool(SPEC, code)],
        reference_calls=calls, distractors={}, entities=[], signature="s", split="train",
    )  # fmt: skip


async def test_one_call_that_finds_everything_is_not_rewarded(pool: SandboxPool) -> None:
    """It answered all three questions at once: 3 of 3 in one call, a reward of 1.5."""
    environment = of_search(FOUND.replace("HOLDS", "c in k"))
    everything = await pool.call(environment.tools[0].code, "capital", {"c": ""})
    assert everything.value == {"capital": ["Tokyo", "Rome", "Oslo"]}
    listed = MadeCall("capital", True, everything.value)
    assert score(environment, [listed]).value == 0.0
    assert score(environment, [listed] * 3).value == 0.0
    right = await solve(environment, pool)
    assert score(environment, right, epsilon=0.0).value == 1.0
    assert score(environment, [*right, listed]).value == pytest.approx(6 / 7)


@pytest.mark.parametrize(
    ("answer", "error", "leaks"),
    [
        (0, "no city {c!r}", False),  # the argument may be "zzqx 00"
        ("Italy", "{c}: no such country", False),
        ("no", "no such city", False),
        (True, "it is true that there is no such city", False),
        (5, "known: {{'Oslo': 5}}", True),
        ("Oslo", "did you mean Oslo?", True),
        ("Oslo", "did you mean OSLO or Bern", True),
        ("1814-05-17", "rows: Eidsvoll, 17 May 1814", True),
    ],
)
async def test_errors_that_state_an_answer(pool: SandboxPool, answer: Any, error: str, leaks: bool) -> None:
    code = (
        f"def capital(c):\n    if c != 'Japan':\n        raise ValueError(f{error!r})\n    return {{'x': {answer!r}}}\n"
    )
    case = Case(1, {"c": "Japan"}, {"c": "Italy"}, Answer(answer))
    if leaks:
        with pytest.raises(Rejected, match="which states the answer") as rejection:
            await prove(CodeTool(SPEC, code), [case], context(pool))
        assert rejection.value.reason == "answer_leaked"
    else:
        assert await prove(CodeTool(SPEC, code), [case], context(pool))
