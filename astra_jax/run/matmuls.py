"""Whether a run's matmuls can be in the numbers that it asks for: its model, its library, its chips."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from astra_jax.models.model import Model
from astra_jax.run.chips import chip_of
from synthesis.core.refusals import InputError


def check_matmul(matmul: str, model: Model, mesh: Mesh | None, field: str = "matmul") -> None:
    """Refuse what would not be faster, or cannot be computed, before anything is read or compiled.

    A device that is no chip of the table, such as a CPU, emulates all of them: slowly, for tests.

    Raises:
        InputError: the model is not multiplied in such numbers, or the chip only emulates them.
        Refusal: the library is not installed.
    """
    model.check_matmul(matmul, field)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    if matmul == "none" or chip is None or matmul in dict(chip.narrow):
        return
    known = " or ".join(name for name, _ in (*chip.narrow, ("none", 1)))
    raise InputError(
        f"{field} is {matmul}, which a {chip.name} does not multiply: its compiler makes bfloat16 of them first; use "
        f"{known}"
    )
