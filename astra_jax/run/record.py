"""`run.json`: of what a run was made, for whoever asks a year later."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

import astra_jax
from synthesis.core.files import write_text
from synthesis.core.versions import commit
from synthesis.core.workdir import WorkdirError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "array-record", "tokenizers", "numpy")


def write_run_record(workdir: epath.Path, config: Any) -> epath.Path:
    """Write `workdir/run.json`: the configuration, versions, hardware, and a line for each start of the run.

    Args:
        config: a dataclass, all of whose settings are JSON.

    Raises:
        WorkdirError: the file that is there is none.
    """
    path = workdir / "run.json"
    try:
        starts = json.loads(path.read_bytes())["starts"] if path.exists() else []
    except (ValueError, KeyError, TypeError) as error:
        raise WorkdirError(f"{path} is no record of a run ({error}); delete it, it is only for people") from None
    record = {
        "config": asdict(config),
        "starts": [*starts, start_of_run()],
    }
    write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def start_of_run() -> dict[str, Any]:
    """When, by which command, of which commit, with which versions, on what: JSON."""
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
