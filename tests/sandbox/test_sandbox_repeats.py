"""The same call of the same module returns the same bytes: on any worker, in any order, after any restart."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import textwrap

import pytest

from sandbox import Limits, SandboxConfig, SandboxPool

CALLS = int(os.environ.get("ASTRA_REPEATS", "4000"))
"""10,000 take half a minute."""

MODULES = [
    textwrap.dedent(text)
    for text in (
        """
        import random, secrets, uuid, os

        def draw(count):
            numbers = [random.random() for _ in range(count)]
            return [numbers, secrets.token_hex(8), str(uuid.uuid4()), os.urandom(6).hex(), random.Random().random()]
        """,
        """
        import datetime, time

        def draw(count):
            begun = time.perf_counter()
            for _ in range(count):
                time.sleep(0.25)
            print(datetime.datetime.now(), time.ctime())
            return [time.time(), time.perf_counter() - begun, str(datetime.date.today()), time.strftime("%c %Z")]
        """,
        """
        class Thing:
            pass

        SEEN = []

        def draw(count):
            SEEN.extend(range(count))
            words = {f"word {i}" for i in range(count + 5)}
            print(len(SEEN), list(words))
            return [list(words), hash("text"), hash((1, "a")), len(SEEN), sorted(map(str, {1.5, None, (2,)}))]
        """,
        """
        import json, locale, math, os, sys, threading

        def draw(count):
            if count % 3 == 0:
                raise ValueError({"count": count, "names": {"b", "a", "c"}})
            return [os.getpid(), os.getcwd(), sorted(os.environ), locale.getlocale(), sys.flags.hash_randomization,
                    threading.get_ident() == threading.main_thread().ident, math.fsum([0.1] * count)]
        """,
    )
]


@pytest.mark.slow
async def test_thousands_of_calls_differ_in_nothing() -> None:
    """160 distinct calls, each 25 times, repeated in random order by two pools in turn, zygotes killed in between."""
    calls = [(code, {"count": n}, seed) for code in MODULES for n in range(8) for seed in range(5)]
    dice = random.Random(0)
    order = [calls[i % len(calls)] for i in range(CALLS)]
    dice.shuffle(order)
    seen: dict[str, str] = {}
    different: list[tuple[str, str, str]] = []

    async def one(pool: SandboxPool, call: tuple[str, dict, int]) -> None:
        code, arguments, seed = call
        result = await pool.call(code, "draw", arguments, seed=seed)
        assert not result.is_infrastructure, result
        answer = json.dumps([result.kind, result.value, result.stdout, result.error], ensure_ascii=False)
        key = json.dumps([code, arguments, seed])
        if seen.setdefault(key, answer) != answer:
            different.append((key, seen[key], answer))

    limits = Limits(cpu_seconds=5, wall_seconds=60)
    quarter, size = CALLS // 4, CALLS // 20
    for number, start in enumerate(range(0, 4 * quarter, quarter)):
        # Few slots, so that environments are evicted and opened again all the time.
        async with SandboxPool(SandboxConfig(max_slots=8 if number % 2 else 3, limits=limits)) as pool:
            for block in range(start, start + quarter, size):
                await asyncio.gather(*(one(pool, call) for call in order[block : block + size]))
                if block == start + 2 * size:
                    assert pool._zygote is not None
                    os.kill(pool._zygote.pid, signal.SIGKILL)
    assert not different, different[:3]
    assert len(seen) == len(calls)
    assert len(set(seen.values())) > 50, "the calls are too alike to show anything"
