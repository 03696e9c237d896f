"""Worlds with state: what an episode leaves behind is what its sub-tasks are scored by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import pytest
import pytest_asyncio
from state_world import CALLS, CODE, FIND, PAID, TRANSFER, bank, played

from sandbox import CallResult, Limits, Outcome, SandboxConfig, SandboxPool
from synthesis.core.records import StateChange, ToolEnvironment, World, decode, encode
from synthesis.core.reward import Grade, MadeCall, f1_reward, score
from synthesis.core.worlds import PLAYS, EpisodeCalls, harm_of, module_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXTRA = ("transfer", {"source": "A40", "target": "A13", "amount": 1})
READ = ("find_account", {"owner": "Cy"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=1))) as opened:  # one check loops
        yield opened


async def reward_of(environment: ToolEnvironment, calls: list[tuple[str, dict[str, Any]]], pool: SandboxPool) -> float:
    made, grade = await played(environment, calls, pool)
    assert grade is not None
    return score(environment, made, grade, epsilon=0.0).value


# ---------------------------------------------------------------------------------------------------------------------
# The reward


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (CALLS, 1.0),
        ([CALLS[1], CALLS[0], CALLS[2]], 1.0),  # in any order that works
        ([], 0.0),
        (CALLS[:2], 0.8),  # nothing written: 2 of 3, in 2 calls
        ([*CALLS, READ], 6 / 7),  # a look-up too many
        ([*CALLS, EXTRA], 6 / 8),  # a write too many: the call, and the transfer that it leaves
        ([*CALLS, ("transfer", {**PAID, "amount": 10_000})], 6 / 7),  # refused: nothing is left of it
        ([*CALLS, CALLS[2]], 4 / 8),  # paid twice: not what was asked for, and 1 row of harm
        ([*CALLS[:2], ("transfer", {**PAID, "amount": 51})], 4 / 7),  # wrong amount: unsolved, and harm
        ([CALLS[2]], 0.5),  # the state alone, by luck: 1 of 3
    ],
)
async def test_what_plays_are_worth(calls: list, expected: float, pool: SandboxPool) -> None:
    assert await reward_of(bank(), calls, pool) == pytest.approx(expected)


async def test_one_call_that_does_damage_beside_its_task_is_not_worth_all(pool: SandboxPool) -> None:
    """As many calls as the reference makes, the goal reached, and still not 1."""
    greedy = CODE.replace("    return {\"transfer\": id}", """
    STATE["transfers"]["T9"] = {"source": target, "target": "A40", "amount": 1}
    return {"transfer": id}""")  # fmt: skip
    assert greedy != CODE
    assert await reward_of(bank(code=greedy), CALLS, pool) == pytest.approx(6 / 7)


async def test_harm_counts_as_calls_and_the_reward_stays_below_1() -> None:
    assert f1_reward(solved=3, needed=3, calls=3, harm=1).value == pytest.approx(6 / 7)
    for harm in range(5):
        for calls in range(1, 6):
            assert 0 <= f1_reward(solved=1, needed=1, calls=calls, harm=harm).value <= 1
    with pytest.raises(ValueError, match="harm"):
        f1_reward(solved=1, needed=1, calls=1, harm=-1)


async def test_one_call_solves_one_sub_task_at_most() -> None:
    environment = bank()
    steps = [msgspec.structs.replace(one, check="…") for one in environment.sub_questions]
    environment = msgspec.structs.replace(environment, sub_questions=steps)
    grade = Grade(frozenset({1, 2, 3}))
    assert score(environment, [], grade).value == 0.0
    assert score(environment, [MadeCall("transfer", True, {})], grade, epsilon=0.0).value == 0.5


async def test_added_rows_count_by_their_content_and_open_columns_not_at_all() -> None:
    world = bank().world
    assert isinstance(world, World)
    as_it_should = [msgspec.structs.replace(world.changes[2], id="T77"), *world.changes[:1]]
    assert harm_of(as_it_should, world) == 0
    assert harm_of([*as_it_should, msgspec.structs.replace(world.changes[2], id="T78")], world) == 1
    other = StateChange("accounts", "A40", {"owner": "Cy", "balance": 200}, {"owner": "Cy", "balance": 7})
    assert harm_of([other], world) == 0 and harm_of([other], msgspec.structs.replace(world, open=[])) == 1
    gone = StateChange("accounts", "A40", {"owner": "Cy", "balance": 200}, None)
    assert harm_of([gone], world) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Checks that cannot be evaluated

BAD = {
    "raises": ("def check(before, after):\n    return after['nothing']", 1),
    "loops": ("def check(before, after):\n    while True: pass", 1),
    "is no Python": ("def check(before", 1),
    "has no function": ("x = 1", 1),
    "is not sure": ("def check(before, after):\n    return 1", 1),
    "leaves": ("import os\ndef check(before, after):\n    os._exit(0)", 1),
    "": ("", 1),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_check_that_cannot_be_evaluated_is_worth_nothing_and_is_counted(name: str, pool: SandboxPool) -> None:
    source, unevaluated = BAD[name]
    environment = bank(check=source)
    made, grade = await played(environment, CALLS, pool)
    assert grade == Grade(frozenset(), 0, unevaluated)
    reward = score(environment, made, grade, epsilon=0.0)
    assert (reward.value, reward.unevaluated) == (pytest.approx(2 / 3), 1)


async def test_a_bad_check_keeps_no_other_from_being_evaluated(pool: SandboxPool) -> None:
    environment = bank()
    steps = environment.sub_questions
    loops = msgspec.structs.replace(steps[0], check=BAD["loops"][0])
    environment = msgspec.structs.replace(environment, sub_questions=[loops, *steps[1:]])
    _, grade = await played(environment, [*CALLS, EXTRA], pool)
    assert grade == Grade(frozenset({3}), 1, 1)


async def test_a_check_cannot_hide_harm(pool: SandboxPool) -> None:
    source = "def check(before, after):\n    STATE['transfers'].clear()\n    return True"
    _, grade = await played(bank(check=source), [*CALLS, EXTRA], pool)
    assert grade == Grade(frozenset({3}), 1, 0)


async def test_a_state_that_is_not_as_the_schema_has_it_holds_nothing(pool: SandboxPool) -> None:
    loose = CODE.replace(
        '    STATE["transfers"][id]', '    STATE["accounts"][source]["owner"] = 5\n    STATE["transfers"][id]'
    )
    _, grade = await played(bank(code=loose), CALLS, pool)
    assert grade is not None and grade.met == frozenset() and grade.harm == 1


# ---------------------------------------------------------------------------------------------------------------------
# Episodes


async def test_replays_are_bit_exact_over_two_sandboxes(pool: SandboxPool) -> None:
    """In other processes, of another pool, under another seed and at another time."""
    first = await played(bank(), [*CALLS, EXTRA, READ], pool)
    async with SandboxPool(SandboxConfig()) as other:
        second = await played(bank(), [*CALLS, EXTRA, READ], other, seed=7, now=1_800_000_000)
    assert first == second and first[0][2].output == {"transfer": "T1"} and first[0][3].output == {"transfer": "T2"}


async def test_the_state_of_one_episode_never_reaches_another(pool: SandboxPool) -> None:
    """Eight at once, each with another amount; the module is one."""
    environment = bank()

    async def one(amount: int) -> list[int]:
        run = EpisodeCalls(pool, environment)
        balances = []
        for _ in range(3):
            assert (await run.call(TRANSFER, {**PAID, "amount": amount})).ok
            balances.append((await run.call(FIND, {"owner": "Ada"})).value["balance"])
        return balances

    found = await asyncio.gather(*map(one, range(1, 9)))
    assert found == [[300 - amount * n for n in (1, 2, 3)] for amount in range(1, 9)]


async def test_calls_made_at_once_come_one_after_the_other(pool: SandboxPool) -> None:
    run = EpisodeCalls(pool, bank())
    results = await asyncio.gather(*(run.call(TRANSFER, {**PAID, "amount": 100}) for _ in range(4)))
    assert [one.ok for one in results] == [True, True, True, False]
    assert "has only 0" in results[3].error


async def test_what_the_sandbox_does_wrong_is_no_grade() -> None:
    class Failing:
        tier, layers = "A", dict[str, str]()

        async def call(self, *_: Any, **__: Any) -> CallResult:
            return CallResult(Outcome.ENV_DIED)

    assert await EpisodeCalls(Failing(), bank()).grade() is None


# ---------------------------------------------------------------------------------------------------------------------
# Records


async def test_records_round_trip_and_those_without_a_world_are_as_they_were() -> None:
    one = bank()
    assert decode(encode(one), ToolEnvironment) == one
    plain = msgspec.structs.replace(
        one,
        world=msgspec.UNSET,
        mode="question",
        sub_questions=[msgspec.structs.replace(step, check=msgspec.UNSET) for step in one.sub_questions],
    )
    assert b'"world"' not in encode(plain) and b'"check"' not in encode(plain)
    assert decode(encode(plain), ToolEnvironment) == plain


async def test_a_reader_that_knows_no_worlds_refuses_them_by_name() -> None:
    before = msgspec.defstruct("Before", [("mode", Literal["question", "imported"])])
    with pytest.raises(msgspec.ValidationError, match="mode"):
        decode(encode(bank()), before)


async def test_a_module_holds_what_the_record_holds() -> None:
    names: dict[str, Any] = {}
    world = bank().world
    assert isinstance(world, World)
    source = module_of(world)
    compile(source, "world", "exec")
    assert source == module_of(world) and "STATE" not in names


async def test_a_play_converts_results_as_a_call_does(pool: SandboxPool) -> None:
    world = bank().world
    assert isinstance(world, World)
    more = "def tags():\n    return {'b', 'a'}\ndef twice():\n    return {1: 'a', '1': 'b'}\n"
    module = module_of(msgspec.structs.replace(world, code=f"{world.code}\n{more}"))
    result = await pool.call(module, PLAYS, {"plays": [[["tags", {}], ["twice", {}]]], "checks": [], "closely": False})
    assert result.ok, result
    tags, twice = result.value[0]["outputs"]
    assert (
        tags
        == {"value": (await pool.call(module, "tags", {})).value, "error": ""}
        == {"value": ["a", "b"], "error": ""}
    )
    assert twice["value"] is None and twice["error"].partition(": ")[2] in (await pool.call(module, "twice", {})).error
