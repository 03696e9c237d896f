"""The pages that show trajectories, and the cards of datasets: a real server, a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from msgspec.structs import replace
from programs_world import ended
from viewing import INJECTION, command, fits, follow, rows, send, serving, text_of

from launch.viewer.cards import shown_card
from launch.viewer.conversation import Turn, result_of, turns_of
from launch.viewer.trajectories import failures_of, scores_of
from synthesis.core.datasets import write_dataset
from synthesis.core.records import (
    Answer,
    AxisScore,
    CallError,
    CodeExecution,
    CodeTool,
    InjectedFailure,
    Message,
    ReferenceCall,
    SubQuestion,
    ToolCall,
    ToolEnvironment,
    ToolServer,
    ToolSpec,
    Trajectory,
)
from synthesis.environments.statistics import statistics_of
from synthesis.trajectories.execution import FAILURES
from synthesis.trajectories.judge import AXES
from synthesis.trajectories.statistics import trajectory_statistics

LONG = json.dumps({"cities": [{"name": f"city {n}", "people": 1000.0 + n} for n in range(60)]})
TOOLS = [
    ToolSpec(
        "capital_of_country",
        "Find the capital of a country.",
        {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
    ),
    ToolSpec("cities_of_country", "List the cities of a country.", {"type": "object", "properties": {}}),
]


def capital(id: str, country: str) -> ToolCall:
    return ToolCall(id, "capital_of_country", {"country": country})


def result(id: str, content: str, name: str = "capital_of_country") -> Message:
    return Message("tool", content, tool_call_id=id, name=name)


NORDIC = Trajectory(
    id="trajectory-nordic",
    task_id="task-nordic",
    server_id="countries",
    domain="geography",
    language="en",
    tools=TOOLS,
    messages=[
        Message("system", "Use the tools."),
        Message("user", "What are the capitals of Norway and Sweden, and which cities has Norway?"),
        Message(
            "assistant", "I look both up.", "I need two capitals.", [capital("1", "Norway"), capital("2", "Sweden")]
        ),
        result("2", '{"capital": "Stockholm"}'),  # in another order than the calls
        result("1", FAILURES["rate_limit"]),
        Message("assistant", "", "One failed: again.", [capital("3", "Norway")]),
        result("3", '{"error": "unknown country: Norway"}'),
        Message("assistant", "", "And the cities.", [ToolCall("4", "cities_of_country", {})]),
        result("4", LONG, "cities_of_country"),
        Message("assistant", "Oslo and Stockholm;\nsixty cities.", "I have all."),
    ],
    injected_failures=1,
    failures=[InjectedFailure("1", "rate_limit")],
    scores={axis: AxisScore(1.0, f"about {axis}") for axis in AXES}
    | {"tool_call_status": AxisScore(0.5, "2 of 4 calls succeeded")},
    reward=6.5 / 7,
)
CHINESE = replace(
    NORDIC,
    id="挪威/1?",
    language="zh",
    domain="time",
    messages=[Message("user", "挪威的首都是哪里？"), Message("assistant", "奥斯陆。")],
    injected_failures=0,
    failures=[],
    reward=0.81,
)
HOSTILE = replace(
    NORDIC,
    id=f"hostile{INJECTION}",
    task_id=INJECTION,
    server_id=INJECTION,
    domain=INJECTION,
    tools=[ToolSpec(INJECTION, INJECTION, {"properties": {INJECTION: {"description": INJECTION}}, "required": 1})],
    messages=[
        Message("user", INJECTION),
        Message("assistant", INJECTION, INJECTION, [ToolCall(INJECTION, INJECTION, {INJECTION: INJECTION})]),
        Message("tool", INJECTION * 20, tool_call_id=INJECTION, name=INJECTION),
        Message("tool", INJECTION, tool_call_id="stray", name=INJECTION),
        Message("assistant", INJECTION),
    ],
    scores={INJECTION: AxisScore(0.5, INJECTION)},
)
OTHERS = [replace(NORDIC, id=f"copy-{n}", messages=[Message("user", f"Copy {n}?")], reward=0.9) for n in range(60)]
SERVER = ToolServer("countries", "Countries", "?", "geography", "en", TOOLS, CodeExecution(""))
CARD: dict[str, Any] = {
    "seed": 3,
    "config": {"languages": {"en": 0.7}, "operators": ["vote"]},
    "statistics": {
        **trajectory_statistics([NORDIC, CHINESE, *OTHERS], {"countries": SERVER}),
        "all_runs": {"runs": 80, "calls": 120, "injected_failure_rate": 0.2},
    },
    "rejected": {
        "judge": {"judge_failed": 2, "low_reward": 16},
        "collect": {"mcp_server_unavailable": 1},
        "tasks": {},
        "graph": {"unknown_tool": 4},
        "registries": {"not_json": 3},
    },
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "trajectories"
    write_dataset(path, Trajectory, [NORDIC, CHINESE, HOSTILE, *OTHERS], card=CARD)
    return path


@pytest.fixture(scope="module")
def port(dataset) -> Iterator[int]:
    with serving(dataset) as port:
        yield port


def turns(one: Trajectory) -> list[Turn]:
    return turns_of(one.messages, failures_of(one))


def listed(port: int, **wanted: str) -> list[str]:
    """The ids of a list's first page."""
    status, _, text = send(port, "GET", f"/?{urlencode(wanted)}")
    assert status == 200
    return [unescape(one) for one in re.findall(r'<td class="question"><a href="/trajectory/([^"?]+)', text)]


# ---------------------------------------------------------------------------------------------------------------------
# What is shown of a conversation


def test_a_result_stands_at_its_call() -> None:
    shown = turns(NORDIC)
    assert [turn.role for turn in shown] == ["system", "user", *["assistant"] * 4]
    both, again, cities = shown[2:5]
    assert [(one.id, one.result.failure, one.result.kind) for one in both.calls if one.result] == [
        ("1", "injected", "rate_limit"),
        ("2", "", ""),
    ]
    assert again.calls[0].result and again.calls[0].result.failure == "error"
    long = cities.calls[0].result
    assert long and long.preview.startswith('{"cities": [{"name": "city 0"') and len(long.preview) < 120
    assert long.characters == len(LONG) and '"people": 1000.0' in long.text
    assert not any(turn.stray for turn in shown)


def test_records_of_elsewhere_are_shown_as_they_are() -> None:
    """Ids that repeat, calls without a result, results without a call, axes that are not ours."""
    messages = [
        result("1", "early"),
        Message("assistant", "", "", [capital("1", "Norway"), capital("1", "Sweden")]),
        result("1", "first"),
        result("9", "of nothing"),
        Message("assistant", "", "", [capital("1", "Finland")]),
    ]
    shown = turns(replace(NORDIC, messages=messages))
    assert [[one.result.text for one in turn.stray if one.result] for turn in shown] == [["early"], ["of nothing"], []]
    texts = [[one.result and one.result.text for one in turn.calls] for turn in shown]
    assert texts == [[], ["first", None], [None]]
    assert turns(replace(NORDIC, messages=[])) == []
    found = scores_of(replace(NORDIC, scores={"wit": AxisScore(0.2, "dull"), "conciseness": AxisScore(1.0, "")}))
    assert [name for name, _, _ in found] == [*AXES, "wit"]
    assert [score for _, score, _ in found] == [None] * 5 + [1.0, None, 0.2]


def test_a_record_that_names_its_failures_is_believed() -> None:
    """Whatever their words are: what an emulator said itself is no injected failure."""
    calls = [capital("1", "Norway"), capital("2", "Sweden"), capital("3", "Denmark"), capital("4", "Finland")]
    words = [FAILURES["timeout"], FAILURES["timeout"], '{"capital": ', "Copenhagen"]
    results = [result(str(number), text) for number, text in enumerate(words, 1)]
    one = replace(
        NORDIC, messages=[Message("assistant", "", "", calls), *results], injected_failures=1,
        failures=[InjectedFailure("2", "timeout")], errors=[CallError("3", "cpu_timeout")],
    )  # fmt: skip
    shown = [(call.result.failure, call.result.kind) for call in turns(one)[0].calls if call.result]
    assert shown == [("error", ""), ("injected", "timeout"), ("error", "cpu_timeout"), ("", "")]


def test_long_texts_are_folded() -> None:
    for text in ("", "short", "{not json", "[" * 5_000, '{"a": 1}'):
        assert result_of(text).text == text and bool(result_of(text).preview) == (len(text) > 1000)
    assert result_of("line\n" * 20).preview == f"{' '.join(['line'] * 20)} …"
    assert result_of('{"text": "' + "重庆" * 60 + '"}').text == '{\n  "text": "' + "重庆" * 60 + '"\n}'


# ---------------------------------------------------------------------------------------------------------------------
# Over HTTP


def test_the_list_is_filtered(port) -> None:
    assert len(listed(port)) == 50 and len(listed(port, page="2")) == 13
    first = quote(NORDIC.id)
    assert listed(port, text=" NORWAY AND Sweden") == [first]
    assert listed(port, text="cities_of_country") == [first]  # that it calls; the others are offered it too
    assert listed(port, text="countries", language="zh") == [quote(CHINESE.id)] == listed(port, domain="time")
    assert (
        listed(port, text="trajectory-nordic") == [first] == listed(port, failures="with", reward="0.92", text="n")[:1]
    )
    assert listed(port, failures="without") == [quote(CHINESE.id)]
    assert len(listed(port, reward="0.9", page="2")) == 12 and listed(port, reward="1.0") == []
    assert "reward=0.9&amp;page=2" in send(port, "GET", "/?reward=0.9")[2]


@pytest.mark.parametrize(
    "path", ["/", "/?text=hostile", f"/?text={quote(INJECTION)}", "/trajectory/%s", "/trajectory/%s-no"]
)
def test_texts_of_trajectories_are_never_markup(port, path: str) -> None:
    _, headers, text = send(port, "GET", path.replace("%s", quote(HOSTILE.id, safe="")))
    assert "&lt;script&gt;" in text and "<script>" not in text and "<img" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
    assert not any(word in text for word in ("http://", "https://", " style=", " onclick=", "@import"))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/trajectory/nowhere", 404, "none of the trajectories has the id &#39;nowhere&#39;"),
        ("/?reward=much", 400, "reward is &#39;much&#39;; give the least one, a number from 0 to 1"),
        ("/?reward=nan", 400, "give the least one"),
        ("/?page=two", 400, "give a whole number from 1"),
        ("/?text=zzz", 200, "None of them matches"),
        ("/call", 404, "Not Found"),
    ],
)
def test_what_cannot_be_shown_is_said(port, path: str, status: int, words: str) -> None:
    got, _, text = send(port, "GET", path)
    assert got == status and words in text


def test_conversations_without_tools_are_shown_and_where_they_were_broken_off(tmp_path) -> None:
    """As a rehearsal has them: no server, no scores."""
    said = [Message("user", "Who are you?"), Message("assistant", "I am a mo")]
    whole = Trajectory("talk", "talk", "", "conversation", "en", [], said, 0, {}, None)
    write_dataset(tmp_path / "talks", Trajectory, [whole, replace(whole, id="broken", unfinished=True)], card={})
    with serving(tmp_path / "talks") as port:
        pages = {id: send(port, "GET", f"/trajectory/{id}")[2] for id in ("talk", "broken")}
    assert all("I am a mo" in page for page in pages.values())
    assert "broken off at a limit" in pages["broken"] and "broken off" not in pages["talk"]


def test_a_dataset_that_changes_meanwhile_is_not_mixed_up(tmp_path) -> None:
    write_dataset(tmp_path / "data", Trajectory, [NORDIC, CHINESE], card={})
    with serving(tmp_path / "data") as port:
        write_dataset(tmp_path / "data", Trajectory, [CHINESE], card={})
        for one, words in ((NORDIC, "its records have changed"), (CHINESE, "has no record 1; it holds 1")):
            status, _, text = send(port, "GET", f"/trajectory/{quote(one.id, safe='')}")
            assert status == 503 and words in text and "start it again" in text


def test_bad_datasets_are_one_line_and_exit_code_2(tmp_path) -> None:
    write_dataset(tmp_path / "twice", Trajectory, [NORDIC, NORDIC], card={})
    write_dataset(tmp_path / "corrupt", Trajectory, [NORDIC], card={})
    (tmp_path / "corrupt" / "records.array_record").write_bytes(b"nothing")
    for name, words in (
        ("twice", "two trajectories have the id 'trajectory-nordic'"),
        ("corrupt", "run its stage again"),
    ):
        assert words in ended("launch.inspect", *command(tmp_path / name)[3:]).line


# ---------------------------------------------------------------------------------------------------------------------
# Cards


def test_the_card_has_the_papers_table_and_rejections_in_order() -> None:
    shown = shown_card({**CARD, "kind": "Trajectory", "count": 62, "digest": "d", "schema_version": 1})
    assert shown.table["conversations"] == "62" and "of the calls" in shown.table["injected failures"]
    assert shown.table["runs before judging"] == "80; failures were injected into 20.0% of their calls"
    assert shown.table["runs without a valid judgement"].startswith("2; 2.5% ")
    assert "histogram" in shown.more["statistics"]["messages_per_conversation"]
    assert shown.rejections == [
        ("collect", "mcp_server_unavailable", 1),
        ("registries", "not_json", 3),
        ("graph", "unknown_tool", 4),
        ("judge", "low_reward", 16),
        ("judge", "judge_failed", 2),
    ]
    assert list(shown.facts) == ["kind", "count", "seed", "digest", "schema_version"]


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"statistics": None, "rejected": []},
        {"statistics": {"conversations": "many", "axes": 3}, "rejected": {"a": {"b": "c"}, "d": 4}},
        {"statistics": {"messages_per_conversation": {"histogram": {"1": "2"}}, "domains": {"a": 1e300, "": -1}}},
        {
            "statistics": {
                "messages_per_conversation": {"histogram": {"1": 2, "1e300": 1}},
                "reward": {"histogram": {"-1e9": 1}},
            }
        },
    ],
)
def test_a_card_of_another_writer_is_shown_as_far_as_it_goes(card: dict[str, Any]) -> None:
    for kind in ("Trajectory", "ToolEnvironment"):
        shown = shown_card({**card, "kind": kind})
        assert shown.table == {} and shown.facts["kind"] == kind


def test_a_card_page_over_http(port, tmp_path) -> None:
    _, headers, text = send(port, "GET", "/card")
    assert "default-src 'none'" in headers["Content-Security-Policy"] and " style=" not in text
    for words in ("unique functions called", "mcp server unavailable", "response_conditioned_planning", "operators"):
        assert words in text
    hostile = {
        "statistics": {"domains": {INJECTION: 3}},
        "rejected": {INJECTION: {INJECTION: 1}},
        INJECTION: [INJECTION],
    }
    write_dataset(tmp_path / "hostile", Trajectory, [HOSTILE], card=hostile)
    with serving(tmp_path / "hostile") as other:
        _, _, text = send(other, "GET", "/card")
    assert text.count("&lt;script&gt;") > 4 and "<script>" not in text and "<img" not in text


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.mark.slow
def test_a_person_finds_a_trajectory_and_reads_it(port, browser) -> None:
    browser.get(f"http://127.0.0.1:{port}/")
    assert len(rows(browser)) == 50 and "63 of 63 trajectories" in text_of(browser)
    follow(browser, "a[rel=next]")
    assert len(rows(browser)) == 13
    browser.find_element("name", "text").send_keys("capital_of_country")
    browser.find_element("name", "reward").send_keys("0.92")
    for name, value in (("domain", "geography"), ("language", "en"), ("failures", "with injected failures")):
        browser.find_element("xpath", f"//select[@name='{name}']/option[.='{value}']").click()
    follow(browser, ".filter button")
    assert len(rows(browser)) == 1 and browser.find_element("name", "reward").get_attribute("value") == "0.92"
    follow(browser, "td.question a")
    assert browser.title == NORDIC.id
    text = text_of(browser)
    for words in ("2 calls at the same time", "injected failure: rate limit", '{"country": "Sweden"}', "Stockholm"):
        assert words in text
    for words in (
        "about query_planning",
        "2 of 4 calls succeeded",
        "0.50",
        "0.929",
        "Oslo and Stockholm;\nsixty cities.",
    ):
        assert words in text
    # Thinking, the long result and the tools' documents open when asked.
    assert "I need two capitals." not in text and "city 59" not in text and "Find the capital" in text
    for folded in browser.find_elements("css selector", "details"):
        if folded.is_displayed() and not folded.get_attribute("open"):
            folded.find_element("tag name", "summary").click()
    text = text_of(browser)
    assert "I need two capitals." in text and "city 59" in text and "required" in text
    made = browser.find_elements("css selector", ".calls.parallel .made")
    assert [one.find_element("css selector", ".tool").text for one in made] == ["capital_of_country"] * 2
    assert made[0].rect["y"] == made[1].rect["y"] and made[0].rect["x"] < made[1].rect["x"]
    assert len(browser.find_elements("css selector", ".mark")) == 1
    assert fits(browser) and browser.get_log("browser") == []


@pytest.mark.slow
def test_hostile_texts_and_chinese_ones_in_a_browser(port, browser) -> None:
    for one in (CHINESE, HOSTILE):
        browser.get(f"http://127.0.0.1:{port}/?text={quote(one.messages[0].content)}")
        follow(browser, "td.question a")
        assert browser.title == one.id and one.messages[0].content in text_of(browser)
        assert fits(browser)
    assert browser.find_elements("css selector", "body script, body img") == []
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_card_in_a_browser(port, browser, tmp_path) -> None:
    browser.get(f"http://127.0.0.1:{port}/")
    follow(browser, "a[href='/card']")
    assert browser.title == "Dataset card" and fits(browser) and browser.get_log("browser") == []
    assert "62; a conversation" not in text_of(browser) and "low reward" in text_of(browser)
    follow(browser, "a[href='/']")
    assert browser.title == "Trajectories"
    write_dataset(tmp_path / "environments", ToolEnvironment, [NORWAY], card={"statistics": statistics_of([NORWAY])})
    with serving(tmp_path / "environments") as other:
        browser.get(f"http://127.0.0.1:{other}/")
        follow(browser, "a[href='/card']")
        assert browser.title == "Dataset card" and fits(browser) and browser.get_log("browser") == []
        assert "sub-questions needing tools" in text_of(browser)
        follow(browser, "a[href='/']")
        assert browser.title == "Environments"


NORWAY = ToolEnvironment(
    id="norway",
    language="en",
    domain="geography",
    structure="single_hop",
    question="What is the capital of Norway?",
    answer=Answer("Oslo"),
    sub_questions=[SubQuestion(1, "What is the capital of Norway?", Answer("Oslo"), [], 1, True, "capital")],
    tools=[CodeTool(TOOLS[0], "def capital_of_country(country):\n    return 'Oslo'\n")],
    reference_calls=[ReferenceCall(1, "capital_of_country", {"country": "Norway"}, "Oslo", "string")],
    distractors={},
    entities=["Norway"],
    signature="capital",
    split="train",
)
