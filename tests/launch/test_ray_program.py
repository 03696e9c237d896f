"""astra trajectories on a Ray cluster, killed and started again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray_work import two_cpus

ROOT = Path(__file__).parents[2]
ray: Any = pytest.importorskip("ray")


def rows(journal: Path) -> list[Any]:
    with closing(sqlite3.connect(journal)) as db:
        return db.execute("SELECT * FROM done ORDER BY stage, key").fetchall()


@pytest.mark.slow
def test_a_killed_run_of_the_program_resumes_and_does_nothing_twice(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it print what Ray finds in the machine's TPU logs."""
    tpu_logs = tmp_path_factory.mktemp("tpu_logs").resolve()
    monkeypatch.setenv("TPU_LOG_DIR", str(tpu_logs))
    with two_cpus() as address:
        assert Path(ray.worker.global_worker.node.get_logs_dir_path(), "tpu_logs").resolve() == tpu_logs
        resumed(address, tpu_logs, tmp_path)


def resumed(address: str, tpu_logs: Path, tmp_path: Path) -> None:
    settings = ("--config.trajectories=6", "--config.proposals=3", "--config.sources=[]", "--config.mcp_share=0",
                '--config.fact_servers=["numbers", "elements", "http"]', "--config.min_tools=2")  # fmt: skip
    on_ray = ("--executor=ray", f"--ray_address={address}", "--ray_workers=2")
    lost, journal = tmp_path / "there", Path("journals", "trajectories.sqlite")

    def start(workdir: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "launch.trajectories", f"--workdir={workdir}", *settings, *more]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def said(process: subprocess.Popen[str], workdir: Path) -> str:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        return out.replace(str(workdir), "WORKDIR")

    def finished() -> int:
        try:
            with closing(sqlite3.connect(f"file:{lost / journal}?mode=ro", uri=True)) as db:
                return int(db.execute("SELECT count(*) FROM done").fetchone()[0])
        except sqlite3.OperationalError:  # not made yet
            return 0

    killed = start(lost, *on_ray)
    while finished() < 30:
        assert killed.poll() is None, killed.communicate()[1][-3000:]
        with (tpu_logs / "tpu_driver.INFO").open("a") as log:
            log.write("what another program says to its chip\n")
        time.sleep(0.02)
    killed.kill()
    assert "chip" not in killed.communicate()[0] and not (lost / "trajectories").exists()
    with closing(sqlite3.connect(lost / journal)) as db:  # whoever does a finished input again is stopped
        db.execute(
            "CREATE TRIGGER twice BEFORE INSERT ON done WHEN EXISTS "
            "(SELECT 1 FROM done WHERE stage = NEW.stage AND key = NEW.key) "
            "BEGIN SELECT RAISE(ABORT, 'done twice'); END"
        )
    assert said(start(lost, *on_ray), lost) == said(start(tmp_path / "here"), tmp_path / "here")
    assert rows(lost / journal) == rows(tmp_path / "here" / journal)
    for name in ("servers", "chains", "tasks", "trajectories", "graphs"):
        one, other = [{path.name: path.read_bytes() for path in (folder / name).iterdir()} for folder in
                      (lost, tmp_path / "here")]  # fmt: skip
        assert one == other and one
