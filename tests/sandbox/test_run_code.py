"""`POST /run_code`: programs run as on SandboxFusion, and whatever is not done there is named."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from serving import serving

from sandbox import Limits, SandboxConfig, SandboxPool
from sandbox.run_code import MOST_FILE_BYTES, MOST_OUTPUT_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with SandboxPool(SandboxConfig(limits=Limits(source_bytes=50_000))) as pool, serving(pool) as (_, url):
        yield url


async def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/run_code", data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def run(url: str, code: str, **more: Any) -> dict[str, Any]:
    status, answer = await post(url, {"code": code, "language": "python", **more})
    assert status == 200, answer
    assert set(answer) == {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}
    assert set(answer["run_result"]) == {"status", "execution_time", "return_code", "stdout", "stderr"}
    return answer


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


ENDS: dict[str, tuple[str, int, str, str]] = {
    "main guard": ("def main():\n    print(42)\nif __name__ == '__main__':\n    main()", 0, "42\n", ""),
    "exit 0": ("import sys\nprint(1)\nsys.exit(0)", 0, "1\n", ""),
    "exit of None": ("import sys\nsys.exit(print(1))", 0, "1\n", ""),
    "exit 3": ("import sys\nprint(1)\nsys.exit(3)", 3, "1\n", ""),
    "exit of True": ("raise SystemExit(True)", 1, "", ""),
    "exit -1": ("raise SystemExit(-1)", 255, "", ""),
    "exit with a text": ("import sys\nsys.exit('no luck')", 1, "", "no luck\n"),
    "exit with a text and closed standard error": ("import sys\nprint(1)\nsys.stderr.close()\nexit('x')", 1, "1\n", ""),
    "exit with a text and no standard error": ("import sys\nprint(1)\nsys.stderr = None\nexit('x')", 1, "1\n", ""),
    "exit with an object that cannot be printed": (
        "class A:\n    def __str__(self): raise KeyError(self)\nprint(1)\nexit(A())",
        1,
        "1\n",
        "",
    ),
    "exception and closed standard error": ("import sys\nprint(1)\nsys.stderr.close()\n1/0", 1, "1\n", ""),
    "exception and no standard error": ("import sys\nprint(1)\nsys.stderr = None\n1/0", 1, "1\n", ""),
    "no output and no error": ("import sys\nsys.stdout = sys.stderr = None\n1/0", 1, "", ""),
    "exit handler that raises": (
        "import atexit\natexit.register(lambda: 1/0)\nprint(1)",
        0,
        "1\n",
        "ZeroDivisionError",
    ),
    "quit": ("print(1)\nquit()", 0, "1\n", ""),
    "outputs apart": ("import sys\nprint('warn', file=sys.stderr)\nprint('out')", 0, "out\n", "warn\n"),
    "os._exit": ("import os\nprint(1, flush=True)\nprint(2)\nos._exit(7)", 7, "1\n", ""),
    "os._exit, which nothing holds up": ("import os\ntry:\n    os._exit(7)\nfinally:\n    print(1)", 7, "", ""),
    "exit hooks": ("import atexit\natexit.register(print, 'bye')\nprint(1)", 0, "1\nbye\n", ""),
    "hook of exceptions": (
        "import sys\nsys.excepthook = lambda *a: print(a[1], file=sys.stderr)\n1/0",
        1,
        "",
        "division",
    ),
    "assertion": ("assert 1 == 2", 1, "", 'File "/tmp/script/main.py", line 1, in <module>\n    assert 1 == 2'),
    "syntax": ("int a = 1", 1, "", "SyntaxError: invalid syntax"),
    "null byte": ("print(1)\0", 1, "", "null bytes"),
    "half a surrogate pair": ("print('\ud800')", 1, "", "SyntaxError"),
    "printing half a surrogate pair": ("print('\\ud800')", 1, "", "UnicodeEncodeError"),
    "byte order mark": ("\ufeffprint(1)\r\nprint(2)\r\n", 0, "1\n2\n", ""),
    "exception in a function": (
        "print(1)\ndef f():\n    raise ValueError('x')\nf()",
        1,
        "1\n",
        'Traceback (most recent call last):\n  File "/tmp/script/main.py", line 4, in <module>\n    f()\n'
        "  File \"/tmp/script/main.py\", line 3, in f\n    raise ValueError('x')\nValueError: x\n",
    ),
    "no input": ("input()", 1, "", "EOFError"),
    "globals": ("x = 1\ndef f():\n    global x\n    x += 1\nf()\nprint(x)", 0, "2\n", ""),
    "pickled class": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
        0,
        "A\n",
        "",
    ),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\nunittest.main()",
        0,
        "",
        "Ran 1 test",
    ),
    "a unittest that fails": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 2)\nunittest.main()",
        1,
        "",
        "AssertionError: 1 != 2",
    ),
    "where it is": (
        "import os, sys\nprint(__name__, __file__ == sys.argv[0], os.getcwd() == os.path.dirname(__file__))",
        0,
        "__main__ True True\n",
        "",
    ),
    "its own source": (
        "import inspect\ndef f(): pass\nprint(inspect.getsource(f), open(__file__).read()[:6])",
        0,
        "def",
        "",
    ),
    "warnings": ("import warnings\nwarnings.warn('hey')", 0, "", "main.py:2: UserWarning: hey"),
    "closed output": ("import sys\nprint(1)\nsys.stdout.close()", 0, "1\n", ""),
    "no output": ("import sys\nsys.stdout = None\nprint(1)", 0, "", ""),
    "redirected output": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as f:\n    print(1)\n"
        "print(f.getvalue() * 2)",
        0,
        "1\n1\n\n",
        "",
    ),
    "bytes": (
        "import os, sys\nsys.stdout.buffer.write('é'.encode())\nsys.stdout.flush()\nos.write(1, b'!')",
        0,
        "é!",
        "",
    ),
    "30,000 characters": ("print('x' * 30_000)", 0, "x" * 30_000 + "\n", ""),
    "a crash": ("import ctypes\nctypes.string_at(0)", -11, "", ""),
    "memory": ("bytearray(1 << 40)", 1, "", "MemoryError"),
    "no such package": ("import numpy", 1, "", "ModuleNotFoundError: No module named 'numpy'"),
    "no thread": ("import threading\nthreading.Thread(target=print).start()", 1, "", "can't start new thread"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_a_program_ends_as_python_ends_it(url: str, case: str) -> None:
    code, return_code, stdout, stderr = ENDS[case]
    answer = await run(url, code)
    ran = answer["run_result"]
    assert (ran["status"], ran["return_code"]) == ("Finished", return_code), answer
    assert answer["status"] == ("Failed" if return_code else "Success")
    assert ran["stdout"] == stdout or (stdout and ran["stdout"].startswith(stdout)), ran["stdout"]
    shown = re.sub(r"\n[ ~^]+(?=\n)", "", ran["stderr"])  # marks of the place, in later Pythons
    assert shown == stderr or (stderr and stderr in shown), ran["stderr"]
    assert "sandbox" not in ran["stderr"] and "<tool>" not in ran["stderr"]
    assert 0 < ran["execution_time"] < 60
    assert bool(answer["message"]) == (case == "a crash")


INPUTS = {
    "input": ("print(int(input()))", "65535", "65535\n"),
    "lines": ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc\n"),
    "bytes": ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "1 2\n3", "6\n"),
    "descriptor": ("import os\nprint(os.read(0, 100))", "1 2", "b'1 2'\n"),
    "descriptor as a file": ("print(open(0).read())", "1é", "1é\n"),
    "prompt": ("print(input('? '))", "x", "? x\n"),
    "null": ("import sys\nprint(repr(sys.stdin.read()))", None, "''\n"),
}


@pytest.mark.parametrize("case", INPUTS)
async def test_a_program_reads_its_standard_input(url: str, case: str) -> None:
    code, stdin, stdout = INPUTS[case]
    assert (await run(url, code, stdin=stdin))["run_result"]["stdout"] == stdout


FILES = """
import csv, glob, os, pathlib, shutil, tempfile

print(open("a/b.txt").read(), open("/data/c", "rb").read(), os.listdir("a"), os.path.getsize("a/b.txt"))
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("temporary")
    file.seek(0)
    print(file.read(), os.path.exists(file.name))
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "d" / "e.txt"
    path.parent.mkdir(parents=True)
    path.write_text("é")
    shutil.copy(path, path.with_suffix(".bak"))
    found = sorted(path.name for path in pathlib.Path(folder).rglob("*"))
    print(found, glob.glob(f"{folder}/*/e.*") != [], path.stat().st_size)
print(os.path.exists(folder))
with open("rows.csv", "w", newline="") as file:
    csv.writer(file).writerow([1, 2])
with open("rows.csv", "a+") as file:
    file.write("3")
    file.seek(0)
    print(repr(file.read()))
with open("rows.csv", "r+b") as file:
    file.seek(1)
    file.write(b"XX")
    file.truncate()
os.makedirs("x/y")
os.replace("rows.csv", "x/y/z")
os.rename("x", "w")
print(open("w/y/z").read(), os.path.isdir("x"), sorted(name for *_, names in os.walk("w") for name in names))
for wrong in ("open('no')", "open('no/way', 'w')", "open('/etc/passwd')", "os.mkdir('/tmp')", "os.remove('no')",
              "open('w/y/z', 'x')", "open('.')", "os.listdir('no')", "os.rmdir('w')", "open('a', 'q')"):
    try:
        print("done", eval(wrong))
    except Exception as error:
        print(type(error).__name__, end=" ")
kept = open("late.txt", "w")
kept.write("not closed")
"""


async def test_a_programs_files_are_there_and_come_back(url: str) -> None:
    files = {"a/b.txt": encoded("hello"), "/data/c": encoded("absolute"), "none": None}
    answer = await run(url, FILES, files=files, fetch_files=["late.txt", "/tmp/script/w/y/z", "nothing"])
    assert answer["run_result"]["stderr"] == ""
    assert answer["run_result"]["stdout"].splitlines() == [
        "hello b'absolute' ['b.txt'] 5",
        "temporary True",
        "['d', 'e.bak', 'e.txt'] True 2",
        "False",
        "'1,2\\n3'",
        "1XX False ['z']",
        "FileNotFoundError FileNotFoundError FileNotFoundError FileExistsError FileNotFoundError "
        "FileExistsError IsADirectoryError FileNotFoundError OSError ValueError ",
    ]
    assert answer["files"] == {"late.txt": encoded("not closed"), "/tmp/script/w/y/z": encoded("1XX")}
    assert answer["message"] == f'fetch_files: "nothing" was not written, or is beyond {MOST_FILE_BYTES} bytes of files'


async def test_a_program_imports_the_modules_it_was_sent_with(url: str) -> None:
    files = {
        "helper.py": encoded("def f():\n    return 5"),
        "package/__init__.py": encoded(""),
        "package/one.py": encoded("from . import two\nX = two.Y"),
        "package/two.py": encoded("Y = 3"),
    }
    answer = await run(url, "import helper\nfrom package.one import X\nprint(helper.f(), X)", files=files)
    assert answer["run_result"]["stdout"] == "5 3\n", answer


async def test_what_is_beyond_a_limit_is_cut_and_said(url: str) -> None:
    answer = await run(url, "import sys\nprint('é' * 1_000_000)\nsys.stderr.write('x' * 1_048_577)")
    ran = answer["run_result"]
    assert (ran["stdout"], ran["stderr"]) == ("é" * (MOST_OUTPUT_BYTES // 2), "x" * MOST_OUTPUT_BYTES)
    assert answer["status"] == "Success"
    assert "stdout is cut after 1048576 bytes; 951425 more were written" in answer["message"]
    assert "stderr is cut after 1048576 bytes; 1 more were written" in answer["message"]
    large = f"open('a', 'wb').write(bytes({MOST_FILE_BYTES}))\nopen('b', 'w').write('b')"
    answer = await run(url, large, fetch_files=["a", "b"])
    assert list(answer["files"]) == ["a"] and 'fetch_files: "b" was not written, or is beyond' in answer["message"]


async def test_a_programs_time_is_that_of_run_timeout(url: str) -> None:
    busy = "import time\nbegun = time.process_time()\nn = 0\nfor i in range(40_000_000):\n    n += i\nprint(n)"
    longer, spins, sleeps, slept = await asyncio.gather(
        run(url, busy, run_timeout=50),  # more processor time than a tool's call has
        run(url, "print(1, flush=True)\nwhile True:\n    pass", run_timeout=1),
        run(url, "import time\nprint(1, flush=True)\nwhile True:\n    time.sleep(10)", run_timeout=25),
        run(url, "import time\nbegun = time.time()\ntime.sleep(4)\nprint(time.time() - begun)"),
    )
    assert longer["run_result"]["stdout"] == "799999980000000\n", longer
    assert (spins["status"], spins["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert spins["run_result"]["return_code"] is None
    assert "stopped at its run_timeout of 1 s; what it printed is lost" in spins["message"]
    ran = sleeps["run_result"]
    assert (sleeps["status"], ran["status"], ran["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert ran["stdout"] == "1\n" and ran["execution_time"] == pytest.approx(25, abs=10)
    assert slept["run_result"]["stdout"] == "4.0\n" and slept["run_result"]["execution_time"] >= 4
    late = await run(url, "import time\ntime.sleep(0.2)", run_timeout=0.1)
    assert late["run_result"]["status"] == "TimeLimitExceeded"


async def test_a_programs_memory_is_that_of_memory_limit_mb(url: str) -> None:
    code = "print(len(bytearray(300 << 20)))"  # of the 512 MiB of a tool's call
    assert (await run(url, code, memory_limit_MB=256))["run_result"]["stderr"].endswith("MemoryError\n")
    assert (await run(url, code, memory_limit_MB=1024))["run_result"]["return_code"] == 0
    assert (await run(url, "print(len(bytearray(800 << 20)))"))["run_result"]["return_code"] == 0


NOT_OFFERED: dict[str, tuple[Mapping[str, Any], str]] = {
    "language": ({"language": "cpp"}, "language is 'cpp'; only 'python' is run here"),
    "time": ({"run_timeout": 61}, "run_timeout is 61; send at most 60 (seconds)"),
    "memory": ({"memory_limit_MB": 4096}, "memory_limit_MB is 4096; send 128 to 1024, or -1 for the largest"),
    "no memory": ({"memory_limit_MB": 16}, "memory_limit_MB is 16; send 128 to 1024, or -1 for the largest"),
    "source": ({"code": "#" * 50_001}, "code is 50001 bytes; send at most 50000"),
}


@pytest.mark.parametrize("case", NOT_OFFERED)
async def test_what_is_not_offered_is_an_error_of_the_sandbox_by_name(url: str, case: str) -> None:
    more, words = NOT_OFFERED[case]
    answer = await run(url, **{"code": "print(1)", **more})
    assert (answer["status"], answer["message"]) == ("SandboxError", words)
    assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Error", None)


BAD: dict[str, tuple[Any, str, str]] = {
    "no object": ([1], "body", "is [1]; send a JSON object"),
    "no code": ({"language": "python"}, "code", "is missing; send a string, the program"),
    "code": ({"code": 1}, "code", "is 1; send a string"),
    "language": ({"code": "", "language": "cobol"}, "language", "is \"cobol\"; send 'python'"),
    "time": ({"code": "", "run_timeout": "x"}, "run_timeout", 'is "x"; send a number of seconds'),
    "no time": ({"code": "", "run_timeout": 0}, "run_timeout", "is 0; send a number of seconds above 0"),
    "endless time": ({"code": "", "run_timeout": float("nan")}, "run_timeout", "is NaN; send a number"),
    "time of compiling": ({"code": "", "compile_timeout": True}, "compile_timeout", "is true; send a number"),
    "memory": ({"code": "", "memory_limit_MB": 1.5}, "memory_limit_MB", "is 1.5; send a number of MiB, or -1"),
    "input": ({"code": "", "stdin": 1}, "stdin", "is 1; send a string, or null"),
    "files": ({"code": "", "files": {"a": "x"}}, "files", 'has "x" for "a"; send the content as base64'),
    "fetched files": ({"code": "", "fetch_files": [1]}, "fetch_files", "has 1; send file names"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_field_that_cannot_be_read_is_refused_as_fastapi_does(url: str, case: str) -> None:
    body, name, words = BAD[case]
    status, answer = await post(url, body)
    assert status == 422
    (detail,) = answer["detail"]
    assert detail["loc"] == ["body", name] and words in detail["msg"] and detail["msg"] == answer["error"]


async def test_a_body_that_is_no_json_is_refused_by_name(url: str) -> None:
    status, answer = await post(url, b'{"code": "", "run_timeout": ' + b"9" * 5_000 + b"}")
    assert status == 400 and "it holds an integer of more than 4300 digits; send it as text" in answer["error"]


async def test_a_field_that_nobody_reads_is_said(url: str) -> None:
    answer = await run(url, "print(1)", timeout=3)
    assert (answer["status"], answer["message"]) == ("Success", 'unknown field "timeout" is not read')


ESCAPES = {
    "real files": "import posix\nposix.open('/tmp/x', posix.O_CREAT | posix.O_WRONLY)",
    "files of the host": "import posix\nposix.open('/etc/passwd', posix.O_RDONLY)",
    "processes": "import posix\nposix.fork()",
    "sockets": "import socket\nsocket.socket()",
    "programs": "import subprocess\nsubprocess.run(['true'])",
    "signals": "import os\nos.kill(1, 9)",
}


@pytest.mark.parametrize("case", ESCAPES)
async def test_a_program_is_as_locked_in_as_a_tool(url: str, case: str) -> None:
    ran = (await run(url, ESCAPES[case]))["run_result"]
    last = ran["stderr"].splitlines()[-1]
    assert ran["return_code"] == 1 and last.startswith(("PermissionError", "FileNotFoundError", "BlockingIOError")), ran


async def test_a_report_that_a_program_forges_is_its_own_failure(url: str) -> None:
    for body in (b'{"value":1,"stdout":""}', b'{"value":{"return_code":0},"stdout":""}', b"junk"):
        code = (
            f"import struct, posix\nbody = {body!r}\n"
            "posix.write(3, struct.pack('!BI', 0, len(body)) + body)\nposix._exit(0)"
        )
        answer = await run(url, code)
        assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 1), answer
    answer = await run(url, "import posix\nposix._exit(0)")
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 1)
    assert "without a result; what it printed is lost" in answer["message"]


async def test_programs_see_nothing_of_each_other(url: str) -> None:
    await run(url, "open('/tmp/left', 'w').write('x')\nimport json\njson.x = 1")
    answer = await run(url, "import json, os\nprint(os.path.exists('/tmp/left'), hasattr(json, 'x'))")
    assert answer["run_result"]["stdout"] == "False False\n"
    codes = [f"print({number})" for number in range(40)]
    answers = await asyncio.gather(*(run(url, code) for code in codes))
    assert [answer["run_result"]["stdout"] for answer in answers] == [f"{number}\n" for number in range(40)]


async def test_programs_run_where_no_file_can_be_opened() -> None:
    async with SandboxPool(SandboxConfig(highest_tier="C")) as pool, serving(pool) as (_, url):
        answer = await run(url, "import json, re\nopen('a', 'w').write('1')\nprint(open('a').read())\n1 / 0")
    assert answer["run_result"]["stdout"] == "1\n"
    assert answer["run_result"]["stderr"].endswith("    ~~^~~\nZeroDivisionError: division by zero\n")
