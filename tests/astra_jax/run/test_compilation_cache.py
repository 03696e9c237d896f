"""What one process compiled the next one finds; a folder that the user named is the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent

PROGRAM = """
import sys, jax, jax.numpy as jnp
from astra_jax.run.compilation_cache import keep_programs
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
keep_programs(*sys.argv[1:])
jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8))).block_until_ready()
print(*(sum(one == f"/jax/compilation_cache/cache_{kind}" for one in found) for kind in ("hits", "misses")))
"""


def run(*arguments: Path, **environment: str) -> tuple[int, int]:
    """Programs that were found, and those that were compiled."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        env=others | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    hits, misses = map(int, found.stdout.split())
    return hits, misses


def test_the_second_start_compiles_nothing(tmp_path) -> None:
    hits, misses = run(tmp_path / "compiled")
    assert hits == 0 and misses > 0
    assert run(tmp_path / "compiled") == (misses, 0)
    assert [one.name.partition("-")[0] for one in (tmp_path / "compiled").iterdir()] == ["cpu"]


def test_without_a_workdir_they_are_kept_in_the_users_cache(tmp_path) -> None:
    run(XDG_CACHE_HOME=str(tmp_path))
    assert list(tmp_path.glob("astra-jax/compiled/cpu-*/*-cache"))
    run(XDG_CACHE_HOME="/proc/none")  # which nobody can write: then they are not kept


def test_a_folder_that_was_named_is_kept_and_off_is_off(tmp_path) -> None:
    run(
        tmp_path / "ours",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"),
        **{"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )
    assert list((tmp_path / "theirs").iterdir()) and not (tmp_path / "ours").exists()
    run(tmp_path / "off", JAX_ENABLE_COMPILATION_CACHE="false")
    assert not (tmp_path / "off").exists()
