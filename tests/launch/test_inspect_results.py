"""The pages that show an evaluation's results: a real server, a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import pytest
from result_world import BFCL, CATEGORIES, evaluation, result
from viewing import INJECTION, fits, follow, rows, send, serving, text_of

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.saved import FOLDER, Evaluation, save_evaluation
from launch.viewer.cards import ViewerService, shown_card
from launch.viewer.conversation import turns_of
from launch.viewer.results import ResultPages
from launch.viewer.service import ViewerConfig
from synthesis.core.datasets import DatasetError, read_card, write_dataset


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


LISTED = json.dumps([f"report {n}.pdf" for n in range(200)])
TALK = [
    {"role": "system", "content": "You work with files."},
    {"role": "user", "content": "Copy the report to the archive."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Both folders first.",
        "tool_calls": [call("a", "ls", '{"path": "\\u6863\\u6848"}'), call("b", "cd", '{"path": archive}')],
    },
    tool("b", '{"error":"the tool call could not be read"}'),
    tool("a", LISTED),
    {"role": "assistant", "content": "[cp()]", "reasoning": "Now the copy, as text."},
    {"role": "tool", "content": "copied"},  # some benchmarks read calls from the text
    {"role": "assistant", "content": "It is copied."},
]
FINISHED = result("base", "copy/files?&1", 0, 0.5, messages=TALK, metrics={"irrelevant_calls": 0.25})
AGAIN = result("base", "copy/files?&1", 1, 0, finish="turn_limit", problem="turn 2: the folder is empty", steps=7)
HOSTILE = result(
    "miss_func", INJECTION, 0, 0, finish=INJECTION, problem=INJECTION, metrics={INJECTION: 1.0},
    messages=[
        {"role": INJECTION, "content": INJECTION},
        {"role": "user", "content": [{"type": "text", "text": INJECTION}, {"type": "image_url", "url": INJECTION}]},
        {
            "role": "assistant",
            "content": INJECTION,
            "reasoning": INJECTION,
            "tool_calls": [call(INJECTION, INJECTION, {INJECTION: INJECTION}), call("b", INJECTION, INJECTION)],
        },
        tool(INJECTION, INJECTION * 20),
        tool("stray", INJECTION),
    ],
)  # fmt: skip


def with_results(*more: ItemResult) -> Evaluation:
    """90 results of two categories, and others."""
    scores = {"base": [[n % 2] for n in range(60)], "miss_func": [[1]] * 30}
    whole = evaluation(scores, model="tiny-rl", roles={"user": "a person"})
    return replace(whole, results=(*more, *whole.results))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return save_evaluation(tmp_path_factory.mktemp("evaluated"), with_results(FINISHED, AGAIN, HOSTILE))


@pytest.fixture(scope="module")
def port(dataset) -> Iterator[int]:
    with serving(dataset) as port:
        yield port


@asynccontextmanager
async def shown(dataset: Path) -> AsyncIterator[int]:
    """The port of a server in this process."""
    service = ViewerService(ResultPages(dataset), read_card(dataset), ViewerConfig(port=0))
    await service.start()
    try:
        yield service.port
    finally:
        await service.stop()


def address(one: ItemResult) -> str:
    return f"/result/{quote(f'{one.suite}/{one.category}/{one.item}/{one.trial}')}"


def listed(port: int, **wanted: str) -> list[str]:
    """`item:trial` of a list's first page."""
    status, _, text = send(port, "GET", f"/?{urlencode(wanted)}")
    assert status == 200
    links = [unescape(one) for one in re.findall(r'<td class="question"><a href="/result/([^"?]+)', text)]
    return [":".join(unquote(link).split("/", 2)[2].rsplit("/", 1)) for link in links]


# ---------------------------------------------------------------------------------------------------------------------
# Conversations


def test_openais_messages_become_turns() -> None:
    turns = turns_of(TALK)
    assert [turn.role for turn in turns] == ["system", "user", *["assistant"] * 3]
    assert [turn.reasoning for turn in turns] == ["", "", "Both folders first.", "Now the copy, as text.", ""]
    first, second = turns[2].calls
    assert (first.name, first.arguments, first.unreadable) == ("ls", '{"path": "档案"}', False)
    assert first.result and not first.result.failure and first.result.characters == len(LISTED)
    # What the model wrote where no object could be read is not replaced by one.
    assert (second.name, second.arguments, second.unreadable) == ("cd", '{"path": archive}', True)
    assert second.result and second.result.failure == "error"
    assert [one.result.text for one in turns[3].stray if one.result] == ["copied"]


def test_messages_of_any_endpoint_are_shown() -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    lone = '{"a": "\\ud800"}'  # half a character, which no page could be encoded with
    odd = [
        {"content": None},
        {"role": "assistant", "tool_calls": ["?", {"function": None}, call("", "f", None), call("1", "g", {"a": 1.0})]},
        {"role": "tool", "content": "of the first"},
        {"role": "assistant", "content": {"text": 1}, "tool_calls": "none", "reasoning": ["a", {"text": "b"}, 3]},
        {"role": "tool", "content": "of what was called in the text"},
        {"role": "assistant", "tool_calls": [call("", "f", text) for text in (deep, lone, "[1]", "")]},
    ]
    nobody, four, said, last = turns_of(odd)
    assert (nobody.role, nobody.content) == ("(no role)", "")
    assert [one.name for one in four.calls] == ["", "", "f", "g"]
    assert [one.arguments for one in four.calls] == ["{}", "{}", "{}", '{"a": 1.0}']
    assert [one.result and one.result.text for one in four.calls] == ["of the first", None, None, None]
    assert (said.content, said.reasoning) == ('{"text": 1}', "a\nb\n3")
    assert [one.result.text for one in said.stray if one.result] == ["of what was called in the text"]
    assert [one.arguments for one in last.calls[1:]] == [lone, "[1]", "{}"]
    assert [one.unreadable for one in last.calls[1:]] == [True, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# Over HTTP


def test_the_list_is_filtered(port) -> None:
    assert len(listed(port)) == 50 and len(listed(port, page="2")) == 43
    both = [f"{FINISHED.item}:0", f"{FINISHED.item}:1"]
    assert listed(port, text="FILES?") == both and listed(port, text="folder is EMPTY") == both[1:]
    assert listed(port, score="between") == both[:1] and listed(port, trial="1") == both[1:]
    assert listed(port, finish="turn_limit", suite=BFCL.name) == both[1:] and listed(port, suite="tau2") == []
    assert len(listed(port, category="miss_func", score="1")) == 30
    assert listed(port, category="miss_func", score="0") == [f"{INJECTION}:0"]
    assert "score=1&amp;trial=0&amp;page=1" in send(port, "GET", "/?score=1&trial=0&page=2&text=")[2]


def test_a_result_has_its_figures_and_the_other_trials(port) -> None:
    status, _, text = send(port, "GET", address(FINISHED))
    assert status == 200
    folded = f"{len(LISTED):,} characters"
    for words in ("0.500", "irrelevant calls", "0.25", "the folder is empty", folded, "no JSON object"):
        assert words in text
    assert f'href="{address(AGAIN)}"'.replace("&", "&amp;") in text
    assert f'href="{address(FINISHED)}"'.replace("&", "&amp;") not in text
    assert "copied</pre>" in text and "belongs to no call" not in text
    assert "The record has none." in send(port, "GET", address(AGAIN))[2]
    assert "belongs to no call" in send(port, "GET", address(HOSTILE))[2]


@pytest.mark.parametrize("path", ["/", f"/?{urlencode({'text': INJECTION})}", address(HOSTILE), "/?score=<script>"])
def test_texts_of_models_are_never_markup(port, path: str) -> None:
    _, headers, text = send(port, "GET", path)
    assert "&lt;script&gt;" in text and "<script>" not in text and "<img" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not any(word in text for word in ("http://", "https://", " style=", " onclick=", "@import"))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/result", 404, "Not Found"),
        (
            f"{address(AGAIN)[:-1]}2",
            404,
            "none of the results has the id &#39;bfcl_v3_mt/base/copy/files?&amp;1/2&#39;",
        ),
        ("/?score=0.5", 400, "give one of 0, between, 1"),
        ("/?text=zzz", 200, "None of them matches"),
    ],
)
def test_what_cannot_be_shown_is_said(port, path: str, status: int, words: str) -> None:
    got, _, text = send(port, "GET", path)
    assert got == status and words in text


async def test_results_that_change_meanwhile_are_not_mixed_up(tmp_path) -> None:
    dataset = save_evaluation(tmp_path, with_results(FINISHED, AGAIN))
    async with shown(dataset) as port:
        save_evaluation(tmp_path, with_results(AGAIN))
        for one in (FINISHED, AGAIN):
            status, _, text = await asyncio.to_thread(send, port, "GET", address(one))
            assert status == 503 and "its records have changed" in text and "start it again" in text


def test_two_results_of_one_trial_are_refused(tmp_path) -> None:
    write_dataset(tmp_path / FOLDER, ItemResult, [AGAIN, FINISHED, AGAIN], card={})
    with pytest.raises(ValueError, match=re.escape("two results have the id 'bfcl_v3_mt/base/copy/files?&1/1'")):
        ResultPages(tmp_path / FOLDER)
    write_dataset(tmp_path / FOLDER, ItemResult, [AGAIN], card={})
    assert len(ResultPages(tmp_path / FOLDER)) == 1
    (tmp_path / FOLDER / "records.array_record").unlink()
    with pytest.raises(DatasetError):
        ResultPages(tmp_path / FOLDER)


# ---------------------------------------------------------------------------------------------------------------------
# The card


async def test_the_card_says_what_was_run(port, dataset, tmp_path) -> None:
    assert shown_card(read_card(dataset)).facts["user"] == "a person"
    _, _, text = send(port, "GET", "/card")
    for words in ("tiny-rl", "bfcl-eval 2026.3.23, Apache-2.0", "temperature 0.6", "table.html", "0123abcd"):
        assert words in text
    assert "no statistics" not in text
    info = replace(
        BFCL, title=INJECTION, harness=INJECTION, license=INJECTION, notes=(INJECTION,),
        categories=(replace(CATEGORIES[0], title=INJECTION),),
    )  # fmt: skip
    hostile = evaluation({"base": [[1]]}, model=INJECTION, info=info)
    async with shown(save_evaluation(tmp_path, hostile)) as other:
        for path in ("/", "/card", address(hostile.results[0])):
            _, _, text = await asyncio.to_thread(send, other, "GET", path)
            assert "&lt;script&gt;" in text and "<script>" not in text and "<img" not in text


@pytest.mark.parametrize("suites", [None, "bfcl", [{"about": 3}], [{"about": {}, "decodings": {}, "totals": {}}]])
def test_a_card_of_another_version_is_shown_as_far_as_it_goes(suites: object) -> None:
    found = shown_card({"kind": "ItemResult", "model": "tiny", "suites": suites})
    assert found.suites == [] and found.facts["model"] == "tiny"


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.mark.slow
def test_a_person_finds_a_failure_and_reads_it(port, browser) -> None:
    browser.get(f"http://127.0.0.1:{port}/")
    assert browser.title == "Results of tiny-rl"
    assert len(rows(browser)) == 50 and "93 of 93 results" in text_of(browser)
    for name, value in (("category", "base"), ("suite", BFCL.name), ("score", "score 0"), ("trial", "trial 1")):
        browser.find_element("xpath", f"//select[@name='{name}']/option[.='{value}']").click()
    browser.find_element("name", "text").send_keys("the folder")
    follow(browser, ".filter button")
    assert len(rows(browser)) == 1 and browser.find_element("name", "trial").get_attribute("value") == "1"
    follow(browser, "td.question a")
    assert browser.title == f"{AGAIN.item}, trial 1" and "turn limit" in text_of(browser)
    follow(browser, ".trials a")  # to the other trial
    assert browser.title == f"{FINISHED.item}, trial 0"
    text = text_of(browser)
    for words in ("2 calls at the same time", '{"path": "档案"}', '{"path": archive}', "It is copied.", "0.500"):
        assert words in text
    assert "Both folders first." not in text and "report 199.pdf" not in text
    for folded in browser.find_elements("css selector", "details"):
        folded.find_element("tag name", "summary").click()
    assert "Both folders first." in text_of(browser) and "report 199.pdf" in text_of(browser)
    browser.get(f"http://127.0.0.1:{port}{address(HOSTILE)}")
    assert browser.title == f"{INJECTION}, trial 0" and text_of(browser).count(INJECTION) > 10
    assert browser.find_elements("css selector", "body script, body img") == []
    assert fits(browser)
    follow(browser, "a[href='/']")
    assert fits(browser)
    follow(browser, "a[href='/card']")
    assert "Missing function" in text_of(browser) and fits(browser)
    follow(browser, "a[href='/']")
    assert browser.title == "Results of tiny-rl" and browser.get_log("browser") == []
