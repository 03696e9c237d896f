"""Secrets that are planted in files and variables, a service that repeats them, and where they must not be found."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from programs_world import Ended

MARK = "plantedsecret"
VARIABLES = ("HF_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "GOOGLE_API_KEY", "WANDB_API_KEY")


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


def planted(folder: Path, name: str) -> str:
    """A file with a secret of its own."""
    file = folder / f"{name}.secret"
    file.write_text(f"{MARK}-{name}-0123456789abcdef\n")
    return str(file)


def variables() -> dict[str, str]:
    return {name: f"{MARK}-{name}-0123456789abcdef" for name in VARIABLES}


def in_files(*folders: Path) -> list[str]:
    """Where a secret is found: text, databases (which are not compressed), records."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".secret"]
    return [str(path) for path in files if MARK.encode() in path.read_bytes()]


def in_nothing(ended: Ended, *folders: Path) -> None:
    """Neither said, nor in a file that the program wrote."""
    assert MARK not in ended.out and MARK not in ended.errors, [
        line for line in (ended.out + ended.errors).splitlines() if MARK in line
    ]
    assert not in_files(*folders)
