"""What the backward pass of a model may recompute, by name; `decoder` says how."""

from __future__ import annotations

REMATS = ("none", "dots", "heads", "attention", "offload", "full")
"""What is kept of a layer, ever less: everything; the outputs of matmuls, but experts', and of attention; what goes
into attention and comes out of it; what comes out of it (long rows, where attention is most of the work) and the
layer's input; the same, in the host's memory, copied there and back beside the layers; the layer's input."""
