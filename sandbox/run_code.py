"""`POST /run_code` in the form of SandboxFusion (https://github.com/bytedance/SandboxFusion): requests and answers.

SandboxFusion runs a program as `python FILE`: as `__main__`, with standard input, files, an exit code and separate
outputs. Here the program is a text in our own module (`sandbox/script.py`), which a call runs as it runs any tool.
"""

from __future__ import annotations

import binascii
import functools
import json
import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandbox.limits import Limits
from sandbox.outcomes import MEMORY, CallResult, Outcome

FUNCTION = "run"
MOST_SECONDS = 60
"""Largest `run_timeout`, in seconds."""
MOST_MEMORY_MB = 1024
"""Largest `memory_limit_MB`, and the default."""
LEAST_MEMORY_MB = 128
"""Smallest `memory_limit_MB`: below it the interpreter itself does not run."""
MOST_OUTPUT_BYTES = 1 << 20
"""Most bytes kept of standard output, and of standard error."""
MOST_FILE_BYTES = 4 << 20
"""Most bytes of all fetched files together."""
_MOST_REPORT_BYTES = 6 * (2 * MOST_OUTPUT_BYTES) + 2 * MOST_FILE_BYTES  # JSON may write one byte as six

_LANGUAGES = re.compile(
    "python|cpp|nodejs|go|go_test|java|php|csharp|bash|typescript|sql|rust|cuda|lua|R|perl|D_ut|ruby|scala|julia|"
    "pytest|junit|kotlin_script|jest|verilog|python_gpu|lean|swift|racket"
)
_FIELDS = {"compile_timeout", "run_timeout", "memory_limit_MB", "code", "stdin", "language", "files", "fetch_files"}
_FINISHED, _TIMED_OUT, _ERROR = "Finished", "TimeLimitExceeded", "Error"


class BadField(ValueError):
    """Error for a field of a request that cannot be read. The answer is HTTP's 422, as in SandboxFusion.

    Attributes:
        name: name of the field.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"field {name!r} {text}")
        self.name = name


class NotOffered(ValueError):
    """Error for a request that this service does not support. The answer has the status `SandboxError`."""


@dataclass(frozen=True)
class RunRequest:
    """Program to run.

    Attributes:
        code: source of the program.
        run_timeout: seconds of processor time and sleep together.
        memory_limit_MB: limit of its address space, in MiB; -1 for `MOST_MEMORY_MB`.
        stdin: standard input.
        files: contents as base64, by name.
        fetch_files: names of the files to return.
        unknown: fields of the request that are not supported.
    """

    code: str
    run_timeout: float = 10.0
    memory_limit_MB: int = -1
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Source of the module that runs the program."""
        return f"{_runner()}\nSOURCE = {self.code!r}\n"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the module's `FUNCTION`."""
        return {
            "stdin": self.stdin,
            "files": dict(self.files),
            "fetch": list(self.fetch_files),
            "run_seconds": self.run_timeout,
            "most_bytes": MOST_OUTPUT_BYTES,
            "most_file_bytes": MOST_FILE_BYTES,
        }

    def limits(self, pool: Limits, argument_bytes: int) -> Limits:
        """Return the limits of the call.

        Args:
            pool: limits of the pool's calls.
            argument_bytes: most bytes of a request's arguments.
        """
        cpu_seconds = math.ceil(self.run_timeout)
        memory = MOST_MEMORY_MB if self.memory_limit_MB == -1 else self.memory_limit_MB
        return replace(
            pool,
            cpu_seconds=cpu_seconds,
            wall_seconds=pool.wall_seconds_with(max(0, cpu_seconds - pool.cpu_seconds)),
            memory_bytes=memory << 20,
            result_bytes=_MOST_REPORT_BYTES,
            argument_bytes=argument_bytes,
            source_bytes=len(self.module) * 4,  # in UTF-8; the program's own size is checked already
        )


def read_request(body: Any, most_code_bytes: int) -> RunRequest:
    """Read a request's JSON.

    Args:
        body: the decoded JSON.
        most_code_bytes: largest program.

    Raises:
        BadField: a field is missing or of another type.
        NotOffered: another language, a longer program, or more time or memory than allowed.
    """
    if not isinstance(body, dict):
        raise BadField("body", f"is {_shown(body)}; send a JSON object")
    code = _read(body, "code", str, None, "a string, the program")
    language = _read(body, "language", str, "python", "a string")
    if not _LANGUAGES.fullmatch(language):
        raise BadField("language", f"is {_shown(language)}; send 'python'")
    if language != "python":
        raise NotOffered(f"language is {language!r}; only 'python' is run here")
    if (size := len(code.encode("utf-8", "surrogatepass"))) > most_code_bytes:
        raise NotOffered(f"code is {size} bytes; send at most {most_code_bytes}")
    run_timeout = _seconds(body, "run_timeout")
    _seconds(body, "compile_timeout")  # Python programs have no separate compilation
    if run_timeout > MOST_SECONDS:
        raise NotOffered(f"run_timeout is {run_timeout:g}; send at most {MOST_SECONDS} (seconds)")
    memory = _read(body, "memory_limit_MB", (int, float), -1, "an integer")
    if not math.isfinite(memory) or memory != int(memory) or memory == 0 or memory < -1:
        raise BadField("memory_limit_MB", f"is {_shown(memory)}; send a number of MiB, or -1")
    if memory != -1 and not LEAST_MEMORY_MB <= memory <= MOST_MEMORY_MB:
        raise NotOffered(
            f"memory_limit_MB is {_shown(memory)}; send {LEAST_MEMORY_MB} to {MOST_MEMORY_MB}, or -1 for the largest"
        )
    files = _read(body, "files", dict, {}, "an object of file names with their contents as base64")
    fetch = _read(body, "fetch_files", list, [], "an array of file names")
    for name, content in files.items():
        if not (content is None or (isinstance(content, str) and _is_base64(content))) or not name.strip("/"):
            raise BadField("files", f"has {_shown(content)} for {_shown(name)}; send the content as base64")
    for name in fetch:
        if not (isinstance(name, str) and name):
            raise BadField("fetch_files", f"has {_shown(name)}; send file names")
    return RunRequest(
        code,
        run_timeout,
        int(memory),
        _read(body, "stdin", (str, type(None)), None, "a string, or null") or "",
        {name: content for name, content in files.items() if content is not None},
        tuple(fetch),
        tuple(sorted(set(body) - _FIELDS)),
    )


def answer(request: RunRequest, result: CallResult) -> dict[str, Any]:
    """Return the answer in SandboxFusion's form. Its `message` reports what was cut, lost or not read."""
    said = [f"unknown field {_shown(name)} is not read" for name in request.unknown[:3]]
    if result.is_infrastructure or result.ended_by in ("arguments", "source"):
        return refusal(result.error)
    told = _reported(result.value) if result.ok else None
    if told is None:
        return _killed(request, result, said)
    late = told["return_code"] is None or result.cpu_seconds + told["slept"] > request.run_timeout
    for name, lost in zip(("stdout", "stderr"), told["lost"], strict=True):
        if lost:
            said.append(f"{name} is cut after {MOST_OUTPUT_BYTES} bytes; {lost} more were written")
    for name in told["missing"][:3]:
        said.append(f"fetch_files: {_shown(name)} was not written, or is beyond {MOST_FILE_BYTES} bytes of files")
    seconds, code = result.wall_seconds + told["slept"], told["return_code"]
    if late:  # a sleep that would last beyond the limit
        seconds, code = max(result.wall_seconds, min(seconds, request.run_timeout)), None
    run = _run(_TIMED_OUT if late else _FINISHED, seconds, code, told["stdout"], told["stderr"])
    return _answer("Success" if code == 0 else "Failed", run, said, told["files"])


def refusal(why: str) -> dict[str, Any]:
    """Return the answer for a program that did not finish, for a reason other than the program."""
    return _answer("SandboxError", _run(_ERROR, None, None, None, why), [why], {})


def _killed(request: RunRequest, result: CallResult, said: list[str]) -> dict[str, Any]:
    """Return the answer for a program whose process reported nothing."""
    if result.kind in (Outcome.CPU_TIMEOUT, Outcome.IDLE_TIMEOUT):
        said.append(f"stopped at its run_timeout of {request.run_timeout:g} s; what it printed is lost")
        return _answer("Failed", _run(_TIMED_OUT, result.wall_seconds, None, "", ""), said, {})
    name = result.ended_by.removeprefix("signal ")
    numbers = {**signal.Signals.__members__, "seccomp": signal.SIGSYS, MEMORY: signal.SIGKILL}
    number = numbers.get(name)
    code = 1 if number is None else -int(number)
    said.append(f"{result.error}; what it printed is lost")
    return _answer("Failed", _run(_FINISHED, result.wall_seconds, code, "", ""), said, {})


def _answer(status: str, run: dict[str, Any], said: list[str], files: dict[str, str]) -> dict[str, Any]:
    return {
        "status": status,
        "message": "; ".join(said),
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": files,
    }


def _run(
    status: str, seconds: float | None, code: int | None, stdout: str | None, stderr: str | None
) -> dict[str, Any]:
    return {
        "status": status,
        "execution_time": seconds,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
    }


def _reported(value: Any) -> dict[str, Any] | None:
    """Return the runner's report, or None if a program may have forged it."""
    shape: dict[str, Any] = {"return_code": (int, type(None)), "stdout": str, "stderr": str, "files": dict}
    shape |= {"lost": list, "missing": list, "slept": (int, float)}
    if not isinstance(value, dict) or set(value) != set(shape):
        return None
    if not all(isinstance(value[name], kind) for name, kind in shape.items()):
        return None
    texts = [*value["files"].values(), *value["missing"]]
    counts = [*value["lost"], value["slept"]]
    if len(value["lost"]) != 2 or not all(isinstance(one, str) for one in texts):
        return None
    return value if all(isinstance(one, int | float) and one >= 0 for one in counts) else None


def _read(body: Mapping[str, Any], name: str, kind: Any, default: Any, wanted: str) -> Any:
    if name not in body:
        if default is None and kind is str:
            raise BadField(name, f"is missing; send {wanted}")
        return default
    value = body[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadField(name, f"is {_shown(value)}; send {wanted}")
    return value


def _seconds(body: Mapping[str, Any], name: str) -> float:
    value = _read(body, name, (int, float), 10.0, "a number of seconds")
    if not 0 < value < math.inf:
        raise BadField(name, f"is {_shown(value)}; send a number of seconds above 0")
    return float(min(value, 1e9))


def _is_base64(text: str) -> bool:
    try:
        binascii.a2b_base64(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


@functools.cache
def _runner() -> str:
    """Return the runner's two files as one text, without imports of each other and imports for type checkers."""
    files = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("script_files.py", "script.py")]
    left_out = ("from __future__ ", "from sandbox.", "from typing ")
    lines = [line for text in files for line in text.splitlines() if not line.startswith(left_out)]
    return "\n".join(["from __future__ import annotations", *lines])
