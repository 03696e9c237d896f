"""Page of a preview: one HTML file."""

from __future__ import annotations

from launch.viewer import service
from synthesis.pipeline.preview import Bounds, Forecast, Preview


def rows(forecast: Forecast) -> list[tuple[str, str]]:
    """Return the forecast of the whole run, as (name, text); empty if there is none."""
    if forecast.blocked:
        return []
    of = {"records": forecast.records, **forecast.totals}
    of |= {} if forecast.buys is None else {"records that the budget buys": forecast.buys}
    return [(name, _range(one, cents=name == "money")) for name, one in of.items() if name != "money" or one.high]


def _range(one: Bounds, *, cents: bool) -> str:
    digits = 2 if cents else 0
    return f"{one.mean:,.{digits}f} ({one.low:,.{digits}f} to {one.high:,.{digits}f})"


def rendered(seen: Preview, forecast: Forecast) -> str:
    """Return the page; texts of models are escaped."""
    return service.rendered("preview.html.jinja", seen=seen, rows=rows(forecast), forecast=forecast)
