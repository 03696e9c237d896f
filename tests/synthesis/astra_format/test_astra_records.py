"""The files of the released ASTRA-RL record, the types of its answers, and what the search for its calls tries."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from test_astra_rl import PRICE, PRICES, QUESTION, RIGHT

from sandbox import SandboxConfig, SandboxPool
from synthesis.astra_format.candidates import Sources, candidates, combinations, literals, names_value, values_in
from synthesis.astra_format.records import answer_text, read_records, typed_answer
from synthesis.astra_format.rl import import_dataset, import_record, to_record, write_records
from synthesis.core.matching import match
from synthesis.core.records import Answer, CodeTool, ToolEnvironment, ToolSpec
from synthesis.core.stages import Journal

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(pool: SandboxPool) -> ToolEnvironment:
    return await import_record(RIGHT, pool)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "prompt": [{"role": "user", "content": QUESTION}],
        "tool_schema": json.dumps([PRICE]),
        "tool_dict": json.dumps({"get_price": PRICES}),
        "sub_qa_dict": json.dumps({"get_price": ["24.5"]}),
    }
    return {**good, **changes}


async def test_all_formats_read_the_same(tmp_path: Path) -> None:
    rows = [row(), row(sub_qa_dict={"get_price": "24.5", "absent": None}, tool_schema=[PRICE])]
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    wanted = [msgspec.structs.replace(RIGHT, row=0), msgspec.structs.replace(RIGHT, row=1)]
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        assert read_records(tmp_path / name) == wanted


async def test_parquet(environment: ToolEnvironment, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install pyarrow)")
    for name in ("a.parquet", "a.jsonl"):
        write_records(tmp_path / name, [environment], seed=0)
    assert read_records(tmp_path / "a.parquet") == read_records(tmp_path / "a.jsonl")


async def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for act in (lambda path: read_records(path), lambda path: write_records(path, [], seed=0)):
        with pytest.raises(ValueError, match="a.parquet: .parquet needs pyarrow; pip install pyarrow"):
            act(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "row 1: not JSON"),
        (json.dumps({"prompt": []}), "row 1, column tool_schema: Object missing required field"),
        (json.dumps(row(prompt=[])), "row 1, column prompt: 0 messages"),
        (json.dumps(row(prompt=[{"role": "system", "content": "x"}])), "row 1, column prompt: Invalid enum value"),
        (json.dumps(row(tool_schema="[")), "row 1, column tool_schema: Input data was truncated"),
        (json.dumps(row(tool_dict=3)), r"row 1, column tool_dict: Expected `str \| object`"),
        (json.dumps(row(tool_dict='{"a": 1}')), "row 1, column tool_dict: Expected `str`"),
        (json.dumps(row(sub_qa_dict={"get_price": {"a": 1}})), "row 1, column sub_qa_dict: Expected"),
    ],
)
async def test_a_broken_row_is_named_and_counted(pool: SandboxPool, tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "rl.jsonl"
    path.write_text(json.dumps(row()) + "\n" + broken + "\n")
    with pytest.raises(ValueError, match=f"rl.jsonl: {message}.*; correct the row or delete it"):
        read_records(path)
    with Journal(tmp_path / "journal.sqlite") as journal:
        imported = await import_dataset(path, pool, journal)
    assert [one.id for one in imported.records] == ["astra-rl-0"] and imported.rows == 2
    assert imported.rejected == {"bad_record": 1} and "row 1" in imported.details["bad_record"]


async def test_unreadable_files_say_what_to_give(tmp_path: Path, environment: ToolEnvironment) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "a.json").write_text("{}")
    for name, message in [
        ("none.jsonl", "there is no such file"),
        ("a.csv", "give one of .jsonl, .jsonl.gz, .json, .parquet"),
        ("a.jsonl.gz", "cannot be read"),
        ("a.json", "cannot be read .Expected `array`"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_records(tmp_path / name)
    with pytest.raises(ValueError, match="written as .jsonl or .parquet"):
        write_records(tmp_path / "b.csv", [environment], seed=0)
    unscorable = msgspec.structs.replace(environment, reference_calls=[])
    with pytest.raises(ValueError, match="has no reference call"):
        write_records(tmp_path / "b.jsonl", [environment, unscorable], seed=0)
    assert not (tmp_path / "b.jsonl").exists() and not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------------------------------------------------------
# Answers and candidates


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("24", Answer(24)),
        ("-3", Answer(-3)),
        ("1,234.50", Answer(1234.5, tolerance=0.005)),
        ("450 km", Answer(450, unit="km")),
        ("12.5%", Answer(12.5, unit="%", tolerance=0.05)),
        ("$450", Answer(450, unit="usd")),
        ("5千克", Answer(5, unit="kg")),
        ("5千米", Answer(5, unit="km")),
        ("3百米", Answer(300, unit="m")),
        ("5万元", Answer(50_000, unit="cny")),
        ("3,200万美元", Answer(32_000_000, unit="usd")),
        ("1.2亿元", Answer(1.2e8, unit="cny", tolerance=5e6)),
        ("14亿人", Answer(1_400_000_000, unit="people")),
        ("12万吨", Answer(120_000, unit="t")),
        ("0万元", Answer(0, unit="cny")),
        ("2 h 30 min", Answer("2 h 30 min")),
        ("007", Answer("007")),
        ("+47", Answer("+47")),
        ("2026-05-01", Answer("2026-05-01")),
        ("450 km long", Answer("450 km long")),
        ("Reservation ID: R1", Answer("Reservation ID: R1")),
        ("True", Answer(True)),
        ('["Oslo", "Bergen"]', Answer(["Oslo", "Bergen"])),
        ("[1", Answer("[1")),
        (5, Answer(5)),
        (False, Answer(False)),
    ],
)
async def test_answers_get_their_type(text: Any, answer: Answer) -> None:
    assert typed_answer(text) == answer
    assert match(text, typed_answer(text))  # whoever says the gold answer as it stands is right


@pytest.mark.parametrize("value", ["Oslo", 5, -5, 2.5, 1e-7, 1e20, True, ["a", "b"], "007"])
async def test_answers_keep_their_value_as_text(value: Any) -> None:
    assert typed_answer(answer_text(Answer(value))).value == value


async def test_what_a_text_names() -> None:
    found = values_in(
        'On 5 January 2026, Ana Silva of São Paulo pays 15% on "order A-17" via #f0f8ff: 3 million, 1,250.75; 12 * 3. '
        "请查询北京的天气。"
    )
    for one in (
        "2026-01-05",
        "Ana Silva of São Paulo",
        "order A-17",
        "A-17",
        "#f0f8ff",
        "12 * 3",
        "北京",
        "天气",
        "15",
    ):
        assert one in found, one
    for number in (15, 0.15, 3_000_000, 1250.75):
        assert number in found, number
    assert names_value("lives in America/Nuuk.", "nuuk") and not names_value("Nuuks", "nuuk")
    assert not names_value("lives in America/Nuuk.", "nuuk", identifiers=True)
    assert names_value("lives in Nuuk.", "nuuk", identifiers=True) and names_value("去北京吧", "北京")
    assert names_value("costs 1,250 kg", 1250) and not names_value("A5", 5)


async def test_what_a_source_names() -> None:
    keys, others = literals(
        '"""Doc."""\nimport json\nT = {("a", 1): {"x": 2}}\nJ = json.loads(\'{"city": {"n": "Oslo"}}\')\n'
        "def f(a):\n    'Doc.'\n    if a == 'yes':\n        return f'said {a}'\n    raise ValueError('bad')\n"
    )
    assert keys == ["a", 1, "x", "city", "n"] and others == [2, "Oslo", "yes"]


async def test_likely_values_come_first() -> None:
    tool = CodeTool(ToolSpec("get_price", "", {}), PRICES)
    sources = Sources.of(tool, "Is the WIRELESS mouse cheaper than a Laptop?", ["USB hub"])
    values = candidates("item", {"type": "string"}, sources)
    assert values[:3] == ["WIRELESS mouse", "wireless mouse", "USB hub"] and "Laptop" in values
    assert candidates("unit", {"enum": ["kg", "laptop"]}, sources) == ["laptop", "kg"]
    assert candidates("ok", {"type": ["null", "boolean"]}, sources) == [True, False]
    nested = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert candidates("o", nested, sources) == [{"ok": True}, {"ok": False}]
    order = [(one["a"], one["b"]) for one in combinations({"a": [0, 1, 2], "b": [0, 1]})]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(combinations({"a": [], "b": [1]})) == [] and list(combinations({})) == [{}]


async def test_the_columns_are_the_releases(environment: ToolEnvironment) -> None:
    one = to_record(environment, seed=0)
    assert list(one) == ["prompt", "tool_schema", "tool_dict", "sub_qa_dict"]
    assert one["prompt"] == [{"role": "user", "content": environment.question}]
    schemas, code = json.loads(one["tool_schema"]), json.loads(one["tool_dict"])
    assert [entry["function"]["name"] for entry in schemas] == list(code)
    assert set(json.loads(one["sub_qa_dict"])) == {tool.spec.name for tool in environment.tools}
