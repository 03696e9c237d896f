"""The installed programs run in any folder, and hide nothing of the user's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import astra_jax

SHADOWS = ("configs", "sandbox", "synthesis", "astra_jax")
"""Folders that a user may have. `python -m launch.NAME` beside a `launch/` runs that one."""


def foreign(folder: Path, *names: str) -> Path:
    """Make packages that must not be imported."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} is not ours')\n")
    return folder


@pytest.mark.slow
def test_astra_runs_its_programs_in_a_folder_with_packages_of_our_names(installed_astra, tmp_path) -> None:
    folder = foreign(tmp_path, *SHADOWS, "launch")
    listed = installed_astra("--help", cwd=folder)
    assert listed.code == 0 and "\n  quickstart " in listed.output and "\n  sft " in listed.output, listed.output
    assert installed_astra("--version", cwd=folder).output == f"astra_jax {astra_jax.__version__}\n"
    preset = installed_astra("sft", "--config=sft:14b", "--help_config", cwd=folder)
    assert preset.code == 0 and "--config.model.n_layers" in preset.output, preset.output
    # It starts itself again, with the CPU's settings, and reads the data.
    flags = ["--config=sft:0.6b", "--weights=./gone", "--data=./gone", "--workdir=run"]
    refused = installed_astra("sft", *flags, cwd=folder)
    assert refused.code == 2 and "no dataset at ./gone" in refused.output, refused.output
    wrong = installed_astra("stf", cwd=folder)
    assert wrong.code == 2 and "did you mean astra sft?" in wrong.output


@pytest.mark.slow
def test_a_program_runs_as_a_module_in_such_a_folder(installed_astra, tmp_path) -> None:
    folder = foreign(tmp_path, *SHADOWS)
    (folder / "mine.py").write_text("from configs.training import sft_run as made\n")
    (folder / "own.py").write_text("from mine import made\nCONFIG = made('0.6b', learning_rate=1e-5)\n")
    for config in ("sft:14b", "own.py"):
        said = python(installed_astra, folder, "-m", "launch.sft", f"--config={config}", "--help_config")
        assert "--config.model.n_layers" in said


@pytest.mark.slow
def test_an_installation_is_one_name(installed_astra, tmp_path) -> None:
    code = (
        "import astra_jax, configs, site, os; print(astra_jax.__file__); print(*os.listdir(site.getsitepackages()[0]))"
    )
    file, names = python(installed_astra, tmp_path, "-c", code).splitlines()
    assert file.endswith("/astra_packages/astra_jax/__init__.py")
    assert not set(names.split()) & {"astra_jax", "configs", "launch", "sandbox", "synthesis"}


def python(installed_astra, folder: Path, *arguments: str) -> str:
    command = [str(installed_astra.folder / "bin" / "python"), *arguments]
    environment = installed_astra.environment()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
