"""A run as text, for a terminal: what `watch_pages` shows, where no port can be reached."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from launch.viewer.watched import Training, Watched, Watcher, facts
from synthesis.core.svg import figure
from synthesis.core.terminal import Screen, say

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS, _NAME, _SAMPLE_LINES = 40, 26, 8


def watch(watcher: Watcher, seconds: float) -> None:
    """Show the run, drawn anew every so many seconds until Ctrl-C; where standard output is no terminal, once."""
    if not sys.stdout.isatty():
        say(text(watcher.look()))
        return
    with Screen() as screen:
        try:
            while True:
                screen.draw(text(watcher.look()))
                time.sleep(seconds)
        except KeyboardInterrupt:
            pass  # which is how one stops to look


def text(run: Watched) -> str:
    """All of it, a line for each thing."""
    lines = [f"{run.folder}", "   ".join(f"{name} {value}" for name, value in facts(run).items()), "", run.waits]
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
    of = f" of {one.total:,}" if one.total else ""
    noun = "update" if one.kind == "GRPO" else "step"
    lines = [f"{one.kind}{f' ({one.name})' if one.name else ''}: {noun} {one.step:,}{of}"]
    for title, drawn in one.curves:
        lines.append(f"  {title}")
        for name, points in drawn.items():
            known = [value for _, value in points if value is not None]
            span = f"{figure(min(known))} to {figure(max(known))}"
            lines.append(f"    {name:<{_NAME}} {figure(known[-1]):>9}  {sparks(known)}  {span}")
    if one.servers:
        lines.append("  Servers")
        for server in one.servers:
            figures = {name.replace("_", " "): "–" if n is None else figure(n) for name, n in server.figures.items()}
            lines.append(f"    {server.name}: {', '.join(f'{name} {said}' for name, said in figures.items())}")
    if one.episodes:
        lines.append(f"  Sampled episodes: {one.episodes[0]}")
    if one.sample:
        lines.append(f"  Samples of step {one.sample_step}")
        lines += [f"    {line}" for line in one.sample.splitlines()[:_SAMPLE_LINES]]
    return lines


def sparks(values: Sequence[float]) -> str:
    """Values as blocks of eight heights, each the mean of as many as it takes to fit."""
    each = -(-len(values) // _COLUMNS)
    means = [sum(group) / len(group) for group in (values[at : at + each] for at in range(0, len(values), each))]
    low, high = min(means), max(means)
    steps = [(one - low) / (high - low) if high > low else 0.5 for one in means]
    return "".join(_BLOCKS[min(7, int(8 * one))] for one in steps).ljust(_COLUMNS)
