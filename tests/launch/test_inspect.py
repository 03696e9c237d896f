"""The page that shows environments and runs their tools: a real server, a real sandbox, a real browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace
from programs_world import programs
from viewing import INJECTION, ROOT, basic, command, follow, rows, send, serving, text_of, until

from synthesis.core.datasets import write_dataset
from synthesis.core.records import (
    Answer,
    CodeTool,
    Difficulty,
    Message,
    QualityScores,
    ReferenceCall,
    SubQuestion,
    ToolEnvironment,
    ToolSpec,
)

TOKEN = "open sesame"

CAPITALS = """
def capital_of_country(country):
    print("looking up", country)
    return {"capital": {"Norway": "Oslo", "挪威": "奥斯陆"}[country]}
"""
FACTS = """
def fact_of_city(city, fact="population"):
    facts = {"population": {"Oslo": 717710.0, "奥斯陆": 717710.0}, "calling code": {"Oslo": "+47"}}
    return {"value": facts[fact][city]}
"""
RATIO = "def ratio(first, second):\n    return first / second\n"
SPIN = "def spin(limit):\n    while True:\n        pass\n"


def tool(name: str, code: str, **parameters: dict[str, Any]) -> CodeTool:
    required = [name for name, schema in parameters.items() if not schema.pop("optional", False)]
    schema = {"type": "object", "properties": parameters, "required": required, "additionalProperties": False}
    return CodeTool(ToolSpec(name, f"Find the {name.replace('_', ' ')}.", schema), code)


NORWAY = ToolEnvironment(
    id="norway",
    language="en",
    domain="geography",
    structure="parallel_multi_hop",
    question="How many people live in Norway's capital, what is its calling code, and how do they compare?",
    answer=Answer(15270.4, tolerance=0.1, unit="people"),
    sub_questions=[
        SubQuestion(1, "What is the capital of Norway?", Answer("Oslo"), [], 1, True, "capital"),
        SubQuestion(2, f"How many people live there{', would you say' * 12}?", Answer(717710), [1], 2, True, "fact"),
        SubQuestion(3, "Which calling code has a phone there?", Answer("+47"), [1], 2, True, "fact"),
        SubQuestion(4, "What is their ratio, when Oslo is the city?", Answer(15270.4), [1, 2, 3], 3, True, "ratio"),
        SubQuestion(5, "What is twice that?", Answer(30540.8), [4, 1], 4, False, ""),
    ],
    tools=[
        tool("capital_of_country", CAPITALS, country={"type": "string", "description": "Name of the country."}),
        tool(
            "fact_of_city",
            FACTS,
            city={"type": "string"},
            fact={"type": "string", "enum": ["population", "calling code"], "optional": True},
        ),
        tool("ratio", RATIO, first={"type": "number"}, second={"type": "number"}),
    ],
    reference_calls=[
        ReferenceCall(1, "capital_of_country", {"country": "Norway"}, {"capital": "Oslo"}, "string"),
        ReferenceCall(2, "fact_of_city", {"city": "Oslo"}, {"value": 717710.0}, "number"),
        ReferenceCall(3, "fact_of_city", {"city": "Oslo", "fact": "calling code"}, {"value": "+47"}),
        ReferenceCall(4, "ratio", {"first": 717710, "second": 47}, 15270.425, "number"),
    ],
    distractors={"high": [tool("spin", SPIN, limit={"type": "integer"})], "medium": [], "low": []},
    entities=["Norway", "Oslo"],
    signature="capital>fact|fact>ratio",
    split="train",
    quality=QualityScores(1.0, 0.75, 1.0, 1.0),
    difficulty=Difficulty(hops=3, parallel_share=0.5, distractor_closeness=0.31),
)
LONG_CHINESE = "请告诉我：位于北欧斯堪的纳维亚半岛西部、与瑞典接壤的国家挪威，其首都是哪一座城市？"
CHINESE = replace(
    NORWAY,
    id="挪威/1?",
    language="zh",
    structure="multi_hop",
    question="挪威的首都有多少人口？",
    answer=Answer(717710, unit="人"),
    sub_questions=[
        SubQuestion(1, LONG_CHINESE * 2, Answer("奥斯陆"), [], 1, True, ""),
        SubQuestion(2, "奥斯陆有多少人口（以最近一次统计为准）？", Answer(717710, unit="人"), [1], 2, True, ""),
    ],
    reference_calls=[
        ReferenceCall(1, "capital_of_country", {"country": "挪威"}, {"capital": "奥斯陆"}, "string"),
        ReferenceCall(2, "fact_of_city", {"city": "奥斯陆"}, {"value": 717710.0}, "number"),
    ],
    quality=None,
    difficulty=None,
)
ECHO = f"# {INJECTION}\ndef echo(text):\n    return text\n"
HOSTILE = replace(
    NORWAY,
    id=f"hostile{INJECTION}",
    domain=INJECTION,
    question=INJECTION,
    answer=Answer(INJECTION),
    sub_questions=[SubQuestion(1, INJECTION, Answer(INJECTION), [7], 1, True, INJECTION)],
    tools=[CodeTool(ToolSpec("echo", INJECTION, {"properties": {INJECTION: {"enum": [INJECTION]}}}), ECHO)],
    reference_calls=[ReferenceCall(1, "echo", {"text": INJECTION}, INJECTION, INJECTION)],
    distractors={INJECTION: [CodeTool(ToolSpec("other", INJECTION, {}), "")]},
    entities=[INJECTION],
    signature=INJECTION,
)
OTHERS = [replace(NORWAY, id=f"copy-{n}", question=f"Copy {n}?", structure="single_hop") for n in range(60)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "environments"
    write_dataset(path, ToolEnvironment, [NORWAY, CHINESE, HOSTILE, *OTHERS], card={})
    return path


@pytest.fixture(scope="module")
def port(dataset) -> Iterator[int]:
    with serving(dataset) as port:
        yield port


def call(port: int, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and answer of POST /call; headers are written with _ for -."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, text = send(port, "POST", "/call", data, given)
    return status, json.loads(text)


def wanted(environment: str = "norway", tool: str = "capital_of_country", arguments: Any = None) -> dict[str, Any]:
    arguments = {"country": "Norway"} if arguments is None else arguments
    return {"environment": environment, "tool": tool, "arguments": arguments}


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def test_a_call_runs_in_the_sandbox_and_says_what_it_solves(port) -> None:
    status, answer = call(port, wanted())
    assert status == 200 and answer["kind"] == "ok" and answer["value"] == {"capital": "Oslo"}
    assert answer["solves"] == [{"sub_question": 1, "rule": "string"}]
    assert answer["stdout"] == "looking up Norway\n" and answer["wall_seconds"] > 0 and not answer["infrastructure"]
    _, answer = call(port, wanted(tool="fact_of_city", arguments='{"city": "Oslo"}'))  # as text, as OpenAI has it
    assert answer["shown"] == '{\n  "value": 717710.0\n}'
    assert answer["solves"] == [{"sub_question": 2, "rule": "number"}]
    _, answer = call(port, wanted(tool="ratio", arguments={"first": 1, "second": 1}))
    assert answer["kind"] == "ok" and answer["solves"] == []


def test_how_a_call_ends_is_named(port) -> None:
    _, answer = call(port, wanted(arguments={"country": "Atlantis"}))
    assert answer["kind"] == "tool_error" and "Atlantis" in answer["error"] and answer["solves"] == []
    _, answer = call(port, wanted(arguments={"city": "Oslo"}))
    assert answer["kind"] == "tool_error" and "city" in answer["error"]
    _, answer = call(port, wanted(tool="spin", arguments={"limit": 1}))
    assert answer["kind"] == "cpu_timeout"


def test_an_environment_that_cannot_be_scored_still_runs(tmp_path) -> None:
    dataset = tmp_path / "environments"
    write_dataset(dataset, ToolEnvironment, [replace(NORWAY, reference_calls=NORWAY.reference_calls[:1])], card={})
    with serving(dataset) as port:
        status, answer = call(port, wanted())
    assert status == 200 and answer["value"] == {"capital": "Oslo"} and answer["solves"] == []
    assert "sub-question 2 needs a tool but has no reference call" in answer["note"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, 'the body is not a call (Input data was truncated); send {"environment": ID'),
        (b"{", 400, "the body is not a call"),
        (b"\xff", 400, "the body is not a call"),
        (b"[" * 100_000, 400, "the body is not a call"),
        ([], 400, "Expected `object`, got `array`"),
        ({"environment": "norway", "tool": "ratio"}, 400, "missing required field `arguments`"),
        (wanted() | {"seed": 1}, 400, "unknown field `seed`"),
        (wanted() | {"environment": 3}, 400, "Expected `str`, got `int` - at `$.environment`"),
        (wanted(arguments=[1]), 400, "Expected `str | object`, got `array` - at `$.arguments`"),
        (wanted(arguments="{'a': 1}"), 400, "which is not JSON (Expecting property name enclosed in double quotes"),
        (wanted(arguments='{"first": NaN}'), 400, "NaN is not a JSON number"),
        (wanted(arguments="[1]"), 400, "arguments is '[1]'; write an object"),
        (wanted(arguments="[" * 100_000), 400, "is not JSON"),
        (wanted("nowhere"), 404, "none of the environments has the id 'nowhere'; choose one of the list"),
        (wanted(tool="nothing"), 404, "its tools are capital_of_country, fact_of_city, ratio, spin"),
        (b" " * (1 << 20) + b"{}", 413, "the body is larger than 1048576 bytes; send less"),
    ],
)
def test_a_bad_call_is_refused_by_name(port, body: Any, status: int, words: str) -> None:
    got, answer = call(port, body)
    assert got == status and set(answer) == {"error"} and words in answer["error"]


# ---------------------------------------------------------------------------------------------------------------------
# Who may call


def test_pages_of_other_sites_cannot_call(port) -> None:
    own = f"127.0.0.1:{port}"
    assert call(port, wanted(), Origin=f"http://{own}")[0] == 200
    for origin in ("http://evil.example", f"http://127.0.0.1:{port + 1}", "null", f"http://{own}.evil.example", ""):
        status, answer = call(port, wanted(), Origin=origin)
        assert status == 403 and "own pages only" in answer["error"], origin
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, answer = call(port, wanted(), Content_Type=kind)
        assert status == 415 and "send application/json" in answer["error"], kind
    status, headers, _ = send(port, "OPTIONS", "/call", headers={"Origin": "http://evil.example"})
    assert status == 403 and not any(name.startswith("Access-Control") for name in headers)


def test_a_name_that_was_given_this_address_reaches_nothing(port) -> None:
    """DNS rebinding: there Origin and Host agree."""
    status, answer = call(port, wanted(), Host="evil.example", Origin="http://evil.example")
    assert status == 403 and "'evil.example' is not this machine" in answer["error"]
    for host, status in (("evil.example:8800", 403), ("127.0.0.1.evil.example", 403), ("[", 403), ("localhost:9", 200)):
        assert send(port, "GET", "/", headers={"Host": host})[0] == status, host


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """The one line that a start ends with."""
    with programs("launch.inspect", tmp_path_factory.mktemp("said")) as start:
        yield lambda dataset, *more: start(*command(dataset, *more)[3:]).line


def test_beyond_loopback_a_token_is_needed(dataset, refused, tmp_path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert f"host='{host}' can be reached from other machines" in refused(dataset, f"--host={host}")
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    with serving(dataset, "--host=0.0.0.0", f"--key_file={token}") as port:
        for given in ("", "Basic", "Basic !", basic("wrong"), basic(""), f"Basic {TOKEN}", "Bearer wrong"):
            for path in ("/", "/card", "/environment/norway", "/viewer.js", "/none"):
                status, headers, text = send(port, "GET", path, headers={"Authorization": given})
                assert status == 401 and headers["WWW-Authenticate"].startswith("Basic "), (given, path)
                assert "Norway" not in text
            assert call(port, wanted(), Authorization=given)[0] == 401, given
        for given in (basic(TOKEN), f"Bearer {TOKEN}"):
            assert send(port, "GET", "/", headers={"Authorization": given, "Host": "far.example"})[0] == 200
            assert call(port, wanted(), Authorization=given)[0] == 200
        assert call(port, wanted(), Authorization=basic(TOKEN), Origin="http://evil.example")[0] == 403


def test_every_answer_forbids_what_is_not_its_own(port) -> None:
    for path in (
        "/",
        "/environment/norway",
        "/viewer.js",
        "/page.css",
        "/page.js",
        "/card",
        "/call",
        "/none",
        "/?page=x",
    ):
        _, headers, text = send(port, "GET", path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert not any(word in text for word in ("http://", "https://", " style=", " onclick=", "@import"))


# ---------------------------------------------------------------------------------------------------------------------
# Pages


@pytest.mark.parametrize(
    "path", ["/", "/?text=hostile", "/?text=%3Cscript%3E", "/environment/%s", "/environment/%s-no"]
)
def test_texts_of_environments_are_never_markup(port, path: str) -> None:
    _, _, text = send(port, "GET", path.replace("%s", quote(HOSTILE.id, safe="")))
    assert "&lt;script&gt;" in text
    assert "<script>" not in text and "<img" not in text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/environment/nowhere", 404, "none of the environments has the id &#39;nowhere&#39;"),
        ("/environment/", 404, "Not Found"),
        ("/?page=two", 400, "page is &#39;two&#39;; give a whole number from 1"),
        ("/?page=-1", 400, "give a whole number"),
        ("/?page=999", 200, "page 2 of 2"),
    ],
)
def test_what_cannot_be_shown_is_said_on_a_page(port, path: str, status: int, words: str) -> None:
    got, headers, text = send(port, "GET", path)
    assert got == status and words in text and headers["Content-Type"].startswith("text/html")


# ---------------------------------------------------------------------------------------------------------------------
# Starting and stopping


def test_bad_input_is_one_line_and_exit_code_2(dataset, port, refused, tmp_path) -> None:
    write_dataset(tmp_path / "messages", Message, [], card={})
    write_dataset(tmp_path / "twice", ToolEnvironment, [NORWAY, NORWAY], card={})
    write_dataset(tmp_path / "corrupt", ToolEnvironment, [NORWAY], card={})
    (tmp_path / "corrupt" / "records.array_record").write_bytes(b"nothing")
    for path, flags, words in [
        (tmp_path / "none", [], "no dataset at"),
        (
            tmp_path / "messages",
            [],
            "it holds Message records; give the workdir of a synthesis",
        ),
        (tmp_path / "corrupt", [], "and run its stage again"),
        (tmp_path / "twice", [], "two environments have the id 'norway'"),
        (dataset, ["--key_file=/none"], "--key_file=/none is not a file with a key"),
        (dataset, ["--sandbox_url=http://127.0.0.1:9"], "no sandbox service answers at http://127.0.0.1:9"),
        (dataset, [f"--port={port}"], f"--host=127.0.0.1 --port={port}: "),
        (dataset, ["--host=127.0.0.255x"], "can be reached from other machines"),
    ]:
        assert words in refused(path, *flags)


def test_a_call_in_flight_ends_before_the_server_does(dataset) -> None:
    process = subprocess.Popen(command(dataset), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().split("/")[2].rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/call", json.dumps(wanted(tool="spin", arguments={"limit": 1})), headers)
    connection.sock.settimeout(1.0)
    with pytest.raises(TimeoutError):  # it has to be running
        connection.sock.recv(1)
    connection.sock.settimeout(60)
    os.kill(process.pid, signal.SIGTERM)
    assert json.loads(connection.getresponse().read())["kind"] == "cpu_timeout"
    connection.close()
    assert process.communicate(timeout=30)[0] == "stopped\n" and process.returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.mark.slow
def test_a_person_finds_an_environment_and_runs_its_tools(port, browser) -> None:
    browser.get(f"http://127.0.0.1:{port}/")
    assert len(rows(browser)) == 50 and "page 1 of 2" in text_of(browser)
    follow(browser, "a[rel=next]")
    assert len(rows(browser)) == len(OTHERS) + 3 - 50
    browser.find_element("name", "text").send_keys("calling code, and")
    browser.find_element("xpath", "//select[@name='structure']/option[.='parallel_multi_hop']").click()
    follow(browser, ".filter button")
    assert len(rows(browser)) == 1 and "1 of 63 environments" in text_of(browser)
    assert browser.find_element("name", "text").get_attribute("value") == "calling code, and"
    follow(browser, "td.question a")
    text = text_of(browser)
    for words in ("15270.4 people (within 0.1)", "0.75", "0.31", "parallel multi hop", "capital>fact|fact>ratio"):
        assert words in text
    check_questions(browser, NORWAY)

    answer = run(browser, "capital_of_country")
    assert (
        '"capital": "Oslo"' in answer and "solves sub-question 1 (string)" in answer and "looking up Norway" in answer
    )
    assert re.search(r"^ok in \d+\.\d ms, CPU \d+\.\d ms$", answer, re.M)
    assert "solved" in browser.find_element("css selector", "[data-sub-question='1']").get_attribute("class")
    assert "KeyError" in run(browser, "capital_of_country", '{"country": "Atlantis"}')
    assert "arguments is 'country', which is not JSON" in run(browser, "capital_of_country", "country")
    assert "solves sub-question 2 (number)" in run(browser, "fact_of_city")
    browser.find_elements("css selector", "#tool-fact_of_city button.fill")[1].click()
    assert "solves sub-question 3 (string)" in run(browser, "fact_of_city")
    assert "solves no sub-question" in run(browser, "ratio", '{"first": 1.0, "second": 1.0}')
    box = browser.find_element("css selector", "#tool-spin textarea")
    assert json.loads(box.get_attribute("value")) == {"limit": 0}
    assert "cpu_timeout" in run(browser, "spin")
    # A call that is refused is a failed resource to the browser; nothing else may be there.
    assert [entry for entry in browser.get_log("browser") if "400 (Bad Request)" not in entry["message"]] == []


@pytest.mark.slow
def test_chinese_texts_and_hostile_ones_in_a_browser(port, browser) -> None:
    for environment in (CHINESE, HOSTILE):
        browser.get(f"http://127.0.0.1:{port}/?text={quote(environment.question)}")
        follow(browser, "td.question a")
        assert browser.title == environment.id
        assert browser.find_element("tag name", "h1").text == environment.question
        check_questions(browser, environment)
    assert "solves sub-question 1 (string)" in run(browser, "echo")
    assert INJECTION in browser.find_element("css selector", "#tool-echo pre.value").text.replace('\\"', '"')
    assert browser.find_elements("css selector", "body script, body img") == []
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_browser_shows_the_token_as_a_password(dataset, tmp_path, browser) -> None:
    (tmp_path / "token").write_text("sesame")
    with serving(dataset, f"--key_file={tmp_path / 'token'}") as port:
        browser.get(f"http://me:sesame@127.0.0.1:{port}/environment/norway")
        assert "solves sub-question 1 (string)" in run(browser, "capital_of_country")
        assert browser.get_log("browser") == []


def run(browser, tool: str, arguments: str | None = None) -> str:
    """Press Run, and wait for what appears under it."""
    form = browser.find_element("css selector", f"#tool-{tool} form")
    if arguments is not None:
        field = form.find_element("tag name", "textarea")
        field.clear()
        field.send_keys(arguments)
    form.find_element("css selector", "button.run").click()
    until(lambda: form.find_element("css selector", "button.run").is_enabled())
    return form.find_element("css selector", ".result").text


def check_questions(browser, environment: ToolEnvironment) -> None:
    """All sub-questions by hop, each with what it waits for; and the page is not too wide."""
    hops = sorted({sub.hop for sub in environment.sub_questions})
    headings = [one.text for one in browser.find_elements("css selector", "h3")]
    assert headings[: len(hops)] == [f"Hop {hop}" for hop in hops]
    shown = browser.find_elements("css selector", ".questions li")
    expected = sorted(environment.sub_questions, key=lambda sub: sub.hop)
    assert [int(one.get_attribute("data-sub-question")) for one in shown] == [sub.id for sub in expected]
    for one, sub in zip(shown, expected, strict=True):
        assert one.text.startswith(sub.question)
        assert (f"after {', '.join(map(str, sub.depends_on))}" in one.text) == bool(sub.depends_on)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
