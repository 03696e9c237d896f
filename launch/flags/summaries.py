"""Last lines of a synthesis program: counts, reasons, tables and costs; and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from astra_jax.base.terminal import printable, say
from launch.flags import endings

if TYPE_CHECKING:
    from synthesis.core.rate_limits import Spent

_ENOUGH = 0.5
"""Least share of the requested records for a successful exit; filters reject some in any run."""
_REASONS = 5


def print_rejected(rejected: Mapping[str, Mapping[str, int]], examples: Mapping[str, Mapping[str, str]]) -> None:
    """Print how many records each stage rejected, by reason, with an example of each."""
    for stage, reasons in rejected.items():
        _print_counts(f"rejected by {stage}", reasons, examples.get(stage, {}))


def print_changed(changes: Mapping[str, int], examples: Mapping[str, str]) -> None:
    """Print how many tools differ from their documents, by the kind of change, with an example of each."""
    _print_counts("changed in tool documents", changes, examples)


def _print_counts(title: str, counts: Mapping[str, int], examples: Mapping[str, str]) -> None:
    for name, count in counts.items():
        shown = f", such as {printable(examples[name][:200], lines=False)}" if examples.get(name) else ""
        say(f"{title}: {count} {name}{shown}")


def print_table(rows: Mapping[str, str], preset: str) -> None:
    """Print a dataset's statistics, one in a line. For a preset of the paper, also the paper's numbers and the
    differences."""
    from configs.synthesis import DIFFERS, PAPER

    paper = PAPER.get(preset, {})
    for name, value in rows.items():
        say(f"{name:<32} {value}")
        if name in paper:
            say(f"{'':<32} paper: {paper[name]}")
    for line in DIFFERS.get(preset, ()):
        say(f"differs: {line}")


def print_costs(stages: Mapping[str, Spent], records: int) -> None:
    """Print the tokens and requests that each stage sent to the teacher's endpoint; nothing without an endpoint."""
    every = sum(one.tokens for one in stages.values())
    for name, one in sorted(stages.items(), key=lambda item: -item[1].tokens):
        each = f", {one.tokens / records:,.0f} for each stored record" if records else ""
        say(
            f"requested for {name}: {one.tokens:,} tokens ({one.tokens / every:.1%}) in {one.requests:,} requests{each}"
        )


def made(count: int, noun: str, *, wanted: int, rejected: Mapping[str, Mapping[str, int]]) -> int:
    """Return the exit code of a synthesis: `endings.FELL_SHORT`, with a line of reasons, if it made less than half of
    what was wanted.

    Args:
        rejected: stage → reason → count.
    """
    if count >= wanted * _ENOUGH:
        return 0
    reasons = [(number, f"{reason} in {stage}") for stage, of in rejected.items() for reason, number in of.items()]
    most = [f"{number:,} {what}" for number, what in sorted(reasons, key=lambda one: -one[0])[:_REASONS]]
    said = f"; the most frequent rejections were {', '.join(most)}; examples are above" if most else ""
    say(f"error: {f'{count:,}' if count else 'none'} of {wanted:,} became {noun}{said}", file=sys.stderr)
    return endings.FELL_SHORT
