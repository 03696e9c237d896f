"""`astra astra_rl` as users run it: a file of released records to a dataset, and the dataset to a file again."""

from __future__ import annotations

import json
from pathlib import Path

from programs_world import Ended, ended

from synthesis.astra_format.rl import read_records
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import ToolEnvironment

CODE = "def capital(country):\n    return {'capital': {'Japan': 'Tokyo', 'Italy': 'Rome'}[country]}\n"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "Capital of a country.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
    },
}


def row(*schemas: dict, answer: str = "Tokyo") -> dict:
    return {
        "prompt": [{"role": "user", "content": "What is the capital of Japan?"}],
        "tool_schema": json.dumps(schemas),
        "tool_dict": json.dumps({"capital": CODE}),
        "sub_qa_dict": json.dumps({"capital": [answer]}),
    }


def run(source: Path, target: Path, code: int = 0) -> Ended:
    result = ended("launch.astra_rl", f"--from={source}", f"--to={target}")
    assert result.code == code, result.errors[-3000:]
    return result


def test_in_and_out_again(tmp_path: Path) -> None:
    rows = [row(SCHEMA), row(SCHEMA, SCHEMA), row(SCHEMA, answer="Kyoto"), {"prompt": 3}]
    (tmp_path / "rl.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    result = run(tmp_path / "rl.jsonl", tmp_path / "data")
    assert "1 of 4 records" in result.out and "1 rejected, unreachable_answer: no call of capital" in result.out
    card = read_card(tmp_path / "data")
    assert card["rejected"] == {"bad_record": 1, "colliding_names": 1, "unreachable_answer": 1}
    assert card["defects"] == {"colliding_names": 1} and (card["rows"], card["source"]) == (4, "rl.jsonl")
    assert card["statistics"]["samples"] == 1 and card["examples"].keys() == card["rejected"].keys()
    (one,) = read_dataset(tmp_path / "data", ToolEnvironment)
    assert one.reference_calls[0].arguments == {"country": "Japan"}

    assert "1 records" in run(tmp_path / "data", tmp_path / "again.jsonl").out
    assert read_records(tmp_path / "again.jsonl")[0].answers == {"capital": ["Tokyo"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl", "data", "rl.jsonl"]


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rl.csv").write_text("")
    for source, target, message in [
        ("none.jsonl", "data", "there is no such file or folder"),
        ("rl.csv", "rl.csv", "exists already"),
        ("rl.csv", "data", "give one of .jsonl"),
        (".", "x.jsonl", "no dataset at"),
    ]:
        assert message in run(tmp_path / source, tmp_path / target, code=2).line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl.csv"]
