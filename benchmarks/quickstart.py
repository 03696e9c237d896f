"""Measure whether the quickstart learns: runs it for several seeds, one after the other, and writes a row for each.

A row has the held-out F1 and the share of right answers, of the untrained model, after SFT and after GRPO. It also has
the run's seconds and peak memory. The last line counts the seeds whose gains reach the thresholds. --figure plots
GRPO's curves.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from astra_jax.base.settings import Seed
from benchmarks import curves, processes, rows
from launch.flags import cli
from launch.flags.numbers import numbers_of

SFT_GAIN, GRPO_GAIN = 0.30, {"pretrained": 0.10}
"""Least gains in F1 on held-out environments; GRPO's by profile, 0.12 if it is not listed."""

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Parent folder of the runs; finished ones are not run again.", required=True
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds.")
_PROFILE = flags.DEFINE_enum("profile", "quick", ["quick", "full", "ci", "pretrained"], "Profile of launch.quickstart.")
_FIGURE = flags.DEFINE_string("figure", None, "Write GRPO's curves of all seeds to this SVG file.")

CURVES = {
    "rollout/reward": "reward in training",
    "rollout/calls": "calls an episode",
    "filling/wasted_share": "share of episodes that train nothing",
}


def main() -> None:
    curves.check(_FIGURE.value)
    reached, metrics = [], []
    grpo_gain = GRPO_GAIN.get(_PROFILE.value, 0.12)
    for seed in numbers_of(_SEEDS, Seed):
        workdir = Path(_WORKDIR.value) / f"{_PROFILE.value}-{seed}"
        processes.run("launch.quickstart", f"--workdir={workdir}", f"--seed={seed}", f"--profile={_PROFILE.value}")
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
        f1 = {name: round(result["f1"], 4) for name, result in summary["held_out"].items()}
        answers = {name: round(result["answer_accuracy"], 4) for name, result in summary["held_out"].items()}
        gains = {"sft_gain": f1["sft"] - f1["untrained"], "grpo_gain": f1["grpo"] - f1["sft"]}
        rows.append(
            "quickstart",
            {
                "profile": _PROFILE.value,
                "seed": seed,
                "f1": f1,
                "answer_accuracy": answers,
                "full_reward_accuracy": {
                    name: None if (share := result["full_reward_accuracy"]) is None else round(share, 4)
                    for name, result in summary["held_out"].items()
                },
                **{name: round(gain, 4) for name, gain in gains.items()},
                "episodes": summary["held_out"]["grpo"]["episodes"],
                "seconds": round(summary["seconds"]),
                "peak_rss_gib": round(summary["peak_rss_bytes"] / 2**30, 2),
            },
        )
        metrics.append(workdir / "grpo" / "metrics")
        reached.append(gains["sft_gain"] >= SFT_GAIN and gains["grpo_gain"] >= grpo_gain)
    print(f"{sum(reached)} of {len(reached)} seeds gain at least {SFT_GAIN} by SFT and {grpo_gain} more by GRPO")
    if _FIGURE.value:
        curves.draw({"mean": metrics}, CURVES, Path(_FIGURE.value))


if __name__ == "__main__":
    cli.run(main)
