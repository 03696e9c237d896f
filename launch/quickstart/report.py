"""Page `report.html` about a run: self-contained, with inline SVG, and without network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
from markupsafe import Markup

from astra_jax.base.files import write_text
from astra_jax.base.terminal import printable
from astra_jax.base.typed import convert_to
from astra_jax.pages.html import template
from astra_jax.run.metrics import read_metrics
from launch.quickstart.ledger import read_json
from launch.quickstart.summary import MODELS
from launch.viewer import charts
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Message, ToolEnvironment, ToolServer, Trajectory

_COLUMNS = {"untrained": "before", "sft": "after SFT", "grpo": "after GRPO"}


def write(workdir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `workdir/report.html` atomically, from the summary, the datasets and the metrics of the run."""
    trajectories = read_dataset(workdir / "trajectories" / "trajectories", Trajectory)
    environments = read_dataset(workdir / "environments" / "train", ToolEnvironment)
    held_out = {e.id: e for e in read_dataset(workdir / "environments" / "held_out", ToolEnvironment)}
    servers = read_dataset(workdir / "trajectories" / "servers", ToolServer)
    samples = {name: _episodes(workdir, name) for name in MODELS}
    page = template("report.html.jinja", Path(__file__).parent)
    html = page.render(
        summary=summary,
        headline=headline(summary["held_out"]),
        columns=[_COLUMNS[name] for name in MODELS],
        results=_results(summary["held_out"]),
        models=MODELS,
        graphs=tool_graphs(sorted((workdir / "trajectories" / "graphs").glob("*.graphml")), servers),
        losses=loss_curves(workdir),
        rewards=reward_curves(workdir),
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


def headline(held_out: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the result of a run in one sentence.

    Args:
        held_out: results by the names in `MODELS`, as in `summary.json`.
    """
    first, last = held_out[MODELS[0]], held_out[MODELS[-1]]
    change = "rose" if last["f1"] > first["f1"] else "fell" if last["f1"] < first["f1"] else "stayed"
    return (
        f"After training, the model answers {last['answer_accuracy']:.0%} of {last['episodes']} held-out questions, "
        f"before it {first['answer_accuracy']:.0%}; the held-out F1 reward {change} from {first['f1']:.2f} to "
        f"{last['f1']:.2f}."
    )


def _results(held_out: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the rows of the table of results, one text for each model."""

    def between(row: Mapping[str, Any], value: str, ends: str) -> str:
        low, high = row[ends]
        return f"{row[value]:.3f} ({low:.3f}–{high:.3f})"

    rows = [held_out[name] for name in MODELS]
    return {
        "F1": [between(row, "f1", "f1_interval") for row in rows],
        "answers": [between(row, "answer_accuracy", "answer_interval") for row in rows],
        "recall": [f"{row['recall']:.3f}" for row in rows],
        "precision": [f"{row['precision']:.3f}" for row in rows],
        "calls an episode": [f"{row['mean_calls']:.2f}" for row in rows],
        "episodes": [f"{row['episodes']:,}" for row in rows],
    }


def _episodes(workdir: Path, model: str) -> dict[str, dict[str, Any]]:
    """Return the stored episodes of a model's evaluation, by environment."""
    episodes = read_json(workdir / "stages" / f"evaluate_{model}.json")["samples"]
    return {
        id: episode | {"messages": convert_to(episode["messages"], list[Message])} for id, episode in episodes.items()
    }


def _longest(trajectories: Sequence[Trajectory]) -> Trajectory:
    return max(trajectories, key=lambda one: (sum(bool(m.tool_calls) for m in one.messages), one.id))


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def tool_graphs(paths: Sequence[Path], servers: Sequence[ToolServer]) -> list[tuple[str, dict[str, str]]]:
    """Return each server's title and, by tool, which tools chains take next, the most frequent first."""
    titles = {server.id: printable(server.title, lines=False) for server in servers}
    found = []
    for path in paths:
        graph = nx.read_graphml(path)
        steps = {tool: sorted(graph[tool].items(), key=lambda one: -one[1]["weight"]) for tool in graph}
        texts = {tool: ", ".join(f"{after} ({edge['weight']})" for after, edge in to) for tool, to in steps.items()}
        found.append((titles.get(path.stem, path.stem), texts))
    return found


def loss_curves(workdir: Path) -> Markup:
    """Plot the losses of both parts of SFT, one after the other."""
    offset, lines = 0, {}
    parts = {"dialogue": "without tool documents", "tools": "with tool documents"}
    for folder in sorted((workdir / "sft").iterdir()):
        rows = read_metrics(folder / "metrics")
        lines[parts[folder.name]] = [(offset + row["step"], row["train/loss"]) for row in rows]
        offset += rows[-1]["step"] if rows else 0
    return charts.curves("SFT, loss per trained token", lines, across="step", low=0)


def reward_curves(workdir: Path) -> Markup:
    """Plot the mean reward of each update's rollouts, with recall and precision."""
    rows = read_metrics(workdir / "grpo" / "metrics")
    lines = {
        label: [(row["step"], row.get(name)) for row in rows]
        for name, label in (
            ("rollout/reward", "F1 reward"),
            ("rollout/recall", "recall"),
            ("rollout/precision", "precision"),
        )
    }
    return charts.curves("GRPO", lines, across="update", low=0, high=1)
