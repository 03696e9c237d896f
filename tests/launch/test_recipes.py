"""The recipes of `launch/recipes`: scripts, manifests and container files that cannot be started here are read by the
programs that check them, and started where every program of a cluster is a stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from recipes_world import (
    DOCKERFILES,
    MANIFESTS,
    RECIPES,
    ROOT,
    SCRIPTS,
    SKY,
    Dry,
    as_flags,
    commands_of,
    containers,
    documents,
    dry_run,
    settings_of,
)
from test_documented_commands import job_of
from vllm_world import VLLM

from configs.quickstart import PROFILES
from launch.flags.cli import load_config

KUBERNETES = "1.34"
OVERLAYS = ("tpu", "gpu")


def tool(name: str) -> str:
    """A linter beside this Python, or anywhere."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, which .ci/run installs")
    return found


# ------------------------------------------------------------------------------------------------------------- scripts


def test_shellcheck_finds_nothing() -> None:
    scripts = [*SCRIPTS, ROOT / "launch" / "vllm_cpu.sh", ROOT / ".ci" / "run"]
    ended = subprocess.run([tool("shellcheck"), "-x", *map(str, scripts)], cwd=RECIPES, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def in_bash(text: str) -> subprocess.Popen[str]:
    command = ["bash", "-c", text, "until_done"]
    return subprocess.Popen(command, cwd=RECIPES, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(("given", "code", "used"), [("/nowhere/python", 127, False), (None, 3, True)])
def test_a_python_that_is_named_is_taken_or_missed_and_else_the_active_one(tmp_path, given, code, used) -> None:
    checkout, active = tmp_path / "checkout", tmp_path / "bin" / "python"
    shutil.copytree(RECIPES, checkout / "launch" / "recipes")  # without a .venv
    active.parent.mkdir()
    active.write_text(f"#!/bin/sh\ntouch {tmp_path}/used\nexit 3\n")
    active.chmod(0o755)
    environment = os.environ | {"PATH": f"{active.parent}:{os.environ['PATH']}", "VLLM": "/bin/true"}
    environment.pop("PYTHON", None)
    for recipe in ("local", "one_host"):
        script = checkout / "launch" / "recipes" / recipe / "run.sh"
        chosen = environment if given is None else environment | {"PYTHON": given}
        ended = subprocess.run([script, tmp_path / "folder"], env=chosen, capture_output=True, text=True, timeout=60)
        assert ended.returncode == code, ended.stderr
        assert (tmp_path / "used").exists() == used
        (tmp_path / "used").unlink(missing_ok=True)


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_command_that_nobody_stops_ends_as_it_ends(code: int) -> None:
    assert in_bash(f"exec ./until_done.sh bash -c 'exit {code}'").wait(20) == code


@pytest.mark.parametrize(("child", "code"), [(0, 75), (1, 1)])
def test_a_command_that_was_stopped_and_saved_is_to_be_started_again(child: int, code: int) -> None:
    started = in_bash(
        f"""exec ./until_done.sh bash -c 'trap "exit {child}" TERM; echo up; while :; do sleep 0.05; done'"""
    )
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(20) == code


def test_a_ctrl_c_has_the_command_save() -> None:
    """A terminal sends it to all that run in front; the command had it too, which saves nothing then."""
    trainer = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("up", flush=True); time.sleep(60)"""
    started = in_bash(f"exec ./until_done.sh {sys.executable} -c {shlex.quote(trainer)}")
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(20) == 75


@pytest.mark.parametrize(("line", "codes"), [("child=$!;", {75}), ('"$@" &', {75, 143})])
def test_a_signal_that_comes_while_the_command_starts_is_passed_on(line: str, codes: set[int]) -> None:
    """Before there is a command, which may then have no time to say what it does with one (143), and as soon as it is
    known; the wrapper was ended by it, and the command ran on."""
    late = f"{line} sleep 1;" if line.endswith(";") else f"sleep 1; {line}"
    started = in_bash(
        f"""source parts.sh; eval "$(declare -f run_to_end | sed 's/{line}/{late}/')"
        [[ $(declare -f run_to_end) = *"sleep 1"* ]] || exit 9
        echo up; run_to_end bash -c 'trap "exit 0" TERM; while :; do sleep 0.05; done'"""
    )
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    time.sleep(0.5)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(20) in codes


def test_what_is_started_is_started_again_and_ended_whole(tmp_path) -> None:
    text = f"""source parts.sh; LOGS={tmp_path}; PYTHON={sys.executable}
        read -r a b < <(free_ports 2); [ "$a" != "$b" ] || exit 8
        start twice bash -c 'echo one; exit 3'; start long bash -c 'sleep 600 & sleep 600'
        for key in 1 2; do make_key {tmp_path}/key; done
        until [ "$(grep -c "ended with 3" {tmp_path}/twice.log)" = 2 ]; do sleep 0.1; done
        pid=${{STARTED[1]}}; stop_all; kill -0 -- "-$pid" 2>/dev/null && exit 9; exit 0"""
    assert in_bash(text).wait(60) == 0
    assert len((tmp_path / "key").read_text()) == 32 and (tmp_path / "key").stat().st_mode & 0o77 == 0


def test_what_runs_for_long_may_end_as_often_as_it_likes_and_what_does_not_is_given_up(tmp_path) -> None:
    text = f"""source parts.sh; LOGS={tmp_path}; export PAUSE_SECONDS=0.02
        STEADY_SECONDS=0; start steady false
        STEADY_SECONDS=600; start short false; wait "${{STARTED[1]}}"
        until [ "$(grep -c "ended with 1" {tmp_path}/steady.log)" -gt 12 ]; do sleep 0.1; done
        stop_all; exit $(grep -c "ended with 1" {tmp_path}/short.log)"""
    assert in_bash(text).wait(60) == 6


# ------------------------------------------------------------------------------------------------------------ commands


def sky_run(path: Path, folder: Path) -> Dry:
    (task,) = documents(path)
    nodes = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}
    keys = dict.fromkeys(task.get("secrets", ()), "k")
    # The image's folder is this checkout.
    return dry_run("cd() { :; }\n" + task["run"], folder, **nodes, **task["envs"], **keys)


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict[str, Dry]:
    """Every recipe but the local one, which is run in earnest (`test_local_recipe.py`)."""

    def at(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    sft = {"PROGRAM": "sft"}
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7"}
    found = {
        "one_host": dry_run(RECIPES / "one_host" / "run.sh", at("one"), str(at("one"))),
        "slurm": dry_run(RECIPES / "slurm" / "train.sbatch", at("slurm"), FOLDER=str(at("run")), **slurm),
        "slurm sft": dry_run(
            *(RECIPES / "slurm" / "train.sbatch", at("slurm")),
            FOLDER=str(at("run")),
            SLURM_JOB_NUM_NODES="3",
            **sft,
            **slurm,
        ),
        "queued_resources": dry_run(RECIPES / "tpu" / "queued_resources.sh", at("queued"), "train", SLICES="2"),
        "queued_resources up": dry_run(RECIPES / "tpu" / "queued_resources.sh", at("queued"), "up"),
        "queued_resources down": dry_run(RECIPES / "tpu" / "queued_resources.sh", at("queued"), "down"),
        "queued_resources sft": dry_run(RECIPES / "tpu" / "queued_resources.sh", at("queued"), "train", **sft),
        "queued_resources sft up": dry_run(RECIPES / "tpu" / "queued_resources.sh", at("queued"), "up", **sft),
        "xpk": dry_run(RECIPES / "tpu" / "xpk.sh", at("xpk")),
        "xpk sft": dry_run(RECIPES / "tpu" / "xpk.sh", at("xpk"), **sft),
    }
    names = {path: "skypilot sft" if path.stem == "sft" else path.stem for path in SKY if path.stem != "servers"}
    found |= {name: sky_run(path, at(path.stem)) for path, name in names.items()}
    return found


def ours(dry: dict[str, Dry]) -> Iterator[tuple[str, str, list[str]]]:
    """(recipe, program, arguments)."""
    for name, one in dry.items():
        for program, arguments in one.ours():
            yield name, program, arguments
    for kind in OVERLAYS:
        for program, arguments in commands_of(RECIPES / "kubernetes" / kind):
            if program != "vllm":
                yield f"kubernetes {kind}", program, arguments


@cache
def flags_of(program: str) -> set[str]:
    code = f"import launch.{program}, absl.flags; print(*absl.flags.FLAGS)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(said.stdout.split())


def test_every_recipe_comes_to_its_end(dry) -> None:
    for name, one in dry.items():
        assert one.code == 0, (name, one.errors)


def test_every_flag_of_ours_is_there_and_every_job_starts(dry) -> None:
    trained = set()
    for name, program, arguments in ours(dry):
        given = as_flags(arguments)
        assert {one[2:] for one in given if not one.startswith("--config.")} <= flags_of(program), name
        if "--mesh" in given:
            job = job_of(program, " ".join(f"{flag}={value}" for flag, value in given.items() if value))
            assert job.rows >= job.config.batch_size
            trained.add(name)
            # They all have the same parts: servers, their keys, where weights are published, sandboxes or a tier here.
            parts = {"--rollout_url", "--rollout_key_file", "--rollout_sync_key_file", "--publish_dir", "--workdir"}
            assert parts <= given.keys() and given.keys() & {"--sandbox_url", "--sandbox_tier"}, name
    assert trained == {*(name for name in dry if " " not in name), "kubernetes tpu", "kubernetes gpu"}


def test_sft_trains_on_all_machines_and_needs_no_servers(dry) -> None:
    jobs = {name: one for name, one in dry.items() if name.endswith(" sft")}
    assert jobs.keys() == {"slurm sft", "queued_resources sft", "xpk sft", "skypilot sft"}
    for name, one in jobs.items():
        ((program, arguments),) = one.ours()
        given = as_flags(arguments)
        assert program == "sft" and given["--config"] == "sft:auto" and given["--held_out"] == "5%", name
        assert given["--data"].endswith("/train.jsonl") and "--multihost" in given and "--mesh" not in given, name
    srun = next(call for call in jobs["slurm sft"].calls if call[0] == "srun")
    assert "--nodelist=n1,n2,n3" in srun
    (created,) = dry["queued_resources sft up"].flags_of("gcloud")
    assert created["--node-id"] == "sft" and created["--accelerator-type"] == "v6e-16"


def test_sft_on_kubernetes_is_the_trainer_alone() -> None:
    overlay = RECIPES / "kubernetes" / "sft-tpu"
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    ended = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = {one["kind"]: one for one in yaml.safe_load_all(ended.stdout)}
    assert not {"Service", "StatefulSet"} & found.keys()
    (container,) = [one for one, _ in containers(found["JobSet"])]
    settings = found["ConfigMap"]["data"]
    words = [re.sub(r"\$\((\w+)\)", lambda one: settings[one[1]], word) for word in container["command"]]
    given = as_flags(words)
    assert words[:4] == ["launch/recipes/until_done.sh", "python", "-m", "launch.sft"]
    assert {name[2:] for name in given} <= flags_of("sft")
    assert given["--held_out"] == "5%" and given["--workdir"] == "gs://YOUR-BUCKET/sft/run"
    assert {one["valueFrom"]["configMapKeyRef"]["key"] for one in container["env"]} <= settings.keys()
    assert found["JobSet"]["metadata"]["name"] == "sft" and container["image"].endswith("/trainer:tpu")


def test_the_local_world_is_the_quickstarts() -> None:
    config = load_config(str(RECIPES / "local" / "config.py"), "grpo")
    quick = PROFILES["quick"]()
    assert (config.model, config.grpo) == (quick.model, quick.grpo)
    text = (RECIPES / "local" / "run.sh").read_text()
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert "environments/train" in text and "`environments/{train,held_out}`" in page
    assert "sft/tools/checkpoints" in text and "`sft/*/{checkpoints,metrics}`" in page


def test_several_slices_go_together_with_their_mesh() -> None:
    for mesh in ("data=2,context=16", "data=2,context=8"):  # as the recipes' comments say
        job_of("grpo", f"--config=grpo:14b --mesh={mesh}")


def test_sizes_are_the_planners() -> None:
    """Each recipe's comment gives a plan's command and its bytes, as docs/scale.md has them."""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    told = 0
    for path in (*SCRIPTS, *MANIFESTS, *SKY):
        text = path.read_text(encoding="utf-8")
        for size, chip, topology in re.findall(
            r"planner's: ([\d.]+ of [\d.]+) GiB on an? (\w+)\b.*?\n#.*--topology=(\S+)", text
        ):
            (row,) = re.findall(rf"^\| grpo \| 14b \| 74,752 \| {topology} \|.*", page, re.MULTILINE)
            assert f"| {size} |" in row, path
            assert chip.lower() == topology.partition(":")[0]
            told += 1
    assert told >= 8


def test_every_flag_of_vllm_is_there(dry) -> None:
    used = [flags for one in dry.values() for flags in one.flags_of("vllm")]
    used += [as_flags(words) for kind in OVERLAYS for name, words in commands_of(RECIPES / "kubernetes" / kind)
             if name == "vllm"]  # fmt: skip
    used.append(as_flags(re.findall(r"--[\w-]+", documents(RECIPES / "skypilot" / "servers.yaml")[0]["run"])))
    assert len(used) >= 5
    if not VLLM.exists():
        pytest.skip("needs vLLM: launch/vllm_cpu.sh .venv-vllm")
    (folder,) = VLLM.parent.parent.glob("lib/python*/site-packages/vllm")
    sources = [folder / "engine" / "arg_utils.py", *folder.glob("entrypoints/**/cli_args.py")]
    known = set(re.findall(r"\w+", "".join(path.read_text() for path in sources)))
    for flags in used:
        assert {name[2:].replace("-", "_") for name in flags} <= known


FOREIGN = {
    # Of `gcloud compute tpus …`, XPK 1.16 and Slurm's srun, as their references list them.
    "gcloud": "project zone node-id node-count node-prefix accelerator-type runtime-version spot force quiet worker "
    "command format",
    "xpk": "workload cluster project zone tpu-type num-slices docker-image storage max-restarts restart-on-exit-codes "
    "command",
    "srun": "overlap nodes ntasks-per-node nodelist kill-on-bad-exit",
}


@pytest.mark.parametrize("program", FOREIGN)
def test_flags_of_the_engines_are_known(dry, program: str) -> None:
    called = [call[1:] for one in dry.values() for call in one.calls if call[0] == program]
    assert called
    if program == "srun":  # what follows its flags are the task's
        called = [list(takewhile(lambda word: word.startswith("--"), call)) for call in called]
    assert {name[2:] for call in called for name in as_flags(call)} == set(FOREIGN[program].split())


def test_one_host_gives_no_gpu_to_two(dry) -> None:
    (trainer,) = [call for call in dry["one_host"].calls if "--mesh=context=4" in call]
    assert "--rollout_min_servers=1" in trainer
    tensor = [flags["--tensor-parallel-size"] for flags in dry["one_host"].flags_of("vllm")]
    assert tensor == ["2", "2"]
    text = (RECIPES / "one_host" / "run.sh").read_text()
    given = [re.search(rf"{name}=\$\{{{name}:-([^}}]*)", text)[1] for name in ("TRAINER_GPUS", "SERVER_GPUS")]
    assert sorted(re.findall(r"\d", " ".join(given))) == list("01234567")


def test_keys_are_on_no_command_line(dry) -> None:
    for one in dry.values():
        assert not [word for call in one.calls for word in call if re.search(r"api-key|API_KEY=(?!\$)", word)]


@pytest.mark.parametrize(
    ("code", "steps", "ends", "queued"),
    [
        (75, [3], 0, True),  # stopped, saved
        (2, [3], 2, False),  # refused
        (1, [3, 4, 5, 6], 0, True),  # faults, but it gets on
        (1, [3, 3, 3], 1, False),  # it does not
    ],
)
def test_slurm_queues_again_what_gets_on(tmp_path, code: int, steps: list[int], ends: int, queued: bool) -> None:
    folder = tmp_path / "run"
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", "FOLDER": str(folder)}
    for step in steps:
        (folder / "run" / "checkpoints" / "params" / str(step)).mkdir(parents=True, exist_ok=True)
        script = RECIPES / "slurm" / "train.sbatch"
        # The nodes without servers, which are tried above.
        one = dry_run(script, tmp_path / "dry", code=code, TRAINER_NODES="3", **slurm)
    assert one.code == ends
    assert (["scontrol", "requeue", "7"] in one.calls) == queued


# ----------------------------------------------------------------------------------------------------------- manifests

_OPEN: dict[str, Any] = {"type": "object"}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_RULE = _closed(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={
        "type": "array",
        "items": {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded",
                           "PodFailurePolicy"]},
    },
    onJobFailureMessagePatterns=_TEXTS,
    targetReplicatedJobs=_TEXTS,
)  # fmt: skip
_METADATA = _closed(("name",), name=_TEXT, labels=_OPEN, annotations=_OPEN)
_REPLICATED = _closed(("name", "template"), name=_TEXT, replicas=_COUNT, template=_closed(("spec",), spec=_OPEN))
_FLAVOR = _closed(
    ("name", "resources"),
    name=_TEXT,
    resources={"type": "array", "items": _closed(("name", "nominalQuota"), name=_TEXT, nominalQuota={})},
)
SCHEMAS = {
    # Fields of their public API that the recipes use, from the projects' reference pages.
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _closed(
        ("replicatedJobs",),
        network=_closed(enableDNSHostnames={"type": "boolean"}, publishNotReadyAddresses={"type": "boolean"}),
        successPolicy=_closed(("operator",), operator={"enum": ["All", "Any"]}),
        failurePolicy=_closed(maxRestarts=_COUNT, rules={"type": "array", "items": _RULE}),
        replicatedJobs={"type": "array", "items": _REPLICATED},
    ),
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): _closed(nodeLabels=_OPEN),
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): _closed(
        ("resourceGroups",),
        namespaceSelector=_OPEN,
        resourceGroups={
            "type": "array",
            "items": _closed(
                ("coveredResources", "flavors"), coveredResources=_TEXTS, flavors={"type": "array", "items": _FLAVOR}
            ),
        },
    ),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): _closed(("clusterQueue",), clusterQueue=_TEXT),
}


def check_of_kubernetes(document: dict[str, Any]) -> None:
    """Against Kubernetes' own schemas; unknown fields are errors."""
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    schemas.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_manifests_fit_their_schemas(path: Path) -> None:
    for document in documents(path):
        kind = (document["apiVersion"], document["kind"])
        if kind[1] == "Kustomization":
            assert all((path.parent / one).exists() for one in document["resources"])
            continue
        if kind not in SCHEMAS:
            check_of_kubernetes(document)
            continue
        whole = _closed(("metadata", "spec"), apiVersion=_TEXT, kind=_TEXT, metadata=_METADATA, spec=SCHEMAS[kind])
        jsonschema.validate(document, whole)
        for job in document["spec"].get("replicatedJobs", ()):
            check_of_kubernetes(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": job["template"]["spec"]}
            )


@pytest.mark.parametrize("kind", OVERLAYS)
def test_a_clusters_parts_find_each_other(kind: str) -> None:
    """Images, services, volumes, settings and secrets that are named are there."""
    overlay = RECIPES / "kubernetes" / kind
    (kustomization,) = documents(overlay / "kustomization.yaml")
    images = {one["name"]: f"{one['newName'].rpartition('/')[2]}:{one['newTag']}" for one in kustomization["images"]}
    built = {re.search(r"-t REGISTRY/(\S+)", path.read_text())[1] for path in DOCKERFILES}
    built |= {f"trainer:{kind}" for kind in ("cpu", "cuda", "tpu")}
    assert set(images.values()) <= built
    settings, used = settings_of(overlay), set()
    every = [
        (path, one)
        for path in [*overlay.glob("*.yaml"), *overlay.with_name("base").glob("*.yaml")]
        for one in documents(path)
    ]
    services = {
        one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for _, one in every if one["kind"] == "Service"
    }
    replicas = {one["metadata"]["name"]: one["spec"]["replicas"] for _, one in every if one["kind"] == "StatefulSet"}
    for _, document in every:
        for container, volumes in containers(document):
            assert container["image"] in images
            for one in container.get("env", ()):
                if "configMapKeyRef" in one.get("valueFrom", {}):
                    assert one["valueFrom"]["configMapKeyRef"] == {"name": "job", "key": one["name"]}
                    used.add(one["name"])
            assert {one["name"] for one in container["volumeMounts"]} <= volumes
            for host, service, port in re.findall(r"http://(\w+-\d+)\.(\w+):(\d+)", " ".join(container["command"])):
                assert services[service] == int(port) and int(host.rpartition("-")[2]) < replicas[service]
    assert used == settings.keys()


def test_a_preemption_is_not_counted_and_a_refusal_ends_it() -> None:
    """The JobSet's rules read the messages that Kubernetes' Job controller writes."""
    for kind in OVERLAYS:
        (jobset,) = documents(RECIPES / "kubernetes" / kind / "trainer.yaml")
        rules = jobset["spec"]["failurePolicy"]["rules"]

        def action(message: str, rules: Any = rules) -> str:
            found = (
                one["action"]
                for one in rules
                if any(re.search(pattern, message) for pattern in one["onJobFailureMessagePatterns"])
            )
            return next(found, "RestartJobSet")

        said = "Container trainer for pod astra/grpo-0-0 failed with exit code {} matching FailJob rule at index 0"
        assert action(said.format(2)) == "FailJobSet"
        assert action(said.format(75)) == "RestartJobSetAndIgnoreMaxRestarts"
        lost = "Pod astra/grpo-0-0 has condition DisruptionTarget matching FailJob rule at index 1"
        assert action(lost) == "RestartJobSetAndIgnoreMaxRestarts"
        assert action("Job has reached the specified backoff limit") == "RestartJobSet"
        codes = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert codes["values"] == [2, 75]


SKY_TASK = _closed(
    ("name", "resources", "run"),
    name=_TEXT,
    num_nodes=_COUNT,
    resources=_closed(
        accelerators=_TEXT,
        accelerator_args=_closed(tpu_vm={"type": "boolean"}, runtime_version=_TEXT),
        use_spot={"type": "boolean"},
        image_id={"type": "string", "pattern": "^docker:"},
        ports={"type": "array", "items": _COUNT},
        job_recovery=_closed(
            strategy={"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
            max_restarts_on_errors=_COUNT,
            recover_on_exit_codes={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
        ),
    ),
    envs={"type": "object", "additionalProperties": _TEXT},
    secrets={"type": "object", "additionalProperties": {"type": "null"}},
    file_mounts={"type": "object", "additionalProperties": _TEXT},
    setup=_TEXT,
    run=_TEXT,
)
"""Of SkyPilot 0.14, the fields that the recipes use."""


@pytest.mark.parametrize("path", SKY, ids=lambda path: path.name)
def test_sky_tasks_fit_their_schema(path: Path) -> None:
    (task,) = documents(path)
    jsonschema.validate(task, SKY_TASK)
    if path.stem != "servers":
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    script = f"#!/usr/bin/env bash\n{task['run']}"
    ended = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------------------------------------------------- containers


def test_hadolint_finds_nothing() -> None:
    ended = subprocess.run([tool("hadolint"), *map(str, DOCKERFILES)], capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stdout, ended.stdout


def instructions(path: Path) -> list[tuple[str, str]]:
    parse = pytest.importorskip("dockerfile_parse", reason="needs dockerfile-parse")
    parsed = parse.DockerfileParser(fileobj=path.open("rb"))
    return [(one["instruction"], one["value"]) for one in parsed.structure if one["instruction"] != "COMMENT"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_a_container_file_names_is_there(path: Path) -> None:
    found = instructions(path)
    base = found[0] if found[0][0] == "FROM" else None
    assert base is not None and re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base[1]), "pinned to a version"
    accelerators = ("cpu", "cuda", "tpu") if "ACCELERATOR" in path.read_text() else ("",)
    for instruction, value in found:
        if instruction == "COPY":
            *sources, target = value.split()
            for source in sources:
                for one in accelerators:
                    assert (ROOT / source.replace("${ACCELERATOR}", one)).exists(), value
            assert len(sources) == 1 or target.endswith("/")
        if instruction == "CMD" and "launch." in value:
            module = json.loads(value)[2]
            assert importlib.util.find_spec(module) is not None
    assert f"-f {path.relative_to(ROOT)}" in path.read_text(), "the command that builds it is its own"


def test_the_sandbox_image_has_all_that_its_program_imports(tmp_path) -> None:
    """What is copied, and the packages of its list, alone."""
    listed = RECIPES.joinpath("containers", "requirements", "sandbox.txt").read_text().splitlines()
    allowed = {line.partition("==")[0].replace("-", "_") for line in listed if "==" in line}
    allowed |= {"absl", "attr", "backports"}  # their packages' modules; the last one aiohttp takes where it is
    for instruction, value in instructions(RECIPES / "containers" / "sandbox.Dockerfile"):
        source, _, target = value.partition(" ")
        if instruction == "COPY" and not source.endswith((".txt", "LICENSE")):
            into = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            into.parent.mkdir(parents=True, exist_ok=True)
            into.symlink_to(ROOT / source)
    code = (
        "import sys; before = set(sys.modules)\n"
        "import launch.sandbox_server, sandbox, sandbox.service, launch.flags.services\n"
        "print(*{name.partition('.')[0] for name, one in sys.modules.items() if name not in before "
        "and 'site-packages' in (getattr(one, '__file__', None) or '')})"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert set(said.stdout.split()) <= allowed, said.stdout


REQUIREMENTS = sorted(RECIPES.joinpath("containers", "requirements").glob("*.txt"))


@pytest.mark.nightly
@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_pinned_package_is_to_be_had(path: Path) -> None:
    """As a wheel for the image's Python; and each of our own requirements is among them."""
    text = path.read_text()
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in pins)
    uv = VLLM.parent.parent.parent / "uv" / "bin" / "uv"
    if not uv.exists():
        pytest.skip("needs uv: launch/vllm_cpu.sh .venv-vllm")
    version = re.search(r"--python-version=(\S+)", text)[1]
    options = ["--dry-run", "--no-deps", "--only-binary=:all:", f"--python-version={version}", f"--target={path}.none"]
    command = [str(uv), "pip", "install", *options, "--python-platform=x86_64-manylinux_2_36", "-r", str(path)]
    for tries in (1, 2, 3):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ended.returncode == 0 or "Failed to fetch" not in ended.stderr:
            break
        time.sleep(tries)
    if "Failed to fetch" in ended.stderr:
        pytest.skip(f"no package index could be reached: {ended.stderr[-200:]}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n + ") == len(pins)


def test_the_plugins_requirement_is_pinned_alike() -> None:
    texts = [path.read_text() for path in (*REQUIREMENTS, *DOCKERFILES)]
    assert len({one for text in texts for one in re.findall(r"tensorstore==([\d.]+)", text)}) == 1


def test_manifests_are_yaml_that_says_what_it_shows() -> None:
    """No duplicate keys, of which YAML takes the last without a word."""

    class Strict(yaml.SafeLoader):
        pass

    def once(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        return dict(loader.construct_pairs(node, deep=True))

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, once)
    for path in (*MANIFESTS, *SKY):
        list(yaml.load_all(path.read_text(), Strict))
