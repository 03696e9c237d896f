"""Batches of packed rows from examples of any length, one epoch after another.

    examples in their order (made ahead by workers) ─ first-fit packing into rows of seq_len ─ batches of rows

Rows and batches end where an epoch ends: its last rows may be shorter, and its last batch may have fewer rows. So each
example is in its own epoch once, and an epoch has the same batches however many epochs follow. The state is a few
integers.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grain
import numpy as np
from absl import logging
from grain.experimental import FirstFitPackIterDataset, batch_and_pad

Arrays = dict[str, np.ndarray]

_AHEAD = 256
"""Examples that a worker has ready: packing takes as many as its open rows hold at once."""
_WORKER_DIED = "terminated unexpectedly"
"""Part of Grain's message about a worker that a signal ended, for example when it ran out of memory."""
_REPLACED = 3
"""Workers that die are replaced this many times in a row before one example; after that the example, or the machine, is
at fault."""


class EpochBatches(Iterator[Arrays]):
    """Batches of one epoch after another, without end. Use it in a `with` statement, which stops its workers.

    Args:
        examples: returns the examples of the first N epochs; None: of endlessly many, of which these are the first. An
            example has `tokens` and `loss_mask` [L]; None is an example that was dropped.
        seq_len: tokens in a row.
        batch_size: rows in a batch. Rows that the last batch of an epoch lacks are padding.
        bins: rows that are filled at the same time; they come in an order that `seed` decides.
        workers: processes that make examples ahead; batches do not depend on the number.
    """

    def __init__(
        self,
        examples: Callable[[int | None], grain.MapDataset],
        seq_len: int,
        batch_size: int,
        *,
        bins: int,
        seed: int,
        workers: int = 0,
    ) -> None:
        self._examples_of = examples
        self._in_order = _InOrder(examples(None), workers)
        rows = FirstFitPackIterDataset(
            self._in_order,
            length_struct={"tokens": seq_len, "loss_mask": seq_len},
            num_packing_bins=bins,
            seed=seed,
        )
        self._iterator = iter(rows.batch(batch_size, batch_fn=partial(batch_and_pad, batch_size=batch_size)))
        self._begin(0)

    def _begin(self, epoch: int | None) -> None:
        self._epoch: int | None = epoch
        self._in_order.end = sys.maxsize if epoch is None else len(self._examples_of(epoch + 1))

    def __next__(self) -> Arrays:
        """Return the next batch. Raises StopIteration: a whole epoch has no example that was not dropped."""
        if (batch := next(self._iterator, None)) is not None:
            return batch
        if self._epoch is not None:
            self._begin(self._epoch + 1)
        return next(self._iterator)

    def epoch(self) -> Iterator[Arrays]:
        """Iterate over the remaining batches of the current epoch."""
        while (batch := next(self._iterator, None)) is not None:
            yield batch
        if self._epoch is not None:
            self._begin(self._epoch + 1)

    def get_state(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        state: dict[str, Any] = self._iterator.get_state()
        return state if self._epoch is None else {**state, "epoch": self._epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position of `get_state`. One without `epoch` is of a version whose rows and batches held
        examples of neighbouring epochs: it continues that way, to the bit."""
        self._begin(state.get("epoch"))
        self._iterator.set_state({name: value for name, value in state.items() if name != "epoch"})

    def close(self) -> None:
        """Stop the workers; no batches follow."""
        self._iterator.close()

    def __enter__(self) -> EpochBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def steps_in(counts: Sequence[int], epochs: float) -> int:
    """Count the batches of the whole epochs, and of the last one its part, rounded up.

    Args:
        counts: batches of each epoch, as of `batches_of_epochs`.
    """
    whole = int(epochs)
    part = round((epochs - whole) * counts[-1], 6)
    return max(1, sum(counts[:whole]) + math.ceil(part))


class _InOrder(grain.IterDataset):
    """The non-dropped examples of a sparse dataset in order, made ahead by any number of workers.

    Attributes:
        end: index before which iterators pause: they raise StopIteration until it is raised.
    """

    def __init__(self, examples: grain.MapDataset, workers: int) -> None:
        super().__init__(examples)
        self.examples, self.workers, self.end = examples, workers, sys.maxsize

    def __iter__(self) -> grain.DatasetIterator:
        return _InOrderIterator(self)


class _InOrderIterator(grain.DatasetIterator):
    """Iterator whose state is the next example's index, independent of workers. Workers take every n-th example
    including dropped ones, which preserves the order."""

    def __init__(self, dataset: _InOrder) -> None:
        super().__init__()
        self._dataset = dataset
        self._index = 0
        self._ahead: grain.DatasetIterator | None = None

    def __next__(self) -> Arrays:
        died = 0
        while self._index < self._dataset.end:
            try:
                example = next(self._begun())
            except RuntimeError as error:
                if _WORKER_DIED not in str(error) or (died := died + 1) > _REPLACED:
                    raise
                logging.warning("a data worker died (%s); the others continue from example %d", error, self._index)
                self._stop()
                continue
            self._index += 1
            if example is not None:
                return example
        raise StopIteration

    def _begun(self) -> grain.DatasetIterator:
        if self._ahead is None:
            # Few reader threads: the pipeline is far faster than any training step, and the host has other work.
            reading = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
            examples = self._dataset.examples.slice(slice(self._index, None))
            options = grain.MultiprocessingOptions(num_workers=self._dataset.workers, per_worker_buffer_size=_AHEAD)
            ahead = examples.to_iter_dataset(reading, allow_nones=True)
            self._ahead = iter(ahead.mp_prefetch(options, worker_init_fn=_without_interrupts))
        return self._ahead

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._index}

    def set_state(self, state: dict[str, int]) -> None:
        self._stop()
        self._index = state["next_index"]

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _without_interrupts(worker: int, count: int) -> None:
    """Ignore SIGINT in a worker. Ctrl-C reaches all processes at a terminal; the main process stops the workers."""
    del worker, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)
