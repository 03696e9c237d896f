"""The main job, reduced (`--profile=ci`): what it writes, killed and resumed, and what it says about bad input.

Its runs are compiled as users have them, unlike all else that tests compile (`tests/conftest.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from notebooks_world import run_notebook
from printed_commands import printed, started
from programs_world import Programs, as_users, ended, programs
from scripted_mcp import write_server

from astra_jax.cpu.environment import cpu_environment
from launch.quickstart.ledger import Ledger, read_json
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.matching import fold
from synthesis.core.records import StdioExecution, ToolEnvironment, ToolServer, Trajectory

ROOT = Path(__file__).parent.parent.parent
STAGES = (
    "trajectories",
    "environments",
    "tokenizer",
    "evaluate_untrained",
    "sft_dialogue",
    "sft_tools",
    "evaluate_sft",
    "grpo",
    "evaluate_grpo",
)


def command(workdir: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "launch.quickstart", f"--workdir={workdir}", "--profile=ci", *more]


def run(workdir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workdir, *more), cwd=ROOT, capture_output=True, text=True, timeout=900, env=as_users()
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Programs]:
    """Starts, where how the program begins is not what is tested."""
    with programs("launch.quickstart", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("quickstart") / "run"
    result = run(workdir)
    assert result.returncode == 0, result.stderr[-3000:]
    assert str(workdir / "summary.json") in result.stdout and "held-out" in result.stdout
    return workdir


@pytest.fixture(scope="module")
def summary(finished):
    return read_json(finished / "summary.json")


# ---------------------------------------------------------------------------------------------------------------------
# What it writes


@pytest.mark.slow
def test_the_summary_has_every_figure(summary) -> None:
    assert list(summary["held_out"]) == ["grpo", "sft", "untrained"]
    for figures in summary["held_out"].values():
        assert figures["episodes"] == summary["environments"]["held_out"] > 0
        assert all(0 <= figures[name] <= 1 for name in ("f1", "recall", "precision", "answer_accuracy"))
    assert set(summary["digests"]) >= {"servers", "chains", "tasks", "trajectories", "train", "held_out", "tokenizer"}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in summary["digests"].values())
    assert set(summary["stages"]) == set(STAGES)
    assert summary["seconds"] > 0 and 0 < summary["peak_rss_bytes"] < 8 * 2**30


@pytest.mark.slow
def test_the_tools_come_from_enough_servers(finished, summary) -> None:
    servers = read_dataset(finished / "trajectories" / "servers", ToolServer)
    assert len(servers) == summary["servers"] >= 12 and summary["tools"] >= 60
    started = {server.execution.command[0] for server in servers if isinstance(server.execution, StdioExecution)}
    assert len(started) == summary["mcp_servers"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft/tools", "grpo"])
def test_a_trained_stage_is_a_complete_model(finished, stage: str) -> None:
    folder = finished / stage / "checkpoints"
    card = (folder / "README.md").read_text(encoding="utf-8")
    read = "trajectories/trajectories" if stage.startswith("sft") else "environments/train"
    assert read_card(finished / read)["digest"] in card
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert wanted <= {file.name for file in folder.iterdir()}


@pytest.mark.slow
def test_held_out_is_unseen(finished) -> None:
    """Neither an entity nor a question structure of a held-out environment occurs in what was trained on."""
    train = read_dataset(finished / "environments" / "train", ToolEnvironment)
    held_out = read_dataset(finished / "environments" / "held_out", ToolEnvironment)
    unseen = {fold(entity) for environment in held_out for entity in environment.entities}
    assert train and held_out
    assert not unseen & {fold(entity) for environment in train for entity in environment.entities}
    assert not {e.signature for e in train} & {e.signature for e in held_out}
    trajectories = read_dataset(finished / "trajectories" / "trajectories", Trajectory)
    calls = [call for one in trajectories for message in one.messages for call in message.tool_calls]
    asked = {fold(value) for call in calls for value in call.arguments.values() if isinstance(value, str)}
    assert asked and not unseen & asked


@pytest.mark.slow
def test_the_audit_finds_no_fault_in_the_data(finished, tmp_path) -> None:
    # Nine look-ups make similar questions.
    done = ended(
        "launch.audit", str(finished), "--fail_on=near_duplicate=0.2", f"--page={tmp_path / 'audit.html'}",
        f"--figures={tmp_path / 'audit.json'}",
    )  # fmt: skip
    assert done.code == 0, done.out
    checked = {one["name"]: one["checked"] for one in read_json(tmp_path / "audit.json")["rules"]}
    assert checked["call_not_reproduced"] > 48 and checked["leaked_call"] > 0


def test_trajectories_have_injected_failures(finished, summary) -> None:
    trajectories = read_dataset(finished / "trajectories" / "trajectories", Trajectory)
    assert len(trajectories) == summary["trajectories"] > 50
    runs = read_json(finished / "stages" / "trajectories.json")["statistics"]["all_runs"]
    assert 0.1 < runs["injected_failure_rate"] < 0.3


class _Page(HTMLParser):
    """What a page loads from elsewhere, and the tags it leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag, attrs) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.loaded += [
            value for name, value in attrs if name in ("src", "href") and not value.startswith(("#", "data:"))
        ]
        if tag not in ("meta", "br", "link", "img", "hr", "input", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


@pytest.mark.slow
def test_the_report_is_one_self_contained_page(finished, summary) -> None:
    html = (finished / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(html)
    assert page.open == [] and page.loaded == [] and page.seen["script"] == 1  # which sorts its tables
    assert page.seen["svg"] >= 1 and page.seen["details"] >= 4 and page.seen["table"] >= 2
    for figures in summary["held_out"].values():
        assert f"{figures['f1']:.3f}" in html and f"{figures['answer_accuracy']:.3f}" in html


@pytest.mark.slow
def test_the_report_in_a_browser(finished, summary, browser) -> None:
    """It renders: figures have a size, nothing runs out of the window, a trajectory and an environment unfold."""
    browser.get((finished / "report.html").as_uri())
    assert browser.get_log("browser") == []
    text = browser.find_element("tag name", "body").text
    assert all(f"{figures['f1']:.3f}" in text for figures in summary["held_out"].values())
    pictures = browser.find_elements("tag name", "svg")
    assert len(pictures) >= 1 and all(min(one.size["width"], one.size["height"]) >= 20 for one in pictures)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    for title, inside in (("A trajectory", "ol.conversation li"), ("An environment", "table")):
        details = browser.find_element("xpath", f"//h2[.='{title}']/following-sibling::details[1]")
        hidden = details.find_element("css selector", inside)
        assert not hidden.is_displayed()
        details.find_element("tag name", "summary").click()
        assert hidden.is_displayed() and hidden.text


# ---------------------------------------------------------------------------------------------------------------------
# Killed and resumed


@pytest.fixture
def service(tmp_path) -> Iterator[list[str]]:
    """A sandbox service in a process of its own; the flags to use it."""
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.sandbox_server", "--port=0", f"--key_file={token}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(",")
    yield [f"--sandbox_url={url}", f"--sandbox_key_file={token}"]
    process.terminate()
    assert process.wait(30) == 0
    process.stdout.close()


AS_USERS = {"XLA_FLAGS": cpu_environment({}).get("XLA_FLAGS", "")}
"""So that the program's later starts, which are forked, find what its first start has compiled."""


def kill_in(start: Programs, stage: str, workdir: Path, seconds: float, after: str, *more: str) -> None:
    """Start the run, and end it with SIGKILL some time after it has begun a stage and written what `after` matches.

    A fast machine is done with a stage in four seconds, a slow one has not begun its first step.
    """
    process = start.begin(f"--workdir={workdir}", "--profile=ci", *more, **AS_USERS)
    while f"] {stage}\n" not in process.errors() or not list(workdir.glob(after)):
        assert process.poll() is None, process.errors()[-3000:]
        time.sleep(0.02)
    time.sleep(seconds)
    assert process.poll() is None, "so the kill falls into the stage"
    process.kill()


KILLS = {
    "trajectories": (0.5, "journals/trajectories.sqlite"),
    "environments": (0.5, "journals/environments.sqlite"),
    "evaluate_untrained": (0.0, "stages/tokenizer.json"),
    "sft_tools": (0.0, "sft/tools/checkpoints/states/5"),
    "grpo": (0.0, "grpo/checkpoints/config.json"),
}
"""Stages in which a run is killed: so many seconds after it has written this."""


def kill_in_each(start: Programs, stages: Iterable[str], workdir: Path, *more: str) -> None:
    """Kill the run in each stage. No start repeats a stage that an earlier one finished."""
    finished_stages: dict[str, int] = {}
    for stage in stages:
        seconds, after = KILLS[stage]
        kill_in(start, stage, workdir, seconds, after, *more)
        files = list((workdir / "stages").glob("*.json"))
        assert {file.stem for file in files} == set(STAGES[: STAGES.index(stage)])
        assert not (workdir / "summary.json").exists()
        for file in files:
            assert finished_stages.setdefault(file.stem, file.stat().st_mtime_ns) == file.stat().st_mtime_ns


@pytest.mark.slow
def test_a_killed_synthesis_resumes_elsewhere_and_writes_the_same_datasets(start, finished, service, tmp_path) -> None:
    """The run it is compared with had the sandbox in its own process; this one has it behind HTTP."""
    workdir = tmp_path / "run"
    kill_in_each(start, ("trajectories", "environments", "evaluate_untrained"), workdir, *service)
    for stage in ("trajectories", "environments"):
        ours, theirs = (read_json(run / "stages" / f"{stage}.json") for run in (workdir, finished))
        assert ours["digests"] == theirs["digests"] and len(ours["digests"]) > 1


@pytest.mark.nightly
def test_a_run_that_was_killed_in_four_stages_resumes_elsewhere_and_ends_the_same(
    start, finished, summary, service, tmp_path
) -> None:
    workdir = tmp_path / "run"
    kill_in_each(start, ("trajectories", "environments", "sft_tools", "grpo"), workdir, *service)
    ended = start(f"--workdir={workdir}", "--profile=ci", *service, **AS_USERS)
    assert ended.code == 0, ended.errors[-3000:]
    assert ended.errors.count("finished earlier") == STAGES.index("grpo")
    resumed = read_json(workdir / "summary.json")
    assert resumed["digests"] == summary["digests"]
    assert resumed["held_out"]["untrained"] == summary["held_out"]["untrained"]
    assert resumed["training"]["sft_tools"] == summary["training"]["sft_tools"]


@pytest.mark.slow
def test_a_finished_run_only_writes_its_report_again(finished, summary, start) -> None:
    ended = start(f"--workdir={finished}", "--profile=ci")
    assert ended.code == 0 and ended.errors.count("finished earlier") == len(STAGES)
    assert read_json(finished / "summary.json") == summary


@pytest.mark.slow
def test_the_notebook_of_the_quickstart(finished, summary, start) -> None:
    """As it is printed, but for the cell of parameters: this run."""
    shown, _ = run_notebook("quickstart", start, WORKDIR=str(finished), PROFILE="ci")
    assert f"untrained  F1 {summary['held_out']['untrained']['f1']:.2f}" in shown


@pytest.mark.nightly
def test_the_notebook_of_evaluation(finished, start, tmp_path) -> None:
    """As it is printed, but for the cell of parameters: two environments of this run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RUN": str(finished), "WORKDIR": str(tmp_path / "run"), "LIMIT": 2, "PORT": port}
    shown, names = run_notebook("evaluation", start, **given)
    assert len(names["both"]) == 2 and "GRPO changes F1 by" in shown and names["server"].poll() is not None
    assert "partial: 2 of" in (tmp_path / "run" / "table.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Its results, in the program for real sizes

GRPO_CONFIG = """
import dataclasses
from configs.quickstart import PROFILES
from configs.training import GRPORun

QUICKSTART = PROFILES["ci"]()
EPISODE = dataclasses.replace(QUICKSTART.grpo.episode, max_response_tokens=60)
GRPO = dataclasses.replace(QUICKSTART.grpo, steps=2, checkpoint_every=1, max_groups_per_step=2, concurrent_groups=2,
                           episode=EPISODE, row_buckets=(1_260,))
CONFIG = GRPORun(QUICKSTART.model, GRPO)
"""


@pytest.fixture
def grpo_flags(finished, tmp_path) -> list[str]:
    config = tmp_path / "config.py"
    config.write_text(GRPO_CONFIG)
    flags = {
        "config": config,
        "workdir": tmp_path / "run",
        "weights": finished / "sft" / "tools" / "checkpoints",
        "tokenizer": finished / "tokenizer",
        "environments": finished / "environments" / "train",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.mark.nightly
def test_grpo_starts_from_a_checkpoint(grpo_flags, start, tmp_path) -> None:
    """So short a run has seldom a group worth training on; that the loop learns is tested in `test_grpo.py`, that it
    goes on from its own checkpoints in `test_grpo_program.py`."""
    ended = start(*grpo_flags, module="launch.grpo")
    found = re.search(r"/run/checkpoints: \d steps, (finished|exhausted)", ended.out)
    assert found, ended.errors[-3000:]
    assert ended.code == (found[1] == "exhausted"), ended.errors[-3000:]
    assert read_json(tmp_path / "run" / "checkpoints" / "config.json")["model_type"] == "qwen3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.model.n_layers=7", "7 here"),
        ("--mesh=widht=2", "the axes are data, fsdp, expert, context, tensor"),
        ("--mesh=fsdp=3", "needs 3 devices, there are 1"),
        ("--rollout_url=http://127.0.0.1:9", "no rollout server answers at http://127.0.0.1:9"),
        ("--environments=/none", "/none"),
        ("--hosts=2", "--hosts is not enough: give all of --coordinator, --hosts and --host_index"),
    ],
)
def test_grpo_says_what_is_wrong_in_one_line(grpo_flags, start, flag: str, words: str) -> None:
    assert words in start(*grpo_flags, flag, module="launch.grpo").line


# ---------------------------------------------------------------------------------------------------------------------
# What pages print to be done with them

PRINTED = (
    ("docs/sft.md", "sft/tools", "astra convert --from_orbax=DIR/checkpoints --to_hf=MODEL"),
    ("docs/trajectories.md", "trajectories", "astra astra_sft --from=DIR/trajectories --to=sft.jsonl"),
    ("docs/trajectories.md", "trajectories", "astra astra_sft --from=sft.jsonl --to=DIR"),
    (
        "docs/index.md",
        "trajectories",
        "astra astra_sft --from=DIR/trajectories --to=train.parquet --form=trl",
    ),
    ("docs/environments.md", "environments", "astra astra_rl --from=DIR/train --to=rl.jsonl"),
    ("docs/environments.md", "environments", "astra astra_rl --from=rl.jsonl --to=DIR"),
)
"""By page, and which folder of the run its DIR/ is."""


@pytest.mark.slow
def test_commands_of_pages_run_as_they_are_printed(finished, start, tmp_path) -> None:
    """In order: what one writes, another reads. Only where files lie is put in."""
    for page, folder, command in PRINTED:
        assert command in printed(page)
        module, arguments = started(command) or ("", [])
        pairs = (argument.split("=") for argument in arguments)
        ended = start(
            *(
                f"{name}={value if name == '--form' else place(value, finished / folder, tmp_path)}"
                for name, value in pairs
            ),
            module=module,
        )
        assert ended.code == 0, f"{command}: {ended.errors[-3000:]}"
    given = read_dataset(finished / "trajectories" / "trajectories", Trajectory)
    assert len(read_dataset(tmp_path / "trajectories", Trajectory)) == len(given)
    assert read_dataset(tmp_path / "environments", ToolEnvironment)
    assert (tmp_path / "MODEL" / "config.json").exists() and (tmp_path / "train.parquet").stat().st_size > 0


def place(value: str, run: Path, new: Path) -> Path:
    """What a name in a command stands for: DIR/… a folder of the run, DIR a new one, all else beside it."""
    if value == "DIR":
        return new / run.name
    return run / value.removeprefix("DIR/") if value.startswith("DIR/") else new / value


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.fixture(scope="module")
def refused(start) -> Callable[..., str]:
    """The one line that a refused run ends with."""
    return lambda workdir, *more: start(f"--workdir={workdir}", "--profile=ci", *more).line


@pytest.mark.slow
def test_a_workdir_of_another_run_is_refused(finished, refused) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in finished.rglob("*")
        if path.is_file() and path.name not in ("lock", "ending.json")
    }
    line = refused(finished, "--seed=1")
    assert "config.seed is 0 there, 1 here" in line and str(finished) in line and "--workdir" in line
    assert "grpo.steps" in refused(finished, "--config.grpo.steps=9")
    record = read_json(finished / "run.json")
    try:
        (finished / "run.json").write_text(json.dumps(record | {"version": "0.0.1"}))
        line = refused(finished)
        assert "version" in line and "0.0.1" in line
    finally:
        (finished / "run.json").write_text(json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True))
        os.utime(finished / "run.json", ns=(before[finished / "run.json"],) * 2)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_sandbox_that_cannot_be_had_is_refused(refused, tmp_path) -> None:
    workdir = tmp_path / "run"
    assert "no sandbox service answers at http://127.0.0.1:9" in refused(workdir, "--sandbox_url=http://127.0.0.1:9")
    assert "--sandbox_key_file=/none is not a file" in refused(
        workdir, "--sandbox_url=http://127.0.0.1:9", "--sandbox_key_file=/none"
    )
    assert "give --sandbox_url too" in refused(workdir, "--sandbox_key_file=/none")


def test_a_folder_with_other_things_is_refused(refused, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "empty folder" in refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_that_was_killed_as_it_began_begins_again(tmp_path) -> None:
    (tmp_path / "run.json.partial").write_text("{")
    Ledger(tmp_path, {"seed": 1}).close()
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 1}


@pytest.mark.slow
def test_a_corrupt_record_is_refused(finished, refused, tmp_path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    for name in ("evaluate_grpo", "grpo"):
        (workdir / "stages" / f"{name}.json").unlink()
    (shard, *_) = sorted((workdir / "environments" / "train").glob("*.array_record*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 0xFF
    shard.write_bytes(data)
    line = refused(workdir)
    assert str(workdir / "environments" / "train") in line and "corrupt" in line
    left = {f"{stage}.json" for stage in STAGES[:-2]} | {"grpo.part"}
    assert {path.name for path in (workdir / "stages").iterdir()} == left


BARE = """
    for message, answer in requests():
        if message["method"] == "tools/list":
            answer["result"] = {"tools": [{"name": "bare_tool", "description": "Has no schema at all."}]}
        print(json.dumps({"result": {}} | answer), flush=True)
    """


def test_bad_servers_are_left_out_in_one_line_each(start, tmp_path) -> None:
    """One that is not installed; of another its only tool, which has no schema. The run goes on with the others."""
    bare = tmp_path / "bare.py"
    write_server(bare, BARE)
    sources = [
        {"id": name, "title": name, "description": name, "domain": "test", "language": "en", "execution": execution}
        for name, execution in (
            ("missing", {"type": "mcp_stdio", "command": ["no-such-mcp-server"]}),
            ("bare", {"type": "mcp_stdio", "command": [sys.executable, str(bare)]}),
        )
    ]
    workdir = tmp_path / "run"
    process = start.begin(
        f"--workdir={workdir}", "--profile=ci", f"--config.trajectories.sources={json.dumps(sources)}"
    )
    while "] environments" not in process.errors():
        assert process.poll() is None, process.errors()[-3000:]
        time.sleep(0.02)
    process.kill()
    lines = process.errors().splitlines()
    told = [line for line in lines if "left out server" in line]
    assert len(told) == 1 and "no-such-mcp-server" in told[0] and "install it" in told[0], lines
    assert any("left out 1 tools (not_declared_read_only), such as bare.bare_tool: " in line for line in lines), lines
    assert (workdir / "stages" / "trajectories.json").exists()
