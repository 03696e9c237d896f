"""The teacher's flags: what they refuse, and a run that stops with one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from absl import flags
from absl.testing import flagsaver
from programs_world import Ended, ended

from launch.flags.endings import FELL_SHORT
from launch.flags.summaries import made

ENDPOINT = ["--teacher_url=http://127.0.0.1:9/v1", "--teacher_model=m", "--judge_own_text"]


def run(workdir: Path, *arguments: str) -> Ended:
    return ended("launch.environments", f"--workdir={workdir}", "--config.count=2", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--teacher_token_budget=5"], "--teacher_token_budget is for an endpoint: give --teacher_url too"),
        ([*ENDPOINT, "--teacher_prices=1"], "--teacher_prices=1: write two numbers"),
        ([*ENDPOINT, "--teacher_money_budget=5"], "--teacher_money_budget=5.0 needs prices for model"),
        (["--teacher_temperature=0.5"], "--teacher_temperature is for an endpoint: give --teacher_url too"),
        ([*ENDPOINT, "--teacher_extra_body={"], "--teacher_extra_body={: Input data was truncated"),
        ([*ENDPOINT, '--teacher_extra_body={"model": "n"}'], "extra_body names model, which a request decides itself"),
        (ENDPOINT[:2], "'m' is the author and the only judge of what it writes"),
        (["--judge_own_text"], "--judge_own_text is for an endpoint: give --teacher_url too"),
        (['--roles={"judge": {"model": "j"}}'], "--roles names judge, but no model answers in the other roles; give"),
        (['--config.languages={"de": 1}'], "languages: the offline teacher writes en and zh, not de; leave it out"),
        ([*ENDPOINT, "--teacher_tokens_per_minute=-1"], "--teacher_tokens_per_minute=-1: use a number above 0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in run(tmp_path, *arguments).line


def test_the_flags_have_the_defaults_of_the_settings() -> None:
    from launch.flags import teachers
    from synthesis.core.endpoint_settings import OpenAITeacherConfig, StructuredOutputSetting

    config = OpenAITeacherConfig("http://x/v1", "m")
    for name, flag in (
        ("temperature", teachers._TEMPERATURE),
        ("max_tokens", teachers._MAX_TOKENS),
        ("timeout_seconds", teachers._TIMEOUT),
        ("tries", teachers._TRIES),
        ("structured_output", teachers._STRUCTURED_OUTPUT),
    ):
        assert flag.default == getattr(config, name), name
    parser: Any = flags.FLAGS["teacher_structured_output"].parser
    assert tuple(parser.enum_values) == get_args(StructuredOutputSetting)


def test_a_synthesis_that_falls_short_says_so_and_why_with_a_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rejected = {"decompose": {"teacher_failed": 2, "mixed_split": 109}, "validate": {"low_quality": 1}}
    assert made(11, "environments", wanted=120, rejected=rejected) == FELL_SHORT == 4
    assert capsys.readouterr().err == (
        "error: 11 of 120 became environments; the most frequent rejections were 109 mixed_split in decompose, "
        "2 teacher_failed in decompose, 1 low_quality in validate; examples are above\n"
    )
    assert made(0, "environments", wanted=120, rejected={}) == FELL_SHORT
    assert capsys.readouterr().err == "error: none of 120 became environments\n"
    assert made(60, "environments", wanted=120, rejected=rejected) == made(0, "x", wanted=0, rejected={}) == 0
    assert not capsys.readouterr().err


def test_a_run_that_stops_says_what_is_finished_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"question": "How many seats has the aircraft?", "domain": "flights"}')
    stopped = run(tmp_path, *ENDPOINT, "--teacher_mode=replay", f"--config.questions={tmp_path}/questions.jsonl")
    line = stopped.line
    assert f"{tmp_path}/teacher.sqlite has no answer to a request for DecompositionAnswer" in line
    stage, _, state = line.partition("; stage ")[2].partition(": ")
    assert stage.startswith("decompose/") and state.startswith("0 of 2 inputs are finished and kept in ")


@pytest.fixture
def roles_flag() -> Iterator[Callable[[str], None]]:
    """Sets --roles, as in a program that has parsed its flags."""
    from launch.flags import roles, teachers  # noqa: F401  (flags that are defined inside of `flagsaver` end with it)

    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        yield lambda value: setattr(flags.FLAGS, roles.ROLES.name, value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.json", "--roles: No such file or directory; give JSON, or the name of a file with JSON"),
        ("{", "--roles: Input data was truncated"),
        ('{"judge": 5}', "--roles: Expected `object | array`, got `int`"),
        ('{"jury": {}}', "--roles: there is no role 'jury'; there are author, agent, emulator, user, judge, embedder"),
        ('{"judge": {"heat": 0}}', "--roles: judge has no setting 'heat'; there are url, model"),
        ('{"judge": {"answer_form": "text"}}', "judge.answer_form: this setting is called structured_output now"),
        ('{"judge": {"tries": 0}}', "--roles: judge.tries is 0; use a whole number"),
        ('{"judge": {"url": "h:1", "model": "j"}}', "--roles: judge.url is 'h:1': write http://HOST:PORT/v1"),
        ('{"judge": {"url": "http://h/v1"}}', "--roles: judge.url is http://h/v1: give model too"),
        ('{"judge": {"prices": 5}}', "--roles: judge.prices is 5: write two numbers, as [0.5, 2]"),
        ('{"judge": {"key_file": "none"}}', "--roles: judge.key_file=none is not a file with a key on its first line"),
        ('{"embedder": {"model": "e"}}', "--roles: embedder has no url"),
        (
            '{"embedder": [{}, {}]}',
            "--roles: embedder has 2 models, but vectors of different models cannot be compared; give one",
        ),
        ('{"embedder": {"url": "http://h/v1", "model": "e", "weight": 1}}', "embedder has no setting 'weight'"),
    ],
)
def test_roles_that_cannot_be_read_are_refused_by_name(
    roles_flag: Callable[[str], None], given: str, said: str
) -> None:
    from launch.flags import cli, roles

    roles_flag(given)
    with pytest.raises(cli.UsageError, match=re.escape(said)):
        roles.roles_from_flags()
        roles.embedder_from_flags()


def test_a_file_of_roles_is_what_both_programs_ask(roles_flag: Callable[[str], None], tmp_path: Path) -> None:
    """Read in this process: what the flags make of it."""
    from launch.flags import roles, teachers

    (tmp_path / "key").write_text("of-the-judge\n")
    judge = {"url": "http://j/v1", "model": "j", "key_file": f"{tmp_path}/key", "weight": 3, "prices": [1, 2]}
    given = {
        "judge": [{**judge, "concurrency": 4, "requests_per_minute": 60}, {"model": "k"}],
        "user": {"temperature": 0.5},
        "embedder": {"url": "http://e/v1", "model": "e", "batch": 8},
    }
    (tmp_path / "roles.json").write_text(json.dumps(given))
    roles_flag(str(tmp_path / "roles.json"))
    made, embedder = roles.roles_from_flags(), roles.embedder_from_flags()
    assert teachers.embedder_from_flags().config == embedder  # type: ignore[attr-defined]
    first, second = made["judge"]
    assert (first.base_url, first.model, first.api_key, first.weight) == ("http://j/v1", "j", "of-the-judge", 3)
    assert (first.price_prompt, first.price_completion, first.concurrency, first.requests_per_minute) == (1, 2, 4, 60)
    assert second.model == "k" and second.base_url is None and made["user"][0].temperature == 0.5
    assert embedder is not None and (embedder.base_url, embedder.model, embedder.batch) == ("http://e/v1", "e", 8)
    assert set(made) == {"judge", "user"}


def test_messages_name_settings_as_the_user_gave_them(roles_flag: Callable[[str], None], tmp_path: Path) -> None:
    from launch.flags import teachers
    from synthesis.core.endpoint_settings import OpenAITeacherConfig

    roles_flag('{"judge": {"url": "http://j/v1", "model": "j", "max_tokens": 9}}')
    for flag in ("--teacher_url=http://t/v1", "--teacher_model=t", "--teacher_token_budget=70"):
        name, _, value = flag.removeprefix("--").partition("=")
        setattr(flags.FLAGS, name, int(value) if value.isdigit() else value)
    config: OpenAITeacherConfig = teachers.endpoint_from_flags(tmp_path).config  # type: ignore[union-attr]
    (author,), (judge,) = config.models("author"), config.models("judge")
    assert [author.written(name) for name in ("base_url", "model", "unusable_answers", "token_budget")] == [
        "--teacher_url=http://t/v1", "--teacher_model=t", "--teacher_unusable_answers=50", "--teacher_token_budget=70",
    ]  # fmt: skip
    assert [judge.written(name) for name in ("base_url", "max_tokens", "unusable_answers")] == [
        "url=http://j/v1 of role judge in --roles", "max_tokens=9 of role judge in --roles",
        "--teacher_unusable_answers=50",
    ]  # fmt: skip
    assert OpenAITeacherConfig("http://t/v1", "t").written("base_url") == "base_url=http://t/v1"


def test_a_preview_shows_every_stage_and_keeps_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(tmp_path / "run", "--preview=2", f"--preview_page={page}")
    assert done.code == 0, done.errors
    for name in ("decompose", "validate", "implement", "merge", "distract", "verify"):
        assert (
            re.search(f"^{name}: [012] of [12] records passed", done.out, re.MULTILINE)
            and f"<h2>{name}</h2>" in page.read_text()
        )
    assert "expected for the whole run" in done.out and [path.name for path in tmp_path.iterdir()] == ["page.html"]
    refused = run(tmp_path / "run", "--preview=2", f"--preview_page={tmp_path}/run/page.html")
    assert "is inside --workdir, where a preview writes nothing" in refused.line
    refused = run(tmp_path / "run", "--preview=2", *ENDPOINT, f"--teacher_recording={tmp_path}/kept.sqlite")
    assert "--teacher_recording has no effect with --preview" in refused.line


OWN_TEACHER = """
import asyncio, sys
from pathlib import Path
from absl import flags
from launch.flags import executors

flags.FLAGS(["program", "--teacher_url=http://127.0.0.1:1/v1", "--teacher_model=m", "--judge_own_text"])

async def opened() -> None:
    async with executors.executor_from_flags(Path(sys.argv[1])):
        print(*(name for name in sys.modules if name.startswith("synthesis.offline")))

asyncio.run(opened())
"""


def test_a_teacher_of_ones_own_loads_no_demo(tmp_path) -> None:
    command = [sys.executable, "-c", OWN_TEACHER, str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended.stderr
