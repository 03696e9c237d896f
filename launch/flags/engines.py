"""Flags of the embedded engine, for programs that serve a model with it."""

from __future__ import annotations

from typing import Annotated

from absl import flags

from astra_jax.base.settings import Bound, Slots
from launch.flags.numbers import number_flag

SLOTS = number_flag("slots", 16, Slots, "Sequences that decode at the same time: completions.")
LENGTH = number_flag(
    "max_length",
    None,
    Annotated[int, Bound(least=2, most=2**24)],
    "Maximum tokens of prompt and completion together; by default the model's max_positions, but at most 32,768.",
)
WEIGHT_QUANTIZATION = flags.DEFINE_enum(
    "weight_quantization",
    "none",
    ["none", "int8"],
    "Number format of the layers' matrices: as stored, or int8, with which a token reads half as many bytes.",
)
