"""A preview: a few records through every stage, what they show, and how near its forecast is to the whole run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from emulated_model import EmulatedModel, write_registry

from launch.viewer.preview_page import rendered, rows
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.endpoint import EndpointReply
from synthesis.core.rate_limits import Spent, Usage
from synthesis.core.stages import Journal, Rejected
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.preview import Affordable, Expected, Forecast, Preview, Seen, StageSeen
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures
from synthesis.trajectories.forecast import expected, small
from synthesis.trajectories.pipeline import synthesize


async def run(folder: Path, model: EmulatedModel, config: TrajectoriesConfig, preview: Preview | None) -> OpenAITeacher:
    async with model as url, SandboxPool(SandboxConfig()) as pool:
        teacher = OpenAITeacher(
            OpenAITeacherConfig(
                url, "m", structured_output="json_schema", judge_own_text=True, price_prompt=10.0, price_completion=20.0
            )
        )
        executor = Executor(teacher, pool)
        if preview is not None:
            executor.watch(preview)
        try:
            with Journal(folder / "journal.sqlite") as journal:
                await synthesize(
                    config, executor=executor, journal=journal, out_dir=folder / "out", workdir=folder, seed=0,
                    preview=preview,
                )  # fmt: skip
        finally:
            await teacher.close()
    return teacher


async def test_five_records_foretell_what_the_whole_run_takes(tmp_path: Path) -> None:
    registry = write_registry(tmp_path / "registry.jsonl")
    config = TrajectoriesConfig(
        trajectories=24, languages={"en": 1.0}, sources=(), mcp_share=0.0, walks=20, tools=(str(registry),),
        fact_servers=("numbers",), server_weights={"numbers": 1e-9}, proposals=2, failures=Failures(rate=0.0),
        behaviours={},  # of which five records hold too few to foretell anything
    )  # fmt: skip
    preview = Preview(5)
    asked = await run(tmp_path / "few", EmulatedModel(memory=0.4), small(config, 5), preview)
    stages = ["collect", "propose", "verify", "tasks", "augment", "score", "interact", "user", "judge"]
    assert list(preview.stages) == stages
    assert all(len(stage.seen) <= 5 for name, stage in preview.stages.items() if name != "verify")
    # Every request is shown, and under one record.
    every = [one for stage in preview.stages.values() for one in stage.seen]
    assert sum(one.spent.requests for one in every) == asked.spent.requests
    assert sum(one.spent.tokens for one in every) == asked.spent.tokens > 0
    assert sum(len(one.exchanges) for one in every) == asked.spent.requests
    forecast = preview.forecast(partial(expected, config), concurrency=config.concurrency)
    whole = await run(tmp_path / "whole", EmulatedModel(memory=0.4), config, None)
    for measure, found in (("requests", whole.spent.requests), ("tokens", whole.spent.tokens), ("money", None)):
        bounds = forecast.totals[measure]
        actual = whole.spent.money if found is None else found
        assert bounds.low < bounds.mean < bounds.high and bounds.low <= actual <= 1.2 * bounds.high, measure
    page = rendered(preview, forecast)
    assert "<h2>judge</h2>" in page and rows(forecast)[0][1] in page and not forecast.unseen
    assert any(one.exchanges and one.exchanges[0].prompt[:40].split("\n")[0][:20] in page for one in every)


def of(preview: Preview, count: float) -> Forecast:
    def counts(rates: Mapping[str, float], inputs: Mapping[str, int]) -> dict[str, float]:
        return {"a": count, "b": count * rates["a"], "never": 1.0, "": count * rates["a"]}

    return preview.forecast(counts, concurrency=1)


async def test_more_records_make_the_bounds_narrower_and_rejections_count() -> None:
    async def half(number: int, preview: Preview) -> list[int]:
        usage = Usage(90, 10)
        preview.note(b'{"model": "m", "messages": [{"role": "user", "content": "<b>"}]}', reply(usage), 0.5)
        if number % 2:
            raise Rejected("odd", f"{number} is odd")
        return [number]

    widths = []
    for most in (4, 64):
        preview = Preview(most)
        function, taken = preview.stage("a", half, range(1_000, 1_000 + most * 3 + 1))
        assert len(taken) == most
        for one in taken:
            try:
                await function(one, preview)
            except Rejected:
                continue
        forecast = of(preview, 100.0)
        assert forecast.totals["tokens"].mean == pytest.approx(10_000) and forecast.unseen == ["b", "never"]
        assert forecast.totals["money"].mean == pytest.approx(50)
        assert forecast == of(preview, 100.0)  # the same whenever it is asked for
        widths.append(forecast.records.high - forecast.records.low)
        assert "&lt;b&gt;" in rendered(preview, forecast) and "<pre><b>" not in rendered(preview, forecast)
    assert widths[0] > 2 * widths[1] > 0


async def test_stages_of_ones_own_are_in_the_forecast() -> None:
    async def every_other(number: int, context: None) -> list[int]:
        if number % 2:
            raise Rejected("odd", "")
        return [number]

    preview = Preview(64)
    for name in ("a", "a+mine:first", "a+mine:second"):
        function, taken = preview.stage(name, every_other, range(64))
        for one in taken:
            with contextlib.suppress(Rejected):
                await function(one, None)
    forecast = of(preview, 800.0)
    assert forecast.records.mean == pytest.approx(800 / 8, rel=0.05)
    asked = preview.forecast(lambda rates, inputs: {"a": 800.0, "": 800 * rates["a"]}, concurrency=1)
    assert not asked.unseen and asked.records == forecast.records


def reply(usage: Usage) -> EndpointReply:
    return EndpointReply("Yes.", "stop", usage, {})


def passing(preview: Preview, name: str, *, passed: int, rejected: int, tokens: int = 100) -> None:
    seen = [Seen(spent=Spent(requests=1, prompt_tokens=tokens)) for _ in range(passed + rejected)]
    for one in seen[passed:]:
        one.rejected = "odd: 3 is odd"
    preview.stages[name] = StageSeen(passed + rejected, seen)


def counts(asked: int) -> Expected:
    return lambda rates, inputs: {
        "a": float(asked), "side": asked / 2, "b": asked * rates.get("a", 1.0),
        "": asked * rates.get("a", 1.0) * rates.get("b", 1.0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "ended", "blocked"),
    [
        ({"a": (3, 1), "side": (0, 2), "b": (2, 1)}, "", ""),  # the records do not depend on `side`
        ({"a": (0, 4)}, "", "stage a passed none of 4 records, 4 of them for odd: 3 is odd"),
        ({"a": (3, 1), "b": (0, 3)}, "", "stage b passed none of 3 records, 3 of them for odd: 3 is odd"),
        ({"a": (3, 1)}, "the budget is spent", "the budget is spent"),
        ({}, "no tool server is left", "no tool server is left"),
    ],
)
def test_there_is_no_forecast_where_nothing_passes(stages, ended, blocked) -> None:
    preview = Preview(4)
    preview.ended = ended
    for name, (passed, rejected) in stages.items():
        passing(preview, name, passed=passed, rejected=rejected)
    forecast = preview.forecast(counts(10), concurrency=1)
    assert forecast.blocked == blocked and bool(rows(forecast)) == (not blocked)
    page = rendered(preview, forecast)
    assert (f"No forecast: {blocked}" in page) == bool(blocked) and ('<th scope="row">records</th>' in page) != bool(
        blocked
    )


@pytest.mark.parametrize(("tokens", "fraction"), [(1e9, 1.0), (10_000, 0.5), (0, 0.0)])
def test_a_budget_buys_as_many_records_as_it_pays_for_from_start_to_end(tokens, fraction) -> None:
    preview = Preview(64)
    for name in ("a", "b"):
        passing(preview, name, passed=64, rejected=0)
    budget = Affordable(tokens, math.inf, 100, counts)
    forecast = preview.forecast(counts(100), concurrency=1, budget=budget)  # a record takes 200 tokens
    assert forecast.asks == pytest.approx(100 * fraction, abs=1)
    assert forecast.buys is not None and forecast.buys.mean == pytest.approx(100 * fraction, rel=0.05, abs=1)
    assert preview.forecast(counts(100), concurrency=1).buys is None
