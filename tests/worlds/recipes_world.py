"""The recipes of `launch/recipes`, started where every program of a cluster is a stand-in that writes down how it was
called."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "launch" / "recipes"
SCRIPTS = sorted(path for path in RECIPES.rglob("*") if path.suffix in (".sh", ".sbatch"))
MANIFESTS = sorted(RECIPES.joinpath("kubernetes").rglob("*.yaml"))
SKY = sorted(RECIPES.joinpath("skypilot").glob("*.yaml"))
DOCKERFILES = sorted(RECIPES.joinpath("containers").glob("*.Dockerfile"))
_OURS = re.compile(r"-m launch\.(\w+)")
_STAND_IN = f"""#!{sys.executable} -SE
import json, os, sys, time
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([name, *args]) + "\\n")
folder = next((one.partition("=")[2] for one in args if one.startswith("--write_serving_folder=")), None)
if name == "python" and "-c" in args:
    if "urllib" not in args[1]:
        os.execv(sys.executable, [sys.executable, *args])
    port = args[2].rpartition(":")[2].partition("/")[0]  # a service is healthy when it was started
    until = time.monotonic() + 30
    while time.monotonic() < until:
        lines = open(os.environ["RECORD"]).read().split("\\n")
        if any(f'"--port={{port}}"' in line and not line.startswith('["srun"') for line in lines):
            sys.exit(0)
        time.sleep(0.02)
    sys.exit(1)
elif name == "srun":
    while args[0].startswith("--"):
        args.pop(0)
    os.execvp(args[0], args)
elif folder:
    os.makedirs(folder)
    print(f"{{folder}}: 3 files; vllm serve {{folder}} --load-format=dummy --max-model-len=4096 and what else")
elif name == "vllm" or "launch.sandbox_server" in args:
    time.sleep(60)
elif "launch.grpo" in args or "launch.sft" in args:
    sys.exit(int(os.environ["CODE"]))
elif name == "scontrol" and args[0] == "show":
    print("n1\\nn2\\nn3")
elif name == "gcloud" and "describe" in args:
    print("10.0.0.7")
"""


@dataclass(frozen=True)
class Dry:
    """What came of a script.

    Attributes:
        code: its exit code.
        calls: each program's name and arguments, as they were started.
    """

    code: int
    calls: list[list[str]]
    errors: str

    def ours(self) -> Iterator[tuple[str, list[str]]]:
        """(program, arguments) of each program of ours, also of those that a call only passes on as text."""
        for call in self.calls:
            if call[0] == "python" and "-m" in call:
                yield call[2].removeprefix("launch."), call[3:]
                continue
            for text in call[1:]:
                for line in text.replace("\\\n", " ").splitlines() if " " in text else ():
                    if found := _OURS.search(line):
                        yield found[1], shlex.split(line[found.end() :])

    def flags_of(self, program: str) -> list[dict[str, str]]:
        """By name, of each call of a program that is none of ours, such as `vllm` or `gcloud`."""
        return [as_flags(call[1:]) for call in self.calls if call[0] == program]


def as_flags(arguments: Sequence[str]) -> dict[str, str]:
    pairs = (one.partition("=") for one in arguments if one.startswith("--"))
    return {name: value for name, _, value in pairs}


def dry_run(script: Path | str, folder: Path, *arguments: str, code: int = 0, **environment: str) -> Dry:
    """Start a script, or text of bash, in the checkout.

    Args:
        folder: a new one.
        code: what the trainer ends with.
        environment: of the script, beside what the stand-ins need.
    """
    programs, record = folder / "bin", folder / "record"
    programs.mkdir(parents=True, exist_ok=True)
    record.write_text("")
    for name in ("python", "vllm", "srun", "scontrol", "gcloud", "xpk"):
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHON": str(programs / "python"),
        "VLLM": str(programs / "vllm"),
        "RECORD": str(record),
        "CODE": str(code),
    }
    command = ["bash", str(script), *arguments] if isinstance(script, Path) else ["bash", "-ec", script]
    ended = subprocess.run(command, cwd=ROOT, env=given | environment, capture_output=True, text=True, timeout=60)
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    return Dry(ended.returncode, calls, ended.stderr)


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def containers(document: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """All that a manifest starts, each with the names of its pod's volumes."""
    match document:
        case {"containers": list(found), **rest}:
            for one in [*rest.get("initContainers", ()), *found]:
                yield one, {volume["name"] for volume in rest.get("volumes", ())}
        case dict():
            for value in document.values():
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, dict):
                        yield from containers(one)


def settings_of(overlay: Path) -> dict[str, str]:
    """What `kustomization.yaml` puts into the pods' environment."""
    (found,) = documents(overlay / "kustomization.yaml")
    literals = found["configMapGenerator"][0]["literals"]
    return {name: value for name, _, value in (one.partition("=") for one in literals)}


def commands_of(overlay: Path) -> Iterator[tuple[str, list[str]]]:
    """(program, arguments) of ours and of vLLM's that an overlay starts, with its settings in their places."""
    settings = settings_of(overlay) | {"JOB_COMPLETION_INDEX": "0"}
    for path in [*overlay.glob("*.yaml"), *overlay.with_name("base").glob("*.yaml")]:
        for document in documents(path):
            for container, _ in containers(document):
                words = [re.sub(r"\$\((\w+)\)", lambda one: settings[one[1]], word) for word in container["command"]]
                if "-m" in words:
                    at = words.index("-m")
                    yield words[at + 1].removeprefix("launch."), words[at + 2 :]
                else:
                    yield words[0], words[2:]
