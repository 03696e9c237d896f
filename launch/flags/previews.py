"""`--preview=N`: run a few records through every stage before money is spent; prints a summary and writes a page."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.settings import Count
from astra_jax.base.terminal import printable, say
from launch.flags import cli, endings, executors, metrics, teachers
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.core.stages import Journal
    from synthesis.pipeline.executors import Executor
    from synthesis.pipeline.preview import Expected, Forecast, Preview

PREVIEW = number_flag(
    "preview",
    None,
    Count,
    "Show this many records, and stop; with the requests of every stage and a forecast. Nothing is stored.",
)
_PAGE = flags.DEFINE_string("preview_page", "preview.html", "HTML page that --preview writes.")
_SHOWN = 400
"""Maximum characters of a prompt and an answer in the terminal; the page has the full text."""

Run = Callable[["Executor", "Journal", Path, "Preview"], Awaitable[object]]


async def preview(
    workdir: Path, run: Run, expected: Callable[[int], Expected], *, wanted: int, setting: str, concurrency: int
) -> int:
    """Run a synthesis in a temporary folder, and show its requests and answers.

    Args:
        workdir: folder of the real run; nothing is written there.
        expected: returns the forecast's function for a number of records.
        wanted: number of records of the real run.
        setting: setting of that number.

    Returns:
        The exit code: `endings.FELL_SHORT` if no record passed every stage.

    Raises:
        cli.UsageError: the page would be inside --workdir, or flags contradict each other.
    """
    from astra_jax.base.errors import UserError
    from launch.viewer.preview_page import rendered
    from synthesis.core.stages import Journal
    from synthesis.pipeline.preview import Preview

    page = Path(_PAGE.value or "preview.html").absolute()
    if page.is_relative_to(workdir):
        raise cli.UsageError(
            f"--{_PAGE.name}={page} is inside --workdir, where a preview writes nothing; give another path"
        )
    vain = (teachers.RECORDING, executors.REPLACE, metrics.PORT)
    cli.refuse_unused(vain, f"has no effect with --{PREVIEW.name}, which stores nothing; leave it out")
    seen = Preview(PREVIEW.value or 1)
    with tempfile.TemporaryDirectory(prefix="preview-") as name:
        folder = Path(name)
        async with executors.executor_from_flags(folder) as executor:
            executor.watch(seen)
            with Journal(folder / "journal.sqlite") as journal:
                try:
                    await run(executor, journal, folder, seen)
                except UserError as problem:
                    if not seen.stages:
                        raise
                    seen.ended = str(problem)
        budget = teachers.budget_of(executor.teacher, wanted, functools.cache(expected))
    forecast = seen.forecast(expected(wanted), concurrency=concurrency, budget=budget)
    _print(seen, forecast)
    if forecast.buys is not None and not forecast.blocked and forecast.asks < wanted:
        fit = f"give --config.{setting}={forecast.asks}, or a larger budget" if forecast.asks else "give a larger one"
        say(f"the budget may be spent before the run of {wanted:,} ends, which then stores none; {fit}")
    page.write_text(rendered(seen, forecast), encoding="utf-8")
    say(f"\n{page}: all prompts and answers")
    return endings.FELL_SHORT if forecast.blocked else 0


def _print(seen: Preview, forecast: Forecast) -> None:
    from launch.viewer.preview_page import rows

    for line in seen.source_notes:
        say(f"server {printable(line, lines=False)}")
    for name, stage in seen.stages.items():
        tokens = sum(one.spent.tokens for one in stage.seen)
        requests = sum(one.spent.requests for one in stage.seen)
        say(f"{name}: {stage.passed} of {len(stage.seen)} records passed, {tokens:,} tokens in {requests:,} requests")
        for one in stage.seen:
            if one.rejected:
                say(f"  rejected: {printable(one.rejected[:_SHOWN], lines=False)}")
        first = next((exchange for one in stage.seen for exchange in one.exchanges), None)
        if first is not None:
            say(f"  asked of {printable(first.model, lines=False)}: {printable(first.prompt[:_SHOWN], lines=False)}")
            say(f"  answered: {printable(first.answer[:_SHOWN], lines=False)}")
    if forecast.blocked:
        say(f"\nno forecast: {printable(forecast.blocked, lines=False)}")
        return
    say("\nexpected for the whole run (range of nine in ten simulated runs):")
    for name, text in rows(forecast):
        say(f"{name:<28} {text}")
    if forecast.unseen:
        say(f"not included, since no record reached them: {', '.join(forecast.unseen)}")
