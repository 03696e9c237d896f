"""Lists of records, schemas, and what the pages import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace

from astra_jax.base.http_service import HttpRefusal
from launch.viewer.environments import stored_environments
from launch.viewer.lists import ListChoice, RecordList, Row
from launch.viewer.schemas import least_value
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Answer, ToolEnvironment

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
CITIES = [
    Row("1", {"name": "Oslo", "country": "no", "people": 717_710, "score": 0.5}, "oslo\ncapital", "en"),
    Row("2", {"name": "奥斯陆", "country": "no", "people": 717_710, "score": None}, "奥斯陆\n首都", "zh"),
    Row("3", {"name": "bergen", "country": "no", "people": 291_940, "score": 0.9}, "bergen"),
    *(Row(f"copy-{n}", {"name": f"Copy {n}", "country": "se", "people": n, "score": 0.1}, "copy") for n in range(60)),
]


@pytest.fixture
def cities() -> RecordList:
    columns = {"name": "question", "country": "small", "people": "number", "score": "number"}
    sizes = ("large", "small")
    size = ListChoice("size", "all sizes", lambda row: sizes[row.values["people"] < 500_000], sizes)
    return RecordList(
        "Cities", "cities", columns, CITIES, "/city/{}",
        text="a name", choices=(ListChoice("country", "all"), size), least="score",
    )  # fmt: skip


def ids(cities: RecordList, query: str) -> list[str]:
    return [row.id for row in cities.view(make_mocked_request("GET", f"/?{query}"))["part"].shown]


def test_a_list_is_filtered_and_sorted_and_in_parts(cities: RecordList) -> None:
    assert ids(cities, "text=%20CAPITAL&size=large") == ["1"] and ids(cities, "text=首都") == ["2"]
    assert (
        ids(cities, "country=no&score=0.5") == ["1", "3"] and ids(cities, "country=dk") == ids(cities, "text=zzz") == []
    )
    assert ids(cities, "country=no&sort=name") == ["3", "1", "2"]
    assert ids(cities, "country=no&sort=-score") == ["3", "1", "2"], "what is unknown comes last"
    assert [len(ids(cities, f"page={number}")) for number in (1, 2, 3)] == [50, 13, 13]
    view = cities.view(make_mocked_request("GET", "/?country=no&page=9"))
    assert (view["part"].number, view["part"].last, view["part"].total) == (1, 1, 3)
    assert view["at"](1, sort="-name") == "/?country=no&sort=-name&page=1"
    assert view["record_at"]("挪威/1?") == "/city/%E6%8C%AA%E5%A8%81/1%3F?country=no"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("page=two", "page is 'two'; give a whole number from 1"),
        ("sort=price", "sort is 'price'; give one of name, country, people, score, or with - before it"),
        ("sort=-", "sort is '-'"),
        ("size=huge", "size is 'huge'; give one of large, small"),
        ("score=nan", "score is 'nan'; give the least one, a number from 0 to 1"),
    ],
)
def test_what_a_list_cannot_be_asked_for_is_refused(cities: RecordList, query: str, message: str) -> None:
    with pytest.raises(HttpRefusal) as refused:
        ids(cities, query)
    assert refused.value.status == 400 and message in refused.value.text


def test_a_record_has_neighbours_in_the_list_that_it_was_chosen_from(cities: RecordList) -> None:
    around = cities.around(make_mocked_request("GET", "/city/1?country=no&sort=name"), "1")
    assert around["home"] == "/?country=no&sort=name" and (around["beside"].place, around["beside"].total) == (2, 3)
    assert around["beside"].before == "/city/3?country=no&sort=name" and "/city/2?" in around["beside"].after
    assert cities.around(make_mocked_request("GET", "/city/1?country=se"), "1")["beside"].total == 0


def test_two_records_of_one_id_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", ToolEnvironment, [NORWAY, replace(NORWAY)], card={})
    with pytest.raises(ValueError, match="two environments have the id 'norway'"):
        stored_environments(tmp_path / "data")


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
    assert least_value(schema) == {"a": "", "b": 3, "c": "x", "d": [], "e": {"f": False}, "g": 7, "i": None}
    assert least_value({"type": "object"}) == {} == least_value({"type": "object", "properties": 1, "required": 2})


def test_importing_the_pages_imports_no_jax() -> None:
    pages = ("cards", "environments", "trajectories", "results")
    modules = ", ".join(f"launch.viewer.{name}" for name in pages)
    code = f"import sys, {modules}; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
