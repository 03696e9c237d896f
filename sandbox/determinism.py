"""Determinism of calls: a virtual clock, seeded randomness, fixed identities. Standard library only.

`install` runs once in the zygote, so every slot and call inherits it; `begin_call` runs in each call. The zygote's
environment adds the fixed hash seed, UTC, C.UTF-8 and the fixed memory layout. So the same call of the same module
returns the same bytes on any worker, in any order, after any restart. Addresses (`id`) are the exception: the heap
depends a little on earlier work. Validation rejects code that shows addresses.

The clock stands at `EPOCH` and moves only when the code sleeps. Monotonic clocks also advance a microsecond at each
reading, so that loops which wait for time to pass end. Code that bypasses Python (ctypes, the vDSO) can still read
the machine's clock; validation, which runs each tool twice, rejects such code.
"""

from __future__ import annotations

import _thread
import ctypes
import datetime
import gc
import os
import random
import sys
import time

# Its C library adds ten mappings to each call's process, and `install` replaces it.
_kept = sys.modules.setdefault("_uuid", None)  # type: ignore[arg-type]
import uuid  # noqa: E402

if _kept is None:
    del sys.modules["_uuid"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EPOCH = 1_767_225_600
"""2026-01-01T00:00:00Z: the default time of every call, in Unix seconds."""

_MONOTONIC_START_NS = 1_000_000_000_000
_TICK_NS = 1_000


class _Clock:
    def __init__(self) -> None:
        self.start_ns = EPOCH * 1_000_000_000
        self.slept_ns = 0
        self.ticks = 0

    def wall_ns(self) -> int:
        return self.start_ns + self.slept_ns

    def monotonic_ns(self) -> int:
        self.ticks += 1
        return _MONOTONIC_START_NS + self.slept_ns + self.ticks * _TICK_NS

    def sleep(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError("sleep length must be non-negative")
        self.slept_ns += int(seconds * 1e9)


class _Entropy:
    """Generator that is created at its first use: most calls need none, and seeding takes a tenth of a millisecond."""

    def __init__(self) -> None:
        self.seed = 0
        self._made: random.Random | None = None

    @property
    def generator(self) -> random.Random:
        if self._made is None:
            self._made = random.Random(f"sandbox entropy {self.seed}")
        return self._made


_clock = _Clock()
_entropy = _Entropy()
_reseed_default = super(random.Random, random._inst).seed  # type: ignore[misc]  # the C method, for integers


def install() -> None:
    """Replace the sources of time, randomness and identity in this process, for good."""
    _install_time()
    _install_datetime()
    _install_entropy()
    os.getpid = lambda: 2
    os.getppid = lambda: 1
    _reseed_default(_entropy.seed)  # not again in each call: that changes a memory page
    _thread.get_native_id = lambda: 2  # `threading`, if it is not loaded yet, reads it from here
    threading: Any = sys.modules.get("threading")
    if threading is not None:  # loaded by `sysconfig`, from Python 3.12 on
        threading.get_native_id = _thread.get_native_id
        threading.main_thread()._set_native_id()


def begin_call(seed: int, now: int | None) -> None:
    """Start a call in a fresh process: at `now` (Unix seconds; None for `EPOCH`), all randomness from `seed`."""
    if now is not None:
        _clock.start_ns = now * 1_000_000_000
    if seed != _entropy.seed:
        _entropy.seed = seed
        _reseed_default(seed)


def _install_time() -> None:
    gmtime, asctime, strftime = time.gmtime, time.asctime, time.strftime

    def now() -> float:
        return _clock.wall_ns() / 1e9

    def utc(seconds: float | None = None) -> time.struct_time:
        return gmtime(now() if seconds is None else seconds)

    def ascii_time(moment: Any = None) -> str:
        return asctime(utc() if moment is None else moment)

    def format_time(pattern: str, moment: Any = None) -> str:
        return strftime(pattern, utc() if moment is None else moment)

    def clock_ns(clock: int) -> int:
        return _clock.wall_ns() if clock == time.CLOCK_REALTIME else _clock.monotonic_ns()

    replacements: dict[str, Any] = {
        "time": now,
        "time_ns": _clock.wall_ns,
        "sleep": _clock.sleep,
        "gmtime": utc,
        "localtime": utc,  # the zygote runs in UTC
        "asctime": ascii_time,
        "ctime": lambda seconds=None: ascii_time(utc(seconds)),
        "strftime": format_time,
        "clock_gettime_ns": clock_ns,
        "clock_gettime": lambda clock: clock_ns(clock) / 1e9,
    }
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        replacements[name] = lambda: _clock.monotonic_ns() / 1e9
        replacements[f"{name}_ns"] = _clock.monotonic_ns
    for name, replacement in replacements.items():
        setattr(time, name, replacement)

    def process_times() -> os.times_result:
        elapsed = _clock.monotonic_ns() / 1e9
        return os.times_result((elapsed, 0.0, 0.0, 0.0, elapsed))

    os.times = process_times


def _install_datetime() -> None:
    """Replace the four constructors that read the clock, inside the C types themselves.

    Subclasses in the module would break `repr`, `type(x) is datetime`, pickles and `singledispatch`. The types refuse
    attribute assignment, so the entries are set in their dictionaries and the method cache is flushed.
    """

    def now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), tz)

    def utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    def today(cls: type[datetime.date]) -> datetime.date:
        return cls.fromtimestamp(time.time())

    _set_on_static_type(datetime.datetime, {"now": now, "utcnow": utcnow, "today": today})
    _set_on_static_type(datetime.date, {"today": today})


def _set_on_static_type(kind: type, methods: dict[str, Any]) -> None:
    namespace = gc.get_referents(kind.__dict__)[0]
    for name, function in methods.items():
        namespace[name] = classmethod(function)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _install_entropy() -> None:
    seed_generator = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed_generator(self, _entropy.generator.getrandbits(128) if a is None else a, version)

    def urandom(size: int) -> bytes:
        return _entropy.generator.randbytes(size)

    def getrandom(size: int, flags: int = 0) -> bytes:
        return _entropy.generator.randbytes(size)

    random.Random.seed = seed  # type: ignore[method-assign]  # an unseeded Random() is a function of the call's seed
    random.seed = random._inst.seed  # the module's function is the bound method of its hidden instance
    random._urandom = urandom  # type: ignore[attr-defined]  # SystemRandom and secrets read it here
    os.urandom = urandom
    if hasattr(os, "getrandom"):
        os.getrandom = getrandom
    uuid.uuid1 = lambda node=None, clock_seq=None: uuid.UUID(int=_entropy.generator.getrandbits(128), version=1)
    uuid.uuid4 = lambda: uuid.UUID(int=_entropy.generator.getrandbits(128), version=4)
    uuid.getnode = lambda: 0x0242AC110002
