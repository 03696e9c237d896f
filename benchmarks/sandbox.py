"""The sandbox's speed, beside a fresh interpreter per call and bubblewrap, interleaved in one run.

    python -m benchmarks.sandbox [--save]

One environment: a tool over a table of 300 rows. Rates are with enough callers to keep every CPU busy, latencies with
64 callers and with one. `--only=` leaves parts out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound
from benchmarks import rows
from benchmarks.processes import descendants
from launch.flags import cli
from launch.flags.numbers import number_flag
from sandbox import Sandbox, SandboxConfig, SandboxPool

PARTS = ("rates", "cold", "latency", "http", "many", "fleet")
_ONLY = flags.DEFINE_list("only", list(PARTS), f"Of {', '.join(PARTS)}.")
_ROUNDS = number_flag("rounds", 5, Annotated[int, Bound(least=3, most=2**31 - 1)], "Turns of each side.")
_SECONDS = number_flag("seconds", 4.0, Annotated[float, Bound(least=0.5, most=86_400)], "Of each turn.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/sandbox.jsonl.")

CALLERS = 64
ENVIRONMENTS = 1000
TABLE = {f"country {i}": {"capital": f"city {i}", "population": 1000 * i + 7, "codes": [i, i + 1]} for i in range(300)}
TOOL = f"""
import json

TABLE = {TABLE!r}

def capital_of_country(country):
    row = TABLE.get(country)
    if row is None:
        raise ValueError(f"unknown country {{country!r}}")
    return {{"country": country, **row}}
"""
FUNCTION, ARGUMENTS = "capital_of_country", {"country": "country 123"}
EXPECTED = {"country": "country 123", **TABLE["country 123"]}
SCRIPT = TOOL + f"\nprint(json.dumps({FUNCTION}(**json.loads({json.dumps(json.dumps(ARGUMENTS))}))))\n"

Call = Callable[[], Awaitable[None]]


def sandboxed(pool: Sandbox, code: str = TOOL) -> Call:
    async def call() -> None:
        result = await pool.call(code, FUNCTION, ARGUMENTS)
        assert result.value == EXPECTED, result

    return call


def spawned(*command: str) -> Call:
    """A fresh process that gets the tool and its call as a script."""

    async def call() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={"PATH": os.environ["PATH"]}
        )
        out, _ = await process.communicate(SCRIPT.encode())
        assert json.loads(out) == EXPECTED, out

    return call


def bubblewrap() -> list[str] | None:
    """All namespaces and a read-only root, as its manual shows; None when it is not installed."""
    if (program := shutil.which("bwrap")) is None:
        return None
    return [program, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--tmpfs", "/tmp"]


async def rate(call: Call, seconds: float, callers: int) -> tuple[float, list[float]]:
    """(calls a second, latencies in seconds)."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def caller() -> None:
        while (started := time.perf_counter()) < until:
            await call()
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(latencies) / (time.perf_counter() - started), latencies


def percentiles(latencies: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(latencies, n=100)
    return {"p50_ms": round(1000 * cuts[49], 3), "p99_ms": round(1000 * cuts[98], 3)}


def _cpu_seconds_below() -> float:
    """User and system time of this process's descendants, with that of those which they have reaped: the calls."""
    ticks = 0
    for fields in descendants().values():
        ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


async def rates(pool: SandboxPool) -> dict[str, Any]:
    cpus = len(os.sched_getaffinity(0))
    sides = {"sandbox": sandboxed(pool), "python -I": spawned(sys.executable, "-I", "-")}
    if wrap := bubblewrap():
        sides["bubblewrap + python -I"] = spawned(*wrap, sys.executable, "-I", "-")
    found: dict[str, list[float]] = {name: [] for name in sides}
    cost = []
    for _ in range(_ROUNDS.value):
        for name, call in sides.items():
            before = time.process_time(), _cpu_seconds_below()
            calls_per_second, latencies = await rate(call, _SECONDS.value, 4 * cpus)
            found[name].append(calls_per_second)
            if name == "sandbox":
                spent = time.process_time() + _cpu_seconds_below() - sum(before)
                cost.append(1000 * spent / len(latencies))
    ours = found["sandbox"]
    return {
        "calls_per_second": {name: round(statistics.median(one), 1) for name, one in found.items()},
        "cpu_ms_per_call": round(statistics.median(cost), 2),
        "calls_per_second_per_cpu": round(statistics.median(ours) / cpus, 1),
        "ratio": {
            name: round(statistics.median(mine / theirs for mine, theirs in zip(ours, one, strict=True)), 2)
            for name, one in found.items()
            if name != "sandbox"
        },
    }


async def cold(pool: SandboxPool) -> dict[str, Any]:
    """From a module that was never seen to its first result, and the part of it that a second call does not need.

    One at a time, when the pool has had a moment to open a spare slot, and one right after the other.
    """
    found: dict[str, Any] = {}
    for name, pause in (("cold", 0.05), ("cold_in_a_row", 0.0)):
        first, again = [], []
        for i in range(20 * _ROUNDS.value):
            await asyncio.sleep(pause)
            call = sandboxed(pool, f"{TOOL}\n# {time.time_ns()} {i}\n")
            for seconds in (first, again):
                started = time.perf_counter()
                await call()
                seconds.append(1000 * (time.perf_counter() - started))
        ready = [one - two for one, two in zip(first, again, strict=True)]
        found[f"{name}_first_result_ms"] = round(statistics.median(first), 2)
        found[f"{name}_ready_ms"] = round(statistics.median(ready), 2)
    started = time.perf_counter()
    for _ in range(50):
        compile(TOOL, "<tool>", "exec")
    return found | {"compile_ms": round(1000 * (time.perf_counter() - started) / 50, 2)}


async def latency(pool: SandboxPool) -> dict[str, Any]:
    alone, many = [], []
    for _ in range(_ROUNDS.value):
        alone += (await rate(sandboxed(pool), _SECONDS.value, 1))[1]
        many += (await rate(sandboxed(pool), _SECONDS.value, CALLERS))[1]
    at_64 = percentiles(many)
    return {"one_caller": percentiles(alone), "64_callers": at_64, "p99_over_p50": at_64["p99_ms"] / at_64["p50_ms"]}


EMPTY_SERVICE = """
import asyncio
from aiohttp import web

async def main():
    async def answer(request):
        await request.read()
        return web.json_response(None)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"nothing on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def service(*command: str) -> AsyncIterator[tuple[str, Callable[[], float]]]:
    """(address of a service in a process of its own, its CPU seconds so far)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=rows.ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().split()[2].rstrip(",")
        yield url, lambda: int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9
    finally:
        process.terminate()
        await process.wait()


async def http(pool: SandboxPool) -> dict[str, Any]:
    """Measure the overhead of the service for one caller on loopback; its process is separate from the caller's.

    CPU times are those of the caller's and the service's process, without the sandbox. For comparison, aiohttp alone is
    measured: a service that does nothing, which the same caller asks again after each answer, so that its caches are
    warm.
    """
    import aiohttp

    from sandbox.remote import RemotePool

    async with (
        service("-m", "launch.sandbox_server", "--port=0") as (url, seconds),
        service("-c", EMPTY_SERVICE) as (empty_url, empty_seconds),
        RemotePool(url) as remote,
        aiohttp.ClientSession() as session,
    ):

        async def ask() -> None:
            async with session.post(empty_url, data=b"{}") as response:
                await response.json()

        await sandboxed(remote)()
        sides: dict[str, tuple[Call, Callable[[], float]]] = {
            "in_process": (sandboxed(pool), lambda: 0.0),
            "http": (sandboxed(remote), seconds),
            "empty": (ask, empty_seconds),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}  # ms: latency, here, there
        for _ in range(4 * _ROUNDS.value):  # short turns: the difference is small
            for name, (call, there) in sides.items():
                before = time.process_time(), there()
                latencies = (await rate(call, _SECONDS.value / 4, 1))[1]
                spent = [
                    1000 * (after - one) for after, one in zip((time.process_time(), there()), before, strict=True)
                ]
                found[name].append((1000 * statistics.median(latencies), *(one / len(latencies) for one in spent)))
    middle = {name: [statistics.median(column) for column in zip(*turns, strict=True)] for name, turns in found.items()}
    adds = [one - two for one, two in zip(middle["http"], middle["in_process"], strict=True)]
    return {
        "http_adds_ms": round(adds[0], 3),
        "http_adds_cpu_ms": round(adds[1] + adds[2], 3),
        "in_process_ms": round(middle["in_process"][0], 3),
        "in_process_cpu_ms": round(middle["in_process"][1], 3),
        "http_caller_cpu_ms": round(middle["http"][1], 3),
        "http_service_cpu_ms": round(middle["http"][2], 3),
        "empty_http_ms": round(middle["empty"][0], 3),
        "empty_http_cpu_ms": round(middle["empty"][1] + middle["empty"][2], 3),
    }


async def many() -> dict[str, Any]:
    """Environments open at once, each called, and the memory of all of the sandbox's processes together."""
    config = SandboxConfig(max_slots=ENVIRONMENTS)
    async with SandboxPool(config) as pool:
        codes = [f"{TOOL}\n# environment {i}\n" for i in range(ENVIRONMENTS)]
        before = _descendants_pss()
        started = time.perf_counter()
        await asyncio.gather(*(sandboxed(pool, code)() for code in codes))
        seconds = time.perf_counter() - started
        await asyncio.gather(*(sandboxed(pool, code)() for code in codes))
        assert pool.stats.evicted == 0
        after = _descendants_pss()
    return {"environments": ENVIRONMENTS, "open_seconds": round(seconds, 1), "gib": round((after - before) / 2**30, 2)}


SLOW_SERVICE = """
import asyncio, json
from aiohttp import web

ANSWER = json.dumps({"kind": "ok", "value": 1, "stdout": "", "error": "", "cpu_seconds": 0.0, "wall_seconds": 0.05,
                     "ended_by": "return"})

async def main():
    cores = asyncio.Semaphore(8)

    async def health(request):
        return web.json_response({"status": "ready", "tier": "A", "layers": {}})

    async def answer(request):
        await request.read()
        async with cores:
            await asyncio.sleep(0.05)
        return web.Response(text=ANSWER, content_type="application/json")

    app = web.Application()
    app.router.add_post("/call", answer)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"nothing on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SERVICES = 4


async def fleet() -> dict[str, Any]:
    """Calls a second of one service and of four, whose tools take 50 ms and no processor, eight at a time."""
    from sandbox.fleet import SandboxFleet

    async with contextlib.AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(service("-c", SLOW_SERVICE)))[0] for _ in range(SERVICES)]
        found: dict[int, list[float]] = {1: [], SERVICES: []}
        for _ in range(_ROUNDS.value):
            for count, rates_found in found.items():
                async with SandboxFleet(urls[:count]) as remote:

                    async def call(remote: Sandbox = remote) -> None:
                        assert (await remote.call("# a tool", "f", {})).ok

                    rates_found.append((await rate(call, _SECONDS.value, CALLERS))[0])
    one, four = found.values()
    return {
        "services": SERVICES,
        "fleet_calls_per_second": {str(count): round(statistics.median(rates), 1) for count, rates in found.items()},
        "fleet_over_one": round(statistics.median(b / a for a, b in zip(one, four, strict=True)), 2),
    }


def _descendants_pss() -> int:
    """Bytes of this process's descendants, shared pages counted once."""
    total = 0
    for pid in descendants():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
        except OSError:
            continue
    return total


async def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with SandboxPool(SandboxConfig()) as pool:
        await sandboxed(pool)()
        found |= {"tier": pool.tier, "python": sys.version.split()[0]}
        for name, part in {"rates": rates, "cold": cold, "latency": latency, "http": http}.items():
            if name in _ONLY.value:
                found |= await part(pool)
    if "many" in _ONLY.value:
        found |= await many()
    if "fleet" in _ONLY.value:
        found |= await fleet()
    return found


def main() -> None:
    if unknown := set(_ONLY.value) - set(PARTS):
        raise cli.UsageError(f"--only={','.join(sorted(unknown))}: use some of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no module of the project is in a child's way
        found = asyncio.run(measure())
    rows.report("sandbox", found, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
