"""Predict whether a job fits on accelerators, how long it takes and what it costs.

    astra plan --config=sft:14b --topology=v5p:2x2x2 --tokens=74752
    astra plan --config=grpo:14b --topology=v6e:4x4 --mesh=fsdp=8,context=2 --price_per_chip_hour=2.7
    astra plan --config=grpo:32b --topology=v6e:16x16 --tokens=74752 --search --json
    astra plan --config=sft:14b --topology=2xv5p:2x2x2 --mesh=data=2,fsdp=8
    astra plan --config=sft:8b --topology=h200:8 --tokens=32768
    astra plan --config=sft:auto --weights=Qwen/Qwen3-8B --topology=4090 --tokens=4096

Compiles the job's real training step, which needs none of the chips. Takes the same --config, --config.NAME=VALUE and
--mesh as `astra sft` and `astra grpo`, and refuses a run that they would refuse. Prints the bytes of each chip against
its memory, the flops of a token, the bytes sent over each mesh axis, and the time of a step with its parts. With
--steps it prints hours, with --price_per_chip_hour dollars; for GRPO both include rollouts on the same chips. The last
line is the whole command that trains what was planned; replace the name of the data. --search tries meshes,
micro-batches, remat and row lengths. It prints the fastest that fits, and the smallest slice on which one fits.

Needs only the compilers: for TPUs libtpu (pip install '.[tpu]'), for GPUs JAX's CUDA plugin (pip install --no-deps
jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION, in JAX's own version).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count, Length
from astra_jax.base.terminal import say
from launch.flags import auto, cli, meshes, shared, sources
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.plan import Plan

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Preset, or a file that defines CONFIG; for example sft:14b. sft:auto and grpo:auto take the model from --weights.",
    required=True,
)
_WEIGHTS = shared.weights(required=False)
_MODEL_CLASS = shared.model_class()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Chips, for example v5p:4x4x4, v6e-16, 2xv6e:4x4 for two slices, 4090 for one GPU, h200:8 or h100:2x8.",
    required=True,
)
_TOKENS = number_flag("tokens", None, Length, "Longest sequence in tokens; by default as configured.")
_MESH = shared.mesh("By default the planner chooses them.")
_SEARCH = flags.DEFINE_bool(
    "search", False, "Try meshes, micro-batches, remat and row lengths, and smaller slices; print the fastest."
)
_COMPILES = number_flag(
    "compiles", 8, Count, "Maximum configurations that --search compiles, and as many for smaller slices."
)
_STEPS = number_flag(
    "steps", None, Count, "Steps of the whole run, to print its hours; by default the configuration's."
)
_PRICE = number_flag(
    "price_per_chip_hour",
    None,
    Annotated[float, Bound(above=0, most=1e6)],
    "Price of a chip-hour in dollars, to print the run's cost.",
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object on the last line.")


def main() -> int:
    import json

    from astra_jax.mesh import AXES
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.plan import describe, make_plan
    from astra_jax.planner.search import search
    from astra_jax.run.chips import GIB
    from configs.training import SFTRun

    slice_ = Slice.parse(_TOPOLOGY.value)
    mesh = meshes.axis_sizes(_MESH, AXES) or None
    given, run = _runs(_CONFIG.value, slice_, mesh)
    loop = "sft" if isinstance(run, SFTRun) else "grpo"
    job = getattr(run, loop)
    asked = {"tokens": _TOKENS.value, "steps": _STEPS.value, "price_per_chip_hour": _PRICE.value}
    asked |= {"given": (given.model, getattr(given, loop))}
    if not _SEARCH.value:
        cli.refuse_unused((_COMPILES,), "is for --search: give that too")
        plan = make_plan(run.model, job, slice_, mesh=mesh, **asked)
        command = _command(loop, plan, given)
        say(describe(plan, command))
        if _JSON.value:
            say(json.dumps(dataclasses.asdict(plan) | {"command": " ".join(command)}))
        return 0
    if mesh:
        raise cli.UsageError("--search chooses the mesh; leave --mesh out")

    def tell(plan: Plan) -> None:
        verdict = f"{plan.step_seconds:.3g} s" if plan.fits else plan.refusal or "does not fit"
        say(f"tried {plan.topology} {' '.join(plan.flags)}: {verdict}, {plan.peak_bytes_per_chip / GIB:.1f} GiB")

    found = search(run.model, job, slice_, compiles=_COMPILES.value, on_plan=tell, **asked)
    for title, one in (("fastest of those", found.fastest), ("smallest slice", found.smallest)):
        none = "none fits; give a larger --topology, or more --compiles"
        say(f"{title}: " + (none if one is None else describe(one, _command(loop, one, given))))
    say(f"{len(found.tried)} configurations compiled, of {found.considered} that may fit on {slice_.name}")
    if _JSON.value:
        say(json.dumps(dataclasses.asdict(found)))
    return 0


def _runs(name: str, slice_: Slice, mesh: dict[str, int] | None) -> tuple[Any, Any]:
    """Return the run that --config, --weights and --config.NAME=VALUE start, and the run to plan.

    They differ by choices of `auto`, and by the YaRN of a preset for longer sequences than --tokens. Raises
    `UsageError` and `WeightsError`.
    """
    from configs.training import unstretched

    model = None if _WEIGHTS.value is None else lambda: auto.read_model(sources.source(_WEIGHTS, None))
    found = cli.load_config(name, "sft", "grpo", model=model)
    if auto.is_auto(name):
        given = auto.provisional(found)
        return given, auto.planned(given, slice_, mesh, _TOKENS.value)
    found = cli.overridden(found)
    if model is not None:
        auto.check_same(model(), found.model, weights=_WEIGHTS.value, config=name)
    if _TOKENS.value is None:
        return found, found
    return found, dataclasses.replace(found, model=unstretched(name, found.model))


def _command(loop: str, plan: Plan, run: Any) -> list[str]:
    """Return the command that trains what is planned, with placeholders for inputs that a plan does not need."""
    from astra_jax.planner.hardware import Slice

    inputs = {"sft": "--data=train.jsonl", "grpo": "--environments=runs/environments/train"}
    weights = _WEIGHTS.value or _hub_name(_CONFIG.value.partition(":")[2])
    own = [f"--model_class={_MODEL_CLASS.value}"] if _MODEL_CLASS.value else []
    planned = {flag.removeprefix("--config.").partition("=")[0] for flag in plan.flags}
    own += cli.given_overrides(run, but=planned)
    given = [f"--config={_CONFIG.value}", f"--weights={weights}", inputs[loop], f"--workdir=runs/{loop}", *own]
    is_gpu = Slice.parse(plan.topology).chip.clock is None
    memory = ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"] if is_gpu else []  # JAX takes 75 % of a GPU's memory by default
    return [*memory, "astra", loop, *map(shlex.quote, given), *plan.flags]


def _hub_name(size: str) -> str:
    """Return the name on the Hub of a preset's model, or a folder's name."""
    return f"Qwen/Qwen3-{size.upper()}" if size[:1].isdigit() else "weights"


def _settings() -> Any:
    """Return the settings that --help_config lists; those of `auto` without weights with a preset's model."""
    from configs.training import MODELS

    return cli.load_config(_CONFIG.value or "sft:0.6b", model=lambda: MODELS["0.6b"])


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # the program is only compiled
    os.environ.pop("JAX_PLATFORM_NAME", None)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # compilers warn about devices that are absent on purpose
    cli.run(main, settings=_settings)
