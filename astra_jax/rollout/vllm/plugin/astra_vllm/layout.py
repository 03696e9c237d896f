"""Memory layout of a policy's tensors: leaves are Hugging Face tensors stacked over layers.

A leaf's name has a `{}` for each stacked axis: `model.layers.{}.mlp.up_proj.weight` of shape [28, 3072, 1024] has 28
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
"""Supported dtypes; tensorstore and torch use the same names."""
Range = tuple[tuple[int, int], ...]
"""Part of a leaf: start and end along each axis."""
Parts = dict[tuple[int, Range], str]
"""Digests of a buffer's contents, by the first byte of the leaf and the part of it."""


class PolicyCheckpointError(Exception):
    """The weights cannot be used. The message names the first problem."""


class Leaf(NamedTuple):
    """Description of a leaf.

    Attributes:
        dtype: any; `laid_out` accepts only `DTYPES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Span:
    """Location of a tensor in the buffer.

    Attributes:
        name: in Hugging Face's naming.
        dtype: one of `DTYPES`.
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
    """Return the bytes of one number."""
    return 4 if dtype == "float32" else 2


def laid_out(
    source: str, count: int, leaves: Iterable[Leaf], expected: Shapes, optional: Shapes, dtype: str
) -> list[Span]:
    """Check every tensor's name, shape and dtype, and lay them out in sequence, without allocating their size.

    Args:
        source: prefix of messages.
        count: number of leaves.
        expected: the server's model.
        optional: tensors that may also be present.
        dtype: in which the model is served; the leaves must match, unless this is float32.

    Raises:
        PolicyCheckpointError: names the first tensor that is missing, unexpected or of another shape or dtype.
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
        # Check before creating a span for each: a shape of a few bytes can claim any number.
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
    """Return the bytes of a buffer for these spans."""
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
