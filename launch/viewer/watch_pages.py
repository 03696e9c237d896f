"""The live page of a run, and the pages of sampled episodes that it has written.

GET  /                       the run as it is now; the page fetches itself again
GET  /episodes/PART/NAME     a page of `PART/episodes`, as the run wrote it
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from aiohttp import web
from markupsafe import Markup

from launch.viewer.page_service import PageService, ViewerConfig
from launch.viewer.pages import page, short
from launch.viewer.watched import Training, Watched, Watcher, facts
from sandbox.http_service import HttpRefusal
from synthesis.core import html, svg

_STORED = f"default-src 'none'; style-src 'unsafe-inline'; {html.SCRIPTS}; img-src data:; sandbox allow-scripts"
"""Of a page that the run has stored, perhaps an earlier version's: its style holds, and of scripts our own."""


class WatchService(PageService):
    """Serves the page of a run.

    Args:
        watcher: looks at the run.
        seconds: between two looks of a page that is open.
    """

    def __init__(self, watcher: Watcher, config: ViewerConfig, *, seconds: float) -> None:
        self._watcher, self._seconds = watcher, seconds
        self._looking = asyncio.Lock()
        routes = [web.get("/", self._show), web.get("/episodes/{part:.*}/{name}", self._episodes)]
        super().__init__(config, routes, script="watch.js", program="launch.watch")

    async def _show(self, request: web.Request) -> web.Response:
        return page(
            "watch.html.jinja",
            run=await self._run(),
            seconds=self._seconds,
            charts=charts,
            place=_place,
            facts=facts,
            figure=svg.figure,
        )

    async def _run(self) -> Watched:
        """In a thread: a bucket takes its time."""
        async with self._looking:
            return await asyncio.to_thread(self._watcher.look)

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
    """Where a page of a training's episodes is."""
    return f"/episodes/{quote(training.name)}/{quote(name)}"


def charts(training: Training) -> list[tuple[str, Markup]]:
    """The curves of a training, with their titles."""
    across = "update" if training.kind == "GRPO" else "step"
    drawn = []
    for title, lines in training.curves:
        low = 0.0 if title in ("Rollouts", "Seconds", "Tokens a second") else None
        named = {name.rpartition("/")[2].replace("_", " "): points for name, points in lines.items()}
        drawn.append(
            (title, svg.curves(title, named, across=across, low=low, high=1.0 if title == "Rollouts" else None))
        )
    return drawn
