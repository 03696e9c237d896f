"""The pool: outcomes, determinism, tiers, eviction, cancellation, faults, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import pytest_asyncio
from selection import by_day

from sandbox import CallResult, Limits, Outcome, SandboxConfig, SandboxEpisode, SandboxError, SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
TOOL = textwrap.dedent(
    """
    CAPITALS = {"France": "Paris", "中国": "北京"}

    def capital(country: str) -> str:
        if country not in CAPITALS:
            raise ValueError(f"unknown country {country!r}")
        return CAPITALS[country]

    def add(left, right):
        print("adding", left, right)
        return {"sum": left + right}

    def remember(value):
        CAPITALS[value] = value
        return sorted(CAPITALS)

    def spin():
        while True:
            pass

    NOT_A_FUNCTION = 3
    """
)
CHANCE = textwrap.dedent(
    """
    import datetime, hashlib, os, random, secrets, tempfile, threading, time, uuid

    class Thing:
        pass

    def chance():
        time.sleep(3)
        return {
            "random": [random.random(), random.Random().random(), random.SystemRandom().random(), random.choice("abc")],
            "bytes": [os.urandom(4).hex(), secrets.token_hex(4), uuid.uuid1().hex, uuid.uuid4().hex],
            "clock": [time.time(), time.time_ns(), time.monotonic(), time.perf_counter(), time.process_time()],
            "now": [str(datetime.datetime.now()), str(datetime.datetime.utcnow()), str(datetime.date.today())],
            "zone": [str(datetime.datetime.now(datetime.timezone.utc)), time.strftime("%c %Z"), time.ctime()],
            "hash": [hash("text"), hash((1, "a")), list({"b", "a", "c", "text"})],
            "process": [os.getpid(), os.getppid(), os.getcwd(), sorted(os.environ), threading.get_native_id()],
            "times": list(os.times()),
        }

    def types():
        moment = datetime.datetime.now()
        return [repr(moment), type(moment) is datetime.datetime, isinstance(moment, datetime.date)]
    """
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with SandboxPool() as pool:
        yield pool


# --- outcomes


async def test_a_call_returns_its_value_and_what_it_printed(pool: SandboxPool) -> None:
    begun = time.monotonic()
    result = await pool.call(TOOL, "add", {"left": 2, "right": 0.5})
    seen = time.monotonic() - begun
    assert (result.kind, result.value, result.stdout) == (Outcome.OK, {"sum": 2.5}, "adding 2 0.5\n")
    assert (result.ok, result.is_infrastructure, result.error, result.ended_by) == (True, False, "", "return")
    assert 0 < result.cpu_seconds < 1
    assert 0 < result.wall_seconds <= seen


async def test_arguments_and_results_keep_every_character(pool: SandboxPool) -> None:
    assert (await pool.call(TOOL, "capital", {"country": "中国"})).value == "北京"
    text = "'\"\\ \x00\u2028 ☃ 𝄞 __import__('os').system('id')"
    assert (await pool.call(TOOL, "add", {"left": text, "right": ""})).value == {"sum": text}


ERRORS = {
    "raises": ("capital", {"country": "Atlantis"}, "exception", "ValueError: unknown country 'Atlantis'"),
    "type error inside": ("add", {"left": 1, "right": "x"}, "exception", "TypeError: unsupported operand"),
    "no such function": ("capitol", {}, "function", "no function 'capitol'; it defines: add, capital, remember, spin"),
    "not a function": ("NOT_A_FUNCTION", {}, "function", "no function 'NOT_A_FUNCTION'"),
    "missing argument": ("capital", {}, "arguments", "missing 1 required positional argument: 'country'"),
    "unknown argument": ("capital", {"city": "Paris"}, "arguments", "capital(country: str) -> str"),
    "argument not JSON": ("add", {"left": float("nan"), "right": 1}, "arguments", "not a JSON object"),
    "argument no data": ("add", {"left": object(), "right": 1}, "arguments", "not a JSON object"),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_mistakes_are_tool_errors_that_a_model_can_read(pool: SandboxPool, case: str) -> None:
    function, arguments, ended_by, words = ERRORS[case]
    result = await pool.call(TOOL, function, arguments)
    assert (result.kind, result.ended_by) == (Outcome.TOOL_ERROR, ended_by)
    assert words in result.error
    assert result.value is None
    assert not result.is_infrastructure


RESULTS = """
import sys, enum, datetime, collections
from dataclasses import dataclass
from decimal import Decimal

class Colour(enum.Enum):
    RED = "red"

@dataclass
class Part:
    name: str
    price: Decimal
    tags: frozenset = frozenset()

TABLE = {"part": Part("bolt", Decimal("1.10"), frozenset("ba")), Colour.RED: datetime.date(2026, 1, 2)}

def common():
    return [TABLE, TABLE, {3, 1}, b"ab", range(2), collections.deque([1]), {"a": 1}.keys()]

def colliding(kind):
    pairs = {"int": (1, "1"), "none": (None, "null"), "bool": (True, "true"), "float": (1.0, "1.0")}
    first, second = {**pairs, "enum": (Colour.RED, "red")}[kind]
    return [{"a": {"b": {first: "a", second: "b"}}}]

def digits(count, limit):
    sys.set_int_max_str_digits(limit)
    return {"n": -(10 ** count - 1)}

def same(value):
    return value

def chance():
    return (n for n in range(3))
"""


async def test_results_of_common_types_have_one_json_form(pool: SandboxPool) -> None:
    table = {"part": {"name": "bolt", "price": 1.1, "tags": ["a", "b"]}, "red": "2026-01-02"}
    result = await pool.call(RESULTS, "common", {})
    assert result.value == [table, table, [1, 3], "ab", [0, 1], [1], ["a"]], result.error
    # Repeated, it has the digest of what the first call returned.
    episode = SandboxEpisode(pool, RESULTS)
    assert (await episode.call("common", {})).ok and (await episode.call("same", {"value": 1})).ok


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("int", "1 and '1'"),
        ("none", "None and 'null'"),
        ("bool", "True and 'true'"),
        ("float", "1.0 and '1.0'"),
        ("enum", "<Colour.RED: 'red'> and 'red'"),
    ],
)
async def test_keys_that_collide_in_json_are_the_tools_error(pool: SandboxPool, kind: str, keys: str) -> None:
    result = await pool.call(RESULTS, "colliding", {"kind": kind})
    assert (result.kind, result.ended_by, result.value) == (Outcome.UNSERIALISABLE, "result", None)
    assert f"its [0]['a']['b'] is an object whose keys {keys} are one in JSON" in result.error


@pytest.mark.parametrize("limit", [0, 640, 4300, 10**6])
async def test_integers_have_4300_digits_whatever_limit_a_tool_sets(pool: SandboxPool, limit: int) -> None:
    assert (await pool.call(RESULTS, "digits", {"count": 4300, "limit": limit})).value == {"n": -(10**4300 - 1)}
    result = await pool.call(RESULTS, "digits", {"count": 5000, "limit": limit})
    assert result.kind is Outcome.UNSERIALISABLE
    assert "its ['n'] is an integer of more than 4300 digits; return it as text" in result.error


@pytest.mark.parametrize("limit", [0, 4300])
async def test_arguments_with_longer_integers_are_refused_by_their_place(pool: SandboxPool, limit: int) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        result = await pool.call(RESULTS, "same", {"value": [10**5000]})
        assert (await pool.call(RESULTS, "same", {"value": 10**4299})).value == 10**4299
    finally:
        sys.set_int_max_str_digits(before)
    assert (result.kind, result.ended_by) == (Outcome.TOOL_ERROR, "arguments")
    assert "its ['value'][0] is an integer of more than 4300 digits" in result.error


async def test_a_result_without_a_json_form_says_what_to_return(pool: SandboxPool) -> None:
    result = await pool.call(RESULTS, "chance", {})
    assert (
        result.kind is Outcome.UNSERIALISABLE and "a generator, which can be read once; return a list" in result.error
    )


@pytest.mark.parametrize("name", ["", "C.UTF-8", "C"])
@pytest.mark.parametrize("tier", ["A", "C"])
async def test_tools_can_set_the_locale_of_their_environment(tier: str, name: str) -> None:
    code = (
        "import locale\ndef f(name):\n    locale.setlocale(locale.LC_ALL, name)\n    return f'{1234.5:n} é'.upper()\n"
    )
    async with SandboxPool(SandboxConfig(highest_tier=tier)) as pool:
        result = await pool.call(code, "f", {"name": name})
        assert result.value == "1234.5 É", result.error
        refused = await pool.call(code, "f", {"name": "de_DE.UTF-8"})
        assert (refused.kind, refused.error) == (Outcome.TOOL_ERROR, "Error: unsupported locale setting")


async def test_source_that_does_not_parse_names_the_line(pool: SandboxPool) -> None:
    for _ in range(2):  # the second comes from the cache
        result = await pool.call("x = 1\ndef f(:\n    pass\n", "f", {})
        assert (result.kind, result.ended_by) == (Outcome.TOOL_ERROR, "source")
        assert result.error == "SyntaxError: invalid syntax (line 2: 'def f(:')"


async def test_a_module_that_raises_when_loaded_says_so(pool: SandboxPool) -> None:
    result = await pool.call("import numpy", "f", {})
    assert (result.kind, result.ended_by) == (Outcome.TOOL_ERROR, "load")
    assert "ModuleNotFoundError: No module named 'numpy'" in result.error


async def test_what_was_printed_before_an_error_is_kept(pool: SandboxPool) -> None:
    result = await pool.call(TOOL, "add", {"left": 1, "right": None})
    assert result.stdout == "adding 1 None\n"


async def test_oversized_source_and_arguments_never_reach_a_slot() -> None:
    limits = Limits(argument_bytes=1000, source_bytes=1000)
    async with SandboxPool(SandboxConfig(limits=limits)) as pool:
        assert (await pool.call("def f(x): return 1", "f", {"x": "x" * 1000})).kind is Outcome.TOO_LARGE
        assert (await pool.call("#" * 1001, "f", {})).kind is Outcome.TOO_LARGE
        assert pool.stats.opened == 0


async def test_a_call_cannot_write_on_the_hosts_own_output(capfd: pytest.CaptureFixture[str]) -> None:
    source = "import os\ndef f():\n    return [os.write(n, b'tool was here') for n in (1, 2)]"
    async with SandboxPool() as pool:
        assert (await pool.call(source, "f", {})).value == [13, 13]
    assert capfd.readouterr() == ("", "")


async def test_limits_and_policies_are_checked() -> None:
    with pytest.raises(ValueError, match=r"cpu_seconds is 0\.5; use a whole number"):
        Limits(cpu_seconds=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wall_seconds is 0"):
        Limits(wall_seconds=0)
    with pytest.raises(ValueError, match="minimum_tier is 'E'"):
        SandboxConfig(minimum_tier="E")
    with pytest.raises(ValueError, match="concurrency is 9; use at most max_slots, which is 8"):
        SandboxConfig(concurrency=9, max_slots=8)


# --- determinism


async def test_same_call_same_bytes_over_repeats_workers_and_restarts(pool: SandboxPool) -> None:
    expected = json.dumps((await pool.call(CHANCE, "chance", {}, seed=7)).value)
    repeats = await asyncio.gather(*(pool.call(CHANCE, "chance", {}, seed=7) for _ in range(50)))
    async with SandboxPool(SandboxConfig(max_slots=1, concurrency=1)) as other:
        for _ in range(3):
            repeats.append(await other.call(CHANCE, "chance", {}, seed=7))
            await other.call(TOOL, "capital", {"country": "France"})  # evicts the slot: the next one is new
        assert other.stats.opened == 6
    assert {json.dumps(result.value) for result in repeats} == {expected}


async def test_the_seed_changes_randomness_and_nothing_else(pool: SandboxPool) -> None:
    one = (await pool.call(CHANCE, "chance", {}, seed=1)).value
    two = (await pool.call(CHANCE, "chance", {}, seed=2)).value
    assert [key for key in one if one[key] != two[key]] == ["random", "bytes"]


async def test_clock_starts_at_its_epoch_and_sleep_moves_it(pool: SandboxPool) -> None:
    value = (await pool.call(CHANCE, "chance", {})).value
    assert value["clock"][:2] == [1_767_225_603.0, 1_767_225_603_000_000_000]
    assert value["now"] == ["2026-01-01 00:00:03", "2026-01-01 00:00:03", "2026-01-01"]
    assert value["zone"][0] == "2026-01-01 00:00:03+00:00"


async def test_frozen_datetime_is_still_the_real_type(pool: SandboxPool) -> None:
    value = (await pool.call(CHANCE, "types", {})).value
    assert value == ["datetime.datetime(2026, 1, 1, 0, 0)", True, True]


async def test_a_call_does_not_see_an_earlier_one(pool: SandboxPool) -> None:
    for value in ("one", "two"):
        result = await pool.call(TOOL, "remember", {"value": value})
        assert result.value == sorted(["France", "中国", value])


# --- many at once


async def test_a_thousand_concurrent_calls_never_cross(pool: SandboxPool) -> None:
    rng = random.Random(0)
    pairs = [(rng.randrange(10**9), rng.randrange(10**9)) for _ in range(1000)]
    tools = [TOOL + f"\n# environment {i}\n" for i in range(8)]
    results = await asyncio.gather(
        *(pool.call(tools[i % 8], "add", {"left": a, "right": b}) for i, (a, b) in enumerate(pairs))
    )
    for (left, right), result in zip(pairs, results, strict=True):
        assert result.ok, result
        assert result.value == {"sum": left + right}
        assert result.stdout == f"adding {left} {right}\n"


async def test_innocent_calls_pass_beside_a_spinner(pool: SandboxPool) -> None:
    spinner = asyncio.create_task(pool.call(TOOL, "spin", {}))
    results = await asyncio.gather(*(pool.call(TOOL, "capital", {"country": "France"}) for _ in range(50)))
    assert all(result.value == "Paris" for result in results)
    assert (await spinner).kind is Outcome.CPU_TIMEOUT


async def test_least_recently_used_idle_slot_is_evicted() -> None:
    tools = [f"def f(): return {i}" for i in range(4)]
    async with SandboxPool(SandboxConfig(max_slots=2, concurrency=2)) as pool:
        for i in (0, 1, 0, 2, 0, 1):
            assert (await pool.call(tools[i], "f", {})).value == i
        # 0 stays throughout; 2 took the place of 1, then 1 that of 2.
        assert (pool.stats.opened, pool.stats.evicted) == (4, 2)
        results = await asyncio.gather(*(pool.call(tools[i % 4], "f", {}) for i in range(40)))
        assert [result.value for result in results] == [i % 4 for i in range(40)]


# --- faults


async def test_cancelling_a_caller_ends_its_call_and_frees_its_place() -> None:
    config = SandboxConfig(max_slots=1, spare_slots=0, concurrency=1, limits=Limits(cpu_seconds=30))
    async with SandboxPool(config) as pool:
        spinner = asyncio.create_task(pool.call(TOOL, "spin", {}))
        await asyncio.sleep(0.3)
        spinner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spinner
        result = await asyncio.wait_for(pool.call(TOOL, "capital", {"country": "France"}), 60)
        assert result.value == "Paris"
        assert pool.stats.opened == 1
        deadline = asyncio.get_running_loop().time() + 60
        while len(descendants(os.getpid(), pool)) > 2:  # zygote and slot
            assert asyncio.get_running_loop().time() < deadline, "the cancelled call is still running"
            await asyncio.sleep(0.05)


async def test_killed_slots_and_zygotes_lose_no_call() -> None:
    tools = [TOOL + f"\n# environment {i}\n" for i in range(3)]
    async with SandboxPool(SandboxConfig(max_slots=4, concurrency=4)) as pool:

        async def one(i: int) -> CallResult:
            return await pool.call(tools[i % 3], "add", {"left": i, "right": 1})

        calls = [asyncio.create_task(one(i)) for i in range(300)]
        for victim in ("slot", "zygote", "slot"):
            await asyncio.sleep(0.15)
            killed = False
            while not killed:
                processes = descendants(os.getpid(), pool)
                zygote = pool._zygote.pid  # type: ignore[union-attr]
                chosen = zygote if victim == "zygote" else next((p for p in processes if p != zygote), zygote)
                with contextlib.suppress(ProcessLookupError):  # a slot may end by itself meanwhile
                    os.kill(chosen, signal.SIGKILL)
                    killed = True
        results = await asyncio.gather(*calls)
        for i, result in enumerate(results):
            assert result.is_infrastructure or result.value == {"sum": i + 1}, result
        assert sum(result.ok for result in results) >= 290
        assert (await pool.call(TOOL, "capital", {"country": "France"})).value == "Paris"
        assert pool.stats.zygotes >= 2


async def test_a_module_opens_although_the_process_that_waited_for_it_was_killed() -> None:
    async with SandboxPool(SandboxConfig(spare_slots=1)) as pool:
        async with asyncio.timeout(60):
            while len(below := descendants(os.getpid(), pool)) != 3:
                await asyncio.sleep(0.01)
        zygote, _, waiting = below  # the slot forks the last
        assert zygote == pool._zygote.pid  # type: ignore[union-attr]
        os.kill(waiting, signal.SIGKILL)
        while waiting in descendants(os.getpid(), pool):
            await asyncio.sleep(0.01)
        assert (await pool.call(TOOL, "capital", {"country": "France"})).value == "Paris"
        assert (pool.stats.opened, pool.stats.retried, pool.stats.evicted) == (1, 0, 0)


async def test_a_zygote_whose_slots_end_before_it_loses_no_call() -> None:
    """As when it is killed on a busy machine, here drawn out: the slots end, it answers no more, then it ends."""
    code = "def add_up(count):\n    return sum(range(count))"
    async with SandboxPool(SandboxConfig(max_slots=1, spare_slots=1, limits=Limits(cpu_seconds=60))) as pool:
        assert (await pool.call(code, "add_up", {"count": 3})).value == 3
        async with asyncio.timeout(60):
            await pool._spares[0]
            zygote = pool._zygote.pid
            # Two slots. The first call's process may still be ending, so a count of processes does not tell which is
            # which: in the spare slot one waits, in the other none does.
            while [len(children(slot)) for slot in children(zygote)] != [0, 1]:
                await asyncio.sleep(0.01)
        slot, spare = children(zygote)
        call = asyncio.create_task(pool.call(code, "add_up", {"count": 50_000_000}))  # for half a second or more
        await asyncio.sleep(0.2)
        for stopped in (zygote, spare):  # a stopped process is alive and does not answer
            os.kill(stopped, signal.SIGSTOP)
        for ended in (slot, spare, zygote):
            os.kill(ended, signal.SIGKILL)
            await asyncio.sleep(0.2)
        result = await call
        assert result.value == 1_249_999_975_000_000, (result, pool.stats)
        assert (pool.stats.retried, pool.stats.infrastructure, pool.stats.zygotes) == (1, 0, 2)


async def test_more_new_environments_than_the_zygote_takes_orders_for_wait() -> None:
    """Some 170 orders fill its socket. That was read as its end, and it was ended with all environments."""
    async with SandboxPool(SandboxConfig(max_slots=260, concurrency=260, spare_slots=0)) as pool:
        assert (await pool.call(TOOL, "add", {"left": 1, "right": 2})).value == {"sum": 3}
        os.kill(pool._zygote.pid, signal.SIGSTOP)
        code = "def number():\n    return {}\n"
        calls = [asyncio.create_task(pool.call(code.format(one), "number", {})) for one in range(250)]
        await asyncio.sleep(0.5)
        os.kill(pool._zygote.pid, signal.SIGCONT)
        assert [(await one).value for one in calls] == list(range(250))
        assert (pool.stats.zygotes, pool.stats.retried, pool.stats.infrastructure) == (1, 0, 0)


async def test_closing_during_a_call_ends_it_as_env_died() -> None:
    """That which runs, that which waits for a permit, and that whose environment is being opened."""
    pool = SandboxPool(SandboxConfig(max_slots=2, concurrency=2, spare_slots=0, limits=Limits(cpu_seconds=30)))
    async with pool:
        running = asyncio.create_task(pool.call(TOOL, "spin", {}))
        await asyncio.sleep(0.3)
        calls = [running, *(asyncio.create_task(pool.call(TOOL + f"# {i}", "spin", {})) for i in range(3))]
        await asyncio.sleep(0)
    for result in await asyncio.gather(*calls):
        assert (result.kind, result.ended_by) == (Outcome.ENV_DIED, "pool"), result
    assert pool.stats.retried == 0
    with pytest.raises(SandboxError, match="not open"):
        await pool.call(TOOL, "spin", {})


def parents_of_processes() -> dict[int, int]:
    """The parent of every process that has not ended, in the order in which they began, which ids are not: these begin
    anew at some 32,000."""
    found: list[tuple[int, int, int]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found.append((int(fields[19]), int(entry.name), int(fields[1])))
    return {process: parent for _, process, parent in sorted(found)}


def children(process: int) -> list[int]:
    return [child for child, parent in parents_of_processes().items() if parent == process]


def descendants(root: int, pool: SandboxPool) -> list[int]:
    """Process ids below `root` that are of this pool."""
    zygote = pool._zygote.pid if pool._zygote else 0
    parents = parents_of_processes()
    found = {zygote} & parents.keys()
    while grown := {p for p, parent in parents.items() if parent in found} - found:
        found |= grown
    return [process for process in parents if process in found]


async def test_close_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=30)))
    async with pool:
        await asyncio.gather(*(pool.call(f"def f(): return {i}", "f", {}) for i in range(10)))
        spinner = asyncio.create_task(pool.call(TOOL, "spin", {}))
        await asyncio.sleep(0.3)
        processes = descendants(os.getpid(), pool)
        assert len(processes) >= 12  # zygote, 11 slots, and usually the spinner's call
    assert [pid for pid in processes if os.path.exists(f"/proc/{pid}")] == []
    assert (await spinner).kind is Outcome.ENV_DIED
    with pytest.raises(SandboxError, match="not open"):
        await pool.call(TOOL, "add", {"left": 1, "right": 2})
    await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_nothing_outlives_a_killed_host() -> None:
    script = """
        import asyncio, sys
        from sandbox import SandboxPool
        async def main():
            async with SandboxPool() as pool:
                await pool.call("def f(): return 1", "f", {})
                print(pool._zygote.pid, flush=True)
                await pool.call("def f():\\n while True: pass", "f", {})
        asyncio.run(main())
    """
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert host.stdout is not None
    zygote = int(await asyncio.to_thread(host.stdout.readline))
    session = os.getsid(zygote)
    assert session == zygote
    host.kill()
    await asyncio.to_thread(host.wait)
    host.stdout.close()
    deadline = asyncio.get_running_loop().time() + 60
    while os.path.exists(f"/proc/{zygote}"):
        assert asyncio.get_running_loop().time() < deadline, "the zygote outlived its host"
        await asyncio.sleep(0.05)


# --- tiers


async def test_tier_and_layers_are_named(pool: SandboxPool) -> None:
    assert pool.tier in "ABC"
    assert {"namespaces", "root", "uid", "capabilities", "landlock", "seccomp", "rlimits"} <= pool.layers.keys()
    assert pool.layers["seccomp"].startswith("allow-list")


@pytest.mark.parametrize("tier", by_day(["B", "C", "D"], "D"))
async def test_lower_tiers_compute_the_same(tier: str) -> None:
    config = SandboxConfig(highest_tier=tier, minimum_tier="D", allow_unisolated=True)
    async with SandboxPool(config) as pool:
        assert pool.tier == tier
        assert (await pool.call(TOOL, "add", {"left": 1, "right": 2})).value == {"sum": 3}


async def test_an_interpreter_that_cannot_run_is_named() -> None:
    with pytest.raises(SandboxError, match=r"SandboxConfig\.python='/nowhere/python'"):
        async with SandboxPool(SandboxConfig(python="/nowhere/python")):
            pass


async def test_policy_refuses_what_is_too_weak() -> None:
    with pytest.raises(SandboxError, match="tier B.*minimum_tier asks for A"):
        async with SandboxPool(SandboxConfig(highest_tier="B", minimum_tier="strict")):
            pass
    with pytest.raises(SandboxError, match="allow_unisolated=True"):
        async with SandboxPool(SandboxConfig(highest_tier="D", minimum_tier="D")):
            pass


REFUSE_NAMESPACES = """
    import asyncio, ctypes, errno, struct, sys
    from sandbox import SandboxConfig, SandboxPool
    from sandbox.seccomp import SyscallFilter
    from sandbox.syscalls import MACHINE
    calls = {"x86_64": (272, 165, 155, 135, 308), "aarch64": (97, 40, 41, 92, 268)}[MACHINE]
    program = [(0x20, 0, 0, 0)]  # unshare, mount, pivot_root, personality, setns: as a container's profile refuses them
    for number in calls:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    program.append((0x06, 0, 0, 0x7FFF0000))
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    filter = SyscallFilter(program)
    function, arguments = filter.attachment()
    assert function(*arguments) == 0
    async def main():
        async with SandboxPool(SandboxConfig()) as pool:
            result = await pool.call("def f(): return 'inside'", "f", {})
            print(pool.tier, result.value)
    asyncio.run(main())
"""


async def run_host(script: str, *prefix: str, python: str = sys.executable) -> str:
    process = await asyncio.create_subprocess_exec(
        *prefix,
        python,
        "-c",
        textwrap.dedent(script),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode().strip()


async def test_where_namespaces_are_refused_the_tier_is_b() -> None:
    assert await run_host(REFUSE_NAMESPACES) == "B inside"


async def test_an_ordinary_user_gets_the_same_tier(pool: SandboxPool) -> None:
    """Needs an interpreter that everybody can read; the superuser's may be below a private home."""
    python = next((p for p in (sys.executable, "/usr/bin/python3") if readable_by_everybody(p)), None)
    if os.geteuid() != 0 or python is None or not os.path.exists("/usr/bin/setpriv"):
        pytest.skip("needs the superuser, setpriv and an interpreter outside private directories")
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout.strip() != b"True":
        pytest.skip("the public interpreter is older than Python 3.11")
    script = """
        import asyncio
        from sandbox import SandboxPool
        async def main():
            async with SandboxPool() as pool:
                print(pool.tier, (await pool.call("def f(): return 1", "f", {})).value)
        asyncio.run(main())
    """
    prefix = ("/usr/bin/setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    assert await run_host(script, *prefix, python=python) == f"{pool.tier} 1"


def readable_by_everybody(path: str) -> bool:
    real = Path(os.path.realpath(path))
    return real.exists() and all(parent.stat().st_mode & 0o001 for parent in real.parents)


async def test_the_zygote_needs_no_importable_package_and_no_jax_fork() -> None:
    """It is exec'd by path: the host's threads and the working directory play no part."""
    script = """
        import asyncio, sys, threading
        from sandbox import SandboxPool
        async def main():
            async with SandboxPool() as pool:
                source = "import sys\\ndef f(): return [m for m in ('sandbox', 'asyncio', 'numpy') if m in sys.modules]"
                print((await pool.call(source, "f", {})).value)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        asyncio.run(main())
    """
    assert await run_host(script) == "[]"
