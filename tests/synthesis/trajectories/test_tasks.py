"""Tasks: what a rule checks of them, personas of a file, near-duplicates."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from trajectories_world import context

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Task, TaskScores, Trajectory
from synthesis.core.stages import Journal, Rejected
from synthesis.offline.facts.servers import fact_servers
from synthesis.offline.intents import understand
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.wording import introduction
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.teacher import render_prompt
from synthesis.servers.collect import default_sources
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.near_duplicates import near_duplicates, shingles
from synthesis.trajectories.personas import Persona, read_personas
from synthesis.trajectories.pipeline import synthesize
from synthesis.trajectories.tasks import TaskSeed, augment_task, named_tool, repeated_tasks, score_task, write_task
from synthesis.trajectories.teacher_answers import (
    BackTranslatedChain,
    ChainTask,
    ServerTask,
    TaskRating,
    TaskVariation,
)

SERVERS = {language: fact_servers(language, ("countries",))[0] for language in ("en", "zh")}
COUNTRIES = SERVERS["en"]
BY_ID = {server.id: server for server in SERVERS.values()}
CHAIN = ["largest_neighbor_of_country", "capital_of_country"]
TASK = Task("t", COUNTRIES.id, "en", "chain", "original",
            "What is the capital of the largest neighbour of Nepal?", CHAIN, TaskScores(5, 5, 5))  # fmt: skip


class Scripted:
    """Answers each type with its answer, and keeps what it was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    async def ask(self, answer, variables, *, language, seed):
        self.asked.append((answer.__name__, variables, language))
        return self.answers[answer.__name__]


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize(
    ("question", "tool", "named"),
    [
        ("Call get_weather for Oslo.", "get_weather", "get_weather"),
        ("Call Get_Weather for Oslo.", "get_weather", "Get_Weather"),
        ("请用get_weather查奥斯陆。", "get_weather", "get_weather"),
        ("Use getWeather.", "getWeather", "getWeather"),
        ("Use list-files now.", "list-files", "list-files"),
        ("forget_weather is a song.", "get_weather", None),
        ("How is the weather? I want to get weather news.", "get_weather", None),
        ("Please search for a flat.", "search", None),
        ("Please use the search tool.", "search", "search tool"),
        ("请用search工具。", "search", "search工具"),
        ("Please run `search` for a flat.", "search", "`search`"),
        ("Please run search(flat).", "search", "search("),
        ("Research toolkits.", "search", None),
    ],
)
def test_a_question_names_a_tool_only_where_it_says_it_as_a_name(question, tool, named):
    assert named_tool(question, tool) == named


def seed(language="en", chain=CHAIN, count=0) -> TaskSeed:
    return TaskSeed("t", SERVERS[language].id, language, list(chain), count)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("  ", "empty_question"),
        ("Use capital_of_country for Nepal.", "names_a_tool"),
        ("尼泊尔最大邻国的首都是什么？", "wrong_language"),
    ],
)
async def test_written_tasks_are_checked(question, reason):
    teacher = Scripted(ChainTask=ChainTask("", question), ServerTask=ServerTask("", CHAIN, question))
    for one in (seed(), seed(chain=[], count=2)):
        with pytest.raises(Rejected) as rejection:
            await write_task(one, context(teacher), BY_ID)
        assert rejection.value.reason == reason
    unknown = Scripted(ServerTask=ServerTask("", ["fly"], "What is the capital of Chad?"))
    with pytest.raises(Rejected, match="unknown_tool"):
        await write_task(seed(chain=[], count=1), context(unknown), BY_ID)
    none = Scripted(ServerTask=ServerTask("", [], "What is the capital of Chad?"))
    with pytest.raises(Rejected, match="no_tools"):
        await write_task(seed(chain=[], count=1), context(none), BY_ID)
    twice = Scripted(ServerTask=ServerTask("", [*CHAIN, CHAIN[0]], "What is the capital of Chad?"))
    (task,) = await write_task(seed(chain=[], count=2), context(twice), BY_ID)
    assert task.tools == CHAIN  # a set: each counts once


class Corrected:
    """Gives the first of its questions until it is told what is wrong with it, then the second."""

    def __init__(self, *questions):
        self.questions, self.feedback, self.seeds = questions, [], []

    async def ask(self, answer, variables, *, language, seed):
        if answer is BackTranslatedChain:
            return BackTranslatedChain("", CHAIN)
        self.feedback.append(variables["feedback"])
        self.seeds.append(seed)
        question = self.questions[bool(variables["feedback"])]
        return ServerTask("", CHAIN, question) if answer is ServerTask else answer("", question)


async def test_a_question_that_fails_its_check_is_asked_again_with_the_problem():
    bad, good = "Use capital_of_country for Nepal.", "What is the capital of Nepal's largest neighbour?"
    for one in (seed(), seed(chain=[], count=2)):
        teacher = Corrected(bad, good)
        (task,) = await write_task(one, context(teacher), BY_ID)
        assert task.question == good
        assert teacher.feedback == ["", "t: the question says 'capital_of_country'"] and len(set(teacher.seeds)) == 2
    teacher = Corrected(bad, good)
    (varied,) = await augment_task(TASK, context(teacher), BY_ID, {"en": ["a teacher"]})
    assert varied.question == good and len(teacher.feedback) == 2
    stubborn = Corrected(bad, bad)
    with pytest.raises(Rejected, match="names_a_tool"):
        await write_task(seed(), context(stubborn, attempts=2), BY_ID)
    assert len(stubborn.feedback) == 2


async def vary(question, back, *, task=TASK, mode="persona"):
    teacher = Scripted(TaskVariation=TaskVariation("", question), BackTranslatedChain=BackTranslatedChain("", back))
    (one,) = await augment_task(task, context(teacher, augmentations=(mode,)), BY_ID, {"en": ["a teacher"]})
    return one, teacher


async def test_a_variation_keeps_language_and_intent():
    question = "My class asks for the capital of Nepal's largest neighbour."
    one, teacher = await vary(question, CHAIN)
    assert (one.question, one.tools, one.augmentation, one.id) == (question, CHAIN, "persona", "t-persona")
    name, variables, _ = teacher.asked[-1]
    # The variation alone is asked back: neither the original nor its tools are in sight.
    assert (
        name == "BackTranslatedChain"
        and set(variables) == {"server", "query", "feedback"}
        and variables["query"] == question
    )
    with pytest.raises(Rejected, match="language_changed"):
        await vary("尼泊尔最大邻国的首都是什么？", CHAIN)
    with pytest.raises(Rejected, match="intent_changed.*needs capital_of_country, not largest_neighbor"):
        await vary("What is the capital of Nepal?", CHAIN[1:])
    with pytest.raises(Rejected, match="intent_changed"):  # the order is part of a chain
        await vary(question, CHAIN[::-1])
    server_only = msgspec.structs.replace(TASK, mode="server")
    assert (await vary(question, CHAIN[::-1], task=server_only))[0].tools == CHAIN
    with pytest.raises(Rejected, match="names_a_tool"):
        await vary("Use capital_of_country.", CHAIN)


async def test_each_score_has_a_threshold():
    teacher = Scripted(TaskRating=TaskRating("so so", 4, 3, 2))
    for least, reason in (((5, 1, 1), "question_quality"), ((4, 4, 1), "scenario_realism"), ((4, 3, 3), "tool_nec")):
        with pytest.raises(Rejected, match=f"low_{reason}"):
            await score_task(TASK, context(teacher, thresholds=TaskScores(*least)), BY_ID)
    (kept,) = await score_task(TASK, context(teacher, thresholds=TaskScores(4, 3, 2)), BY_ID)
    assert kept.scores == TaskScores(4, 3, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Near-duplicates


def test_shingles_are_three_words_or_characters():
    assert len(shingles("What is the capital of Chad?")) == 8 == len(shingles("乍得首都是哪"))
    assert shingles("a b") == shingles("A  b!") and len(shingles("")) == 1


def edited(words, changes):
    return " ".join("changed" if index in changes else word for index, word in enumerate(words))


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_near_duplicates_are_those_above_the_threshold(threshold):
    """Against all pairs, one by one."""
    rng = random.Random(0)
    texts = []
    for _ in range(60):
        words = [rng.choice("abcdefghij") * rng.randint(1, 9) for _ in range(40)]
        texts += [edited(words, set(rng.sample(range(40), count))) for count in (0, 0, 1, 2, 3, 5)]
    groups = [rng.randrange(2) for _ in texts]
    sets = [shingles(text) for text in texts]

    def close(one: int, other: int) -> bool:
        return groups[one] == groups[other] and len(sets[one] & sets[other]) / len(sets[one] | sets[other]) >= threshold

    expected, kept = [], []
    for index in range(len(texts)):
        expected.append(next((one for one in kept if close(one, index)), None))
        kept += [] if expected[-1] is not None else [index]
    assert near_duplicates(zip(groups, texts, strict=True), threshold) == expected
    assert sum(one is not None for one in expected) >= 30


def test_the_first_is_kept_and_other_servers_have_their_own():
    long = "Please find the capital of the country that has the longest border with Nepal, and then tell me how many "
    one = msgspec.structs.replace(TASK, id="one", question=long + "people live in that city at the moment.")
    near = msgspec.structs.replace(one, id="near", question=long + "people live in that city at this moment.")
    elsewhere = msgspec.structs.replace(near, id="elsewhere", server_id="other")
    repeated = repeated_tasks([one, near, elsewhere], 0.7)
    assert list(repeated) == ["near"] and "at this moment" in repeated["near"] and "at the moment" in repeated["near"]
    assert repeated_tasks([one, near, elsewhere], 1.0) == {}
    assert near_duplicates([(0, "a b"), (0, "c d"), (0, "A b."), (0, "a  b")], 1.0) == [None, None, 0, 0]
    with pytest.raises(ValueError, match="near_duplicate: 0"):
        near_duplicates([], 0)


# ---------------------------------------------------------------------------------------------------------------------
# Personas


NURSE = {
    "uuid": "x", "sex": "Female", "city": "Tulsa", "occupation": "registered_nurse", "age": 34,
    "education_level": "bachelors", "professional_persona": "Leads\na night  shift. " + "x" * 300,
    "skills_and_expertise_list": "['triage', \"nurses' plans\"]", "hobbies_and_interests_list": ["chess", "rowing"],
}  # fmt: skip


def personas_file(tmp_path, *rows):
    path = tmp_path / "personas.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_rows_of_a_persona_file_become_phrases(tmp_path):
    found = read_personas(personas_file(tmp_path, NURSE, {"occupation": "护士", "age": 29}, {"occupation": "cook"}))
    nurse, cook = found["en"]
    text = str(nurse)
    assert text.startswith("a person who works as registered nurse; 34 years old; education: bachelors; at work: Leads")
    assert text.endswith("skills: triage, nurses' plans; hobbies: chess, rowing") and len(text) < 400
    assert "Tulsa" not in text and "Female" not in text
    assert str(cook) == "a person who works as cook" and str(found["zh"][0]) == "职业为护士的人；29岁"
    prompt = render_prompt(
        TaskVariation, {"server": COUNTRIES, "task": TASK, "mode": "persona", "persona": nurse, "feedback": ""}, "en"
    )
    assert "put by a person who works as registered nurse; 34 years old" in prompt


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"age": 3}, "personas.jsonl:2: .*`occupation`"),
        ({"occupation": " "}, "`occupation` is empty"),
        ({"occupation": "cook", "age": -1}, "`age` is -1"),
        ({"occupation": "cook", "skills_and_expertise_list": "{'a': 1}"}, "`skills_and_expertise_list` is not a list"),
        ({"occupation": "cook", "language": "xx"}, "personas.jsonl:2"),
    ],
)
def test_broken_rows_are_named(tmp_path, row, match):
    with pytest.raises(ValueError, match=match):
        read_personas(personas_file(tmp_path, NURSE, row))


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_personas(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        read_personas(personas_file(tmp_path))


@pytest.mark.parametrize("language", ["en", "zh"])
async def test_the_offline_teacher_speaks_as_the_persona_and_is_understood(language):
    given = context(seed=1, augmentations=("persona",))
    person = Persona(language, {"en": "Ph.D. student", "zh": "护士"}[language], 27)
    for chain in (["capital_of_country"], CHAIN):
        (one,) = await write_task(seed(language, chain), given, BY_ID)
        (varied,) = await augment_task(one, given, BY_ID, {language: [person]})
        assert varied.question.startswith(introduction(person, language)) and "27" in varied.question
        assert understand(varied.question, language) == understand(one.question, language)
        assert language_of(varied.question) == language


async def test_a_run_with_personas_of_a_file(tmp_path):
    """English ones of the file, Chinese ones built in; real servers, so requests of templates too."""
    config = TrajectoriesConfig(
        trajectories=24, sources=tuple(default_sources()), mcp_share=0.4, min_tools=2, fact_servers=("elements",),
        emulated_servers=(), augmentations=("persona",), augmented=1.0, near_duplicate=0.4,
        personas=str(personas_file(tmp_path, NURSE)), behaviours={},
    )  # fmt: skip
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            summary = await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=tmp_path / "out",
                workdir=tmp_path, seed=5,
            )  # fmt: skip
    assert summary.rejected["tasks"] == {} and summary.rejected["augment"] == {}
    tasks = read_dataset(summary.datasets["tasks"], Task)
    spoken = [task.question.startswith("I work as registered nurse and am 34") for task in tasks
              if task.augmentation == "persona" and task.language == "en"]  # fmt: skip
    assert spoken and all(spoken)
    assert any(task.server_id.startswith("mcp_") and task.augmentation == "persona" for task in tasks)
    duplicates = summary.rejected["duplicates"]["near_duplicate"]
    assert duplicates > 0 and "is nearly" in summary.details["duplicates"]["near_duplicate"]
    assert read_card(summary.datasets["tasks"])["rejected"]["duplicates"] == {"near_duplicate": duplicates}
    assert len(read_dataset(summary.datasets["trajectories"], Trajectory)) > 10
