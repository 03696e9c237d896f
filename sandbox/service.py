"""HTTP service of the pool, for callers in other processes and on other machines.

  * POST /call       {"code" or "digest", "function", "arguments", "seed"?, "now"?, "history"?} → a `CallResult` as JSON
  * POST /run_code   {"code", "stdin"?, "files"?, "run_timeout"?, …} → SandboxFusion's form (`sandbox.run_code`)
  * GET  /health     {"status", "tier", "layers", "running", "waiting"}; 503 while it drains
  * GET  /metrics    Prometheus' text format

A caller may name an open module by its digest (SHA-256 of the source as UTF-8) and not send it again. The pool hashes
the source that it runs, so no caller can put other code behind a digest. If the module is not open any more: 409.

With a token, all paths but `/health` need `Authorization: Bearer TOKEN`. A refused request is answered at once:
400 (field, value, fix), 401, 409, 413, 429 with Retry-After, 503. Errors are `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from astra_jax.base.access import ReachConfig, network_of
from astra_jax.base.http_service import HttpRefusal, HttpService
from astra_jax.base.settings import Bound, CountOrZero, Port, Rate
from sandbox import run_code
from sandbox.json_values import MOST_DIGITS
from sandbox.outcomes import CallResult, SandboxError
from sandbox.pool import SandboxPool
from sandbox.request import PastCall

_HEADROOM_BYTES = 64 << 10
_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BURST_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class SandboxServiceConfig(ReachConfig):
    """Settings of the sandbox's HTTP service.

    Attributes:
        max_waiting: calls that may wait for a permit; more are answered with 429.
        caller_share: largest share of the running calls, and of the waiting calls, for one caller (an address, or an
            IPv6 /64 network). More wait or are answered with 429, even if there is room. At least one of each.
        caller_calls_per_second: calls of one caller, averaged over ten seconds; more are answered with 429. None: no
            limit.
    """

    RISK = "run code"

    port: Port = 8700
    max_waiting: CountOrZero = 1024
    caller_share: Annotated[float, Bound(above=0, most=1)] = 0.75
    caller_calls_per_second: Rate | None = None


class _Caller:
    """Running and waiting calls of one caller. Removed when there are none and its allowance is full again.

    Args:
        running: calls that may run at once.
        rate: calls per second; None for no limit.
    """

    def __init__(self, running: int, rate: float | None) -> None:
        self.accepted = 0  # running and waiting calls
        self.turns = asyncio.Semaphore(running)
        self._rate = rate
        self._most = max(1.0, (rate or 0.0) * _BURST_SECONDS)
        self._left, self._at = self._most, time.monotonic()

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * (self._rate or 0.0))
        self._at = now

    @property
    def idle(self) -> bool:
        """True if the state equals that of a new caller."""
        self._refill()
        return not self.accepted and self._left >= self._most

    def take(self) -> float:
        """Take one call off the allowance. Return 0, or the seconds until there is an allowance again."""
        if self._rate is None:
            return 0.0
        self._refill()
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0


class SandboxService(HttpService):
    """HTTP service of an open pool.

    Args:
        pool: an open pool, which the caller closes.
    """

    config: SandboxServiceConfig

    def __init__(self, pool: SandboxPool, config: SandboxServiceConfig) -> None:
        self._pool = pool
        self._accepted = 0  # calls that run or wait for a permit
        self._callers: dict[str, _Caller] = {}  # by address
        self._metrics = _Metrics(self)
        limits = pool.config.limits
        routes = [
            web.post("/call", self._call),
            web.post("/run_code", self._run_code),
            web.get("/health", self._health),
            web.get("/metrics", self._show_metrics),
        ]
        # JSON may write one byte as six.
        most_bytes = 6 * (limits.source_bytes + limits.argument_bytes) + _HEADROOM_BYTES
        super().__init__(config, routes, most_bytes=most_bytes)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a permit."""
        return max(0, self._accepted - self._pool.config.calls_at_once)

    @property
    def running(self) -> int:
        """Number of calls that have a permit."""
        return self._accepted - self.waiting

    # ------------------------------------------------------------------------------------------------------- handlers

    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.Response:
        """Return the refusal as JSON."""
        self._metrics.refused.labels(str(refused.status)).inc()
        return web.json_response({"error": refused.text}, status=refused.status, headers=refused.headers)

    async def _call(self, request: web.Request) -> web.Response:
        names: dict[str, type] = {"code": str, "function": str, "arguments": dict}
        names |= {"seed": int, "now": int, "history": list, "digest": str}
        body = await _body(request, names, {"code": None, "digest": None, "seed": 0, "now": None, "history": []})
        body["history"] = [_past_call(item) for item in body["history"]]
        result = await self._admitted(request, self._source(body.pop("code"), body.pop("digest")), **body)
        return web.json_response(vars(result))

    def _source(self, code: str | None, digest: str | None) -> str:
        if code is not None and digest is None:
            return code
        if digest is None or code is not None:
            raise HttpRefusal(400, "send one of 'code' and 'digest': a module's source, or what names one that is open")
        if (held := self._pool.source(digest)) is None:
            raise HttpRefusal(409, f"no environment of digest {digest[:80]!r} is open here; send its 'code'")
        return held

    async def _run_code(self, request: web.Request) -> web.Response:
        try:
            program = run_code.read_request(await _json(request), self._pool.config.limits.source_bytes)
        except run_code.NotOffered as refused:
            return web.json_response(run_code.refusal(str(refused)))
        except run_code.BadField as error:
            detail = [{"type": "value_error", "loc": ["body", error.name], "msg": str(error)}]
            self._metrics.refused.labels("422").inc()
            return web.json_response({"detail": detail, "error": str(error)}, status=422)
        limits = program.limits(self._pool.config.limits, self._most_bytes)
        result = await self._admitted(
            request, program.module, function=run_code.FUNCTION, arguments=program.arguments, limits=limits
        )
        return web.json_response(run_code.answer(program, result))

    async def _health(self, request: web.Request) -> web.Response:
        state = {
            "status": "draining" if self.draining else "ok",
            "tier": self._pool.tier,
            "layers": self._pool.layers,
            "running": self.running,
            "waiting": self.waiting,
        }
        return web.json_response(state, status=503 if self.draining else 200)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = exposition.generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    def _caller(self, request: web.Request) -> _Caller:
        address = network_of(request.remote or "")
        if address not in self._callers:
            self._callers = {name: caller for name, caller in self._callers.items() if not caller.idle}
            running = max(1, int(self._pool.config.calls_at_once * self.config.caller_share))
            self._callers[address] = _Caller(running, self.config.caller_calls_per_second)
        return self._callers[address]

    def _refuse_excess(self, caller: _Caller) -> None:
        at_once, most = self._pool.config.calls_at_once, self._pool.config.calls_at_once + self.config.max_waiting
        text, waiting = f"{self.waiting} calls are waiting already; try again later", self.waiting
        if self._accepted < most:
            most = max(1, int(most * self.config.caller_share))
            text, waiting = f"{caller.accepted} calls of yours are under way already; at most {most}", caller.accepted
            if caller.accepted < most:
                if pause := caller.take():
                    text = f"more than {self.config.caller_calls_per_second:g} calls a second; wait as Retry-After says"
                    raise HttpRefusal(429, text, {"Retry-After": str(math.ceil(pause))})
                return
        # About half of the waiting calls have finished by then.
        pause = waiting / 2 * self._metrics.mean_seconds() / at_once
        raise HttpRefusal(429, text, {"Retry-After": str(max(1, math.ceil(pause)))})

    async def _admitted(self, request: web.Request, code: str, **call: Any) -> CallResult:
        if self.draining:
            raise HttpRefusal(503, "the service is stopping")
        caller = self._caller(request)
        self._refuse_excess(caller)
        self._accepted += 1
        caller.accepted += 1
        started = time.perf_counter()
        try:
            async with caller.turns:
                result = await self._pool.call(code, **call)
        except SandboxError as error:
            raise HttpRefusal(503, str(error)) from None
        finally:
            self._accepted -= 1
            caller.accepted -= 1
        self._metrics.calls.labels(result.kind.value).inc()
        self._metrics.seconds.observe(time.perf_counter() - started)
        return result


# ---------------------------------------------------------------------------------------------------------------------
# Requests and answers


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        why = str(error)
        if "int_max_str_digits" in why:  # Python's advice is not for a client
            why = f"it holds an integer of more than {MOST_DIGITS} digits; send it as text"
        raise HttpRefusal(400, f"the body is not JSON: {why}") from None


async def _body(request: web.Request, fields: dict[str, type], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the request's JSON object, with each field checked for its type."""
    body = await _json(request)
    if not isinstance(body, dict):
        raise HttpRefusal(400, f"the body is a JSON {type(body).__name__}; send an object with {', '.join(fields)}")
    if unknown := set(body) - set(fields):
        raise HttpRefusal(400, f"unknown field {sorted(unknown)[0]!r}; the fields are {', '.join(fields)}")
    for name, kind in fields.items():
        if name not in body:
            if name not in defaults:
                raise HttpRefusal(400, f"field {name!r} is missing; the fields are {', '.join(fields)}")
            body[name] = defaults[name]
        elif not isinstance(body[name], kind) or (kind is int and isinstance(body[name], bool)):
            shown = json.dumps(body[name])[:80]
            raise HttpRefusal(400, f"field {name!r} is {shown}; send a JSON {_JSON_NAMES[kind]}")
    return body


_JSON_NAMES = {str: "string", dict: "object", int: "integer", list: "array"}


def _past_call(item: Any) -> PastCall:
    shapes: tuple[Any, ...] = (str, dict, str, (int, float))
    shaped = isinstance(item, list) and len(item) == len(shapes)
    if not shaped or not all(isinstance(part, shape) for part, shape in zip(item, shapes, strict=True)):
        shown = json.dumps(item)[:80]
        raise HttpRefusal(
            400, f"field 'history' holds {shown}; send arrays of function, arguments, digest, CPU seconds"
        )
    try:
        return PastCall(*item)
    except ValueError as error:
        raise HttpRefusal(400, f"field 'history': {error}") from None


class _Metrics:
    """Prometheus metrics of one service, in their own registry."""

    def __init__(self, service: SandboxService) -> None:
        pool = service._pool
        self.registry = CollectorRegistry()
        self.calls = Counter("sandbox_calls", "Calls that were answered.", ["kind"], registry=self.registry)
        self.refused = Counter("sandbox_refused", "Requests that were refused.", ["status"], registry=self.registry)
        self.seconds = Histogram(
            "sandbox_call_seconds",
            "From a call's acceptance to its result, waiting included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        tier = Gauge("sandbox_tier", "1 for the isolation tier in force.", ["tier"], registry=self.registry)
        tier.labels(pool.tier).set(1)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "sandbox_running": ("Calls that run.", lambda: service.running),
            "sandbox_waiting": ("Calls that wait for a permit.", lambda: service.waiting),
            "sandbox_slots_opened": ("Environments opened so far.", lambda: pool.stats.opened),
            "sandbox_slots_evicted": ("Environments evicted so far.", lambda: pool.stats.evicted),
            "sandbox_zygotes": ("Zygotes started so far.", lambda: pool.stats.zygotes),
            "sandbox_retried": ("Calls tried a second time so far.", lambda: pool.stats.retried),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(value)

    def mean_seconds(self) -> float:
        """Mean duration of the calls so far; a few milliseconds before the first call."""
        samples = {sample.name: sample.value for metric in self.seconds.collect() for sample in metric.samples}
        count = samples["sandbox_call_seconds_count"]
        return samples["sandbox_call_seconds_sum"] / count if count else 0.005
