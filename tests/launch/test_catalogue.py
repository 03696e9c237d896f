"""What is shown of environments: the list, schemas, and the drawing of a dependency graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.viewer.catalogue import Catalogue, EnvironmentFilter, skeleton
from launch.viewer.drawing import draw_graph, wrap
from synthesis.core.records import Answer, SubQuestion, ToolEnvironment

ROOT = Path(__file__).parent.parent.parent

NORWAY = ToolEnvironment(
    id="norway",
    language="en",
    domain="geography",
    structure="single_hop",
    question="What is the capital of Norway?",
    answer=Answer("Oslo"),
    sub_questions=[],
    tools=[],
    reference_calls=[],
    distractors={},
    entities=[],
    signature="capital",
    split="train",
)
CHINESE = replace(
    NORWAY,
    id="nuowei",
    language="zh",
    structure="multi_hop",
    question="请告诉我：位于北欧斯堪的纳维亚半岛西部、与瑞典接壤的国家挪威，其首都（以今年为准）有多少人口？",
)


def test_the_list_is_filtered_and_paged() -> None:
    copies = [replace(NORWAY, id=f"copy-{n}") for n in range(60)]
    catalogue = Catalogue([NORWAY, CHINESE, *copies])
    assert [one.id for one in catalogue.page(EnvironmentFilter(text=" GEOGRAPHY", structure="multi_hop"), 1).items] == [
        CHINESE.id
    ]
    assert [one.id for one in catalogue.page(EnvironmentFilter(language="zh"), 1).items] == [CHINESE.id]
    assert [one.id for one in catalogue.page(EnvironmentFilter(text="首都"), 1).items] == [CHINESE.id]
    pages = [catalogue.page(EnvironmentFilter(text="copy"), n, size=25) for n in (1, 2, 3, 4)]
    assert [len(page.items) for page in pages] == [25, 25, 10, 10] and pages[3].number == pages[3].last == 3
    assert [one.id for page in pages[:3] for one in page.items] == [one.id for one in copies]
    assert catalogue.page(EnvironmentFilter(text="zzz"), 1).matching == 0
    with pytest.raises(ValueError, match="two environments have the id 'norway'"):
        Catalogue([NORWAY, replace(NORWAY)])


def test_a_skeleton_is_what_a_schema_asks_for_at_least() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer", "minimum": 3},
            "c": {"enum": ["x", "y"]},
            "d": {"type": ["null", "array"]},
            "e": {"type": "object", "properties": {"f": {"type": "boolean"}}, "required": ["f"]},
            "g": {"default": 7},
            "h": {"type": "string"},
            "i": 3,
        },
        "required": list("abcdegi"),
    }
    assert skeleton(schema) == {"a": "", "b": 3, "c": "x", "d": [], "e": {"f": False}, "g": 7, "i": None}
    assert skeleton({"type": "object"}) == {} == skeleton({"type": "object", "properties": 1, "required": 2})


def test_texts_are_wrapped_and_nothing_is_lost() -> None:
    english, chinese = "How many people live in the capital of Norway?", CHINESE.question
    for text in (english, chinese, f"{english}{chinese}", "x" * 200, "1,234.5 km（约）", "e\u0301" * 40, "🙂" * 40):
        lines = wrap(text, 12)
        assert "".join("".join(lines).split()) == "".join(text.split())
        assert len(lines) > 1 or len(text) < 20
        assert not any(line[0] in "，。？：）" for line in lines)
    assert all(" ".join(lines) == english for lines in (wrap(english, 12), wrap(f"  {english}\n", 9)))
    assert wrap("", 12) == wrap(" \n", 12) == [""]


def test_a_graph_that_is_wrong_is_drawn_as_far_as_it_goes() -> None:
    """Imported records may name dependencies that do not exist, of a later hop, or of themselves."""
    subs = [
        SubQuestion(1, "?", Answer(True), [2, 9], 3, True, ""),
        SubQuestion(2, "?", Answer(["a", "b"]), [2, 1], 1, True, ""),
    ]
    drawing = draw_graph(subs, {})
    assert [(arrow.source, arrow.target) for arrow in drawing.arrows] == [(2, 1), (2, 2), (1, 2)]
    assert [heading.text for heading in drawing.headings] == ["hop 1", "hop 3"] and len(drawing.boxes) == 2
    assert draw_graph([], {}).boxes == []


def test_importing_the_pages_imports_no_jax() -> None:
    pages = ("service", "environment_pages", "trajectory_pages", "result_pages")
    modules = ", ".join(f"launch.viewer.{name}" for name in pages)
    code = f"import sys, {modules}; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
