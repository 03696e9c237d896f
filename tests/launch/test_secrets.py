"""Secrets that are planted in every file and variable that can hold one stay there, whatever services make of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from grpo_world import grpo_flags, make_grpo_world
from programs_world import SYNTHESIS, Ended, Programs, programs
from rollout_world import make_environment

from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment

MARK = "plantedsecret"
VARIABLES = ("HF_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "GOOGLE_API_KEY", "WANDB_API_KEY")
SMALL = ("--config.count=2", '--config.languages={"en": 1}')


class _Echo(BaseHTTPRequestHandler):
    """Repeats all that it was sent: refusals as /STATUS/..., answers that hold it as /200/... ."""

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        status = int(self.path.split("/")[1])
        shown = "; ".join(f"{name}: {value}" for name, value in self.headers.items() if MARK in value)
        self.server.seen.append(shown)  # type: ignore[attr-defined]
        message = {"role": "assistant", "content": f"You sent {shown}"}
        said = {
            "error": {"message": f"Incorrect key provided. You sent {shown}"},
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 60, "completion_tokens": 40},
            "status": shown,
        }
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if 300 <= status < 400:
            self.send_header("Location", f"http://elsewhere/?{shown}".replace(" ", ""))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815  # as the library calls them

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class Echo(ThreadingHTTPServer):
    """What was seen of the secrets: one string for each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.seen: list[str] = []


@contextmanager
def echoing() -> Iterator[tuple[Echo, str]]:
    server = Echo()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.environments", tmp_path_factory.mktemp("said"), heavy=SYNTHESIS) as made:
        yield made


def planted(folder: Path, name: str) -> str:
    """A file with a secret of its own."""
    file = folder / f"{name}.secret"
    file.write_text(f"{MARK}-{name}-0123456789abcdef\n")
    return str(file)


def in_nothing(ended: Ended, *folders: Path) -> None:
    """Neither said, nor in a file that the program wrote: text, databases (which are not compressed), records."""
    assert MARK not in ended.out and MARK not in ended.errors, [
        line for line in (ended.out + ended.errors).splitlines() if MARK in line
    ]
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".secret"]
        assert not [path for path in files if MARK.encode() in path.read_bytes()]


def variables() -> dict[str, str]:
    return {name: f"{MARK}-{name}-0123456789abcdef" for name in VARIABLES}


@pytest.mark.parametrize("status", [401, 302, 403, 200])
def test_what_asks_teachers_keeps_their_keys(run: Programs, tmp_path: Path, status: int) -> None:
    """An endpoint that refuses, sends elsewhere, or answers with the key in it; of each role its own."""
    workdir = tmp_path / "run"
    with echoing() as (server, url):
        judge = {"url": f"{url}/{status}/judge/v1", "model": "j", "key_file": planted(tmp_path, "judge")}
        ended = run(
            f"--workdir={workdir}", *SMALL, f"--teacher_url={url}/{status}/v1", "--teacher_model=m",
            "--teacher_tries=2", f"--teacher_key_file={planted(tmp_path, 'teacher')}",
            f"--roles={json.dumps({'judge': judge})}", "--teacher_answer_form=json_schema", **variables(),
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
