"""Sandbox work on machines of a Ray cluster, raylets in network namespaces: one is killed, one is broken, one joins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

TESTS = Path(__file__).parents[2]
PORT = 6379
RAY = Path(sys.executable).with_name("ray")


# Ray's own clusters ask for a token, each machine of which has to know.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


class Machines:
    """Namespaces; the first has a switch, to which the others are wired."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets have short names

    def add(self) -> str:
        """One more; its address."""
        number = len(self.names)
        name = f"ray{os.getpid()}n{number}"
        run("ip", "netns", "add", name)
        self.names.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        if number == 0:
            run("ip", "-n", name, "link", "add", "eth0", "type", "bridge")
        else:
            wire = f"w{number}"
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", wire, "netns", self.names[0])
            run("ip", "-n", self.names[0], "link", "set", wire, "master", "eth0", "up")
        run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        return self.address(number)

    def address(self, number: int) -> str:
        return f"10.99.7.{number + 1}"

    def command(self, number: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[number], *command]

    def ray(self, number: int, cpus: int) -> None:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        if number:
            where = [f"--address={self.address(0)}:{PORT}"]
        run(*self.command(number, str(RAY), "start", *where, f"--node-ip-address={self.address(number)}",
                          f"--num-cpus={cpus}", "--object-store-memory=80000000", "--disable-usage-stats"))  # fmt: skip

    def kill(self, number: int) -> None:
        """As power that fails."""
        for pid in run("ip", "netns", "pids", self.names[number]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            run("ip", "netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces want root and iproute2")
    made = Machines()
    try:
        try:
            made.add()
            made.add()
        except AssertionError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_machine_is_killed_one_is_broken_and_one_joins(machines: Machines, tmp_path: Path) -> None:
    killed, broken, late = 1, 2, 3
    (tmp_path / "broken").write_text(machines.add())
    machines.ray(0, cpus=0)
    machines.ray(killed, cpus=1)
    machines.ray(broken, cpus=1)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "worlds")])
    program = [sys.executable, str(TESTS / "worlds" / "ray_machines.py")]
    command = [*program, f"{machines.address(0)}:{PORT}", str(tmp_path)]
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(
            machines.command(0, *command),
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, "PYTHONPATH": paths},
        )
    done = tmp_path / f"done-{machines.address(killed)}"

    def wait_for(file: Path, size: int) -> None:
        until = time.monotonic() + 200
        while not file.exists() or file.stat().st_size < size:
            assert driver.poll() is None and time.monotonic() < until, (tmp_path / "said").read_text()[-3000:]
            time.sleep(0.1)

    wait_for(done, 10)
    machines.kill(killed)
    machines.add()
    machines.ray(late, cpus=1)
    (tmp_path / "joined").touch()
    ended = driver.wait(timeout=200)
    told = (tmp_path / "said").read_text()
    assert ended == 0, told[-3000:]
    assert "is left out" in told and "No module named 'msgspec'" in told
    assert "runs again" in told
    assert (tmp_path / f"done-{machines.address(late)}").stat().st_size >= 30
    assert not (tmp_path / f"done-{machines.address(broken)}").exists()
