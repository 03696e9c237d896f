"""No text gives an answer away, none is in another language, and what a model asks is kept on one side or the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from environments_world import Rules
from msgspec.structs import replace

from sandbox import Sandbox, SandboxConfig, SandboxPool
from synthesis.core.datasets import read_dataset
from synthesis.core.records import Answer, CodeTool, Decomposition, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.stages import Journal, Rejected, Transient
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, decompose, question_seeds
from synthesis.environments.distract import Candidate, Index, distract
from synthesis.environments.drafts import Draft, NeededTool, ToolsetDraft
from synthesis.environments.implement import implement
from synthesis.environments.leaks import check_arguments_ask, check_questions, leaked
from synthesis.environments.pipeline import synthesize
from synthesis.environments.teacher_answers import Argument, DecompositionAnswer, ReferenceCallAnswer, SubQuestionAnswer
from synthesis.pipeline.context import gather_or_cancel
from synthesis.pipeline.embedding import document_text
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.partition import Partition
from synthesis.pipeline.teacher import TeacherError

SEED = QuestionSeed("q0", "en", "multi_hop", "", "train")


def context(teacher: Any = None, **config: Any) -> EnvironmentContext:
    return EnvironmentContext(EnvironmentsConfig(**config), teacher or Rules(), cast("Sandbox", None), 0)


def step(number: int, question: str, answer: Any, *subjects: str, after: tuple[int, ...] = ()) -> SubQuestionAnswer:
    return SubQuestionAnswer(number, question, Answer(answer), list(after), 1, "i", "d", list(subjects))


A, B = step(1, "How many live in Oslo?", 717_710, "Oslo"), step(2, "How many live in Bergen?", 291_940, "Bergen")
CHOICE = step(3, "Is 717,710 of Oslo or 291,940 of Bergen more?", "Oslo", "717710", after=(1, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Questions


@pytest.mark.parametrize(
    ("question", "steps"),
    [
        ("Which of Oslo and Bergen has more inhabitants?", [A, B, CHOICE]),
        ("How many live in Oslo?", [A]),
        ("How many live in the capital of Norway?", [step(1, "What is the capital of Norway?", "Oslo", "Norway"), A]),
    ],
)
def test_questions_that_have_to_be_answered(question: str, steps: list[SubQuestionAnswer]) -> None:
    check_questions(question, steps, "en")


@pytest.mark.parametrize(
    ("question", "steps", "said"),
    [
        ("Do 717,710 people live in Oslo?", [A], "states the answer of sub-question 1, 717710"),
        (
            "How many live in Oslo, the capital of Norway?",
            [step(1, "The capital of Norway?", "Oslo", "Norway")],
            "'Oslo'",
        ),
        (
            "What is the capital of Norway?",
            [step(1, "Is Oslo the capital of Norway?", "Oslo", "Norway")],
            "its own answer",
        ),
        # A comparison is of at least two things.
        ("Is Oslo more?", [A, step(2, "Which is more?", "Oslo", "Oslo", after=(1,))], "'Oslo'"),
        # And answers with one of those that were looked up.
        ("Oslo or Bergen, or Rome?", [A, B, step(3, "Which?", "Rome", "Rome", after=(1, 2))], "'Rome'"),
        ("挪威的首都奥斯陆有多少人？", [step(1, "挪威的首都是哪里？", "奥斯陆", "挪威")], "奥斯陆"),
    ],
)
def test_questions_that_state_an_answer_are_refused(question: str, steps: list[SubQuestionAnswer], said: str) -> None:
    with pytest.raises(Rejected, match=f"answer_in_question.*{said}"):
        check_questions(question, steps, "en")


STATED: list[tuple[str, Any]] = [
    ("How many moons has Mars, the planet with two moons?", 2),
    ("How many moons? (two)", 2),
    ("How many moons has it? Two.", 2),
    ("How many moons does Mars, with two moons, have?", "two"),
    ("How many months are in a year of twelve months?", 12),
    ("How old is he at twenty-one?", 21),
    ("How many live in the city of two hundred and fifty thousand?", 250_000),
    ("When was it founded, in seventeen seventy-six?", 1776),
    ("On which day was it founded, on the fourth of July 1776?", "1776-07-04"),
    ("What share, thirty per cent, voted?", "30%"),
    ("What share, 0.3, voted?", "30%"),
    ("What share, thirty percent, voted?", 30),
    ("Half of it voted: which share?", 0.5),
    ("½ of it voted: which share?", 0.5),
    ("What is the height of Everest, 8.849 km high?", 8849),
    ("Which O-S-L-O is the capital?", "Oslo"),
    ("Is the Nile longer than the Rhine? Yes.", "yes"),
    ("Is the Nile longer than the Rhine? Yes.", True),
    ("Which place did the team that came second take?", 2),
    ("Which place did the runner-up, the 2nd, take?", "second"),
    ("What is its rank, the second?", "2nd"),
    ("火星有两颗卫星，火星有几颗卫星？", 2),
    ("火星有２颗卫星，火星有几颗卫星？", 2),
    ("一半的人投票，比例是多少？", 0.5),
    ("火星の衛星はいくつですか？火星には二つの衛星があります。", 2),
    ("¿Cuántas lunas tiene Marte, el planeta con dos lunas?", 2),
    ("Wie viele Monde hat Mars, der Planet mit zwei Monden?", 2),
    ("Combien de lunes a Mars, la planète aux deux lunes ?", 2),
    ("Сколько спутников у Марса, планеты с двумя спутниками?", 2),
    ("मंगल के दो चंद्रमा हैं, मंगल के कितने चंद्रमा हैं?", 2),
    ("How many does it have: ٣٠?", 30),
]
NOT_STATED: list[tuple[str, Any]] = [
    ("Which two cities are named?", 2),
    ("Which of the two cities, Oslo or Bergen, is larger?", 2),
    ("这两个城市中哪个有更多的大学？", 2),
    ("What is the population of the second largest city?", 2),
    ("How many goals did the team score in its two games?", 2),
    ("How many people live in twenty-two cities?", 2),
    ("How many goals were scored in 2019?", 9),
    ("What is the area of the island with one city?", 1),
    ("Which is the one city on the island?", 1),
    ("Welche Stadt ist eine Hauptstadt?", 1),
    ("Combien font vingt pour cent de cinq ?", 100),
    ("Who ruled after Louis XIV?", 14),
    ("How tall is the tower, 2 km away?", 2000),
    ("Is it true that the Nile is longer?", True),
    ("Does it have more than the U.S.?", "us"),
    ("Who follows May in the office?", "Mayor"),
]


@pytest.mark.parametrize(("question", "answer"), STATED)
def test_a_question_states_its_answer_in_another_spelling(question: str, answer: Any) -> None:
    with pytest.raises(Rejected, match="answer_in_question"):
        check_questions("?", [step(1, question, answer, "it")], language_of(question))


@pytest.mark.parametrize(("question", "answer"), NOT_STATED)
def test_a_question_may_count_something_else(question: str, answer: Any) -> None:
    check_questions("?", [step(1, question, answer, "it")], language_of(question))


def test_a_question_states_what_a_step_counts() -> None:
    moons = step(1, "How many moons has Mars?", 2, "Mars")
    with pytest.raises(Rejected, match="the question states the answer of sub-question 1, 2"):
        check_questions("What is the area of the planet with two moons?", [moons], "en")
    check_questions("Which of the two planets, Mars and Venus, is larger?", [moons], "en")


def test_a_document_may_count_something_else() -> None:
    text = "Compares two countries: which of the countries is larger."
    spec = ToolSpec("compare", text, {"type": "object", "properties": {}})
    assert leaked(spec, [Answer(2)], "en") == ""
    assert leaked(spec, [Answer("two countries")], "en") == text
    assert leaked(replace(spec, description="Knows all fifty states."), [Answer(50)], "en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_rules_never_ask_what_their_question_states(language: Any) -> None:
    config = EnvironmentsConfig(count=60, languages={language: 1.0})
    made = EnvironmentContext(config, Rules(), cast("Sandbox", None), 0)
    for seed in question_seeds(config.asked_of(by_rules=True), 0):
        asyncio.run(decompose(seed, made))


def test_a_question_states_an_answer_in_its_language() -> None:
    question, wanted = "Welche Stadt hat 5 Millionen Einwohner?", [step(1, "Wie viele?", 5000000, "Stadt")]
    with pytest.raises(Rejected, match="states the answer"):
        check_questions(question, wanted, "de")
    check_questions(question, wanted, "en")


def asked(*steps: SubQuestion, question: str = "?") -> Decomposition:
    return Decomposition("d", "en", "geography", "single_hop", question, steps[-1].answer, list(steps), [], "s")


def looked_up(number: int, question: str, answer: Any, *after: int) -> SubQuestion:
    return SubQuestion(number, question, Answer(answer), list(after), 1, True, "i")


JAPAN = looked_up(1, "What is the capital of Japan?", "Tokyo")


@pytest.mark.parametrize(
    ("arguments", "steps", "given"),
    [
        ({"name": "Tokyo"}, [JAPAN], True),
        ({"name": "tokyo, Japan"}, [JAPAN], True),
        ({"where": {"names": ["Japan", "Tokyo"]}}, [JAPAN], True),
        ({"country": "Japan"}, [JAPAN], False),
        ({"population": 717_710}, [looked_up(1, "How many live in Oslo?", 717_710)], True),
        # What an earlier step found is asked about, and a choice is one of what is named.
        ({"city": "Tokyo"}, [JAPAN, looked_up(2, "Its name there?", "Tokyo", 1)], False),
        ({"city": "Tokyo, Honshu"}, [JAPAN, looked_up(2, "Its island?", "Honshu", 1)], True),
        ({"a": "Oslo", "b": "Bergen"}, [looked_up(1, "Which has more, Oslo or Bergen?", "Oslo")], False),
        ({"city": "Oslo", "exact": True}, [looked_up(1, "Is Oslo a capital?", True)], False),
        # A number that the question has in words is named too.
        ({"a": 2, "b": 0}, [looked_up(1, "What is two plus zero?", 2)], False),
    ],
)  # fmt: skip
def test_a_call_that_states_its_answer_asks_nothing(arguments: Any, steps: list[SubQuestion], given: bool) -> None:
    with pytest.raises(Rejected, match="answer_in_call.*states its answer") if given else nullcontext():
        check_arguments_ask(arguments, steps[-1], asked(*steps))


def test_a_teacher_is_told_that_its_call_states_the_answer() -> None:
    """A tool that repeats its argument would be proven by it."""

    def echoed(given: ReferenceCallAnswer, variables: Mapping[str, Any]) -> ReferenceCallAnswer:
        name, value = given.arguments[0].name, variables["step"].answer.value
        return replace(given, arguments=[Argument(name, value), *given.arguments[1:]])

    teacher = Rules(ReferenceCallAnswer=echoed)
    step = replace(JAPAN, intent="capital_of_country")
    with pytest.raises(Rejected, match="answer_in_call"):
        asyncio.run(implement(Draft(asked(step), ["geography"]), context(teacher)))
    told = [feedback for name, feedback in teacher.feedback if name == "ReferenceCallAnswer"]
    assert told[0] == "" and "states its answer, 'Tokyo'" in told[1]


def test_a_record_that_is_rejected_asks_for_nothing_more() -> None:
    """One of its steps is; the others are in the middle of theirs."""
    late: list[str] = []

    class OneFails(Rules):
        rejected = False

        async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
            if variables["step"].id == 1:
                raise TeacherError("no answer")
            await asyncio.sleep(0.02)
            late.extend([answer.__name__] * self.rejected)
            return await super().ask(answer, variables, language=language, seed=seed)

    async def rejected() -> None:
        teacher = OneFails()
        steps = [replace(JAPAN, intent="capital_of_country"), replace(JAPAN, id=2, intent="capital_of_country")]
        with pytest.raises(Rejected, match="no answer"):
            await implement(Draft(asked(*steps), ["geography"] * 2), context(teacher))
        teacher.rejected = True
        await asyncio.sleep(0.1)

    asyncio.run(rejected())
    assert late == []


async def test_what_else_fails_lets_the_others_finish() -> None:
    done: list[int] = []

    async def after(seconds: float, error: Exception | None) -> int:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        done.append(1)
        return 1

    assert await gather_or_cancel(after(0.01, None), after(0, None)) == [1, 1]
    with pytest.raises(Transient):
        await gather_or_cancel(after(0.02, None), after(0, Transient("busy")))
    assert len(done) == 3
    with pytest.raises(Rejected):
        await gather_or_cancel(after(60, None), after(0, Rejected("bad")))
    assert len(done) == 3


def telling(given: DecompositionAnswer, variables: Mapping[str, Any]) -> DecompositionAnswer:
    """States the first step's answer until it is told not to."""
    if "states the answer" in variables["feedback"]:
        return given
    return replace(given, question=f"{given.question} I heard of {given.sub_questions[0].answer.value}.")


def test_a_teacher_is_told_that_its_question_states_an_answer() -> None:
    teacher = Rules(DecompositionAnswer=telling)
    (draft,) = asyncio.run(decompose(SEED, context(teacher)))
    assert "I heard" not in draft.decomposition.question
    assert [bool(feedback) for _, feedback in teacher.feedback] == [False, True]


def in_chinese(given: DecompositionAnswer, variables: Mapping[str, Any]) -> DecompositionAnswer:
    return replace(given, question=f"{given.question} 请用中文回答上面的问题。")


def in_spanish(given: DecompositionAnswer, variables: Mapping[str, Any]) -> DecompositionAnswer:
    first, *others = given.sub_questions
    return replace(given, sub_questions=[replace(first, question="¿Cuál es la capital del país?"), *others])


@pytest.mark.parametrize("change", [in_chinese, in_spanish])
def test_questions_in_another_language_are_refused_by_name(change: Any) -> None:
    named = "wrong_language: (?:the |a sub-)question is in (?:Chinese|Spanish), not in English"
    with pytest.raises(Rejected, match=named):
        asyncio.run(decompose(SEED, context(Rules(DecompositionAnswer=change))))


# ---------------------------------------------------------------------------------------------------------------------
# Documents


@pytest.mark.parametrize("kind", ["ToolDocumentAnswer", "HarderToolDocumentAnswer"])
def test_a_document_gives_away_no_answer_of_its_environment(kind: str) -> None:
    """Before, each was compared with its own step's answer alone."""
    (draft,) = asyncio.run(decompose(SEED, context()))
    first, *_, last = draft.decomposition.sub_questions

    def says_first(given: Any, variables: Mapping[str, Any]) -> Any:
        return replace(given, description=f"{given.description} Such as {first.answer.value}.")

    of_last = replace(
        draft.decomposition,
        sub_questions=[replace(one, needs_tool=one.id == last.id) for one in draft.decomposition.sub_questions],
    )
    teacher = Rules(**{kind: says_first})
    with pytest.raises(Rejected, match=f"answer_leaked: the document gives an answer away: .*{first.answer.value}"):
        asyncio.run(implement(replace(draft, decomposition=of_last), context(teacher, hardened_share=1.0)))
    told = [feedback for name, feedback in teacher.feedback if name == kind]
    assert len(told) == 3 and all("use no example values" in feedback for feedback in told[1:])


def test_a_document_in_another_language_is_refused() -> None:
    def french(given: Any, variables: Mapping[str, Any]) -> Any:
        return replace(given, description="Renvoie la valeur qui correspond au nom donné par l'utilisateur.")

    (draft,) = asyncio.run(decompose(SEED, context()))
    with pytest.raises(Rejected, match="wrong_language: the document is in French, not in English"):
        asyncio.run(implement(draft, context(Rules(ToolDocumentAnswer=french))))


def test_irrelevant_tools_give_no_answer_away() -> None:
    (draft,) = asyncio.run(decompose(SEED, context()))
    value = draft.decomposition.sub_questions[0].answer.value

    def tool(name: str, description: str) -> CodeTool:
        return CodeTool(ToolSpec(name, description, {"type": "object", "properties": {}, "required": []}), "")

    needed = NeededTool("needed", "d", tool("needed", "Needed."), [], [])
    others = [tool("one", "Looks something up."), tool("two", f"Looks it up, for example {value}.")]
    candidates = [Candidate(one.spec.name, "other", one) for one in others]
    vectors = {document_text(one.spec): np.array([1.0, 0.0], np.float32) for one in (needed.tool, *others)}
    index = Index(candidates, [needed], vectors, high_cut=0.85, low_cut=0.4)
    (made,) = asyncio.run(distract(ToolsetDraft(draft, [needed]), context(), {("en", draft.split): index}))
    assert [one.spec.name for band in made.distractors.values() for one in band] == ["one"]


# ---------------------------------------------------------------------------------------------------------------------
# A model's questions, and the split


class Model(Rules):
    """Asks as a model does: about anything, on whichever side."""

    BY_RULES = False

    async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
        if "partition" in variables:
            variables = {**variables, "split": "train", "partition": Partition("none", 0.0, 0.0)}
        return await super().ask(answer, variables, language=language, seed=seed)


async def test_what_a_model_asks_is_kept(tmp_path: Path) -> None:
    """By intents and entities nearly all of it lies on no side: 109 of 120 were dropped by default."""
    config = EnvironmentsConfig(count=10, distractors={"low": 1}, hardened_share=0.0)
    straddling = EnvironmentsConfig(count=10, split_by="intent")
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            executor = Executor(Model(), pool)
            summary = await synthesize(config, executor=executor, journal=journal, out_dir=tmp_path, seed=0)
            other = await synthesize(straddling, executor=executor, journal=journal, out_dir=tmp_path / "i", seed=0)
    assert not summary.rejected["decompose"] and summary.counts["train"] >= 9 and summary.counts["held_out"] == 0
    assert other.rejected["decompose"]["mixed_split"] >= 5
    for one in read_dataset(tmp_path / "train", ToolEnvironment):
        answers = [one.answer, *(part.answer for part in one.sub_questions)]
        offered = [*one.tools, *(tool for band in one.distractors.values() for tool in band)]
        assert not any(leaked(tool.spec, answers, "en") for tool in offered)


def test_sources_are_split_whole(tmp_path: Path) -> None:
    rows = "".join(f'{{"domain": "d{number}", "knowledge_corpus": ""}}\n' for number in range(40))
    (tmp_path / "k.jsonl").write_text(rows)
    config = EnvironmentsConfig(count=120, knowledge=str(tmp_path / "k.jsonl"), held_out_fraction=0.3)
    seeds = question_seeds(config.asked_of(by_rules=False), 0)
    sides = {(one.domain, one.split) for one in seeds}
    assert len(sides) == 40 and 5 <= sum(split == "held_out" for _, split in sides) <= 20
    again = question_seeds(config.asked_of(by_rules=False), 7)  # whatever else a run draws
    assert {(one.domain, one.split) for one in again} == sides


def test_the_split_is_what_the_teacher_can_keep_to() -> None:
    assert EnvironmentsConfig().asked_of(by_rules=True).split_by == "intent"
    assert EnvironmentsConfig().asked_of(by_rules=False).split_by == "source"
    assert EnvironmentsConfig(split_by="signature").asked_of(by_rules=False).split_by == "signature"
