"""Compiled programs are kept from one start of a program to the next: a restart traces, and compiles nothing.

JAX's persistent compilation cache, with a folder by default. Its names hold what a program depends on: the HLO, the
versions of JAX and of the compiler, its options, the devices.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax
from absl import logging

from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location, user_cache
from synthesis.core.refusals import InputError

FOLDER = "compiled"
"""In a run's workdir."""

_WORTH_A_REQUEST = 0.5
"""Seconds of compiling below which a program is not fetched from a bucket."""


def keep_programs(folder: Folder | None = None) -> None:
    """Compile nothing that is in `folder`, and keep there what is compiled. Call it before anything is.

    Who names a folder of their own with JAX_COMPILATION_CACHE_DIR keeps it; JAX_ENABLE_COMPILATION_CACHE=false turns
    it off. On CPUs a folder of each kind of processor is made in it: what is compiled for one may not run on another.

    Args:
        folder: on disk or in a bucket; all hosts may share it. By default `~/.cache/astra-jax/compiled`, or of
            XDG_CACHE_HOME, where one can be written.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]  # made as JAX is imported
        return
    try:
        base = location(folder or user_cache(FOLDER))
    except InputError as error:
        logging.info("compiled programs are not kept: %s", error)
        return
    if jax.default_backend() == "cpu":
        base /= f"cpu-{_processor()}"
    if folder is None and not _can_write(Path(base)):
        logging.info("%s cannot be written: compiled programs are not kept", base)
        return
    jax.config.update("jax_compilation_cache_dir", os.fspath(base))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        seconds = _WORTH_A_REQUEST if in_bucket(base) else 0.0
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _processor() -> str:
    """A digest of what instructions this processor has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {found}".encode()).hexdigest()[:8]
