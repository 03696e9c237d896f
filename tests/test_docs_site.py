"""The documentation's site: made of the pages and of the code, every link and anchor in it leads somewhere."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import astra_packages
from astra_jax.base.errors import InputError
from configs.training import PRESETS
from docs.notebooks import cells
from docs.site import links, pages, reference
from docs.site.build import build
from launch.flags import settings_list

HELP = """What it does.

    astra thing --to=folder

most used flags:
  --to (required): <a|b>: Where `_x_` goes.
  --[no]public: Whether * anybody
      may see it. [default: 1]

server hardening:
  --tls_key: A file.
"""


def test_links_of_a_page_lead_to_what_the_site_has() -> None:
    text = """[a](../README.md#what-works) [b](sft.md) [c](../synthesis/core/reward.py) [d](#here)
[e](../benchmarks/results/decode.jsonl) [f](https://example.org/a.py) [g](../synthesis/offline/) [i](notebooks/a.ipynb)
```bash
cat [h](../README.md)
```
"""
    there = pages.adapted(text, "docs/page.md")
    assert "[a](overview.md#what-works) [b](sft.md) [c](reference/modules/synthesis.core.reward.md) [d](#here)" in there
    assert "[e](rows/decode.jsonl) [f](https://example.org/a.py) [g](reference/modules/index.md#synthesis)" in there
    assert "[i](notebook_a.md)" in there
    assert "cat [h](../README.md)" in there
    with pytest.raises(InputError, match=r"docs/page.md links to tests/conftest.py"):
        pages.adapted("[x](../tests/conftest.py)", "docs/page.md")


def test_links_that_lead_nowhere_are_found(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text('<h1 id="one">x</h1> <img src="../none.svg"> <a href="../..">up</a>')
    (tmp_path / "index.html").write_text(
        '<a href="there/">a</a> <a href="there/#one">b</a> <a href="there/#two">c</a> <a href="https://example.org">d</a>'
        '<script src="http://example.org/x.js"></script> <a href="#">e</a>'
    )
    assert links.broken(tmp_path) == [
        "index.html: there/#two",
        "index.html: http://example.org/x.js",
        "there/index.html: ../none.svg",
        "there/index.html: ../..",
    ]


def test_a_program_s_help_becomes_a_page() -> None:
    page = reference.program_page("thing", HELP)
    assert page.startswith("# astra thing\n\nWhat it does.\n\n    astra thing --to=folder\n")
    assert "## Most used flags\n\n- `--to (required)`: \\<a\\|b\\>: Where `_x_` goes.\n" in page
    assert "- `--[no]public`: Whether \\* anybody may see it. \\[default: 1\\]\n" in page
    assert page.endswith("## Server hardening\n\n- `--tls_key`: A file.\n")


def test_every_setting_is_on_its_program_s_page_and_presets_say_what_they_change() -> None:
    presets = {name: made() for name, made in PRESETS.items() if name in ("sft:0.6b", "sft:14b")}
    page = reference.settings_page("sft", "sft:0.6b", presets)
    for one in settings_list.settings(presets["sft:0.6b"]):
        assert page.count(f"- `--config.{one.name}={one.written}`") == 1
    assert "- `sft:0.6b`: the same\n- `sft:14b`: `sft.learning_rate=5e-6`\n" in page
    changed = dataclasses.replace(presets["sft:14b"].sft, batch_size=64)
    presets["sft:14b"] = dataclasses.replace(presets["sft:14b"], sft=changed)
    assert "`sft.batch_size=64`" in reference.settings_page("sft", "sft:0.6b", presets)


def test_every_page_has_its_place_in_the_menu() -> None:
    text = (pages.ROOT / "docs" / "site" / "zensical.toml").read_text("utf-8")
    menu = set(re.findall(r'= "([^"]+\.md)"', text))
    written = {page.name for page in (pages.ROOT / "docs").glob("*.md")} | set(pages.OF_THE_ROOT.values())
    written |= {pages.notebook_page(file.stem) for file in cells.files()}
    assert menu == written | {f"reference/{kind}/index.md" for kind in ("programs", "settings", "modules")}


def test_a_folder_with_something_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InputError, match="not installed|no site"):
        build(tmp_path)
    assert (tmp_path / "mine").read_text() == "x"


@pytest.mark.nightly
def test_the_site_is_built_whole(tmp_path) -> None:
    """Strictly, which refuses links to pages and anchors that are not there; and its HTML is looked through."""
    for needed in ("zensical", "mkdocstrings"):
        pytest.importorskip(needed, reason="needs pip install '.[docs]'")
    assert build(tmp_path / "site") > 300
    built = {path.parent.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert built >= {f"reference/programs/{name}" for name in astra_packages.programs()}
    assert built >= {f"reference/settings/{name}" for name in reference.SETTINGS}
    assert built >= {Path(name).stem for name in pages.OF_THE_ROOT.values()} | {"glossary", "comparison", "sandbox"}
    assert built >= {Path(pages.notebook_page(file.stem)).stem for file in cells.files()}
    reward = (tmp_path / "site" / "reference" / "modules" / "synthesis.core.reward" / "index.html").read_text("utf-8")
    assert 'id="synthesis.core.reward.' in reward and "Raises" in reward
    assert len(json.loads((tmp_path / "site" / "search.json").read_text("utf-8"))["items"]) > 1000
