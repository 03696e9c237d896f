"""AIME with the real math-verify in its own environment, on questions made up here and, where given, the real ones.

ASTRA_AIME=DIR python -m pytest tests/astra_jax/evaluation/test_evaluation_aime.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_world import Request, Sampler, Say, Scripted, endpoint

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.run import RunConfig, run_suites
from astra_jax.evaluation.suite import EvalItem, EvaluationError, ModelEndpoint, SuiteContext
from astra_jax.evaluation.suites import make
from astra_jax.evaluation.suites.aime import INSTRUCTION, SETS, Aime, Problem, ProblemSet, digest_of
from synthesis.core.stages import AbortRun, Journal

REAL = os.environ.get("ASTRA_AIME", "")
NOBODY = ModelEndpoint("http://127.0.0.1:9/v1", "nobody")
MADE_UP = {
    "How many sides\n  does a heptagon have?": "7",
    "How many seconds are there in two minutes?": "120",
    "What is the angle of a half turn, in degrees?": "180^\\circ",
}
ANSWERS = {"How many sides": "7", "How many seconds": "120", "What is the angle": "180"}


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made_up(folder: Path, year: int = 1, *, most: int = 3) -> ProblemSet:
    """A file with the first questions, and its declaration."""
    rows = [{"problem": text, "answer": answer} for text, answer in list(MADE_UP.items())[:most]]
    problems = [Problem("", row["problem"], row["answer"].removesuffix("^\\circ")) for row in rows]
    write(folder, f"{year}.jsonl", rows)
    return ProblemSet(year, f"{year}.jsonl", "https://nowhere.example/file", digest_of(problems))


@pytest.fixture(scope="module")
def harnesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("ASTRA_HARNESSES")
    return Path(kept) if kept else tmp_path_factory.mktemp("harnesses")


def context(folder: Path, served: ModelEndpoint = NOBODY, **changes: Any) -> SuiteContext:
    fields: dict[str, Any] = {
        "policy": served,
        "endpoint": endpoint(served),
        "models": {},
        "harnesses": folder / "harnesses",
        "sources": {"aime": folder},
        "logs": folder / "logs",
    }
    return SuiteContext(**{**fields, **changes})


@contextlib.asynccontextmanager
async def prepared(folder: Path, harnesses: Path, policy: Sampler, sets: Sequence[ProblemSet]) -> AsyncIterator[Aime]:
    async with Scripted(policy) as served:
        suite = Aime(context(folder, served, harnesses=harnesses, sources={"aime": folder}), sets)
        try:
            await suite.prepare()
            yield suite
        finally:
            await suite.close()


# --- what it needs


async def test_a_folder_is_asked_for_with_the_commands_that_fill_it(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"curl -L -o DIR/aime24.jsonl https://\S+ and curl -L -o DIR/aime25"):
        await make("aime", context(tmp_path, sources={})).prepare()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (None, "is missing, the questions of AIME 2024; get it by: curl -L -o"),
        ([{"problem": "What?"}], "line 1: not a JSON object with problem"),
        ([{"problem": "What?", "answer": "-3"}], "the answer '-3' is not an integer from 0 to 999"),
        ([{"problem": "What?", "answer": "3"}], "has 1 questions with digest"),
    ],
)
async def test_another_file_is_refused(rows: Any, problem: str, tmp_path: Path) -> None:
    if rows:
        write(tmp_path, "aime24.jsonl", rows)
    with pytest.raises(EvaluationError, match=problem):
        await make("aime", context(tmp_path)).prepare()


def test_a_file_may_have_any_form_and_order(tmp_path: Path) -> None:
    first = made_up(tmp_path)
    second = replace(first, file="other.jsonl")
    rows = [
        {"id": 3, "question": f" {' '.join(text.split())}\n", "answer": float(answer.removesuffix("^\\circ"))}
        for text, answer in reversed(MADE_UP.items())
    ]
    write(tmp_path, second.file, rows)
    one, other = first.read(tmp_path), second.read(tmp_path)
    assert [(problem.id, problem.answer) for problem in one] == [(problem.id, problem.answer) for problem in other]


def test_the_paper_has_32_samples_at_two_values_of_top_k() -> None:
    info = make("aime", context(Path("/nonexistent"))).info
    assert {one.name: one.decoding.top_k for one in info.categories} == {
        "aime_2024_k20": 20,
        "aime_2025_k20": 20,
        "aime_2024_all": -1,
        "aime_2025_all": -1,
    }
    assert {(one.decoding.temperature, one.decoding.top_p, one.decoding.trials) for one in info.categories} == {
        (0.6, 0.95, 32)
    }
    assert [len(names) for names in info.headline.values()] == [2, 2]


async def test_a_thought_that_was_never_closed_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its boxes are guesses. Only the comparison is left out here, of which the tests below have the real one."""
    graded: list[str] = []

    class Comparing:
        @contextlib.asynccontextmanager
        async def open(self) -> AsyncIterator[Comparing]:
            yield self

        async def call(self, method: str, text: str, answer: str) -> dict[str, Any]:
            graded.append(text)
            return {"right": f"\\boxed{{{answer}}}" in text, "problem": ""}

    said = "<think>\nPerhaps \\boxed{7}? No, I should check"
    one = made_up(tmp_path, most=1)
    async with Scripted(lambda request: Say(said)) as served:
        suite = Aime(context(tmp_path, served), [one])
        suite._problems = {"aime_1_all": {problem.id: problem for problem in one.read(tmp_path)}}
        suite._workers = Comparing()  # type: ignore[assignment]
        (id_,) = suite.ids("aime_1_all")
        result = await suite.run(EvalItem("aime_1_all", id_, 0, 5), suite.info.categories[0].decoding)
    assert result.score == 0 and graded == [""]


# --- end to end


def right(request: Request) -> Say:
    question = request["messages"][0]["content"]
    answer = next(answer for begin, answer in ANSWERS.items() if question.startswith(begin))
    return Say(f"<think>\\boxed{{1}}?</think>\n\nThe answer is $\\boxed{{{answer}}}$.")


@pytest.mark.slow
async def test_a_model_that_knows_scores_everything(tmp_path: Path, harnesses: Path) -> None:
    sets = [made_up(tmp_path, 1), made_up(tmp_path, 2)]
    async with prepared(tmp_path, harnesses, right, sets) as suite:
        with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
            results = await run_suites([suite], journal=journal, config=RunConfig(trials=2))
    assert len(results) == 4 * 3 * 2 and {result.score for result in results} == {1.0}
    assert results[0].messages[0]["content"].endswith(f"\n{INSTRUCTION}")
    assert (results[0].finish, results[0].steps, results[0].prompt_tokens) == ("answered", 1, 10)


REPLIES = {
    "\\boxed{7}": (1, ""),
    "So it is\n\\[\\boxed{007}\\]": (1, ""),
    "\\boxed{7.0}": (1, ""),
    "\\boxed{\\frac{14}{2}}": (1, ""),
    "\\boxed{\\sqrt{49}}": (1, ""),
    "\\boxed{\\text{7}}": (1, ""),
    "\\boxed{n = 7}": (1, ""),
    "$\\boxed{8}$ is what I thought at first, but in truth it is $\\boxed{7}$": (1, ""),
    "$\\boxed{7}$ is what I thought at first, but in truth it is $\\boxed{8}$": (0, ""),
    "Without a box: $7$": (1, ""),
    "\\boxed{8}": (0, ""),
    "\\boxed{7, 8}": (0, ""),
    "<think>\\boxed{7}</think> I do not know.": (0, "no boxed answer"),
    "It is seven, that is 7": (0, "no boxed answer"),
    "\\boxed{": (0, "no boxed answer"),
    "": (0, "no boxed answer"),
    "\\boxed{10^{10^{10}}}": (0, "could not be compared in 5 s of processor time"),
}


@pytest.mark.slow
async def test_notations_are_compared_and_nothing_hangs(tmp_path: Path, harnesses: Path) -> None:
    said = iter(REPLIES)
    async with prepared(tmp_path, harnesses, lambda _: Say(next(said)), [made_up(tmp_path, most=1)]) as suite:
        for text, (score, problem) in REPLIES.items():
            result = await ask(suite)
            assert (result.score, result.finish) == (score, "answered"), text
            assert problem in result.problem, text


@pytest.mark.slow
async def test_a_reply_that_is_cut_off_is_wrong(tmp_path: Path, harnesses: Path) -> None:
    cut = Say("\\boxed{7}", finish="length")
    async with prepared(tmp_path, harnesses, lambda _: cut, [made_up(tmp_path, most=1)]) as suite:
        result = await ask(suite)
    assert (result.score, result.finish, result.completion_tokens) == (0, "token_limit", 5)


@pytest.mark.slow
async def test_an_endpoint_that_fails_concludes_nothing(tmp_path: Path, harnesses: Path) -> None:
    async with prepared(tmp_path, harnesses, lambda _: Say("down", status=401), [made_up(tmp_path)]) as suite:
        with pytest.raises(AbortRun, match="status 401"):
            await ask(suite)


async def ask(suite: Aime) -> ItemResult:
    """Run the first item."""
    category = suite.info.categories[0]
    return await suite.run(EvalItem(category.name, suite.ids(category.name)[0], 0, seed=0), category.decoding)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="the questions are in no registry; ASTRA_AIME names a folder with both files")
async def test_the_real_questions(harnesses: Path, tmp_path: Path) -> None:
    known = {problem.text: problem.answer for one in SETS for problem in one.read(Path(REAL))}
    assert len(known) == 60
    knows = True

    def policy(request: Request) -> Say:
        answer = known[request["messages"][0]["content"].removesuffix(f"\n{INSTRUCTION}")]
        return Say(f"So the answer is $\\boxed{{{answer}}}$." if knows else "I give up.")

    async with Scripted(policy) as served:
        suite = Aime(context(tmp_path, served, harnesses=harnesses, sources={"aime": Path(REAL)}))
        await suite.prepare()

        async def play() -> list[ItemResult]:
            return await asyncio.gather(
                *(
                    suite.run(EvalItem(category.name, id, 0, seed=0), category.decoding)
                    for category in suite.info.categories
                    for id in suite.ids(category.name)
                )
            )

        gold = await play()
        knows = False
        never = await play()
        await suite.close()
    assert [len(gold), sum(result.score for result in gold)] == [120, 120]
    assert [len(never), sum(result.score for result in never)] == [120, 0]
