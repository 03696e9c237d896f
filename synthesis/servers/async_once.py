"""Values that several tasks request at once and that are made once: a connection to a server, a list of its tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class AsyncOnce(Generic[K, T]):
    """Values made once for each key. Concurrent requests wait for the same value; a failed one is retried by the next
    request."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `make`, or raise its error."""
        task = self._tasks.get(key)
        if task is None or (task.done() and _failed(task)):
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(_failed)  # seen: all who waited for it may have been cancelled
        return await asyncio.shield(task)

    async def give_up(self) -> None:
        """Cancel values that are still being made."""
        if waiting := [task for task in self._tasks.values() if not task.done()]:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def made(self) -> list[T]:
        """Return all finished values."""
        return [task.result() for task in self._tasks.values() if task.done() and not _failed(task)]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
