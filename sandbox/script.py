"""Runner of a program as by `python FILE`. Never imported: `sandbox.run_code` sends this text with the program.

The program is the module `__main__` in its own directory, with the standard streams, arguments and exit code of a
process. Its files live in its memory (`sandbox/script_files.py`).

Nothing here is a defence: the process is locked before, and its report is only ever about itself.
"""

from __future__ import annotations

import _io
import atexit
import binascii
import builtins
import contextlib
import io
import json
import os
import struct
import sys
import time
import types
import warnings
from typing import Any, NoReturn

from sandbox.script_files import FOLDER, Files

SOURCE = ""  # the program; set again at the end of the text that is sent

FILE = f"{FOLDER}/main.py"
CHANNEL = 3  # takes one report: a byte for "returned", four for the length, then JSON
OWN_FAILURE = 120  # exit code if a stream cannot be flushed, as in Python
_exit, _write, _encode, _pack = os._exit, os.write, json.JSONEncoder(ensure_ascii=False).encode, struct.pack


class Captured(io.RawIOBase):
    """Standard output or error: keeps the first bytes and counts all."""

    def __init__(self, name: str, descriptor: int, most_bytes: int) -> None:
        self.name, self.mode = name, "w"
        self._descriptor, self._most = descriptor, most_bytes
        self.kept, self.length = bytearray(), 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self.kept += data[: max(0, self._most - self.length)]
        self.length += len(data)
        return len(data)

    def text(self) -> str:
        return self.kept.decode("utf-8", "ignore" if self.length > self._most else "replace")

    @property
    def lost(self) -> int:
        return max(0, self.length - self._most)


class Given(io.BytesIO):
    """Standard input."""

    name, mode = "<stdin>", "r"

    def fileno(self) -> int:
        return 0


def run(
    stdin: str, files: dict[str, str], fetch: list[str], run_seconds: float, most_bytes: int, most_file_bytes: int
) -> NoReturn:
    """Run `SOURCE`, report its end, and exit.

    Args:
        stdin: text of standard input.
        files: contents as base64, by name; they are written first.
        fetch: names of files to report.
        run_seconds: time that it may sleep; its processor time is limited from outside.
        most_bytes: most bytes kept of each output.
        most_file_bytes: most bytes reported of all files together.
    """
    out, err = Captured("<stdout>", 1, most_bytes), Captured("<stderr>", 2, most_bytes)
    given = Given(stdin.encode("utf-8", "surrogateescape"))
    held = Files({0: given, 1: out, 2: err})
    slept = 0.0

    def end(code: int | None) -> NoReturn:
        """Report and exit. The code is None for a program that slept longer than it may run."""
        fetched: dict[str, str] = {}
        room = most_file_bytes
        for name in fetch:
            node = held.nodes.get(held.resolved(name)) if name else None
            if node is not None and len(node.data) <= room:
                room -= len(node.data)
                fetched[name] = binascii.b2a_base64(node.data, newline=False).decode()
        missing = [name for name in fetch if name not in fetched]
        value = {"return_code": code, "stdout": out.text(), "stderr": err.text(), "lost": [out.lost, err.lost]}
        report = {"value": {**value, "files": fetched, "missing": missing, "slept": slept}, "stdout": ""}
        body = _encode(report).encode("utf-8", "replace")
        rest = memoryview(_pack("!BI", 0, len(body)) + body)
        while rest:
            rest = rest[_write(CHANNEL, rest) :]
        _exit(0)

    def end_as(code: int) -> NoReturn:
        """Exit as `os._exit` does, without flushing buffers."""
        end(code & 0xFF)

    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        nonlocal slept
        real_sleep(seconds)
        slept += seconds
        if slept > run_seconds:
            end(None)

    for name, content in files.items():
        held.put(name, binascii.a2b_base64(content))
    held.put(FILE, SOURCE.encode("utf-8", "surrogatepass"))
    install(held, given, out, err)
    vars(os)["_exit"], vars(time)["sleep"] = end_as, sleep
    main = types.ModuleType("__main__")
    vars(main).update(__file__=FILE, __builtins__=builtins)
    sys.modules["__main__"] = main
    lines = SOURCE.splitlines(keepends=True)
    __import__("linecache").cache[FILE] = (len(SOURCE), None, lines, FILE)  # for tracebacks and `inspect`
    streams = sys.stdout, sys.stderr
    code = finished(main)
    for stream in (*held.writers, sys.stdout, sys.stderr, *streams):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # raised by the program, or its text cannot be written
            code = code or OWN_FAILURE
    end(code)


def install(held: Files, given: Given, out: Captured, err: Captured) -> None:
    """Give the program its streams, its files, its path and the usual warnings."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(given), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(out), "utf-8", "strict")
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(err), "utf-8", "backslashreplace", line_buffering=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    for module in (builtins, io, _io):
        vars(module)["open"] = held.open_file
    for name in held.real:
        setattr(os, name, getattr(held, name))
    vars(builtins).update(exit=leave, quit=leave)
    sys.meta_path.insert(max(0, len(sys.meta_path) - 1), held)  # before the finder of files
    sys.path.insert(0, FOLDER)
    sys.argv = [FILE]
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def leave(code: Any = None) -> NoReturn:
    """Exit, as `exit` and `quit` do, which `site` defines."""
    raise SystemExit(code)


def finished(main: types.ModuleType) -> int:
    """Run the program in its module, then its exit handlers; return the exit code."""
    code = 0
    try:
        exec(compile(SOURCE.encode("utf-8", "surrogatepass"), FILE, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        code = exit_code(error)
    atexit._run_exitfuncs()
    return code


def exit_code(error: BaseException) -> int:
    """Print an exception as Python does, and return the exit code of the program that it ended."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        with contextlib.suppress(BaseException):  # of the object's `__str__`, or a closed standard error
            print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == run.__code__.co_filename:
        trace = trace.tb_next
    hook = sys.excepthook if sys.excepthook is not sys.__excepthook__ else __import__("traceback").print_exception
    try:
        hook(type(error), error.with_traceback(trace), trace)
    except BaseException:  # the program's own hook, or its standard error
        sys.__excepthook__(type(error), error, trace)
    return 1
