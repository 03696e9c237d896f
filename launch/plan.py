"""Does a job fit on a slice, and how fast can it be: compiles its real training step for chips that are not here.

    python -m launch.plan --config=sft:14b --topology=v5p:2x2x2 --tokens=74752
    python -m launch.plan --config=grpo:32b --topology=v6e:16x16 --tokens=74752 --smallest --json
    python -m launch.plan --config=sft:8b --topology=h200:8 --tokens=32768

Prints bytes a chip against the chip's memory, flops a token, what is sent over each mesh axis, and a bound on the step
time. Needs no TPU and no GPU, but their compilers: for TPUs libtpu (pip install '.[tpu]'), for GPUs JAX's CUDA plugin
(pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION, in JAX's own version).
"""

from __future__ import annotations

import os

from absl import flags

from launch.flags import cli, meshes
from launch.flags.numbers import number_flag
from sandbox.settings import Length
from synthesis.core.terminal import say

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "A preset, such as sft:14b, or a file that defines CONFIG; override with --config.NAME=VALUE.",
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Slice, for example v5p:4x4x4, v6e:4x4, h200:8 or h100:2x8.", required=True
)
_TOKENS = number_flag("tokens", None, Length, "Longest sequence; by default everything is as configured.")
_MESH = flags.DEFINE_list("mesh", None, "Axis sizes, for example fsdp=4,context=2; by default chosen.")
_SMALLEST = flags.DEFINE_bool("smallest", False, "Find the smallest slice that fits, up to --topology.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object on the last line.")


def main() -> int:
    import dataclasses
    import json

    from astra_jax.mesh import AXES
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.plan import describe, make_plan
    from astra_jax.planner.search import smallest
    from configs.training import SFTRun

    if _CONFIG.value is None:
        raise cli.UsageError("--config is missing; give a preset, for example sft:14b, or a file")
    run = cli.overridden(cli.load_config(_CONFIG.value, "sft", "grpo"))
    job = run.sft if isinstance(run, SFTRun) else run.grpo
    tokens = _TOKENS.value
    mesh = meshes.axis_sizes(_MESH, AXES) or None
    slice_ = Slice.parse(_TOPOLOGY.value)
    if _SMALLEST.value:
        if mesh:
            raise cli.UsageError("--smallest chooses the mesh of each slice; leave --mesh out")
        plan = smallest(run.model, job, slice_, tokens=tokens)
    else:
        plan = make_plan(run.model, job, slice_, tokens=tokens, mesh=mesh)
    say(describe(plan))
    if _JSON.value:
        say(json.dumps(dataclasses.asdict(plan)))
    return 0


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # the program is only compiled
    cli.run(main, settings=lambda: cli.load_config(_CONFIG.value or "sft:0.6b"))
