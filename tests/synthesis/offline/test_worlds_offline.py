"""The offline teacher's ten worlds: every task of every one is proven, and the split is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from sandbox import SandboxConfig, SandboxPool
from synthesis.astra_format.rl import to_record
from synthesis.core.datasets import read_dataset
from synthesis.core.records import ToolEnvironment, World
from synthesis.core.refusals import InputError
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, question_seeds
from synthesis.environments.pipeline import synthesize
from synthesis.environments.verify import assembled
from synthesis.environments.world_proof import verify_world
from synthesis.environments.worlds import make_world
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.world_author import WORLDS
from synthesis.offline.worlds.accounts import BANK
from synthesis.offline.worlds.appointments import CLINIC
from synthesis.offline.worlds.drawing import View, drawn_rows, drawn_world, signature
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.partition import Partition

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASKS = [(world, n) for world in WORLDS for n in range(len(world.tasks))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


class Given(OfflineTeacher):
    """Asks for one task of one world."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._handlers["WorldAnswer"] = lambda variables, language, rng: answer


async def test_a_request_says_which_appointment_it_is_about() -> None:
    """Two of one patient with one doctor on one day were drawn 30 times in 4,000."""
    met = 0
    for number in range(1_500):
        rng = rng_for(number, "appointments")
        rows = drawn_rows(CLINIC, rng)
        visits = Counter((one["patient"], one["doctor"], one["day"]) for one in rows["appointments"].values())
        met += max(visits.values()) > 1
        for visit in rows["appointments"]:
            picked = {"visit": View(visit, "appointments", rows, CLINIC.tables)}
            one = rows["appointments"][visit]
            alone = visits[one["patient"], one["doctor"], one["day"]] == 1
            assert CLINIC.tasks[1].holds(picked) == alone
    assert met


@pytest.mark.parametrize(("world", "n"), TASKS, ids=[f"{world.name} {n}" for world, n in TASKS])
async def test_each_task_is_proven(world, n: int, pool: SandboxPool) -> None:
    answer = drawn_world(world, world.tasks[n], lambda entity: True, rng_for(n, world.name))
    config = EnvironmentsConfig(count=1, split_by="source")
    context = EnvironmentContext(config, Given(answer), pool, seed=0)
    seed = QuestionSeed("env-0-000000", "en", "", "", "train", "world")
    [built] = await make_world(seed, context)
    others = {
        call.sub_question: wrong for one in built.tools for call, wrong in zip(one.calls, one.others, strict=True)
    }
    environment = assembled(built)
    await verify_world(environment, others, pool)
    assert isinstance(environment.world, World) and environment.world.changes
    assert 4 <= len(environment.tools) <= 8 and environment.domain == world.name
    steps = environment.sub_questions
    assert steps[0].hop == 1 and not steps[0].asks_state, "something has to be looked up first"
    ids = {id for rows in environment.world.rows.values() for id in rows}
    assert not any(id in environment.question for id in ids), "an id is in the question"


async def test_there_are_ten_worlds_and_each_split_has_some() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS) == 10
    for by in ("intent", "signature"):
        partition = Partition("astra", 0.35, 0.3, by)
        sides = [partition.split_of_signature(signature(world, task)) for world in WORLDS for task in world.tasks]
        assert sides.count("held_out") >= 3 and sides.count("train") >= 3 and None not in sides


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
    good = drawn_world(BANK, BANK.tasks[0], lambda entity: True, rng_for(1, "bank"))
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
    good = drawn_world(BANK, BANK.tasks[0], lambda entity: True, rng_for(1, "bank"))
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
