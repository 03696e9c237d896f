"""Settings of `sft:auto` for slices of TPUs, compiled."""

from __future__ import annotations

from typing import Any

import pytest
from tpu_world import needs_libtpu

from astra_jax.mesh import AXES
from astra_jax.planner.hardware import Slice
from astra_jax.planner.plan import make_plan
from configs import auto
from configs.training import AUTO, MODELS


@needs_libtpu
@pytest.mark.slow
def test_what_is_chosen_for_a_slice_fits_there() -> None:
    """The compiler says so, where the choice was made by arithmetic."""
    slice_, model = Slice.parse("v6e:2x2"), MODELS["0.6b"].in_training_precision()
    mesh = dict.fromkeys(AXES, 1) | {"fsdp": slice_.chips}
    config: Any = AUTO["sft:auto"](model)
    sft, _ = auto.choose_without_data(config.sft, model, (), mesh=mesh)
    place = auto.DeviceSetup(mesh, slice_.chip.hbm_bytes, slice_.chip.name, "tpu")
    sft, _ = auto.choose_for_devices(sft, model, place, (), tokens=sft.data.seq_len, rows=sft.batch_size)
    plan = make_plan(model, sft, slice_, mesh={"fsdp": slice_.chips})
    assert plan.fits, (plan.remat, plan.micro_batch_size, plan.peak_bytes_per_chip / 2**30)
