"""Environment synthesis end to end: the offline teacher, the real sandbox, datasets on disk."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from sandbox import SandboxConfig, SandboxPool
from synthesis.datasets import read_card, read_dataset
from synthesis.environments.answers import (
    MergedToolAnswer,
    Parameter,
    ReferenceCallAnswer,
    ToolCodeAnswer,
    ToolDocumentAnswer,
    listed,
)
from synthesis.environments.config import BANDS, Built, Context, Draft, EnvironmentsConfig, NeededTool
from synthesis.environments.distract import Candidate, find_twins
from synthesis.environments.fact_tools import fact_tool
from synthesis.environments.implement import implement
from synthesis.environments.merge import merge
from synthesis.environments.pipeline import EnvironmentsSummary, synthesize
from synthesis.environments.proof import Case, prove, replay
from synthesis.environments.split import split
from synthesis.environments.statistics import statistics_of
from synthesis.facts.relations import all_relations
from synthesis.matching import contains, fold
from synthesis.offline import grammar
from synthesis.offline.environments import HANDLERS
from synthesis.records import Answer, CodeTool, Decomposition, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.runner import Journal, Rejected, rng_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EnvironmentsConfig(count=30, held_out_fraction=0.4, max_hops=2, max_branches=2, distractors_per_band=1)


class Rules:
    """The offline teacher of this pipeline; `changes` spoils the first answer of a kind for each request."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.feedback: list[tuple[str, str]] = []

    async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
        self.feedback.append((answer.__name__, variables["feedback"]))
        given = HANDLERS[answer.__name__](variables, language, rng_for(seed, answer.__name__))
        change = self.changes.get(answer.__name__)
        return change(given, variables) if change else given


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(pool: SandboxPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[EnvironmentsSummary, Path]:
    path = tmp_path_factory.mktemp("environments")
    with Journal(path / "journal.sqlite") as journal:
        summary = await synthesize(CONFIG, teacher=Rules(), pool=pool, journal=journal, out_dir=path, seed=0)
    return summary, path


@pytest.fixture(scope="module")
def environments(made: tuple[EnvironmentsSummary, Path]) -> list[ToolEnvironment]:
    return [one for split in ("train", "held_out") for one in read_dataset(made[1] / split, ToolEnvironment)]


def context(pool: SandboxPool, teacher: Any = None, **config: Any) -> Context:
    return Context(EnvironmentsConfig(**config), teacher or Rules(), pool, seed=0)


# ---------------------------------------------------------------------------------------------------------------------
# The whole


async def test_nearly_all_questions_become_environments(
    made: tuple[EnvironmentsSummary, Path], environments: list[ToolEnvironment]
) -> None:
    summary, path = made
    assert len(environments) == sum(summary.counts.values()) >= 28
    assert len(environments) + sum(n for counts in summary.rejected.values() for n in counts.values()) == CONFIG.count
    for side in ("train", "held_out"):
        card = read_card(path / side)
        assert card["digest"] == summary.digests[side] and card["statistics"] == summary.statistics[side]
        assert card["rejected"] == summary.rejected and card["seed"] == 0 and card["config"]["count"] == CONFIG.count
    assert {one.language for one in environments} == {"en", "zh"}
    assert {one.structure for one in environments} == set(CONFIG.structures)


async def test_every_reference_call_replays(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    problems = await asyncio.gather(*(replay(one, pool) for one in environments))
    assert [problem for each in problems for problem in each] == []
    for one in environments:
        assert [call.sub_question for call in one.reference_calls] == [step.id for step in one.sub_questions]


async def test_a_changed_output_fails_the_replay(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    one = environments[0]
    spoiled = replace(one.reference_calls[0], output={"other": 1})
    assert len(await replay(replace(one, reference_calls=[spoiled]), pool)) == 1


async def test_other_subjects_do_not_give_the_answer(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    """Each tool is called with nonsense and with every other reference argument of the run that its schema takes."""
    for one in environments[::3]:
        steps = {step.id: step for step in one.sub_questions}
        tools = {tool.spec.name: tool for tool in one.tools}
        for call in one.reference_calls:
            tool = tools[call.tool]
            (name,) = tool.spec.parameters["required"]
            nonsense = "no such thing" if isinstance(call.arguments[name], str) else -1
            result = await pool.call(tool.code, call.tool, {name: nonsense})
            assert not (result.ok and contains(result.value, steps[call.sub_question].answer))
            assert not (await pool.call(tool.code, call.tool, {})).ok


async def test_final_answers_follow_from_the_outputs(environments: list[ToolEnvironment]) -> None:
    for one in environments:
        outputs = {call.sub_question: call.output for call in one.reference_calls}
        consumed = {dependency for step in one.sub_questions for dependency in step.depends_on}
        assert contains([outputs[s.id] for s in one.sub_questions if s.id not in consumed], one.answer)
        values = grammar.evaluate(grammar.parse(one.question, one.language))
        assert {str(step.answer.value) for step in one.sub_questions} == set(map(str, values))


async def test_one_tool_for_each_intent(environments: list[ToolEnvironment]) -> None:
    merged = 0
    for one in environments:
        by_tool: dict[str, set[str]] = {}
        steps = {step.id: step for step in one.sub_questions}
        for call in one.reference_calls:
            by_tool.setdefault(call.tool, set()).add(steps[call.sub_question].intent)
        assert all(len(intents) == 1 for intents in by_tool.values())
        assert len(by_tool) == len({step.intent for step in one.sub_questions}) == len(one.tools)
        merged += len(one.reference_calls) > len(one.tools)
    assert merged > 0


async def test_distractors_are_executable_irrelevant_and_uniquely_named(
    pool: SandboxPool, environments: list[ToolEnvironment]
) -> None:
    relations = all_relations()
    for one in environments:
        assert set(one.distractors) == set(BANDS) and len(one.distractors["high"]) == 1
        irrelevant = [tool for tools in one.distractors.values() for tool in tools]
        names = [tool.spec.name for tool in [*one.tools, *irrelevant]]
        assert len(set(names)) == len(names)
        needed = {relations[step.intent].domain for step in one.sub_questions}
        assert not needed & {relations[tool.spec.name].domain for tool in irrelevant}
    for tool in [tool for tools in environments[0].distractors.values() for tool in tools]:
        relation = relations[tool.spec.name]
        table = next(node for node in ast.walk(ast.parse(tool.code)) if isinstance(node, ast.Dict))
        subject = ast.literal_eval(table.keys[0])  # type: ignore[arg-type]
        result = await pool.call(tool.code, tool.spec.name, {relation.parameter: subject})
        assert result.ok, result.error


async def test_nothing_leaks_between_the_splits(environments: list[ToolEnvironment]) -> None:
    sides = {side: [one for one in environments if one.split == side] for side in ("train", "held_out")}
    assert len(sides["train"]) > 10 and len(sides["held_out"]) > 8
    signatures = {side: {one.signature for one in found} for side, found in sides.items()}
    entities = {side: {fold(entity) for one in found for entity in one.entities} for side, found in sides.items()}
    assert not signatures["train"] & signatures["held_out"]
    assert not entities["train"] & entities["held_out"]
    # The entities are all there are: computed anew from the question's own text.
    for one in environments:
        plan = grammar.parse(one.question, one.language)
        values = grammar.evaluate(plan)
        assert {str(values[s.argument]) if isinstance(s.argument, int) else s.argument for s in plan} == set(
            one.entities
        )
        assert grammar.signature(plan) == one.signature


async def test_statistics_add_up(environments: list[ToolEnvironment]) -> None:
    found = statistics_of(environments)
    steps, calls = found["sub_questions"], found["tool_calls"]
    assert steps["total"] == sum(len(one.sub_questions) for one in environments)
    assert steps["mean"] * len(environments) == pytest.approx(steps["total"], abs=0.01)
    assert calls["mean"] == pytest.approx(steps["mean"] * steps["share_needing_tool"], abs=1e-3)
    assert steps["share_parallel"] + steps["share_serial"] == pytest.approx(1)
    assert sum(steps["histogram"].values()) == len(environments) and sum(found["languages"].values()) == pytest.approx(
        1
    )
    assert statistics_of([]) == {"samples": 0}


# ---------------------------------------------------------------------------------------------------------------------
# Resume

SMALL = dataclasses.replace(CONFIG, count=8, fact_distractors=False)
_CHILD = """
import asyncio, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import test_environments_pipeline as t
from synthesis.records import Language

class Killed(t.Rules):
    async def ask(self, answer, variables, *, language, seed):
        if answer.__name__ == "ToolCodeAnswer":
            Killed.left -= 1
            if Killed.left == 0:
                journal.commit()
                os.kill(os.getpid(), 9)
        return await super().ask(answer, variables, language=language, seed=seed)

Killed.left = 8
async def main():
    async with t.SandboxPool(t.SandboxConfig()) as pool:
        await t.synthesize(t.dataclasses.replace(t.SMALL, concurrency=1), teacher=Killed(), pool=pool, journal=journal,
                           out_dir={out!r}, seed=1)
with t.Journal({out!r} + "/journal.sqlite") as journal:
    asyncio.run(main())
"""


async def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(pool: SandboxPool, tmp_path: Path) -> None:
    async def run(path: Path) -> tuple[EnvironmentsSummary, int]:
        teacher = Rules()
        with Journal(path / "journal.sqlite") as journal:
            summary = await synthesize(SMALL, teacher=teacher, pool=pool, journal=journal, out_dir=path, seed=1)
        return summary, len(teacher.feedback)

    whole, asked = await run(tmp_path / "whole")
    killed = tmp_path / "killed"
    killed.mkdir()
    tests = Path(__file__).parent
    child = _CHILD.format(root=str(tests.parents[1]), tests=str(tests), out=str(killed))
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", child], env=os.environ, capture_output=True, text=True
    )
    assert process.returncode == -9, process.stderr
    assert not (killed / "train").exists()
    resumed, asked_again = await run(killed)
    assert resumed == whole
    assert 0 < asked_again < asked
    assert (killed / "train" / "records.array_record").read_bytes() == (
        tmp_path / "whole" / "train" / "records.array_record"
    ).read_bytes()
    # A finished run asks nothing more.
    assert (await run(killed)) == (whole, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Proofs

SPEC = ToolSpec(
    "capital", "Capital of a country.", {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"]}
)
CASE = Case({"c": "Japan"}, {"c": "Italy"}, Answer("Tokyo"))
HONEST = "T = {'Japan': 'Tokyo', 'Italy': 'Rome'}\ndef capital(c):\n    return {'capital': T[c]}\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (HONEST, ""),
        (HONEST.replace("T[c]", "T.get(c, 'unknown')"), ""),
        (HONEST.replace("T[c]", "T[c] + 'ite'"), "wrong_answer"),
        (HONEST.replace("T[c]", "'Rome'"), "wrong_answer"),
        (HONEST.replace("T[c]", "T[c.lower()]"), "tool_failed"),
        (HONEST.replace("T[c]", "'Tokyo'"), "ignores_arguments"),
        (HONEST.replace("T[c]", "T"), "ignores_arguments"),
        (HONEST.replace("T[c]", "T.get(c, 'Tokyo')"), "ignores_arguments"),
        (HONEST.replace("(c)", "(c='Japan')"), "ignores_arguments"),
        (HONEST.replace("(c)", "(**k)").replace("T[c]", "T[k.get('c', 'Japan')]"), "ignores_arguments"),
        ("import random\n" + HONEST.replace("T[c]", "[T[c], random.random()]"), "nondeterministic"),
        (HONEST.replace("T[c]", "__import__('socket').create_connection(('1.1.1.1', 80))"), "needs_network"),
        ("import os\n" + HONEST, "disallowed_import"),
        ("import time\n" + HONEST.replace("T[c]", "[T[c], time.time()][0]"), "reads_clock"),
    ],
)  # fmt: skip
async def test_proofs(pool: SandboxPool, code: str, reason: str) -> None:
    if reason:
        with pytest.raises(Rejected) as rejection:
            await prove(CodeTool(SPEC, code), [CASE], context(pool))
        assert rejection.value.reason == reason and rejection.value.detail
    else:
        assert await prove(CodeTool(SPEC, code), [CASE], context(pool)) == [{"capital": "Tokyo"}]


def draft(*plan: grammar.Step, language: Any = "en") -> Draft:
    values = grammar.evaluate(plan)
    rng = rng_for(0)
    steps = [
        SubQuestion(
            id=i + 1,
            question=grammar.sub_question(plan, i, rng, language),
            answer=Answer(values[i]),
            depends_on=[step.argument + 1] if isinstance(step.argument, int) else [],
            hop=1,
            needs_tool=True,
            intent=step.relation,
        )
        for i, step in enumerate(plan)
    ]
    one = Decomposition("d", language, "g", "multi_hop", "?", Answer(values[-1]), steps, [], grammar.signature(plan))
    return Draft(one, [all_relations()[step.relation].domain for step in plan])


STEP = grammar.Step
CAPITAL = draft(STEP("capital_of_country", "Japan"))


def _retyped(parameters: list[Parameter]) -> list[Parameter]:
    return [replace(parameters[0], type="integer"), *parameters[1:]]


async def test_the_sandbox_message_goes_back_to_the_teacher(pool: SandboxPool) -> None:
    def wrong_first(given: ToolCodeAnswer, variables: Any) -> ToolCodeAnswer:
        return given if variables["feedback"] else ToolCodeAnswer(given.code.replace("Tokyo", "Kyoto"))

    teacher = Rules(ToolCodeAnswer=wrong_first)
    (built,) = await implement(CAPITAL, context(pool, teacher))
    assert built.tools[0].calls[0].output == {"capital": "Tokyo"}
    feedback = [text for name, text in teacher.feedback if name == "ToolCodeAnswer"]
    assert feedback[0] == "" and "Kyoto" in feedback[1] and len(feedback) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ToolCodeAnswer": lambda given, v: ToolCodeAnswer(given.code.replace("Tokyo", "Kyoto"))}, "wrong_answer"),
        ({"ToolCodeAnswer": lambda given, v: ToolCodeAnswer("def capital_of_country(:")}, "bad_code"),
        ({"ToolCodeAnswer": lambda given, v: ToolCodeAnswer("capital = 1")}, "bad_code"),
        (
            {"ToolDocumentAnswer": lambda given, v: replace(given, description="Says Tokyo for Japan.")},
            "answer_leaked",
        ),
        ({"ToolDocumentAnswer": lambda given, v: replace(given, name="首都")}, "bad_document"),
        ({"ToolDocumentAnswer": lambda given, v: replace(given, parameters=[])}, "bad_document"),
        ({"HarderToolDocumentAnswer": lambda given, v: replace(given, name="other")}, "not_compatible"),
        (
            {"HarderToolDocumentAnswer": lambda given, v: replace(given, parameters=given.parameters[1:])},
            "bad_document",
        ),
        (
            {"HarderToolDocumentAnswer": lambda given, v: replace(given, parameters=given.parameters[:1])},
            "not_harder",
        ),
        (
            {"ReferenceCallAnswer": lambda given, v: ReferenceCallAnswer(listed({"town": "x"}), given.other_arguments)},
            "bad_call",
        ),
        (
            {"ReferenceCallAnswer": lambda given, v: ReferenceCallAnswer(given.arguments, given.arguments)},
            "bad_call",
        ),
    ],
)  # fmt: skip
async def test_bounded_attempts_then_rejected(pool: SandboxPool, change: dict[str, Any], reason: str) -> None:
    teacher = Rules(**change)
    with pytest.raises(Rejected) as rejection:
        await implement(CAPITAL, context(pool, teacher, attempts=2, hardened_share=1.0))
    assert rejection.value.reason == reason
    (name,) = change
    assert [bool(text) for asked, text in teacher.feedback if asked == name] == [False, True]


async def test_hardened_tools_take_plain_calls_too(pool: SandboxPool) -> None:
    (built,) = await implement(CAPITAL, context(pool, hardened_share=1.0))
    (one,) = built.tools
    properties, required = one.tool.spec.parameters["properties"], one.tool.spec.parameters["required"]
    assert len(properties) == 2 and required == ["country"] and one.calls[0].arguments == {"country": "Japan"}
    call = {"country": "Japan", "format": "value"}
    assert (await pool.call(one.tool.code, "capital_of_country", call)).value == "Tokyo"
    assert not (await pool.call(one.tool.code, "capital_of_country", {**call, "format": "x"})).ok


async def test_examples_that_are_the_answer_are_taken_out(pool: SandboxPool) -> None:
    """The parameter's own example is the answer here: `Two-letter code, for example NO.`"""
    plan = next(
        STEP(relation.id, subject)
        for relation in all_relations().values()
        for subject, value in relation.rows.items()
        if relation.id == "blue_of_hex" and value == 255
    )
    teacher = Rules()
    (built,) = await implement(draft(plan), context(pool, teacher))
    assert "255" not in built.tools[0].tool.spec.description
    assert [name for name, text in teacher.feedback if text] == ["ToolDocumentAnswer"]


# ---------------------------------------------------------------------------------------------------------------------
# Merging and twins

PAIR = draft(STEP("capital_of_country", "Japan"), STEP("capital_of_country", "Peru"), STEP("area_of_country", "Peru"))


async def test_equal_intents_become_one_tool_that_knows_both(pool: SandboxPool) -> None:
    (built,) = await implement(PAIR, context(pool))
    assert len(built.tools) == 3
    (merged,) = await merge(built, context(pool))
    assert [[call.sub_question for call in tool.calls] for tool in merged.tools] == [[1, 2], [3]]
    assert [call.output for call in merged.tools[0].calls] == [{"capital": "Tokyo"}, {"capital": "Lima"}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given, v: MergedToolAnswer(given.code.replace("Lima", "Cusco"), given.calls), "wrong_answer"),
        (lambda given, v: MergedToolAnswer(given.code, given.calls[:1]), "bad_call"),
        (lambda given, v: MergedToolAnswer(given.code, given.calls[::-1]), "wrong_answer"),
    ],
)
async def test_a_merge_that_loses_an_answer_is_rejected(pool: SandboxPool, change: Any, reason: str) -> None:
    (built,) = await implement(PAIR, context(pool))
    teacher = Rules(MergedToolAnswer=change)
    with pytest.raises(Rejected) as rejection:
        await merge(built, context(pool, teacher, attempts=2))
    assert rejection.value.reason == reason and len([n for n, _ in teacher.feedback if n == "MergedToolAnswer"]) == 2


async def test_twins_are_found_by_running_them(pool: SandboxPool) -> None:
    (built,) = await implement(CAPITAL, context(pool))
    relations = all_relations()
    twin = ToolSpec("seat", "Seat.", {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]})
    code = HONEST.replace("capital(c)", "seat(n)").replace("T[c]", "T[n]")
    candidates = {
        "twin": Candidate("seat", "other", CodeTool(twin, code)),
        "far": Candidate("area_of_country", "other", fact_tool(relations["area_of_country"], ["Japan"], "en")),
        "own domain": Candidate("seat", "geography", CodeTool(twin, code)),
        "crashing": Candidate("seat", "other", CodeTool(twin, "import os\ndef seat(n):\n    os.abort()\n")),
        "not json": Candidate("seat", "other", CodeTool(twin, "def seat(n):\n    return object()\n")),
    }
    found = {name: await find_twins(candidate, [built], context(pool)) for name, candidate in candidates.items()}
    assert {name: [twin.environment for twin in twins] for name, twins in found.items()} == {
        "twin": ["d"], "far": [], "own domain": [], "crashing": [], "not json": []
    }  # fmt: skip


async def test_split_drops_what_straddles_and_what_does_not_replay(pool: SandboxPool) -> None:
    partition = EnvironmentsConfig().partition
    names = [f"e{i}" for i in range(40)]
    train = next(n for n in names if partition.side_of_entity(n) == "train")
    held_out = next(n for n in names if partition.side_of_entity(n) == "held_out")
    signature = next(f"s{i}" for i in range(40) if partition.side_of_signature(f"s{i}") == "train")

    def built(entities: list[str], output: Any, code: str = HONEST) -> Built:
        one = replace(CAPITAL.decomposition, entities=entities, signature=signature, answer=Answer("Tokyo"))
        call = ReferenceCall(1, "capital", {"c": "Japan"}, output)
        tool = NeededTool("capital", "g", CodeTool(SPEC, code), [call], [{"c": "Italy"}])
        return Built(Draft(one, ["g"]), [tool], {})

    right = {"capital": "Tokyo"}
    (environment,) = await split(built([train], right), context(pool))
    assert environment.split == "train"
    for entities, output, code, reason in [
        ([train, held_out], right, HONEST, "straddles_split"),
        ([held_out], right, HONEST, "straddles_split"),
        ([train], {"capital": "Rome"}, HONEST, "replay_failed"),
        ([train], right, HONEST.replace("Tokyo", "Kyoto"), "replay_failed"),
    ]:
        with pytest.raises(Rejected, match=reason):
            await split(built(entities, output, code), context(pool))


async def test_a_plain_document_is_the_relations_own() -> None:
    """The SFT track sees the same tools, from `fact_servers`."""
    variables = {"step": CAPITAL.decomposition.sub_questions[0], "feedback": ""}
    given = HANDLERS["ToolDocumentAnswer"](variables, "en", rng_for(0))
    assert isinstance(given, ToolDocumentAnswer) and given.name == "capital_of_country"
