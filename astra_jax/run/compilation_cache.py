"""Persistent cache of compiled programs: a restarted program traces but does not compile.

It is JAX's compilation cache with a default folder. Cache keys include all that a program depends on: the HLO, the
versions of JAX and the compiler, compiler options, and devices.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax
from absl import logging

from astra_jax.base.errors import InputError
from astra_jax.base.files import in_bucket, location, user_cache
from synthesis.core.datasets import Folder

FOLDER = "compiled"
"""Folder name in a run's workdir."""

_WORTH_A_REQUEST = 0.5
"""Compile time in seconds below which a program is not fetched from a bucket."""


def keep_programs(folder: Folder | None = None) -> None:
    """Load compiled programs from `folder`, and store new ones there. Call it before anything is compiled.

    JAX_COMPILATION_CACHE_DIR overrides the folder, and JAX_ENABLE_COMPILATION_CACHE=false disables the cache. On CPUs
    each kind of processor has its own subfolder, since its programs may not run on another.

    Args:
        folder: on disk or in a bucket; all hosts may share it. By default `~/.cache/astra-jax/compiled`, or in
            XDG_CACHE_HOME, if writable.
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
    """Return a digest of this processor's instruction set."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {found}".encode()).hexdigest()[:8]
