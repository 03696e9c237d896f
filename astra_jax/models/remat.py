"""Names of rematerialisation policies: what the backward pass of a model recomputes. `decoder` implements them."""

from __future__ import annotations

REMATS = ("none", "dots", "heads", "attention", "offload", "full")
"""Policies, from the most kept of each layer to the least.

- none: everything.
- dots: the outputs of matmuls, except experts', and of attention.
- heads: the inputs and the output of attention.
- attention: the output of attention (long rows, where it is most of the work) and the layer's input.
- offload: the same as attention, in the host's memory, copied there and back in parallel with the layers.
- full: the layer's input.
"""
