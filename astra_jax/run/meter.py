"""Training speed: tokens a second, share of the chips' peak, and memory."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator

import jax
import numpy as np

from astra_jax.models.model import Model
from astra_jax.run.chips import chip_of


class Meter:
    """Tokens, arithmetic operations and time since `start`.

    Attributes:
        was_read: whether `read` was called since `start`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        chip = chip_of(jax.devices()[0].device_kind)
        self._peak = chip.flops * jax.device_count() if chip is not None else None
        self.start()
        self.was_read = True  # the first step starts the meter

    def start(self) -> None:
        self._tokens, self._flops, self._started = 0, 0.0, time.perf_counter()
        self.was_read = False

    def add(self, segment_ids_bt: np.ndarray) -> None:
        """Add a batch or micro-batch that is trained on."""
        self._tokens += int((segment_ids_bt > 0).sum())
        if self._peak is not None:
            self._flops += self._model.batch_flops(segment_ids_bt)

    def read(self) -> dict[str, float]:
        """Return metrics by name: tokens per second and this process's peak memory. Known chips also have the share of
        their peak; it counts documents by their own length, without padding and recomputation. Devices that report it
        also have their peak memory."""
        seconds = time.perf_counter() - self._started
        self.was_read = True
        found = {"perf/tokens_per_second": self._tokens / seconds}
        found["perf/peak_host_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self._peak is not None:
            found["perf/mfu"] = self._flops / seconds / self._peak
        memory = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            found["perf/peak_device_memory_gib"] = memory["peak_bytes_in_use"] / 2**30
        return found


class Timer:
    """Seconds of the parts of a step, by name."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far, and as `step` those since the timer was made."""
        return {**self._seconds, "step": time.perf_counter() - self._started}
