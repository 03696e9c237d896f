"""Proofs of worlds: the reference play reaches its state, and each kind of bad world is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from state_world import CHECK, CODE, OTHERS, PAID, bank

from sandbox import Limits, SandboxConfig, SandboxPool
from synthesis.core.records import ToolEnvironment, World
from synthesis.core.stages import Rejected
from synthesis.core.tool_schemas import argument_error
from synthesis.environments.world_proof import HOSTILE_TEXTS, RANDOM_CALLS, prove_world, random_calls, verify_world

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=1))) as opened:  # one predicate loops
        yield opened


def unproven(environment: ToolEnvironment) -> ToolEnvironment:
    calls = [msgspec.structs.replace(one, output=None, rule="") for one in environment.reference_calls]
    world = environment.world
    assert isinstance(world, World)
    return msgspec.structs.replace(environment, reference_calls=calls, world=msgspec.structs.replace(world, changes=[]))


async def test_the_proof_finds_outputs_rules_and_changes(pool: SandboxPool) -> None:
    proven = await prove_world(unproven(bank()), OTHERS, pool)
    assert proven.calls == bank().reference_calls
    world = bank().world
    assert isinstance(world, World)
    # What is open cannot do harm, and is not noted.
    assert proven.world.changes == [one for one in world.changes if one.table == "transfers"]
    await verify_world(msgspec.structs.replace(bank(), world=proven.world), OTHERS, pool)


FOUND = '            return {"account"'
GIVE = '    return {"transfer": id}'
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "a predicate that raises": ({"check": "def check(before, after):\n    return after['x']"}, "bad_check"),
    "a predicate that loops": ({"check": "def check(before, after):\n    while True: pass"}, "world_failed"),
    "a predicate that always says yes": ({"check": "def check(before, after):\n    return True"}, "read_tool_mutates"),
    "a predicate that never does": ({"check": "def check(before, after):\n    return False"}, "not_reached"),
    "a predicate that takes any payment": (
        {"check": "def check(before, after):\n    return len(after['transfers']) > 0"}, "ignores_arguments",
    ),
    "a predicate that is no answer": ({"check": "def check(before, after):\n    return 1"}, "bad_check"),
    "a predicate that draws lots": (
        {"check": "import random\n" + CHECK.replace("== 1", "== 1 and random.random() < 0.5")},
        "nondeterministic",
    ),
    "money that is made": ({"code": CODE.replace("+= amount", "+= amount + 1")}, "broken_invariant"),
    "an overdraft that hostile calls find": (
        {"code": CODE.replace('    if STATE["accounts"][source]["balance"] < amount:', "    if amount == 51:")},
        "broken_invariant",
    ),
    "a tool that reads the clock": (
        {"code": "import time\n" + CODE.replace(GIVE, '    return {"transfer": id, "at": time.time()}')}, "reads_clock",
    ),
    "a tool that uses the network": ({"code": "import socket\n" + CODE}, "needs_network"),
    "a tool that fails": ({"code": CODE.replace(GIVE, "    raise ValueError('closed')")}, "tool_failed"),
    "a look-up that writes": (
        {"code": CODE.replace(FOUND, '            row["owner"] = row["owner"].upper()\n' + FOUND)},
        "read_tool_mutates",
    ),
    "a look-up that finds whoever is first": (
        {"code": CODE.replace('if row["owner"] == owner:', 'if owner in row["owner"]:')}, "ignores_arguments",
    ),
    "a state that is kept elsewhere": (
        {"code": "SEEN = []\n" + CODE.replace(GIVE, '    SEEN.append(1)\n    return {"transfer": id, "n": len(SEEN)}')},
        "hidden_state",
    ),
    "no invariants": ({"code": CODE.replace("def broken", "def forgotten")}, "world_failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_worlds_are_refused(name: str, pool: SandboxPool) -> None:
    spoilt, reason = REFUSED[name]
    environment = unproven(bank(**spoilt))
    assert environment.world != bank().world or environment.sub_questions != bank().sub_questions
    with pytest.raises(Rejected) as refused:
        await prove_world(environment, OTHERS, pool)
    assert refused.value.reason == reason, refused.value.detail


async def test_a_look_up_that_completes_a_part_of_its_answer_is_refused(pool: SandboxPool) -> None:
    completes = CODE.replace('row["owner"] == owner', 'owner in (row["owner"], id[:5])')
    for code, reason in ((CODE, ""), (completes, "find_account(owner='Accou') returned")):
        stored = msgspec.json.encode([unproven(bank(code=code)), OTHERS]).replace(b"A71", b"Account 7")
        environment, others = msgspec.json.decode(stored, type=tuple[ToolEnvironment, dict[int, dict[str, Any]]])
        if not reason:
            assert await prove_world(environment, others, pool)
            continue
        with pytest.raises(Rejected) as refused:
            await prove_world(environment, others, pool)
        assert refused.value.reason == "ignores_arguments" and reason in refused.value.detail


async def test_harm_that_nobody_would_see_is_refused(pool: SandboxPool) -> None:
    """Where all that a wrong write changes is left open."""
    environment = unproven(bank())
    world = environment.world
    assert isinstance(world, World)
    opened = [*world.open, *(f"transfers.{column}" for column in PAID)]
    blind = msgspec.structs.replace(environment, world=msgspec.structs.replace(world, open=opened))
    # Two added rows without a closed column are alike, so a second one is still seen; a change of a row is not.
    proven = await prove_world(blind, OTHERS, pool)
    assert proven.world.changes
    with pytest.raises(Rejected) as refused:
        await prove_world(environment, {**OTHERS, 3: {**PAID, "amount": 10_000}}, pool)
    assert refused.value.reason == "no_wrong_write"


async def test_an_order_that_does_not_matter_is_no_dependency(pool: SandboxPool) -> None:
    environment = unproven(bank())
    twice = "def check(before, after):\n    return {!r} in after['transfers'].values()\n"
    second = {**PAID, "target": "A40"}
    steps = [
        *environment.sub_questions[:2],
        msgspec.structs.replace(environment.sub_questions[2], check=twice.format(PAID)),
        msgspec.structs.replace(
            environment.sub_questions[2], id=4, depends_on=[1, 3], hop=3, question="And to Cy's.",
            check=twice.format(second),
        ),
    ]  # fmt: skip
    call = msgspec.structs.replace(environment.reference_calls[2], sub_question=4, arguments=second)
    two = msgspec.structs.replace(
        environment, sub_questions=steps, reference_calls=[*environment.reference_calls, call]
    )
    with pytest.raises(Rejected) as refused:
        await prove_world(two, {**OTHERS, 4: {**second, "amount": 3}}, pool)
    assert refused.value.reason == "unneeded_dependency"


async def test_a_record_that_was_changed_is_not_stored(pool: SandboxPool) -> None:
    one = bank()
    forged = [*one.reference_calls[:2], msgspec.structs.replace(one.reference_calls[2], output={"transfer": "T9"})]
    with pytest.raises(Rejected) as refused:
        await verify_world(msgspec.structs.replace(one, reference_calls=forged), OTHERS, pool)
    assert refused.value.reason == "replay_failed"
    assert isinstance(one.world, World)
    blamed = msgspec.structs.replace(one, world=msgspec.structs.replace(one.world, changes=[]))
    with pytest.raises(Rejected) as refused:
        await verify_world(blamed, OTHERS, pool)
    assert refused.value.reason == "not_solved"


async def test_random_calls_are_the_same_ones_fit_and_are_hostile() -> None:
    calls: list[tuple[str, Any]] = list(random_calls(bank(), RANDOM_CALLS))
    assert calls == list(random_calls(bank(), RANDOM_CALLS)) and len(calls) > RANDOM_CALLS * 0.9
    specs = {tool.spec.name: tool.spec for tool in bank().tools}
    assert not any(argument_error(specs[name].parameters, given) for name, given in calls)
    values = [value for _, given in calls for value in given.values()]
    assert sum(value in HOSTILE_TEXTS for value in values) > 30 and -(10**9) in values and "A71" in values
