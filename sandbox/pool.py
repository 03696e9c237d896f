"""The pool: asyncio callers in, results out. This is what the rest of the system uses.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.call(code, "capital_of_country", {"country": "France"})

Each distinct module has a slot of its own, kept by the digest of its source and evicted when it is the least recently
used idle one. Each call runs in a fresh process of that slot: nothing a call does can be seen by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from sandbox.host import Slot, SlotError, Zygote
from sandbox.outcomes import CallResult, Outcome, SandboxError, encode_request
from sandbox.protocol import Limits, Plan
from sandbox.selftest import TIERS, find_isolation

_UIDS = 1000


@dataclass(frozen=True)
class SandboxConfig:
    """How to run the pool.

    Attributes:
        minimum_tier: weakest isolation accepted, "A" to "D" (see `sandbox.selftest`); "strict" means "A".
        allow_unisolated: accept tier D, where rlimits are all there is. Only for code you would run anyway.
        highest_tier: where the self-test begins; lower it to leave layers out on purpose.
        max_slots: environments kept open at once; each is one small process.
        concurrency: calls in flight at once; None for four a core, at most `max_slots`. The rest wait their turn,
            and waiting does not count against any limit.
        limits: of each call.
        python: interpreter that runs the tools.
        first_uid: as the superuser, slots take user ids from here on (1,000 of them, in turn).
        open_seconds: how long a slot may take to open before it counts as failed.
    """

    minimum_tier: str = "C"
    allow_unisolated: bool = False
    highest_tier: str = "A"
    max_slots: int = 64
    concurrency: int | None = None
    limits: Limits = field(default_factory=Limits)
    python: str = field(default_factory=lambda: sys.executable)
    first_uid: int = 64_000
    open_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.minimum_tier not in (*TIERS, "strict"):
            raise ValueError(f"SandboxConfig.minimum_tier={self.minimum_tier!r}: use one of A, B, C, D or strict")
        if self.highest_tier not in TIERS:
            raise ValueError(f"SandboxConfig.highest_tier={self.highest_tier!r}: use one of A, B, C, D")
        if self.max_slots < 1:
            raise ValueError(f"SandboxConfig.max_slots={self.max_slots}: must be at least 1")
        if self.concurrency is not None and not 1 <= self.concurrency <= self.max_slots:
            raise ValueError(
                f"SandboxConfig.concurrency={self.concurrency}: must be from 1 to max_slots={self.max_slots}"
            )

    @property
    def calls_at_once(self) -> int:
        """The concurrency in force."""
        return self.concurrency or min(self.max_slots, 4 * (os.cpu_count() or 1))


@dataclass
class PoolStats:
    """Counts since the pool was opened."""

    calls: int = 0
    retried: int = 0
    infrastructure: int = 0  # results returned with an infrastructure outcome
    opened: int = 0
    evicted: int = 0
    zygotes: int = 0


@dataclass
class _Entry:
    opening: asyncio.Task[Slot]
    users: int = 0


class SandboxPool:
    """Runs untrusted tool code for the asyncio event loop that opened it.

    Attributes:
        tier: isolation in force, "A" to "D"; set once the pool is open.
        layers: each layer's state by name, for the record of a run.
        stats: counts.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.tier = ""
        self.layers: dict[str, str] = {}
        self.stats = PoolStats()
        self._plan: Plan | None = None
        self._zygote: Zygote | None = None
        self._zygote_lock = asyncio.Lock()
        self._permits = asyncio.Semaphore(self.config.calls_at_once)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def __aenter__(self) -> SandboxPool:
        """Start the zygote and run the self-test.

        Raises:
            SandboxError: this machine's isolation is below `minimum_tier`.
        """
        if self._plan is not None:
            raise SandboxError("the pool is already open")
        try:
            zygote = await self._living_zygote()
            isolation = await find_isolation(
                zygote,
                highest_tier=self.config.highest_tier,
                uid=self.config.first_uid + _UIDS - 1,
                seconds=self.config.open_seconds,
            )
            self._require(isolation.plan.tier, isolation.rejected)
        except SlotError as error:
            await self.close()
            raise SandboxError(f"no slot could be opened on this machine: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._plan = isolation.plan
        self.tier = isolation.plan.tier
        self.layers = isolation.layers
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every process of the pool. Calls in flight end with `env_died`; later ones raise `SandboxError`."""
        self._plan = None
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            self._close_entry(entry)
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    async def call(self, code: str, function: str, arguments: Mapping[str, Any], *, seed: int = 0) -> CallResult:
        """Call one function of an untrusted module, in a fresh locked process.

        Args:
            code: source of the module.
            function: name of a function it defines.
            arguments: keyword arguments; JSON data, never code.
            seed: of everything random that the code can see. The same call with the same seed returns the same bytes.

        Returns:
            What became of it. An infrastructure outcome has already been retried once.

        Raises:
            SandboxError: the pool is not open.
        """
        if self._plan is None:
            raise SandboxError("the pool is not open: use `async with SandboxPool(...) as pool`")
        self.stats.calls += 1
        request = self._encode(code, function, arguments, seed)
        if isinstance(request, CallResult):
            return request
        digest = hashlib.sha256(code.encode()).hexdigest()
        async with self._permits:
            result = await self._attempt(digest, code, request)
            if result.is_infrastructure:
                self.stats.retried += 1
                result = await self._attempt(digest, code, request)
        if result.is_infrastructure:
            self.stats.infrastructure += 1
        return result

    def _require(self, tier: str, rejected: Mapping[str, str]) -> None:
        wanted = "A" if self.config.minimum_tier == "strict" else self.config.minimum_tier
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items()) or "no stronger tier was tried"
        if tier == "D":
            if not self.config.allow_unisolated:
                raise SandboxError(
                    "this machine offers no isolation beyond rlimits (tier D), and untrusted code would run with your "
                    "own rights. Use a Linux kernel with seccomp, or set SandboxConfig.allow_unisolated=True if you "
                    f"trust the code. Why not more: {reasons}"
                )
        elif tier > wanted:
            raise SandboxError(
                f"isolation here is tier {tier}, SandboxConfig.minimum_tier asks for {wanted}. Run where the missing "
                f"layers are allowed, or accept less by minimum_tier={tier!r}. Why not more: {reasons}"
            )

    def _encode(self, code: str, function: str, arguments: Mapping[str, Any], seed: int) -> bytes | CallResult:
        limits = self.config.limits
        try:
            size = len(code.encode())
        except UnicodeEncodeError as error:
            return CallResult(Outcome.TOOL_ERROR, error=f"SyntaxError: source is not UTF-8: {error}", ended_by="source")
        if size > limits.source_bytes:
            message = f"the module is {size} bytes; at most {limits.source_bytes} are allowed"
            return CallResult(Outcome.TOO_LARGE, error=message, ended_by="source")
        request = encode_request(function, arguments, seed)
        if isinstance(request, CallResult):
            return request
        if len(request) > limits.argument_bytes:
            message = f"the arguments are {len(request)} bytes of JSON; at most {limits.argument_bytes} are allowed"
            return CallResult(Outcome.TOO_LARGE, error=message, ended_by="arguments")
        return request

    async def _attempt(self, digest: str, code: str, request: bytes) -> CallResult:
        entry = self._entry(digest, code)
        entry.users += 1
        try:
            # Shielded: others may be waiting for the same slot when this caller is cancelled.
            slot = await asyncio.shield(entry.opening)
            return await slot.call(request)
        except SlotError as error:
            return CallResult(Outcome.OPEN_FAILED, error=str(error), ended_by="slot")
        except asyncio.CancelledError:
            if entry.opening.cancelled() and self._plan is None:
                raise SandboxError("the pool was closed during the call") from None
            raise
        finally:
            entry.users -= 1

    def _entry(self, digest: str, code: str) -> _Entry:
        entry = self._entries.get(digest)
        if entry is not None and _is_usable(entry):
            self._entries.move_to_end(digest)
            return entry
        self._entries.pop(digest, None)
        self._make_room()
        entry = _Entry(asyncio.get_running_loop().create_task(self._open(code)))
        entry.opening.add_done_callback(_note_exception)
        self._entries[digest] = entry
        return entry

    def _make_room(self) -> None:
        """Evict the least recently used idle slots. Calls in flight never outnumber slots, so one is always idle."""
        for digest in list(self._entries):
            if len(self._entries) < self.config.max_slots:
                return
            if self._entries[digest].users == 0:
                self._close_entry(self._entries.pop(digest))
                self.stats.evicted += 1

    async def _open(self, code: str) -> Slot:
        try:
            slot = await self._open_empty()
        except SlotError:  # the zygote may just have died, unnoticed; a living one is started if so
            slot = await self._open_empty()
        try:
            await slot.load(code)
        except BaseException:
            slot.close()
            raise
        return slot

    async def _open_empty(self) -> Slot:
        if self._plan is None:
            raise SandboxError("the pool was closed")
        zygote = await self._living_zygote()
        uid = self.config.first_uid + self.stats.opened % (_UIDS - 1)
        self.stats.opened += 1
        return await zygote.open_slot(self._plan, self.config.limits, uid, self.config.open_seconds)

    async def _living_zygote(self) -> Zygote:
        async with self._zygote_lock:
            if self._zygote is not None and not self._zygote.alive:
                await self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = Zygote(self.config.python)
                self.stats.zygotes += 1
            return self._zygote

    @staticmethod
    def _close_entry(entry: _Entry) -> None:
        task = entry.opening
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            task.result().close()


def _is_usable(entry: _Entry) -> bool:
    task = entry.opening
    if not task.done():
        return True
    if task.cancelled() or task.exception() is not None:
        return False
    slot = task.result()
    return slot.alive or slot.load_error is not None


def _note_exception(task: asyncio.Task[Slot]) -> None:
    """Mark the exception as seen: every caller that waited for it may have been cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
