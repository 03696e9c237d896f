"""A training step compiled for chips that are not here, and read: cycles, memory, collectives, expected time.

python -m benchmarks.compiled --config=sft:4b --topology=v6e:2x4 --tokens=20480 --mesh=fsdp=8 --save
python -m benchmarks.compiled --config=sft:4b --topology=v6e:2x4 --option=NAME=VALUE --save_hlo=FILE

With `--peer` another library's SFT step in the place of ours, for rows of its own (`compiled_peers`): the same rows and
tokens of a step, float32 weights, bfloat16 arithmetic, AdamW, weights over all chips. Its environment, once:

python -m venv .venv-tunix && .venv-tunix/bin/pip install google-tunix==0.1.7 jax[tpu]==0.10.2 flax==0.12.8
python3.12 -m venv .venv-maxtext && .venv-maxtext/bin/pip install maxtext[tpu]==0.2.5
python -m benchmarks.compiled --config=sft:4b --config.sft.batch_size=8 --topology=v6e:2x4 --tokens=4096 \
    --peer=tunix --tunix=.venv-tunix/bin/python --save
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

from absl import flags

from astra_jax.base.settings import Length
from astra_jax.base.terminal import say
from benchmarks import rows
from launch.flags import cli, meshes
from launch.flags.numbers import number_flag

_CONFIG = flags.DEFINE_string("config", "sft:4b", "A preset or a file; override with --config.NAME=VALUE.")
_TOPOLOGY = flags.DEFINE_string("topology", "v6e:2x4", "Slice.")
_TOKENS = number_flag("tokens", None, Length, "Longest sequence; by default everything as configured.")
_MESH = flags.DEFINE_list("mesh", None, "Axis sizes; by default chosen.")
_OPTIONS = flags.DEFINE_multi_string("option", [], "NAME=VALUE of the compiler; may be given several times.")
_HLO = flags.DEFINE_string(
    "save_hlo", None, "File for the compiled text; with .gz compressed. GRPO's programs: FILE.NAME."
)
_JSON = flags.DEFINE_bool("json", False, "Print the row only.")
_PEER = flags.DEFINE_list("peer", [], "Of tunix and maxtext: compiled in the place of ours.")
_TUNIX = flags.DEFINE_string("tunix", None, "Python of an environment with google-tunix.")
_MAXTEXT = flags.DEFINE_string("maxtext", None, "Python of an environment with MaxText.")
_CUTS = flags.DEFINE_list(
    "cuts", ["2", "4"], "Layers that a peer is compiled with; its figures are of the whole model."
)
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the kept ones.")


def main() -> None:
    from astra_jax.mesh import AXES
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.plan import describe, make_plan
    from configs.training import SFTRun

    run = cli.overridden(cli.load_config(_CONFIG.value, "sft", "grpo"))
    config = run.sft if isinstance(run, SFTRun) else run.grpo
    if _PEER.value:
        _peers(run)
        return
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


def _peers(run: Any) -> None:
    """A row of each."""
    from astra_jax.planner.hardware import Slice
    from benchmarks.compiled_peer import compile_peer

    pythons = {"tunix": _TUNIX.value, "maxtext": _MAXTEXT.value}
    if missing := [name for name in _PEER.value if not pythons.get(name)]:
        raise cli.UsageError(f"--peer={','.join(_PEER.value)}: no --{missing[0]}=PYTHON of an environment that has it")
    job, size = _CONFIG.value.split(":")
    if job != "sft":
        raise cli.UsageError(f"--config={_CONFIG.value}: peers' steps are of SFT; use sft:SIZE")
    for name in _PEER.value:
        figures = compile_peer(
            name,
            pythons[name],
            size,
            Slice.parse(_TOPOLOGY.value),
            batch_size=run.sft.batch_size,
            tokens=_TOKENS.value or run.sft.data.seq_len,
            depth=run.model.n_layers,
            cuts=[int(cut) for cut in _CUTS.value],
        )
        rows.report("compiled_peers", {"library": name, "config": _CONFIG.value} | figures, save=_SAVE.value)


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
