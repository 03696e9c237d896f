"""Where questions come from: given ones, texts, taxonomies, the tools of other environments; real files where there
are."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset, write_dataset
from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.stages import Journal, Rejected
from synthesis.environments.augment import augment
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import decompose, question_seeds
from synthesis.environments.pipeline import synthesize
from synthesis.environments.sources import SourceError, sources_of
from synthesis.environments.teacher_answers import Argument, AugmentedQuestionAnswer, AugmentedStep
from synthesis.environments.verify import solve
from synthesis.offline import grammar, plans
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.pipeline_run import Summary
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

SHARED = Path(__file__).parents[4] / "shared" / "data" / "knowledge"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="real inputs are not beside this checkout")
EVERYTHING_TRAINS = {"held_out_entities": 0.0, "held_out_questions": 0.0}

QUESTIONS = ["What is the city population of the capital of Japan?", "What is the capital of Peru?"]
TAXONOMY = {
    "Travel": {
        "Rail": {"description": "Timetables and fares.", "examples": [{"query": "A train to Lyon?"}]},
        "航空": {"description": "机票的价格与时刻。", "examples": []},
    },
    "Law": {"description": "Statutes."},
}


def write(path: Path, rows: list[Any]) -> str:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_every_source_is_used_as_often_as_every_other(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl.gz", [{"question": text, "domain": "d"} for text in [*QUESTIONS, "日本的首都是什么？"]]
    )
    config = EnvironmentsConfig(count=7, questions=path)
    seeds = question_seeds(config, 0)
    assert seeds == question_seeds(config, 0) and len({one.id for one in seeds}) == 7
    assert sorted(Counter(one.question for one in seeds).values()) == [2, 2, 3]
    assert {one.mode for one in seeds} == {"question"} and {one.structure for one in seeds} == {""}
    assert {one.language for one in seeds if one.question.startswith("日本")} == {"zh"}


def test_texts_give_domain_and_knowledge_and_a_structure_is_still_drawn(tmp_path: Path) -> None:
    rows = [
        {"domain": "weather", "knowledge_corpus": "background: A picnic."},
        {"domain": "电子商务", "knowledge_corpus": ""},
    ]
    seeds = question_seeds(EnvironmentsConfig(count=50, knowledge=write(tmp_path / "k.jsonl", rows)), 0)
    assert {(one.domain, one.knowledge, one.language) for one in seeds} == {
        ("weather", "background: A picnic.", "en"),
        ("电子商务", "", "zh"),
    }
    assert len({one.structure for one in seeds}) > 2 and {one.mode for one in seeds} == {"unconditional"}


def test_a_taxonomy_gives_the_paths_of_its_leaves_with_an_example_half_of_the_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TAXONOMY, ensure_ascii=False), encoding="utf-8")
    seeds = question_seeds(EnvironmentsConfig(count=600, taxonomy=str(path)), 0)
    assert Counter(one.domain for one in seeds) == {"Travel > Rail": 200, "Travel > 航空": 200, "Law": 200}
    rail = Counter(one.knowledge for one in seeds if one.domain == "Travel > Rail")
    assert set(rail) == {"Timetables and fares.", "Timetables and fares.\nA train to Lyon?"}
    assert 60 < rail["Timetables and fares."] < 140
    assert {one.language for one in seeds if one.domain == "Travel > 航空"} == {"zh"}
    masked = question_seeds(EnvironmentsConfig(count=60, taxonomy=str(path), mask_examples=1.0), 0)
    assert not any("Lyon" in one.knowledge for one in masked)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("questions", '{"question": "a?"}\n{"query": "b?"}', r"line 2: .*`question`.* JSON object of question, domain"),
        ("questions", '{"question": "  "}', "line 1: question is empty"),
        ("questions", '{"question": "a?", "language": "xx"}', "language"),
        ("questions", "\n\n", "holds no rows"),
        ("knowledge", '{"domain": 5}', r"\$.domain"),
        ("knowledge", "[", "line 1"),
        ("taxonomy", "[1]", "no taxonomy"),
        ("taxonomy", '{"a": {"b": "text"}}', "a > b: a branch holds branches"),
        ("taxonomy", '{"a": {"description": "x", "examples": ["q"]}}', "a: examples: "),
        ("taxonomy", "{", "is not JSON"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, kind: str, text: str, message: str) -> None:
    path = tmp_path / "source.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=message):
        sources_of(EnvironmentsConfig(**{kind: str(path)}))  # type: ignore[arg-type]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere.jsonl cannot be read"):
        sources_of(EnvironmentsConfig(questions=str(tmp_path / "nowhere.jsonl")))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(SourceError, match="cannot be read"):
        sources_of(EnvironmentsConfig(knowledge=str(tmp_path / "cut.jsonl.gz")))


@needs_shared
def test_the_original_s_files_are_read_whole() -> None:
    questions = sources_of(EnvironmentsConfig(questions=str(SHARED / "en_questions.jsonl")))
    assert len(questions) == 609 and len({one.domain for one in questions}) == 11
    contexts = sources_of(EnvironmentsConfig(knowledge=str(SHARED / "en_contexts.jsonl.gz")))
    assert len(contexts) == 4063 and len({one.domain for one in contexts}) == 10
    languages = Counter(one.language for one in [*questions, *contexts])
    # Some notes are of several languages; those that are taken for another are rejected by name.
    assert languages["en"] > 0.98 * languages.total() and all(one.knowledge for one in contexts)
    for name, language, count in (("en_domains", "en", 39), ("zh_domains", "zh", 113)):
        domains = sources_of(EnvironmentsConfig(knowledge=str(SHARED / f"{name}.jsonl")))
        assert len(domains) == count and Counter(one.language for one in domains)[language] == count


@pytest.mark.parametrize(
    ("text", "language"), [("A train to Lyon?", "en"), ("电子商务（B2C/C2C 平台）", "zh"), ("12:30", "en"), ("", "en")]
)
def test_languages(text: str, language: str) -> None:
    assert language_of(text) == language


# ---------------------------------------------------------------------------------------------------------------------
# With the offline teacher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


async def made(pool: SandboxPool, path: Path, teacher: Any = None, **config: Any) -> tuple[Summary, list[Any]]:
    path.mkdir(exist_ok=True)
    with Journal(path / "journal.sqlite") as journal:
        summary = await synthesize(
            EnvironmentsConfig(**config),
            executor=Executor(teacher or OfflineTeacher(), pool),
            journal=journal,
            out_dir=path,
            seed=0,
        )
    return summary, [one for split in ("train", "held_out") for one in read_dataset(path / split, ToolEnvironment)]


@pytest.mark.asyncio(loop_scope="module")
async def test_given_questions_become_environments(pool: SandboxPool, tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": text} for text in [*QUESTIONS, "Will it rain tomorrow?"]])
    summary, environments = await made(pool, tmp_path / "run", count=3, questions=path, **EVERYTHING_TRAINS)
    assert sorted(one.question for one in environments) == sorted(QUESTIONS)
    assert {one.structure for one in environments} == {"multi_hop", "single_hop"}
    assert summary.rejected["decompose"] == {"teacher_failed": 1} and summary.statistics["train"]["modes"] == {
        "question": 1.0
    }
    # What was read is part of what the run is: other questions under the same name are another run.
    write(tmp_path / "q.jsonl", [{"question": "What is the capital of Chile?"}])
    _, others = await made(pool, tmp_path / "others", count=1, questions=path, **EVERYTHING_TRAINS)
    assert [one.question for one in others] == ["What is the capital of Chile?"]


@pytest.mark.asyncio(loop_scope="module")
async def test_new_questions_over_existing_tools(pool: SandboxPool, tmp_path: Path) -> None:
    base = {"split_by": "signature", "distractors": {"low": 1}}
    _, first = await made(pool, tmp_path / "first", count=12, **base)
    summary, second = await made(
        pool, tmp_path / "second", count=24, tools_of=str(tmp_path / "first" / "train"), **base
    )
    train = {one.id: one for one in first if one.split == "train"}
    assert (
        len(second) >= 8
        and {one.mode for one in second} == {"augmented"}
        and {one.split for one in second} == {"train"}
    )
    codes = {tool.code for one in train.values() for tool in one.tools}
    asked = {(one.signature, frozenset(one.entities)) for one in train.values()}
    for one in second:
        assert {tool.code for tool in one.tools} <= codes  # no tool was written
        assert (one.signature, frozenset(one.entities)) not in asked
        assert len(await solve(one, pool)) == len(one.sub_questions)
        values = plans.evaluate(grammar.parse(one.question, one.language))
        assert {str(step.answer.value) for step in one.sub_questions} == set(map(str, values))
    assert len(second) + sum(n for counts in summary.rejected.values() for n in counts.values()) == 24
    assert read_card(tmp_path / "second" / "train")["statistics"]["modes"] == {"augmented": 1.0}


@pytest.mark.asyncio(loop_scope="module")
async def test_no_environments_have_no_tools_to_ask_about(pool: SandboxPool, tmp_path: Path) -> None:
    write_dataset(tmp_path / "empty", ToolEnvironment, [], card={})
    with pytest.raises(SourceError, match="tools_of: .*empty holds no environment"):
        await made(pool, tmp_path / "run", count=2, tools_of=str(tmp_path / "empty"))


SPEC = ToolSpec(
    "price", "Price of an item.", {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
)
SHOP = ToolEnvironment(
    "shop", "en", "shopping", "single_hop", "What does tea cost?", Answer(3),
    [SubQuestion(1, "q", Answer(3), [], 1, True, "p")],
    [CodeTool(SPEC, "T = {'tea': 3, 'rye': 5, 'oat': 7}\ndef price(item):\n    return {'price': T[item]}\n")],
    [ReferenceCall(1, "price", {"item": "tea"}, {"price": 3}, "number")], {}, ["tea"], "p", "train",
)  # fmt: skip
RYE = AugmentedStep(
    1, "What does rye cost?", Answer(5), [], 1, "price_of_item", "shopping", ["rye"],
    tool="price", arguments=[Argument("item", "rye")], other_arguments=[Argument("item", "oat")],
)  # fmt: skip
NEW = AugmentedQuestionAnswer("How much is rye?", Answer(5), "shopping", [RYE])


class Says:
    """A teacher with one thing to say; remembers the feedback."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.feedback = answer, []  # type: ignore[var-annotated]

    async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
        self.feedback.append(variables["feedback"])
        return self.answer


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (RYE, ""),
        (replace(RYE, tool="weight"), "unknown_tool"),
        (replace(RYE, arguments=[Argument("thing", "rye")]), "bad_call"),
        (replace(RYE, other_arguments=[]), "bad_call"),
        (replace(RYE, arguments=[Argument("item", "oat")], other_arguments=[Argument("item", "tea")]), "wrong_answer"),
        (replace(RYE, other_arguments=[Argument("item", "rye")]), "ignores_arguments"),
        (replace(RYE, intent="p", subjects=["tea"]), "not_new"),
        (replace(RYE, subjects=[" "]), "no_subject"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_s_new_question_is_proven(pool: SandboxPool, step: AugmentedStep, reason: str) -> None:
    teacher = Says(replace(NEW, sub_questions=[step]))
    config = EnvironmentsConfig(attempts=2, structures={"single_hop": 1.0}, **EVERYTHING_TRAINS)  # type: ignore[arg-type]
    context = EnvironmentContext(config, teacher, pool, seed=0)  # type: ignore[arg-type]
    (seed,) = question_seeds(dataclasses.replace(config, count=1), 0, [SHOP])
    if not reason:
        (built,) = await augment(seed, context, {"shop": SHOP})
        assert built.tools[0].calls == [ReferenceCall(1, "price", {"item": "rye"}, {"price": 5}, "number")]
        return
    with pytest.raises(Rejected, match=reason):
        await augment(seed, context, {"shop": SHOP})
    assert teacher.feedback[0] == "" and teacher.feedback[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_leaf_that_needs_no_tool_has_no_call(pool: SandboxPool, tmp_path: Path) -> None:
    """Two prices, and which is larger: the last step is for the reader; the environment is solved by two calls."""
    steps = [
        RYE,
        replace(RYE, id=2, question="What does oat cost?", answer=Answer(7), subjects=["oat"],
                arguments=[Argument("item", "oat")], other_arguments=[Argument("item", "rye")]),
        replace(RYE, id=3, question="Which of the two prices is higher?", answer=Answer(7), subjects=["prices"], hop=2,
                depends_on=[1, 2], intent="larger", arguments=[Argument("item", "oat")],
                other_arguments=[Argument("item", "rye")]),
    ]  # fmt: skip
    write_dataset(tmp_path / "shop", ToolEnvironment, [SHOP], card={})
    answers: dict[str, Any] = {
        "augmented_question_answer": AugmentedQuestionAnswer(
            "Which costs more, rye or oat?", Answer(7), "shopping", steps
        ),
        "tool_necessity_answer": {"steps": [{"id": i, "reason": "r", "tool_needed": i < 3} for i in (1, 2, 3)]},
        "dependency_consistency_answer": {"reason": "r", "verdict": "matched"},
        "atomicity_answer": {"steps": [{"id": i, "reason": "r", "atomic": True} for i in (1, 2, 3)]},
        "sequential_rationality_answer": {"reason": "r", "needlessly_sequential": []},
        "completeness_answer": {"requirements": [], "missing": [], "complete": True},
    }
    async with scripted(answers) as (url, asked):
        teacher = teacher_of(url)
        _, environments = await made(
            pool, tmp_path / "run", teacher, count=1, tools_of=str(tmp_path / "shop"),
            structures={"parallel_multi_hop": 1.0}, **EVERYTHING_TRAINS,
        )  # fmt: skip
    (one,) = environments
    assert [step.needs_tool for step in one.sub_questions] == [True, True, False]
    assert [call.sub_question for call in one.reference_calls] == [1, 2] and len(await solve(one, pool)) == 2
    assert one.difficulty.hops == 2 and "def price(item)" in asked["augmented_question_answer"][0]


# ---------------------------------------------------------------------------------------------------------------------
# Given questions and texts, with a model's endpoint


class scripted:
    """A real OpenAI-compatible endpoint over HTTP that answers by the name of the schema; keeps the prompts."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, {}  # type: ignore[var-annotated]

    async def __aenter__(self) -> tuple[str, dict[str, list[str]]]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1", self.asked

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["response_format"]["json_schema"]["name"]
        prompt = body["messages"][0]["content"]
        self.asked.setdefault(name, []).append(prompt)
        answer = self.answers[name]
        content = msgspec.json.encode(answer(prompt) if callable(answer) else answer).decode()
        message = {"role": "assistant", "content": content}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
             "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        )  # fmt: skip


def teacher_of(url: str) -> OpenAITeacher:
    """It is told what the endpoint enforces, which has no answer but to the pipeline's questions."""
    return OpenAITeacher(
        OpenAITeacherConfig(url, "scripted", tries=1, structured_output="json_schema", judge_own_text=True)
    )


def two_steps(question: str) -> dict[str, Any]:
    """A decomposition as a model would give it: the seats of a flight, found by its number."""
    return {
        "question": question, "answer": {"value": 5771}, "domain": "flights",
        "sub_questions": [
            {"id": 1, "question": "Which flight is it?", "answer": {"value": "FR 2287"}, "depends_on": [], "hop": 1,
             "intent": "number_of_flight", "domain": "flights", "subjects": ["Birmingham"]},
            {"id": 2, "question": "How many seats has FR 2287?", "answer": {"value": 5771}, "depends_on": [1], "hop": 2,
             "intent": "seats_of_flight", "domain": "flights", "subjects": ["FR 2287"]},
        ],
    }  # fmt: skip


@needs_shared
async def test_questions_of_a_real_file_reach_a_model_and_come_back_decomposed() -> None:
    config = EnvironmentsConfig(count=5, questions=str(SHARED / "en_questions.jsonl"), **EVERYTHING_TRAINS)  # type: ignore[arg-type]
    seeds = question_seeds(config, 0)

    def answer(prompt: str) -> Any:
        return two_steps(next(one.question for one in seeds if one.question in prompt))

    async with scripted({"decomposition_answer": answer}) as (url, asked):
        context = EnvironmentContext(config, teacher_of(url), None, seed=0)  # type: ignore[arg-type]
        drafts = [draft for seed in seeds for draft in await decompose(seed, context)]
    assert [one.decomposition.question for one in drafts] == [one.question for one in seeds]
    assert {one.mode for one in drafts} == {"question"} and {one.decomposition.structure for one in drafts} == {
        "multi_hop"
    }
    assert len(asked["decomposition_answer"]) == 5 and "Structure:" not in asked["decomposition_answer"][0]


async def test_another_question_than_the_given_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": "How many seats are there?", "domain": "flights"}])
    config = EnvironmentsConfig(count=1, questions=path, attempts=2, **EVERYTHING_TRAINS)  # type: ignore[arg-type]
    async with scripted({"decomposition_answer": two_steps("How many rows are there?")}) as (url, asked):
        context = EnvironmentContext(config, teacher_of(url), None, seed=0)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="question_rewritten"):
            await decompose(question_seeds(config, 0)[0], context)
    assert "give it back as it is" in asked["decomposition_answer"][1]


@needs_shared
async def test_texts_of_a_real_file_are_in_the_prompt() -> None:
    config = EnvironmentsConfig(
        count=3, knowledge=str(SHARED / "en_contexts.jsonl.gz"), structures={"multi_hop": 1.0}, **EVERYTHING_TRAINS  # type: ignore[arg-type]
    )  # fmt: skip
    seeds = question_seeds(config, 0)
    async with scripted({"decomposition_answer": two_steps("How many seats?")}) as (url, asked):
        context = EnvironmentContext(config, teacher_of(url), None, seed=0)  # type: ignore[arg-type]
        for seed in seeds:
            await decompose(seed, context)
    for seed, prompt in zip(seeds, asked["decomposition_answer"], strict=True):
        assert seed.knowledge in prompt and f"Domain: {seed.domain}" in prompt and "Structure: multi_hop" in prompt


async def test_what_lies_on_both_sides_of_the_split_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": "How many seats are there?"}])
    config = EnvironmentsConfig(count=1, questions=path, held_out_entities=0.0, held_out_questions=1.0)
    async with scripted({"decomposition_answer": two_steps("How many seats are there?")}) as (url, _):
        context = EnvironmentContext(config, teacher_of(url), None, seed=0)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="mixed_split"):
            await decompose(question_seeds(config, 0)[0], context)
