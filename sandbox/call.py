"""One call, in a process of its own: lock first, then run the untrusted module. Standard library only.

Nothing in this file is a defence once tool code runs: that code can rewrite every Python object here. What holds is the
kernel's confinement, the fact that the process is thrown away, and that its report is only ever about itself.
"""

from __future__ import annotations

import builtins
import gc
import inspect
import io
import json
import marshal
import os
import resource
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sandbox import determinism, lockdown
from sandbox.protocol import LOCKED, REPORT, Limits, Report
from sandbox.seccomp import Filter

_CHANNEL = 3  # the only descriptor a call has beside 0, 1 and 2, which are /dev/null
_ERROR_CHARACTERS = 2_000
_FILE_NAME = "<tool>"
_DECODER = json.JSONDecoder()


class Reported(Exception):
    """Ends a call with a report other than a returned value."""

    def __init__(self, report: Report, error: str) -> None:
        super().__init__(error)
        self.report = report
        self.error = error
        self.stdout = ""


class _BoundedText(io.TextIOBase):
    """Standard output of a call: keeps the first `limit` characters and counts on the reader to see that it was cut."""

    def __init__(self, limit: int) -> None:
        self._parts: list[str] = []
        self._left = limit
        self._cut = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        kept = text[: self._left]
        self._left -= len(kept)
        self._cut = self._cut or len(kept) < len(text)
        if kept:
            self._parts.append(kept)
        return len(text)

    def text(self) -> str:
        joined = "".join(self._parts).encode("utf-8", "replace").decode()
        return joined + ("\n[output cut]" if self._cut else "")


@dataclass(frozen=True)
class Locks:
    """What a call puts on itself; prepared once by its slot.

    Attributes:
        rules: Landlock rules, or None.
        calls: seccomp filter, or None.
        resources: arguments of `resource.setrlimit`.
    """

    rules: lockdown.LandlockRules | None
    calls: Filter | None
    resources: Sequence[tuple[int, tuple[int, int]]]


def run_locked(body: Callable[[], bytes], channel: int, locks: Locks, parent: int) -> NoReturn:
    """Lock this freshly forked process, run `body`, send its report, end.

    Args:
        body: returns what follows `Report.RETURNED`; raises `Reported` for any other report.
        channel: write end of the slot's pipe.
        locks: to put in place first; a call that cannot ends without having run anything.
        parent: process id of the slot; the call does not outlive it.
    """
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        lockdown.die_with_parent(parent)
        os.setsid()  # signals to "the group" now reach nobody else
        if channel != _CHANNEL:
            os.dup2(channel, _CHANNEL)
        if locks.rules is not None:
            locks.rules.restrict()
        lockdown.close_descriptors(_CHANNEL)
        for number, pair in locks.resources:
            resource.setrlimit(number, pair)
        if locks.calls is not None:
            locks.calls.attach()
        os.write(_CHANNEL, LOCKED)
        try:
            report, message = Report.RETURNED, body()
        except Reported as stopped:
            report = stopped.report
            account = {"error": _clean(stopped.error), "stdout": stopped.stdout}
            message = json.dumps(account, ensure_ascii=False).encode()
        except BaseException as error:  # MemoryError while the result was encoded, for instance
            report, message = Report.RAISED, json.dumps({"error": type(error).__name__, "stdout": ""}).encode()
        _send(REPORT.pack(report, len(message)) + message)
    finally:
        os._exit(0)  # whatever was raised, this copy of the slot must not go on as one


def compile_module(source: bytes) -> bytes:
    """Compile untrusted source; the compiler can burn CPU and memory, so it too runs only in a locked process."""
    try:
        warnings.simplefilter("ignore")
        return marshal.dumps(compile(source.decode(), _FILE_NAME, "exec", dont_inherit=True))
    except SyntaxError as error:
        where = f" (line {error.lineno}: {(error.text or '').strip()[:200]!r})" if error.lineno else ""
        raise Reported(Report.SOURCE, f"{type(error).__name__}: {error.msg}{where}") from None
    except Exception as error:
        raise Reported(Report.SOURCE, f"{type(error).__name__}: the module could not be compiled: {error}") from None


def call_function(code: bytes, request: bytes, limits: Limits) -> bytes:
    """Execute the module afresh, call its function, encode what it returned.

    Args:
        code: the marshalled code object; unmarshalled only here, in the locked process.
        request: JSON {"function", "seed", "arguments"}.
        limits: of this call.
    """
    wanted, _ = _DECODER.raw_decode(request.decode())  # touches far fewer memory pages than json.loads
    encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode  # ours still if the tool rewrites json
    stdout = sys.stdout = sys.stderr = _BoundedText(limits.stdout_bytes)
    gc.enable()
    determinism.reseed(wanted["seed"])
    try:
        module = _execute(marshal.loads(code))
        result = _encode(_call(module, wanted["function"], wanted["arguments"]), encode, limits)
    except Reported as stopped:
        stopped.stdout = stdout.text()
        raise
    return b'{"value":' + result + b',"stdout":' + encode(stdout.text()).encode() + b"}"


def _encode(value: Any, encode: Callable[[Any], str], limits: Limits) -> bytes:
    try:
        result = encode(value).encode()
    except BaseException as error:
        reason = f"the returned {type(value).__name__} is not JSON: {_describe(error)}"
        raise Reported(Report.UNSERIALISABLE, reason) from None
    if len(result) > limits.result_bytes:
        reason = f"the result is {len(result)} bytes of JSON; at most {limits.result_bytes} are allowed: return less"
        raise Reported(Report.TOO_LARGE, reason)
    return result


def _execute(code: types.CodeType) -> types.ModuleType:
    module = types.ModuleType("tool")
    module.__dict__["__builtins__"] = builtins
    module.__file__ = _FILE_NAME
    sys.modules["tool"] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        raise Reported(Report.LOAD, f"the tool's module failed while it was loaded: {_describe(error)}") from None
    return module


def _call(module: types.ModuleType, name: str, arguments: dict[str, Any]) -> Any:
    function = vars(module).get(name)
    if not callable(function):
        own = [n for n, v in vars(module).items() if isinstance(v, types.FunctionType) and not n.startswith("_")]
        known = ", ".join(sorted(own)[:20]) or "none"
        raise Reported(Report.FUNCTION, f"NameError: the tool defines no function {name!r}; it defines: {known}")
    try:
        return function(**arguments)
    except BaseException as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            # Raised by the call itself, before the function's first line.
            raise Reported(Report.ARGUMENTS, f"{_describe(error)}; it is {_signature(name, function)}") from None
        raise Reported(Report.RAISED, _describe(error)) from None


def _signature(name: str, function: Callable[..., Any]) -> str:
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
    cut = error if len(error) <= _ERROR_CHARACTERS else error[:_ERROR_CHARACTERS] + " […]"
    return cut.encode("utf-8", "replace").decode()


def _send(message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(_CHANNEL, view) :]
