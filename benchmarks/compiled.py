"""A training step compiled for chips that are not here, and read: cycles, memory, collectives, expected time.

python -m benchmarks.compiled --config=sft:4b --topology=v6e:2x4 --tokens=20480 --mesh=fsdp=8 --save
python -m benchmarks.compiled --config=sft:4b --topology=v6e:2x4 --option=NAME=VALUE --save_hlo=FILE
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path

from absl import flags

from benchmarks import rows
from launch.flags import cli, meshes
from launch.flags.numbers import number_flag
from sandbox.settings import Length
from synthesis.core.terminal import say

_CONFIG = flags.DEFINE_string("config", "sft:4b", "A preset or a file; override with --config.NAME=VALUE.")
_TOPOLOGY = flags.DEFINE_string("topology", "v6e:2x4", "Slice.")
_TOKENS = number_flag("tokens", None, Length, "Longest sequence; by default everything as configured.")
_MESH = flags.DEFINE_list("mesh", None, "Axis sizes; by default chosen.")
_OPTIONS = flags.DEFINE_multi_string("option", [], "NAME=VALUE of the compiler; may be given several times.")
_HLO = flags.DEFINE_string(
    "save_hlo", None, "File for the compiled text; with .gz compressed. GRPO's programs: FILE.NAME."
)
_JSON = flags.DEFINE_bool("json", False, "Print the row only.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the kept ones.")


def main() -> None:
    from astra_jax.mesh import AXES
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.plan import describe, make_plan
    from configs.training import SFTRun

    run = cli.overridden(cli.load_config(_CONFIG.value, "sft", "grpo"))
    config = run.sft if isinstance(run, SFTRun) else run.grpo
    options = {}
    for one in _OPTIONS.value:
        name, equals, value = one.partition("=")
        if not equals:
            raise cli.UsageError(f"--option={one}: write NAME=VALUE")
        options[name] = value
    plan = make_plan(
        run.model,
        config,
        Slice.parse(_TOPOLOGY.value),
        tokens=_TOKENS.value,
        mesh=meshes.axis_sizes(_MESH, AXES) or None,
        options=options,
        on_text=_save_hlo,
    )
    if not _JSON.value:
        say(describe(plan))
        total = sum(plan.cycles.values())
        for name, count in sorted(plan.cycles.items(), key=lambda one: -one[1]):
            say(f"  {count:.4g} cycles of {name}, {count / total:.1%}")
        say(f"  compiled in {plan.compile_seconds:.1f} s")
    figures = {"config": _CONFIG.value, "options": options} | dataclasses.asdict(plan)
    if _SAVE.value:
        rows.append("compiled", figures)
    elif _JSON.value:
        say(json.dumps(figures))


def _save_hlo(name: str, text: str) -> None:
    if _HLO.value is None:
        return
    path = Path(_HLO.value if name == "train_step" else f"{_HLO.value}.{name}")
    if _HLO.value.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # the program is only compiled
    cli.run(main, settings=lambda: cli.load_config(_CONFIG.value))
