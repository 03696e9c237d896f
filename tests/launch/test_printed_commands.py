"""Every command that README, CONTRIBUTING and the pages print is taken, as printed; and is run for real somewhere.

Taken: its program reads it up to its main function, so each flag and each setting is there and may have that value.
Run: a test starts the program with these flags, on tiny inputs. What wants servers, chips or hours is listed with the
reason.
`tests/launch/test_quickstart.py` runs those that follow each other on a finished run, and
`tests/launch/test_documented_commands.py` looks at whether presets, meshes and settings of trainings go together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from printed_commands import PAGES, ROOT, described, inline, printed, started
from programs_world import Programs, programs

import astra_packages

TESTS = ROOT / "tests"
STARTED_BY = {
    "launch.astra_rl": ("launch/test_astra_rl_program.py",),
    "launch.astra_sft": ("launch/test_astra_sft_program.py",),
    "launch.audit": ("launch/test_audit_program.py", "launch/test_quickstart.py"),
    "launch.compare": ("launch/test_compare.py",),
    "launch.convert": (
        "astra_jax/models/test_gguf.py",
        "astra_jax/models/test_hf_checkpoint.py",
        "astra_jax/sft/test_sft_lora.py",
        "launch/test_peft_programs.py",
        "launch/test_sft_program.py",
    ),
    "launch.difficulty": ("launch/test_difficulty.py",),
    "launch.environments": (
        "jobs/test_job_synthesis.py",
        "launch/test_environments_program.py",
        "launch/test_teachers.py",
    ),
    "launch.evaluate": ("launch/test_evaluate.py", "jobs/test_job_serving.py"),
    "launch.grpo": (
        "launch/test_grpo_program.py",
        "jobs/test_job_serving.py",
        "launch/test_difficulty.py",
        "launch/test_lora_program.py",
    ),
    "launch.inspect": ("launch/test_inspect.py",),
    "launch.plan": ("astra_jax/planner/test_planner.py", "launch/test_auto.py"),
    "launch.push": ("launch/test_own_data.py",),
    "launch.rehearse": ("launch/test_rehearse.py",),
    "launch.quickstart": ("launch/test_quickstart.py",),
    "launch.sandbox_server": ("sandbox/test_sandbox_service.py",),
    "launch.serve": ("astra_jax/serving/test_serving_program.py",),
    "launch.sft": (
        "jobs/test_job_sft.py",
        "launch/test_auto.py",
        "launch/test_sft_program.py",
        "launch/test_own_data.py",
        "launch/test_lora_program.py",
        "launch/test_rehearse.py",
    ),
    "launch.trajectories": (
        "jobs/test_job_synthesis.py",
        "launch/test_trajectories_program.py",
        "launch/test_ray_program.py",
    ),
    "launch.watch": ("launch/test_watch.py",),
}
"""The tests that start each program as its users do, below tests/."""
ONLY_TAKEN = {
    "--rollout_url=http://a:8000,http://b:8000": "two servers and sixteen chips",
    "--mesh=context=4 --vllm=2": "eight GPUs; tests/jobs/test_job_serving.py has processors",
    "--write_serving_folder=SERVED": "launch/recipes/local/run.sh does, which tests/launch/test_local_recipe.py runs",
    "--config.personas=personas.jsonl": "models behind endpoints; tests/synthesis/trajectories/test_on_an_endpoint.py",
}
"""A part of the commands that no test runs with all their flags, and why."""
OTHERS = {
    "pip install": "extras are looked up below",
    "python3 launch/bootstrap.py": ".ci/run; what it starts for the quickstart is in tests/launch/test_quickstart.py",
    ".venv/bin/": "steps of .ci/run, or what emulates a machine",
    "bash .ci/run": "CI",
    "python -m build": "tests/test_packages.py",
    "python -m twine": "tests/test_packages.py",
    "git clone": "another host",
    "curl -L": "another host",
    "curl -H": "tests/sandbox/test_run_code.py",
    "lm_eval run": "benchmarks/serving_clients.py, with the packages of the clients",
    "ray start": "tests/synthesis/pipeline/test_ray_cluster.py has clusters of its own",
    "ASTRA_DRILL_SECONDS=": "tests/drill/test_drill.py, for a minute",
    "ASTRA_SYNC_ROOT=": "tests/worlds/vllm_world.py starts servers",
    "VLLM_SERVER_DEV_MODE=": "tests/worlds/vllm_world.py starts servers",
    "launch/vllm_cpu.sh": ".ci/run",
    "--rollout_url=": "a flag alone: tests/astra_jax/rollout/test_fleet_changes.py",
    "launch/recipes/local/": "tests/launch/test_local_recipe.py",
    "CONFIG=": "tests/launch/test_recipes.py, with stand-ins",
    "TRAINER_NODES=": "tests/launch/test_recipes.py, with stand-ins",
    "sbatch": "tests/launch/test_recipes.py, with stand-ins",
    "docker build": "no engine here; tests/launch/test_recipes.py reads the files",
    "kubectl": "no cluster here; tests/launch/test_recipes.py holds the manifests to their schemas",
    "sky ": "no cloud here; tests/launch/test_recipes.py reads the tasks",
    "for ": "a loop's lines are commands themselves",
    "done": "as the last",
    "name=": "as the last",
    "v=": "the shell's",
}
"""What other lines begin with, and who runs them."""

COMMANDS = sorted({(page, command) for page in PAGES for command in printed(page)})
INLINE = sorted({*described(), *((page, command) for page in PAGES for command in inline(page))} - set(COMMANDS))
"""Within sentences, and what `--help` prints; these may leave flags out."""


@cache
def source(test: str) -> str:
    """A test's text, with that of the worlds that it imports."""
    text = (TESTS / test).read_text(encoding="utf-8")
    worlds = [TESTS / "worlds" / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.M)]
    return "\n".join([text, *(world.read_text(encoding="utf-8") for world in worlds if world.exists())])


def flags_of(arguments: list[str]) -> set[str]:
    """Names of the flags; of settings none, which are one flag."""
    names = {one[2:].partition("=")[0] for one in arguments if one.startswith("--")}
    return {name for name in names if not name.startswith("config.")}


@pytest.fixture(scope="module")
def taken(tmp_path_factory) -> Iterator[Programs]:
    path = f"{TESTS / 'worlds'}:{ROOT}"
    with programs("printed_commands", tmp_path_factory.mktemp("said"), PYTHONPATH=path) as made:
        yield made


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 90 and len(INLINE) > 5
    modules = {found[0] for _, command in COMMANDS if (found := started(command)) is not None}
    assert modules >= {*STARTED_BY, "benchmarks.report", "docs.site"}


def test_every_command_is_taken_as_it_is_printed(taken: Programs) -> None:
    lines: dict[str, dict[str, list[str]]] = {}
    for _, command in [*COMMANDS, *INLINE]:
        if (found := started(command)) is not None:
            lines.setdefault(found[0], {})[command] = found[1]
    wrong = []
    for module, commands in lines.items():
        ended = taken(module, json.dumps(list(commands.values())))
        assert ended.code == 0, f"{module}: {ended.errors[-3000:]}"
        for command, said in zip(commands, json.loads(ended.out.splitlines()[-1]), strict=True):
            part = re.search(r"\.\.\.|…", command) or command in {one for _, one in INLINE}
            if said is not None and not (part and re.search(r"(?:is|are) missing; see --help", said)):
                wrong.append(f"{command}: {said[-500:]}")
    assert not wrong, "\n".join(wrong)


def test_what_there_is_not_is_refused(taken: Programs) -> None:
    lines = [["--help_config"], ["--nowhere=1"], ["--config=sft:14b", "--config.sft.nothing=1"]]
    required = [f"--{name}=x" for name in ("workdir", "weights", "data")]
    said = json.loads(taken("launch.sft", json.dumps([[*required, *line] for line in lines])).out.splitlines()[-1])
    assert said[0] is None and "nowhere" in said[1] and "there is no such setting" in said[2]


def test_the_tests_that_start_programs_name_them() -> None:
    assert STARTED_BY.keys() == {f"launch.{name}" for name in astra_packages.programs()}
    for program, tests in STARTED_BY.items():
        for test in tests:
            names = program, program.removeprefix("launch.")  # by `python -m`, or by `astra`
            assert any(f'"{name}"' in source(test) for name in names), f"{test} does not start {program}"


def test_every_command_is_run_with_its_flags_or_there_is_a_reason() -> None:
    wrong = []
    for page, command in COMMANDS:
        found = started(command)
        if found is None:
            if not command.startswith(tuple(OTHERS)):
                wrong.append(f"{page}: nobody runs {command}")
        elif found[0] in STARTED_BY:
            module, arguments = found
            missing = {test: {f for f in flags_of(arguments) if f not in source(test)} for test in STARTED_BY[module]}
            if all(missing.values()) != any(part in command for part in ONLY_TAKEN):
                wrong.append(f"{page}: {command}: {'lacks ' + str(missing) if all(missing.values()) else 'is run'}")
    stale = [part for part in ONLY_TAKEN if not any(part in command for _, command in COMMANDS)]
    assert not wrong and not stale, "\n".join([*wrong, *stale])


def test_extras_are_there() -> None:
    extras = set(re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        for names in re.findall(r"(?:\.|astra-jax)\[([\w,]+)\]'", (ROOT / page).read_text(encoding="utf-8")):
            assert set(names.split(",")) <= extras, f"{page}: {names}"
    assert Path(ROOT / "setup.py").exists() and "docs" in extras
