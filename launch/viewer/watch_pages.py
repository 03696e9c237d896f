"""Live page of a run, and the pages that the run has written.

GET  /                       the run as it is now; ?x and ?smoothing change its curves
GET  /report.html            of a quickstart; /table.html of an evaluation

GET  /episodes/PART/NAME     a page of `PART/episodes`, as the run wrote it
GET  /rejected               what a synthesis rejected; see `stored.py`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlencode

from aiohttp import web
from markupsafe import Markup

from astra_jax.base.http_service import HttpRefusal
from astra_jax.pages import html
from launch.viewer import charts
from launch.viewer.outcome import outcome_of
from launch.viewer.service import PageService, ViewerConfig, page, short
from launch.viewer.stored import RejectedPages
from launch.viewer.watched import STORED_PAGES, Curves, Training, Watched, Watcher, seconds_of, step_of

_STORED = f"default-src 'none'; style-src 'unsafe-inline'; {html.SCRIPTS}; img-src data:; sandbox allow-scripts"
"""CSP of a stored page, perhaps an earlier version's: its own style takes effect, and only our script."""
_SHARES = ("Rollouts", "Valid groups, masked episodes")
_FROM_ZERO = (*_SHARES, "Seconds", "Tokens a second", "Lengths, tokens", "Calls and turns")
_X = ("step", "time")
_SMOOTHING = ("0", "0.6", "0.9", "0.97")
"""Choices of `?x` and `?smoothing`, the default first."""
_UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
"""Least training time, its unit in seconds, and the unit's name."""


class WatchService(PageService):
    """Serves the page of a run.

    Args:
        watcher: of the run.
        beside: of another run, whose curves are plotted on the same charts.
        seconds: between two looks of an open page.
    """

    def __init__(
        self, watcher: Watcher, config: ViewerConfig, *, seconds: float, beside: Watcher | None = None
    ) -> None:
        self._watcher, self._beside, self._seconds = watcher, beside, seconds
        self._looking = asyncio.Lock()
        stored = [web.get(f"/{name}", partial(self._stored, name)) for name in STORED_PAGES]
        routes = [web.get("/", self._show), *stored, web.get("/episodes/{part:.*}/{name}", self._episodes)]
        routes += RejectedPages(watcher.workdir).routes()
        super().__init__(config, routes, script="watch.js", program="launch.watch")

    async def _show(self, request: web.Request) -> web.Response:
        x, smoothing = _chosen(request, "x", _X), _chosen(request, "smoothing", _SMOOTHING)
        run = await self._look(self._watcher)
        beside = await self._look(self._beside) if self._beside else None
        draw = partial(curves_of, beside=beside, x=x, smoothing=float(smoothing))
        links = {
            "x": [(one, _address(x=one, smoothing=smoothing), one == x) for one in _X],
            "smoothing": [(one, _address(x=x, smoothing=one), one == smoothing) for one in _SMOOTHING],
        }
        return page(
            "watch.html.jinja",
            run=run,
            outcome=outcome_of(run),
            beside=beside and (beside.name, outcome_of(beside)),
            seconds=self._seconds,
            charts=draw,
            links=links,
            place=_place,
        )

    async def _look(self, watcher: Watcher) -> Watched:
        async with self._looking:
            return await asyncio.to_thread(watcher.look)  # a bucket takes its time

    async def _stored(self, name: str, request: web.Request) -> web.Response:
        if name not in (await self._look(self._watcher)).pages:
            raise HttpRefusal(404, f"there is no {name} yet; it is written when the run is finished")
        return _sent(self._watcher.workdir / name)

    async def _episodes(self, request: web.Request) -> web.Response:
        part, name = request.match_info["part"], request.match_info["name"]
        for training in (await self._look(self._watcher)).trainings:
            for path in training.episodes:
                if (training.name, path.name) == (part, name):  # no other path is ever opened
                    return _sent(path)
        raise HttpRefusal(404, f"there is no page {short(name)} of {short(part)}; choose one of the list")


def _sent(path: Path) -> web.Response:
    text = path.read_text(encoding="utf-8", errors="replace")
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _STORED})


def _chosen(request: web.Request, name: str, choices: tuple[str, ...]) -> str:
    value = request.query.get(name, choices[0])
    if value not in choices:
        raise HttpRefusal(400, f"{name} is {short(value)}; give one of {', '.join(choices)}")
    return value


def _address(**values: str) -> str:
    return f"/?{urlencode(values)}"


def _place(training: Training, name: str) -> str:
    return f"/episodes/{quote(training.name)}/{quote(name)}"


def curves_of(
    training: Training, *, beside: Watched | None = None, x: str = "step", smoothing: float = 0.0
) -> dict[str, Markup]:
    """Plot the curves of a training, by title.

    Args:
        beside: a run whose newest training of the same kind is plotted too.
        x: `step`, or `time`: seconds of training that are kept, in a fitting unit.
        smoothing: see `charts.curves`.
    """
    others = [one for one in beside.trainings if one.kind == training.kind] if beside else []
    other = others[-1] if others else None
    across, name = _axis(x, training, other)
    further = other.curves(across) if other else {}
    drawn = {}
    for title, lines in training.curves(across).items():
        drawn[title] = charts.curves(
            title,
            _named(lines),
            beside=_named(further.get(title, {}), f", {beside.name}") if beside else {},
            across=name,
            low=0.0 if title in _FROM_ZERO else None,
            high=1.0 if title in _SHARES else None,
            smoothing=smoothing,
        )
    return drawn


def _named(lines: Curves, more: str = "") -> Curves:
    return {f"{name.replace('/', ' ').replace('_', ' ')}{more}": points for name, points in lines.items()}


def _axis(x: str, *trainings: Training | None) -> tuple[Callable[[Mapping[str, float | None]], float | None], str]:
    """Return the place of a row on the horizontal axis, and the axis's name."""
    if x == "step":
        return step_of, "step"
    times = [seconds_of(row) or 0.0 for one in trainings if one is not None for row in one.rows]
    unit, name = next((unit, name) for least, unit, name in _UNITS if max(times, default=0.0) >= least)

    def place(row: Mapping[str, float | None]) -> float | None:
        seconds = seconds_of(row)
        return None if seconds is None else seconds / unit

    return place, f"{name} of training"
