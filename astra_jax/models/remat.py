"""What the backward pass of a model may recompute, by name; `decoder` says how."""

from __future__ import annotations

REMATS = ("none", "dots", "attention", "full")
"""Layer by layer: nothing; all but the outputs of matmuls and attention; all but attention's, from the layer's input
(long rows, where attention is most of the work); all, from the layer's input."""
