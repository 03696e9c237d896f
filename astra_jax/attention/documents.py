"""Segment ids: the document of each token of a row, and the document that it continues.

A document that continues another sees all of it, as if it followed directly. For example, episodes of one group
continue their prompt, which is then in the row once. Positions continue too, and define the order.
"""

from __future__ import annotations

from typing import Any

Array = Any

_BITS = 15  # two numbers of 15 bits fit into an int32 without its sign
MOST = 2**_BITS - 1
"""Most documents of a row."""


def prefix_segment_id(document: int, other: int) -> int:
    """Return the segment id of a document that continues another, which continues none; both are numbered from 1.

    Raises:
        ValueError: a number is above `MOST`.
    """
    if not (1 <= document <= MOST and 1 <= other <= MOST):
        raise ValueError(f"documents {document} and {other} of a row; numbers are from 1 to {MOST}")
    return other << _BITS | document


def numbers(segment_ids: Array) -> Array:
    """Return the documents' own numbers; 0 is padding."""
    return segment_ids & MOST


def before(segment_ids: Array) -> Array:
    """Return the segment ids of the continued documents; 0 for documents that continue none."""
    return segment_ids >> _BITS


def same_or_before(of_queries: Array, of_keys: Array) -> Array:
    """Return whether keys are in their query's document, or in the document that it continues. Never for padding."""
    return (of_keys > 0) & ((of_queries == of_keys) | (before(of_queries) == of_keys))
