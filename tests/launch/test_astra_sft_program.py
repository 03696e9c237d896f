"""`astra astra_sft` as users run it: a dataset to files of three forms, and a file of each to a dataset again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs_world import Ended, ended

from synthesis.core.datasets import read_card, read_dataset, write_dataset
from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory

TOOL = ToolSpec("find", "Find it.", {"type": "object", "properties": {"item": {"type": "string"}}, "required": []})
MESSAGES = [
    Message("user", "Where is it?"),
    Message("assistant", "", "I look.", [ToolCall("call_1", "find", {"item": "a"})]),
    Message("tool", "here", tool_call_id="call_1", name="find"),
    Message("assistant", "Here.", "Found."),
]
MADE = Trajectory("t", "t", "s", "d", "en", [TOOL], MESSAGES, 0, {}, None)


def run(*arguments: str) -> Ended:
    return ended("launch.astra_sft", *arguments)


@pytest.mark.parametrize("form", ["qwen", "openai", "trl"])
def test_there_and_back(tmp_path: Path, form: str) -> None:
    write_dataset(tmp_path / "made", Trajectory, [MADE], card={})
    out = run(f"--from={tmp_path / 'made'}", f"--to={tmp_path / 'rows.jsonl'}", f"--form={form}")
    assert out.code == 0 and "rows.jsonl: 1 records" in out.out, out.errors
    with open(tmp_path / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write('{"neither": 1}\n')
    back = run(f"--from={tmp_path / 'rows.jsonl'}", f"--to={tmp_path / 'back'}")
    assert back.code == 0 and "1 of 2 records" in back.out and "1 rejected, bad_record" in back.out
    [one] = read_dataset(tmp_path / "back", Trajectory)
    assert one.messages == MESSAGES and one.scores == {} and one.reward is None
    assert [tool.name for tool in one.tools] == ["find"]
    card = read_card(tmp_path / "back")
    assert card["rows"] == 2 and card["rejected"] == {"bad_record": 1} and card["source"] == "rows.jsonl"


def test_what_cannot_be_done_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [], "tools": []}) + "\n")
    for arguments, message in (
        ((f"--from={tmp_path / 'rows.jsonl'}",), "give --from=FILE and --to=DIR to import"),
        ((f"--from={tmp_path / 'gone'}", f"--to={tmp_path / 'new'}"), "there is no such file or folder"),
        ((f"--from={tmp_path / 'rows.jsonl'}", f"--to={tmp_path}"), "exists already; give a new name"),
        ((f"--from={tmp_path / 'rows.jsonl'}", f"--to={tmp_path / 'new'}", "--form=trl"), "--form is for an export"),
    ):
        assert message in run(*arguments).line
    assert not (tmp_path / "new").exists()
