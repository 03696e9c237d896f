"""Check that a run's model, libraries and chips support its number format for matmuls."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from astra_jax.base.errors import InputError
from astra_jax.models.model import Model
from astra_jax.run.chips import chip_of


def check_matmul(matmul: str, model: Model, mesh: Mesh | None, field: str = "matmul") -> None:
    """Raise an error for formats that are not faster or not supported, before anything is read or compiled.

    A device that is not in the table, such as a CPU, emulates all formats slowly, for tests.

    Raises:
        InputError: the model does not support the format, or the chip only emulates it.
        UserError: the library is not installed.
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
