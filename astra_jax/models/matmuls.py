"""In which numbers a model's linear layers are multiplied, by name; `layers.quantized` says how."""

from __future__ import annotations

MATMULS = ("none", "int8", "fp8")
"""As they are, in the model's `dtype`; in whole numbers of 8 bits; in floating-point numbers of 8 bits (e4m3; gradients
e5m2)."""

STORED = ("none", "int8")
"""How the layers' matrices are kept for decoding: in the model's `dtype`; in 8 bits, with a scale for each output."""
