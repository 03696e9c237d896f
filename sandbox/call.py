"""One call in its own process: lock first, then run the untrusted module. Standard library only.

Nothing in this file is a defence once tool code runs: that code can rewrite every Python object here. The defences are
the kernel's confinement, the fact that the process is thrown away, and that its report is only ever about itself.

Code between the fork and the module touches little memory. A page that a forked process changes, even by a reference
count, is copied first, and this is most of a call's cost. So everything possible is made before the fork, and few
functions do the rest. The fork and the process's end cost time in proportion to the slot's memory. So this file and its
imports load little of the standard library.
"""

from __future__ import annotations

import _signal  # `signal` is slower
import builtins
import ctypes
import gc
import io
import json
import marshal
import operator
import os
import resource
import sys
import types
import warnings

from astra_jax.base.nesting import nests_too_deeply
from sandbox import determinism, libc, lockdown, modules
from sandbox.json_values import MOST_DIGITS, NotJsonError, has_plain_keys, to_json
from sandbox.protocol import ERROR_CHARACTERS, ERROR_CUT, LOCKED, OUTPUT_CUT, REPORT, Report, digest

TYPE_CHECKING = False
if TYPE_CHECKING:  # as in the standard library: `typing` itself would add half a megabyte to each call's copy
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from sandbox.limits import Limits
    from sandbox.seccomp import SyscallFilter

CHANNEL = 3
"""Descriptor of a call's channel. Besides it a call has only 0, 1 and 2, which are /dev/null."""
_exit = os._exit
_CPU_TIME, _MEMORY = resource.RLIMIT_CPU, resource.RLIMIT_AS
_RETURNED = int(Report.RETURNED)
# Looked up once: a Python function finds an enumeration's members, in separate memory pages.
_LOAD, _DIVERGED, _FUNCTION, _RAISED = Report.LOAD, Report.DIVERGED, Report.FUNCTION, Report.RAISED
_UNSERIALISABLE, _TOO_LARGE = Report.UNSERIALISABLE, Report.TOO_LARGE
_REHEARSALS = 20  # CPython 3.11 specialises a function after 8 calls, later versions after fewer
_FILE_NAME, _BYTE_ORDER_MARK = "<tool>", "\ufeff"
_DECODE = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # the C function
_ENCODE: Callable[[Any, int], Sequence[str]] = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # no NaN
    {}, json.JSONEncoder().default, json.encoder.encode_basestring, None, ": ", ", ", False, False, False
)
_get_most_digits, _set_most_digits = sys.get_int_max_str_digits, sys.set_int_max_str_digits


class Reported(Exception):
    """Exception that ends a call with a report other than a returned value."""

    def __init__(self, report: Report, error: str) -> None:
        super().__init__(error)
        self.report = report
        self.error = error
        self.stdout = ""


class Output(io.TextIOBase):
    """Standard output of a call: keeps the first `limit` characters, and a mark if more were written."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._parts: list[str] = []
        self._cut = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Store `text` as far as there is room; return its length."""
        kept = text[: self._left]
        self._left -= len(kept)
        self._cut = self._cut or len(kept) < len(text)
        if kept:
            self._parts.append(kept)
        return len(text)

    def text(self) -> str:
        """Return the text written, with a mark where it was cut."""
        joined = "".join(self._parts).encode("utf-8", "replace").decode()
        return joined + (OUTPUT_CUT if self._cut else "")

    def json(self) -> bytes:
        """Return the text as JSON."""
        return "".join(_ENCODE(self.text(), 0)).encode() if self._parts or self._cut else b'""'

    def clear(self) -> None:
        """Delete the text written."""
        self._left, self._cut = self._limit, False
        self._parts.clear()


class Locks:
    """Locks that a call puts on itself, as C functions with their arguments; prepared once by its slot.

    Args:
        rules: Landlock rules, or None.
        calls: seccomp filter, or None.
        parent: process id of the slot; the call ends with it.
    """

    def __init__(self, rules: lockdown.LandlockRules | None, calls: SyscallFilter | None, parent: int) -> None:
        self._parent = parent
        self._kept = calls  # its program has to stay in memory
        self._limit: Callable[..., Any] = resource.setrlimit
        self._steps: list[lockdown.Step] = [
            (os.setsid, ()),  # signals to "the group" now reach this process alone
            *([rules.restriction()] if rules else []),
            (os.closerange, (CHANNEL + 1, lockdown.MOST_DESCRIPTORS)),
            *((resource.setrlimit, limit) for limit in lockdown.call_limits()),
            *([calls.attachment()] if calls else []),
        ]
        self._die_with_parent = lockdown.death_with_parent()

    @classmethod
    def that_lock_nothing(cls) -> Locks:
        """Return locks for a rehearsal: as many steps of the same kinds, none of which changes anything."""
        locks = cls.__new__(cls)
        locks._parent = libc.getppid()
        locks._kept = None
        locks._limit = operator.is_
        nothing = lockdown.no_restriction()
        locks._steps = [nothing, (operator.is_, (0, 0)), nothing]
        locks._die_with_parent = nothing
        return locks

    def close(self, channel: int, cpu_seconds: int, memory_bytes: int) -> None:
        """Lock this process. Its reports then go to `channel`, moved to `CHANNEL`. Raises `OSError`.

        Args:
            channel: a descriptor.
            cpu_seconds: CPU time of the process; then it gets SIGXCPU, and SIGKILL a second later.
            memory_bytes: size of its address space.
        """
        function, arguments = self._die_with_parent
        if function(*arguments) < 0 or libc.getppid() != self._parent:
            _exit(1)
        _signal.set_wakeup_fd(-1)
        if channel != CHANNEL:
            os.dup2(channel, CHANNEL)
        self._limit(_CPU_TIME, (cpu_seconds, cpu_seconds + 1))
        self._limit(_MEMORY, (memory_bytes, memory_bytes))
        for function, arguments in self._steps:
            result = function(*arguments)
            if result is not None and result < 0:
                raise OSError(ctypes.get_errno(), "a layer could not be put in place")


def run_locked(
    channel: int,
    locks: Locks,
    cpu_seconds: int,
    memory_bytes: int,
    body: Callable[..., bytes],
    arguments: tuple[Any, ...],
) -> NoReturn:
    """Lock this freshly forked process, run `body`, send its report, and exit.

    Args:
        channel: write end of the slot's pipe.
        locks: locks to put in place first. If one fails, the call ends without running anything.
        cpu_seconds: see `Locks.close`.
        memory_bytes: see `Locks.close`.
        body: returns the bytes after `Report.RETURNED`; raises `Reported` for any other report.
        arguments: arguments of `body`.
    """
    try:
        _run(channel, locks, cpu_seconds, memory_bytes, body, arguments)
    finally:
        _exit(0)  # whatever was raised, this copy of the slot must not continue as a slot


def _run(
    channel: int,
    locks: Locks,
    cpu_seconds: int,
    memory_bytes: int,
    body: Callable[..., bytes],
    arguments: tuple[Any, ...],
) -> None:
    locks.close(channel, cpu_seconds, memory_bytes)
    os.write(CHANNEL, LOCKED)
    try:
        report, message = _RETURNED, body(*arguments)
    except Reported as stopped:
        report = int(stopped.report)
        account = {"error": _clean(stopped.error), "stdout": stopped.stdout}
        message = json.dumps(account, ensure_ascii=False).encode()
    except BaseException as error:  # for example MemoryError while the result was encoded
        report, message = int(Report.RAISED), json.dumps({"error": type(error).__name__, "stdout": ""}).encode()
    rest = memoryview(REPORT.pack(report, len(message)) + message)
    while rest:
        rest = rest[os.write(CHANNEL, rest) :]


def rehearse() -> None:
    """Run the steps of a call with a module of ours, unlocked, in the zygote.

    This fills the interpreter's caches and specialises its bytecode before the forks. Otherwise each call would do
    that again, in memory pages that it first has to copy.
    """
    streams = sys.stdout, sys.stderr
    module = b"ROWS = {'a': [1, 2.5]}\n\ndef f(key):\n    return {'key': key, 'row': ROWS[key]}\n"
    code = compile_module(module)[modules.NAMED_BYTES :]
    request = json.dumps({"function": "f", "seed": 0, "arguments": {"key": "a"}}).encode()
    null = os.open(os.devnull, os.O_WRONLY)
    locks = Locks.that_lock_nothing()
    for _ in range(_REHEARSALS):
        _run(null, locks, 0, 0, call_function, (code, request, 1_000, Output(1)))
    os.close(null)
    gc.disable()
    sys.stdout, sys.stderr = streams
    del sys.modules["tool"]


def wait_for_module(source: int, channel: int, locks: Locks, limits: Limits) -> NoReturn:
    """Lock this freshly forked process, prepare memory, compile the module that arrives on `source`, report, and exit.

    Args:
        source: read end of a pipe.
        channel: see `run_locked`.
        locks: see `run_locked`.
        limits: limits of the slot.
    """
    try:
        os.dup2(source, 0)  # all but 0 to 2 and the channel are closed
        run_locked(channel, locks, limits.cpu_seconds, limits.memory_bytes, _compile_sent, ())
    finally:
        _exit(1)  # see `run_locked`


def _compile_sent() -> bytes:
    kept = _memory_at_hand()
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
    code = compile_module(b"".join(parts))
    del kept  # only now: memory given back earlier would have to be requested again
    return code


def _memory_at_hand() -> list[bytes]:
    """Get three megabytes from the kernel, enough to compile 25 kB of source: this request is a third of that work.

    Returns:
        Objects that keep the memory. The rest is free for Python's own allocator (small ones) and the C library's.
    """
    small = [bytes(400) for _ in range(1_500)]
    large = [bytes(8_000) for _ in range(300)]
    return [*small[::700], large[-1]]


def compile_module(source: bytes | memoryview) -> bytes:
    """Compile untrusted source. The compiler can burn CPU and memory, so it too runs only in a locked process.

    Returns:
        The modules that the source names, from `modules.named`; then the marshalled code object.
    """
    try:
        warnings.simplefilter("ignore")
        code = compile(str(source, "utf-8").removeprefix(_BYTE_ORDER_MARK), _FILE_NAME, "exec", dont_inherit=True)
        return modules.named(code) + marshal.dumps(code)
    except SyntaxError as error:
        where = f" (line {error.lineno}: {(error.text or '').strip()[:200]!r})" if error.lineno else ""
        raise Reported(Report.SOURCE, f"{type(error).__name__}: {error.msg}{where}") from None
    except Exception as error:
        raise Reported(Report.SOURCE, f"{type(error).__name__}: the module could not be compiled: {error}") from None


def call_function(code: bytes, request: bytes | memoryview, most_bytes: int, output: Output) -> bytes:
    """Execute the module from scratch, repeat the calls of its history, call its function, and encode its result.

    The module has `__to_json__`, the conversion of results, for results that it checks itself.

    Args:
        code: the marshalled code object; unmarshalled only here, in the locked process.
        request: JSON {"function", "seed", "arguments"}, with optional "now" and "history".
        most_bytes: largest JSON of the result.
        output: receives the printed text.
    """
    wanted, _ = _DECODE(str(request, "utf-8"), 0)
    sys.stdout = sys.stderr = output
    gc.enable()
    determinism.begin_call(wanted["seed"], wanted.get("now"))
    name, arguments, function, value = wanted["function"], wanted["arguments"], None, None
    stage = _LOAD
    try:
        module = types.ModuleType("tool")
        namespace = module.__dict__
        namespace["__builtins__"], namespace["__to_json__"] = builtins, to_json
        module.__file__ = _FILE_NAME
        sys.modules["tool"] = module
        exec(marshal.loads(code), namespace)
        if "history" in wanted:
            stage = _DIVERGED
            _repeat(namespace, wanted["history"])
            output.clear()
        stage = _FUNCTION
        function = namespace.get(name)
        if not callable(function):
            raise NameError(f"the tool defines no function {name!r}; it defines: {_functions(namespace)}")
        stage = _RAISED
        value = function(**arguments)
        stage = _UNSERIALISABLE
        result = _write(value)
        stage = _TOO_LARGE
        if len(result) > most_bytes:
            raise ValueError(f"{len(result)} bytes of JSON; at most {most_bytes} are allowed: return less")
        return b'{"value":' + result + b',"stdout":' + output.json() + b"}"
    except BaseException as error:
        stopped = _explain(stage, error, name, function, value)
        stopped.stdout = output.text()
        raise stopped from None


def _write(value: Any) -> bytes:
    """Return a result as JSON, converted first if it is not plain JSON data. Raises `NotJsonError`."""
    digits = _get_most_digits()
    if digits != MOST_DIGITS:  # changed by the tool
        _set_most_digits(MOST_DIGITS)
    try:
        written = "".join(_ENCODE(value, 0)).encode()
        if has_plain_keys(value, written) and not nests_too_deeply(value, written):
            return written
    except (TypeError, ValueError, RecursionError):
        pass  # the conversion accepts the value, or reports its fault
    finally:
        if digits != MOST_DIGITS:  # later calls of a history find the same limit as the first
            _set_most_digits(digits)
    return "".join(_ENCODE(to_json(value), 0)).encode()


def _repeat(namespace: dict[str, Any], history: Sequence[tuple[str, dict[str, Any], str, float]]) -> None:
    """Repeat earlier successful calls, to restore the module's state, and compare their results with these digests."""
    for name, arguments, expected, _ in history:
        result = _write(namespace[name](**arguments))
        if digest(result) != expected:
            raise RuntimeError(f"{name} returned something else than before")


def _explain(stage: Report, error: BaseException, name: str, function: Any, value: Any) -> Reported:
    what = _describe(error)
    if stage == Report.RAISED and isinstance(error, TypeError):
        trace = error.__traceback__
        if trace is not None and trace.tb_next is None:  # raised by the call itself, before the function's first line
            return Reported(Report.ARGUMENTS, f"{what}; it is {_signature(name, function)}")
    if stage == Report.LOAD:
        what = f"the tool's module failed while it was loaded: {what}"
    if stage == Report.DIVERGED:
        what = f"the calls before this one did not repeat: {what}"
    if stage == Report.UNSERIALISABLE:
        why = str(error) if isinstance(error, NotJsonError) else what
        what = f"the returned {type(value).__name__} is not JSON: {why}"
    if stage == Report.TOO_LARGE:
        what = f"the result is {error}"
    return Reported(stage, what)


def _functions(namespace: dict[str, Any]) -> str:
    own = [n for n, v in namespace.items() if isinstance(v, types.FunctionType) and not n.startswith("_")]
    return ", ".join(sorted(own)[:20]) or "none"


def _signature(name: str, function: Callable[..., Any]) -> str:
    import inspect  # imported here: few calls need it, and each would copy it

    try:
        return f"{name}{inspect.signature(function)}"
    except (TypeError, ValueError):
        return name


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _clean(error: str) -> str:
    cut = error if len(error) <= ERROR_CHARACTERS else error[:ERROR_CHARACTERS] + ERROR_CUT
    return cut.encode("utf-8", "replace").decode()
