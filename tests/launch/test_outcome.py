"""First screen of `astra watch`: the outcome of runs of each kind, and reasons, from what the runs write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pages_world import grpo_workdir, quickstart_report
from viewing import INJECTION

from astra_jax.base.errors import InputError
from astra_jax.run.metrics import MetricWriter
from launch.viewer import charts, stages
from launch.viewer.outcome import outcome_of
from launch.viewer.service import rendered
from launch.viewer.watch_pages import curves_of
from launch.viewer.watch_terminal import text
from launch.viewer.watched import Watcher
from synthesis.core.journal import Journal
from synthesis.core.workdir import RunEnding, locked, record_ending
from synthesis.environments import pipeline as environments
from synthesis.pipeline.stage_keys import StageSpec
from synthesis.trajectories import pipeline as trajectories


def made(folder: Path, kind: str, rows: Sequence[Mapping[str, float]], *, steps: int = 4) -> Path:
    """A training's workdir with these rows, the first of step 1."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"config": {kind: {"steps": steps}}}))
    with MetricWriter(folder / "metrics") as writer:
        for step, row in enumerate(rows, start=1):
            writer.write(step, row)
    return folder


def told(folder: Path) -> tuple[str, str]:
    """The headline and the reasons."""
    outcome = outcome_of(Watcher(folder).look())
    return outcome.headline, "\n".join(outcome.why)


def test_what_a_program_raised_is_its_outcome(tmp_path: Path) -> None:
    rows = [{"train/loss": 2.0}]
    for number, (error, said) in enumerate(
        (
            (InputError("--rollout_url=http://gpu-1:8000 is unavailable"), "Failed after step 1 of 4: --rollout_url="),
            (
                ExceptionGroup("two", [InputError("no room in /dev/shm")]),
                "Failed after step 1 of 4: no room in /dev/shm",
            ),
            (KeyError("reward"), "Failed after step 1 of 4: KeyError: 'reward'"),
            (KeyboardInterrupt(), "Interrupted by Ctrl-C after step 1 of 4. The same command resumes it."),
        )
    ):
        folder = made(tmp_path / str(number), "grpo", rows)
        with pytest.raises(type(error)), locked(folder), locked(folder):
            assert told(folder)[0].startswith("Running: GRPO works on step 2 of 4.")
            raise error
        assert told(folder)[0].startswith(said)
    with locked(folder):
        record_ending(folder, RunEnding("preempted"))
    assert told(folder)[0] == "Stopped by SIGTERM after step 1 of 4, and saved. The same command resumes it."
    with locked(folder):
        pass
    assert Watcher(folder).look().state == "finished"
    done = made(tmp_path / "done", "sft", [{"eval/loss": 2.0}, {"eval/loss": 1.5}], steps=2)
    record_ending(done, RunEnding("failed", "--workdir is another run's"))
    said = "All of it is done: held-out loss 2 → 1.5. The last command failed: --workdir is another run's"
    assert told(done)[0] == said


ZERO = {"rollout/reward": 0.0, "rollout/calls": 2.0, "filling/valid_share": 0.0}
VALID = {"rollout/reward": 0.3, "filling/valid_share": 0.05, "filling/groups_equal": 60.0, "filling/episodes": 20.0}


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("grpo", [ZERO] * 3, "Every episode of the last 3 logged steps scored 0. Train with SFT first"),
        ("grpo", [ZERO | {"rollout/calls": 0.0}], "scored 0. It makes no tool calls: check the chat format"),
        ("grpo", [ZERO | {"rollout/failed_calls": 1.8}], "scored 0. 90% of its tool calls fail"),
        ("grpo", [VALID] * 2, "Only 5% of the groups are valid (120 equal rewards)."),
        (
            "grpo",
            [VALID | {"filling/masked_episodes": 80.0, "filling/masked_sandbox_failed": 80.0}],
            "80% of the episodes are masked, so they have no score: sandbox failed 80.",
        ),
        ("grpo", [{"rollout/reward": 0.5, "rollout/finish_token_limit": 0.75}], "75% of the episodes end at the token"),
        (
            "grpo",
            [{"servers/a:1/serving": 0.0, "servers/b:1/serving": 1.0}],
            "1 of 2 rollout servers are out of service",
        ),
        ("grpo", [{"eval/greedy/reward": one} for one in (0.5, 0.25)], "The held-out reward fell from 0.5 to 0.25."),
        (
            "grpo",
            [{"train/mismatch_kl": one} for one in (1e-3, 2e-3, 0.1, 0.2)],
            "mismatch of sampler and trainer grew",
        ),
        (
            "sft",
            [{"eval/loss": one} for one in (2.0, 1.0, 1.5)],
            "The held-out loss rises again: 1 at step 2, 1.5 now.",
        ),
        (
            "sft",
            [{"train/loss": float("nan"), "train/skipped_steps": 1.0, "train/learning_rate": 0.5}],
            "1 of 1 steps changed nothing, since their loss or gradient was not finite. Lower learning_rate (it is",
        ),
        ("sft", [{"train/loss": 2.0, "train/skipped_steps": 0.0}], ""),
    ],
)
def test_metrics_of_a_bad_run_are_reasons(
    tmp_path: Path, kind: str, rows: Sequence[Mapping[str, float]], said: str
) -> None:
    _, why = told(made(tmp_path, kind, rows))
    assert said in why and bool(said) == bool(why)


def test_a_stage_that_rejects_everything_is_the_reason(tmp_path: Path) -> None:
    with locked(tmp_path), Journal(tmp_path / "journals" / "trajectories.sqlite") as journal:
        for number in range(50):
            journal.add("propose/0123456789abcdef", str(number), b"[]")
            journal.add("verify/0123456789abcdef", str(number), None, "chain_failed_vote", INJECTION)
        journal.add("verify+mine:check/0123456789abcdef", "0", b"[]")
        journal.add("judge/0123456789abcdef", "0", b"[]")
    run = Watcher(tmp_path).look()
    assert [one.name for one in run.stages] == ["propose", "verify", "verify+mine:check", "judge"]
    outcome = outcome_of(run)
    said = f"Stage verify let 0 of 50 through: chain failed vote 50. For example {INJECTION}"
    assert outcome.why == [said] and f"- {said}" in text(run).splitlines()[:6]
    narrow = text(run, 40).splitlines()[2:8]
    assert max(map(len, narrow)) <= 40 and f"- {said}" in " ".join(narrow)  # a terminal cuts what is wider
    page = rendered("watch.html.jinja", run=run, outcome=outcome, beside=None, seconds=3.0, links={}, served=True)
    assert page.index("Stage verify let 0 of 50") < page.index("<h2>") and INJECTION not in page


def test_stages_are_in_the_order_of_their_pipelines() -> None:
    for order, pipeline in ((stages.TRAJECTORIES, trajectories), (stages.ENVIRONMENTS, environments)):
        declared = [one.name for one in vars(pipeline).values() if isinstance(one, StageSpec)]
        assert set(declared) <= set(order)
    assert stages.in_order(["judge", "propose", "verify", "verify+a:b"]) == ["propose", "verify", "verify+a:b", "judge"]
    assert stages.in_order(["verify", "implement", "decompose"]) == ["decompose", "implement", "verify"]


def test_results_are_compared_before_and_after(tmp_path: Path) -> None:
    outcome = outcome_of(Watcher(grpo_workdir(tmp_path / "run")).look())
    assert outcome.columns == ["before (step 0)", "after (step 40)"]
    assert outcome.rows["held-out reward, greedy"] == [0.25, 0.625]
    report = quickstart_report(tmp_path / "quickstart")
    summary = {"held_out": {"untrained": {"f1": 0.1}, "grpo": {"f1": 0.5}}}
    (report.parent / "summary.json").write_text(json.dumps(summary))
    run = Watcher(report.parent).look()
    outcome = outcome_of(run)
    assert (outcome.columns, outcome.rows["held-out F1"]) == (["untrained", "grpo"], [0.1, 0.5])
    assert outcome.headline.startswith("Finished") and run.pages == ["report.html"]
    words = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", report.read_text(encoding="utf-8").partition("<main>")[2]))
    first = "After training, the model answers 40% of 78 held-out questions, before it 0%; the held-out F1 reward rose"
    assert words.strip().startswith(f"ASTRA in JAX: one run of the main job {first} from 0.10 to 0.50.")
    assert "held-out environments before after SFT after GRPO F1 0.100 (0.000–0.200) 0.300" in words
    table = {"suites": [{"info": {"title": "BFCL"}, "headlines": [{"title": "overall", "score": {"mean": 61.5}}]}]}
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "table.json").write_text(json.dumps({"table": table}))
    with locked(tmp_path / "evaluated"):
        pass
    assert told(tmp_path / "evaluated")[0] == "Finished: BFCL: overall 61.5."


def test_curves_are_by_time_smoothed_and_beside_another_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"train/loss": 1.0 + step % 2, "goodput/kept_seconds": 3600.0 * step} for step in range(1, 9)
    ]
    one = Watcher(made(tmp_path / "one", "sft", rows)).look()
    other = Watcher(made(tmp_path / "other", "sft", [row | {"train/loss": 5.0} for row in rows])).look()
    plain = curves_of(one.trainings[0])["Loss"]
    assert "at step 1, 1 at 8, between 1 and 2" in plain and ">step<" in plain and "curve raw" not in plain
    drawn = curves_of(one.trainings[0], beside=other, x="time", smoothing=0.9)["Loss"]
    assert ">hours of training<" in drawn and "train loss, other: 5 at hours of training 1" in drawn
    assert drawn.count('class="curve raw s0"') == 2 and drawn.count("curve s0 beside") == 2
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0)]
    assert charts.smoothed(points, 0.5) == [(0.0, 1.0), (1.0, None), (2.0, pytest.approx(7 / 3))]
