"""Several services as one sandbox: each call is sent to the service with the fewest calls in flight.

    async with SandboxFleet(["http://one:8700", "http://two:8700"], token=token) as pool:
        result = await pool.call(code, "capital_of_country", {"country": "France"})

Each argument of `call` is as in `sandbox.SandboxPool.call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from astra_jax.base.settings import SettingError
from sandbox.outcomes import CallResult, SandboxError
from sandbox.remote import LOST, RemotePool, SandboxUnreachable
from sandbox.request import PastCall, encode_request

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between checks of an excluded service; the last one repeats
_LOG = logging.getLogger(__name__)


class _Service:
    def __init__(self, pool: RemotePool) -> None:
        self.pool = pool
        self.calls = 0  # our calls in flight there
        self.out = ""  # reason why it gets no calls
        self.open = False


class SandboxFleet:
    """Pool that places each call on the least busy service; among equals, where the module is already open.

    A service that does not answer is excluded and checked until it does; its calls are repeated elsewhere. Any service
    returns the same bytes (`sandbox.determinism`). With one service this behaves as `RemotePool`.

    Args:
        urls: URLs of the services; at least one must answer when the fleet is opened.
        options: options of each `RemotePool`.

    Attributes:
        tier: weakest isolation among the services that were reached.
        layers: state of each layer there.
    """

    def __init__(self, urls: Sequence[str], **options: Any) -> None:
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise SettingError(f"SandboxFleet.urls={list(urls)!r}: name at least one service, and each once")
        self._services = [_Service(RemotePool(url, **options)) for url in urls]
        self._greeting: dict[int, asyncio.Task[None]] = {}  # by index in `_services`
        self._turn = itertools.count()
        self._is_open = False

    @property
    def tier(self) -> str:
        """Weakest isolation in which calls may run now."""
        return self._weakest.tier

    @property
    def layers(self) -> dict[str, str]:
        """State of each layer at the service with the weakest isolation."""
        return self._weakest.layers

    @property
    def _weakest(self) -> RemotePool:
        return max((one.pool for one in self._services), key=lambda pool: pool.tier)

    @property
    def out(self) -> dict[str, str]:
        """Reasons why services are excluded now, by address."""
        return {one.pool.url: one.out for one in self._services if one.out}

    async def __aenter__(self) -> SandboxFleet:
        """Connect to all services.

        Raises:
            SandboxError: none answers, or one refuses the token, or its isolation is too weak.
        """
        try:
            came = await asyncio.gather(*(self._greet(one) for one in self._services), return_exceptions=True)
            faults = [error for error in came if error is not None]
            for error in faults:
                if not isinstance(error, SandboxUnreachable):
                    raise error
            if len(faults) == len(self._services):
                raise faults[0]
        except BaseException:
            await self.close()
            raise
        self._is_open = True
        for place, fault in enumerate(came):
            if fault is not None:
                self._leave_out(place, str(fault))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._is_open = False
        tasks, self._greeting = list(self._greeting.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._services:
            one.open = False
            await one.pool.close()

    async def call(
        self,
        code: str,
        function: str,
        arguments: Mapping[str, Any],
        *,
        seed: int = 0,
        now: int | None = None,
        history: Sequence[PastCall] = (),
    ) -> CallResult:
        """Call one function; see `sandbox.SandboxPool.call`. A call without an answer is retried once.

        The retry uses another service if possible.

        Raises:
            SandboxError: the fleet is not open, or a service refuses the token.
        """
        if not self._is_open:
            raise SandboxError("the sandbox fleet is not open: use `async with SandboxFleet(...) as pool`")
        request = partial(encode_request, function, arguments, seed=seed, now=now, history=history)
        result = await self._attempt(code, request)
        return await self._attempt(code, request) if result.ended_by == LOST else result

    async def _attempt(self, code: str, request: partial[bytes | CallResult]) -> CallResult:
        place = self._place(code)
        one = self._services[place]
        one.calls += 1
        try:
            result = await one.pool.attempt(code, request)
        finally:
            one.calls -= 1
        if result.ended_by == LOST:
            self._leave_out(place, result.error)
        return result

    def _place(self, code: str) -> int:
        """Return the index of the service for the next call. If all are excluded, it is one that was open before."""
        places = [place for place, one in enumerate(self._services) if not one.out]
        places = places or [place for place, one in enumerate(self._services) if one.open]
        turn = next(self._turn)

        def order(place: int) -> tuple[int, bool, int]:
            one = self._services[place]
            return one.calls, not one.pool.has_had(code), (place - turn) % len(self._services)

        return min(places, key=order)

    def _leave_out(self, place: int, why: str) -> None:
        one = self._services[place]
        if not one.out:
            _LOG.warning("sandbox service %s is taken out of service: %s", one.pool.url, why)
        one.out = why
        if self._is_open and place not in self._greeting:
            self._greeting[place] = asyncio.get_running_loop().create_task(self._take_back(place))

    async def _take_back(self, place: int) -> None:
        one = self._services[place]
        for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
            await asyncio.sleep(pause)
            with contextlib.suppress(SandboxError):
                await self._greet(one)
                break
        one.out = ""
        del self._greeting[place]
        _LOG.warning("sandbox service %s is back in service", one.pool.url)

    async def _greet(self, one: _Service) -> None:
        if one.open:
            await one.pool.greet()
        else:
            await one.pool.__aenter__()
            one.open = True
