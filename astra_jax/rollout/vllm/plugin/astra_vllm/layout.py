"""Where the tensors of a policy lie in memory: leaves that are Hugging Face's tensors, stacked over layers.

A leaf's name has a `{}` for each stacked axis: `model.layers.{}.mlp.up_proj.weight` of shape [28, 3072, 1024] holds 28
tensors of [3072, 1024].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that are taken; tensorstore and torch have the same names for them."""
Range = tuple[tuple[int, int], ...]
"""A part of a leaf: from and to, along each axis."""
Parts = dict[tuple[int, Range], str]
"""Digests of what a buffer holds, by the first byte of the leaf and the part of it."""


class PolicyCheckpointError(Exception):
    """The weights cannot be used; the message names the first thing that is wrong with them."""


class Leaf(NamedTuple):
    """What is said of one.

    Attributes:
        dtype: any; `laid_out` takes those of `DTYPES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in the buffer that is filled.

    Attributes:
        name: Hugging Face's.
        dtype: of `DTYPES`.
        start: first byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return 4 if dtype == "float32" else 2


def laid_out(
    source: str, count: int, leaves: Iterable[Leaf], expected: Shapes, optional: Shapes, dtype: str
) -> list[Span]:
    """Check every tensor's name, shape and dtype, and place them one after the other. Nothing of their size is made.

    Args:
        source: what messages begin with.
        count: of the leaves.
        expected: the server's model.
        optional: what may be there too.
        dtype: that the model is served in; the leaves have it too, unless it is float32, which holds them all.

    Raises:
        PolicyCheckpointError: names the first tensor that is missing, left over or of another shape or dtype.
    """
    known = {**optional, **expected}
    if count > len(known):
        raise PolicyCheckpointError(f"{source}: it has {count} leaves, the model {len(known)} tensors")
    spans: dict[str, Span] = {}
    start = 0
    for leaf in leaves:
        _check_dtype(source, leaf, dtype)
        stacked, shape = leaf.name.count("{}"), leaf.shape
        if stacked > len(shape):
            raise PolicyCheckpointError(f"{source}: leaf {leaf.name} has only {len(shape)} axes")
        # Before there is a span for each: a shape is a few bytes, whatever it says.
        if (held := math.prod(shape[:stacked])) > len(known) - len(spans):
            raise PolicyCheckpointError(
                f"{source}: leaf {leaf.name} of shape {list(shape)} holds {held} tensors, more than the model has"
            )
        for place in itertools.product(*map(range, shape[:stacked])):
            span = Span(_filled(leaf.name, place), shape[stacked:], leaf.dtype, start)
            if span.name not in known or span.name in spans:
                twice = "is there twice" if span.name in spans else "is not part of the model"
                raise PolicyCheckpointError(f"{source}: tensor {span.name} {twice}")
            if span.shape != known[span.name]:
                raise PolicyCheckpointError(
                    f"{source}: tensor {span.name} has shape {list(span.shape)}, the model's has "
                    f"{list(known[span.name])}"
                )
            spans[span.name] = span
            start += span.bytes
    for name, shape in sorted(expected.items()):
        if name not in spans:
            raise PolicyCheckpointError(f"{source}: tensor {name} is missing; the model's has shape {list(shape)}")
    return list(spans.values())


def all_bytes(spans: list[Span]) -> int:
    """Of a buffer for them."""
    return spans[-1].start + spans[-1].bytes if spans else 0


def _check_dtype(source: str, leaf: Leaf, served: str) -> None:
    if leaf.dtype not in DTYPES:
        raise PolicyCheckpointError(f"{source}: leaf {leaf.name} is {leaf.dtype}; publish {', '.join(DTYPES)}")
    if served not in ("float32", leaf.dtype):
        raise PolicyCheckpointError(
            f"{source}: leaf {leaf.name} is {leaf.dtype}, the model is served in {served}: publish that, or start the "
            "server with --dtype float32"
        )


def _filled(name: str, place: tuple[int, ...]) -> str:
    for i in place:
        name = name.replace("{}", str(i), 1)
    return name
