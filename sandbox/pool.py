"""Pool of sandboxed environments for asyncio callers: the pool of this process.

Callers use the interface `Sandbox` (`sandbox/interface.py`), which remote pools have too.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.call(code, "capital_of_country", {"country": "France"})

An environment here is one module with its slot, keyed by its source. It is not a `ToolEnvironment`, which has one for
each tool, or one for its world. The least recently used idle slot is evicted. Each call runs
in a fresh process of its slot, so the next call sees nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Annotated, Any
from weakref import WeakValueDictionary

from astra_jax.base.settings import Bound, OneOf, Seconds, SettingError, Settings, Slots, Total
from sandbox.cgroup import Cgroup, Share, machine_memory_bytes
from sandbox.host import SlotClient, SlotError, ZygoteClient
from sandbox.limits import Limits, LockPlan
from sandbox.outcomes import CLOSED, MEMORY, CallResult, Outcome, SandboxError
from sandbox.request import PastCall, cpu_seconds_of, encode_request, source_digest
from sandbox.selftest import LAYERS, POLICIES, TIERS, find_isolation, require_tier

_UIDS = 1000
# When the zygote is killed, a slot may end before the zygote's socket closes (the kernel closes descriptors one by
# one): the first try loses that slot, the second asks a zygote that will not answer, the third finds it gone.
_TRIES_TO_OPEN = 3
_CPUS = os.cpu_count() or 1  # the call takes 25 microseconds


@dataclass(frozen=True)
class SandboxConfig(Settings):
    """Settings of the pool.

    Attributes:
        minimum_tier: weakest isolation accepted, "A" to "D" (see `sandbox.selftest`); "strict" means "A".
        allow_unisolated: accept tier D, which has rlimits only. Use it only for code that you would run anyway.
        highest_tier: tier at which the self-test starts.
        leave_out: layers of `sandbox.selftest.LAYERS` to leave out on purpose; the others determine the tier.
        max_slots: environments kept open at once; each is one small process.
        spare_slots: empty slots kept open beyond `max_slots`, so that a new environment need not wait for one.
        concurrency: calls in flight at once; None for four per core, at most `max_slots`. The rest wait, and waiting
            does not count against any limit.
        limits: limits of each call.
        memory_bytes: memory of all calls and environments together; None for `memory_share`. This and `cpus` need a
            control group, see `layers["cgroup"]`.
        environment_memory_bytes: memory of all calls of one environment together; None for half of the total. It
            limits how many of them run at once (`calls_per_environment`), so it needs no control group.
        memory_share: share of the machine's memory, if there is a control group. Use less if several pools share it.
        cpus: CPU seconds per second for all together; None for no limit.
        python: interpreter that runs the tools.
        first_uid: as root, slots take user ids from this one on (1,000 of them, in turn).
        open_seconds: how long a slot may take to open before it counts as failed.
    """

    minimum_tier: Annotated[str, OneOf(POLICIES)] = "C"
    allow_unisolated: bool = False
    highest_tier: Annotated[str, OneOf(TIERS)] = "A"
    leave_out: tuple[Annotated[str, OneOf(LAYERS)], ...] = ()
    max_slots: Slots = 64
    spare_slots: Annotated[int, Bound(least=0, most=1_024)] = 1
    concurrency: Slots | None = None
    limits: Limits = field(default_factory=Limits)
    memory_bytes: Total | None = None
    environment_memory_bytes: Total | None = None
    memory_share: Annotated[float, Bound(above=0, most=1)] = 0.5
    cpus: Annotated[float, Bound(above=0, most=65_536)] | None = None
    python: str = field(default_factory=lambda: sys.executable)
    first_uid: Annotated[int, Bound(least=1, most=2**32 - 2 - _UIDS)] = 64_000
    open_seconds: Seconds = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency is not None and self.concurrency > self.max_slots:
            raise SettingError(
                f"SandboxConfig.concurrency is {self.concurrency}; use at most max_slots, which is {self.max_slots}"
            )

    @property
    def share(self) -> Share:
        """Limits of all of the pool's processes together."""
        memory = self.memory_bytes or int(machine_memory_bytes() * self.memory_share)
        # A slot is two processes while it opens, and processes of evicted slots take a moment to end.
        return Share(memory, 2 * (self.max_slots + self.spare_slots + self.calls_at_once) + 64, self.cpus)

    @property
    def calls_at_once(self) -> int:
        """Effective concurrency."""
        return self.concurrency or min(self.max_slots, 4 * _CPUS)

    @property
    def calls_per_environment(self) -> int:
        """Calls of one environment that run at once. Each is one process, of at most `limits.memory_bytes`.

        A call's own `limits` are not counted.
        """
        memory = self.environment_memory_bytes or self.share.memory_bytes // 2
        return min(self.calls_at_once, max(1, memory // self.limits.memory_bytes))


@dataclass
class PoolStats:
    """Counts since the pool was opened."""

    calls: int = 0
    retried: int = 0
    infrastructure: int = 0  # results returned with an infrastructure outcome
    opened: int = 0  # environments opened
    evicted: int = 0
    zygotes: int = 0


@dataclass
class _Entry:
    digest: str  # of the source
    opening: asyncio.Task[SlotClient]
    users: int = 0  # calls that hold a permit


class SandboxPool:
    """Runner of untrusted tool code for the asyncio event loop that opened it.

    Attributes:
        tier: effective isolation, "A" to "D"; set once the pool is open.
        layers: state of each layer by name, for the record of a run.
        stats: counts since the pool was opened.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.tier = ""
        self.layers: dict[str, str] = {}
        self.stats = PoolStats()
        self._fair_bytes = self.config.share.memory_bytes / self.config.calls_at_once
        self._plan: LockPlan | None = None
        self._cgroup: Cgroup | None = None
        self._zygote: ZygoteClient | None = None
        self._zygote_lock = asyncio.Lock()
        self._permits = asyncio.Semaphore(self.config.calls_at_once)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by source
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by source: Python caches its hash, unlike its digest
        self._sources: dict[str, str] = {}  # sources of entries, by digest
        self._spares: deque[asyncio.Task[SlotClient]] = deque()
        self._numbers = itertools.count()  # numbers for slots

    async def __aenter__(self) -> SandboxPool:
        """Start the zygote and run the self-test.

        Raises:
            SandboxError: this machine's isolation is below `minimum_tier`.
        """
        if self._plan is not None:
            raise SandboxError("the pool is already open")
        try:
            cgroup = self._make_cgroup()
            zygote = await self._living_zygote()
            isolation = await find_isolation(
                zygote,
                highest_tier=self.config.highest_tier,
                leave_out=self.config.leave_out,
                uid=self.config.first_uid + _UIDS - 1,
                seconds=self.config.open_seconds,
            )
            require_tier(
                isolation.plan.tier, self.config.minimum_tier, self.config.allow_unisolated, isolation.rejected
            )
        except SlotError as error:
            await self.close()
            raise SandboxError(f"no slot could be opened on this machine: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._plan = isolation.plan
        self.tier = isolation.plan.tier
        self.layers = isolation.layers | {"cgroup": cgroup}
        self._open_spares()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every process of the pool. Calls in flight end with `env_died`; later calls raise `SandboxError`."""
        self._plan = None
        entries, self._entries, self._sources = list(self._entries.values()), OrderedDict(), {}
        spares, self._spares = self._spares, deque()
        for opening in [*(entry.opening for entry in entries), *spares]:
            _close(opening)
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()
        cgroup, self._cgroup = self._cgroup, None
        if cgroup is not None:
            await asyncio.to_thread(cgroup.remove)

    async def call(
        self,
        code: str,
        function: str,
        arguments: Mapping[str, Any],
        *,
        seed: int = 0,
        now: int | None = None,
        history: Sequence[PastCall] = (),
        limits: Limits | None = None,
    ) -> CallResult:
        """Call one function of an untrusted module, in a fresh locked process.

        Args:
            code: source of the module.
            function: name of a function that it defines.
            arguments: keyword arguments; JSON data, never code.
            seed: seed of all randomness that the code can see. The same call with the same seed returns the same bytes.
            now: time of the call, Unix seconds; None for `sandbox.determinism.EPOCH`.
            history: calls to repeat first; `sandbox.SandboxEpisode` keeps it.
            limits: limits of this call in place of the pool's, except the one on standard output. Only this pool takes
                it; `Sandbox`, remote pools and fleets do not.

        Returns:
            Result of the call. An infrastructure outcome has already been retried once.

        Raises:
            SandboxError: the pool is not open.
        """
        if self._plan is None:
            raise SandboxError("the pool is not open: use `async with SandboxPool(...) as pool`")
        self.stats.calls += 1
        limits = limits or self.config.limits
        if code not in self._entries and (refused := _refuse_source(code, limits.source_bytes)):
            return refused
        request = encode_request(function, arguments, seed=seed, now=now, history=history)
        if isinstance(request, CallResult):
            return request
        if len(request) > (most := limits.argument_bytes):
            message = f"the arguments are {len(request)} bytes of JSON; at most {most} are allowed"
            return CallResult(Outcome.TOO_LARGE, error=message, ended_by="arguments")
        more = min(cpu_seconds_of(history), limits.history_cpu_seconds) if history else 0
        if (turns := self._turns.get(code)) is None:
            turns = self._turns[code] = asyncio.Semaphore(self.config.calls_per_environment)
        # A call that waits for others of its environment holds no permit meanwhile.
        async with turns, self._permits:
            result = await self._attempt(code, request, limits, more)
            if result.is_infrastructure and self._plan is not None:
                self.stats.retried += 1
                result = await self._attempt(code, request, limits, more)
        if result.kind is Outcome.KILLED and result.ended_by == MEMORY:
            # Killed for memory in both tries: the tool's own failure. Otherwise a tool could mask its episode this way.
            result = replace(result, kind=Outcome.CRASH)
        if result.is_infrastructure:
            self.stats.infrastructure += 1
        return result

    def source(self, digest: str) -> str | None:
        """Return the source of an open environment by its `source_digest`, or None."""
        return self._sources.get(digest)

    def _make_cgroup(self) -> str:
        if "cgroup" in self.config.leave_out:
            return "off"
        try:
            self._cgroup = Cgroup(self.config.share)
        except OSError as error:
            asked = [name for name in ("memory_bytes", "cpus") if getattr(self.config, name) is not None]
            if asked:
                raise SandboxError(
                    f"SandboxConfig.{asked[0]} needs a control group, and none can be made here ({error}). Run as the "
                    f"superuser or in a delegated subtree, or leave {asked[0]} out"
                ) from error
            return f"off: {error.strerror}"
        return self._cgroup.description

    async def _attempt(self, code: str, request: bytes, limits: Limits, more_cpu_seconds: int) -> CallResult:
        if self._plan is None:
            return CLOSED
        entry = self._entry(code)
        entry.users += 1
        try:
            # Shielded: others may wait for the same slot when this caller is cancelled.
            slot = await asyncio.shield(entry.opening)
            if len(self._spares) < self.config.spare_slots:  # once this call has started
                asyncio.get_running_loop().call_soon(self._open_spares)
            result = await slot.call(request, limits, more_cpu_seconds)
            return CLOSED if result.kind is Outcome.ENV_DIED and self._plan is None else result
        except SlotError as error:
            if self._plan is None:
                return CLOSED
            return CallResult(Outcome.OPEN_FAILED, error=str(error), ended_by="slot")
        except asyncio.CancelledError:
            if entry.opening.cancelled() and self._plan is None:
                return CLOSED
            raise
        finally:
            entry.users -= 1

    def _entry(self, code: str) -> _Entry:
        entry = self._entries.get(code)
        if entry is not None and _is_usable(entry):
            self._entries.move_to_end(code)
            return entry
        if entry is not None:
            self._forget(code)
        self._make_room()
        entry = _Entry(source_digest(code), asyncio.get_running_loop().create_task(self._open(code)))
        entry.opening.add_done_callback(_note_exception)
        self._entries[code] = entry
        self._sources[entry.digest] = code
        return entry

    def _forget(self, code: str) -> _Entry:
        entry = self._entries.pop(code)
        del self._sources[entry.digest]
        return entry

    def _make_room(self) -> None:
        """Evict the least recently used idle slots. Calls in flight never outnumber slots, so one is always idle."""
        for code in list(self._entries):
            if len(self._entries) < self.config.max_slots:
                return
            if self._entries[code].users == 0:
                _close(self._forget(code).opening)
                self.stats.evicted += 1

    async def _open(self, code: str) -> SlotClient:
        for _ in range(_TRIES_TO_OPEN - 1):
            with contextlib.suppress(SlotError):
                return await self._open_loaded(code)
        return await self._open_loaded(code)

    async def _open_loaded(self, code: str) -> SlotClient:
        slot = await self._spare() or await self._open_empty()
        try:
            await slot.load(code)
        except BaseException:
            slot.close()
            raise
        self.stats.opened += 1
        return slot

    async def _spare(self) -> SlotClient | None:
        while self._spares:
            with contextlib.suppress(SlotError):
                slot = await self._spares.popleft()
                if slot.alive:
                    return slot
        return None

    def _open_spares(self) -> None:
        while self._plan is not None and len(self._spares) < self.config.spare_slots:
            opening = asyncio.get_running_loop().create_task(self._open_empty())
            opening.add_done_callback(_note_exception)
            self._spares.append(opening)

    async def _open_empty(self) -> SlotClient:
        if self._plan is None:
            raise SlotError("the pool was closed")
        zygote = await self._living_zygote()
        uid = self.config.first_uid + next(self._numbers) % (_UIDS - 1)
        return await zygote.open_slot(self._plan, self.config.limits, uid, self.config.open_seconds, self._fair_bytes)

    async def _living_zygote(self) -> ZygoteClient:
        async with self._zygote_lock:
            if self._zygote is not None and not self._zygote.alive:
                await self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = ZygoteClient(self.config.python)
                if self._cgroup is not None:
                    try:
                        self._cgroup.add(self._zygote.pid)
                    except OSError as error:
                        zygote, self._zygote = self._zygote, None
                        await zygote.close()
                        raise SlotError(f"the zygote cannot be put into its control group: {error}") from error
                self.stats.zygotes += 1
            return self._zygote


def _refuse_source(code: str, most_bytes: int) -> CallResult | None:
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return CallResult(Outcome.TOOL_ERROR, error=f"SyntaxError: source is not UTF-8: {error}", ended_by="source")
    if size > most_bytes:
        message = f"the module is {size} bytes; at most {most_bytes} are allowed"
        return CallResult(Outcome.TOO_LARGE, error=message, ended_by="source")
    return None


def _is_usable(entry: _Entry) -> bool:
    task = entry.opening
    if not task.done():
        return True
    if task.cancelled() or task.exception() is not None:
        return False
    slot = task.result()
    return slot.alive or slot.load_error is not None


def _close(opening: asyncio.Task[SlotClient]) -> None:
    if not opening.done():
        opening.cancel()
    elif not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _note_exception(task: asyncio.Task[SlotClient]) -> None:
    """Mark the exception as retrieved: every caller that waited for it may have been cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
