"""A run as text for a terminal, where no port can be reached."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence

from astra_jax.base.terminal import Screen, say
from astra_jax.pages.html import figure
from launch.viewer.outcome import outcome_of
from launch.viewer.watched import Training, Watched, Watcher

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS, _NAME, _SAMPLE_LINES = 40, 26, 8


def watch(watcher: Watcher, seconds: float) -> None:
    """Show the run every so many seconds until Ctrl-C; where standard output is not a terminal, print it once."""
    if not sys.stdout.isatty():
        say(text(watcher.look()))
        return
    with Screen() as screen:
        try:
            while True:
                screen.draw(text(watcher.look(), shutil.get_terminal_size().columns))
                time.sleep(seconds)
        except KeyboardInterrupt:
            pass


def text(run: Watched, columns: int = 0) -> str:
    """Write all of a run, a line for each thing.

    Args:
        columns: width at which the outcome and the reasons are wrapped; 0: they are not.
    """
    outcome = outcome_of(run)
    lines = [run.folder, ""]
    for one in (outcome.headline, *(f"- {reason}" for reason in outcome.why)):
        lines += textwrap.wrap(one, columns) if columns else [one]
    if outcome.rows:
        widths = [max(10, len(name)) for name in outcome.columns]
        head = "  ".join(f"{name:>{width}}" for name, width in zip(outcome.columns, widths, strict=True))
        lines += ["", f"{'':<{_NAME}} {head}"]
        for name, values in outcome.rows.items():
            cells = "  ".join(f"{figure(value):>{width}}" for value, width in zip(values, widths, strict=True))
            lines.append(f"{name:<{_NAME}} {cells}")
    if run.pages:
        lines += ["", f"pages: {', '.join(f'{run.folder}/{name}' for name in run.pages)}"]
    lines += ["", "   ".join(f"{name} {value}" for name, value in run.facts.items())]
    for training in reversed(run.trainings):
        lines += ["", *_training(training)]
    if run.stages:
        width = max(_NAME, *(len(stage.name) for stage in run.stages))
        lines += ["", f"{'stage':<{width}} {'passed':>8} {'rejected':>9}"]
        for stage in run.stages:
            why = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in stage.rejected.items())
            lines.append(f"{stage.name:<{width}} {stage.passed:>8,} {sum(stage.rejected.values()):>9,}  {why}".rstrip())
    if run.spending:
        lines += ["", f"{'asked of endpoints':<{_NAME}} {'requests':>8} {'tokens':>13}  model"]
        lines += [f"{one.stage:<{_NAME}} {one.requests:>8,} {one.tokens:>13,}  {one.model}" for one in run.spending]
    if run.datasets:
        lines += ["", "datasets: " + ", ".join(f"{name} {'?' if n is None else n}" for name, n in run.datasets.items())]
    if run.command:
        lines += ["", f"started by: {run.command}"]
    return "\n".join([*lines, *(f"not read: {one}" for one in run.unread)])


def _training(one: Training) -> list[str]:
    of, name = f" of {one.total:,}" if one.total else "", f" ({one.name})" if one.name else ""
    lines = [f"{one.kind}{name}: step {one.step:,}{of}"]
    for title, curves in one.curves().items():
        lines.append(f"  {title}")
        for name, points in curves.items():
            known = [value for _, value in points if value is not None]
            span = f"{figure(min(known))} to {figure(max(known))}"
            lines.append(f"    {name:<{_NAME}} {figure(known[-1]):>9}  {sparks(known)}  {span}")
    if one.servers:
        lines.append("  Servers")
    for server, metrics in one.servers.items():
        lines.append(f"    {server}: {', '.join(f'{key} {figure(n)}' for key, n in metrics.items()).replace('_', ' ')}")
    if one.episodes:
        lines.append(f"  Sampled episodes: {one.episodes[0]}")
    if one.sample:
        lines.append(f"  Samples of step {one.sample_step}")
        lines += [f"    {line}" for line in one.sample.splitlines()[:_SAMPLE_LINES]]
    return lines


def sparks(values: Sequence[float]) -> str:
    """Write values as blocks of eight heights, each the mean of as many as are needed to fit."""
    each = -(-len(values) // _COLUMNS)
    means = [sum(group) / len(group) for group in (values[at : at + each] for at in range(0, len(values), each))]
    low, high = min(means), max(means)
    steps = [(one - low) / (high - low) if high > low else 0.5 for one in means]
    return "".join(_BLOCKS[min(7, int(8 * one))] for one in steps).ljust(_COLUMNS)
