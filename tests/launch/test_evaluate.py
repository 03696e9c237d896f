"""`astra evaluate` as it is run: a process, an endpoint over HTTP, our own environments in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
from pathlib import Path

import msgspec
import pytest
from evaluation_world import Request, Say, Scripted
from programs_world import ended
from rollout_world import make_environment

from astra_jax.evaluation.saved import load_evaluation
from launch.viewer.conversation import turns_of
from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment

ROOT = Path(__file__).parent.parent.parent


async def started(workdir: Path, url: str, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "launch.evaluate", f"--workdir={workdir}", f"--model_url={url}", *arguments]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe, start_new_session=True)


async def evaluate(workdir: Path, url: str, *arguments: str) -> tuple[int, str, str]:
    flags = (f"--workdir={workdir}", f"--model_url={url}", *arguments)
    done = await asyncio.to_thread(ended, "launch.evaluate", *flags)
    return done.code, done.out, done.errors


@pytest.fixture(scope="module")
def environments(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "held_out"
    made = [make_environment(country.lower(), country) for country in ("France", "Japan")]
    records = [msgspec.structs.replace(one, split="held_out") for one in made]
    write_dataset(folder, ToolEnvironment, records, card={})
    return folder


def plays(body: Request) -> Say:
    """Solves France, and half of Japan."""
    country = "France" if "France" in body["messages"][0]["content"] else "Japan"
    heard = [json.loads(one["content"]) for one in body["messages"] if one["role"] == "tool"]
    if not heard:
        return Say(calls=[("capital_of", {"country": country})])
    if len(heard) == 1 and country == "France":
        return Say(calls=[("population_of", {"city": heard[0]["capital_of"]})])
    return Say("That is all.")


def finished(workdir: Path) -> int:
    """Items in the journal."""
    files = list(workdir.glob("journals/*.sqlite"))
    with contextlib.suppress(sqlite3.OperationalError), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(contextlib.closing(sqlite3.connect(file))) for file in files]
        return sum(db.execute("SELECT count(*) FROM done").fetchone()[0] for db in opened)
    return 0


async def test_a_run_that_was_killed_and_one_that_failed_go_on_and_end_with_the_table(environments, tmp_path) -> None:
    status = 503

    def script(body: Request) -> Say:
        # 503 is asked again for minutes; 422 is a refusal, and not for the length.
        down = status != 200 and "Japan" in body["messages"][0]["content"]
        return Say("out of order", status=status) if down else plays(body)

    server = Scripted(script)
    arguments = ("--suites=environments", f"--sources=environments={environments}", "--trials=2", "--label=mine")
    async with server as served:
        process = await started(tmp_path, served.url, *arguments)
        while finished(tmp_path) < 2:
            assert process.returncode is None
            await asyncio.sleep(0.05)
        process.kill()
        await process.communicate()
        assert not (tmp_path / "results").exists()
        status, asked = 422, len(server.requests)
        code, output, errors = await evaluate(tmp_path, served.url, *arguments)
        asked_again = server.requests[asked:]
        assert not any("France" in body["messages"][0]["content"] for body in asked_again)
        assert code == 2 and "run the same command again" in errors, errors
        assert "environments: 2 items, such as" in errors
        assert not output and not (tmp_path / "results").exists() and not (tmp_path / "table.md").exists()
        status, asked = 200, len(server.requests)
        code, output, errors = await evaluate(tmp_path, served.url, *arguments)
        assert code == 0, errors
        # The probe, and two requests for each of Japan's trials: France's were finished.
        assert len(server.requests) - asked == 1 + 2 * 2
    assert "mine" in output and "83.3" in output  # F1 is 1 and, of one call that solves half, 2/3
    assert output.strip() == (tmp_path / "table.md").read_text(encoding="utf-8").strip()
    assert "83.3" in (tmp_path / "table.html").read_text(encoding="utf-8")
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert table["table"]["model"] == "mine" and not table["table"]["partial"]
    evaluation = load_evaluation(tmp_path)
    assert [(one.item, one.trial, round(one.score, 3)) for one in evaluation.results] == [
        *(("france", trial, 1.0) for trial in range(2)),
        *(("japan", trial, 0.667) for trial in range(2)),
    ]
    # And its conversations can be read.
    calls = [one for turn in turns_of(evaluation.results[0].messages) for one in turn.calls]
    assert [one.arguments for one in calls] == ['{"country": "France"}', '{"city": "Paris"}']
    assert calls[0].result is not None and "Paris" in calls[0].result.text


SHELVES = """
class Shelf:
    def __init__(self, room, books, kind="count"):
        self.room, self.books, self.kind = room, books, kind
        self.question, self.answer, self.id = f"How many books are in the {room}?", books, room

    def books_in(self, room: str) -> int:
        \"\"\"Number of books in a room.\"\"\"
        return self.books if room == self.room else 0

    def score(self, episode) -> float:
        if self.room == "attic":
            raise LookupError("nobody has counted")
        return (str(self.books) in episode.answer) * 0.5 ** (len(episode.calls) > 1)


shelves = [Shelf("kitchen", 3), Shelf("hall", 12), Shelf("cellar", 1400, kind="large numbers")]
attic = Shelf("attic", 1)
"""


def reads(body: Request) -> Say:
    """Looks once, in the hall twice; thinks before its answer."""
    room = body["messages"][0]["content"].split()[-1].rstrip("?")
    heard = [one["content"] for one in body["messages"] if one["role"] == "tool"]
    if len(heard) < 1 + (room == "hall"):
        return Say(calls=[("books_in", {"room": room})])
    return Say(f"<think>It may be 12 or 3.</think>There are {heard[-1]}.")


async def test_environments_of_ones_own_are_a_suite(tmp_path) -> None:
    (tmp_path / "shelves.py").write_text(SHELVES)
    suite = f"own:{tmp_path / 'shelves.py'}:shelves"
    async with Scripted(reads) as served:
        code, output, errors = await evaluate(tmp_path / "a", served.url, f"--suites={suite}", "--trials=2")
        assert code == 0, errors
        more = ("--trials=2", "--reward=answer:0.5,score:0.5")
        code, _, errors = await evaluate(tmp_path / "b", served.url, f"--suites={suite}", *more)
        assert code == 0, errors
        attic = f"own:{tmp_path / 'shelves.py'}:attic"
        code, _, errors = await evaluate(tmp_path / "attic", served.url, f"--suites={attic}", "--trials=1")
        assert code == 2 and "reward score raised LookupError: nobody has counted" in errors
        assert not (tmp_path / "attic" / "results").exists()
    assert suite in output and "large numbers" in output
    evaluation = load_evaluation(tmp_path / "a")
    assert {(one.category, one.item, one.score) for one in evaluation.results} == {
        ("count", "kitchen", 1.0), ("count", "hall", 0.5), ("large_numbers", "cellar", 1.0)
    }  # fmt: skip
    assert all(one.metrics["answer"] == 1 and one.metrics["score"] == one.score for one in evaluation.results)
    assert {one.score for one in load_evaluation(tmp_path / "b").results} == {1.0, 0.75}
    beside = [f"--run={name}={tmp_path / folder}" for name, folder in (("one", "a"), ("other", "a"))]
    compared = await asyncio.to_thread(ended, "launch.compare", *beside)
    assert compared.code == 0 and "large numbers" in compared.out, compared.errors
    beside[1] = f"--run=other={tmp_path / 'b'}"
    refused = await asyncio.to_thread(ended, "launch.compare", *beside)
    assert refused.code == 2 and "reward answer:0.5,score:0.5" in refused.errors, "it was measured otherwise"


async def test_ctrl_c_at_a_terminal_is_one_line(environments, tmp_path) -> None:
    """Which reaches the sandbox's processes too. What was finished is kept."""
    arguments = ("--suites=environments", f"--sources=environments={environments}")

    def script(body: Request) -> Say:
        return Say("busy", status=503) if "Japan" in body["messages"][0]["content"] else plays(body)

    async with Scripted(script) as served:
        process = await started(tmp_path, served.url, *arguments)
        while not finished(tmp_path):
            assert process.returncode is None
            await asyncio.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = await asyncio.wait_for(process.communicate(), 120)
    last = errors.decode().splitlines()[-1]
    assert last == "interrupted; run the same command again: finished items are not run again"
    assert process.returncode == 130 and not output and b"Traceback" not in errors
    assert finished(tmp_path) and not (tmp_path / "results").exists()


async def test_what_is_wrong_is_said_before_anything_runs(environments, tmp_path) -> None:
    source = f"--sources=environments={environments}"
    (tmp_path / "shelves.py").write_text(SHELVES)
    own = f"--suites=own:{tmp_path / 'shelves.py'}:shelves"
    async with Scripted(plays) as served:
        url = served.url
        wrong = [
            (url, ["--suites=environments", "--model=another", source], "--model=another is not served by"),
            (url, ["--suites=bfcl", source], "there is no suite 'bfcl'; the suites are"),
            (url, ["--suites=environments"], "the suite environments has no data; give the folder"),
            (url, ["--suites=environments", "--sources=environments=/nowhere"], "a folder that is there"),
            (url, ["--suites=aime,aime"], "names aime twice"),
            (url, ["--extra_body={"], "--extra_body={ is not JSON"),
            (url, ['--extra_body={"min_p": NaN}'], "is not JSON (NaN is not JSON)"),
            (url, ["--extra_body={\"seed\": 1}", source, "--suites=environments"], "extra has seed"),
            (url, ["--user_model=m"], "--user_model needs the endpoint --user_url; give it too"),
            (url, ["--judge_key_file=FILE"], "needs the endpoint --judge_url; give it too"),
            (url, ["--suites=aime", source], "no suite in --suites=aime needs it; they need aime"),
            (url, [source], "no suite in --suites=bfcl_v3_mt needs it; they need none"),
            (url, ["--suites=environments", f"{source},environments=/"], "names environments twice"),
            (url, ["--sandbox_tier=B"], "--sandbox_tier is for tools of the suite environments, which is not in"),
            (url, ["--suites=my:shelves"], "--suites=my:shelves: write own:my_module:my_name"),
            (url, ["--suites=own:no_such:shelves"], "no_such:shelves: no_such cannot be imported"),
            (url, [f"--suites=own:{environments}"], "is a dataset; use --suites=environments --sources=environments="),
            (url, ["--reward=score"], "--reward is for environments, and --suites=bfcl_v3_mt names none"),
            (url, [own, "--environments_count=3"], "--environments_count is for verifiers:ID"),
            ("localhost", [], "--model_url=localhost: write http://HOST:PORT/v1"),
            (url, ["--weights=runs/grpo"], "--weights=runs/grpo and --model_url=http://127.0.0.1:"),
            (url, ["--slots=3"], "--slots is for a model that is served here; give --weights too"),
            ("", ["--weights=x", "--model=m"], "--model is for --model_url; leave it out with --weights"),
            ("", [], "--weights or --model_url is missing: give --weights=FOLDER of a checkpoint"),
        ]  # fmt: skip
        found = [await evaluate(tmp_path / str(i), at, *more) for i, (at, more, _) in enumerate(wrong)]
    found.append(await evaluate(tmp_path / "down", url, "--suites=environments", source))
    wrong.append((url, [], "cannot be reached"))
    for (code, output, errors), (_, more, message) in zip(found, wrong, strict=True):
        assert code == 2 and message in errors and "Traceback" not in errors and not output, (more, errors)
