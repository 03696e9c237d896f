"""The pool's control group: it bounds what all calls take together, and is gone with the pool."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from sandbox import Limits, Outcome, SandboxConfig, SandboxError, SandboxPool, cgroup
from sandbox.cgroup import Cgroup, Share, machine_memory_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
TOOL = """
def fill(mib):
    memory = bytearray(mib << 20)
    for i in range(0, len(memory), 4096):
        memory[i] = 1
    for _ in range(3_000_000):
        pass
    return len(memory)
"""


def groups() -> list[Path]:
    name = f"sandbox-{os.getpid()}-*"
    return [path for path in Path("/sys/fs/cgroup").rglob(name) if path.is_dir()]


@pytest.fixture
def writable() -> None:
    try:
        Cgroup(Share(64 * MIB, 10)).remove()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


async def test_memory_of_all_calls_together_is_bounded(writable: None) -> None:
    config = SandboxConfig(
        memory_bytes=256 * MIB, environment_memory_bytes=8 << 30, cpus=2.0, max_slots=8, concurrency=8
    )
    async with SandboxPool(config) as pool:
        assert pool.layers["cgroup"] == "0.2 GiB, 98 processes, 2 CPUs"
        assert (await pool.call(TOOL, "fill", {"mib": 100})).value == 100 * MIB
        results = await asyncio.gather(*(pool.call(TOOL, "fill", {"mib": 100}) for _ in range(8)))
        ended = {result.kind.value for result in results}
        # Each takes more than its part, 32 MiB: with that, none could be killed. So it is no reason to mask one.
        assert ended <= {"ok", "crash", "env_died"} and "crash" in ended
        crashed = [result for result in results if result.kind is Outcome.CRASH]
        assert all(result.ended_by == "memory" and not result.is_infrastructure for result in crashed)
        assert all("MiB when memory ran out; take less" in result.error for result in crashed)
        assert pool.stats.retried >= len(crashed)
        assert (await pool.call(TOOL, "fill", {"mib": 100})).value == 100 * MIB
        listed = [(group / "cgroup.procs").read_text().split() for group in groups()]
        assert listed and all(str(pool._zygote.pid) in pids for pids in listed)  # type: ignore[union-attr]
        assert all(len(pids) >= 2 for pids in listed)
        assert all(str(os.getpid()) not in pids for pids in listed)
    assert groups() == []


async def test_one_environment_takes_no_more_than_its_part() -> None:
    """Memory and processes of all its calls together, with a control group or without."""
    config = SandboxConfig(
        max_slots=8,
        concurrency=8,
        leave_out=("cgroup", "seccomp"),  # without which calls can wait
        allow_unisolated=True,
        environment_memory_bytes=1 << 30,
        limits=Limits(wall_seconds=1),
    )
    assert config.calls_per_environment == 2
    assert SandboxConfig(max_slots=8, concurrency=8, memory_bytes=2 << 30).calls_per_environment == 2
    assert SandboxConfig(memory_bytes=MIB).calls_per_environment == 1
    with pytest.raises(ValueError, match="SandboxConfig.environment_memory_bytes is 0"):
        SandboxConfig(environment_memory_bytes=0)
    async with SandboxPool(config) as pool:
        waits = "import threading\ndef wait():\n    threading.Event().wait()"
        others = asyncio.gather(*(pool.call(waits, "wait", {}) for _ in range(6)))
        await asyncio.sleep(0)
        mine = await pool.call(TOOL, "fill", {"mib": 1})
        assert mine.ok and not others.done()
        ended = await others
        assert {result.kind for result in ended} == {Outcome.IDLE_TIMEOUT}


async def test_pools_share_a_machines_memory() -> None:
    """Those of Ray's workers take a part for each CPU, so that together they take what one alone would."""
    whole = SandboxConfig().share.memory_bytes
    assert whole == pytest.approx(machine_memory_bytes() / 2, abs=1)
    assert SandboxConfig(memory_share=0.125).share.memory_bytes == pytest.approx(whole / 4, abs=1)
    assert SandboxConfig(memory_share=0.125, memory_bytes=5 * MIB).share.memory_bytes == 5 * MIB
    for bad in (0, 1.5):
        with pytest.raises(ValueError, match=f"SandboxConfig.memory_share is {bad}"):
            SandboxConfig(memory_share=bad)


async def test_groups_of_killed_hosts_are_removed(writable: None) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    async with SandboxPool(
        SandboxConfig(cpus=2.0)
    ):  # in the hierarchy of processors too, which the next has no group in
        abandoned = [group.with_name(f"sandbox-{dead.pid}-1-0") for group in groups()]
        abandoned += [group.with_name(f"sandbox-{os.getpid()}-1-0") for group in groups()]  # its id is ours by now
    for folder in abandoned:
        folder.mkdir()
    async with SandboxPool(SandboxConfig()):
        assert abandoned and not any(folder.exists() for folder in abandoned)


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a mounted version 2 hierarchy, in which this process's group is /docker/abc/app."""
    proc, mount = tmp_path / "proc", tmp_path / "mount"
    own = mount / "app"
    own.mkdir(parents=True)
    proc.mkdir()
    (proc / "mountinfo").write_text(f"30 29 0:26 /docker/abc {mount} rw,nosuid - cgroup2 cgroup2 rw\n")
    (proc / "cgroup").write_text("0::/docker/abc/app\n")
    (own / "cgroup.subtree_control").write_text("memory pids")
    monkeypatch.setattr(cgroup, "_PROC", proc)
    monkeypatch.setattr(cgroup, "_GRACE_SECONDS", 0.0)
    return own


async def test_version_2_is_written_as_the_kernel_documents_it(hierarchy: Path) -> None:
    group = Cgroup(Share(memory_bytes=3 * MIB, processes=7, cpus=1.5))
    (folder,) = hierarchy.glob("sandbox-*")
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {"memory.max": str(3 * MIB), "pids.max": "7", "cpu.max": "150000 100000"}
    assert (hierarchy / "cgroup.subtree_control").read_text() == "+cpu"
    group.add(123)
    assert (folder / "cgroup.procs").read_text() == "123"


@pytest.mark.parametrize("content", ["", "30 29 0:26 / /none rw - tmpfs tmpfs rw\n"])
async def test_where_there_is_none_the_pool_says_so(hierarchy: Path, content: str) -> None:
    (hierarchy.parents[1] / "proc" / "mountinfo").write_text(content)
    async with SandboxPool(SandboxConfig()) as pool:
        assert pool.layers["cgroup"] == "off: no control groups are mounted"
        assert (await pool.call(TOOL, "fill", {"mib": 1})).value == MIB
    with pytest.raises(SandboxError, match="SandboxConfig.memory_bytes needs a control group.*no control groups"):
        async with SandboxPool(SandboxConfig(memory_bytes=MIB)):
            pass
