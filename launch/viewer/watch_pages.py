"""Live page of a run, and the pages of sampled episodes that the run has written.

GET  /                       the run as it is now; the page loads itself again
GET  /episodes/PART/NAME     a page of `PART/episodes`, as the run wrote it.
GET  /rejected               what a synthesis rejected; see `stored.py`.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from aiohttp import web
from markupsafe import Markup

from astra_jax.base.http_service import HttpRefusal
from astra_jax.pages import html
from launch.viewer import charts
from launch.viewer.service import PageService, ViewerConfig, page, short
from launch.viewer.stored import RejectedPages
from launch.viewer.watched import Training, Watched, Watcher

_STORED = f"default-src 'none'; style-src 'unsafe-inline'; {html.SCRIPTS}; img-src data:; sandbox allow-scripts"
"""CSP of a stored page, perhaps an earlier version's: its own style takes effect, and only our script."""
_FROM_ZERO = ("Rollouts", "Seconds", "Tokens a second")


class WatchService(PageService):
    """Serves the page of a run.

    Args:
        watcher: of the run.
        seconds: between two looks of an open page.
    """

    def __init__(self, watcher: Watcher, config: ViewerConfig, *, seconds: float) -> None:
        self._watcher, self._seconds = watcher, seconds
        self._looking = asyncio.Lock()
        routes = [web.get("/", self._show), web.get("/episodes/{part:.*}/{name}", self._episodes)]
        routes += RejectedPages(watcher.workdir).routes()
        super().__init__(config, routes, script="watch.js", program="launch.watch")

    async def _show(self, request: web.Request) -> web.Response:
        return page("watch.html.jinja", run=await self._run(), seconds=self._seconds, charts=curves_of, place=_place)

    async def _run(self) -> Watched:
        async with self._looking:
            return await asyncio.to_thread(self._watcher.look)  # a bucket takes its time

    async def _episodes(self, request: web.Request) -> web.Response:
        part, name = request.match_info["part"], request.match_info["name"]
        for training in (await self._run()).trainings:
            for path in training.episodes:
                if (training.name, path.name) == (part, name):  # no other path is ever opened
                    text = path.read_text(encoding="utf-8", errors="replace")
                    headers = {"Content-Security-Policy": _STORED}
                    return web.Response(text=text, content_type="text/html", headers=headers)
        raise HttpRefusal(404, f"there is no page {short(name)} of {short(part)}; choose one of the list")


def _place(training: Training, name: str) -> str:
    return f"/episodes/{quote(training.name)}/{quote(name)}"


def curves_of(training: Training) -> dict[str, Markup]:
    """Plot the curves of a training, by title."""
    drawn = {}
    for title, lines in training.curves.items():
        named = {name.replace("/", " ").replace("_", " "): points for name, points in lines.items()}
        low, high = 0.0 if title in _FROM_ZERO else None, 1.0 if title == "Rollouts" else None
        drawn[title] = charts.curves(title, named, across="step", low=low, high=high)
    return drawn
