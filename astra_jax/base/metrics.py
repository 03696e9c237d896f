"""Current metrics of this process: the newest numbers of its loop or its stages.

They are always kept, which costs next to nothing; a program with `--metrics_port` shows them to Prometheus
(`launch/flags/metrics.py`). Nothing reads them back.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
PREFIX = "astra_"


@dataclass(frozen=True)
class MetricSample:
    """One sample.

    Attributes:
        name: a valid name of Prometheus'.
        labels: (name, value), sorted.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricRegistry:
    """The newest value of each name and labels; from any thread."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()

    def put(self, name: str, value: float, **labels: str) -> None:
        """Replace a figure."""
        with self._lock:
            self._values[PREFIX + _NO_NAME.sub("_", name), tuple(sorted(labels.items()))] = float(value)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the figures of a training loop: a row of its metrics. `rollout/reward` becomes
        `astra_rollout_reward`, `servers/HOST:PORT/waiting` becomes `astra_server_waiting` with the label `server`. What
        an earlier row had and this one has not stays."""
        self.put("step", step)
        self.put("last_step_timestamp_seconds", time.time())
        for name, value in values.items():
            group, _, rest = name.partition("/")
            server, _, what = rest.rpartition("/")
            if group == "servers" and server:
                self.put(f"server_{what}", value, server=server)
            else:
                self.put(name, value)

    def all(self) -> list[MetricSample]:
        """Return all numbers in the order of their names."""
        with self._lock:
            values = dict(self._values)
        return [MetricSample(*key, value) for key, value in sorted(values.items())]


METRICS = MetricRegistry()
"""Metrics of this process."""
