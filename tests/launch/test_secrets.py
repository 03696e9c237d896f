"""Secrets that are planted in every file and variable that can hold one stay there, whatever services make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpo_world import grpo_flags, make_grpo_world
from programs_world import Programs, programs
from rollout_world import make_environment
from secrets_world import MARK, echoing, in_nothing, planted, variables

from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment

SMALL = ("--config.count=2", '--config.languages={"en": 1}')


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.environments", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.mark.parametrize("status", [401, 302, 403, 200])
def test_what_asks_teachers_keeps_their_keys(run: Programs, tmp_path: Path, status: int) -> None:
    """An endpoint that refuses, sends elsewhere, or answers with the key in it; of each role its own."""
    workdir = tmp_path / "run"
    with echoing() as (server, url):
        judge = {"url": f"{url}/{status}/judge/v1", "model": "j", "key_file": planted(tmp_path, "judge")}
        ended = run(
            f"--workdir={workdir}", *SMALL, f"--teacher_url={url}/{status}/v1", "--teacher_model=m",
            "--teacher_tries=2", f"--teacher_key_file={planted(tmp_path, 'teacher')}",
            f"--roles={json.dumps({'judge': judge})}", "--teacher_structured_output=json_schema", **variables(),
        )  # fmt: skip
        assert any("Bearer plantedsecret-teacher" in shown for shown in server.seen)
    assert ended.code != 0 and "Traceback" not in ended.errors, ended
    assert status == 200 or "[key]" in ended.errors  # it says what the endpoint said, but for that
    in_nothing(ended, workdir)


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("launch.environments", ("--teacher_model=m", "--judge_own_text", "--teacher_url")),
        ("launch.environments", ("--sandbox_url",)),
        ("launch.evaluate", ("--suites=environments", "--sources=environments=.", "--model=m", "--model_url")),
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(
    run: Programs, tmp_path: Path, module: str, flags: tuple[str, ...]
) -> None:
    who = f"me:{MARK}-address"
    address = f"{flags[-1]}=http://{who}@127.0.0.1:9/v1"
    ended = run(f"--workdir={tmp_path / 'run'}", *flags[:-1], address, module=module)
    assert "has a user or password before its host" in ended.line
    in_nothing(ended, tmp_path)


def test_what_asks_sandboxes_keeps_their_token(run: Programs, tmp_path: Path) -> None:
    for status in (401, 503, 200):
        workdir = tmp_path / f"run{status}"
        with echoing() as (server, url):
            token = f"--sandbox_key_file={planted(tmp_path, 'sandbox')}"
            ended = run(f"--workdir={workdir}", *SMALL, f"--sandbox_url={url}/{status}", token, **variables())
            assert any("Bearer plantedsecret-sandbox" in shown for shown in server.seen)
        assert ended.code in (2, 69), ended
        in_nothing(ended, workdir)


def test_what_evaluates_keeps_the_keys_of_its_endpoints(run: Programs, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out"
    write_dataset(held_out, ToolEnvironment, [make_environment("france", "France")], card={})
    for status in (401, 400):
        workdir = tmp_path / f"run{status}"
        with echoing() as (server, url):
            ended = run(
                f"--workdir={workdir}", f"--model_url={url}/{status}/v1", "--model=m", "--suites=environments",
                f"--sources=environments={held_out}", f"--model_key_file={planted(tmp_path, 'evaluated')}",
                module="launch.evaluate", **variables(),
            )  # fmt: skip
            assert any("Bearer plantedsecret-evaluated" in shown for shown in server.seen)
        assert ended.code != 0, ended
        in_nothing(ended, workdir)


def test_a_key_of_tls_that_cannot_be_read_is_not_shown(run: Programs, tmp_path: Path) -> None:
    """A file that is none, and one whose form alone is that of a key."""
    pem = tmp_path / "pem.secret"
    pem.write_text(f"-----BEGIN {'PRIVATE'} KEY-----\n{MARK}0123456789abcdef\n-----END {'PRIVATE'} KEY-----\n")
    token = f"--key_file={planted(tmp_path, 'key')}"
    for key in (planted(tmp_path, "tls"), str(pem)):
        flags = (f"--tls_cert={key}", f"--tls_key={key}", token, "--port=0")
        ended = run(*flags, module="launch.sandbox_server", **variables())
        assert ended.code == 2 and "certificate" in ended.line
        in_nothing(ended, tmp_path)


@pytest.mark.slow
def test_what_trains_keeps_the_keys_of_its_servers(run: Programs, tmp_path: Path) -> None:
    make_grpo_world(tmp_path)
    for status in (401, 500):
        workdir = tmp_path / f"run{status}"
        with echoing() as (server, url):
            ended = run(
                *grpo_flags(tmp_path), f"--workdir={workdir}",
                f"--rollout_url={url}/{status}", "--rollout_sync=plugin",
                f"--rollout_key_file={planted(tmp_path, 'rollout')}",
                f"--rollout_sync_key_file={planted(tmp_path, 'sync')}",
                module="launch.grpo", **variables(),
            )  # fmt: skip
            assert any(MARK in shown for shown in server.seen)
        assert ended.code in (2, 69), ended.errors[-3000:]
        in_nothing(ended, workdir)
