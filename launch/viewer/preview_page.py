"""Page of a preview: one HTML file."""

from __future__ import annotations

from launch.viewer import service
from synthesis.pipeline.preview import Forecast, Preview


def rows(forecast: Forecast) -> list[tuple[str, str]]:
    """Return the forecast of the whole run, as (name, text)."""
    of = {"records": forecast.records, **forecast.totals}
    return [
        (name, f"{one.mean:,.0f} ({one.low:,.0f} to {one.high:,.0f})")
        for name, one in of.items()
        if name != "money" or one.high
    ]


def rendered(seen: Preview, forecast: Forecast) -> str:
    """Return the page; texts of models are escaped."""
    return service.rendered("preview.html.jinja", seen=seen, rows=rows(forecast), unseen=forecast.unseen)
