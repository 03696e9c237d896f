"""The flags of every program: bounded as settings are; whatever is wrong with them ends with 2 and one line."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
from absl import flags
from programs_world import ended
from sft_world import make_dataset, trajectories

from astra_jax.base.settings import Amount, Count, Port, Seconds, SettingError, Share
from launch.flags.meshes import axis_sizes
from launch.flags.numbers import NumberParser, number_flag, numbers_of
from launch.flags.shared import RENAMED

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (*(ROOT / "launch").glob("*.py"), *(ROOT / "launch").glob("*/__main__.py"))
    if "cli.run(" in path.read_text(encoding="utf-8")
)
WITH_SETTINGS = {"launch.sft", "launch.grpo", "launch.plan", "launch.environments", "launch.trajectories"} | {
    "launch.quickstart"
}
UNBOUNDED = ("DEFINE_integer", "DEFINE_float", "DEFINE_multi_integer", "DEFINE_multi_float")
AXES = ("data", "fsdp", "expert", "context", "tensor")

VALUES = ("nan", "inf", "-inf", "1e308", str(2**70), "9" * 5_000, "many", "", "0x10", "true")


@cache
def seen_of(program: str) -> dict[str, Any]:
    result = ended("seen_flags", program, json.dumps(VALUES), PYTHONPATH=f"{ROOT / 'tests' / 'worlds'}:{ROOT}")
    assert result.code == 0, result.errors
    found: dict[str, Any] = json.loads(result.out.splitlines()[-1])
    return found


@pytest.fixture(params=PROGRAMS)
def seen(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, seen_of(request.param)


def one_line(outcome: list[Any]) -> str:
    """Of a refusal: exit 2, nothing on stdout, one line that begins with `error: `."""
    code, out, err = outcome
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, outcome
    return str(err)


def test_help_and_version_end_well(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    code, out, err = found["help"]
    assert code == 0 and err == "" and "--[no]version" in out and "flags:" in out
    code, out, err = found["version"]
    assert (code, err) == (0, "") and out.startswith("astra_jax ") and out[10].isdigit()


def test_unknown_flags_and_settings_are_refused(seen: tuple[str, dict[str, Any]]) -> None:
    program, found = seen
    assert "nonsens" in one_line(found["unknown"])
    assert ("--[no]help_config" in found["help"][1]) == (program in WITH_SETTINGS)
    if program not in WITH_SETTINGS:
        assert "this program has no such settings" in one_line(found["stray"])


def test_numbers_are_finite_and_bounded(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    assert found["unbounded"] == [], "give these bounds with number_flag"
    for name, (taken, nan, huge) in found["numeric"].items():
        assert not any(taken.values()), f"--{name} takes {[text for text, took in taken.items() if took]}"
        assert f"--{name}=nan: use a " in one_line(nan)
        assert f"--{name}={2**70}: use a " in one_line(huge)


def test_a_flag_of_a_few_values_names_them_all_where_it_refuses_one(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    for name, (values, refused) in found["enums"].items():
        line = one_line(refused)
        assert f"--{name}=nothing" in line and all(value in line for value in values), line


def test_old_names_are_refused_with_todays(seen: tuple[str, dict[str, Any]]) -> None:
    _, found = seen
    for name, refused in found["old"].items():
        assert f"error: --{name}: this flag is called --{RENAMED[name]} now" in one_line(refused)


def test_a_name_has_one_meaning_in_all_programs() -> None:
    """The same type and bounds, and the same first words of help; what a program adds stands behind them."""
    meant: dict[str, tuple[str, list[str]]] = {}
    for program in PROGRAMS:
        for name, meaning in seen_of(program)["meant"].items():
            first, before = meant.setdefault(name, (program, meaning))
            assert meaning == before, f"--{name} of {program}: {meaning}; of {first}: {before}"
    assert set(RENAMED.values()) <= set(meant)


def test_one_word_for_one_idea() -> None:
    """Addresses are `url`, secrets are in a `key_file`, data is `data`: no program says it otherwise."""
    names = {name for program in PROGRAMS for name in seen_of(program)["meant"]}
    others = re.compile(r"(^|_)(endpoint|urls|uri|token_file|secret|dataset|minutes|config_file|hostname)($|_)")
    assert sorted(name for name in names if others.search(name)) == ["teacher_max_unavailable_minutes"]


@pytest.mark.parametrize("room", ["launch", "benchmarks"])
def test_no_flag_is_a_number_without_bounds(room: str) -> None:
    """Whoever defines one by absl's own function gets a number that may be anything, NaN included."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in UNBOUNDED, f"{path}:{node.lineno}: define it with number_flag"


@pytest.mark.parametrize(
    ("declaration", "whole", "bad", "good"),
    [
        (Count, True, ["0", "-1", "1.0", "1e3", "nan", str(2**31)], {"1": 1, " 7 ": 7, "2147483647": 2**31 - 1}),
        (Port, True, ["-1", "65536"], {"0": 0, "65535": 65_535}),
        (Share, False, ["-0.1", "1.5", "nan", "-nan", "inf", "1e999"], {"0": 0.0, "1": 1.0, "5e-1": 0.5}),
        (Seconds, False, ["0", "-1", "1e308", "Infinity"], {"1e-3": 0.001}),
    ],
)
def test_a_number_is_what_it_declares(declaration: Any, whole: bool, bad: list[str], good: dict[str, Any]) -> None:
    parser = NumberParser(declaration, whole=whole)
    for text in bad:
        with pytest.raises(ValueError, match="^use a "):
            parser.parse(text)
    assert {text: parser.parse(text) for text in good} == good
    with pytest.raises(ValueError):
        parser.parse(math.nan if not whole else 2**70)


def test_a_list_of_numbers_is_of_what_it_declares() -> None:
    assert numbers_of(Given("0.5", "2"), Amount) == [0.5, 2.0]  # type: ignore[arg-type]
    assert numbers_of(Given(), Amount) == []  # type: ignore[arg-type]
    for items in (["1", "nan"], ["-1"], ["1", ""], ["1e999"]):
        with pytest.raises(
            SettingError, match=f"--mesh={','.join(items)}: '{items[-1]}' is not .*; use a number from 0"
        ):
            numbers_of(Given(*items), Amount)  # type: ignore[arg-type]


def test_what_is_no_number_cannot_be_declared_as_one() -> None:
    for declaration in (str, Annotated[str, "text"], Count | None):
        with pytest.raises(TypeError, match="declares no number"):
            number_flag("never_defined", None, declaration, "Of a test.")
    assert "never_defined" not in flags.FLAGS


class Given:
    """A flag with a value."""

    name = "mesh"

    def __init__(self, *value: str) -> None:
        self.value = list(value)


def test_sizes_of_axes() -> None:
    assert axis_sizes(Given("fsdp=8", "context=-1"), AXES) == {"fsdp": 8, "context": -1}  # type: ignore[arg-type]
    assert axis_sizes(Given(), AXES) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["fdsp=8"], r"--mesh=fdsp=8: .* data, fsdp, .*\(the nearest is fsdp\)"),
        (["fsdp=8", "fsdp=2"], "fsdp is named twice"),
        (["fsdp=0"], "--mesh=fsdp=0: write fsdp=SIZE, a number from 1"),
        (["fsdp=-2"], "a number from 1"),
        (["fsdp=--1"], "a number from 1"),
        (["fsdp=²"], "a number from 1"),
        ([f"fsdp={2**70}"], "a number from 1"),
        (["fsdp"], "a number from 1"),
    ],
)
def test_sizes_of_axes_that_make_no_mesh_are_refused(items: list[str], message: str) -> None:
    from launch.flags.cli import UsageError

    with pytest.raises(UsageError, match=message):
        axis_sizes(Given(*items), AXES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch.quickstart", "--workdir=W", f"--seed={2**70}"], f"--seed={2**70}: use a whole number from 0 to"),
        (["launch.environments", "--workdir=W", "--config.quality_threshold=NaN"], "quality_threshold is nan;"),
        (
            ["launch.environments", "--workdir=W", '--config.relations=["capitol_of_country"]'],
            "is 'capitol_of_country'; use one of 114 names (the nearest is capital_of_country)",
        ),
        (
            ["launch.trajectories", "--workdir=W", "--config.oversample_ratio=-1"],
            "TrajectoriesConfig.oversample_ratio is -1.0;",
        ),
        (["launch.grpo"], "--workdir and --weights and --environments are missing; see --help"),
        (["benchmarks.plans", "--only=nan", "stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_settings_end_with_two(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = ended(*(one.replace("=W", f"={tmp_path / 'w'}") for one in arguments))
    assert message in one_line([result.code, result.out, result.errors])
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch.grpo", "--publish_dir=W"], "--publish_dir is for servers: give --rollout_url too"),
        (["launch.grpo", "--rollout_sync=direct"], "--rollout_sync is for servers: give --rollout_url too"),
        (["launch.grpo", "--rollout_stall_seconds=9"], "--rollout_stall_seconds is for servers"),
        (["launch.sft", "--data=DATASET", "--skip_bad"], "--skip_bad is for files of conversations"),
        (
            ["launch.astra_rl", "--from=DATASET", "--to=W", "--calls_per_answer=9"],
            "--calls_per_answer is for an import",
        ),
        (["launch.astra_rl", "--from=DATASET", "--to=W", "--sandbox_url=http://a"], "--sandbox_url is for an import"),
        (["launch.astra_rl", "--from=FILE", "--to=W", "--seed=3"], "--seed is for an export; leave it out"),
        (["launch.astra_sft", "--from=DATASET", "--to=W", "--accept=bad"], "--accept is for an import; leave it out"),
        (["launch.plan", "--config=sft:0.6b", "--topology=v5e:2x2", "--compiles=2"], "--compiles is for --search"),
        (["launch.environments", "--workdir=W", "--preview=1", "--replace"], "--replace has no effect with --preview"),
        (
            ["launch.trajectories", "--workdir=W", "--preview=1", "--metrics_port=0"],
            "--metrics_port has no effect with",
        ),
    ],
)
def test_what_nothing_would_read_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    """A forgotten --rollout_url had a run train on the embedded engine, in silence."""
    dataset, file = make_dataset(tmp_path / "dataset", trajectories(1)), tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    places = {"W": tmp_path / "w", "DATASET": dataset, "FILE": file}
    program, *given = (re.sub(r"=(W|DATASET|FILE)$", lambda name: f"={places[name[1]]}", one) for one in arguments)
    if program in ("launch.grpo", "launch.sft"):
        given += [f"--workdir={places['W']}", f"--weights={places['W']}", f"--config={program[7:]}:0.6b"]
    if program == "launch.grpo":
        given += [f"--environments={places['W']}"]
    result = ended(program, *given)
    assert message in one_line([result.code, result.out, result.errors])
    assert not (tmp_path / "w").exists()


def test_settings_are_listed_without_what_a_run_needs() -> None:
    result = ended("launch.environments", "--help_config", "--config.count=7")
    assert result.code == 0 and result.errors == ""
    assert (
        "--config.count=7\n    [a whole number from 0 to 2,147,483,647]\n"
        "    number of questions to generate. Rejected ones are not replaced, so fewer environments are stored.\n"
    ) in result.out


@pytest.mark.parametrize("asked", ["--help_config", "--help"])
def test_who_stops_reading_ends_it_in_silence(asked: str) -> None:
    command = [sys.executable, "-m", "launch.environments", asked]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
