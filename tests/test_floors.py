"""The floors of the house: launch > configs > astra_jax > synthesis > sandbox. A floor imports only those below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("launch", "configs", "astra_jax", "synthesis", "sandbox")
FILES = sorted(path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
LONGEST = 500
"""Lines of a file; a longer one has outgrown its name."""


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports absolutely"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_floor_imports_only_floors_below(path: Path) -> None:
    above = FLOORS[: FLOORS.index(path.parts[0])]
    assert not imported(ROOT / path) & set(above), f"{path} imports a floor above its own"


@pytest.mark.parametrize("floor", ["synthesis", "sandbox"])
def test_data_workers_need_no_jax(floor: str) -> None:
    forbidden = {"jax", "flax", "optax", "orbax", "torch", "transformers"}
    for path in (ROOT / floor).rglob("*.py"):
        assert not imported(path) & forbidden, f"{path} imports a training library; synthesis runs without one"


def test_the_sandbox_needs_nothing_but_the_standard_library() -> None:
    """Its HTTP service and client apart, which nothing else of it imports."""
    over_http = {
        "http_service.py": {"aiohttp"},
        "service.py": {"aiohttp", "prometheus_client"},
        "remote.py": {"aiohttp"},
    }
    for path in (ROOT / "sandbox").rglob("*.py"):
        outside = imported(path) - set(sys.stdlib_module_names) - {"sandbox"}
        assert not outside - over_http.get(path.name, set()), f"{path} imports {outside}"
        if path.name not in over_http:
            text = path.read_text(encoding="utf-8")
            for module in (f"sandbox.{name.removesuffix('.py')}" for name in over_http):
                assert f"import {module}" not in text and f"from {module}" not in text


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_short(path: Path) -> None:
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_families_of_models_are_known_to_models_and_configs_alone() -> None:
    families = sorted(path.parent.name for path in (ROOT / "astra_jax" / "models").glob("*/presets.py"))
    assert "qwen3" in families
    for path in FILES:
        if path.parts[:2] != ("astra_jax", "models") and path.parts[0] != "configs":
            text = (ROOT / path).read_text(encoding="utf-8")
            found = [name for name in families if f"astra_jax.models.{name}" in text]
            assert not found, f"{path} knows the family {found[0]}; hold a `Model` instead"


def test_what_families_share_knows_none_of_them() -> None:
    models = ROOT / "astra_jax" / "models"
    for path in [*models.glob("*.py"), *(models / "layers").glob("*.py")]:
        names = [line for line in path.read_text(encoding="utf-8").splitlines() if "import" in line and "qwen3" in line]
        assert not names, f"{path}: {names[0]}"


def test_importing_the_package_imports_no_jax() -> None:
    code = (
        "import sys, astra_jax.models.families, launch.flags.cli; assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
