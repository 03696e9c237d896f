"""Another library's training step, compiled for the slice that ours is compiled for, and read in the same way.

A library that writes its layers out takes very long to compile at full depth. So it is compiled with few layers, twice,
and what a layer adds is added for the others: cycles and bytes grow by the layer. `layers` of the figures says with how
many, `compile_seconds` what each took: of those the machine's other users would be added too.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.cycles import count_cycles
from astra_jax.planner.hardware import Slice
from astra_jax.planner.hlo import read_hlo
from astra_jax.planner.network import Torus
from astra_jax.planner.programs import refused
from astra_jax.planner.schedule import schedule_of
from benchmarks import rows

Figures = dict[str, Any]


def compile_peer(
    peer: str, python: str, size: str, slice_: Slice, batch_size: int, tokens: int, depth: int, cuts: Sequence[int]
) -> Figures:
    """Compile a step of another library with all rows at once. Return the numbers that `plan.make_plan` returns for
    ours.

    Args:
        python: interpreter of the peer's environment.
        size: size of Qwen3, as in the presets.
        depth: layers of the model.
        cuts: two ascending numbers of layers to compile, or one, the depth.
    """
    work = {"size": size, "topology": slice_.name, "chips": slice_.chips, "rows": batch_size, "tokens": tokens}
    found = [_compiled(peer, python, work | {"layers": layers}, slice_) for layers in cuts]
    seconds = [one.pop("compile_seconds") for one in found]
    whole = found[0] if len(found) == 1 else deeper(found[0], found[1], (cuts[1] - cuts[0]), depth - cuts[1])
    refusals = [one["refusal"] for one in found if one["refusal"]]
    fits = not refusals and whole["peak_bytes_per_chip"] <= slice_.chip.hbm_bytes
    asked = {"topology": slice_.name, "chips": slice_.chips, "batch_size": batch_size, "row_tokens": tokens}
    told = {"layers": list(cuts), "compile_seconds": seconds, "fits": fits, "refusal": "; ".join(refusals)}
    return asked | whole | told


def deeper(less: Figures, more: Figures, step: int, missing: int) -> Figures:
    """`more`, and for `missing` further layers what `step` of them had added to `less`."""

    def one(a: Any, b: Any) -> Any:
        if isinstance(b, Mapping):
            return {name: one(a.get(name, 0.0), value) for name, value in b.items()}
        return b + (b - a) / step * missing if isinstance(b, float) else b

    return one(less, more)


def _compiled(peer: str, python: str, work: Mapping[str, Any], slice_: Slice) -> Figures:
    """One depth.

    Raises:
        RuntimeError: the peer has failed, not for want of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hlo.txt"
        command = [python, "-m", "benchmarks.compiled_peer_side", peer, json.dumps(work), str(file)]
        done = subprocess.run(command, cwd=rows.ROOT, env=dict(os.environ), stdout=subprocess.PIPE)
        if done.returncode:
            raise RuntimeError(f"{peer} ended with {done.returncode}; see its output above")
        said = json.loads(done.stdout)
        common = {"versions": said["versions"], "compile_seconds": float(said["seconds"])}
        if "refused" in said:
            peak, why = refused(said["refused"])
            return common | {"refusal": why, "peak_bytes_per_chip": peak}
        module = read_hlo(file.read_text(encoding="utf-8"))
    by_id = {device.id: device for device in slice_.devices()}
    places = [by_id[number] for number in said["devices"]]
    network = Torus.of(places, slice_.shape, slice_.chip.link_bandwidth, slice_.chip.network_bandwidth)
    schedule = schedule_of(module, slice_.chip, network, said["mesh"])
    return common | {
        "refusal": "",
        "mesh": {axis: size for axis, size in said["mesh"].items() if size > 1},
        "peak_bytes_per_chip": float(said["peak"]),
        "collective_bytes_by_axis": bytes_by_axis(module, said["mesh"]),
        "cycles": count_cycles(module).by_category,
        "seconds": schedule.work | schedule.exposed,
        "step_seconds": schedule.seconds,
        "uncounted": list(schedule.unknown),
    }
