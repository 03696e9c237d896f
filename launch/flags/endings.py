"""Exit codes of programs, and their last line: for a refusal and for Ctrl-C one line, for a bug the traceback.

2     refused: the line names the fault and the fix. So are errors of a disk, which name the path.
69    temporarily refused: a server, a host or a bucket is not available. (EX_UNAVAILABLE of sysexits.h.)
75    received SIGTERM, and saved. On several hosts one signal is enough. (EX_TEMPFAIL.)
4     a synthesis made less than half of the requested records; the line has the reasons, most frequent first.
130   interrupted: the line says what the same command does when it is repeated.
141   the reader of the output is gone (`astra sft --help_config | head`): no line, as with a shell's own programs.
1     GRPO found no more batch of valid groups: the last line suggests a fix.
1     a bug: the traceback, and a line that says so; or user code or a library called `sys.exit`.
"""

from __future__ import annotations

import errno
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from logging import LogRecord, getLogger
from pathlib import Path
from types import FrameType
from typing import TextIO

from absl import logging

from astra_jax.base.errors import UserError
from astra_jax.base.proxies import exempt_this_machine
from astra_jax.base.terminal import printable, protect_streams, say

REFUSED, AWAY, TOLD, FELL_SHORT, INTERRUPTED, UNREAD, BROKEN = 2, 69, 75, 4, 130, 141, 1

_DISK = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "give a folder on a disk that is not mounted read-only",
    errno.EACCES: "check its permissions, or give another",
    errno.EPERM: "check its permissions, or give another",
    errno.EIO: "the disk failed: see to it, or give a folder on another",
    errno.EEXIST: "there is a file of that name: give another",
    errno.ENOTDIR: "a part of it is a file: give another",
    errno.EISDIR: "it is a folder, where a file is wanted: give another",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "its links lead in a circle: give another",
    errno.ESTALE: "the network's disk has lost it: mount it again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
}
"""Errors of the operating system that the user must fix, each with the fix. Any other is a bug, or is raised as a
refusal where the failed operation is known."""

_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}
"""Errors in `_DISK` that have no path, because the file is already open."""

PATIENCE = 60.0
"""Seconds to wait for threads at the end of a program."""

_folders: dict[str, str] = {}


def note_folder(flag: str, folder: str) -> None:
    """Remember where a program writes, since errors of writing to an open file have no path."""
    _folders[flag] = folder


def run_unoptimized() -> None:
    """Restart this program without -O, -OO and PYTHONOPTIMIZE; return in the new process.

    Help texts and tools are made of docstrings, which -OO removes, and libraries check arguments with `assert`.
    """
    if not sys.flags.optimize:
        return
    spec = sys.modules["__main__"].__spec__
    started = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    options = [one for one in subprocess._args_from_interpreter_flags() if not re.fullmatch("-O+", one)]  # type: ignore[attr-defined]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    os.execve(sys.executable, [sys.executable, *options, *started, *sys.argv[1:]], environment)


def prepare() -> None:
    """Protect the standard streams and make logged text printable. Set a home directory for libraries if there is none,
    and exempt this machine's addresses from proxies."""
    logging.use_absl_handler()  # it removes other handlers of standard error, which it knows by their stream
    protect_streams()
    handler = logging.get_absl_handler()
    handler.setFormatter(_PrintableFormatter())
    handler.python_handler.setStream(sys.stderr)
    getLogger("asyncio").addFilter(_is_news)
    if os.path.expanduser("~").startswith("~"):  # no HOME, and a user id that no passwd file has, as in containers
        os.environ["HOME"] = os.devnull  # libraries ask for the path as they are imported; nothing is ever made in it
    exempt_this_machine()
    sys.excepthook = _outside
    sys.unraisablehook = _unheard
    # Shared memory that data workers leave where a run is interrupted is unlinked by Python's tracker, a process of its
    # own that would say so behind the last line. It takes its filters from here.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")


def leave(code: object) -> None:
    """End the process within `PATIENCE` even if threads are stuck. Call it last, before Python exits.

    Python itself waits for threads forever. After a failed Orbax save, threads wait for its folder for five minutes,
    and the failed job seems to run.

    Args:
        code: code of `SystemExit`.
    """
    status = code if isinstance(code, int) else int(code is not None)
    threading.Thread(target=_left, args=(status,), name="leave", daemon=True).start()


def _left(status: int) -> None:
    """End the process if threads are stuck; do nothing if Python exits meanwhile, or its main thread still runs."""
    time.sleep(PATIENCE)
    main = threading.main_thread()
    if main.is_alive():  # it is none any more once Python waits for the others
        return
    if stuck := [one.name for one in threading.enumerate() if one is not main and not one.daemon]:
        say(f"warning: threads did not end, and are abandoned: {', '.join(sorted(stuck))}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _outside(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Report an exception that no program catches: one raised early, or in a library's thread."""
    del kind, trace
    if threading.current_thread() is threading.main_thread():
        code(error)
    else:
        say(f"a library's thread failed: {told_by(error)}", file=sys.stderr)


def _unheard(raised: sys.UnraisableHookArgs) -> None:
    """Report an exception that cannot be raised: of a destructor, or of a callback from a library's thread.

    tensorstore reports each write to an event loop. On a full disk Orbax raises the first failure and closes the loop,
    and each of the dozens of others causes this exception.
    """
    error = raised.exc_value
    if error is None:
        return
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C, in a callback of the garbage collector's as likely as anywhere
        threading.Thread(target=_interrupt_again, name="interrupt", daemon=True).start()
    elif logging.get_verbosity() > logging.WARNING:
        say("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
    elif not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        where = "" if raised.object is None else f" in {raised.object!r}"
        say(f"warning: an error could not be raised{where}: {told_by(error)}", file=sys.stderr)


def _interrupt_again() -> None:
    """Raise KeyboardInterrupt again once the main thread has left the code that swallowed it, as often as needed.

    It sends a signal, which also ends the main thread's waiting. It does nothing if the process exits meanwhile.
    """
    main = threading.main_thread().ident or 0
    left = 0
    while left < 2:  # a signal that comes just as it enters a wait does not end that wait
        left = 0 if _is_unheard(sys._current_frames().get(main)) else left + 1
        time.sleep(0.01)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(main, signal.SIGINT)


def _is_unheard(frame: FrameType | None) -> bool:
    """Return whether a thread is still in `_unheard`."""
    while frame is not None and frame.f_code is not _unheard.__code__:
        frame = frame.f_back
    return frame is not None


def _is_news(record: LogRecord) -> bool:
    """Return False for asyncio's report of a write that failed on a disk and that nobody awaits.

    Orbax raises the first failure of a checkpoint. Reports of the others would follow the last line.
    """
    error = record.exc_info[1] if record.exc_info else None
    of_a_disk = isinstance(error, ValueError) and "[os_error_code=" in str(error)  # so tensorstore writes them
    return not of_a_disk or logging.get_verbosity() > logging.WARNING


class _PrintableFormatter(logging.PythonFormatter):
    """Formatter that makes quoted text printable and removes tracebacks, unless a higher verbosity is set.

    Warnings quote servers, endpoints and files. A library that logs a traceback, such as Orbax on a full disk, raises
    the error too.
    """

    def format(self, record: LogRecord) -> str:
        if logging.get_verbosity() <= logging.WARNING:
            record.exc_info = record.exc_text = None
        return printable(super().format(record))


def code(error: BaseException, *, again: str = "", file: TextIO | None = None) -> int:
    """Print the reason why the program ends to standard error, and return its exit code.

    Args:
        again: what the same command does after Ctrl-C.
    """
    out = file or sys.stderr
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # again while it ends: at once, and in silence
        say(f"interrupted; run the same command again{f': {again}' if again else ''}", file=out)
        return INTERRUPTED
    if isinstance(error, SystemExit):  # whatever its code: the program's work is not done
        say("".join(traceback.format_exception(error)).rstrip(), file=out)
        say("error: imported code called sys.exit (above), which ended the program; remove that call", file=out)
        return BROKEN
    if isinstance(error, BrokenPipeError) and _unread():
        return UNREAD
    if (line := refusal(error)) is not None:
        say(f"error: {' '.join(line.splitlines())}", file=out)
        return AWAY if _is_away(error) else REFUSED
    say("".join(traceback.format_exception(error)).rstrip(), file=out)
    say(
        f"bug: {told_by(error)}\nThis is a fault of astra-jax, not of what it was given. Please report the lines above "
        f"with the command: {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        file=out,
    )
    return BROKEN


def _unread() -> bool:
    """Return whether standard output is a pipe without a reader."""
    asked = select.poll()
    asked.register(1, 0)
    return any(happened & select.POLLERR for _, happened in asked.poll(0))


def refusal(error: BaseException) -> str | None:
    """Return the message of an error that the user can fix; None if the error is a bug."""
    from astra_jax.base.files import RemovedError
    from astra_jax.base.settings import SettingError
    from sandbox import SandboxError

    if isinstance(error, BaseExceptionGroup):
        lines = [refusal(one) for one in error.exceptions]
        return None if None in lines else lines[0]
    if isinstance(error, RemovedError):
        return _with_flag(str(error), error.folder)
    if isinstance(error, (UserError, SandboxError, SettingError)):
        return str(error)
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # of `tempfile`, without a path
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    if isinstance(error, OSError) and error.errno in (_DISK if error.filename else _WRITES):
        return _of_disk(error)
    return None


def _with_flag(message: str, path: str) -> str:
    """Return a message that starts with a folder's path, with the flag instead of the path, as the user typed it."""
    typed = [f"--{flag}={folder}" for flag, folder in _folders.items() if os.path.abspath(folder) == path]
    return f"{typed[0]}{message.removeprefix(path)}" if typed else message


def _is_away(error: BaseException) -> bool:
    """Return whether a missing resource may become available again; of several errors the first, which is printed,
    counts."""
    if isinstance(error, BaseExceptionGroup):
        return _is_away(error.exceptions[0])
    return bool(getattr(error, "away", False))


def _of_disk(error: OSError) -> str:
    places = [os.fsdecode(one) for one in (error.filename, error.filename2) if isinstance(one, (str, bytes))]
    where = " -> ".join(places) or " ".join(f"--{flag}={folder}" for flag, folder in _folders.items())
    said = error.strerror or os.strerror(error.errno or 0)
    return f"{where or 'a file'}: {said}; {_DISK[error.errno or 0]}, and run the same command again"


def told_by(error: BaseException, *, in_file: str = "") -> str:
    """Return the type and message of an error and, for a user's file that was run, the line it reached."""
    said = str(error).strip()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == in_file]
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}{f': {said}' if said else ''}"
