"""`run.json`: a record of a run's configuration, versions, hardware and starts, for later reference."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

import astra_jax
from astra_jax.base.files import write_text
from astra_jax.base.versions import commit
from synthesis.core.workdir import WorkdirError

FILE = "run.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "array-record", "tokenizers", "numpy")


def write_run_record(workdir: epath.Path, config: Any) -> epath.Path:
    """Write `workdir/run.json`: the configuration, versions, hardware, and a line for each start of the run.

    Args:
        config: a dataclass, all of whose settings are JSON.

    Raises:
        WorkdirError: the existing file is not a record.
    """
    path = workdir / FILE
    before = _read(path)
    _write(path, {**before, "config": asdict(config), "starts": [*before.get("starts", []), start_of_run()]})
    return path


def write_changes(workdir: epath.Path, changes: Sequence[Mapping[str, Any]]) -> None:
    """Record in `workdir/run.json` which settings changed at which step on resume.

    Raises:
        WorkdirError: the existing file is not a record.
    """
    path = workdir / FILE
    _write(path, {**_read(path), "changes": list(changes)})


def _read(path: epath.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
        list(found.get("starts", []))
    except (ValueError, AttributeError, TypeError) as error:
        raise WorkdirError(f"{path} is not the record of a run ({error}); delete it, it is only for people") from None
    return dict(found)


def _write(path: epath.Path, record: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=1) + "\n")


def start_of_run() -> dict[str, Any]:
    """Return time, command, commit, versions and hardware of this start as JSON values."""
    import jax  # here, so that benchmarks can ask for the commit without it

    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(Path(astra_jax.__file__).parent),
        "versions": {"astra-jax": astra_jax.__version__, "python": platform.python_version(), **_versions()},
        "hardware": {
            "platform": device.platform,
            "device": device.device_kind,
            "devices": jax.device_count(),
            "hosts": jax.process_count(),
            "machine": platform.machine(),
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
