"""Sides of a comparison: processes that work when a line on stdin says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import rows


class Side:
    """One process group. Each line that it is sent it answers with a line of JSON on stdout."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, pauses: bool = False) -> None:
        """Start the process and wait for its answer to `ready`, whose `seconds` are `first`.

        Args:
            pauses: stop its processes during another side's turn; for processes that wait busily.
        """
        self._pauses = pauses
        self.process = subprocess.Popen(
            command,
            cwd=rows.ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.first: float = self.ask("ready")["seconds"]

    def ask(self, line: str) -> dict[str, Any]:
        """Let it run until it has answered.

        Raises:
            RuntimeError: it has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a side ended with {self.process.wait()}; see its output above")
        if self._pauses:
            os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(answer)

    def kill(self) -> None:
        """All of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Measured:
    """Measurements of sides that trained in turns, by name: medians of a step's seconds and of a matmul's GFLOP/s.

    Processor seconds are those of all threads: the time of a step without the time in which other users of the machine
    stop it.
    """

    seconds: dict[str, float]
    processor_seconds: dict[str, float]
    first: dict[str, float]
    gflops: dict[str, float]
    peak_bytes: dict[str, int]
    losses: dict[str, float]
    parameters: int

    def rounded(self) -> dict[str, Any]:
        """As rows say it."""
        return {
            "seconds_per_step": {name: round(value, 4) for name, value in self.seconds.items()},
            "processor_seconds_per_step": {name: round(value, 4) for name, value in self.processor_seconds.items()},
            "first_step_seconds": {name: round(value, 1) for name, value in self.first.items()},
            "peak_rss_gib": {name: round(value / 2**30, 2) for name, value in self.peak_bytes.items()},
            "matmul_gflops": {name: round(value) for name, value in self.gflops.items()},
            "losses": {name: round(value, 4) for name, value in self.losses.items()},
        }


def train_in_turns(names: Sequence[str], start: Callable[[str], Side], rounds: int, steps: int) -> Measured:
    """Sides that `train_step_side.serve` runs: each trains `steps` steps and multiplies matrices, `rounds` times."""
    sides: dict[str, Side] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    gflops: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:
            sides[name] = start(name)
        for _ in range(rounds):
            for name, side in sides.items():
                turn = side.ask(f"train {steps}")
                seconds[name] += turn["seconds"]
                processor[name].append(turn["processor_seconds"])
                gflops[name].append(side.ask("matmul")["gflops"])
        ends = {name: side.ask("end") for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.kill()
    return Measured(
        seconds={name: statistics.median(values) for name, values in seconds.items()},
        processor_seconds={name: statistics.median(values) for name, values in processor.items()},
        first={name: side.first for name, side in sides.items()},
        gflops={name: statistics.median(values) for name, values in gflops.items()},
        peak_bytes={name: end["peak_rss_bytes"] for name, end in ends.items()},
        losses={name: end["loss"] for name, end in ends.items()},
        parameters=ends[names[0]]["parameters"],
    )
