"""The command line: overrides of a configuration, help that answers at once, errors that name the remedy."""

from __future__ import annotations

import functools
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from programs_world import ended
from selection import by_day

from astra_jax.base.settings import declared, wording
from configs.quickstart import PROFILES
from launch.flags import help_text
from launch.flags.cli import UsageError, load_config, overridden, setting_names
from launch.flags.summaries import print_table

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (*(ROOT / "launch").glob("*.py"), *(ROOT / "launch").glob("*/__main__.py"))
    if "cli.run(" in path.read_text(encoding="utf-8")
)

FLAGS = {
    "launch.quickstart": "workdir",
    "launch.plan": "topology",
    "launch.push": "public",
    "launch.rehearse": "max_answer_tokens",
    "launch.difficulty": "policy_name",
    "launch.audit": "fail_on",
    "launch.compare": "figures",
    "launch.convert": "from_orbax",
    "launch.evaluate": "user_model",
    "launch.astra_rl": "calls_per_answer",
    "launch.astra_sft": "accept",
    "launch.sandbox_server": "max_slots",
    "launch.environments": "teacher_model",
    "launch.grpo": "rollout_url",
    "launch.inspect": "sandbox_url",
    "launch.serve": "served_model_name",
    "launch.sft": "profile_steps",
    "launch.trajectories": "teacher_model",
    "launch.watch": "refresh_seconds",
}
"""One flag of each program."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def config():
    return PROFILES["quick"]()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("grpo.steps", "7", 7),
        ("grpo.learning_rate", "1e-4", 1e-4),
        ("grpo.objective.tis_cap", "null", None),
        ("grpo.objective.tis_cap", "None", None),
        ("grpo.row_buckets", "[1024, 2048]", (1024, 2048)),
        ("grpo.solve_rates", "[0.1, 0.9]", (0.1, 0.9)),
        ("dialogue.data.tools", "some", "some"),
        ("dialogue.data.thinking", "true", True),
        ("model.dtype", "bfloat16", "bfloat16"),
        ("trajectories.languages", '{"zh": 1}', {"zh": 1.0}),
        ("environments.relations", '["capital_of_country"]', ("capital_of_country",)),
    ],
)
def test_an_override_replaces_one_leaf(config, name: str, text: str, value) -> None:
    changed = overridden(config, [(name, text)])
    leaf, before = changed, config
    for part in name.split("."):
        leaf, before = getattr(leaf, part), getattr(before, part)
    assert leaf == value and type(leaf) is type(value)
    assert changed.grpo.episode == config.grpo.episode


def test_an_override_without_its_part_is_that_of_every_part_that_has_it() -> None:
    config = PROFILES["pretrained"]()
    changed = overridden(config, [("lora.rank", "16"), ("lora.alpha", "8"), ("grpo.lora.rank", "4")])
    assert (changed.tools.lora.rank, changed.grpo.lora.rank) == (16, 4) and changed.dialogue is None
    assert changed.tools.lora.alpha == changed.grpo.lora.alpha == 8


def test_adapters_of_random_weights_are_refused(config) -> None:
    with pytest.raises(UsageError, match="dialogue.lora.rank is 4, and that part starts from random weights"):
        overridden(config, [("dialogue.lora.rank", "4"), ("dialogue.optimizer", "adamw")])
    assert overridden(config, [("grpo.lora.rank", "4")]).grpo.lora.rank == 4


@pytest.mark.parametrize("part", ["grpo", "evaluation"])
def test_an_engine_that_holds_no_whole_episode_is_refused_before_hours_of_training(part: str) -> None:
    config = PROFILES["pretrained"]()
    longer = [(f"{part}.episode.max_response_tokens", "800")]
    with pytest.raises(UsageError, match=f"engine.max_length is 1536, and an episode of {part} has up to 1952 tokens"):
        overridden(config, longer)
    assert overridden(config, [*longer, ("engine.max_length", "1952")]).engine.max_length == 1952
    beyond = [(f"{part}.episode.max_response_tokens", "880"), ("engine.max_length", "2432")]
    with pytest.raises(
        UsageError, match=f"model.max_positions is 2000, and an episode of {part} has up to 2032 tokens"
    ):
        overridden(config, [*beyond, ("model.max_positions", "2000")])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("grpo.learnig_rate", "1", r"the nearest is --config.grpo.learning_rate"),
        ("updates", "1", r"there is no such setting; write --config\.\w+\.steps=1$"),
        ("grpo.colour", "1", r"--config.grpo.colour: there is no such setting; --help_config lists the settings$"),
        ("grpo.steps.more", "1", "there is no such setting"),
        ("grpo.groups_per_batch", "8", "this setting is called --config.grpo.batch_size now"),
        ("dialogue.data.rows", "8", "this setting is called --config.dialogue.batch_size now"),
        ("grpo.steps", "many", r"--config.grpo.steps=many is not allowed; use a whole number from 1 to "),
        ("dialogue.data.tools", "most", r"--config.dialogue.data.tools=most is not allowed; use one of .*some"),
        ("grpo.group_size", "1", r"--config.grpo.group_size=1: GRPOConfig.group_size is 1; use a whole number from 2 "),
        ("grpo.learning_rate", "NaN", "GRPOConfig.learning_rate is nan; use a number from 0 to 100"),
        ("grpo.learning_rate", "1e999", "GRPOConfig.learning_rate is inf; use a number"),
        ("tools.checkpoint_every", "0", "SFTConfig.checkpoint_every is 0; use a whole number from 1"),
        ("dialogue.data.seed", str(2**70), "--config.dialogue.data.seed=1180591620717411303424: "),
        ("grpo.steps", "9" * 5_000, "is not allowed; use a whole number"),
        ("grpo.row_buckets", "[" * 100_000, "is not allowed; use a list"),
        ("grpo.row_buckets", "[2048, -1]", r"GRPOConfig.row_buckets\[1\] is -1; use"),
        ("trajectories.thresholds", '{"question_quality": 9, "scenario_realism": 1, "tool_necessity": 1}', "is 9; use"),
        ("trajectories.emulated_servers", '["htp"]', r"'htp'; use .* \(the nearest is http\)"),
        ("environments.relations", '["capitol_of_country"]', r"\(the nearest is capital_of_country\)"),
        ("model.dtype", "float16", "Qwen3Config.dtype is 'float16'; use one of float32, bfloat16"),
    ],
)
def test_a_bad_override_says_what_would_be_right(config, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        overridden(config, [(name, text)])


@pytest.mark.parametrize("preset", ["quickstart", "sft:0.6b", "grpo:0.6b", "environments:paper"])
def test_a_setting_of_a_few_values_names_them_all_where_it_refuses_one(preset: str) -> None:
    kind = preset.partition(":")[0]
    whole = PROFILES["quick"]() if preset == "quickstart" else load_config(preset, kind)
    few = 0
    for name in setting_names(whole):
        *outer, last = name.split(".")
        holder = functools.reduce(getattr, outer, whole)
        allowed = wording(declared(type(holder))[last])
        if match := re.match("one of (?!\\d+ names)(.*?)(, or None)?$", allowed):
            few += 1
            with pytest.raises(UsageError) as refused:
                overridden(whole, [(name, "nothing")])
            assert f"--config.{name}=nothing" in str(refused.value) and match[1] in str(refused.value)
    assert few > 0


def test_a_configuration_is_a_preset_or_a_file_of_ones_own(tmp_path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from configs.training import sft_run\nCONFIG = sft_run('14b', learning_rate=5e-6)\n")
    assert load_config(str(own)) == load_config("sft:14b")
    assert load_config("grpo:0.6b").grpo.batch_size == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sft:41b", "--config=sft:41b is neither a preset nor a file; the nearest preset is sft:4b"),
        *(
            (f"sft:{name}", "; the nearest preset is sft:4b. There are sft:auto, ")
            for name in ("qwen3-4b", "Qwen3-4B", "Qwen/Qwen3-4B", "qwen3_4b")
        ),
        ("grpo:Llama-3.1-8B-Instruct", "; the nearest preset is grpo:llama3.1-8b. There"),
        ("sft:mistral-7b", "--config=sft:mistral-7b is neither a preset nor a file; there are sft:auto, "),
        ("nowhere/own.py", "--config=nowhere/own.py is neither a preset nor a file; there are sft:auto, "),
        ("configs/sft_qwen3_14b.py", "use --config=sft:14b$"),
        ("/elsewhere/configs/grpo_qwen3_1p7b.py", "use --config=grpo:1.7b$"),
        ("configs/grpo_qwen3_30b_a3b.py", "use --config=grpo:30b-a3b$"),
    ],
)
def test_a_configuration_that_is_not_there_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no CONFIG"),
        ("{}['CONFIG']", "KeyError"),
        ("from astra_jax.sft_config import SFTConfig", "astra_jax.sft_config'; docs/architecture.md lists the modules"),
        ("from configs.training import sft_run\nCONFIG = sft_run('14b', rate=1)", "unexpected keyword argument 'rate'"),
    ],
)
def test_a_file_of_ones_own_that_does_not_work_says_why(tmp_path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises((UsageError, KeyError)) as raised:
        load_config(str(tmp_path / "own.py"))
    assert message in repr(raised.value)


def processor_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


HEAVY = {"jax", "jaxlib", "flax", "transformers", "orbax", "numpy", "aiohttp", "msgspec"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_quick_and_marks_required_flags(program: str) -> None:
    # Processor time: on a busy machine the clock shows several times as much.
    seconds = []
    for _ in range(5):
        before = processor_seconds_of_children()
        result = run("-X", "importtime", "-m", program, "--help")
        seconds.append(processor_seconds_of_children() - before)
        if seconds[-1] < 0.5:
            break
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & HEAVY and "launch.flags.cli" in imported
    assert result.returncode == 0 and min(seconds) < 0.5, seconds
    first, *more = re.split(r"^(?:most used )?flags:$|^(?=(?:\w+ )*\w+:$)", result.stdout, flags=re.M)[1:]
    assert FLAGS[program] in "".join([first, *more])
    required = first.count("(required): ")
    assert first.count("\n  --") <= max(10, required) and "(required)" not in "".join(more)
    if required:
        missing = run("-m", program)
        names = re.findall(r"--(\w+) \(required\)", first)
        assert missing.returncode == 2 and all(f"--{name}" in missing.stderr for name in names), missing.stderr


def test_every_name_in_the_sections_of_help_is_a_flag() -> None:
    listed = "".join(run("-m", program, "--help").stdout for program in PROGRAMS)
    flags = set(re.findall(r"^  --(?:\[no\])?(\w+)", listed, re.M))
    assert set(help_text.MOST_USED) <= flags
    assert re.search(r"^server hardening:\n(?:  .*\n)*  --max_connections", listed, re.M)


NOBODY = """
import pwd
def unknown(*_): raise KeyError("getpwuid(): uid not found: 12345")
pwd.getpwuid = pwd.getpwnam = unknown
"""


def as_nobody(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user id without a passwd entry and HOME, as in containers."""
    (folder / "sitecustomize.py").write_text(NOBODY)
    others = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "HF_HOME")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=others | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("program", by_day(PROGRAMS, "launch.evaluate", "launch.sft"))
def test_help_is_the_same_without_a_home_and_docstrings_and_with_warnings_as_errors(tmp_path, program: str) -> None:
    """`astra evaluate` looked for the home directory as it was imported; -OO removed what settings mean."""
    plain = ended(program, "--help")
    odd = as_nobody(tmp_path, "-W", "error", "-OO", "-m", program, "--help")
    assert (odd.returncode, odd.stderr) == (plain.code, plain.errors) == (0, "")
    assert odd.stdout.partition("flags:\n")[2] == plain.out.partition("flags:\n")[2] != ""


@pytest.mark.nightly
def test_small_jobs_are_the_same_without_a_home_and_docstrings_and_with_warnings_as_errors(tmp_path) -> None:
    made = as_nobody(
        tmp_path, "-m", "launch.environments", f"--workdir={tmp_path / 'run'}", "--config.count=3",
        PYTHONOPTIMIZE="2", PYTHONWARNINGS="error",
    )  # fmt: skip
    assert made.returncode in (0, 4) and "Traceback" not in made.stderr, made.stderr
    own = tmp_path / "own.jsonl"
    own.write_text("{}\n")
    arguments = ("-m", "launch.sft", "--config=sft:0.6b", f"--workdir={tmp_path / 'sft'}")
    refused = as_nobody(tmp_path, *arguments, "--weights=nowhere", f"--data={own}")
    assert refused.returncode == 2 and "has no home directory; set XDG_CACHE_HOME to a folder" in refused.stderr
    refused = as_nobody(tmp_path, *arguments, "--weights=nowhere", f"--data={own}", HOME="/proc/none")
    assert refused.returncode == 2 and "/proc/none/.cache/astra-jax/data cannot be made" in refused.stderr
    refused = as_nobody(tmp_path, *arguments, "--weights=nowhere", "--data=hub:a/b")
    assert refused.returncode == 2 and "has no home directory; set HF_HOME" in refused.stderr, refused.stderr
    assert not (ROOT / "~").exists()


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_unknown_flag_is_refused_with_the_nearest(program: str) -> None:
    flag = FLAGS[program]
    wrong = flag[:-2] + flag[-1] + flag[-2]
    result = ended(program, f"--{wrong}=x")
    assert result.code == 2 and result.line == result.errors.rstrip("\n")
    assert wrong in result.line and flag in result.line.replace(wrong, "")


def test_errors_of_use_are_one_line(tmp_path) -> None:
    for arguments, message in [
        (
            ["--config.grpo.updtes=3"],
            "error: --config.grpo.updtes: there is no such setting; the nearest is --config.grpo.steps",
        ),
        (["stray"], "error: unexpected argument 'stray'"),
    ]:
        assert message in ended("launch.quickstart", f"--workdir={tmp_path}", *arguments).line


def test_one_argument_may_be_given_without_its_flag(tmp_path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for arguments, message in [
        ([nowhere, "--port=0"], f"error: no dataset at {nowhere}"),
        (["--port=0", nowhere], f"error: no dataset at {nowhere}"),
        ([], "error: no dataset is given; write astra inspect DIR"),
        ([nowhere, "stray"], "error: unexpected argument 'stray'; this program takes one argument, --data"),
        (["stray", f"--data={nowhere}"], "error: unexpected argument 'stray'"),
    ]:
        assert message in ended("launch.inspect", *arguments).line


def test_every_program_is_tested() -> None:
    assert set(PROGRAMS) == set(FLAGS)


def test_programs_that_compute_with_a_model_do_so_in_the_environment_for_cpus() -> None:
    """`astra grpo` did not, unlike the GRPO of the quickstart."""
    computing = {f"launch.{name}" for name in ("sft", "grpo", "serve", "difficulty", "rehearse", "quickstart")}
    for program in PROGRAMS:
        file = ROOT / program.replace(".", "/")
        file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        source = file.read_text(encoding="utf-8")
        assert ("keep_programs" in source or "policies.load(" in source) == (program in computing)
        assert (f'cli.with_cpu_environment("{program}", large=' in source) == (program in computing), program
        # Of any model: with a small one's malloc a large one's memory grows with each checkpoint.
        assert (f'("{program}", large=True)' in source) == (program in computing - {"launch.quickstart"}), program


def test_a_preset_of_the_paper_is_what_the_paper_says_and_stands_beside_its_table(capsys) -> None:
    trajectories = load_config("trajectories:paper", "trajectories")
    assert (trajectories.min_length, trajectories.max_length, trajectories.tool_counts) == (2, 5, (2, 3))
    assert trajectories.failures.rate == 0.2 and trajectories.min_tools == 3 and not trajectories.behaviours
    assert trajectories.group_sizes == (2, 3) and 0 < trajectories.several_servers < 1
    environments = overridden(load_config("environments:paper", "environments"), [("count", "7")])
    assert (environments.min_hops, environments.max_hops, environments.hardened_share) == (3, 5, 1.0)
    assert environments.count == 7 and load_config("environments:paper", "environments").count == 6_596
    with pytest.raises(UsageError, match="is of type EnvironmentsConfig; this program takes one of TrajectoriesConfig"):
        load_config("environments:paper", "trajectories")
    with pytest.raises(UsageError, match="the nearest preset is trajectories:paper"):
        load_config("trajectories:papr", "trajectories")
    print_table({"sub-questions": "8; a sample 4.00", "hops": "mean 3"}, "environments:paper")
    said = capsys.readouterr().out
    assert "sub-questions                    8; a sample 4.00\n" in said and "paper: 28,794; a sample 4.37" in said
    assert said.count("paper: ") == 1 and "differs: " in said
    print_table({"sub-questions": "8; a sample 4.00"}, "")
    assert capsys.readouterr().out == "sub-questions                    8; a sample 4.00\n"
