"""The engine's decoding compiled for chips that are not here, beside what their memory allows.

    python -m benchmarks.compiled_decode --model=4b --topology=v6e:2x2 --slots=16 --length=4096 [--save]

One device, or `--mesh`; all slots decode, over caches that are full. The floor of a step is the bytes that it must read
over the chip's bandwidth; `share` is the floor over the compiler's own cycles at the chip's clock: those of a step, and
its part of what is done once for each chunk. Collectives have no cycles. On a chip it is `benchmarks.decode_floor`.
"""

from __future__ import annotations

import dataclasses
import os

from absl import flags

from astra_jax.base.settings import Count, Length, Slots
from benchmarks import rows
from launch.flags import meshes
from launch.flags.cli import UsageError, run
from launch.flags.numbers import number_flag

_MODEL = flags.DEFINE_string("model", "4b", "Name of a dense preset.")
_TOPOLOGY = flags.DEFINE_string("topology", "v6e:2x2", "Slice whose chips are compiled for.")
_MESH = flags.DEFINE_list("mesh", [], "Sizes of mesh axes; by default one device.")
_SLOTS = number_flag("slots", 16, Slots, "Rows that decode together.")
_LENGTH = number_flag("length", 4096, Length, "Cached positions of each.")
_STEPS = number_flag("steps", 32, Count, "Tokens of a chunk.")
_STORED = flags.DEFINE_enum("stored", "none", ["none", "int8"], "How the layers' matrices are kept.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the kept ones.")


def main() -> None:
    import jax

    from astra_jax.mesh import AXES, make_mesh
    from astra_jax.models.flops import decoding_bytes
    from astra_jax.planner.cycles import count_cycles
    from astra_jax.planner.decoding import lower_decode
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.hlo import read_hlo
    from astra_jax.run.chips import GIB
    from configs.training import MODELS

    dense = [name for name, preset in MODELS.items() if not preset.n_experts]
    if _MODEL.value not in dense:
        raise UsageError(f"--model is {_MODEL.value!r}; use one of {', '.join(dense)}")
    model = dataclasses.replace(MODELS[_MODEL.value], dtype="bfloat16", param_dtype="bfloat16")
    slice_ = Slice.parse(_TOPOLOGY.value)
    if slice_.chip.clock is None:
        raise UsageError(f"--topology={_TOPOLOGY.value}: only TPUs' compilers estimate cycles")
    sizes = meshes.axis_sizes(_MESH, AXES)
    devices = slice_.devices()
    mesh = make_mesh(*(sizes.get(axis, 1) for axis in AXES), devices=devices if sizes else devices[:1])
    compiled = lower_decode(model, _SLOTS.value, _LENGTH.value, _STEPS.value, mesh, stored=_STORED.value).compile()
    # The loop over a chunk's tokens ends early where every row has stopped, so its trips are not in the text.
    chunk = count_cycles(read_hlo(compiled.as_text()).with_unknown_loops(_STEPS.value)).total
    step = chunk / _STEPS.value / slice_.chip.clock
    floor = decoding_bytes(model, _SLOTS.value, _LENGTH.value, _STORED.value) / mesh.size / slice_.chip.hbm_bandwidth
    memory = compiled.memory_analysis()
    row = {
        "model": _MODEL.value,
        "topology": _TOPOLOGY.value,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "slots": _SLOTS.value,
        "length": _LENGTH.value,
        "steps": _STEPS.value,
        "stored": _STORED.value,
        "step_ms": round(1e3 * step, 2),
        "floor_ms": round(1e3 * floor, 2),
        "share": round(floor / step, 3),
        "peak_gib": round(memory.peak_memory_in_bytes / GIB, 2),
        "temporaries_gib": round(memory.temp_size_in_bytes / GIB, 2),
        "jax": jax.__version__,
    }
    rows.report("compiled_decode", row, save=_SAVE.value)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # the program is only compiled
    run(main)
