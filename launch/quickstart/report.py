"""`report.html`: one self-contained page about a run. No scripts, no network: pictures are inline SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
import msgspec
import networkx as nx
from matplotlib.figure import Figure

from astra_jax.run.metrics import read_metrics
from launch.quickstart.ledger import read_json
from launch.quickstart.summary import MODELS
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.files import write_text
from synthesis.core.html import template
from synthesis.core.records import Message, ToolEnvironment, ToolServer, Trajectory
from synthesis.core.terminal import printable

_COLUMNS = 4
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "astra",
    "font.size": 8,
    "text.parse_math": False,  # a tool's title may hold dollars and backslashes
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Of matplotlib, for the page's pictures."""


def write(workdir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `workdir/report.html` atomically, from the summary, the datasets and the metrics of the run."""
    trajectories = read_dataset(workdir / "trajectories" / "trajectories", Trajectory)
    environments = read_dataset(workdir / "environments" / "train", ToolEnvironment)
    held_out = {e.id: e for e in read_dataset(workdir / "environments" / "held_out", ToolEnvironment)}
    servers = read_dataset(workdir / "trajectories" / "servers", ToolServer)
    samples = {name: _episodes(workdir, name) for name in MODELS}
    page = template("report.html.jinja", Path(__file__).parent)
    with plt.rc_context(STYLE):
        html = page.render(
            summary=summary,
            models=MODELS,
            graph=svg(tool_graph(sorted((workdir / "trajectories" / "graphs").glob("*.graphml")), servers)),
            losses=svg(loss_curves(workdir)),
            rewards=svg(reward_curves(workdir)),
            trajectory=_longest(trajectories),
            environment=max(environments, key=lambda e: (len(e.sub_questions), e.id)),
            episodes=[
                {"environment": held_out[id], "by_model": {name: samples[name].get(id) for name in MODELS}}
                for id in samples[MODELS[0]]
                if id in held_out
            ],
            statistics={
                "trajectories": read_card(workdir / "trajectories" / "trajectories")["statistics"],
                "training environments": read_card(workdir / "environments" / "train")["statistics"],
                "held-out environments": read_card(workdir / "environments" / "held_out")["statistics"],
            },
        )
    path = workdir / "report.html"
    write_text(path, html)
    return path


def _episodes(workdir: Path, model: str) -> dict[str, dict[str, Any]]:
    """The kept episodes of a model's evaluation, by environment."""
    episodes = read_json(workdir / "stages" / f"evaluate_{model}.json")["samples"]
    return {
        id: episode | {"messages": msgspec.convert(episode["messages"], list[Message])}
        for id, episode in episodes.items()
    }


def _longest(trajectories: Sequence[Trajectory]) -> Trajectory:
    return max(trajectories, key=lambda one: (sum(bool(m.tool_calls) for m in one.messages), one.id))


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def tool_graph(paths: Sequence[Path], servers: Sequence[ToolServer]) -> Figure:
    """One drawing a server: its tools, and an arrow for each step that chains take, as wide as it is frequent."""
    titles = {server.id: printable(server.title, lines=False) for server in servers}
    rows = -(-len(paths) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(11, 2.3 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, path in zip(axes.flat, paths, strict=False):
        graph = nx.read_graphml(path)
        layout = nx.circular_layout(graph)
        heaviest = max((data.get("weight", 1) for *_, data in graph.edges(data=True)), default=1)
        widths = [0.4 + 2 * data.get("weight", 1) / heaviest for *_, data in graph.edges(data=True)]
        nx.draw_networkx_edges(
            graph, layout, ax=axis, width=widths, edge_color="#9bb", node_size=60, connectionstyle="arc3,rad=0.12"
        )
        nx.draw_networkx_nodes(graph, layout, ax=axis, node_size=60, node_color="#276", linewidths=0)
        for node, (x, y) in layout.items():  # labels point away from the circle, so that neighbours' do not meet
            side = 1 if x >= -0.01 else -1
            align = "left" if side > 0 else "right"
            axis.text(x + 0.12 * side, y + 0.08, printable(node, lines=False), fontsize=5.5, ha=align, va="center")
        axis.set_title(titles.get(path.stem, path.stem), fontsize=9)
        axis.set(xlim=(-3, 3), ylim=(-1.3, 1.3))  # the circle has radius 1; its labels need room
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.02, top=0.94, wspace=0.1, hspace=0.2)
    return figure


def loss_curves(workdir: Path) -> Figure:
    """The parts of SFT, one after the other."""
    figure, axis = plt.subplots(figsize=(5.2, 2.8))
    offset = 0
    parts = {"dialogue": "without tool documents", "tools": "with tool documents"}
    for folder in sorted((workdir / "sft").iterdir()):
        rows, label = read_metrics(folder / "metrics"), parts[folder.name]
        axis.plot([offset + row["step"] for row in rows], [row["loss"] for row in rows], label=label)
        offset += rows[-1]["step"] if rows else 0
    axis.set(xlabel="SFT step", ylabel="loss per trained token", ylim=(0, None))
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def reward_curves(workdir: Path) -> Figure:
    """Mean reward of each update's rollouts, and their share of groups worth training on."""
    rows = read_metrics(workdir / "grpo" / "metrics")
    figure, axis = plt.subplots(figsize=(5.2, 2.8))
    for name, label in (
        ("rollout/reward", "F1 reward"),
        ("rollout/recall", "recall"),
        ("rollout/precision", "precision"),
    ):
        known = [row for row in rows if row.get(name) is not None]
        axis.plot([row["step"] for row in known], [row[name] for row in known], label=label)
    axis.set(xlabel="GRPO update", ylim=(0, 1))
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def svg(figure: Figure) -> str:
    """The picture, for a page; texts in it are text, and escaped. The figure is closed."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = file.getvalue()
    return text[text.index("<svg") :]
