"""The page of all figures: it is of the rows there are, gives a reason where a goal is missed, and sees steps back."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from benchmark_world import program

from benchmarks import rows

report = program("benchmarks.report")
PAGES = ("README.md", "docs/performance.md", "docs/comparison.md")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The pages, as copies that may be rewritten."""
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        shutil.copy(rows.ROOT / name, tmp_path / name)
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    return tmp_path


def test_pages_are_of_the_rows_there_are(copied) -> None:
    report.rewrite()
    for name in PAGES:
        assert (copied / name).read_text() == (rows.ROOT / name).read_text(), "run python -m benchmarks.report"
    assert (copied / "docs" / "performance.svg").read_text().count("SFT step, speed") >= 3


def test_every_missed_goal_has_its_reason() -> None:
    page = (rows.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    reasons = page[page.index("## Where we are behind") :]
    for line in report.lines():
        if line.missed:
            assert f"* **{line.comparison.what}" in reasons, line


def saved(folder, figures: list[dict[str, Any]]) -> None:
    common = {"date": "2026-11-20", "commit": "0123456789ab", "hardware": "one", "case": "30m"}
    text = "".join(json.dumps(common | row) + "\n" for row in figures)
    (folder / "speed.jsonl").write_text(text, encoding="utf-8")


RATIO = report.Comparison("speed", "Speed", report.at("ratio"), "a peer", ("case",), {"30m": 2.0})


@pytest.mark.parametrize(
    ("before", "now", "behind"),
    [
        ({"ratio": 2.0}, {"ratio": 1.7}, True),
        ({"ratio": 2.0}, {"ratio": 1.9}, False),  # within the spread
        ({"ratio": 2.0}, {"ratio": 2.5}, False),
        ({"ratio": 2.0}, {"ratio": 1.0, "hardware": "another"}, False),
        ({"ratio": 2.0}, {"ratio": 1.0, "case": "1m"}, False),
    ],
)
def test_a_step_back_beyond_the_spread_is_named(tmp_path, monkeypatch, before, now, behind) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    saved(tmp_path, [before, now])
    said = [text for line in report.lines([RATIO]) if (text := line.behind()) is not None]
    assert bool(said) == behind
    assert all("Speed (30m): 1.7 on 2026-11-20" in text and "18% worse" in text for text in said)


def test_rounds_that_differ_say_how_far_a_figure_may_fall(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    by_rounds = report.Comparison("speed", "Speed", report.at("ratio"), "", spread=report.rounds("ours", "peer"))
    for apart, behind in ((0.2, False), (0.02, True)):
        rounds = {"slowest_and_fastest": {"ours": [1 - apart, 1 + apart], "peer": [1.0, 1.0]}}
        saved(tmp_path, [{"ratio": 2.0} | rounds, {"ratio": 1.6} | rounds])
        (line,) = report.lines([by_rounds])
        assert (line.behind() is not None) == behind


def test_less_is_better_where_it_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    cost = report.Comparison("speed", "Cost", report.at("ms"), "", goals={"": 1.6}, more_is_better=False)
    saved(tmp_path, [{"ms": 1.5}, {"ms": 2.0}, {"other": 1}])
    (line,) = report.lines([cost])
    assert line.missed and line.behind() is not None and "≤ 1.6" in report.table([line])


def test_what_can_be_measured_here_is_and_the_rest_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(report, "NEEDS", {"benchmarks.teacher": "no_such_package"})
    found = list(report.measurements("W", []))
    assert found[0] == ["benchmarks.quickstart", "--workdir=W", "--seeds=0,1,2,3,4"]
    assert {one[0] for one in found} == {one[0] for one in report.MEASURED} - {
        "benchmarks.teacher",
        "benchmarks.grpo_step",
    }
    said = capsys.readouterr().out
    assert "benchmarks.teacher, for which no_such_package is not installed" in said and "give --trl or --tunix" in said
    assert ["benchmarks.grpo_step", "--trl=P", "--save"] in list(report.measurements("W", ["--trl=P"]))


def test_a_page_without_its_marks_is_not_touched(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- rows -->\nno end\n")
    with pytest.raises(ValueError):
        rows.rewrite(page, "rows", "new")
    assert page.read_text() == "<!-- rows -->\nno end\n"


def test_the_quickstarts_table_is_of_one_commit() -> None:
    def row(seed: int, commit: str, f1: float, profile: str = "quick", **more: Any) -> dict[str, Any]:
        learnt = {"untrained": 0.0, "sft": f1 / 2, "grpo": f1}
        common = {"hardware": "one", "seconds": 390, "peak_rss_gib": 4.0}
        return common | {"profile": profile, "seed": seed, "commit": commit, "f1": learnt} | more

    said = {"answer_accuracy": {"sft": 0.3, "grpo": 0.5}, "full_reward_accuracy": {"sft": None, "grpo": 0.875}}
    found = [row(0, "old", 0.6), row(10, "new", 0.7, **said), row(0, "old", 0.9, "full"), row(11, "new", 0.8, **said)]
    text = report.learnt([*found[:2], row(10, "new", 0.74, **said), *found[2:]])
    assert "Commit new, one, 6.5 minutes" in text and text.count("\n| 1") == 2
    assert "| 10 | 0.00 | 0.37 | 0.74 | 0.30, 0.50 | 0.88 | 6.5 | 4.0 |" in text and "GRPO, `full`" not in text
    assert "| 0 | 0.00 | 0.30 | 0.60 |  |  | 6.5 | 4.0 | 0.90 |" in report.learnt([found[0], found[2]])
