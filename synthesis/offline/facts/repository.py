"""The packaged git server's repository: small, real, and the same bytes everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from synthesis.core.stages import Rejected

_COMMITS = (
    ("Ada Lindgren", "Start the project", {"README.md": "# Weather\n", "weather/station.py": "STATIONS = []\n"}),
    ("Bo Chen", "Read station files", {"weather/reader.py": "def read(path):\n    return open(path).read()\n"}),
    ("Ada Lindgren", "Add the list of stations", {"weather/station.py": 'STATIONS = ["Oslo", "Lima"]\n'}),
    ("Carla Diaz", "Add unit tests", {"tests/test_reader.py": "def test_read():\n    assert True\n"}),
    ("Bo Chen", "Document the file format", {"docs/format.md": "# File format\n\nOne line a day.\n"}),
    ("Dev Patel", "Write daily averages", {"weather/average.py": "def average(x):\n    return sum(x) / len(x)\n"}),
)
_BRANCHES = (
    ("feature/charts", "Carla Diaz", "Draw a chart", {"weather/chart.py": "def chart(x):\n    return x\n"}),
    ("feature/export", "Dev Patel", "Export to CSV", {"weather/export.py": "def export(x):\n    return x\n"}),
    ("fix/encoding", "Ada Lindgren", "Read files as UTF-8", {"docs/encoding.md": "# Encoding\n\nUTF-8.\n"}),
    ("docs/install", "Bo Chen", "Explain the installation", {"docs/install.md": "# Installation\n"}),
)
_TAGS = {"v0.1": 1, "v0.2": 3, "v1.0": 5}
"""Tag → index of its commit on main."""


def make_repository(path: Path) -> None:
    """Make the repository at `path` unless it is there: fixed authors and dates, so fixed hashes.

    Raises:
        Rejected: `mcp_server_unavailable`: git is not installed, or fails.
    """
    if (path / ".git").is_dir():
        return
    git = shutil.which("git")
    if git is None:
        raise Rejected("mcp_server_unavailable", "the git server needs the command `git`; install git")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _fill(git, partial)
    except subprocess.CalledProcessError as error:
        raise Rejected(
            "mcp_server_unavailable", f"`{' '.join(error.cmd[1:4])}` failed: {error.stderr.strip()}"
        ) from None
    partial.rename(path)


def _fill(git: str, path: Path) -> None:
    clock = 1_767_600_000  # 5 January 2026, then one commit a day

    def run(*arguments: str, author: str = "Ada Lindgren") -> None:
        mail = f"{author.split()[0].lower()}@example.org"
        people = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
                  for what, value in (("NAME", author), ("EMAIL", mail), ("DATE", f"{clock} +0000"))}  # fmt: skip
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **people}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | settings
        subprocess.run([git, *arguments], cwd=path, env=environment, check=True, capture_output=True, text=True)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(text.encode())

    run("init", "--quiet", "--object-format=sha1", "--initial-branch=main")
    run("config", "core.autocrlf", "false")
    for author, message, files in _COMMITS:
        write(files)
        run("add", "--all", author=author)
        run("commit", "--quiet", "--message", message, author=author)
        clock += 86_400
    for tag, index in _TAGS.items():
        run("tag", tag, f"HEAD~{len(_COMMITS) - 1 - index}")
    for branch, author, message, files in _BRANCHES:
        run("checkout", "--quiet", "-b", branch, "main")
        write(files)
        run("add", "--all", author=author)
        run("commit", "--quiet", "--message", message, author=author)
        clock += 86_400
    run("checkout", "--quiet", "main")
    write({"docs/roadmap.md": "# Roadmap\n"})
    run("add", "--all")
    write({"README.md": "# Weather\n\nDaily averages of many stations.\n"})
