"""What segment ids say: which document a token of a row is of, and which other document that one goes on from.

A document that goes on from another sees all of it, as if the other stood before it: episodes of one group go on from
their prompt, which is then in the row once. Positions go on too, and say what is before what.
"""

from __future__ import annotations

from typing import Any

Array = Any

_BITS = 15  # twice it, and an int32 has no sign
MOST = 2**_BITS - 1
"""Documents of a row."""


def going_on(document: int, other: int) -> int:
    """The segment id of a document that goes on from another, which goes on from none; both numbered from 1.

    Raises:
        ValueError: a number beyond `MOST`.
    """
    if not (1 <= document <= MOST and 1 <= other <= MOST):
        raise ValueError(f"documents {document} and {other} of a row; numbers are from 1 to {MOST}")
    return other << _BITS | document


def numbers(segment_ids: Array) -> Array:
    """The documents' own numbers; 0 is padding."""
    return segment_ids & MOST


def before(segment_ids: Array) -> Array:
    """The segment ids of those that they go on from; 0: from none."""
    return segment_ids >> _BITS


def same_or_before(of_queries: Array, of_keys: Array) -> Array:
    """Whether keys are of their query's document, or of the one that it goes on from; never for padding."""
    return (of_keys > 0) & ((of_queries == of_keys) | (before(of_queries) == of_keys))
