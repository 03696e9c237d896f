"""`astra compare` on evaluations that were saved: what it prints, writes and refuses; its page in a real browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from programs_world import Ended, ended
from result_world import BFCL, evaluation, result
from viewing import INJECTION, text_of

from astra_jax.evaluation.saved import Evaluation, save_evaluation
from astra_jax.evaluation.table import tabulate
from launch.viewer.evaluation_page import write_evaluation

COUNT = 20


def stage(share: float, **more) -> Evaluation:
    """A run that always solves half of the base items, and this share of those whose function is missing."""
    missing = [[float(n < share * COUNT)] * 2 for n in range(COUNT)]
    return evaluation({"base": [[1, 1], [0, 1]] * (COUNT // 2), "miss_func": missing}, **more)


def run(*arguments: str) -> Ended:
    return ended("launch.compare", *arguments)


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> list[str]:
    """Three saved runs, as flags."""
    folder = tmp_path_factory.mktemp("stages")
    for name, share in (("base", 0.8), ("sft", 0.3), ("rl", 0.9)):
        save_evaluation(folder / name, stage(share, model=f"tiny-{name}"))
    return [f"--run={name}={folder / name}" for name in ("base", "sft", "rl")]


@pytest.fixture(scope="module")
def compared(stages, tmp_path_factory) -> tuple[str, Path, Path]:
    """What it printed, the page and the figures."""
    folder = tmp_path_factory.mktemp("compared")
    page, figures = folder / "page.html", folder / "figures.json"
    done = run(*stages, f"--page={page}", f"--figures={figures}")
    assert done.code == 0, done.errors
    return done.out, page, figures


def opened(browser, page: Path, *, dark: bool = False) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


def test_it_prints_warnings_first_and_writes_all_figures(compared) -> None:
    text, _, figures = compared
    assert text.startswith("# base → sft → rl\n\n**WARNING: ")
    assert "\n\n- base: tiny-base\n- sft: tiny-sft\n- rl: tiny-rl\n\n" in text
    assert "Missing function: sft is 50.0 points below base" in text
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert len(found["warnings"]) == 1 and list(found["comparison"]["tables"]) == ["base", "rl", "sft"]


def test_the_page_shows_the_stages(compared, browser) -> None:
    _, page, _ = compared
    opened(browser, page)
    assert browser.title == "base → sft → rl"
    (warning,) = browser.find_elements("css selector", "p.warning")
    assert warning.text.startswith("Warning: BFCL v3 multi-turn, Missing function: sft is 50.0 points below base")
    ours = [row.text for row in browser.find_elements("css selector", "table.scores tr.ours")]
    assert [row.split()[:2] for row in ours] == [["base", "75.0"], ["sft", "75.0"], ["rl", "75.0"]]
    assert "Qwen3-14B, SFT (Table 2)" in text_of(browser) and "FELL, watched" in text_of(browser)
    details, failures = browser.find_elements("css selector", "details")
    details.find_element("tag name", "summary").click()
    for words in ("bfcl-eval 2026.3.23, Apache-2.0", "0123abcd", "Simulators are made anew", "temperature 0.6"):
        assert words in details.text
    failures.find_element("tag name", "summary").click()
    items = {row.text.split()[0]: row for row in failures.find_elements("css selector", "tbody tr")}
    assert len(items) == 10 + 14  # a base item in two; all missing-function items that SFT does not solve
    assert "50.0 50.0 50.0 base: " in items["base_11"].text and "sft: turn 11: the state" in items["base_11"].text
    assert "astra inspect WORKDIR/results" in failures.text


def test_the_page_is_readable_in_the_dark_and_loads_nothing(compared, browser) -> None:
    _, page, _ = compared
    colours = {}
    for dark in (False, True):
        opened(browser, page, dark=dark)
        colours[dark] = browser.execute_script(
            "return [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
        )
    assert colours == {
        False: ["rgb(255, 255, 255)", "rgb(29, 42, 42)"],
        True: ["rgb(19, 25, 25)", "rgb(223, 231, 230)"],
    }
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]


def test_what_models_and_harnesses_wrote_is_only_text(tmp_path, browser) -> None:
    hostile = stage(0.5, model=INJECTION)
    results = (
        result("base", INJECTION, 0, 0, problem=INJECTION, finish=INJECTION),
        result("base", INJECTION, 1, 0, problem="long " * 1000),
    )
    info = replace(BFCL, categories=BFCL.categories[:1], headline={INJECTION: ("base",)}, notes=(INJECTION,))
    suite = msgspec.structs.replace(hostile.suites[BFCL.name], info=info, totals={"base": 200})
    page = tmp_path / "page.html"
    write_evaluation(page, tabulate(replace(hostile, suites={BFCL.name: suite}, results=results)))
    opened(browser, page)
    assert browser.title == f"Evaluation of {INJECTION}"
    assert not browser.find_elements("tag name", "img") and len(browser.find_elements("tag name", "script")) == 1
    browser.find_element("css selector", "details:last-of-type summary").click()
    (row,) = browser.find_elements("css selector", "details:last-of-type tbody tr")
    assert row.text.count(INJECTION) == 2 and len(row.text) < 800
    assert "did not run all items" in browser.find_element("css selector", "p.warning").text
    (ours,) = browser.find_elements("css selector", "table.scores tr.ours")
    assert ours.text.count("(partial: 1 of 200)") == 2


def test_errors_are_one_line(stages, tmp_path) -> None:
    save_evaluation(tmp_path / "other", stage(0.5, info=replace(BFCL, harness="bfcl-eval 2025.1.1")))
    for arguments, message in [
        ([], "error: 0 runs are given; write --run=NAME=DIR"),
        ([stages[0], "--run=nothing"], "error: --run=nothing is not NAME=DIR"),
        ([stages[0], stages[0]], "there is a run 'base' already"),
        ([stages[0], f"--run=x={tmp_path}"], f"error: no dataset at {tmp_path}/results"),
        ([stages[0], f"--run=x={tmp_path / 'other'}"], "error: bfcl_v3_mt: base and x differ in harness"),
    ]:
        done = run(*arguments)
        assert message in done.line and not done.out
