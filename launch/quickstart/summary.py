"""Summary of a quickstart run, `summary.json`, gathered from its ledger."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import jax
import msgspec

import astra_jax
from astra_jax.models.model import parameters
from astra_jax.run.identity import model_settings, run_identity
from configs.quickstart import QuickstartConfig
from launch.quickstart.ledger import Ledger, write_json
from synthesis.core.datasets import read_dataset
from synthesis.core.records import McpExecution, ToolServer

MODELS = ("untrained", "sft", "grpo")
_MEASURED = ("seconds", "peak_rss_bytes", "sandbox")  # what every stage has beside its own results


def identity(config: QuickstartConfig, profile: str) -> dict[str, Any]:
    """Return everything that a resumed run must share with the workdir: version, profile, seed and every setting."""
    settings = dataclasses.asdict(config) | {"model": model_settings(config.model)}
    settings = msgspec.to_builtins(settings, str_keys=True)
    return run_identity(version=astra_jax.__version__, profile=profile, config=settings)


def write(workdir: Path, ledger: Ledger, config: QuickstartConfig, profile: str) -> dict[str, Any]:
    """Write `workdir/summary.json` atomically and return its content.

    `held_out` has the fields of `EvalResult` for `untrained`, `sft` and `grpo`. `digests` has a digest of each
    dataset's content, of the tokenizer, and of the pretrained weights' file, if there is one. `seconds` is the sum over
    the stages, in all processes of the run that were not killed.
    """
    stages = ledger.results()
    servers = read_dataset(workdir / "trajectories" / "servers", ToolServer)
    held_out = {name: dict(stages[f"evaluate_{name}"]) for name in MODELS}
    for result in held_out.values():
        for name in ("samples", *_MEASURED):
            result.pop(name)
    digests = {
        name: digest
        for stage in ("trajectories", "environments", "weights", "tokenizer", "rehearsal")
        if stage in stages
        for name, digest in stages[stage]["digests"].items()
    }
    summary = {
        "version": astra_jax.__version__,
        "profile": profile,
        "seed": config.seed,
        "held_out": held_out,
        "seconds": sum(stage["seconds"] for stage in stages.values()),
        "peak_rss_bytes": max(stage["peak_rss_bytes"] for stage in stages.values()),
        "digests": digests,
        "servers": len(servers),
        "tools": sum(len(server.tools) for server in servers),
        "mcp_servers": sum(isinstance(server.execution, McpExecution) for server in servers),
        "trajectories": stages["trajectories"]["counts"]["trajectories"],
        "environments": stages["environments"]["counts"],
        "rejected": {
            name: stages[name]["rejected"] for name in ("trajectories", "environments", "rehearsal") if name in stages
        },
        "sandbox": stages["environments"]["sandbox"],
        "parameters": parameters(config.model),
        "stages": {name: {"seconds": stage["seconds"]} for name, stage in stages.items()},
        "rehearsal": _scalars(stages["rehearsal"]) if "rehearsal" in stages else None,
        "training": {name: _scalars(stages[name]) for name in ("sft_dialogue", "sft_tools", "grpo") if name in stages},
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "devices": [device.device_kind for device in jax.devices()],
        },
    }
    write_json(workdir / "summary.json", summary)
    return summary


def _scalars(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in result.items() if isinstance(value, int | float | str) and name not in _MEASURED
    }


def table(summary: dict[str, Any]) -> str:
    """Return the results as a table for a terminal."""
    lines = [f"{'held-out':<10} {'F1':>6} {'recall':>7} {'precision':>10} {'answers':>8} {'episodes':>9}"]
    for name in MODELS:
        row = summary["held_out"][name]
        lines.append(
            f"{name:<10} {row['f1']:>6.3f} {row['recall']:>7.3f} {row['precision']:>10.3f} "
            f"{row['answer_accuracy']:>8.3f} {row['episodes']:>9}"
        )
    lines.append(
        "F1 is the paper's reward: it pays for calls that find what was asked, not for words; answers are words."
    )
    lines.append(
        f"{summary['seconds']:.0f} s, {summary['peak_rss_bytes'] / 2**30:.1f} GiB, "
        f"sandbox tier {summary['sandbox']['tier']}, {summary['servers']} servers with {summary['tools']} tools"
    )
    return "\n".join(lines)
