"""The parts of environment synthesis: graph checks, judges, prompts, partition, seeds, similarity bands."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from synthesis.environments import answers, graph
from synthesis.environments.answers import ANSWERS, DecompositionAnswer
from synthesis.environments.config import Context, Draft, EnvironmentsConfig, NeededTool
from synthesis.environments.decompose import QuestionSeed, decompose, distinct, question_seeds
from synthesis.environments.distract import Candidate, Index
from synthesis.environments.embedding import HashedEmbedder
from synthesis.environments.fact_tools import answer_of, fact_tool, table_subjects
from synthesis.environments.partition import Partition
from synthesis.environments.proof import check_arguments, leaked
from synthesis.environments.validate import validate
from synthesis.facts.relations import all_relations
from synthesis.offline import grammar
from synthesis.offline.environments import HANDLERS
from synthesis.records import Answer, CodeTool, Decomposition, Structure, SubQuestion, ToolSpec
from synthesis.runner import Rejected, rng_for
from synthesis.teacher import TeacherError, prompt_name, render_prompt


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


def context(teacher: Any = None, **config: Any) -> Context:
    return Context(EnvironmentsConfig(**config), teacher or Rules(), pool=None, seed=0)  # type: ignore[arg-type]


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
    assert graph.structure_of(graph.graph_of(nodes)) == structure
    assert graph.signature_of(nodes) == signature


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
    ],
)
def test_bad_graphs(nodes: list[SubQuestion], final: Any, structure: Structure, reason: str) -> None:
    with pytest.raises(Rejected) as rejection:
        graph.check(nodes, Answer(final), structure, min_hops=2, max_hops=3)
    assert rejection.value.reason == reason


def test_good_graph() -> None:
    graph.check(FORK, Answer(["y", "z"]), "parallel_multi_hop", min_hops=2, max_hops=3)


# ---------------------------------------------------------------------------------------------------------------------
# Decompose


def seed_of(structure: Structure, language: Any = "en", side: Any = "train", n: int = 0) -> QuestionSeed:
    return QuestionSeed(f"q{n}", language, structure, "", side)


def drafts(language: Any = "en", n: int = 3, **config: Any) -> list[Draft]:
    structures = EnvironmentsConfig().structures
    made = [
        asyncio.run(decompose(seed_of(structure, language, side, i), context(**config)))
        for structure in structures
        for side in ("train", "held_out")
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
        values = grammar.evaluate(plan)
        assert one.signature == grammar.signature(plan)
        assert Counter(str(s.answer.value) for s in one.sub_questions) == Counter(map(str, values))
        assert len(draft.domains) == len(one.sub_questions)
        assert partition.side(one.entities, one.signature) is not None
        # Every subject is an entity: the named ones and the intermediate values.
        inside = {str(values[s.argument]) if isinstance(s.argument, int) else s.argument for s in plan}
        assert set(one.entities) == inside
    sides = Counter(partition.side(d.decomposition.entities, d.decomposition.signature) for d in found)
    assert sides == {"train": 12, "held_out": 12}


def test_repetitions_are_dropped() -> None:
    found = drafts(n=1)
    reworded = [msgspec.structs.replace(d.decomposition, question=f"? {i}") for i, d in enumerate(found)]
    again = [Draft(one, draft.domains) for one, draft in zip(reworded, found, strict=True)]
    kept, dropped = distinct([*found, *found, *again])
    assert kept == found and dropped == {"duplicate": 2 * len(found)}


def test_question_seeds_have_the_configured_shares() -> None:
    config = EnvironmentsConfig(count=500)
    seeds = question_seeds(config, 3)
    assert seeds == question_seeds(config, 3) != question_seeds(config, 4)
    assert len({one.id for one in seeds}) == 500
    assert Counter(one.side for one in seeds) == {"train": 400, "held_out": 100}
    assert Counter(one.language for one in seeds) == {"en": 356, "zh": 144}
    assert Counter(one.structure for one in seeds)["parallel_multi_hop"] == 239


def test_an_impossible_wish_is_rejected_not_ignored() -> None:
    with pytest.raises(Rejected, match="teacher_failed"):
        asyncio.run(decompose(seed_of("multi_hop"), _failing(relations=("weekday_of_date",))))


def _failing(**config: Any) -> Context:
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
        (judged,) = asyncio.run(validate(draft, context()))
        assert judged.decomposition.quality is not None and judged.decomposition.quality.mean == 1.0


@pytest.fixture(scope="module")
def chain() -> Draft:
    plan = (grammar.Step("capital_of_country", "Japan"), grammar.Step("population_of_city", 0))
    rng = rng_for(0)
    values = grammar.evaluate(plan)
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
    (good,) = asyncio.run(validate(chain, context()))
    assert good.decomposition.quality is not None and good.decomposition.quality.mean == 1.0
    (judged,) = asyncio.run(validate(_edit(chain, index, **changes), context(quality_threshold=0.0)))
    assert getattr(judged.decomposition.quality, indicator) < 1.0
    if index == 1 and "answer" in changes:
        with pytest.raises(Rejected, match="low_quality"):
            asyncio.run(validate(_edit(chain, index, **changes), context()))


def test_a_step_that_others_need_must_need_a_tool(chain: Draft) -> None:
    with pytest.raises(Rejected, match="tool_free_dependency"):
        asyncio.run(validate(_edit(chain, 0, question="Which one is it?"), context()))
    # A leaf may go without one.
    (judged,) = asyncio.run(validate(_edit(chain, 1, question="Which one is it?"), context(quality_threshold=0.0)))
    assert [s.needs_tool for s in judged.decomposition.sub_questions] == [True, False]


def test_judges_fail_closed(chain: Draft) -> None:
    """A verdict about other steps is asked for again, with what was wrong, then rejects; it never counts as good."""
    teacher = Rules(AtomicityAnswer=lambda given, _: answers.AtomicityAnswer(given.steps[:1]))
    with pytest.raises(Rejected, match="wrong_ids"):
        asyncio.run(validate(chain, context(teacher, attempts=2)))
    asked = [variables for answer, variables, _ in teacher.asked if answer is answers.AtomicityAnswer]
    assert len(asked) == 2 and asked[0]["feedback"] == "" and "[1, 2]" in asked[1]["feedback"]
    teacher = Rules(CompletenessAnswer=lambda given, _: msgspec.structs.replace(given, complete=not given.complete))
    with pytest.raises(Rejected, match="contradictory"):
        asyncio.run(validate(chain, context(teacher)))


# ---------------------------------------------------------------------------------------------------------------------
# Prompts

STEP = step(2, 1, hop=2, answer="Oslo", text="MARK-STEP")
SPEC = ToolSpec("t", "MARK-TOOL", {"type": "object", "properties": {}, "required": []})
CALL = answers.ReferenceCallAnswer([answers.Argument("x", "MARK-CALL")], [answers.Argument("x", "b")])
ONE = Decomposition("d", "en", "g", "multi_hop", "MARK-MAIN", Answer("Oslo"), [step(1), STEP], [], "s")
ABOUT = {"step": STEP, "dependencies": [step(1)], "domain": "MARK-DOMAIN", "table_rows": 24, "seed": 0}
PROMPT_VARIABLES: dict[type, tuple[dict[str, Any], list[str]]] = {
    DecompositionAnswer: (
        {
            "structure": "multi_hop", "min_hops": 2, "max_hops": 3, "min_branches": 2, "max_branches": 3,
            "domain": "MARK-DOMAIN", "knowledge": "", "relations": (), "side": "train", "partition": None,
        },
        ["MARK-DOMAIN", "multi_hop"],
    ),
    answers.ToolNecessityAnswer: ({"decomposition": ONE}, ["MARK-MAIN", "MARK-STEP"]),
    answers.DependencyConsistencyAnswer: ({"question": "MARK-MAIN", **ABOUT}, ["MARK-MAIN", "MARK-STEP"]),
    answers.AtomicityAnswer: ({"decomposition": ONE}, ["MARK-STEP"]),
    answers.SequentialRationalityAnswer: ({"decomposition": ONE}, ["MARK-STEP"]),
    answers.CompletenessAnswer: ({"decomposition": ONE}, ["MARK-MAIN", "Oslo"]),
    answers.ToolDocumentAnswer: (ABOUT, ["MARK-STEP", "MARK-DOMAIN"]),
    answers.HarderToolDocumentAnswer: ({**ABOUT, "document": SPEC}, ["MARK-TOOL"]),
    answers.ReferenceCallAnswer: ({**ABOUT, "document": SPEC}, ["MARK-TOOL", "Oslo"]),
    answers.ToolCodeAnswer: ({**ABOUT, "document": SPEC, "call": CALL}, ["MARK-TOOL", "MARK-CALL", "24"]),
    answers.IntentClustersAnswer: ({"steps": [STEP], "tools": [SPEC]}, ["MARK-STEP", "MARK-TOOL"]),
    answers.MergedToolAnswer: (
        {**ABOUT, "steps": [STEP], "document": SPEC, "tools": [CodeTool(SPEC, "MARK-CODE")], "calls": [CALL]},
        ["MARK-CODE", "MARK-CALL", "MARK-STEP"],
    ),
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
    assert answer is not answers.ToolDocumentAnswer or "Oslo" not in text


def test_every_answer_has_a_rule_and_a_schema() -> None:
    assert set(HANDLERS) == {one.__name__ for one in ANSWERS}
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
    assert leaked(spec, step(1, answer="NO")) == "NO"
    assert leaked(spec, step(1, answer="DK")) == ""
    relation = all_relations()["capital_of_country"]
    assert leaked(fact_tool(relation, ["Japan"], "en").spec, step(1, answer="Tokyo")) == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": "x"}, ""),
        ({"a": "x", "n": 1}, ""),
        ({}, "required"),
        ({"a": 1}, "type string"),
        ({"a": "x", "n": True}, "type integer"),
        ({"a": "x", "b": 1}, "no parameter"),
        ({"a": "x", "f": "z"}, "one of"),
    ],
)
def test_arguments_are_checked_by_the_schema(arguments: dict[str, Any], problem: str) -> None:
    properties = {"a": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": "string", "enum": ["y"]}}
    found = check_arguments(ToolSpec("t", "", {"properties": properties, "required": ["a"]}), arguments)
    assert (problem in found) if problem else found == ""


# ---------------------------------------------------------------------------------------------------------------------
# Partition and bands


def test_partition_is_a_function_of_the_folded_name() -> None:
    partition = Partition("s", 0.3, 0.3)
    names = [f"e{i}" for i in range(4000)]
    held_out = [name for name in names if partition.side_of_entity(name) == "held_out"]
    assert 1100 < len(held_out) < 1300
    assert all(partition.side_of_entity(f" {name.upper()}") == "held_out" for name in held_out)
    assert partition.side(held_out[:2], "x") in ("held_out", None)
    assert partition.side([held_out[0], next(n for n in names if n not in held_out)], "x") is None
    assert Partition("s", 0.0, 0.0).side(names, "x") == "train"


def tool(name: str, domain: str, description: str = "") -> NeededTool:
    spec = ToolSpec(name, description or name, {"type": "object", "properties": {}, "required": []})
    return NeededTool(name, domain, CodeTool(spec, ""), [], [])


class Planted:
    """An embedder whose vectors are planted: the cosine to the needed tool is the number in the description."""

    async def embed(self, texts: Any) -> np.ndarray:
        cosines = [float(text.split("\n")[1]) for text in texts]
        return np.array([[c, (1 - c * c) ** 0.5] for c in cosines], np.float32)


def test_bands_are_normalised_and_leave_out_the_own_domain_and_intent() -> None:
    needed = tool("needed", "d", "1.0")
    # Raw cosines 0.2 … 0.8: normalised 0, 0.35, 0.5, 0.8, 0.9, 1.
    cosines = {"a": 0.2, "b": 0.41, "c": 0.5, "e": 0.68, "f": 0.74, "g": 0.8}
    candidates = [Candidate(n, "other", tool(n, "other", str(c)).tool) for n, c in cosines.items()]
    candidates += [
        Candidate("own", "d", tool("own", "d", "0.99").tool),
        Candidate("needed", "other", tool("twin", "other", "0.98").tool),
        Candidate("name", "other", tool("needed", "other", "0.97").tool),
    ]
    index = asyncio.run(Index.build(candidates, [needed.tool.spec], Planted()))
    bands = index.bands([needed], high_cut=0.85, low_cut=0.4)
    names = {band: [one.intent for one in found] for band, found in bands.items()}
    assert names == {"high": ["f", "g"], "medium": ["c", "e"], "low": ["a", "b"]}


def test_the_closest_band_wins_over_several_needed_tools() -> None:
    class Plane(Planted):
        async def embed(self, texts: Any) -> np.ndarray:
            angles = np.radians([float(text.split("\n")[1]) for text in texts])
            return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    one, other = tool("one", "d", "0"), tool("other", "d", "90")
    near = Candidate("near", "x", tool("near", "x", "85").tool)  # far from `one`, next to `other`
    middle = Candidate("middle", "x", tool("middle", "x", "45").tool)
    close = Candidate("close", "x", tool("close", "x", "5").tool)
    index = asyncio.run(Index.build([near, middle, close], [one.tool.spec, other.tool.spec], Plane()))
    bands = index.bands([one, other], high_cut=0.85, low_cut=0.4)
    assert [c.intent for c in bands["high"]] == ["near", "close"] and [c.intent for c in bands["medium"]] == ["middle"]


def test_hashed_embeddings_rank_shared_wording_first() -> None:
    texts = ["capital city of a country", "capital city of a state", "molar mass of an isotope"]
    texts += ["国家的首都", "城市的首都人口"]
    vectors = asyncio.run(HashedEmbedder().embed(texts))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) and vectors.dtype == np.float32
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] and vectors[3] @ vectors[4] > vectors[3] @ vectors[2]
    assert np.array_equal(vectors, asyncio.run(HashedEmbedder().embed(texts)))


def test_answers_are_typed() -> None:
    relations = all_relations()
    assert answer_of(relations["capital_of_country"], "Japan") == Answer("Tokyo")
    population = answer_of(relations["population_of_city"], "Tokyo")
    assert population.unit == "people" and isinstance(population.value, int) and population.tolerance == 0.0
