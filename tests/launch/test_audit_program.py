"""`launch.audit` on files and folders that it did not make: what it prints, writes, refuses, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages_world import environment, trajectory
from programs_world import Ended, ended
from viewing import INJECTION, text_of

from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment, ToolServer, Trajectory

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def chat(city: str, answer: str, *, twice: bool = False) -> dict:
    call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    looked_up = [
        message
        for number in range(1 + twice)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [call | {"id": f"c{number}"}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": '{"sky": "rain", "degrees": 11}'},
        )
    ]
    asked = {"role": "user", "content": f"I travel to {city} and wonder about its weather now; is it raining there?"}
    return {"tools": TOOLS, "messages": [asked, *looked_up, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    made = [
        chat("Oslo", "It rains, at 11 degrees."),
        chat("Porto", f"It rains in Porto.{INJECTION}", twice=True),
        chat("Quito", "It rains in Quito, at 31 degrees."),
    ]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in [*made, {"messages": [{"role": "user"}]}]))
    return file


@pytest.fixture(scope="module")
def audited(chats, tmp_path_factory) -> tuple[Ended, Path, Path]:
    folder = tmp_path_factory.mktemp("audited")
    files = folder / "audit.html", folder / "audit.json"
    return run(str(chats), *files, XDG_CACHE_HOME=str(folder / "cache")), *files


def run(data: str, page: Path, figures: Path, *more: str, **environment: str) -> Ended:
    return ended("launch.audit", data, f"--page={page}", f"--figures={figures}", *more, **environment)


def test_it_prints_the_worst_findings_and_fails(audited, chats) -> None:
    done, page, figures = audited
    assert done.code == 4, done.errors
    found = json.loads(figures.read_text(encoding="utf-8"))
    by_rule = {one["name"]: one for one in found["rules"] if one["found"]}
    assert by_rule.keys() == {"unsupported_claim", "repeated_call", "near_duplicate", "unreadable_row"}
    assert (by_rule["unreadable_row"]["checked"], by_rule["unreadable_row"]["found"]) == (4, 1)
    lines = done.out.splitlines()
    assert lines[0] == "chats.jsonl: 3 Trajectory records, training"
    assert len([line for line in lines if line.startswith("  ")]) == 3, "three examples"
    assert lines[-1].startswith("4 rules fail: near_duplicate") and str(page) in lines[-1]
    assert "the number 31" in figures.read_text(encoding="utf-8")


def test_the_page_is_one_file_in_which_records_are_only_text(audited, browser) -> None:
    _, page, _ = audited
    browser.get(page.as_uri())
    assert browser.title == "Audit" and not browser.find_elements("tag name", "img")
    browser.find_element("css selector", 'a[href="#repeated_call"]').click()
    assert "the first 20" not in text_of(browser) and "weather" in text_of(browser) and "Porto" in text_of(browser)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]


def test_a_workdir_is_compared_with_held_out_data(tmp_path) -> None:
    files = tmp_path / "a.html", tmp_path / "a.json"
    write_dataset(tmp_path / "run" / "environments", ToolEnvironment, [environment(n) for n in range(2)], card={})
    write_dataset(tmp_path / "run" / "sft" / "trajectories", Trajectory, [trajectory(1)], card={})
    write_dataset(tmp_path / "run" / "sft" / "servers", ToolServer, [], card={})
    write_dataset(tmp_path / "later", ToolEnvironment, [environment(7)], card={})
    done = run(str(tmp_path / "run"), *files, f"--held_out={tmp_path / 'later'}", "--fail_on=leaked_call=1")
    found = json.loads(files[1].read_text(encoding="utf-8"))
    assert [(one["name"], one["split"]) for one in found["datasets"]] == [
        ("environments", "training"), ("sft/trajectories", "training"), ("held_out: later", "held out"),
    ]  # fmt: skip
    rules = {one["name"]: one for one in found["rules"]}
    assert rules["leaked_call"]["found"] == 1 and not rules["leaked_call"]["fails"]
    assert rules["leaked_question"]["fails"] and done.code == 4
    every = [f"--fail_on={','.join(f'{name}=1' for name in rules)}"]
    assert run(str(tmp_path / "run"), *files, *every).code == 0


def test_errors_are_one_line(chats, tmp_path) -> None:
    files = tmp_path / "a.html", tmp_path / "a.json"
    for data, flag, message in [
        ("", "", "error: no dataset is given; write python -m launch.audit DATASET"),
        (str(tmp_path / "none"), "", f"error: --data={tmp_path / 'none'}: there is no such folder or file"),
        (str(tmp_path), "", f"error: --data={tmp_path}: no dataset of trajectories or environments is there"),
        (
            str(chats),
            "--fail_on=duplicates=0",
            "error: --fail_on=duplicates=0: there is no rule 'duplicates'; use",
        ),
        (str(chats), "--fail_on=repeated_call=2", "give a share from 0 to 1, for example repeated_call=0.02"),
    ]:
        done = run(data, *files, *([flag] if flag else []))
        assert message in done.line and not done.out and done.code == 2
