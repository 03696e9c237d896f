"""Which stages of a run are finished: one JSON file each, written whole or not at all, in a workdir of one run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astra_jax.base.files import write_text
from astra_jax.run.identity import check_same_run
from synthesis.core.workdir import LOCK, WorkdirError, locked

_PART = ".part"
"""In place of `.json`, of a stage that is not finished."""


class Ledger:
    """The finished stages of the run that owns `workdir`. Locks the workdir as long as it lives.

    Args:
        workdir: made if it is not there.
        identity: what decides the run's results (`run_identity`); kept in `run.json`.

    Raises:
        WorkdirError: another run owns the workdir, it is not empty and no run's, or a process is using it.
    """

    def __init__(self, workdir: Path, identity: Mapping[str, Any]) -> None:
        self.workdir = workdir
        file = workdir / "run.json"
        if workdir.exists() and not workdir.is_dir():
            raise WorkdirError(f"{workdir} is a file; give --workdir a folder")
        begun = {LOCK, f"{file.name}.partial"}  # what is there of a run that was killed as it began
        if workdir.exists() and not file.exists() and any(p.name not in begun for p in workdir.iterdir()):
            raise WorkdirError(f"{workdir} holds other things than a run; give --workdir a new or an empty folder")
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(workdir))
        if file.exists():
            check_same_run(read_json(file), identity, workdir)
        else:
            write_json(file, dict(identity))

    def result(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage returned, or None."""
        file = self._file(stage)
        return read_json(file) if file.exists() else None

    def spent(self, stage: str) -> Mapping[str, Any]:
        """`seconds` and `peak_rss_bytes` of the starts that did not finish it; of one that was killed nobody knows."""
        file = self._file(stage).with_suffix(_PART)
        return read_json(file) if file.exists() else {"seconds": 0.0, "peak_rss_bytes": 0}

    def leave(self, stage: str, spent: Mapping[str, Any]) -> None:
        """It is not finished, and this is what all starts so far have spent."""
        write_json(self._file(stage).with_suffix(_PART), dict(spent))

    def finish(self, stage: str, result: Mapping[str, Any]) -> None:
        write_json(self._file(stage), dict(result))
        self._file(stage).with_suffix(_PART).unlink(missing_ok=True)

    def results(self) -> dict[str, dict[str, Any]]:
        """By stage, those that are finished."""
        return {file.stem: read_json(file) for file in sorted((self.workdir / "stages").glob("*.json"))}

    def close(self) -> None:
        self._lock.close()

    def _file(self, stage: str) -> Path:
        return self.workdir / "stages" / f"{stage}.json"


def write_json(path: Path, value: Any) -> None:
    """Atomically: a reader sees the old file or the new one, also after a crash."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))


def read_json(path: Path) -> Any:
    """
    Raises:
        WorkdirError: not JSON: something else wrote it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkdirError(f"{path} is not JSON ({error}); delete it, and its stage runs again") from None
