"""Client of `sandbox.service`: the pool's interface, over HTTP. Example:

    async with RemotePool("http://sandbox:8700", token=token) as pool:
        result = await pool.call(code, "capital_of_country", {"country": "France"})

Each argument of `call` is as in `sandbox.SandboxPool.call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from astra_jax.base.access import keyless, trusting
from astra_jax.base.http_responses import read_answer
from astra_jax.base.settings import SettingError
from sandbox.outcomes import CLOSED, CallResult, Outcome, SandboxError
from sandbox.request import PastCall, encode_request, source_digest
from sandbox.selftest import POLICIES, require_tier

_MOST_MODULES = 1024  # modules whose digests a client remembers
_GREETING_SECONDS = 30.0  # for each of two answers
_LOOKS = 3  # checks in a row without an answer, after which the service's calls are lost
_JSON = {"Content-Type": "application/json"}
_FIELDS = {field.name for field in fields(CallResult)}
_KINDS = set(Outcome)

_T = TypeVar("_T")

LOST = "connection"
"""`ended_by` of a call whose answer never arrived."""


class SandboxUnreachable(SandboxError):
    """Error: no service answers at the address, or it is not ready. It may be later."""

    away = True
    """See `astra_jax.base.errors.UserError`."""


class RemotePool:
    """Pool that sends calls to a service. A failed request is tried twice, then gives an infrastructure outcome.

    A module's source is sent with its first call. Later calls name it by its digest, and send the source again if the
    service does not have it open (it was evicted, or another service has the address).

    Args:
        url: URL of the service.
        token: the service's token.
        connections: most connections at once; further calls wait here.
        patience_seconds: how long a full queue may delay a call before it ends with `open_failed`.
        answer_seconds: how long to wait for an answer. Must exceed the service's wall limit and its queue.
        look_seconds: interval between checks of a service that has calls in flight, and time limit of each check. A
            machine that hangs or is unreachable resets no connection: its calls are lost after three failed checks.
        minimum_tier: weakest isolation accepted there, see `SandboxConfig.minimum_tier`.
        allow_unisolated: accept tier D there, whatever the minimum.
        ca_file: PEM file of the authority that signed the service's certificate; by default the system's authorities.

    Attributes:
        tier: isolation of the service; set once the pool is open.
        layers: state of each layer there.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        connections: int = 256,
        patience_seconds: float = 300.0,
        answer_seconds: float = 300.0,
        look_seconds: float = 10.0,
        minimum_tier: str = "C",
        allow_unisolated: bool = False,
        ca_file: str | None = None,
    ) -> None:
        if minimum_tier not in POLICIES:
            raise SettingError(f"RemotePool.minimum_tier={minimum_tier!r}: use one of {', '.join(POLICIES)}")
        self._policy = minimum_tier, allow_unisolated
        self._tls = trusting(ca_file)
        self.url = keyless(url.rstrip("/"), "the sandbox service's address")
        self._call_url = f"{self.url}/call"
        self.tier = ""
        self.layers: dict[str, str] = {}
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = connections
        self._patience = patience_seconds
        self._timeout = aiohttp.ClientTimeout(total=answer_seconds)
        self._session: aiohttp.ClientSession | None = None
        self._look_seconds, self._under_way = look_seconds, 0
        self._silent: asyncio.Future[None] | None = None  # done when the service is silent
        self._looking: asyncio.Task[None] | None = None
        self._sent: OrderedDict[str, str] = OrderedDict()  # digests by source

    async def __aenter__(self) -> RemotePool:
        """Connect to the service.

        Raises:
            SandboxUnreachable: there is no service, or it is not ready.
            SandboxError: the token is wrong, or the isolation too weak.
        """
        connector = aiohttp.TCPConnector(limit=self._connections, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        try:
            await self.greet()
        except BaseException:
            await self.close()
            raise
        return self

    async def greet(self) -> None:
        """Check the service's health. Raises the same errors as opening the pool."""
        session = self._session
        assert session is not None
        limit = aiohttp.ClientTimeout(total=_GREETING_SECONDS)
        try:
            async with session.get(f"{self.url}/health", allow_redirects=False, timeout=limit) as response:
                health = json.loads(await read_answer(response))
                if response.status != 200:
                    raise SandboxUnreachable(
                        f"the sandbox service at {self.url} is {health.get('status', response.status)}"
                    )
            async with session.get(f"{self.url}/metrics", allow_redirects=False, timeout=limit) as response:
                if response.status == 401:
                    raise SandboxError(f"the sandbox service at {self.url} asks for another token")
            tier, layers = str(health["tier"]), dict(health["layers"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SandboxUnreachable(
                f"no sandbox service answers at {self.url} ({type(error).__name__}: {error}); start one with "
                "astra sandbox_server"
            ) from None
        require_tier(tier, *self._policy, {"there": f"its layers are {layers}"})
        self.tier, self.layers = tier, layers

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

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
        """Call one function of an untrusted module; see `sandbox.SandboxPool.call`.

        Raises:
            SandboxError: the pool is not open, or the service refuses the token.
        """
        if self._session is None:
            raise SandboxError("the remote pool is not open: use `async with RemotePool(...) as pool`")
        call = partial(encode_request, function, arguments, seed=seed, now=now, history=history)
        result = await self.attempt(code, call)
        return await self.attempt(code, call) if result.ended_by == LOST else result

    def has_had(self, code: str) -> bool:
        """Return whether this module was sent to the service before."""
        return code in self._sent

    async def attempt(self, code: str, call: Callable[..., bytes | CallResult]) -> CallResult:
        """Try a call once. Without an answer the result is `ended_by` `LOST`. Raises `SandboxError`, see `call`.

        Args:
            code: source of the module.
            call: builds the request, from `code` or from its `digest`.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        digest = self._sent.get(code)
        while (session := self._session) is not None:
            request = call(code=code) if digest is None else call(digest=digest)
            if isinstance(request, CallResult):
                return request
            try:
                status, body, later = await self._while_it_answers(self._post(session, request))
            except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
                if session.closed:
                    return CLOSED
                return _lost(f"{type(error).__name__}: {error}")
            if status == 200:
                self._note_sent(code)
                return _decode(body)
            if status == 409 and digest is not None:
                digest = None
                continue
            text = str(body.get("error", status)) if isinstance(body, dict) else str(status)
            if status == 401:
                raise SandboxError(f"the sandbox service at {self.url} asks for another token")
            if status == 413:
                return CallResult(Outcome.TOO_LARGE, error=text, ended_by="source")
            if status != 429:
                return _lost(f"{status}: {text}")
            pause = min(float(later), 30.0) if later.isdecimal() else 1.0
            if clock() + pause > until:
                return CallResult(Outcome.OPEN_FAILED, error=text, ended_by="queue")
            await asyncio.sleep(pause)
        return CLOSED

    async def _post(self, session: aiohttp.ClientSession, request: bytes) -> tuple[int, Any, str]:
        """Return the status, the body, and the time after which to retry."""
        asked = session.post(self._call_url, data=request, headers=_JSON, allow_redirects=False)
        async with asked as response:
            return response.status, json.loads(await read_answer(response)), response.headers.get("Retry-After", "1")

    async def _while_it_answers(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`. Raises `TimeoutError` if the service stops answering checks."""
        if self._silent is None or self._silent.done():
            self._silent = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name=f"look at {self.url}")
        task, silent = asyncio.ensure_future(work), self._silent
        self._under_way += 1
        try:
            either: set[asyncio.Future[Any]] = {task, silent}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise TimeoutError(f"{_LOOKS} looks in a row were not answered, {self._look_seconds:g} s apart")
        finally:
            self._under_way -= 1
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _look(self) -> None:
        """Check the service while calls are in flight, on a separate connection that calls do not block."""
        limit, missed = aiohttp.ClientTimeout(total=self._look_seconds), 0
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True), timeout=limit
        ) as session:
            while self._under_way:
                await asyncio.sleep(self._look_seconds)
                try:
                    async with session.get(f"{self.url}/health", allow_redirects=False):
                        missed = 0
                except (aiohttp.ClientError, TimeoutError):
                    missed += 1
                if missed >= _LOOKS and self._silent is not None and not self._silent.done():
                    self._silent.set_result(None)
                    missed = 0

    def _note_sent(self, code: str) -> None:
        if code in self._sent:
            self._sent.move_to_end(code)
            return
        with contextlib.suppress(UnicodeEncodeError):  # not valid source; the call's result reports it
            self._sent[code] = source_digest(code)
        if len(self._sent) > _MOST_MODULES:
            self._sent.popitem(last=False)


def _lost(why: str) -> CallResult:
    return CallResult(Outcome.ENV_DIED, error=f"the sandbox service did not answer ({why})", ended_by=LOST)


def _decode(body: Any) -> CallResult:
    if not isinstance(body, dict) or set(body) != _FIELDS or body["kind"] not in _KINDS:
        return _lost("its answer is not a call's result")
    return CallResult(**(body | {"kind": Outcome(body["kind"])}))
