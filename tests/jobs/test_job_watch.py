"""Job 10, see what went wrong: the reason of each bad run is within one screen of `astra watch`, outcome first."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow

SCREEN = 24
"""Lines of a small terminal."""
MODEL = Qwen3Config(
    vocab_size=320, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32, tie_embeddings=True,
    max_positions=1024,
)  # fmt: skip
WAREHOUSE = '''
class Warehouse:
    def __init__(self, item, pieces):
        self.item, self.pieces = item, pieces
        self.question = f"How many {item} are in the warehouse?"

    def stock_of(self, item: str) -> int:
        """How many pieces of an item are in the warehouse."""
        return self.pieces

    def score(self, episode) -> float:
        return float(episode.says(self.pieces))


warehouses = [Warehouse("bolts", 40), Warehouse("nuts", 7)]
'''
OWN_STAGE = """
from synthesis.core.stages import Rejected

async def only_haiku(record, context):
    raise Rejected("no_haiku", "it has 1 line")
"""


def screen_of(astra, workdir: Path) -> list[str]:
    """The first screen of `astra watch WORKDIR --terminal`, without the folder's name and empty lines."""
    shown = astra("watch", workdir, "--terminal", cwd=workdir.parent)
    assert shown.code == 0, shown.output[-2000:]
    name, *lines = shown.output.splitlines()[:SCREEN]
    assert name == str(workdir)
    return [line for line in lines if line]


class Junk(http.server.BaseHTTPRequestHandler):
    """A model endpoint whose model answers nothing that can be used."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "As a language model I cannot do that."}
        usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**whole, "choices": [choice], "usage": usage}).encode())

    def log_message(self, *_: object) -> None: ...


@contextmanager
def junk_endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Junk)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_synthesis_that_made_nothing_says_why(installed_astra, tmp_path: Path) -> None:
    asked = ["environments", "--teacher_model=m", "--judge_own_text", "--config.count=60"]
    nowhere = tmp_path / "nowhere"
    ended = installed_astra(*asked, f"--workdir={nowhere}", "--teacher_url=http://127.0.0.1:9/v1", cwd=tmp_path)
    assert ended.code not in (0, 1), ended.output[-2000:]
    outcome, *_ = screen_of(installed_astra, nowhere)
    assert outcome.startswith("Failed: ") and "http://127.0.0.1:9/v1" in outcome
    with junk_endpoint() as url:
        rejected = tmp_path / "rejected"
        ended = installed_astra(*asked, f"--workdir={rejected}", f"--teacher_url={url}", cwd=tmp_path)
        assert ended.code not in (0, 1), ended.output[-2000:]
    outcome, *_ = screen_of(installed_astra, rejected)
    assert outcome.startswith("Failed: ") and "none of 50 accepted" in outcome and "As a language model" in outcome
    (tmp_path / "mine.py").write_text(OWN_STAGE, encoding="utf-8")
    ended = installed_astra(
        *("environments", "--config.count=6", "--config.held_out_fraction=0", f"--workdir={tmp_path / 'strict'}"),
        '--config.own_stages={"validate": ["mine:only_haiku"]}',
        cwd=tmp_path,
    )
    assert ended.code == 4, ended.output[-2000:]
    outcome, why, *_ = screen_of(installed_astra, tmp_path / "strict")
    assert outcome.startswith("Fell short: ")
    assert why.startswith("- Stage validate+mine:only_haiku let 0 of 6 through: no haiku 6. For example it has 1 line")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert screen_of(installed_astra, empty)[0].startswith("Nothing is written here yet.")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, conversations and an environment."""
    folder = tmp_path_factory.mktemp("job")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} and {n}?"},
                {"role": "assistant", "content": f"{2 * n}"},
            ]
        }
        for n in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [message["content"] for row in rows for message in row["messages"]]
    ChatTokenizer.train([*texts, WAREHOUSE] * 4, MODEL.vocab_size, folder / "model")
    params = MODEL.init(jax.random.key(0))
    save_hf(params, MODEL, folder / "model")
    ChatTokenizer.train([*texts, WAREHOUSE] * 4, MODEL.vocab_size, folder / "wild")
    save_hf(jax.tree.map(lambda x: x * 1e20, params), MODEL, folder / "wild")
    (folder / "warehouse.py").write_text(WAREHOUSE, encoding="utf-8")
    return folder


def sft(folder: Path, workdir: Path, *more: str, weights: str = "model") -> list[str]:
    given = {"config": "sft:auto", "weights": folder / weights, "data": folder / "train.jsonl", "workdir": workdir}
    small = ["--config.sft.data.seq_len=256", "--config.sft.batch_size=2", "--config.sft.sample_every=0"]
    return ["sft", *(f"--{name}={value}" for name, value in given.items()), *small, *more]


@pytest.mark.nightly
def test_a_training_that_went_wrong_says_why(installed_astra, world: Path) -> None:
    broken = world / "broken"
    ended = installed_astra(*sft(world, broken, "--config.sft.steps=6", weights="wild"), cwd=world)
    assert ended.code == 2, ended.output[-2000:]
    outcome, *_ = screen_of(installed_astra, broken)
    assert outcome.startswith("Failed ") and "finite" in outcome and "Lower learning_rate" in outcome

    killed = world / "killed"
    command = [installed_astra.command, *sft(world, killed, "--config.sft.steps=100000")]
    environment = installed_astra.environment()
    process = subprocess.Popen(command, cwd=world, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rows = killed / "metrics" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (rows.exists() and rows.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-2000:]
        time.sleep(0.2)
    assert screen_of(installed_astra, killed)[0].startswith("Running: SFT works on step ")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    outcome, *rest = screen_of(installed_astra, killed)
    assert outcome.startswith("Killed after step ") and "The same command resumes it." in outcome
    assert any(line.startswith("training loss") for line in rest)


@pytest.mark.nightly
def test_a_run_whose_rewards_are_all_0_says_so_on_its_page(installed_astra, world: Path) -> None:
    workdir = world / "zero"
    given = {"config": "grpo:auto", "weights": world / "model", "environments": "warehouse.py:warehouses"}
    small = {"steps": 2, "batch_size": 1, "group_size": 2, "concurrent_groups": 2, "max_groups_per_step": 4}
    short = {"max_prompt_tokens": 768, "max_response_tokens": 32, "max_turn_tokens": 16, "reward": "score"}
    ended = installed_astra(
        *("grpo", f"--workdir={workdir}", *(f"--{name}={value}" for name, value in given.items())),
        *(f"--config.grpo.{name}={value}" for name, value in small.items()),
        *(f"--config.grpo.episode.{name}={value}" for name, value in short.items()),
        "--config.grpo.row_buckets=[1024]",
        cwd=world,
    )
    assert ended.code == 1, ended.output[-3000:]
    outcome, why, *_ = screen_of(installed_astra, workdir)
    assert outcome.startswith("Exhausted before the first step") and "episodes scored 0. Try easier" in why
    command = [installed_astra.command, "watch", str(workdir), "--port=0"]
    environment = installed_astra.environment()
    page = subprocess.Popen(command, cwd=world, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        address = page.stdout.readline().partition(" on ")[2].strip()
        text = urllib.request.urlopen(address, timeout=60).read().decode()
    finally:
        page.terminate()
        page.communicate(timeout=60)
    shown = text.partition("<main>")[2]
    assert shown.index("Exhausted before the first step") < shown.index("episodes scored 0. Try easier")
    assert shown.index("episodes scored 0. Try easier") < shown.index("<h2>") and "Newest episodes" in shown
