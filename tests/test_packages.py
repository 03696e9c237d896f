"""What is released: the project as wheel and sdist, and vLLM's plugin as a wheel, from one tree and of one version."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import astra_jax

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "astra_jax/rollout/vllm/plugin/"
PACKAGES = ("astra_jax/", "synthesis/", "sandbox/", "configs/", "launch/")
ABOVE = "astra_packages/"
"""Below which the wheel has them."""


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the three files. They are built from a copy: setuptools writes beside its sources."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, whose list of files the packages are compared with")
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for arguments in ([str(tree)], ["--wheel", str(tree / PLUGIN)]):
        build = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={built}", *arguments]
        ended = subprocess.run(build, cwd=built, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return built


def wheel(built: Path, name: str) -> tuple[set[str], Message]:
    """Its files, and its metadata."""
    with zipfile.ZipFile(built / f"{name}-{astra_jax.__version__}-py3-none-any.whl") as archive:
        about = archive.read(f"{name}-{astra_jax.__version__}.dist-info/METADATA")
        return set(archive.namelist()), message_from_bytes(about)


@pytest.mark.slow
def test_the_wheel_has_all_that_is_run_and_nothing_else(built) -> None:
    files, about = wheel(built, "astra_jax")
    installed = {name for name in files if ".dist-info/" not in name} - {f"{ABOVE}__init__.py", "astra_packages.pth"}
    assert all(name.startswith(ABOVE) for name in installed)
    own = {name.removeprefix(ABOVE) for name in installed}
    wanted = {name for name in tracked() if name.startswith(PACKAGES)}
    of_a_checkout = {name for name in wanted if name.startswith("launch/recipes/")} | {"launch/vllm_cpu.sh"}
    assert wanted - own == of_a_checkout
    assert own <= wanted
    assert about["License-Expression"] == "Apache-2.0" and about["Version"] == astra_jax.__version__
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    assert about.get_payload().startswith("# ASTRA in JAX")


def test_the_help_of_astra_imports_nothing_heavy() -> None:
    code = "import sys, astra_packages; sys.argv = ['astra', '--help']; astra_packages.main(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"jax", "absl", "numpy", "launch"} & set(said.splitlines()[-1].split())
    programs = {line.split()[0] for line in said.splitlines() if line.startswith("  ")}
    files = [*(ROOT / "launch").glob("*.py"), *(ROOT / "launch").glob("*/__main__.py")]
    ours = [file for file in files if "\n    cli.run(" in file.read_text(encoding="utf-8")]
    assert programs == {file.parent.name if file.stem == "__main__" else file.stem for file in ours}


@pytest.mark.slow
def test_the_sdist_has_its_tests(built) -> None:
    with tarfile.open(built / f"astra_jax-{astra_jax.__version__}.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - files == {".gitignore"}


@pytest.mark.slow
def test_the_plugin_is_a_wheel_of_the_same_version(built) -> None:
    files, about = wheel(built, "astra_vllm")
    wanted = {name.removeprefix(PLUGIN) for name in tracked() if name.startswith(f"{PLUGIN}astra_vllm/")}
    assert {name for name in files if ".dist-info/" not in name} == wanted
    assert about["License-Expression"] == "Apache-2.0"
    assert (ROOT / PLUGIN / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(next(built.glob("astra_vllm-*.whl"))) as archive:
        entries = archive.read(f"astra_vllm-{astra_jax.__version__}.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]" in entries and "[vllm.endpoint_plugins]" in entries


@pytest.mark.slow
def test_an_index_would_take_them(built) -> None:
    files = [str(file) for file in built.iterdir()]
    assert len(files) == 3
    ended = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_versions_change_is_told() -> None:
    assert f"\n## {astra_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()
