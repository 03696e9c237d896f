"""Which slice is the smallest that fits."""

from __future__ import annotations

from typing import Any

from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.model import Model, parameters
from astra_jax.planner.hardware import PlanError, Slice, larger
from astra_jax.planner.plan import Plan, make_plan
from astra_jax.sft.config import SFTConfig


def smallest(model: Model, config: SFTConfig | GRPOConfig, slice_: Slice, **options: Any) -> Plan:
    """The plan of the smallest slice of `slice_`'s kind that fits, not larger than `slice_`.

    Slices that cannot hold weights and optimizer state alone are not compiled.

    Raises:
        PlanError: none fits.
    """
    state = 4 * 4 * parameters(model)  # weights, gradients and two statistics, float32
    for one in larger(slice_):
        if one.chips > slice_.chips:
            break
        if state / one.chips > one.chip.hbm_bytes:
            continue
        try:
            plan = make_plan(model, config, one, **options)
        except ValueError:  # the mesh does not divide the model
            continue
        if plan.fits:
            return plan
    raise PlanError(f"no {slice_.chip.name} slice of up to {slice_.chips} chips fits; give a larger --topology")
