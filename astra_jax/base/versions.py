"""Version of the code that made something."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path


def commit(folder: Path) -> str | None:
    """Return the commit of a folder's checkout, with a `+` if tracked files were changed; None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def code_version() -> str:
    """Return the commit of this code, or where it is installed the version of its package; of this process, once."""
    found = commit(Path(__file__).parent)
    if found is not None:
        return found
    try:
        return metadata.version("astra-jax")
    except metadata.PackageNotFoundError:
        return "unknown"
