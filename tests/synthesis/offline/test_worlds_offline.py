"""The offline teacher's packaged worlds: each kind of task is proven, nothing is guessed, and the split is kept."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from astra_jax.base.errors import InputError
from sandbox import SandboxConfig, SandboxPool
from synthesis.astra_format.rl import to_record
from synthesis.core.datasets import read_dataset
from synthesis.core.records import ToolEnvironment, World
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, question_seeds
from synthesis.environments.pipeline import synthesize
from synthesis.environments.teacher_answers import WorldAnswer, arguments
from synthesis.environments.verify import assembled
from synthesis.environments.world_proof import verify_world
from synthesis.environments.worlds import make_world
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.world_author import HANDLERS, WORLDS, packaged_tasks
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.partition import Partition

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASKS = {(one.kind.domain, one.signature): one for one in packaged_tasks()}
"""The last task of each structure."""


def payment() -> WorldAnswer:
    """A transfer between the accounts of one customer."""
    return next(
        one.answer()
        for one in packaged_tasks()
        if one.kind.domain == "bank accounts" and len(one.entities) == 1 and "set_limit" not in one.signature
        and "transfer" in one.signature
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


class Given(OfflineTeacher):
    """Asks for one task of one world."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._handlers["WorldAnswer"] = lambda variables, language, rng: answer


def unfounded(answer: WorldAnswer) -> list[str]:
    """Arguments of reference calls that neither the question says nor an earlier output singles out."""
    rows: dict[str, dict[str, Any]] = {table.name: {} for table in answer.tables}
    for row in answer.rows:
        rows[row.table][row.id] = arguments(row.cells)
    module: dict[str, Any] = {"STATE": rows}
    exec(answer.code, module)
    found: list[Any] = []
    lists: list[list[dict[str, Any]]] = []

    def is_known(value: Any) -> bool:
        return value in found or re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", answer.question) is not None

    def is_singled_out(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
        others = [other for other in rows if other is not row]
        return all(any(row[name] != other[name] and is_known(row[name]) for name in row) for other in others)

    guesses = []
    for step in sorted(answer.sub_questions, key=lambda step: (step.hop, step.id)):
        given = arguments(step.arguments)
        for name, value in given.items():
            holding = [(row, rows) for rows in lists for row in rows if value in row.values()]
            if not is_known(value) and not any(is_singled_out(*one) for one in holding):
                guesses.append(f"{step.tool}({name}={value!r})")
        output = module[step.tool](**given)
        if isinstance(output, list):
            lists.append(output)
        else:
            found += [value for value in output.values() if not isinstance(value, bool)]
    return guesses


async def test_reference_calls_guess_nothing() -> None:
    guessed = {one.task.question: found for one in packaged_tasks() if (found := unfounded(one.answer()))}
    assert not guessed


async def test_a_guess_among_several_rows_is_found() -> None:
    """Of two loans of a member the request names the book, which the reference play never looks up."""
    one = next(one.answer() for one in packaged_tasks() if one.signature.endswith("library_loans.return_loan"))
    loan = next(
        row
        for row in one.rows
        if row.table == "loans" and row.id == arguments(one.sub_questions[-1].arguments)["loan_id"]
    )
    book = next(row.id for row in one.rows if row.table == "books" and row.id != arguments(loan.cells)["book"])
    cells = [replace(cell, value=book) if cell.name == "book" else cell for cell in loan.cells]
    another = replace(one, rows=[*one.rows, replace(loan, id="Y999", cells=cells)])
    assert unfounded(one) == [] and unfounded(another) == [f"return_loan(loan_id={loan.id!r})"]


@pytest.mark.parametrize("key", TASKS, ids=" ".join)
async def test_each_kind_of_task_is_proven(key: tuple[str, str], pool: SandboxPool) -> None:
    answer = TASKS[key].answer()
    config = EnvironmentsConfig(count=1, split_by="source")
    context = EnvironmentContext(config, Given(answer), pool, seed=0)
    seed = QuestionSeed("env-0-000000", "en", "", "", "train", "world")
    [built] = await make_world(seed, context)
    others = {
        call.sub_question: wrong
        for one in built.tools
        for call, wrong in zip(one.calls, one.negative_arguments, strict=True)
    }
    environment = assembled(built)
    await verify_world(environment, others, pool)
    assert isinstance(environment.world, World) and environment.world.changes
    assert 4 <= len(environment.tools) <= 8 and environment.domain == answer.domain
    steps = environment.sub_questions
    assert steps[0].hop == 1 and not steps[0].asks_state, "something has to be looked up first"
    ids = {id for rows in environment.world.rows.values() for id in rows}
    assert not any(id in environment.question for id in ids), "an id is in the question"


async def test_there_are_ten_kinds_of_worlds_and_each_split_has_some() -> None:
    about, *kinds = map(json.loads, gzip.decompress(WORLDS.read_bytes()).splitlines())
    assert len(kinds) == len({one["domain"] for one in kinds}) == 10
    assert sum(len(one["worlds"]) for one in kinds) == about["worlds"] == 200
    assert about["tasks"] == len(packaged_tasks()) == len({one.task.question for one in packaged_tasks()})
    assert WORLDS.stat().st_size < 1_000_000
    for by in ("intent", "signature"):
        partition = Partition("astra", 0.35, 0.3, by)
        sides = [partition.split_of_signature(signature) for _, signature in TASKS]
        assert sides.count("held_out") >= 3 and sides.count("train") >= 3 and None not in sides


async def test_a_seed_and_a_split_decide_the_task() -> None:
    partition = Partition("astra", 0.35, 0.3, "signature")
    world = HANDLERS["WorldAnswer"]
    for split in ("train", "held_out"):
        variables = {"partition": partition, "split": split, "domain": ""}
        answers = [world(variables, "en", rng_for(seed, "world")) for seed in range(20)]
        assert answers == [world(variables, "en", rng_for(seed, "world")) for seed in range(20)]
        assert len({one.question for one in answers}) > 15 and len({one.domain for one in answers}) > 3
        for one in answers:
            (same,) = (task for task in packaged_tasks() if task.task.question == one.question)
            assert partition.split(same.entities, same.signature) == split
    library = world(
        {**variables, "partition": Partition("astra", 0.35, 0.3, "source"), "domain": "library loans"}, "en", rng_for(0)
    )
    assert library.domain == "library loans"
    with pytest.raises(ValueError, match="no world of domain 'weather' has a task in the split held_out"):
        world({**variables, "domain": "weather"}, "en", rng_for(0))
    with pytest.raises(ValueError, match="worlds in English only, not in zh"):
        world(variables, "zh", rng_for(0))


async def test_the_seeds_of_look_ups_are_as_they_were() -> None:
    config = EnvironmentsConfig(count=20)
    with_worlds = question_seeds(EnvironmentsConfig(count=20, stateful_share=0.25), 3, worlds_in="en")
    plain = question_seeds(config, 3)
    assert sum(one.mode == "world" for one in with_worlds) == 5
    assert all(one in plain for one in with_worlds if one.mode != "world")


@pytest.mark.slow
async def test_a_run_mixes_them_and_keeps_what_is_held_out_apart(pool: SandboxPool, tmp_path: Path) -> None:
    config = EnvironmentsConfig(count=40, stateful_share=0.6, held_out_fraction=0.4, languages={"en": 1.0}, max_hops=2)
    digests = []
    for folder in ("one", "two"):
        with Journal(tmp_path / f"{folder}.sqlite") as journal:
            executor = Executor(OfflineTeacher(), pool)
            summary = await synthesize(config, executor=executor, journal=journal, out_dir=tmp_path / folder, seed=2)
        digests.append(summary.digests)
    assert digests[0] == digests[1]
    made = {split: read_dataset(tmp_path / "one" / split, ToolEnvironment) for split in ("train", "held_out")}
    stateful = {
        split: [one for one in environments if isinstance(one.world, World)] for split, environments in made.items()
    }
    assert sum(map(len, stateful.values())) >= 20 and all(stateful.values())
    assert all(len(stateful[split]) < len(made[split]) for split in made)
    domains = {split: {one.domain for one in of} for split, of in stateful.items()}
    assert not domains["train"] & domains["held_out"], "a world is on both sides"
    entities = {split: {entity for one in of for entity in one.entities} for split, of in made.items()}
    assert not entities["train"] & entities["held_out"]
    for split, of in stateful.items():
        assert all(one.mode == "world" and sum(map(len, one.distractors.values())) > 2 for one in of)
        counted = summary.statistics[split]["worlds"]
        assert counted["samples"] == len(of) == sum(counted["domains"].values())
        assert set(counted["domains"]) == domains[split]
    for of in made.values():
        for one in of:
            if not isinstance(one.world, World):
                drawn = [tool for band in one.distractors.values() for tool in band]
                assert all(tool.code for tool in drawn), "a world's tool is nothing without it"


async def test_what_a_proof_refuses_goes_back_to_the_teacher(pool: SandboxPool) -> None:
    """As a model's first try would be: a tool that forgets its rule, which random calls find."""
    good = payment()
    lax = msgspec.structs.replace(good, code=good.code.replace('amount <= source["balance"]', "True"))
    lax = msgspec.structs.replace(lax, code=lax.code.replace('amount <= source["limit"]', "True"))
    assert lax.code.count("require(True") == 2
    told: list[str] = []

    class Mending(Given):
        async def ask(self, answer, variables, *, language, seed):
            told.append(variables["feedback"])
            self._handlers["WorldAnswer"] = lambda *_: good if variables["feedback"] else lax
            return await super().ask(answer, variables, language=language, seed=seed)

    context = EnvironmentContext(EnvironmentsConfig(count=1, split_by="source"), Mending(good), pool, seed=0)
    [built] = await make_world(QuestionSeed("env-0-000000", "en", "", "", "train", "world"), context)
    assert told[0] == "" and "no account is overdrawn" in told[1] and len(told) == 2
    assert built.world and built.draft.mode == "world"
    with pytest.raises(InputError, match="has a world"):
        to_record(assembled(built), seed=0)


REFUSED = {
    "no_state": lambda one: {"sub_questions": [replace(step, check="") for step in one.sub_questions]},
    "bad_rows": lambda one: {"rows": [replace(one.rows[0], cells=[]), *one.rows[1:]]},
    "bad_tables": lambda one: {"open": ["accounts.colour"]},
    "unknown_tool": lambda one: {"tools": one.tools[1:]},
    "bad_code": lambda one: {"code": "x = 1"},
    "bad_call": lambda one: {"sub_questions": [replace(s, other_arguments=s.arguments) for s in one.sub_questions]},
    "answer_in_question": lambda one: {"question": one.question + f" It is {one.sub_questions[0].answer.value}."},
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_parts_that_do_not_fit_are_refused_by_name(reason: str, pool: SandboxPool) -> None:
    good = payment()
    config = EnvironmentsConfig(count=1, split_by="source", attempts=1)
    context = EnvironmentContext(config, Given(replace(good, **REFUSED[reason](good))), pool, seed=0)
    with pytest.raises(Rejected) as refused:
        await make_world(QuestionSeed("env-0-000000", "en", "", "", "train", "world"), context)
    assert refused.value.reason == reason, refused.value.detail


async def test_worlds_are_in_english(pool: SandboxPool, tmp_path: Path) -> None:
    config = EnvironmentsConfig(count=2, stateful_share=1.0, languages={"zh": 1.0})
    with Journal(tmp_path / "journal.sqlite") as journal:
        executor = Executor(OfflineTeacher(), pool)
        with pytest.raises(InputError, match="stateful_share"):
            await synthesize(config, executor=executor, journal=journal, out_dir=tmp_path, seed=0)
