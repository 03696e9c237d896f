"""The parts of environment synthesis: graph checks, judges, prompts, partition, seeds."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from synthesis.core.records import (
    Answer,
    CodeTool,
    Decomposition,
    Difficulty,
    QualityScores,
    ReferenceCall,
    Structure,
    SubQuestion,
    ToolEnvironment,
    ToolSpec,
)  # fmt: skip
from synthesis.core.stages import Rejected, rng_for
from synthesis.environments import dependency_graph, teacher_answers
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, best, decompose, distinct, question_seeds
from synthesis.environments.drafts import Draft
from synthesis.environments.leaks import leaked
from synthesis.environments.proof import check_arguments
from synthesis.environments.teacher_answers import ANSWERS, DecompositionAnswer
from synthesis.environments.validate import validate_draft
from synthesis.offline import grammar, plans, world_author
from synthesis.offline.environment_author import HANDLERS
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.facts.tools import answer_of, fact_tool, table_subjects
from synthesis.pipeline.partition import Partition
from synthesis.pipeline.teacher import TeacherError, prompt_name, render_prompt


class Rules:
    """The offline teacher of this pipeline alone; remembers what was asked, and `changes` answers on their way out."""

    def __init__(self, **changes: Any) -> None:
        self.asked: list[tuple[type, dict[str, Any], str]] = []
        self.changes = changes

    async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
        self.asked.append((answer, dict(variables), language))
        given = HANDLERS[answer.__name__](variables, language, rng_for(seed, answer.__name__))
        change = self.changes.get(answer.__name__)
        return change(given, variables) if change else given


def context(teacher: Any = None, **config: Any) -> EnvironmentContext:
    return EnvironmentContext(EnvironmentsConfig(**config), teacher or Rules(), sandbox=None, seed=0)  # type: ignore[arg-type]


def step(id: int, *depends_on: int, hop: int = 1, intent: str = "r", answer: Any = "a", text: str = "") -> SubQuestion:
    return SubQuestion(id, text or f"question {id}", Answer(answer), list(depends_on), hop, True, intent)


# ---------------------------------------------------------------------------------------------------------------------
# The graph

CHAIN = [step(1, intent="a", answer="x"), step(2, 1, hop=2, intent="b", answer="y")]
FORK = [*CHAIN, step(3, 1, hop=2, intent="c", answer="z")]


@pytest.mark.parametrize(
    ("nodes", "structure", "signature"),
    [
        ([step(1)], "single_hop", "r"),
        ([step(1, intent="b"), step(2, intent="a")], "parallel_single_hop", "a|b"),
        (CHAIN, "multi_hop", "a>b"),
        (FORK, "parallel_multi_hop", "a>b|a>c"),
        ([step(1, intent="b"), step(2, intent="a"), step(3, 1, 2, hop=2, intent="c")], "parallel_multi_hop", "(a&b)>c"),
    ],
)
def test_structure_and_signature(nodes: list[SubQuestion], structure: Structure, signature: str) -> None:
    assert dependency_graph.structure_of(dependency_graph.graph_of(nodes)) == structure
    assert dependency_graph.signature_of(nodes) == signature


@pytest.mark.parametrize(
    ("nodes", "final", "structure", "reason"),
    [
        ([], "a", "single_hop", "no_sub_questions"),
        ([step(1), step(1)], "a", "parallel_single_hop", "bad_ids"),
        ([step(1, 7)], "a", "single_hop", "bad_ids"),
        ([step(1, 1)], "a", "single_hop", "bad_ids"),
        ([step(1, 2), step(2, 1)], "a", "multi_hop", "cyclic"),
        ([step(1, hop=2)], "a", "single_hop", "wrong_hop"),
        ([CHAIN[0], msgspec.structs.replace(CHAIN[1], hop=1)], "y", "multi_hop", "wrong_hop"),
        ([step(1, answer="")], "a", "single_hop", "empty_answer"),
        ([step(1, answer=[])], "a", "single_hop", "empty_answer"),
        (CHAIN, "y", "parallel_multi_hop", "wrong_structure"),
        ([*CHAIN, step(3, 2, hop=3), step(4, 3, hop=4)], "a", "multi_hop", "hop_budget"),
        ([step(1, text="Same?"), step(2, text="same")], ["a"], "parallel_single_hop", "repeated_question"),
        (FORK, ["y"], "parallel_multi_hop", "orphan_sub_question"),
        (CHAIN, ["y", "q"], "multi_hop", "unconnected_answer"),
        ([step(1, answer="It is 5.")], "It is 5.", "single_hop", ""),
        ([step(1, answer="It is about 5 miles.")], "It is about 5 miles.", "single_hop", "sentence_answer"),
        ([step(1, answer="答案是五公里。")], "答案是五公里。", "single_hop", "sentence_answer"),
        ([step(1, answer="x")], ["x", "This one was found in 1999."], "single_hop", "sentence_answer"),
    ],
)
def test_bad_graphs(nodes: list[SubQuestion], final: Any, structure: Structure, reason: str) -> None:
    if not reason:
        assert dependency_graph.check(nodes, Answer(final), structure, min_hops=2, max_hops=3) == structure
        return
    with pytest.raises(Rejected) as rejection:
        dependency_graph.check(nodes, Answer(final), structure, min_hops=2, max_hops=3)
    assert rejection.value.reason == reason


def test_the_difficulty_has_the_hops_and_the_share_of_parallel_steps() -> None:
    found = [dependency_graph.difficulty_of(nodes, 0.25) for nodes in (CHAIN[:1], CHAIN, FORK)]
    assert found == [Difficulty(1, 0.0, 0.25), Difficulty(2, 0.0, 0.25), Difficulty(2, 0.6667, 0.25)]


def test_a_chain_may_also_be_too_short() -> None:
    with pytest.raises(Rejected, match="hop_budget: 2 hops; asked for 3 to 4"):
        dependency_graph.check(CHAIN, Answer("y"), "multi_hop", min_hops=3, max_hops=4)


def test_good_graphs() -> None:
    assert dependency_graph.check(FORK, Answer(["y", "z"]), None, min_hops=2, max_hops=3) == "parallel_multi_hop"
    # A question that is given has the hops that it has.
    chain = [step(1, answer="a1")] + [step(n, n - 1, hop=n, answer=f"a{n}") for n in range(2, 6)]
    assert dependency_graph.check(chain, Answer("a5"), None, min_hops=2, max_hops=3) == "multi_hop"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Tokyo", False),
        ("Washington D.C.", False),
        ("St. Vincent and the Grenadines", False),
        ("The Lord of the Rings: The Fellowship of the Ring", False),
        ("1,234.5 km", False),
        ("中华人民共和国", False),
        ("The capital of Japan is Tokyo.", True),
        ("Is it really so?", True),
        ("one two three four five six seven eight nine ten eleven twelve thirteen", True),
        ("日本的首都是东京。", True),
        ("因为该国人口最多而且面积也最大所以它被选为这个地区最重要的国家之一并且多年来一直如此", True),
    ],
)
def test_sentences_are_no_answers(text: str, sentence: bool) -> None:
    assert dependency_graph.is_sentence(text) == sentence


# ---------------------------------------------------------------------------------------------------------------------
# Decompose


def seed_of(structure: Structure, language: Any = "en", split: Any = "train", n: int = 0) -> QuestionSeed:
    return QuestionSeed(f"q{n}", language, structure, "", split)


def drafts(language: Any = "en", n: int = 3, **config: Any) -> list[Draft]:
    structures = EnvironmentsConfig().structures
    made = [
        asyncio.run(decompose(seed_of(structure, language, split, i), context(**config)))
        for structure in structures
        for split in ("train", "held_out")
        for i in range(n)
    ]
    return [one for each in made for one in each]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_decompositions_are_true_and_on_their_side(language: Any) -> None:
    partition = EnvironmentsConfig().partition
    found = drafts(language)
    for draft in found:
        one = draft.decomposition
        plan = grammar.parse(one.question, language)
        values = plans.evaluate(plan)
        assert one.signature == plans.signature(plan)
        assert Counter(str(s.answer.value) for s in one.sub_questions) == Counter(map(str, values))
        assert len(draft.domains) == len(one.sub_questions)
        assert partition.split(one.entities, one.signature) is not None
        # Every subject is an entity: the named ones and the intermediate values.
        inside = {str(values[s.argument]) if isinstance(s.argument, int) else s.argument for s in plan}
        assert set(one.entities) == inside
    splits = Counter(partition.split(d.decomposition.entities, d.decomposition.signature) for d in found)
    assert splits == {"train": 12, "held_out": 12}


def test_repetitions_are_dropped() -> None:
    found = drafts(n=1)
    reworded = [msgspec.structs.replace(d.decomposition, question=f"? {i}") for i, d in enumerate(found)]
    again = [Draft(one, draft.domains) for one, draft in zip(reworded, found, strict=True)]
    kept, dropped = distinct([*found, *found, *again])
    assert list(kept) == found and dropped == {"duplicate": 2 * len(found)}


def test_question_seeds_have_the_configured_shares() -> None:
    config = EnvironmentsConfig(count=500)
    seeds = question_seeds(config, 3)
    assert seeds == question_seeds(config, 3) != question_seeds(config, 4)
    assert len({one.id for one in seeds}) == 500
    assert Counter(one.split for one in seeds) == {"train": 400, "held_out": 100}
    assert Counter(one.language for one in seeds) == {"en": 356, "zh": 144}
    assert Counter(one.structure for one in seeds)["parallel_multi_hop"] == 239


def test_an_impossible_wish_is_rejected_not_ignored() -> None:
    with pytest.raises(Rejected, match="teacher_failed"):
        asyncio.run(decompose(seed_of("multi_hop"), _failing(relations=("weekday_of_date",))))


def _failing(**config: Any) -> EnvironmentContext:
    class Teacher(Rules):
        async def ask(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().ask(*args, **kwargs)
            except ValueError as error:
                raise TeacherError(str(error)) from error

    return context(Teacher(), **config)


@pytest.mark.parametrize(
    "change",
    [
        {"held_out_fraction": 1.5},
        {"languages": {}},
        {"structures": {"multi_hop": -1.0}},
        {"min_hops": 1},
        {"min_hops": 4},
        {"max_branches": 1},
        {"low_cut": 0.9},
        {"table_rows": 1},
        {"quality_percentile": 90.0},
        {"merge_similarity": -1.0},
        {"distractors": {"high": -1}},
        {"questions": "a.jsonl", "taxonomy": "b.json"},
    ],
)
def test_bad_config_names_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        EnvironmentsConfig(**change)


# ---------------------------------------------------------------------------------------------------------------------
# Validate


def _edit(draft: Draft, index: int, **changes: Any) -> Draft:
    one = draft.decomposition
    steps = [msgspec.structs.replace(s, **changes) if i == index else s for i, s in enumerate(one.sub_questions)]
    return msgspec.structs.replace(draft, decomposition=msgspec.structs.replace(one, sub_questions=steps))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_true_decompositions_get_full_marks(language: Any) -> None:
    for draft in drafts(language, n=2):
        (judged,) = asyncio.run(validate_draft(draft, context()))
        assert judged.decomposition.quality is not None and judged.decomposition.quality.mean == 1.0


@pytest.fixture(scope="module")
def chain() -> Draft:
    plan = (plans.Step("capital_of_country", "Japan"), plans.Step("population_of_city", 0))
    rng = rng_for(0)
    values = plans.evaluate(plan)
    texts = [grammar.sub_question(plan, i, rng, "en") for i in range(2)]
    steps = [
        SubQuestion(i + 1, texts[i], Answer(values[i]), [1] if i else [], i + 1, True, plan[i].relation)
        for i in range(2)
    ]
    question = grammar.question(plan, rng, "en")
    one = Decomposition(
        "d", "en", "geography", "multi_hop", question, Answer(values[1]), steps, ["Japan", "Tokyo"], "s"
    )
    return Draft(one, ["geography", "geography"])


@pytest.mark.parametrize(
    ("index", "changes", "indicator"),
    [
        (1, {"answer": Answer(1)}, "completeness"),
        (1, {"question": "What is the time zone of Tokyo?"}, "completeness"),
        (1, {"question": "What is the city population of Osaka?"}, "dependency_consistency"),
        (1, {"question": "What is the city population of Osaka?"}, "sequential_rationality"),
        (1, {"question": "What are the city population of Tokyo and the latitude of Tokyo?"}, "atomicity"),
        (1, {"question": "How big is it?"}, "atomicity"),
    ],
)
def test_each_indicator_finds_its_fault(chain: Draft, index: int, changes: dict[str, Any], indicator: str) -> None:
    (good,) = asyncio.run(validate_draft(chain, context()))
    assert good.decomposition.quality is not None and good.decomposition.quality.mean == 1.0
    (judged,) = asyncio.run(validate_draft(_edit(chain, index, **changes), context(quality_threshold=0.0)))
    assert getattr(judged.decomposition.quality, indicator) < 1.0
    if index == 1 and "answer" in changes:
        with pytest.raises(Rejected, match="low_quality"):
            asyncio.run(validate_draft(_edit(chain, index, **changes), context()))


def test_a_step_that_others_need_must_need_a_tool(chain: Draft) -> None:
    with pytest.raises(Rejected, match="tool_free_dependency"):
        asyncio.run(validate_draft(_edit(chain, 0, question="Which one is it?"), context()))
    # A leaf may go without one.
    (judged,) = asyncio.run(
        validate_draft(_edit(chain, 1, question="Which one is it?"), context(quality_threshold=0.0))
    )
    assert [s.needs_tool for s in judged.decomposition.sub_questions] == [True, False]


def test_the_best_are_kept_by_percentile(chain: Draft) -> None:
    def scored(mean: float, n: int) -> Draft:
        quality = QualityScores(mean, mean, mean, mean)
        return Draft(msgspec.structs.replace(chain.decomposition, id=f"d{n}", quality=quality), chain.domains)

    ten = [scored(n / 10, n) for n in range(10)]
    for percentile, kept in ((0.0, 10), (0.5, 5), (0.85, 1), (0.9, 1), (1.0, 1)):
        found, dropped = best(ten, percentile)
        assert list(found) == ten[10 - kept :] and dropped == ({"below_percentile": 10 - kept} if kept < 10 else {})
    alike = [scored(1.0, n) for n in range(10)]
    found, dropped = best(alike, 0.9)
    assert list(found) == alike and not dropped and not any(best([], 0.9))


def test_judges_fail_closed(chain: Draft) -> None:
    """A verdict about other steps is asked for again, with what was wrong, then rejects; it never counts as good."""
    teacher = Rules(AtomicityAnswer=lambda given, _: teacher_answers.AtomicityAnswer(given.steps[:1]))
    with pytest.raises(Rejected, match="wrong_ids"):
        asyncio.run(validate_draft(chain, context(teacher, attempts=2)))
    asked = [variables for answer, variables, _ in teacher.asked if answer is teacher_answers.AtomicityAnswer]
    assert len(asked) == 2 and asked[0]["feedback"] == "" and "[1, 2]" in asked[1]["feedback"]
    teacher = Rules(CompletenessAnswer=lambda given, _: msgspec.structs.replace(given, complete=not given.complete))
    with pytest.raises(Rejected, match="contradictory"):
        asyncio.run(validate_draft(chain, context(teacher)))


# ---------------------------------------------------------------------------------------------------------------------
# Prompts

STEP = step(2, 1, hop=2, answer="Oslo", text="MARK-STEP")
SPEC = ToolSpec("t", "MARK-TOOL", {"type": "object", "properties": {}, "required": []})
CALL = teacher_answers.ReferenceCallAnswer(
    [teacher_answers.Argument("x", "MARK-CALL")], [teacher_answers.Argument("x", "b")]
)
ONE = Decomposition("d", "en", "g", "multi_hop", "MARK-MAIN", Answer("Oslo"), [step(1), STEP], [], "s")
WORLD = ToolEnvironment(
    "w", "en", "g", "multi_hop", "MARK-MAIN", Answer("Oslo"), [step(1), STEP], [CodeTool(SPEC, "MARK-CODE")],
    [ReferenceCall(1, "t", {}, "Oslo", "string")], {}, [], "s", "train",
)  # fmt: skip
ABOUT = {"step": STEP, "dependencies": [step(1)], "domain": "MARK-DOMAIN", "table_rows": 24, "seed": 0}
PROMPT_VARIABLES: dict[type, tuple[dict[str, Any], list[str]]] = {
    DecompositionAnswer: (
        {
            "structure": "multi_hop", "min_hops": 2, "max_hops": 3, "min_branches": 2, "max_branches": 3,
            "domain": "MARK-DOMAIN", "knowledge": "MARK-TEXT", "relations": (), "split": "train", "partition": None,
            "question": "",
        },
        ["MARK-DOMAIN", "MARK-TEXT", "multi_hop"],
    ),
    teacher_answers.AugmentedQuestionAnswer: (
        {
            "structure": "multi_hop", "min_hops": 2, "max_hops": 3, "min_branches": 2, "max_branches": 3,
            "environment": WORLD,
        },
        ["MARK-MAIN", "MARK-TOOL", "MARK-CODE", "multi_hop"],
    ),
    teacher_answers.ToolNecessityAnswer: ({"decomposition": ONE}, ["MARK-MAIN", "MARK-STEP"]),
    teacher_answers.DependencyConsistencyAnswer: ({"question": "MARK-MAIN", **ABOUT}, ["MARK-MAIN", "MARK-STEP"]),
    teacher_answers.AtomicityAnswer: ({"decomposition": ONE}, ["MARK-STEP"]),
    teacher_answers.SequentialRationalityAnswer: ({"decomposition": ONE}, ["MARK-STEP"]),
    teacher_answers.CompletenessAnswer: ({"decomposition": ONE}, ["MARK-MAIN", "Oslo"]),
    teacher_answers.ToolDocumentAnswer: (ABOUT, ["MARK-STEP", "MARK-DOMAIN"]),
    teacher_answers.HarderToolDocumentAnswer: ({**ABOUT, "document": SPEC}, ["MARK-TOOL"]),
    teacher_answers.ReferenceCallAnswer: ({**ABOUT, "document": SPEC}, ["MARK-TOOL", "Oslo"]),
    teacher_answers.ToolCodeAnswer: ({**ABOUT, "document": SPEC, "call": CALL}, ["MARK-TOOL", "MARK-CALL", "24"]),
    teacher_answers.IntentClustersAnswer: ({"steps": [STEP], "tools": [SPEC]}, ["MARK-STEP", "MARK-TOOL"]),
    teacher_answers.MergedToolAnswer: (
        {**ABOUT, "steps": [STEP], "document": SPEC, "tools": [CodeTool(SPEC, "MARK-CODE")], "calls": [CALL]},
        ["MARK-CODE", "MARK-CALL", "MARK-STEP"],
    ),
    teacher_answers.WorldAnswer: ({"domain": "MARK-DOMAIN"}, ["MARK-DOMAIN", "STATE", "check(before, after)"]),
}  # fmt: skip


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("answer", ANSWERS, ids=prompt_name)
def test_prompts_render(answer: type, language: Any) -> None:
    variables, marks = PROMPT_VARIABLES[answer]
    text = render_prompt(answer, {**variables, "feedback": ""}, language)
    assert all(mark in text for mark in marks)
    again = render_prompt(answer, {**variables, "feedback": "MARK-FEEDBACK"}, language)
    assert again.startswith(text.rstrip()) and "MARK-FEEDBACK" in again
    # The tool's author must not see the answer: it could end up in the document.
    assert answer is not teacher_answers.ToolDocumentAnswer or "Oslo" not in text


def test_every_answer_has_a_rule_and_a_schema() -> None:
    of_models_alone = {"AugmentedQuestionAnswer"}
    assert {*HANDLERS, *world_author.HANDLERS} == {one.__name__ for one in ANSWERS} - of_models_alone
    for one in ANSWERS:
        # Strict structured output allows no open objects.
        assert "additionalProperties" not in str(msgspec.json.schema(one))


# ---------------------------------------------------------------------------------------------------------------------
# Tools


def test_fact_tables_hold_the_needed_row_and_another_value() -> None:
    for relation in all_relations().values():
        needed = list(relation.rows)[-1]
        table = table_subjects(relation, needed, 24, seed=0)
        assert needed in table and len(table) <= 24 and len(set(table)) == len(table)
        assert len({str(relation.rows[subject]) for subject in table}) > 1
        assert table == table_subjects(relation, needed, 24, seed=0)


def test_documents_that_give_the_answer_away() -> None:
    spec = ToolSpec("t", "Code of a country.", {"properties": {"c": {"type": "string", "enum": ["NO", "SE"]}}})
    assert leaked(spec, [Answer("DK"), Answer("NO")], "en") == "NO"
    assert leaked(spec, [Answer("DK")], "en") == leaked(spec, [], "en") == ""
    defaults = ToolSpec("t", "Code.", {"properties": {"c": {"type": "string", "default": "NO"}}})
    assert leaked(defaults, [Answer("NO")], "en") == "NO"
    inside = {"properties": {"c": {"anyOf": [{"type": "array", "items": {"examples": ["of Oslo"]}}]}}}
    assert leaked(ToolSpec("t", "Code.", inside), [Answer("Oslo")], "en") == "of Oslo"
    few = ToolSpec("t", "Code.", {"properties": {"c": {"description": "City, e.g. Oslo"}}})
    assert leaked(few, [Answer("Oslo")], "en") == "City, e.g. Oslo" and not leaked(few, [Answer("Rome")], "en")
    long = ToolSpec("t", f"{'It is a tool. ' * 2_000}Oslo is such a city.", {"properties": {}})
    assert leaked(long, [Answer("Oslo")], "en") and not leaked(long, [Answer("Rome")], "en")
    assert leaked(ToolSpec("weather_in_oslo", "Code.", {"properties": {}}), [Answer("Oslo")], "en") == "weather in oslo"
    relation = all_relations()["capital_of_country"]
    assert leaked(fact_tool(relation, ["Japan"], "en").spec, [Answer("Tokyo")], "en") == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": "x"}, ""),
        ({"a": "x", "n": 1}, ""),
        ({}, "t: 'a' is a required property"),
        ({"a": 1}, "t: argument 'a': 1 is not of type 'string'"),
        ({"a": "x", "n": True}, "t: argument 'n': True is not of type 'integer'"),
        ({"a": "x", "b": 1}, "t: unknown argument 'b'; known arguments: a, f, n"),
        ({"a": "x", "f": "z"}, "t: argument 'f': 'z' is not one of"),
    ],
)
def test_arguments_are_checked_by_the_schema(arguments: dict[str, Any], problem: str) -> None:
    properties = {"a": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": "string", "enum": ["y"]}}
    with pytest.raises(Rejected, match=f"bad_call: {problem}") if problem else nullcontext():
        check_arguments(ToolSpec("t", "", {"properties": properties, "required": ["a"]}), arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Partition


def test_partition_is_a_function_of_the_folded_name() -> None:
    partition = Partition("s", 0.3, 0.3)
    names = [f"e{i}" for i in range(4000)]
    held_out = [name for name in names if partition.split_of_entity(name) == "held_out"]
    assert 1100 < len(held_out) < 1300
    assert all(partition.split_of_entity(f" {name.upper()}") == "held_out" for name in held_out)
    assert partition.split(held_out[:2], "x") in ("held_out", None)
    assert partition.split([held_out[0], next(n for n in names if n not in held_out)], "x") is None
    assert Partition("s", 0.0, 0.0).split(names, "x") == "train"


def test_by_intent_no_look_up_of_a_held_out_question_is_trained_on() -> None:
    partition = Partition("s", 0.0, 0.3, by="intent")
    intents = [f"i{n}" for n in range(200)]
    held_out = [one for one in intents if partition.split_of_intent(one) == "held_out"]
    train = [one for one in intents if partition.split_of_intent(one) == "train"]
    assert 40 < len(held_out) < 80 and len(held_out) + len(train) == 200
    assert partition.split([], f"({train[0]}&{train[1]})>{train[2]}|{train[3]}") == "train"
    assert partition.split([], f"{held_out[0]}>{held_out[1]}") == "held_out"
    assert partition.split([], f"{train[0]}>{held_out[0]}") is None
    assert Partition("s", 0.0, 0.3).split_of_intent("i1") is None


def test_answers_are_typed() -> None:
    relations = all_relations()
    assert answer_of(relations["capital_of_country"], "Japan") == Answer("Tokyo")
    population = answer_of(relations["population_of_city"], "Tokyo")
    assert population.unit == "people" and isinstance(population.value, int) and population.tolerance == 0.0
