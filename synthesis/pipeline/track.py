"""One run of a track: its stages on workers, what they reject, and the datasets with their cards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from synthesis.core.datasets import write_dataset
from synthesis.core.stages import Journal
from synthesis.pipeline.executors import Workers, run_on

C = TypeVar("C")
In = TypeVar("In")
Out = TypeVar("Out", bound=msgspec.Struct)


@dataclass
class Summary:
    """What a run made.

    Attributes:
        counts: records by dataset.
        digests: content digest by dataset.
        rejected: stage → reason → how many. A stage that rejected nothing is there, without reasons.
        details: stage → reason → one example.
        statistics: by dataset, as on its card.
        datasets: name → folder; two runs that made the same are equal wherever they wrote it.
    """

    counts: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)
    details: dict[str, dict[str, str]] = field(default_factory=dict)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)
    datasets: dict[str, Path] = field(default_factory=dict, compare=False)


class Track(Generic[C]):
    """Runs stages and writes datasets.

    Args:
        config: of the track, a dataclass; resolved on the cards.
        concurrency: records in work at a time.
        prefix: of the stages' names in the journal.
    """

    def __init__(
        self, workers: Workers[C], journal: Journal, out_dir: Path, *, config: Any, concurrency: int, seed: int,
        prefix: str = "",
    ) -> None:  # fmt: skip
        self.summary = Summary()
        self._workers, self._journal, self._out_dir, self._prefix = workers, journal, out_dir, prefix
        self._concurrency, self._seed = concurrency, seed
        self._config = resolved(config)

    async def stage(
        self,
        name: str,
        function: Callable[[In, C], Awaitable[Sequence[Out]]],
        inputs: Sequence[In],
        *,
        key: Callable[[In], str],
        out: type[Out],
        label: str,
        concurrency: int = 0,
    ) -> list[Out]:
        """Run a stage and note what it rejects.

        Args:
            label: of the progress bar.
            concurrency: instead of the track's.
        """
        result = await run_on(
            self._workers, self._prefix + name, function, inputs, key=key, out=out, journal=self._journal,
            concurrency=concurrency or self._concurrency, description=label,
        )  # fmt: skip
        self.reject(name, result.rejected, result.details)
        return result.outputs

    def reject(self, stage: str, reasons: Counter[str], details: Mapping[str, str] | None = None) -> None:
        """Note what a step dropped: reason → how many, and one example of each."""
        self.summary.rejected[stage] = dict(sorted(reasons.items()))
        self.summary.details[stage] = dict(details or {})

    def write(
        self, name: str, kind: type[Out], records: Sequence[Out], statistics: Mapping[str, Any], **more: Any
    ) -> None:
        """Write a dataset.

        Args:
            more: what its card says beside the configuration, the seed, the teacher, the statistics and the rejections.
        """
        card = {
            "config": self._config,
            "seed": self._seed,
            "teacher": self._workers.teacher_name,
            "statistics": statistics,
            "rejected": self.summary.rejected,
            **more,
        }
        summary = self.summary
        summary.datasets[name] = self._out_dir / name
        summary.digests[name] = write_dataset(summary.datasets[name], kind, records, card=card)
        summary.counts[name], summary.statistics[name] = len(records), dict(statistics)


def resolved(config: Any) -> dict[str, Any]:
    """A configuration as JSON holds it."""
    return msgspec.to_builtins(dataclasses.asdict(config), str_keys=True)
