"""What several ask for at the same time, and is made once: a connection to a server, a list of its tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Shared(Generic[K, T]):
    """What is made once for each key. Who asks meanwhile waits for it too; what failed is made anew for the next."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `make` returns or raises."""
        task = self._tasks.get(key)
        if task is None or (task.done() and _failed(task)):
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(_failed)  # seen: all who waited for it may have been cancelled
        return await asyncio.shield(task)

    async def give_up(self) -> None:
        """End what is still being made."""
        if waiting := [task for task in self._tasks.values() if not task.done()]:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def made(self) -> list[T]:
        """All that was made."""
        return [task.result() for task in self._tasks.values() if task.done() and not _failed(task)]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
