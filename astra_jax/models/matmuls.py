"""Names of the number formats of a model's linear layers; `layers.quantized` implements them."""

from __future__ import annotations

MATMUL_QUANTIZATIONS = ("none", "int8", "fp8")
"""Formats of matmuls: the model's `dtype`, 8-bit integers, or 8-bit floating point (e4m3; gradients e5m2)."""

WEIGHT_QUANTIZATIONS = ("none", "int8")
"""Formats of the layers' stored matrices for decoding: the model's `dtype`, or 8 bits with a scale for each output."""
