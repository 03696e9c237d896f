"""The page of a preview (`preview.html.jinja`), in the look of the viewer's: one file, which needs no service."""

from __future__ import annotations

from collections.abc import Sequence

from launch.viewer.pages import HERE
from synthesis.core.html import template
from synthesis.pipeline.preview import Forecast, Preview


def rows(forecast: Forecast) -> list[tuple[str, str]]:
    """What is expected of the whole run, as text."""
    of = {"records": forecast.records, **forecast.totals}
    return [
        (name, f"{one.mean:,.0f} ({one.low:,.0f} to {one.high:,.0f})")
        for name, one in of.items()
        if name != "money" or one.high
    ]


def rendered(seen: Preview, forecast: Forecast) -> str:
    """All of it as HTML; what models wrote is escaped."""
    unseen: Sequence[str] = forecast.unseen
    return template("preview.html.jinja", HERE).render(seen=seen, rows=rows(forecast), unseen=unseen)
