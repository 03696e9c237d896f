"""Table and warnings that SFT and GRPO print before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from astra_jax.base.progress import log_above_progress
from astra_jax.run.hosts import is_first

FEWEST_STEPS = 50
"""Number of steps below which a warning is printed: a learning rate schedule needs some, and most runs have hundreds.
"""
_WIDTH = 15
_TIMED_STEPS = 2


@dataclass(frozen=True)
class RunSummary:
    """A run's table: what it reads, how many steps it takes, and how often it evaluates, samples and saves.

    Attributes:
        rows: (name, value) of each line.
        alarm: a warning above the table; "" for none.
        warnings: below it.
    """

    rows: tuple[tuple[str, str], ...]
    alarm: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{name:{_WIDTH}} {value}" for name, value in self.rows]
        alarm = [self.alarm] if self.alarm else []
        return "\n".join([*(f"warning: {one}" for one in alarm), *lines, *(f"warning: {one}" for one in self.warnings)])


def times(steps: int, every: int) -> int:
    """Return the number of events that happen every `every` steps and after the last step."""
    return -(-steps // every)


def interval_warnings(loop: str, steps: int, intervals: Mapping[str, int]) -> list[str]:
    """Warn of intervals that are longer than the run.

    Args:
        loop: `sft` or `grpo`, as in `--config.sft.eval_every`.
        intervals: steps between two evaluations, samples or checkpoints, by the setting's name.
    """
    longer = {name: every for name, every in intervals.items() if every > steps}
    if not longer:
        return []
    named = ", ".join(f"{name} ({every})" for name, every in longer.items())
    remedy = " ".join(f"--config.{loop}.{name}={max(1, steps // 10)}" for name in longer)
    return [f"{steps} steps are fewer than {named}: each of these happens once, after the last step. Set {remedy}"]


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as `1 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class TimeLeft:
    """Print, once, how long the remaining steps take: after the third step of this process, from its second and third,
    since the first one also waits for the compiler."""

    def __init__(self, steps: int) -> None:
        self._steps, self._seconds = steps, list[float]()

    @property
    def is_due(self) -> bool:
        """Return whether the next step is still to be timed: wait for its result, and `add` its time."""
        return len(self._seconds) <= _TIMED_STEPS

    def add(self, step: int, seconds: float) -> None:
        """Add the time of a step that is done."""
        if not self.is_due:
            return
        self._seconds.append(seconds)
        left = self._steps - step
        if self.is_due or not left or not is_first():
            return
        each = sum(self._seconds[1:]) / _TIMED_STEPS
        log_above_progress(
            f"step {step} of {self._steps}: {each:.2g} s a step, about {duration(each * left)} left, and the time of "
            "evaluations, samples and checkpoints"
        )
