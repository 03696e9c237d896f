"""A backend that JAX cannot start is a mistake of the user's: named, with its reason and what to install."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from astra_jax.run import backends
from astra_jax.run.backends import BackendError, start_backend
from launch.flags import endings

ROOT = Path(__file__).parents[3]
JAXLIB = importlib.metadata.version("jaxlib")


@pytest.fixture(autouse=True)
def not_started() -> None:
    start_backend.cache_clear()


def message(monkeypatch, error: Exception, setting: str | None, installed: dict[str, str] | None = None) -> str:
    """What is reported where JAX raises an error under a setting, with some plugins installed."""

    def fails() -> None:
        raise error

    def version(name: str) -> str:
        found = {"jaxlib": JAXLIB, **(installed or {})}
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(jax, "devices", fails)
    monkeypatch.setattr(backends.importlib.metadata, "version", version)
    monkeypatch.delenv("JAX_PLATFORM_NAME", raising=False)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", setting)
    try:
        with pytest.raises(BackendError) as raised:
            start_backend()
    finally:
        jax.config.update("jax_platforms", before)
    assert endings.refusal(raised.value) == str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


UNKNOWN = "Unable to initialize backend '{0}': Backend '{0}' is not in the list of known backends: ['cpu']. (set "
UNKNOWN += "JAX_PLATFORMS='' to automatically choose an available backend)"
FOUND_BY_PLUGIN = "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA"
IN_USE = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 7.\nNot "
IN_USE += "attempting to load libtpu.so in this process. (you may need to uninstall the failing plugin package, or set "
IN_USE += "JAX_PLATFORMS=cpu to skip this backend.)"


@pytest.mark.parametrize(
    ("error", "setting", "installed", "parts"),
    [
        (AssertionError(), "cuda", {}, ["start the backend cuda: it finds no device.", "'astra-jax[cuda]'"]),
        (AttributeError("'NoneType' object has no attribute 'devices'"), "cuda", {}, ["'astra-jax[cuda]'"]),
        (RuntimeError(UNKNOWN.format("cuda")), "cuda", {}, ["JAX_PLATFORMS=cuda: ", "not in the list", "cuda]"]),
        (RuntimeError(UNKNOWN.format("rocm")), "gpu", {}, ["start the backend gpu:", "'astra-jax[cuda]'"]),
        (RuntimeError(UNKNOWN.format("rocm")), "rocm", {}, ["'jax[rocm7-local]'"]),
        (RuntimeError(UNKNOWN.format("tpu")), "tpu,cpu", {}, ["JAX_PLATFORMS=tpu,cpu: ", "'astra-jax[tpu]'"]),
        (RuntimeError(UNKNOWN.format("cud")), "cud", {}, ["There is no backend cud; use cuda."]),
        (RuntimeError(UNKNOWN.format("gpu2")), "gpu2", {}, ["There is no backend gpu2; use gpu."]),
        (RuntimeError(UNKNOWN.format("xyz")), "xyz", {}, ["There is no backend xyz; JAX has cuda, rocm, tpu and cpu."]),
        (RuntimeError(IN_USE), None, {"libtpu": "0.1"}, ["backend tpu: ABORTED: ", "pid 7. Not", "no other process"]),
        (RuntimeError(FOUND_BY_PLUGIN), "cuda", {"jax-cuda13-plugin": JAXLIB}, ["nvidia-smi lists a GPU"]),
        (RuntimeError(FOUND_BY_PLUGIN), "cuda", {"jax-cuda12-plugin": "0.1"}, ["not jax-cuda12-plugin 0.1: pip"]),
        (OSError("a wording of another version"), None, {}, ["JAX cannot start", "a wording of another version"]),
    ],
)  # fmt: skip
def test_the_message_names_backend_reason_and_remedy(monkeypatch, error, setting, installed, parts) -> None:
    said = message(monkeypatch, error, setting, installed)
    assert all(part in said for part in parts), said
    assert said.endswith("To run on the processor, set JAX_PLATFORMS=cpu")
    assert "automatically choose" not in said and "you may need" not in said


def test_another_backend_than_the_first_one_is_reported(monkeypatch, capsys) -> None:
    """JAX leaves `cuda` of `cuda,cpu` out without a word where it sees no GPU."""
    before = jax.config.values["jax_platforms"]
    try:
        for setting, warns in (("cuda,cpu", True), ("cpu", False), (None, False)):
            jax.config.update("jax_platforms", setting)
            start_backend.cache_clear()
            start_backend()
            assert ("JAX found no device of cuda, and runs on cpu" in capsys.readouterr().err) == warns
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["JAX_PLATFORMS=cuda", "JAX_PLATFORMS=cud", "JAX_PLATFORM_NAME=gpu"])
def test_a_program_ends_with_one_line(tmp_path, variable: str) -> None:
    """It was called a fault of astra-jax, with a traceback, and came behind the command line's own checks."""
    name, _, value = variable.partition("=")
    environment = {key: text for key, text in os.environ.items() if not key.startswith("JAX_PLATFORM")}
    command = [sys.executable, "-m", "launch.convert", f"--from_hf={tmp_path}", f"--to_orbax={tmp_path / 'to'}"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment | {name: value}, capture_output=True, text=True, timeout=300
    )
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert line.startswith(f"error: {variable}: JAX cannot start the backend {value}: ")
