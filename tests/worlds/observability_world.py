"""What the dashboard asks Prometheus for, and what a scrape shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

OBSERVABILITY = Path(__file__).parent.parent.parent / "launch" / "recipes" / "observability"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_FUNCTIONS = {"rate", "sum", "by", "histogram_quantile", "time", "le", "instance", "kind", "status", "m"}
"""Of PromQL, with the labels that are grouped by."""


def names_in(expression: str) -> set[str]:
    """The metrics that an expression names."""
    return set(_NAME.findall(re.sub(r"\[\w+\]", "", expression))) - _FUNCTIONS


PANELS = [one for one in json.loads((OBSERVABILITY / "dashboard.json").read_text())["panels"] if one["type"] != "row"]
DASHBOARD = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
"""All metrics that the dashboard names."""


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of a scrape in Prometheus' text format."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def metrics_of(text: str) -> set[str]:
    """The names of a scrape's samples, and of counters that have labels and nothing to count yet."""
    counters = {f"{one.name}_total" for one in text_string_to_metric_families(text) if one.type == "counter"}
    return counters | {name for name, _, _ in samples(text)}
