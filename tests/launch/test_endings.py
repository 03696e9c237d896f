"""How programs end that do not end well: refused in one line, interrupted in one, broken with all that is known."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordReader
from selection import by_day

from astra_jax.base.errors import InputError
from astra_jax.base.files import StorageError
from astra_jax.base.progress import log_above_progress, progress_bar
from astra_jax.base.terminal import printable
from astra_jax.rollout.vllm.server import PolicyError, Unreachable
from astra_jax.run.rendezvous import HostsMissing, RendezvousError
from launch.flags import endings
from launch.flags.cli import UsageError, load_config
from launch.flags.summaries import print_rejected
from sandbox import SandboxError
from sandbox.remote import SandboxUnreachable
from synthesis.core.datasets import DatasetError

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import os, signal
from absl import flags
from launch.flags import cli
from astra_jax.base.errors import InputError
from astra_jax.base.terminal import say

WORKDIR = flags.DEFINE_string("workdir", None, "")

def main():
    import logging
    logging.getLogger("any").warning("server %s is left out", "\\x1b]0;owned\\x07")
    cli.local_folder(WORKDIR)
    {body}

cli.run(main, again="finished work is not done again")
"""


def run(folder: Path, body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    (folder / "program.py").write_text(PROGRAM.replace("{body}", body), encoding="utf-8")
    command = [sys.executable, str(folder / "program.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=environment, capture_output=True, timeout=120)


def test_a_bug_is_shown_whole_and_called_one(tmp_path) -> None:
    """It looked like a mistake of the user's: `error: max() arg is an empty sequence`."""
    ended = run(tmp_path, "max([])", "--workdir=a b")
    errors = ended.stderr.decode()
    assert ended.returncode == 1 and "error: max()" not in errors
    assert "Traceback" in errors and "in main" in errors and "\nbug: ValueError: max() " in errors
    assert "Please report the lines above with the command: program.py '--workdir=a b'" in errors


RESULT_THAT_COMES_TOO_LATE = """
import asyncio, threading, tensorstore
promise, future = tensorstore.Promise.new()
loop = asyncio.new_event_loop()
async def waits():
    await future
loop.create_task(waits())
loop.run_until_complete(asyncio.sleep(0))
loop.close()
thread = threading.Thread(target=promise.set_result, args=[1])
thread.start()
thread.join()
"""


def test_what_nobody_waits_for_any_more_is_not_said(tmp_path) -> None:
    """A traceback of each write that was under way when Orbax gave a checkpoint up."""
    body = "\n    ".join(RESULT_THAT_COMES_TOO_LATE.strip().splitlines())
    ended = run(tmp_path, f"{body}\n    say('done')", "--workdir=x")
    assert ended.returncode == 0 and ended.stdout == b"done\n"
    assert b"Traceback" not in ended.stderr and b"Event loop" not in ended.stderr
    asked = run(tmp_path, body, "--workdir=x", "--verbosity=0")
    assert b"RuntimeError: Event loop is closed" in asked.stderr


WRITES_THAT_FAIL_BESIDE_THE_FIRST = """
import asyncio
async def writes(error):
    raise error
loop = asyncio.new_event_loop()
disk = ValueError("FAILED_PRECONDITION: Failed to write 8 bytes: File too large [os_error_code='27']")
tasks = [loop.create_task(writes(error)) for error in (disk, disk, ValueError("of a bug"))]
loop.run_until_complete(asyncio.wait(tasks))
loop.close()
del tasks
"""


def test_a_full_disk_is_not_said_once_for_each_write(tmp_path) -> None:
    """Lines of asyncio's came behind the refusal; what is of no disk is a bug's, and still comes."""
    body = "\n    ".join(WRITES_THAT_FAIL_BESIDE_THE_FIRST.strip().splitlines())
    ended = run(tmp_path, body, "--workdir=x")
    assert ended.returncode == 0
    assert b"File too large" not in ended.stderr and ended.stderr.count(b"ValueError('of a bug')") == 1
    asked = run(tmp_path, body, "--workdir=x", "--verbosity=0")
    assert asked.stderr.count(b"never retrieved") == 3


def test_an_error_in_a_destructor_is_one_safe_line(tmp_path) -> None:
    body = "type('Loud', (), {'__del__': lambda self: [][int('7')], '__repr__': lambda self: 'x'})()"
    ended = run(tmp_path, body, "--workdir=x")
    errors = ended.stderr.decode()
    (line,) = [line for line in errors.splitlines() if "list index" in line]
    assert line.startswith("warning: an error could not be raised in <function ") and "Traceback" not in errors
    assert ended.returncode == 0


INTERRUPTED_WHERE_NOBODY_HEARS = """
import gc, signal, time
def interrupted(phase, info):
    gc.callbacks.remove(interrupted)
    signal.raise_signal(signal.SIGINT)
gc.callbacks.append(interrupted)
gc.collect()
time.sleep(3600)
"""


def test_ctrl_c_in_a_collectors_callback_ends_the_program(tmp_path) -> None:
    """JAX has one: Python said who had swallowed it, and the program went on."""
    body = "\n    ".join(INTERRUPTED_WHERE_NOBODY_HEARS.strip().splitlines())
    ended = run(tmp_path, body, "--workdir=x")
    errors = ended.stderr.decode()
    assert ended.returncode == 130 and errors.splitlines()[-1].startswith("interrupted; run the same command again")
    assert "KeyboardInterrupt" not in errors


def test_what_strangers_say_moves_no_terminal(tmp_path) -> None:
    """In a refusal, in a bug's traceback, in what is logged and in what is printed."""
    hostile = "'\\x1b[2J\\u202e\\x9b31m\\r\\n\\ud800'"
    for body, code in [(f"raise InputError({hostile})", 2), (f"raise KeyError({hostile})", 1), (f"say({hostile})", 0)]:
        ended = run(tmp_path, body, "--workdir=x")
        assert ended.returncode == code, ended.stderr
        for output in (ended.stdout, ended.stderr):
            assert not any(sign in output.decode() for sign in "\x1b\u202e\x9b\r\x07")
        assert rb"\x1b[2J" in ended.stdout + ended.stderr and rb"server \x1b]0;owned\x07 is left out" in ended.stderr


def test_ctrl_c_is_one_line_that_says_how_to_go_on(tmp_path) -> None:
    for body in ("os.kill(os.getpid(), signal.SIGINT)", "import asyncio; asyncio.run(asyncio.sleep(9))"):
        if "asyncio" in body:
            body = f"import threading; threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); {body}"
        ended = run(tmp_path, body, "--workdir=x")
        last = ended.stderr.decode().splitlines()[-1]
        assert last == "interrupted; run the same command again: finished work is not done again"
        assert ended.returncode == 130 and b"Traceback" not in ended.stderr


def test_a_thread_that_waits_for_ever_does_not_hold_the_process(tmp_path) -> None:
    """Orbax's did for five minutes, after a save whose folder could not be made. What still works is waited for."""
    begins = "import threading, time; from launch.flags import endings; endings.PATIENCE = {}; "
    stuck = begins.format(0.3) + "threading.Thread(target=threading.Event().wait, name='saves').start(); return 4"
    ended = run(tmp_path, stuck, "--workdir=x")
    assert ended.returncode == 4, ended.stderr
    assert b"warning: threads did not end, and are abandoned: saves" in ended.stderr
    works = "threading.Thread(target=lambda: (time.sleep(0.5), print('written'))).start()"
    ended = run(tmp_path, begins.format(30) + works, "--workdir=x")
    assert ended.returncode == 0 and ended.stdout == b"written\n" and b"waited" not in ended.stderr
    goes_on = begins.format(0.1) + "threading.Thread(target=time.sleep, args=(1,)).start()"
    program = PROGRAM.replace("{body}", goes_on).replace("cli.run(", "try: cli.run(") + "except SystemExit: pass\n"
    (tmp_path / "program.py").write_text(program + "import time; time.sleep(0.5); print('went on')\n")
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "--workdir=x"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0 and ended.stdout == b"went on\n", ended.stderr


@pytest.mark.parametrize("locale", by_day(["C", "POSIX", "en_US.ISO-8859-1"], "C"))
def test_any_locale_will_do(tmp_path, locale) -> None:
    """Text that it cannot say is written out; a folder's name need be no text at all."""
    environment = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run(tmp_path, "say('北京 ' + WORKDIR.value)", "--workdir=\udcff北", **environment)
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
    assert rb"\u5317\u4eac" in ended.stdout or "北京".encode() in ended.stdout


REMOVES = """
import shutil
from astra_jax.base.files import write_text
from synthesis.core.workdir import locked
with locked(WORKDIR.value):
    shutil.rmtree(WORKDIR.value)
    write_text(cli.local_folder(WORKDIR) / "run.json", "whole")
"""


@pytest.mark.parametrize("absolute", [False, True])
def test_a_workdir_that_was_removed_is_named_by_its_flag(tmp_path, absolute: bool) -> None:
    name = str(tmp_path / "run") if absolute else os.path.relpath(tmp_path / "run")
    ended = run(tmp_path, "\n    ".join(REMOVES.strip().splitlines()), f"--workdir={name}")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.decode().splitlines()[-1].startswith(f"error: --workdir={name} was removed, moved or replaced ")
    assert not (tmp_path / "run").exists()


WORKS = """
from pathlib import Path
from astra_jax.base.progress import progress_bar, log_above_progress
from synthesis.core.workdir import locked
with locked(WORKDIR.value):
    bar = progress_bar(total=2)
    for step in (1, 2):
        bar.update()
        log_above_progress("a step")
        say("loss 0.5")
        print("of a reward function's own")
    bar.close()
    (Path(WORKDIR.value) / "checkpoint").write_text("whole")
"""
PRINTS = """
for number in range(20_000):
    say(number)
"""


def shell(folder: Path, body: str, redirections: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program with the redirections of a shell."""
    body = "\n    ".join(body.strip().splitlines())
    (folder / "program.py").write_text(PROGRAM.replace("{body}", body), encoding="utf-8")
    command = f"exec {sys.executable} {folder / 'program.py'} --workdir={folder / 'run'} {redirections}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=120)


@pytest.mark.parametrize("unbuffered", by_day(["", "1"], ""))
@pytest.mark.parametrize(
    ("redirections", "reported"),
    [
        ("2>/dev/full", b"warning: standard error cannot be written: No space left on device;"),
        ("2>&-", b"warning: standard error cannot be written: Bad file descriptor;"),
        (">/dev/full", b"warning: standard output cannot be written: No space left on device;"),
        (">&-", b"warning: standard output cannot be written: Bad file descriptor;"),
        (">/dev/full 2>/dev/full", b""),
        ("<&- >&- 2>&-", b""),
        ("> >(exec true)", b""),
        ("2> >(exec true)", b""),
    ],
)
def test_output_that_cannot_be_written_ends_no_work(tmp_path, redirections: str, reported: bytes, unbuffered) -> None:
    """The error of a progress bar ended a training run, whose last checkpoint was left half written."""
    ended = shell(tmp_path, WORKS, redirections, PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "checkpoint").read_text() == "whole"
    assert (ended.stdout + ended.stderr).count(b"cannot be written") == bool(reported)
    assert reported in ended.stdout + ended.stderr
    assert b"Exception" not in ended.stderr and b"Traceback" not in ended.stderr


def test_files_do_not_get_the_descriptor_of_a_closed_stream(tmp_path) -> None:
    opens = "opened = [open(WORKDIR.value + '.txt', 'w') for _ in range(3)]"
    shell(tmp_path, f"{opens}\nos.write(2, b'of a library in C++')", "<&- >&- 2>&-")
    assert (tmp_path / "run.txt").read_bytes() == b""


@pytest.mark.parametrize(
    ("redirections", "code", "reported"),
    [
        (">/dev/full", 2, b"error: standard output cannot be written: No space left on device. Send it to"),
        (">&-", 2, b"error: standard output cannot be written: Bad file descriptor. Send it to"),
        (">/dev/full 2>/dev/full", 2, b""),
        ("2>/dev/full", 0, b"warning: standard error cannot be written"),
        ("> >(exec head -1)", 141, b""),
    ],
)
@pytest.mark.parametrize("body", by_day([PRINTS, "print('unflushed', end='')"], PRINTS), ids=["long", "unflushed"])
def test_a_program_that_only_prints_fails_where_it_cannot(tmp_path, body, redirections, code, reported) -> None:
    """The message blamed the workdir."""
    if "head" in redirections and body != PRINTS:
        pytest.skip("head may read a line that is the last one")
    ended = shell(tmp_path, body, redirections)
    assert ended.returncode == code, ended.stderr
    assert reported in ended.stdout + ended.stderr and b"--workdir" not in ended.stderr
    assert (ended.stdout + ended.stderr).count(b"cannot be written") == bool(reported)
    assert b"Exception" not in ended.stderr and b"Traceback" not in ended.stderr


def test_a_terminal_that_goes_away_ends_no_work(tmp_path) -> None:
    master, slave = os.openpty()
    body = "import sys; sys.stdin.readline()\n" + WORKS
    body = "\n    ".join(body.strip().splitlines())
    (tmp_path / "program.py").write_text(PROGRAM.replace("{body}", body), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "program.py"), f"--workdir={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=slave, stderr=slave) as process:
        os.close(slave)
        os.close(master)
        process.communicate(b"\n", timeout=120)
    assert process.returncode == 0
    assert (tmp_path / "run" / "checkpoint").read_text() == "whole"


def test_a_stream_that_does_not_block_is_waited_for(tmp_path) -> None:
    """A parent process in another language may have made the pipe so; Python raised `BlockingIOError`."""
    ended = shell(tmp_path, "os.set_blocking(1, False)\n" + PRINTS, "> >(sleep 0.5; wc -l >&2)")
    assert ended.returncode == 0 and b"20000" in ended.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_errors_of_disks_are_refusals_that_name_the_path(number) -> None:
    said = io.StringIO()
    assert endings.code(OSError(number, os.strerror(number), "/data/run/card.json"), file=said) == 2
    assert said.getvalue().startswith(f"error: /data/run/card.json: {os.strerror(number)}; ")


def test_a_write_that_names_no_path_is_of_the_workdir(monkeypatch) -> None:
    monkeypatch.setattr(endings, "_folders", {"workdir": "/data/run"})
    said = io.StringIO()
    assert endings.code(OSError(errno.ENOSPC, "No space left on device"), file=said) == 2
    assert said.getvalue() == (
        "error: --workdir=/data/run: No space left on device; make room there, and run the same command again\n"
    )


def test_no_folder_for_temporary_files_is_a_refusal_that_names_the_variable(monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(FileNotFoundError) as raised:
        tempfile.mkdtemp()
    line = endings.refusal(raised.value)
    assert line is not None and "'/proc/none'" in line and line.endswith("; set TMPDIR to a folder that can be written")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("max() arg is an empty sequence"),
        KeyError("loss"),
        OSError(errno.ENOENT, "No such file or directory", "/x"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # of no file: a signal's, or a socket's
        ExceptionGroup("of tasks", [InputError("said well"), ValueError("not said at all")]),
    ],
)
def test_what_is_no_refusal_of_ours_is_a_bug(error) -> None:
    assert endings.refusal(error) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unreachable("no rollout server answers"), 69),
        (PolicyError("serves another model"), 2),
        (HostsMissing("host 1 of 2 did not come within 300 s"), 69),
        (RendezvousError("two hosts are number 1"), 2),
        (StorageError("gs://bucket/run could not be read"), 69),
        (SandboxUnreachable("no sandbox service answers"), 69),
        (SandboxError("it asks for another token"), 2),
        (ExceptionGroup("tasks", [Unreachable("gone"), PolicyError("serves another model")]), 69),
    ],
)
def test_what_is_away_may_come_back_and_has_a_code_of_its_own(error, code) -> None:
    said = io.StringIO()
    assert endings.code(error, file=said) == code
    assert said.getvalue().startswith("error: ") and said.getvalue().count("\n") == 1


def test_a_program_that_foreign_code_ends_has_not_done_its_work() -> None:
    said = io.StringIO()
    assert endings.code(SystemExit(0), file=said) == endings.BROKEN
    assert "imported code called sys.exit" in said.getvalue()


def test_refusals_of_tasks_are_refusals() -> None:
    group = ExceptionGroup("of tasks", [DatasetError("no dataset at x"), ExceptionGroup("", [InputError("y")])])
    assert endings.refusal(group) == "no dataset at x"


def test_text_is_made_safe_and_stays_readable() -> None:
    assert printable("Zürich 北京 🙂\n\ttab") == "Zürich 北京 🙂\n\ttab"
    assert printable("a\nb", lines=False) == "a\\nb"
    assert printable("\x1b]52;c;x\x07\u2066\x85\x7f\U000e0041") == r"\x1b]52;c;x\x07\u2066\x85\x7f\U000e0041"
    assert printable(None) == "None"


def test_what_was_rejected_and_what_a_bar_is_called_are_one_safe_line(capsys, monkeypatch) -> None:
    print_rejected({"normalize": {"no_tools": 2}}, {"normalize": {"no_tools": "\x1b[2J\nrejected by nobody: 1"}})
    expected = "rejected by normalize: 2 no_tools, such as \\x1b[2J\\nrejected by nobody: 1\n"
    assert capsys.readouterr().out == expected
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    progress_bar(total=1, desc="\x1b[2J\u202e").close()
    log_above_progress("left out \x1b]0;owned\x07")
    said = out.getvalue()
    assert r"\x1b[2J\u202e: " in said and "left out \\x1b]0;owned\\x07\n" in said and "\x1b" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CONFIG = (", r"line 1"),
        ("import os\n{}['CONFIG']", r"line 2: KeyError: 'CONFIG'"),
        ("raise RuntimeError", r"line 1: RuntimeError;"),
        ("CONFIG = 3", r"is of type int; this program takes one of SFTRun, such as sft:14b$"),
        (
            "from configs.training import grpo_run\nCONFIG = grpo_run('14b')",
            r"GRPORun; this program takes one of",
        ),
    ],
)
def test_a_file_of_settings_that_does_not_do_says_where_and_why(tmp_path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_config(str(tmp_path / "own.py"), "sft")
    with pytest.raises(UsageError, match="--config=grpo:14b is of type GRPORun; this program takes one of SFTRun"):
        load_config("grpo:14b", "sft")


# ---------------------------------------------------------------------------------------------------------------------
# Real programs


HOLD = """
import sys, time
from synthesis.core.workdir import locked, locked_target
with {"workdir": locked, "target": locked_target}[sys.argv[1]](sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("module", "kind", "arguments"),
    [
        ("launch.trajectories", "workdir", ["--workdir={}"]),
        ("launch.environments", "workdir", ["--workdir={}"]),
        ("launch.evaluate", "workdir", ["--workdir={}", "--model_url=http://127.0.0.1:9/v1"]),
        ("launch.quickstart", "workdir", ["--workdir={}", "--profile=ci"]),
        ("launch.astra_rl", "target", ["--from=README.md", "--to={}"]),
    ],
)
def test_two_runs_do_not_write_one_folder(tmp_path, module, kind, arguments) -> None:
    """Those of a model are tested where there is one: test_failing_starts.py."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, kind, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        before = sorted(tmp_path.rglob("*"))
        ended = subprocess.run(
            [sys.executable, "-m", module, *(one.format(folder) for one in arguments)],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        assert f"by another process (process {holder.pid} of " in ended.stderr
        assert sorted(tmp_path.rglob("*")) == before
        holder.communicate(b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "begun"),
    [
        ("launch.environments", ["--config.count=300"], "environments: decompose"),
        *by_day(
            [
                ("launch.trajectories", ["--config.trajectories=20"], "propose tasks and chains"),
                ("launch.quickstart", ["--profile=ci"], "[1/9] trajectories"),
            ]
        ),
    ],
)
def test_ctrl_c_at_a_terminal_ends_a_synthesis_that_goes_on(tmp_path, module, arguments, begun) -> None:
    """It reaches the whole group of processes, those that the program has started too."""
    command = [sys.executable, "-m", module, f"--workdir={tmp_path / 'run'}", *arguments]
    with open(tmp_path / "errors", "wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors, start_new_session=True)
    while process.poll() is None and begun not in (tmp_path / "errors").read_text(encoding="utf-8"):
        if (tmp_path / "run" / "journals").exists() or (tmp_path / "run" / "journal.sqlite").exists():
            break  # the bars are only written every half minute
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=300)
    said = (tmp_path / "errors").read_text(encoding="utf-8")
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted; run the same command again: finished work is not done again"
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    for records in (tmp_path / "run").rglob("records.array_record"):  # a dataset is there whole or not at all
        if not records.parent.name.endswith(".partial"):
            card = json.loads((records.parent / "dataset_card.json").read_text(encoding="utf-8"))
            reader = ArrayRecordReader(str(records))
            assert card["count"] == reader.num_records()
            reader.close()
