"""A long run of the sandbox with its processes killed at random: nothing lost, nothing crossed, nothing that grows.

    python -m benchmarks.sandbox_soak [--calls=1000000] [--save]

Each call has one right answer, which it is checked against. Meanwhile a random process of the pool, be it a call, an
environment or the zygote, gets SIGKILL every so often. An infrastructure outcome is fair then; any other answer than
the right one is not. What the pool holds is measured after a tenth and at the end, the same environments open.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Seed
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag
from sandbox import CallResult, Outcome, SandboxConfig, SandboxPool

_CALLS = number_flag("calls", 1_000_000, Annotated[int, Bound(least=1_000, most=2**31 - 1)], "How many.")
_KILL_SECONDS = number_flag(
    "kill_seconds", 1.0, Annotated[float, Bound(least=0.01, most=86_400)], "Between two kills, on average."
)
_SEED = number_flag("seed", 0, Seed, "Of what is called and who is killed.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/sandbox_soak.jsonl.")

ENVIRONMENTS, SLOTS = 24, 16  # more than fit: some are evicted all the time
TOOL = """
SEEN = []

def echo(nonce, size):
    SEEN.append(nonce)
    print("nonce", nonce)
    return {"nonce": nonce, "environment": ENVIRONMENT, "seen": SEEN, "filler": "x" * size}

def fail(nonce):
    raise ValueError(f"nonce {nonce} of {ENVIRONMENT}")

def leave(nonce):
    import os
    os._exit(0)

def fill(nonce):
    return len(bytearray(1 << 40))
"""


@dataclass(frozen=True)
class Footprint:
    """Resources of a pool.

    Attributes:
        host_bytes: memory of the host's process.
        zygote_bytes: memory of the zygote's process.
        host_descriptors: open descriptors in the host.
        zygote_descriptors: open descriptors in the zygote.
        processes: processes of the pool, including ended ones that were not reaped.
        mounts: mounts in the host's namespace.
    """

    host_bytes: int
    zygote_bytes: int
    host_descriptors: int
    zygote_descriptors: int
    processes: int
    mounts: int

    @classmethod
    def of(cls, pool: SandboxPool) -> Footprint:
        """Measure an idle pool."""
        zygote = _zygote(pool)
        return cls(
            host_bytes=_resident("self"),
            zygote_bytes=_resident(zygote),
            host_descriptors=len(os.listdir("/proc/self/fd")),
            zygote_descriptors=len(os.listdir(f"/proc/{zygote}/fd")),
            processes=len(list(processes(pool))),
            mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        )


def _zygote(pool: SandboxPool) -> int:
    assert pool._zygote is not None
    return pool._zygote.pid


def _resident(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processes(pool: SandboxPool) -> Iterator[int]:
    """The zygote and all its descendants."""
    found = [_zygote(pool)]
    while found:
        pid = found.pop()
        yield pid
        try:
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (OSError, ValueError):
            continue


def wrong(function: str, nonce: int, environment: int, size: int, result: CallResult) -> bool:
    """Return whether a result is neither the right one nor an infrastructure outcome."""
    if result.is_infrastructure:
        return False
    if function == "echo":
        right = {"nonce": nonce, "environment": environment, "seen": [nonce], "filler": "x" * size}
        return result.value != right or result.stdout != f"nonce {nonce}\n"
    if function == "fail":
        return (result.kind, result.error) != (Outcome.TOOL_ERROR, f"ValueError: nonce {nonce} of {environment}")
    if function == "leave":
        return result.kind is not Outcome.NO_RESULT
    return (result.kind, result.error) != (Outcome.TOOL_ERROR, "MemoryError")


async def soak(calls: int, *, kill_seconds: float, seed: int = 0) -> dict[str, Any]:
    """Make the calls; returns counts and footprints.

    Args:
        calls: how many.
        kill_seconds: between two kills, on average.
        seed: of what is called and who is killed.
    """
    codes = [f"ENVIRONMENT = {i}\n{TOOL}" for i in range(ENVIRONMENTS)]
    kinds: Counter[str] = Counter()
    causes: Counter[str] = Counter()  # of infrastructure outcomes
    killed: Counter[str] = Counter()
    mistakes: list[str] = []
    footprints: list[Footprint] = []
    async with SandboxPool(SandboxConfig(max_slots=SLOTS, concurrency=SLOTS)) as pool:

        async def caller(share: Iterator[int]) -> None:
            for nonce in share:
                draw = random.Random(f"{seed} {nonce}")
                environment = draw.randrange(ENVIRONMENTS) if draw.random() < 0.02 else draw.randrange(SLOTS // 2)
                function = draw.choices(["echo", "fail", "leave", "fill"], [90, 6, 2, 2])[0]
                size = draw.choice([0, 10, 1_000]) if draw.random() < 0.999 else 200_000
                arguments = {"nonce": nonce, "size": size} if function == "echo" else {"nonce": nonce}
                result = await pool.call(codes[environment], function, arguments)
                kinds[result.kind] += 1
                if result.is_infrastructure:
                    causes[result.error] += 1
                if wrong(function, nonce, environment, size, result):
                    mistakes.append(f"{function} {arguments} in {environment}: {result}"[:500])

        async def killer() -> None:
            draw = random.Random(seed)
            while True:
                await asyncio.sleep(draw.expovariate(1 / kill_seconds))
                zygote, *others = processes(pool)
                victim = draw.choice(others) if others and draw.random() < 0.9 else zygote
                killed["zygote" if victim == zygote else "slot or call"] += 1
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue

        async def measure() -> None:
            # All environments once, so that the same number is open each time; then time for what was killed to end.
            for code in codes:
                await pool.call(code, "fail", {"nonce": 0})
            await asyncio.sleep(2.5)
            footprints.append(Footprint.of(pool))

        started = time.perf_counter()
        for part in (range(calls // 10), range(calls // 10, calls)):
            killing = asyncio.create_task(killer())
            share = iter(part)
            await asyncio.gather(*(caller(share) for _ in range(2 * SLOTS)))
            killing.cancel()
            await measure()
        seconds = time.perf_counter() - started
        stats = asdict(pool.stats)
    return {
        "calls": calls,
        "seconds": round(seconds),
        "answered": sum(kinds.values()),
        "mistakes": mistakes[:10],
        "kinds": dict(sorted(kinds.items())),
        "causes": dict(causes.most_common(10)),
        "killed": dict(killed),
        "pool": stats,
        "first": asdict(footprints[0]),
        "last": asdict(footprints[1]),
    }


def main() -> int:
    found = asyncio.run(soak(_CALLS.value, kill_seconds=_KILL_SECONDS.value, seed=_SEED.value))
    rows.report("sandbox_soak", found, save=_SAVE.value)
    return 1 if found["mistakes"] or found["answered"] != found["calls"] else 0


if __name__ == "__main__":
    cli.run(main)
