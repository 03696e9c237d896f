"""Every training command that a page, a docstring or a recipe's comment shows starts: its preset, mesh and settings go
together."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from astra_jax.attention.splash import BLOCK, good_length
from astra_jax.base.errors import InputError
from astra_jax.mesh import AXES
from astra_jax.planner.hardware import Slice, mesh_sizes
from astra_jax.planner.jobs import for_tokens, job_on, longest
from launch.flags.cli import UsageError, load_config, overridden

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"(?:python -m launch\.|\bastra )(sft|grpo|plan) (.*)")


def commands() -> list[tuple[str, str, str]]:
    """(where, program, arguments) of each that names a preset; a line that ends in a backslash goes on."""
    kinds = ["*.md", "*.py", "launch/recipes"]
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in listed.stdout.splitlines():
        if name.startswith("tests/"):
            continue
        text = re.sub(r"\\+\n\s*", "", (ROOT / name).read_text(encoding="utf-8"))
        for match in COMMAND.finditer(text):
            arguments = re.sub(r"\s#.*|[`\"(].*|\[--\w+\]", "", match.group(2))
            # What a shell fills in: `test_recipes.py`; a model that is in a folder: `test_auto.py`.
            if "--config=" in arguments and ":auto" not in arguments and "$" not in match.group(2):
                found.append((name, match.group(1), arguments))
    return found


def arguments_of(text: str) -> dict[str, str]:
    pairs = (one.partition("=") for one in shlex.split(text) if one.startswith("--"))
    return {name.removeprefix("--"): value for name, _, value in pairs}


def job_of(program: str, text: str):
    """As the program would make it; the mesh is one of devices that are not there."""
    given = arguments_of(text)
    run = load_config(given["config"], *(("sft", "grpo") if program == "plan" else (program,)))
    run = overridden(run, [(name[7:], value) for name, value in given.items() if name.startswith("config.")])
    model, config = run.model, getattr(run, "sft", None) or run.grpo
    tokens = int(given.get("tokens", longest(config)))
    sizes = {
        axis: int(size) for axis, _, size in (one.partition("=") for one in given.get("mesh", "").split(",")) if axis
    }
    sizes = {axis: 1 if size == -1 else size for axis, size in sizes.items()}  # one slice, or one host
    blocks = BLOCK
    if program == "plan":
        slice_ = Slice.parse(given["topology"])
        blocks = BLOCK if slice_.chip.clock else 1
        sizes = sizes or mesh_sizes(slice_, tokens)
        assert math.prod(sizes.values()) == slice_.chips, f"{sizes} is not {slice_.name}"
        if "tokens" in given:
            model, config = for_tokens(model, config, tokens, good_length(tokens, sizes.get("context", 1)))
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    return job_on(model, config, mesh, blocks=blocks)


def test_the_commands_of_pages_and_docstrings_are_found() -> None:
    places = {(where, program) for where, program, _ in commands()}
    wanted = {("docs/sft.md", "sft"), ("docs/grpo.md", "grpo"), ("docs/vllm.md", "grpo"), ("docs/scale.md", "plan")}
    wanted |= {("launch/recipes/tpu/xpk.sh", "plan"), ("launch/recipes/kubernetes/gpu/kustomization.yaml", "plan")}
    assert places >= wanted | {("launch/sft.py", "sft"), ("launch/grpo.py", "grpo"), ("launch/plan.py", "plan")}
    assert sum("--mesh=" in arguments for _, _, arguments in commands()) >= 6


@pytest.mark.parametrize(("where", "program", "arguments"), commands())
def test_every_documented_command_starts(where: str, program: str, arguments: str) -> None:
    job = job_of(program, arguments)
    assert job.rows >= job.config.batch_size and job.row_tokens >= longest(job.config)


@pytest.mark.parametrize("preset", ["sft:0.6b", "grpo:0.6b", "sft:14b", "grpo:14b", "sft:30b-a3b", "grpo:30b-a3b"])
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=16", "fsdp=8,context=2", "fsdp=4,context=4", "context=16"])
def test_presets_start_on_any_of_the_usual_meshes(preset: str, mesh: str) -> None:
    """Without a word about micro-batches: the mesh takes a row for each place that it spreads rows over."""
    job = job_of(preset.partition(":")[0], f"--config={preset} --mesh={mesh}")
    rows = math.prod(int(one.partition("=")[2]) for one in mesh.split(",") if not one.startswith("context"))
    assert job.micro_batch_size == rows and job.rows == job.config.batch_size * getattr(job.config, "group_size", 1)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("sft", "--config=sft:14b --mesh=fsdp=3", "32 rows, which mesh axes"),
        ("grpo", "--config=grpo:14b --mesh=fsdp=16 --config.grpo.micro_batch_size=1", "1 rows, which mesh axes"),
        ("grpo", "--config=grpo:14b --mesh=context=4 --config.grpo.row_buckets=[80000]", "use 80896"),
        ("sft", "--config=sft:14b --mesh=fsdp=4,tensor=3", "'tensor' of 3"),
        ("sft", "--config=sft:14b --mesh=context=16 --config.sft.data.seq_len=20000", "use 20480"),
    ],
)
def test_what_would_not_start_is_not_planned(program: str, arguments: str, message: str) -> None:
    with pytest.raises((InputError, UsageError), match=re.escape(message)):
        job_of(program, arguments)
