"""Every kind of page in a real browser, at 390 and 1280 px, light and dark: one look, nothing cut, nothing hidden.

What is compared with earlier screenshots is their layout, `tests/data/pages.json`: where each landmark of a page begins
and how wide it is, and the colours it is drawn in. Pixels would compare the fonts that a machine has, and heights how
these break lines. After a change that is meant, `ASTRA_WRITE_LAYOUTS=1` writes the file anew; look at the pages first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages_world import every_page
from viewing import follow, rows, text_of

LAYOUTS = Path(__file__).parents[1] / "data" / "pages.json"
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
LANDMARKS = (
    "header", "header nav", "main", "h1", "h2", "form.filter", "table.rows", "dl.facts", ".charts > figure", ".card",
    ".columns > div", "ol.conversation", ".turn", "pre", "summary", "ol.questions", ".tiles > div",
)  # fmt: skip
KINDS = (
    *(f"{name}{more}" for name in ("environment", "trajectory", "result", "batch") for more in (" list", "", " card")),
    "refusal", "evaluation", "comparison", "preview", "episodes", "report", "watch", "audit",
)  # fmt: skip

CHECKS = (Path(__file__).parents[1] / "data" / "page_checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with every_page(tmp_path_factory.mktemp("pages")) as found:
        yield found


def sized(browser, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_every_page_has_one_look_at_both_widths_light_and_dark(pages: dict[str, str], browser) -> None:
    assert set(pages) == set(KINDS)
    found: dict[str, Any] = {}
    faults: list[str] = []
    for kind, address in pages.items():
        browser.get(address)
        # The chance that a fold hides a fault.
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        for width in WIDTHS:
            for scheme in SCHEMES:
                sized(browser, width, scheme)
                seen = browser.execute_script(CHECKS, LANDMARKS)
                faults += [f"{kind}, {width} px, {scheme}: {fault}" for fault in seen["faults"]]
                found.setdefault(kind, {})[str(width)] = seen["layout"]  # which is the same, light and dark
                for name, colour in seen["colours"].items():
                    if colour:
                        assert found.setdefault("colours", {}).setdefault(scheme, {}).setdefault(name, colour) == colour
        refused = [line for line in browser.get_log("browser") if "404" not in line["message"]]
        assert refused == [], kind
    assert not faults, "\n".join(faults)
    if os.environ.get("ASTRA_WRITE_LAYOUTS"):
        LAYOUTS.write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    kept = json.loads(LAYOUTS.read_text(encoding="utf-8"))
    assert found["colours"] == kept["colours"]
    moved = [
        f"{kind}, {width} px, {name}: {places}, once {was}"
        for kind in KINDS
        for width, layout in kept[kind].items()
        for name, was in layout.items()
        if not alike(places := found[kind][width].get(name, ""), was)
    ]
    assert not moved, "\n".join(moved)
    assert {kind: {width: set(of) for width, of in found[kind].items()} for kind in KINDS} == {
        kind: {width: set(of) for width, of in kept[kind].items()} for kind in KINDS
    }


def alike(places: str, was: str) -> bool:
    """Whether landmarks are where they were: to 3 pixels, but for those that are as wide as their text."""
    near = [tuple(map(int, one.split("+"))) for one in was.split()]
    return places != "" and all(
        any(abs(left - x) <= 3 and (abs(width - w) <= 3 or w < 340) for x, w in near)
        for left, width in (map(int, one.split("+")) for one in places.split())
    )


def test_lists_are_sorted_and_lead_to_neighbours_and_back(pages: dict[str, str], browser) -> None:
    sized(browser, 1280, "light")
    browser.get(pages["trajectory list"])
    rewards = [row.text.split()[-1] for row in rows(browser)]
    assert rewards == sorted(rewards)
    follow(browser, "th:last-child a")  # by reward
    follow(browser, "th:last-child a")  # the largest first
    assert [row.text.split()[-1] for row in rows(browser)][:2] == ["0.795", "0.790"]
    assert browser.find_element("css selector", "th:last-child").get_attribute("aria-sort") == "descending"
    follow(browser, "tbody tr:nth-child(2) a")
    assert "2 of 60" in text_of(browser)
    follow(browser, "a[rel=next]")
    assert "3 of 60" in text_of(browser) and "0.785" in text_of(browser)
    follow(browser, "header nav a")
    assert [row.text.split()[-1] for row in rows(browser)][0] == "0.795"
    browser.get(pages["result list"])
    assert rows(browser)[0].text.startswith("How many people live in Norway's capital")
    browser.get(f"{pages['result list']}?sort=price")
    assert "sort is 'price'; give one of question, item, suite, category, trial, score" in text_of(browser)


def test_lists_that_are_whole_are_sorted_where_they_are(pages: dict[str, str], browser) -> None:
    sized(browser, 1280, "light")
    browser.get(pages["report"])
    first = "document.querySelectorAll('table.sortable tbody tr')"
    column = f"return [...{first}].slice(0, 3).map((row) => row.cells[0].textContent)"
    made = ["trajectories", "sft_dialogue", "grpo"]
    assert browser.execute_script(column) == made
    head = "table.sortable th:nth-child(1)"
    for order, names in (("ascending", sorted(made)), ("descending", sorted(made, reverse=True))):
        browser.find_element("css selector", f"{head} button").click()
        assert browser.find_element("css selector", head).get_attribute("aria-sort") == order
        assert browser.execute_script(column) == names
