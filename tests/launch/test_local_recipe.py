"""The whole topology in small, by its recipe: trainer, two vLLM servers, a sandbox service; and what a scrape of each
shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from grpo_world import ROOT, grpo_flags, make_grpo_world
from observability_world import DASHBOARD, metrics_of, samples
from vllm_world import PLUGIN, VLLM, ZYGOTE

from astra_jax.run.metrics import read_metrics

pytestmark = pytest.mark.slow


ONE_AS_USERS = """#!/bin/sh
mkdir {first} 2>/dev/null && exec {vllm} "$@"
exec "$(dirname {vllm})/python" {zygote} "$@"
"""
"""One server starts as users start it; all processes of the other are forks of one that has imported vLLM, which most
of a start is."""


def scraped(url: str, token: Path | None) -> str:
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token is not None else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers), timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM: launch/vllm_cpu.sh .venv-vllm")
def test_the_local_recipe_trains_on_its_servers_and_shows_all_of_it(tmp_path) -> None:
    world, folder = tmp_path / "world", tmp_path / "folder"
    world.mkdir()
    make_grpo_world(world)
    command = ["launch/recipes/local/run.sh", str(folder), *grpo_flags(world), "--rollout_min_servers=2"]
    command += ["--config.grpo.steps=3"]
    (tmp_path / "vllm").write_text(ONE_AS_USERS.format(first=tmp_path / "first", vllm=VLLM, zygote=ZYGOTE))
    (tmp_path / "vllm").chmod(0o755)
    paths = os.pathsep.join([str(ROOT), str(PLUGIN)])  # this checkout's plugin, whichever is installed
    environment = os.environ | {"PYTHONPATH": paths, "VLLM": str(tmp_path / "vllm"), "CACHE_BYTES": str(64 << 20)}
    environment["PYTHON"] = sys.executable  # which need not be the checkout's .venv
    said, errors = (tmp_path / name for name in ("said", "errors"))
    with said.open("w") as out, errors.open("w") as err:
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=err, text=True, start_new_session=True
        )
        shown: dict[str, str] = {}
        try:
            until = time.monotonic() + 400
            while started.poll() is None and time.monotonic() < until:
                if found := re.search(r"metrics on (\S+)/metrics", said.read_text()):
                    text = scraped_or_none(found[1], folder / "keys" / "metrics")
                    if text and "astra_step" in text and "servers" not in shown:
                        shown |= {"trainer": text, **scrapes_of_services(folder)}
                time.sleep(0.1)
            assert started.poll() == 0, errors.read_text()[-3000:]
        finally:
            if started.poll() is None:
                started.terminate()
                started.wait(60)
    assert f"{folder / 'run' / 'checkpoints'}: 3 steps, finished" in said.read_text()
    rows = read_metrics(folder / "run" / "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/trained_tokens"] > 0 and row["rollout/reward"] > 0
        assert row["train/mismatch_abs"] < 1e-4  # the servers' weights are the trainer's, after each update
        serving = [value for name, value in row.items() if name.startswith("servers/") and name.endswith("/serving")]
        assert serving == [1.0, 1.0]
        assert 0 < row["goodput/share"] <= 1
    # What the dashboard asks for is shown, but for what needs more than this: synthesis has tests of its own.
    exposed = {name for text in shown.values() for name in metrics_of(text)}
    assert shown.keys() == {"trainer", "servers", "sandbox"}
    assert {name for name in DASHBOARD if not name.startswith(("astra_stage_", "astra_teacher_"))} <= exposed
    assert sum(value for name, _, value in samples(shown["sandbox"]) if name == "sandbox_calls_total") > 0
    for url in services(folder):  # all of it has ended
        with pytest.raises(OSError):
            scraped(url, None)


def scraped_or_none(url: str, token: Path) -> str | None:
    try:
        return scraped(url, token)
    except OSError:  # it has just ended
        return None


def services(folder: Path) -> list[str]:
    """The addresses of the sandbox and of both servers."""
    sandbox = re.search(r"sandbox on (\S+?),", (folder / "logs" / "sandbox.log").read_text())
    ports = [log.stem.partition("-")[2] for log in (folder / "logs").glob("server-*.log")]
    assert sandbox is not None and len(ports) == 2
    return [sandbox[1], *(f"http://127.0.0.1:{port}" for port in ports)]


def scrapes_of_services(folder: Path) -> dict[str, str]:
    sandbox, *servers = services(folder)
    return {
        "sandbox": scraped(sandbox, folder / "keys" / "sandbox"),
        "servers": "".join(scraped(url, None) for url in servers),
    }
