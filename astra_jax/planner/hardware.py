"""Chips, slices and meshes on them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chip:
    """One accelerator as JAX sees it.

    Attributes:
        hbm_bytes: what the compiler gives a program; a little below the data sheet's.
        flops: bf16 peak, a second.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second that a chip can receive over all its links.
        slices: topology names, ascending in size.
    """

    name: str
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    slices: tuple[str, ...]


GIB = 2**30
# HBM: the compiler's own "available" in its out-of-memory message. The rest: Google's system architecture pages, with
# 4 links of 45 GB/s one way (v5e), 6 of 90 (v5p), 4 of 90 (v6e).
CHIPS = {
    "v5e": Chip(
        "v5e",
        int(15.75 * GIB),
        197e12,
        819e9,
        180e9,
        ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    ),
    "v5p": Chip(
        "v5p",
        int(95.74 * GIB),
        459e12,
        2765e9,
        540e9,
        ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    ),
    "v6e": Chip(
        "v6e",
        int(31.25 * GIB),
        918e12,
        1640e9,
        360e9,
        ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    ),
}
TOKENS_PER_CHIP = 8_192
"""Of one row: longer ones are spread over `context`. The saved layer inputs of 14B are then 3.4 GB a chip."""


class PlanError(Exception):
    """The plan cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Slice:
    """A named slice, for example `v5p:2x2x4`."""

    chip: Chip
    shape: str

    @classmethod
    def parse(cls, name: str) -> Slice:
        """From `KIND:AxBxC`.

        Raises:
            PlanError: an unknown kind, or no shape.
        """
        kind, _, shape = name.partition(":")
        if kind not in CHIPS:
            raise PlanError(f"topology {name!r}: there is no chip {kind!r}; use one of {', '.join(CHIPS)}")
        parts = shape.split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            example = CHIPS[kind].slices[1]
            raise PlanError(f"topology {name!r}: {shape!r} is no shape; write for example {kind}:{example}")
        return cls(CHIPS[kind], shape)

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def chips(self) -> int:
        return math.prod(int(part) for part in self.shape.split("x"))

    def devices(self) -> list[Any]:
        """Descriptions of the slice's devices to compile for.

        Raises:
            PlanError: libtpu is not installed, or knows no such slice.
        """
        # Set before JAX looks for a TPU of its own.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
        from jax.experimental import topologies

        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise PlanError(
                f"topology {self.name!r}: {first}; install libtpu with pip install '.[tpu]', or use another shape, for "
                f"example {', '.join(self.chip.slices)}"
            ) from None


def larger(one: Slice) -> list[Slice]:
    """All known slices of the same chip, ascending."""
    return [Slice(one.chip, shape) for shape in one.chip.slices]


def mesh_sizes(chips: int, tokens: int) -> dict[str, int]:
    """Rows are spread over `context` until a chip has at most `TOKENS_PER_CHIP` of one; what is left is `fsdp`."""
    context = 1
    while tokens / context > TOKENS_PER_CHIP and chips % (2 * context) == 0:
        context *= 2
    return {"fsdp": chips // context, "context": context}


def row_length(tokens: int, context: int) -> int:
    """The row length that the step is compiled for: at least `tokens`, in blocks that attention can tile.

    Over `context` a row is cut into twice as many chunks, each of whole blocks of 128; of 256 where that costs at most
    a twentieth more.
    """
    pieces = 2 * context if context > 1 else 1
    small, large = (math.ceil(tokens / (pieces * block)) * pieces * block for block in (128, 256))
    return large if large <= 1.05 * tokens else small
