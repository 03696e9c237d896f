"""Messages between processes, many in one call of an actor: a call costs as much as half a request to an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """What waits to be fetched by the one who empties it.

    Args:
        gather_seconds: how long the first waits for others.
    """

    def __init__(self, gather_seconds: float) -> None:
        self._gather = gather_seconds
        self._items: list[T] = []
        self._some, self._now = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, *, urgent: bool = False) -> None:
        """Lay it in; what is urgent is fetched at once, with all that lies there."""
        self._items.append(item)
        self._some.set()
        if urgent:
            self._now.set()

    def nudge(self) -> None:
        """Whoever empties it need not wait for the first."""
        self._some.set()

    def hurry(self) -> None:
        """Nor for others."""
        self._some.set()
        self._now.set()

    async def empty(self, patience: float | None = None) -> list[T]:
        """All that lies there in its order; waits for it, and returns nothing when that takes longer than `patience`
        seconds."""
        with contextlib.suppress(TimeoutError):
            await _set(self._some, patience)
            await _set(self._now, self._gather)
        items, self._items = self._items, []
        self._some.clear()
        self._now.clear()
        return items


async def unwrapped(call: Any) -> Any:
    """What an actor's method returns, or its own exception, under which Ray's holds the traceback from there."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        raise error.cause from error


async def _set(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until it is set. Raises `TimeoutError`."""
    if not event.is_set():
        await asyncio.wait_for(event.wait(), seconds)
