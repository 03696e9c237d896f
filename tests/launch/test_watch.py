"""`astra watch`: what it says of runs that are finished, run, or were killed; its page in a browser; its terminal."""

from __future__ import annotations

import codecs
import http.client
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages_world import grpo_workdir
from viewing import ROOT, stored_runs, until

from astra_jax.base.errors import InputError
from astra_jax.base.terminal import fitting
from astra_jax.run.metrics import MetricWriter
from launch.viewer.outcome import outcome_of
from launch.viewer.watch_terminal import sparks
from launch.viewer.watched import Watcher, lasted

RUN = """
import asyncio, json, sys
from pathlib import Path
from astra_jax.grpo.journal import FOLDER, Journals
from astra_jax.rollout.episode import Episode
from astra_jax.run.metrics import MetricWriter
from synthesis.core.journal import Journal
from synthesis.core.workdir import locked

async def batch(workdir):
    journal = Journals(workdir / FOLDER, "r", "i").open(3, "w")
    episode = Episode("e", [1, 2], 1, [0, 1], [0.0, -0.25], [0, 2], [], None, 1, "masked", [])
    for number in range(2):
        await journal.keep_episode(8, number, episode)

workdir = Path(sys.argv[1])
with locked(workdir):
    (workdir / "run.json").write_text(json.dumps({"config": {"grpo": {"steps": 5}}}))
    with MetricWriter(workdir / "metrics") as writer:
        for step in (1, 2):
            writer.write(step, {"train/loss": 1 / step, "rollout/reward": 0.25 * step})
        BATCH
        with Journal(workdir / "journal.sqlite") as journal:
            journal.add("verify/0123456789abcdef", "a", b"[]")
            journal.add("verify/0123456789abcdef", "b", None, "too_short", "2 < 3")
            journal.commit()
            print("ready", flush=True)
            sys.stdin.read()
"""
"""What a run writes, by what writes it; it stays until it is killed."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workdirs of real runs of the version before."""
    return stored_runs(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    workdir = tmp_path / "run"
    script = RUN.replace("BATCH", "asyncio.run(batch(workdir))")
    command = [sys.executable, "-c", script, str(workdir)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process, workdir
    process.kill()
    process.communicate()


def watch(workdir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.watch", str(workdir), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_run_goes_on_and_is_killed(running) -> None:
    process, workdir = running
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    watcher = Watcher(workdir)
    seen = watcher.look()
    assert seen.state == "running" and seen.holder.startswith(f"process {process.pid} of ")
    (training,) = seen.trainings
    assert (training.kind, training.step, training.total) == ("GRPO", 2, 5)
    assert training.curves() == {
        "Loss": {"train/loss": [(1.0, 1.0), (2.0, 0.5)]},
        "Rollouts": {"rollout/reward": [(1.0, 0.25), (2.0, 0.5)]},
    }
    assert training.batch and (training.batch.update, training.batch.episodes) == (3, 2)
    assert outcome_of(seen).headline.startswith(
        "Running: GRPO samples the batch of step 3 of 5: 2 episodes are finished. Results so far: "
    )
    (stage,) = seen.stages
    assert (stage.name, stage.passed, stage.rejected, stage.example) == ("verify", 1, {"too_short": 1}, "2 < 3")
    process.kill()
    process.wait()
    seen = watcher.look()
    assert seen.state == "killed"
    assert outcome_of(seen).headline.startswith("Killed after step 2 of 5: the process ended without a message")
    assert seen.stages == [stage] and seen.unread == []
    # It has written nothing; what SQLite keeps beside a file that is open is the run's own.
    after = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    assert {path: when for path, when in after.items() if not path.name.endswith("-shm")} == {
        path: when for path, when in before.items() if not path.name.endswith("-shm")
    }


@pytest.mark.parametrize("updates", [0, 2])
def test_an_exhausted_run_is_not_finished(tmp_path: Path, updates: int) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": {"grpo": {"steps": updates + 1}}}))
    with MetricWriter(tmp_path / "metrics") as writer:
        for step in range(1, updates + 1):
            writer.write(step, {"train/loss": 1 / step, "rollout/reward": 0.25})
        rewards = {"exhausted/reward_mean": 0.125, "exhausted/reward_min": 0, "exhausted/reward_max": 0.5}
        writer.write(updates, {"exhausted/groups_sampled": 32, **rewards, "train/skipped_steps": 0})
    pages = [f"exhausted_{updates:05}.html", *(f"update_{step:05}.html" for step in range(updates, 0, -1))]
    (tmp_path / "episodes").mkdir()
    for page in pages:
        (tmp_path / "episodes" / page).write_text("<html></html>")
    seen = Watcher(tmp_path).look()
    (training,) = seen.trainings
    assert (seen.state, training.kind, training.step, len(training.rows)) == ("exhausted", "GRPO", updates, updates)
    outcome = outcome_of(seen)
    assert outcome.headline.startswith(
        f"Exhausted after step {updates} of" if updates else "Exhausted before the first"
    )
    (why,) = outcome.why
    assert f"32 groups were sampled after step {updates}" in why and "mean 0.125, min 0, max 0.5" in why
    assert [page.name for page in training.episodes] == pages
    with MetricWriter(tmp_path / "metrics") as writer:  # the same command resumes
        writer.truncate(updates)
        assert Watcher(tmp_path).look().state == "stopped"


def test_stored_runs_of_each_kind_are_finished(stored: Path) -> None:
    seen = Watcher(stored / "sft" / "run").look()
    assert seen.state == "finished" and seen.trainings[0].kind == "SFT"
    assert outcome_of(seen).headline.startswith("Finished after step 6 of 6: ")
    assert seen.trainings[0].step == seen.trainings[0].total == 6
    seen = Watcher(stored / "trajectories").look()
    assert seen.state == "finished" and seen.datasets["trajectories"] == 4
    assert outcome_of(seen).headline == "Finished: 4 of 4 trajectories stored."
    order = ["collect", "propose", "verify", "tasks", "augment", "score", "interact", "judge"]
    assert [one.name for one in seen.stages] == order and seen.stages[6].passed == 5
    assert next(one for one in seen.stages if one.name == "verify").rejected == {"chain_failed_vote": 1}
    seen = Watcher(stored / "environments").look()
    assert seen.state == "finished" and seen.datasets == {"held_out": 1, "train": 1}


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(stored: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(stored / "sft" / "run", workdir)
    watcher = Watcher(workdir)
    with open(workdir / "metrics" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss"')  # being written
    assert watcher.look().trainings[0].step == 6 and watcher.look().unread == []
    with open(workdir / "metrics" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("\n{}\n")
    (workdir / "journal.sqlite").write_bytes(b"no database, but as long as one" * 100)
    seen = watcher.look()
    assert seen.trainings[0].step == 6 and len(seen.unread) == 2
    assert "metrics.jsonl, line 7 is not JSON" in seen.unread[0] and "file is not a database" in seen.unread[1]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    assert Watcher(tmp_path).look().state == "empty"
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="has no files of a run; give the --workdir of sft"):
        Watcher(tmp_path)
    for arguments, message in (
        ((str(tmp_path / "none"),), "none is not a folder"),
        (
            ("https://bucket/run",),
            "https://bucket/run is neither a folder nor gs://BUCKET/FOLDER nor s3://BUCKET/FOLDER",
        ),
    ):
        ended = watch(Path(arguments[0]) if "://" not in arguments[0] else arguments[0])  # type: ignore[arg-type]
        assert ended.returncode == 2 and message in ended.stderr and ended.stderr.count("\n") == 1


def test_without_a_terminal_it_is_said_once(tmp_path: Path) -> None:
    ended = watch(grpo_workdir(tmp_path / "run"), "--terminal")
    assert ended.returncode == 0 and ended.stderr == ""
    assert "GRPO: step 40 of 140" in ended.stdout and "gpu-2.cluster.example.com:8000: serving 0" in ended.stdout
    # A sample is a stranger's text.
    assert "\x1b" not in ended.stdout and "\\x1b[2J" in ended.stdout


def test_in_a_terminal_it_is_drawn_over(tmp_path: Path) -> None:
    workdir = grpo_workdir(tmp_path / "run")
    command = [sys.executable, "-m", "launch.watch", str(workdir), "--terminal", "--refresh_seconds=0.2"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ.update({"COLUMNS": "80", "LINES": "40", "PYTHONPATH": str(ROOT)})
        os.execv(sys.executable, command)
    decoder = codecs.getincrementaldecoder("utf-8")()
    shown = _until(terminal, decoder, lambda text: text.count("\x1b[H") > 1)
    with open(workdir / "metrics" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": 0.5}\n')
    shown += _until(terminal, decoder, lambda text: "step 41 of 140" in text)
    os.kill(child, signal.SIGINT)
    shown += _until(terminal, decoder, lambda text: False)  # to its end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shown.startswith("\x1b[?1049h") and "Traceback" not in shown
    last = shown.rpartition("\x1b[?1049l")[2]
    assert "GRPO: step 41 of 140" in last  # which stays
    page = re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", shown.partition("\x1b[H")[2].partition("\x1b[H")[0])
    assert len(page.splitlines()) <= 40 and not [one for one in page.splitlines() if len(one) > 80]
    assert "\x1b[2J" not in shown


def _until(terminal: int, decoder: codecs.IncrementalDecoder, enough) -> str:
    """Read until there is enough. The decoder keeps the bytes of a character of which one read has only a part."""
    shown, deadline = "", time.monotonic() + 60
    while not enough(shown) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                read = os.read(terminal, 65_536)
            except OSError:  # its other end is closed
                break
            shown += decoder.decode(read)
    return shown


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[Path, str, subprocess.Popen[str]]]:
    """A workdir, the address of its page, and the program that shows it."""
    workdir = grpo_workdir(tmp_path / "run")
    command = [sys.executable, "-m", "launch.watch", str(workdir), "--port=0", "--refresh_seconds=0.2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield workdir, process.stdout.readline().partition(" on ")[2].strip(), process
    finally:
        process.kill()
        process.communicate()


def test_the_page_follows_the_run(page, browser) -> None:
    workdir, address, process = page
    browser.get(address)
    assert browser.title == "stopped: run"
    # In one go each: the page may be replaced between two.
    browser.execute_script("document.querySelector('details').open = true")
    with open(workdir / "metrics" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": 0.5}\n')
    until(lambda: browser.execute_script("return document.querySelector('.tiles b').innerText") == "41 of 140")
    opened = browser.execute_script("return document.querySelector('details[open] pre').innerText")
    assert "<b>It is Oslo.</b>" in opened and browser.get_log("browser") == []
    browser.get(f"{address}episodes//update_00040.html")
    assert browser.find_element("tag name", "h1").text == "GRPO, update 7" and browser.get_log("browser") == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_page_gives_nothing_but_the_run_and_to_nobody_else(page) -> None:
    _, address, _ = page
    for path, headers, status in (
        ("/", {}, 200),
        ("/episodes//update_00040.html", {}, 200),
        ("/episodes//update_00041.html", {}, 404),
        ("/episodes/../run.json", {}, 404),
        ("/report.html", {}, 404),
        ("/?x=time&smoothing=0.9", {}, 200),
        ("/?x=colour", {}, 400),
        ("/episodes/..%2F..%2Fetc/passwd", {}, 404),
        ("/", {"Host": "evil.example"}, 403),
        ("/", {"Origin": "http://evil.example"}, 403),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", int(address.rpartition(":")[2].strip("/")), timeout=30)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert answer.status == status, path
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        connection.close()


def test_words_and_blocks() -> None:
    assert [lasted(one) for one in (3, 600, 12_000, 9e5)] == ["3 s", "10 min", "3 h 20 min", "10 days"]
    assert sparks([0, 1, 2, 3, 4, 5, 6, 7]).strip() == "▁▂▃▄▅▆▇█" and len(sparks(range(1000))) == 40
    assert sparks([2.0]).strip() == "▅"
    assert (fitting("挪威的首都", 6), fitting("Oslo", 4), fitting("Oslo!", 4)) == ("挪威…", "Oslo", "Osl…")
    assert fitting("a\x1b[2J\nb", 40) == "a\\x1b[2J\\nb"
