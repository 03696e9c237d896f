"""Episodes: calls that see each other's changes, in process and over HTTP, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import textwrap
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from serving import serving

from sandbox import Limits, Outcome, PastCall, Sandbox, SandboxConfig, SandboxEpisode, SandboxPool
from sandbox.protocol import digest
from sandbox.remote import RemotePool

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOP = textwrap.dedent(
    """
    import random, time

    BASKET = {}

    def add(item, count=1):
        BASKET[item] = BASKET.get(item, 0) + count
        print("added", item)
        return {"basket": BASKET}

    def add_then_fail(item):
        BASKET[item] = 1
        raise RuntimeError("the till is broken")

    def show():
        return BASKET

    def draw():
        time.sleep(10)
        return [random.random(), time.time()]

    def real_clock():
        import ctypes
        moment = (ctypes.c_long * 2)()
        ctypes.CDLL(None).clock_gettime(1, moment)
        return list(moment)

    def burn(seconds):
        import resource
        used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        until = used() + seconds
        while used() < until:
            pass
        return "burnt"

    def quit():
        import os
        os._exit(0)
    """
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(limits=Limits(argument_bytes=4_000))) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in process", "over HTTP"])
async def sandbox(request: pytest.FixtureRequest, pool: SandboxPool) -> AsyncIterator[Sandbox]:
    if request.param == "in process":
        yield pool
        return
    async with serving(pool) as (_, url), RemotePool(url) as remote:
        yield remote


async def test_a_call_sees_what_committed_calls_changed(sandbox: Sandbox) -> None:
    episode, other = SandboxEpisode(sandbox, SHOP), SandboxEpisode(sandbox, SHOP)
    assert (await episode.call("add", {"item": "apple"})).value == {"basket": {"apple": 1}}
    second = await episode.call("add", {"item": "apple", "count": 2})
    assert second.value == {"basket": {"apple": 3}}
    assert second.stdout == "added apple\n"  # not what the repeated call printed
    assert (await other.call("show", {})).value == {}
    assert (await sandbox.call(SHOP, "show", {})).value == {}
    assert (await episode.call("show", {})).value == {"apple": 3}


@pytest.mark.parametrize("function", ["add_then_fail", "quit", "no_such_function"])
async def test_a_call_that_fails_leaves_nothing_behind(sandbox: Sandbox, function: str) -> None:
    episode = SandboxEpisode(sandbox, SHOP)
    await episode.call("add", {"item": "apple"})
    failed = await episode.call(function, {"item": "pear"} if function == "add_then_fail" else {})
    assert not failed.ok and not failed.is_infrastructure
    assert (await episode.call("show", {})).value == {"apple": 1}


async def test_time_and_randomness_go_on(sandbox: Sandbox) -> None:
    async def drawn() -> list[list[float]]:
        episode = SandboxEpisode(sandbox, SHOP, seed=5, now=1_000_000_000)
        return [(await episode.call("draw", {})).value for _ in range(3)]

    first = await drawn()
    assert [moment for _, moment in first] == [1_000_000_010.0, 1_000_000_020.0, 1_000_000_030.0]
    assert len({number for number, _ in first}) == 3
    assert await drawn() == first


async def test_calls_made_at_once_take_turns(sandbox: Sandbox) -> None:
    episode = SandboxEpisode(sandbox, SHOP)
    await asyncio.gather(*(episode.call("add", {"item": "apple"}) for _ in range(20)))
    assert (await episode.call("show", {})).value == {"apple": 20}
    assert len(episode.history) == 21


async def test_what_does_not_repeat_is_named(sandbox: Sandbox) -> None:
    episode = SandboxEpisode(sandbox, SHOP)
    assert (await episode.call("real_clock", {})).ok
    result = await episode.call("show", {})
    assert result.kind is Outcome.DIVERGED and not result.is_infrastructure
    assert "real_clock returned something else" in result.error


async def test_repeating_is_granted_the_time_it_took() -> None:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=1))) as pool:
        episode = SandboxEpisode(pool, SHOP)
        for _ in range(2):
            assert (await episode.call("burn", {"seconds": 0.45})).value == "burnt"
        last = await episode.call("burn", {"seconds": 0.45})
        assert last.value == "burnt" and last.cpu_seconds > 1.3
        assert (await episode.call("burn", {"seconds": 30})).kind is Outcome.CPU_TIMEOUT


async def test_the_wall_limit_grows_with_the_time_that_is_granted() -> None:
    """On a processor that many share: else an episode of costly calls would be masked there."""
    waits = "import threading\ndef f(waits=False):\n    if waits:\n        threading.Event().wait()"
    limits = Limits(cpu_seconds=1, wall_seconds=1.5)
    async with SandboxPool(SandboxConfig(limits=limits, leave_out=("seccomp",), allow_unisolated=True)) as pool:
        before = PastCall("f", {}, digest("null"), 1.0)
        result = await pool.call(waits, "f", {"waits": True}, history=[before])
    assert result.kind is Outcome.IDLE_TIMEOUT and result.wall_seconds >= 2 * limits.wall_seconds


async def test_a_history_too_long_is_an_error_by_name(sandbox: Sandbox) -> None:
    episode = SandboxEpisode(sandbox, SHOP)
    results = [await episode.call("add", {"item": "x" * 900}) for _ in range(5)]
    assert [result.ok for result in results[:3]] == [True] * 3
    assert results[-1].kind is Outcome.TOO_LARGE and results[-1].ended_by == "arguments"


async def test_episodes_go_on_when_their_workers_are_killed() -> None:
    """Killed after some calls were committed, however slow the machine is."""
    chosen = random.Random(0)
    async with SandboxPool(SandboxConfig(max_slots=3)) as pool:
        committed = at_last_kill = 0

        async def shop(i: int) -> tuple[SandboxEpisode, dict[str, int]]:
            nonlocal committed
            episode, expected = SandboxEpisode(pool, SHOP + f"# {i}\n"), {}
            for step in range(12):
                item = f"item {step % 4}"
                result = await episode.call("add", {"item": item, "count": i})
                if result.ok:  # one that was killed twice is not committed
                    expected[item] = expected.get(item, 0) + i
                    committed += 1
            return episode, expected

        shops = asyncio.gather(*(shop(i) for i in range(6)))
        while not shops.done():
            await asyncio.sleep(0.01)
            if pool._zygote and pool._zygote.alive and committed >= at_last_kill + chosen.randint(8, 16):
                at_last_kill = committed
                os.kill(pool._zygote.pid, signal.SIGKILL)
        assert pool.stats.zygotes > 1
        for episode, expected in await shops:
            assert (await episode.call("show", {})).value == expected
        assert sum(len(episode.history) for episode, _ in await shops) > 30


async def test_a_bad_history_is_refused_by_name(pool: SandboxPool) -> None:
    body = {"code": SHOP, "function": "show", "arguments": {}, "history": [["add", {}, 3, 1.0]]}
    async with (
        serving(pool) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/call", json=body) as response,
    ):
        assert response.status == 400
        assert "field 'history' holds [\"add\", {}, 3, 1.0]" in (await response.json())["error"]


@pytest.mark.parametrize("seconds", ["-1", "NaN", "Infinity", "1e999", "1" + "0" * 400])
async def test_a_history_that_takes_no_possible_time_is_refused(pool: SandboxPool, seconds: str) -> None:
    with pytest.raises(ValueError, match="PastCall.cpu_seconds="):
        PastCall("add", {}, "0", json.loads(seconds))
    body = json.dumps({"code": SHOP, "function": "show", "arguments": {}, "history": [["add", {}, "0", 0]]})
    sent = {"data": body.replace('"0", 0', f'"0", {seconds}'), "headers": {"Content-Type": "application/json"}}
    async with (
        serving(pool) as (_, url),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/call", **sent) as response,
    ):
        assert response.status == 400


async def test_a_forged_history_is_no_way_around_the_code(pool: SandboxPool) -> None:
    forged = [PastCall("add", {"item": "gold"}, "0" * 16, 0.0)]
    assert (await pool.call(SHOP, "show", {}, history=forged)).kind is Outcome.DIVERGED
