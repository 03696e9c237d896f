"""Training curves of several runs, as one figure."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from astra_jax.run.metrics import read_metrics
from launch.flags.cli import UsageError


def check(figure: str | None) -> None:
    """Check that a figure can be plotted, before hours of runs. Raises `UsageError`."""
    if figure and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--figure={figure} wants matplotlib, which is not installed: pip install 'astra-jax[bench]'")


def draw(groups: Mapping[str, Sequence[Path]], metrics: Mapping[str, str], path: Path) -> None:
    """Plot a panel for each metric, by GRPO update: each run thin, the mean over a group's runs thick.

    If some runs of a group have ended, the mean is over the others.

    Args:
        groups: folders of metrics, by their name in the legend.
        metrics: titles by the metrics' names.
        path: the SVG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(metrics), figsize=(4 * len(metrics), 3))
    for axis, (metric, title) in zip(axes, metrics.items(), strict=True):
        for color, (name, folders) in enumerate(groups.items()):
            by_step: dict[int, list[float]] = {}
            for folder in folders:
                known = [row for row in read_metrics(folder) if row.get(metric) is not None]
                axis.plot([r["step"] for r in known], [r[metric] for r in known], color=f"C{color}", alpha=0.2, lw=0.7)
                for row in known:
                    by_step.setdefault(row["step"], []).append(row[metric])
            steps = sorted(by_step)
            axis.plot(steps, [np.mean(by_step[step]) for step in steps], color=f"C{color}", label=name)
        axis.set(xlabel="GRPO update", title=title, ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
