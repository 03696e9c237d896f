"""Environment synthesis end to end: the offline teacher, the real sandbox, datasets on disk."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from environments_world import CONFIG, HONEST, SPEC, Rules
from msgspec.structs import replace

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.matching import contains, fold, match
from synthesis.core.records import (
    Answer,
    CodeTool,
    Decomposition,
    Difficulty,
    ReferenceCall,
    SubQuestion,
    ToolEnvironment,
    ToolSpec,
)  # fmt: skip
from synthesis.core.reward import MadeCall, score
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.environments.config import BANDS, EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.distract import twins_of
from synthesis.environments.drafts import Draft, NeededTool, ToolsetDraft
from synthesis.environments.implement import implement, read_source
from synthesis.environments.merge import merge
from synthesis.environments.pipeline import synthesize
from synthesis.environments.statistics import statistics_of, table_rows
from synthesis.environments.teacher_answers import (
    Cluster,
    IntentClustersAnswer,
    MergedToolAnswer,
    Parameter,
    ReferenceCallAnswer,
    ToolCodeAnswer,
    ToolDocumentAnswer,
    argument_list,
)
from synthesis.environments.verify import finish, solve
from synthesis.offline import grammar, plans
from synthesis.offline.environment_author import HANDLERS
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.facts.tools import fact_tool
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.pipeline_run import Summary

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(pool: SandboxPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, Path]:
    path = tmp_path_factory.mktemp("environments")
    with Journal(path / "journal.sqlite") as journal:
        summary = await synthesize(CONFIG, executor=Executor(Rules(), pool), journal=journal, out_dir=path, seed=0)
    return summary, path


@pytest.fixture(scope="module")
def environments(made: tuple[Summary, Path]) -> list[ToolEnvironment]:
    return [one for split in ("train", "held_out") for one in read_dataset(made[1] / split, ToolEnvironment)]


def context(pool: SandboxPool, teacher: Any = None, **config: Any) -> EnvironmentContext:
    return EnvironmentContext(EnvironmentsConfig(**config), teacher or Rules(), pool, seed=0)


# ---------------------------------------------------------------------------------------------------------------------
# The whole


async def test_nearly_all_questions_become_environments(
    made: tuple[Summary, Path], environments: list[ToolEnvironment]
) -> None:
    summary, path = made
    assert len(environments) == sum(summary.counts.values()) >= 28
    assert len(environments) + sum(n for counts in summary.rejected.values() for n in counts.values()) == CONFIG.count
    for split in ("train", "held_out"):
        card = read_card(path / split)
        assert card["digest"] == summary.digests[split] and card["statistics"] == summary.statistics[split]
        assert card["rejected"] == summary.rejected and card["seed"] == 0 and card["config"]["count"] == CONFIG.count
    assert {one.language for one in environments} == {"en", "zh"}
    assert {one.structure for one in environments} == set(CONFIG.structures)


async def test_every_reference_call_replays(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    solved = await asyncio.gather(*(solve(one, pool) for one in environments))
    for one, calls in zip(environments, solved, strict=True):
        assert score(one, calls, epsilon=0.0).value == 1.0
        assert [call.sub_question for call in one.reference_calls] == [step.id for step in one.sub_questions]


async def test_a_changed_output_fails_the_replay(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    one = environments[0]
    spoiled = [replace(one.reference_calls[0], output={"other": 1}), *one.reference_calls[1:]]
    with pytest.raises(Rejected, match="replay_failed"):
        await solve(replace(one, reference_calls=spoiled), pool)


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
        values = plans.evaluate(grammar.parse(one.question, one.language))
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
        assert set(one.distractors) == set(BANDS) and all(len(tools) <= 1 for tools in one.distractors.values())
        assert one.distractors["medium"] and one.distractors["low"]
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
    splits = {split: [one for one in environments if one.split == split] for split in ("train", "held_out")}
    assert len(splits["train"]) > 10 and len(splits["held_out"]) > 8
    signatures = {split: {one.signature for one in found} for split, found in splits.items()}
    entities = {split: {fold(entity) for one in found for entity in one.entities} for split, found in splits.items()}
    assert not signatures["train"] & signatures["held_out"]
    assert not entities["train"] & entities["held_out"]
    # Nor is a look-up of a held-out question needed, or only offered, in training.
    needed = {split: {step.intent for one in found for step in one.sub_questions} for split, found in splits.items()}
    offered = {t.spec.name for one in splits["train"] for band in one.distractors.values() for t in band}
    assert not needed["held_out"] & (needed["train"] | offered)
    # The entities are all there are: computed anew from the question's own text.
    for one in environments:
        plan = grammar.parse(one.question, one.language)
        values = plans.evaluate(plan)
        assert {str(values[s.argument]) if isinstance(s.argument, int) else s.argument for s in plan} == set(
            one.entities
        )
        assert plans.signature(plan) == one.signature


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
    assert statistics_of([]) == {"samples": 0} and table_rows({"samples": 0}) == {"samples": "0"}
    # A card sorts by name: the table ranks by share all the same.
    assert table_rows(json.loads(json.dumps(found, sort_keys=True))) == table_rows(found)
    hops = [max(step.hop for step in one.sub_questions) for one in environments]
    assert found["hops"]["median"] == sorted(hops)[len(hops) // 2] and found["quality"] == 1.0
    assert sum(found["rules"].values()) == pytest.approx(1, abs=1e-3) and found["modes"] == {"unconditional": 1.0}
    text = str(table_rows(found))
    assert f"{len(environments)}" in text and f"{steps['mean']:.2f}" in text and "parallel / serial" in text


# ---------------------------------------------------------------------------------------------------------------------
# Resume

SMALL = dataclasses.replace(CONFIG, count=8, fact_distractors=False)
_CHILD = """
import asyncio, os, sys
sys.path[:0] = {paths!r}
import test_environments_pipeline as t
from synthesis.core.records import Language

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
        await t.synthesize(t.dataclasses.replace(t.SMALL, concurrency=1), executor=t.Executor(Killed(), pool),
                           journal=journal, out_dir={out!r}, seed=1)
with t.Journal({out!r} + "/journal.sqlite") as journal:
    asyncio.run(main())
"""


async def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(pool: SandboxPool, tmp_path: Path) -> None:
    async def run(path: Path) -> tuple[Summary, int]:
        teacher = Rules()
        with Journal(path / "journal.sqlite") as journal:
            summary = await synthesize(SMALL, executor=Executor(teacher, pool), journal=journal, out_dir=path, seed=1)
        return summary, len(teacher.feedback)

    whole, asked = await run(tmp_path / "whole")
    killed = tmp_path / "killed"
    killed.mkdir()
    root = Path(__file__).parents[3]
    paths = [str(root), str(root / "tests" / "worlds"), str(Path(__file__).parent)]
    child = _CHILD.format(paths=paths, out=str(killed))
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
# Stages


def draft(*plan: plans.Step, language: Any = "en") -> Draft:
    values = plans.evaluate(plan)
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
    one = Decomposition("d", language, "g", "multi_hop", "?", Answer(values[-1]), steps, [], plans.signature(plan))
    return Draft(one, [all_relations()[step.relation].domain for step in plan])


STEP = plans.Step
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


SOURCE = "T = {'Oslo': 5}\n\ndef f(city: str):\n    return {'n': T[city]}\n"


@pytest.mark.parametrize(
    "text",
    [
        SOURCE,
        SOURCE.replace("\n", "\r\n"),
        f"\ufeff{SOURCE}",
        f"```python\n{SOURCE}```",
        f"```\n{SOURCE}\n```\n",
        f"Here is the module:\n\n```python\n\ufeff{SOURCE}```\nIt works.",
        "\n" + "".join(f"    {line}\n" for line in SOURCE.splitlines()),
        "```py\n" + "".join(f"  {line}\n" for line in SOURCE.splitlines()) + "```",
    ],
)
async def test_a_module_is_read_without_what_surrounds_it(text: str) -> None:
    scope: dict[str, Any] = {}
    exec(read_source(text, "f"), scope)
    assert scope["f"]("Oslo") == {"n": 5}


async def test_a_module_that_needs_no_repair_stays_as_it_is() -> None:
    quoted = f'"""Module:\n\n```python\n{SOURCE}```\n"""\n{SOURCE}'
    assert read_source(quoted, "f") == quoted


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"```python\n{SOURCE}```\nor\n```python\n{SOURCE}```", "2 code blocks"),
        (f"```python\n{SOURCE}", "not Python"),
        (SOURCE.replace("\n", "\\n"), "not Python"),
        (SOURCE.replace("'Oslo'", "“Oslo”"), "not Python"),
        (SOURCE.replace("def f", "def g"), "defines no function 'f'"),
        ("```python\n```", "defines no function 'f'"),
    ],
)
async def test_what_has_several_readings_is_no_module(text: str, problem: str) -> None:
    with pytest.raises(Rejected, match=problem):
        read_source(text, "f")


async def test_tool_code_is_stored_without_its_code_block(pool: SandboxPool) -> None:
    teacher = Rules(ToolCodeAnswer=lambda given, v: ToolCodeAnswer(f"```python\n{given.code}```"))
    (built,) = await implement(CAPITAL, context(pool, teacher))
    assert "```" not in built.tools[0].tool.code and built.tools[0].calls[0].output == {"capital": "Tokyo"}


async def test_markup_in_an_answer_goes_back_to_the_teacher_and_is_counted(pool: SandboxPool) -> None:
    def leaking(given: ToolDocumentAnswer, variables: Any) -> ToolDocumentAnswer:
        return given if variables["feedback"] else replace(given, description=f"{given.description}<|im_end|>")

    teacher = Rules(ToolDocumentAnswer=leaking)
    (built,) = await implement(CAPITAL, context(pool, teacher))
    assert "<|im_end|>" not in built.tools[0].tool.spec.description
    feedback = [text for name, text in teacher.feedback if name == "ToolDocumentAnswer"]
    assert feedback[1].startswith("`description` holds the special token '<|im_end|>'; leave it out")
    always = Rules(ToolDocumentAnswer=lambda given, v: replace(given, description=f"{given.description}</think>"))
    with pytest.raises(Rejected, match="thinking tag") as error:
        await implement(CAPITAL, context(pool, always))
    assert error.value.reason == "leaked_markup"


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
            {
                "ReferenceCallAnswer": lambda given, v: ReferenceCallAnswer(
                    argument_list({"town": "x"}), given.other_arguments
                )
            },
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


async def test_tools_that_differ_do_not_become_one(pool: SandboxPool) -> None:
    """The teacher puts two different look-ups into one cluster; it is told, and asked again."""
    (built,) = await implement(PAIR, context(pool))

    def all_in_one(given: IntentClustersAnswer, variables: Any) -> IntentClustersAnswer:
        return given if variables["feedback"] else IntentClustersAnswer([Cluster("country", [1, 2, 3])])

    teacher = Rules(IntentClustersAnswer=all_in_one)
    (merged,) = await merge(built, context(pool, teacher, merge_similarity=0.9))
    assert len(merged.tools) == 2
    feedback = [text for name, text in teacher.feedback if name == "IntentClustersAnswer"]
    assert len(feedback) == 2 and "similarity" in feedback[1] and "area_of_country" in feedback[1]
    cities = draft(STEP("capital_of_country", "Japan"), STEP("element_of_atomic_number", "8"))
    (built,) = await implement(cities, context(pool))
    teacher = Rules(IntentClustersAnswer=lambda given, v: IntentClustersAnswer([Cluster("all", [1, 2])]))
    with pytest.raises(Rejected, match="different_schemas"):
        await merge(built, context(pool, teacher))


async def test_twins_are_found_by_running_them(pool: SandboxPool) -> None:
    (built,) = await implement(CAPITAL, context(pool))

    def named(name: str, code: str, type: str = "string") -> CodeTool:
        properties = {"n": {"type": type}}
        return CodeTool(ToolSpec(name, name, {"type": "object", "properties": properties, "required": ["n"]}), code)

    twin = HONEST.replace("capital(c)", "seat(n)").replace("T[c]", "T[n]")
    area = fact_tool(all_relations()["area_of_country"], ["Japan"], "en")
    tools = [named("seat", twin), area, named("typed", twin.replace("seat", "typed"), "integer")]
    assert await twins_of(built, tools, context(pool)) == {"seat"}
    # Nor does it help one that all of its arguments may be left out, or stand in another order.
    free = CodeTool(replace(named("free", "").spec, parameters={**SPEC.parameters, "required": []}),
                    "def free(c=None):\n    return {'Japan': 'Tokyo', None: 'Tokyo'}[c]\n")  # fmt: skip
    assert await twins_of(built, [free], context(pool)) == {"free"}
    # One that takes the process with it hides nothing of the others, nor does one without JSON.
    crashing = named("crashing", "import os\ndef crashing(n):\n    os.abort()\n")
    no_json = named("no_json", "def no_json(n):\n    return object()\n")
    assert await twins_of(built, [crashing, no_json, *tools], context(pool)) == {"seat"}


def finished(entities: list[str], **changes: Any) -> ToolsetDraft:
    one = replace(CAPITAL.decomposition, entities=entities, answer=Answer("Tokyo"), **changes)
    call = ReferenceCall(1, "capital", {"c": "Japan"}, {"capital": "Tokyo"}, "string")
    return ToolsetDraft(
        Draft(one, ["g"]), [NeededTool("capital", "g", CodeTool(SPEC, HONEST), [call], [{"c": "Italy"}])], {}
    )


async def test_a_finished_environment_is_played_before_it_is_stored(pool: SandboxPool) -> None:
    right = finished(["Japan"])
    (environment,) = await finish(right, context(pool))
    assert environment.split == "train" and environment.difficulty == Difficulty(1, 0.0, 0.0)
    (tool,) = right.tools
    (call,) = tool.calls
    swapped = HONEST.replace("Tokyo", "Kyoto")
    generous = HONEST.replace("T[c]", "T.get(c) if c == 'Japan' else list(T.values())")
    for changes, reason in [
        ({"calls": [replace(call, output={"capital": "Rome"})]}, "replay_failed"),
        ({"calls": [replace(call, rule="number")]}, "replay_failed"),
        ({"tool": CodeTool(SPEC, swapped)}, "replay_failed"),
        ({"tool": CodeTool(SPEC, generous)}, "wrong_policy_scores"),
    ]:
        with pytest.raises(Rejected, match=reason):
            await finish(replace(right, tools=[replace(tool, **changes)]), context(pool))
    other_end = replace(right.draft, decomposition=replace(right.draft.decomposition, answer=Answer("Lima")))
    with pytest.raises(Rejected, match="answer_not_reached"):
        await finish(replace(right, draft=other_end), context(pool))
    with pytest.raises(Rejected, match="name_collision"):
        await finish(replace(right, distractors={"high": [CodeTool(SPEC, HONEST)]}), context(pool))


async def test_a_dependency_has_to_be_used(pool: SandboxPool) -> None:
    """The second call could be made without the first: its arguments hold nothing that the first has found."""
    steps = [
        replace(CAPITAL.decomposition.sub_questions[0], answer=Answer("Tokyo")),
        replace(CAPITAL.decomposition.sub_questions[0], id=2, hop=2, depends_on=[1], answer=Answer("Rome")),
    ]
    built = finished(["Japan"], sub_questions=steps)
    (tool,) = built.tools
    second = ReferenceCall(2, "capital", {"c": "Italy"}, {"capital": "Rome"}, "string")
    both = replace(tool, calls=[*tool.calls, second], negative_arguments=[{"c": "Italy"}, {"c": "Japan"}])
    with pytest.raises(Rejected, match="dependency_unused"):
        await finish(replace(built, tools=[both]), context(pool))


async def test_one_call_does_not_answer_two_sub_questions(pool: SandboxPool) -> None:
    """Two names of one country: whoever asks for one has both answers, and would have a precision of 2."""
    code = HONEST.replace("'Japan': 'Tokyo'", "'Japan': 'Tokyo', 'Nippon': 'Tokyo'")
    step = replace(CAPITAL.decomposition.sub_questions[0], answer=Answer("Tokyo"))
    built = finished(["Japan"], sub_questions=[step, replace(step, id=2, question="And of Nippon?")])
    (tool,) = built.tools
    calls = [*tool.calls, ReferenceCall(2, "capital", {"c": "Nippon"}, {"capital": "Tokyo"}, "string")]
    both = replace(tool, tool=CodeTool(SPEC, code), calls=calls, negative_arguments=[{"c": "Italy"}, {"c": "Italy"}])
    with pytest.raises(Rejected, match="shared_call"):
        await finish(replace(built, tools=[both]), context(pool))


async def test_wrong_policies_get_what_the_formula_says(pool: SandboxPool, environments: list[ToolEnvironment]) -> None:
    """Computed anew: one call of each tool too many, irrelevant ones included, and the reference calls of the
    others."""
    for one in environments[:6]:
        right = await solve(one, pool)
        irrelevant = [tool for band in one.distractors.values() for tool in band]
        extra = [MadeCall(tool.spec.name, False) for tool in [*one.tools, *irrelevant]]
        n, c = len(right), len(right) + len(extra)
        assert score(one, [*right, *extra]).value == pytest.approx(2 * (n / c) / (1 + n / c), abs=1e-6)
        assert score(one, []).value == 0.0 == score(one, extra).value


async def test_difficulty_is_recorded(environments: list[ToolEnvironment]) -> None:
    for one in environments:
        assert one.difficulty is not None and one.quality is not None and one.quality.mean == 1.0
        assert one.difficulty.hops == max(step.hop for step in one.sub_questions)
        assert (one.difficulty.parallel_share > 0) == one.structure.startswith("parallel")
        assert 0.0 < one.difficulty.distractor_closeness < 1.0 and one.difficulty.solve_rate is None
        assert all(call.rule == match(call.output, one.sub_questions[call.sub_question - 1].answer)
                   for call in one.reference_calls)  # fmt: skip


async def test_a_plain_document_is_the_relations_own() -> None:
    """The SFT track sees the same tools, from `fact_servers`."""
    variables = {"step": CAPITAL.decomposition.sub_questions[0], "feedback": ""}
    given = HANDLERS["ToolDocumentAnswer"](variables, "en", rng_for(0))
    assert isinstance(given, ToolDocumentAnswer) and given.name == "capital_of_country"
