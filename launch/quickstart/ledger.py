"""Results of the finished stages of a run: one JSON file each, written atomically, in the workdir of one run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astra_jax.base.files import write_text
from astra_jax.run.identity import check_same_run
from synthesis.core.workdir import ENDING, LOCK, WorkdirError, locked

_PART = ".part"
"""Suffix, instead of `.json`, of a stage that is not finished."""


class Ledger:
    """The finished stages of the run that owns `workdir`. Locks the workdir as long as it lives.

    Args:
        workdir: created if it does not exist.
        identity: everything that determines the run's results (`run_identity`); stored in `run.json`.

    Raises:
        WorkdirError: another run owns the workdir, it has files and belongs to no run, or a process is using it.
    """

    def __init__(self, workdir: Path, identity: Mapping[str, Any]) -> None:
        self.workdir = workdir
        file = workdir / "run.json"
        if workdir.exists() and not workdir.is_dir():
            raise WorkdirError(f"{workdir} is a file; give --workdir a folder")
        begun = {LOCK, ENDING, f"{file.name}.partial"}  # what is there of a run that was killed as it began
        if workdir.exists() and not file.exists() and any(p.name not in begun for p in workdir.iterdir()):
            raise WorkdirError(f"{workdir} has files, but not those of a run; give --workdir a new or an empty folder")
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(workdir))
        if file.exists():
            check_same_run(read_json(file), identity, workdir)
        else:
            write_json(file, dict(identity))

    def result(self, stage: str) -> dict[str, Any] | None:
        """Return the result of a finished stage, or None."""
        file = self._file(stage)
        return read_json(file) if file.exists() else None

    def spent(self, stage: str) -> Mapping[str, Any]:
        """Return `seconds` and `peak_rss_bytes` of the starts that did not finish a stage; killed starts are not
        included."""
        file = self._file(stage).with_suffix(_PART)
        return read_json(file) if file.exists() else {"seconds": 0.0, "peak_rss_bytes": 0}

    def leave(self, stage: str, spent: Mapping[str, Any]) -> None:
        """Store what all starts of an unfinished stage have used so far."""
        write_json(self._file(stage).with_suffix(_PART), dict(spent))

    def finish(self, stage: str, result: Mapping[str, Any]) -> None:
        write_json(self._file(stage), dict(result))
        self._file(stage).with_suffix(_PART).unlink(missing_ok=True)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of finished stages by name."""
        return {file.stem: read_json(file) for file in sorted((self.workdir / "stages").glob("*.json"))}

    def close(self) -> None:
        self._lock.close()

    def _file(self, stage: str) -> Path:
        return self.workdir / "stages" / f"{stage}.json"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old file or the new one, also after a crash."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        WorkdirError: the file is not JSON, so another program wrote it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkdirError(f"{path} is not JSON ({error}); delete it, and its stage runs again") from None
