"""Run a Python MCP server with its clock standing still: the same seed then gives the same bytes on every day.

    python -m synthesis.servers.pinned_clock 2026-01-15T12:00:00+00:00 mcp_server_time --local-timezone UTC

Only what the package's `server` module calls `datetime` is replaced; the server is the published one otherwise.
"""

from __future__ import annotations

import datetime
import importlib
import sys


def pinned(instant: datetime.datetime) -> type[datetime.datetime]:
    """Return a `datetime` whose `now` is always `instant`."""

    class PinnedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> PinnedDatetime:
            return cls.fromtimestamp(instant.timestamp(), tz)

    return PinnedDatetime


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m synthesis.servers.pinned_clock ISO_INSTANT PACKAGE [ARGUMENT ...]")
    instant, package = datetime.datetime.fromisoformat(sys.argv[1]), sys.argv[2]
    if instant.tzinfo is None:
        sys.exit(f"ISO_INSTANT: {sys.argv[1]!r} has no UTC offset; add one, for example +00:00")
    server = importlib.import_module(f"{package}.server")
    server.datetime = pinned(instant)  # type: ignore[attr-defined]
    sys.argv = [package, *sys.argv[3:]]
    importlib.import_module(package).main()


if __name__ == "__main__":
    main()
