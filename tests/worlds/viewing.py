"""What the tests of `astra inspect` and `astra watch` share: a server as a process, requests, a browser's steps."""

from __future__ import annotations

import base64
import http.client
import os
import re
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from programs_world import programs

ROOT = Path(__file__).parent.parent.parent
INJECTION = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>\"'&"


def command(dataset: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "launch.inspect", f"--data={dataset}", "--port=0", *more]


@contextmanager
def serving(dataset: Path, *more: str) -> Iterator[int]:
    """The port of a server that is there for a while, and then ends as it should."""
    with tempfile.TemporaryDirectory() as folder, programs("launch.inspect", Path(folder)) as start:
        process = start.begin(*command(dataset, *more)[3:])
        while process.poll() is None and not process.said().endswith("\n"):
            time.sleep(0.01)
        line = process.said()
        found = re.fullmatch(
            r"\d+ (?:environments|trajectories|results|groups) on http://[^:]+:(\d+)/(?:, sandbox tier [ABC])?\n", line
        )
        assert found, line + process.errors()
        try:
            yield int(found[1])
        finally:
            os.kill(process.pid, signal.SIGTERM)
            ended = process.wait(60)
        assert ended.code == 0 and ended.out == f"{line}stopped\n"


def send(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


def follow(browser, selector: str) -> None:
    """Click on what leads to another page, and wait until this one is gone."""
    browser.execute_script("window.before = true")
    browser.find_element("css selector", selector).click()
    until(lambda: browser.execute_script("return document.readyState === 'complete' && !window.before"))


def stored_runs(folder: Path) -> Path:
    """The folder, with workdirs of real runs of the version before."""
    with tarfile.open(ROOT / "tests" / "data" / "version_0_1.tar.xz") as archive:
        # As an attribute, which Python before 3.11.4 passes over: Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(browser) -> list[Any]:
    return browser.find_elements("css selector", "table.rows tbody tr")


def text_of(browser) -> str:
    return browser.find_element("tag name", "body").text


def fits(browser) -> bool:
    """Whether nothing is wider than the window."""
    return browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
