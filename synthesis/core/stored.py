"""Sequences of many records that are read on demand: the outputs of a stage, a selection, or several joined.

Memory holds an index (`Keys` of the inputs, 12 bytes for an output, 8 for a selected one), never the records. Each pass
reads them from the journal.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar, overload

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.compat import decode_stored, todays_reason
from synthesis.core.journal import Journal

T = TypeVar("T")
_AT_ONCE = 64
"""Records in memory at a time while a sequence is read."""


class Records(Sequence[T]):
    """A sequence of records that every pass reads from its source; its slices and sums are such sequences too."""

    @abstractmethod
    def iter_at(self, positions: Iterable[int]) -> Iterator[T]:
        """Yield the records at some positions, from 0."""

    def __iter__(self) -> Iterator[T]:
        return self.iter_at(range(len(self)))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Records[T]: ...
    def __getitem__(self, index: int | slice) -> T | Records[T]:
        chosen = range(len(self))[index]
        return Select(self, chosen) if isinstance(chosen, range) else next(self.iter_at((chosen,)))

    def __add__(self, other: Records[T]) -> Records[T]:
        return Concat([self, other])

    def select(self, positions: Iterable[int]) -> Records[T]:
        """Return the records at some positions, in their order."""
        return Select(self, positions)

    def filter(self, keep: Callable[[T], object]) -> Records[T]:
        """Return the records for which `keep` is true; each record is read once for this."""
        return Select(self, (position for position, one in enumerate(self) if keep(one)))


def outputs_of(
    journal: Journal,
    stage: str,
    keys: Iterable[str],
    out: type[T],
    rejected: Callable[[str, str], object] | None = None,
) -> Iterator[tuple[int, list[T]]]:
    """Yield the outputs of finished inputs, with each input's number; rejected inputs have none.

    Args:
        out: type of the outputs.
        rejected: called with reason and detail of each rejected input.

    Raises:
        InputError: the outputs are of another type.
        KeyError: an input is not finished.
    """
    for number, (data, reason, detail) in enumerate(journal.rows(stage, keys)):
        if data is not None:
            try:
                yield number, decode_stored(data, list[out])  # type: ignore[valid-type]
            except msgspec.MsgspecError as error:
                raise InputError(
                    f"{journal.path}: the finished work of stage {stage} is of another version ({error}); delete the "
                    "file to start from scratch"
                ) from None
        elif rejected is not None:
            rejected(todays_reason(reason), detail)


class JournalView(Records[T]):
    """Outputs of a finished stage, in the order of its inputs. They can be read while the journal is open.

    Args:
        keys: of the inputs, all of them finished.
        out: the outputs' type.
        rejected: called with reason and detail of each rejected input.

    Raises:
        InputError: the outputs are of another type.
    """

    def __init__(
        self, journal: Journal, stage: str, keys: Sequence[str], out: type[T], rejected: Callable[[str, str], object]
    ) -> None:
        self._journal, self._stage, self._keys, self._type = journal, stage, keys, out
        self._inputs, self._parts = array("Q"), array("I")
        for number, outputs in outputs_of(journal, stage, keys, self._type, rejected):
            self._inputs.extend([number] * len(outputs))
            self._parts.extend(range(len(outputs)))

    def __len__(self) -> int:
        return len(self._inputs)

    def iter_at(self, positions: Iterable[int]) -> Iterator[T]:
        """See `Records.iter_at`."""
        waiting = iter(positions)
        while some := list(islice(waiting, _AT_ONCE)):
            inputs = [self._inputs[position] for position in some]
            needed = list(dict.fromkeys(inputs))
            keys = [self._keys[one] for one in needed]
            made = [outputs for _, outputs in outputs_of(self._journal, self._stage, keys, self._type)]
            of_inputs = dict(zip(needed, made, strict=True))
            for one, position in zip(inputs, some, strict=True):
                yield of_inputs[one][self._parts[position]]


class Select(Records[T]):
    """Records of a sequence, selected by position."""

    def __init__(self, records: Sequence[T], positions: Iterable[int]) -> None:
        self._records = records
        self._positions = positions if isinstance(positions, range) else array("Q", positions)

    def __len__(self) -> int:
        return len(self._positions)

    def iter_at(self, positions: Iterable[int]) -> Iterator[T]:
        """See `Records.iter_at`."""
        return _iter_at(self._records, (self._positions[position] for position in positions))


class Concat(Records[T]):
    """Concatenation of several sequences."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def iter_at(self, positions: Iterable[int]) -> Iterator[T]:
        """See `Records.iter_at`."""
        waiting = iter(positions)
        while some := list(islice(waiting, _AT_ONCE)):
            by_part: dict[int, list[int]] = {}
            whose = [bisect_right(self._ends, position) for position in some]
            for part, position in zip(whose, some, strict=True):
                by_part.setdefault(part, []).append(position - (self._ends[part - 1] if part else 0))
            found = {part: _iter_at(self._parts[part], local) for part, local in by_part.items()}
            for part in whose:
                yield next(found[part])


class MapView(Records[T]):
    """Results of a function applied to the records at each position of several sequences of equal length."""

    def __init__(self, function: Callable[..., T], *parts: Records[Any]) -> None:
        self._function, self._of = function, parts

    def __len__(self) -> int:
        return len(self._of[0])

    def iter_at(self, positions: Iterable[int]) -> Iterator[T]:
        """See `Records.iter_at`."""
        waiting = iter(positions)
        while some := list(islice(waiting, _AT_ONCE)):
            yield from map(self._function, *(part.iter_at(some) for part in self._of))


def _iter_at(records: Sequence[T], positions: Iterable[int]) -> Iterator[T]:
    return records.iter_at(positions) if isinstance(records, Records) else map(records.__getitem__, positions)


class Keys(Sequence[str]):
    """Unique names of a stage's inputs, in their order: UTF-8 text plus 8 bytes for each.

    Args:
        stage: for the message of `add`.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._text, self._ends = bytearray(), array("Q", [0])
        self._hashes: set[int] = set()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        chosen = range(len(self))[index]
        return [self[one] for one in chosen] if isinstance(chosen, range) else self._at(chosen)

    def _at(self, index: int) -> str:
        return self._text[self._ends[index] : self._ends[index + 1]].decode()

    def add(self, key: str) -> str:
        """Add a name and return it. Raises `InputError`: it is there already."""
        if (hashed := hash(key)) in self._hashes and key in self:  # of equal hashes one in 10^19 is of another key
            raise InputError(f"stage {self._stage}: two inputs have the key {key!r}; keys must be unique")
        self._hashes.add(hashed)
        self._text += key.encode()
        self._ends.append(len(self._text))
        return key

    def close(self) -> None:
        """Finish: no more names are added."""
        self._hashes.clear()
