"""Runs a command, by default the sandbox's tests, on an emulated arm64 machine. For those who have no real one.

    python tests/sandbox/emulate_arm64.py --folder=DIR
    python tests/sandbox/emulate_arm64.py --folder=DIR --uid=1000 python3 -m pytest tests/sandbox/test_sandbox_pool.py
    python tests/sandbox/emulate_arm64.py --folder=DIR --kernel=linux-image-arm64-16k --cpu=max,pauth-impdef=on

Too slow for CI. It needs qemu-system-arm and the Debian tools apt-get and dpkg-deb (as anybody: they only download and
unpack), and makes in DIR a root of Debian 12's packages, which the kernel unpacks into memory; the working tree lies in
/repository there. Ends with the command's status.

The emulator counts instructions, and the machine's clock follows the count, a nanosecond for each: so limits in seconds
mean there what they mean on a real machine of that speed, however slow the emulation is, and nobody waits for a sleep.
With `--shift=1` it is two nanoseconds: what uses up its processor time is over sooner, and the narrowest limits fail.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ["bash", "coreutils", "dash", "iproute2", "libc-bin", "mount", "python3.11", "tzdata", "util-linux"]
PYTHON_PACKAGES = ["absl-py", "aiohttp", "hypothesis", "prometheus_client", "pytest", "pytest-asyncio"]
"""What the sandbox, its HTTP service and its tests import, in this environment's versions."""

TESTS = ["python3", "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/sandbox"]
TESTS.append("--ignore=tests/sandbox/test_sandbox_soak.py")  # imports the trainer

SOURCES = """\
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-backports main
"""
APT = """\
APT::Architecture "arm64";
APT::Architectures {{"arm64";}};
APT::Install-Recommends "false";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "/dev/null";
"""
ENDED = "emulate_arm64: ended with "
INIT = """\
#!/bin/bash
# A root that came with the kernel cannot be left by pivot_root, a mount of the same on top of it can.
mount --bind / /mnt
cd /mnt
mount --move . /
exec chroot . /bin/bash /start
"""
START = f"""\
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
mount -t cgroup2 group /sys/fs/cgroup
mount -t securityfs security /sys/kernel/security
ip link set lo up
echo emulated > /proc/sys/kernel/hostname
export HOME=/tmp PATH=/usr/sbin:/usr/bin PYTHONPATH=/packages LC_ALL=C.UTF-8
cd /repository
uname -a
echo "page size $(getconf PAGE_SIZE), LSMs $(cat /sys/kernel/security/lsm 2>&1)"
setpriv --reuid={{uid}} --regid={{uid}} --clear-groups {{command}} </dev/null
echo "{ENDED}$?"
echo o > /proc/sysrq-trigger
sleep 1000
"""


def main() -> int:
    """Make what is not there yet, start the machine, show what it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps what was downloaded, 300 MB")
    parser.add_argument("--kernel", default="linux-image-cloud-arm64", help="a package of Debian 12 or its backports")
    parser.add_argument("--cpu", default="neoverse-n1", help="of qemu-system-aarch64; max has every extension")
    parser.add_argument("--shift", type=int, default=0, help="an instruction takes two to this power nanoseconds")
    parser.add_argument("--uid", type=int, default=0, help="user that runs the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="by default pytest over tests/sandbox")
    options = parser.parse_args()
    command = options.command or TESTS
    folder: Path = options.folder.resolve()
    configure_apt(folder)
    kernel = unpack_kernel(folder, options.kernel)
    root = folder / "root"
    requirements = [f"{name}=={metadata.version(name)}" for name in PYTHON_PACKAGES]
    listed, wanted = folder / "root.json", json.dumps(PACKAGES + requirements)
    if not root.exists() or not listed.exists() or listed.read_text() != wanted:
        shutil.rmtree(root, ignore_errors=True)
        make_root(folder, root, requirements)
        listed.write_text(wanted)
    start = START.format(uid=options.uid, command=shlex.join(command))
    with tempfile.NamedTemporaryFile(dir=folder, prefix="image-") as image:
        image.writelines(archive(root, ""))
        image.writelines(archive(ROOT, "repository"))
        image.writelines([*entry("start", stat.S_IFREG | 0o644, start.encode()), *entry("TRAILER!!!", 0, b"")])
        image.flush()
        return run(kernel, Path(image.name), options.cpu, options.shift)


def configure_apt(folder: Path) -> None:
    """Give apt a state of its own in `folder`, of a machine without packages, and fetch the lists."""
    os.environ["APT_CONFIG"] = str(folder / "apt.conf")
    if (folder / "status").exists():
        return
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "apt.conf").write_text(APT.format(folder=folder))
    (folder / "sources.list").write_text(SOURCES)
    subprocess.run(["apt-get", "update", "-q"], check=True)
    (folder / "status").touch()


def unpack_kernel(folder: Path, package: str) -> Path:
    """The image of a kernel's package, or of the one that a metapackage depends on."""
    depends = subprocess.run(["apt-cache", "depends", package], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    name = names[0] if names else package
    place = folder / name
    if not place.exists():
        subprocess.run(["apt-get", "download", "-q", name], cwd=folder, check=True)
        (archived,) = folder.glob(f"{name}_*.deb")
        unfinished = folder / f"{name}-unfinished"
        subprocess.run(["dpkg-deb", "-x", archived, unfinished], check=True)
        archived.unlink()
        unfinished.rename(place)
    (image,) = (place / "boot").glob("vmlinuz-*")
    return image


def make_root(folder: Path, root: Path, requirements: list[str]) -> None:
    """Unpack Debian's packages and Python's into one tree. Nothing of the other machine is run for that."""
    subprocess.run(["apt-get", "install", "-q", "-y", "--download-only", *PACKAGES], check=True)
    made = root.with_name("root-unfinished")
    shutil.rmtree(made, ignore_errors=True)
    for name in ("bin", "lib", "sbin"):
        (made / "usr" / name).mkdir(parents=True)
        (made / name).symlink_to(f"usr/{name}")
    for archived in sorted((folder / "cache/archives").glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archived], stdout=subprocess.PIPE) as files:
            # Not `dpkg-deb -x`, which would put folders in place of the links above.
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", made], stdin=files.stdout, check=True)
    for name in ("dev", "mnt", "proc", "sys", "tmp"):
        (made / name).mkdir(exist_ok=True)
    (made / "usr/bin/python3").symlink_to("python3.11")
    (made / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/tmp:/bin/bash\n")
    (made / "init").write_text(INIT)
    (made / "init").chmod(0o755)
    platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_28")]
    for_arm64 = ["--python-version=3.11", "--only-binary=:all:", *platforms, f"--target={made / 'packages'}"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-compile"]
    subprocess.run([*install, *for_arm64, *requirements], check=True)
    if sys.version_info[:2] == (3, 11):  # bytecode is the same on all machines, and there it would take minutes
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        for place in ("usr/lib/python3.11", "packages"):
            compileall.compile_dir(made / place, stripdir=str(made), quiet=2, invalidation_mode=mode)
    made.rename(root)


def archive(tree: Path, below: str) -> Iterator[bytes]:
    """`tree` as the kernel takes it, with `below` before each name; of a working tree what git knows or might."""
    if below:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0")
        files = [tree / name for name in names if name and (tree / name).is_file()]
        folders = {parent for file in files for parent in file.relative_to(tree).parents}
        paths = [*(tree / folder for folder in sorted(folders)), *files]
    else:
        paths = sorted(tree.rglob("*"))
    for path in paths:
        state = path.lstat()
        content = b""
        if stat.S_ISLNK(state.st_mode):
            content = os.readlink(path).encode()
        elif stat.S_ISREG(state.st_mode):
            content = path.read_bytes()
        yield from entry(str(Path(below, path.relative_to(tree))), state.st_mode, content)


def entry(name: str, mode: int, content: bytes) -> list[bytes]:
    """One file in the format "newc" (https://docs.kernel.org/driver-api/early-userspace/buffer-format.html)."""
    named = name.encode() + b"\0"
    # inode, mode, owner, group, links, time, size, device and that of a special file (2 each), length of name, checksum
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(named), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields) + named
    return [header, bytes(-len(header) % 4), content, bytes(-len(content) % 4)]


def run(kernel: Path, image: Path, cpu: str, shift: int) -> int:
    """Start the machine, pass on what it prints. Returns the command's status, or 1 if it never ended."""
    machine = ["qemu-system-aarch64", "-machine", "virt", "-cpu", cpu, "-smp", "2", "-m", "3G"]
    machine += ["-icount", f"shift={shift},sleep=off", "-nographic", "-nic", "none", "-no-reboot"]
    machine += ["-kernel", str(kernel), "-initrd", str(image)]
    machine += ["-append", "console=ttyAMA0 quiet panic=-1 rdinit=/init"]
    status = 1
    with subprocess.Popen(machine, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace") as it:
        assert it.stdout is not None
        for line in it.stdout:
            print(line.rstrip(), flush=True)
            if ENDED in line:
                status = int(line.partition(ENDED)[2])
    return status


if __name__ == "__main__":
    sys.exit(main())
