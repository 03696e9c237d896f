"""Files that live in the memory of a process, as Python's `open`, `os` and imports see them. Standard library only.

This module is never imported: `sandbox.run_code` sends its text with a program, before `sandbox/script.py`. Code that
opens files by itself in C, as `sqlite3` does, sees none of them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import posixpath
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

FOLDER = "/tmp/script"
"""Directory of a program, in which it starts."""

FIRST_DESCRIPTOR = 1000
_ModuleSpec: Any = type(os.__spec__)  # `importlib.machinery`, not imported
WRITING, CREATING, EXCLUSIVE = os.O_WRONLY | os.O_RDWR, os.O_CREAT, os.O_EXCL
EMPTYING, APPENDING = os.O_TRUNC, os.O_APPEND


def failure(number: int, *names: Any) -> OSError:
    return OSError(number, os.strerror(number), *names)


class Node:
    """File in memory."""

    def __init__(self) -> None:
        self.data = bytearray()


class Handle(io.RawIOBase):
    """Open file in memory."""

    def __init__(self, node: Node, name: Any, flags: int) -> None:
        self.name, self._node, self._place = name, node, 0
        self._reads, self._writes = not flags & os.O_WRONLY, bool(flags & WRITING)
        self._appends = bool(flags & APPENDING)
        self.mode = "rb+" if self._reads and self._writes else "rb" if self._reads else "wb"

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._place, len(self._node.data))[whence]
        if start + offset < 0:
            raise failure(errno.EINVAL)
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        if not self._reads:
            raise io.UnsupportedOperation("not readable")
        part = self._node.data[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def write(self, data: Any) -> int:
        if not self._writes:
            raise io.UnsupportedOperation("not writable")
        data, held = memoryview(data).cast("B"), self._node.data
        if self._appends:
            self._place = len(held)
        held.extend(bytes(max(0, self._place - len(held))))
        held[self._place : self._place + len(data)] = data
        self._place += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        size = self._place if size is None else size
        held = self._node.data
        held.extend(bytes(max(0, size - len(held))))
        del held[size:]
        return size


class Entry:
    """Entry of a directory, as `os.scandir` returns it."""

    def __init__(self, folder: str, name: str, found: os.stat_result) -> None:
        self.name, self.path, self._found = name, posixpath.join(folder, name), found

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._found

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._found.st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._found.st_mode)

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:  # from Python 3.12 on
        return False

    def inode(self) -> int:
        return self._found.st_ino


class Entries(list[Entry]):
    """Result of `os.scandir`."""

    def __enter__(self) -> Iterator[Entry]:
        return iter(self)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __next__(self) -> Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def close(self) -> None:
        self.clear()


class Files:
    """Files and directories that the program sees besides the standard library's, with the functions to access them."""

    def __init__(self, standard: dict[int, Any]) -> None:
        self.here = FOLDER
        self.nodes: dict[str, Node] = {}
        self.folders = {"/", "/tmp", "/var", "/var/tmp", "/mnt", "/home", "/root", FOLDER}
        self.standard = standard  # streams by descriptor
        self.opened: dict[int, Handle] = {}  # handles by descriptor
        self.writers: weakref.WeakSet[Any] = weakref.WeakSet()  # files that may have unwritten data
        own = (name for name in vars(Files) if not name.startswith("_"))
        self.real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in own if hasattr(os, name)}
        self.real_open = builtins.open

    def resolved(self, path: Any) -> str:
        text = os.fsdecode(os.fspath(path))
        if not text:
            raise failure(errno.ENOENT, path)
        return posixpath.normpath(posixpath.join(self.here, text))

    def put(self, name: str, data: bytes) -> None:
        path = self.resolved(name)
        self.nodes[path] = Node()
        self.nodes[path].data += data
        while (path := posixpath.dirname(path)) not in self.folders:
            self.folders.add(path)

    def knows(self, path: str) -> bool:
        return path in self.nodes or path in self.folders

    def handle(self, name: Any, flags: int) -> Handle:
        path = self.resolved(name)
        node = self.nodes.get(path)
        if path in self.folders:
            raise failure(errno.EISDIR, name)
        if node is None:
            if not flags & CREATING:
                raise failure(errno.ENOENT, name)
            if posixpath.dirname(path) not in self.folders:
                raise failure(errno.ENOENT, name)
            node = self.nodes[path] = Node()
        elif flags & CREATING and flags & EXCLUSIVE:
            raise failure(errno.EEXIST, name)
        if flags & EMPTYING:
            node.data.clear()
        return Handle(node, name, flags)

    # As in `os`; a descriptor, or a name that only the real file system has, goes to the real function.

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: None = None) -> int:
        if not self.knows(self.resolved(path)) and not flags & (WRITING | CREATING):
            return self.real["open"](path, flags, mode)
        number = max(self.opened, default=FIRST_DESCRIPTOR - 1) + 1
        self.opened[number] = self.handle(path, flags)
        return number

    def close(self, descriptor: int) -> None:
        if self.opened.pop(descriptor, None) is None and descriptor not in self.standard:
            self.real["close"](descriptor)

    def read(self, descriptor: int, count: int) -> bytes:
        stream = self.opened.get(descriptor) or self.standard.get(descriptor)
        return stream.read(count) if stream is not None else self.real["read"](descriptor, count)

    def write(self, descriptor: int, data: Any) -> int:
        stream = self.opened.get(descriptor) or self.standard.get(descriptor)
        return stream.write(data) if stream is not None else self.real["write"](descriptor, data)

    def stat(self, path: Any, *, dir_fd: None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return self.fstat(path)
        found = self.resolved(path)
        if found in self.folders:
            return self.described(stat.S_IFDIR | 0o755, 0)
        if found in self.nodes:
            return self.described(stat.S_IFREG | 0o644, len(self.nodes[found].data))
        return self.real["stat"](path if posixpath.isabs(os.fsdecode(path)) else found)

    def lstat(self, path: Any, *, dir_fd: None = None) -> os.stat_result:
        return self.stat(path)

    def fstat(self, descriptor: int) -> os.stat_result:
        if descriptor in self.opened:
            return self.described(stat.S_IFREG | 0o644, len(self.opened[descriptor]._node.data))
        return self.real["fstat"](descriptor)

    def described(self, mode: int, size: int) -> os.stat_result:
        return os.stat_result((mode, 1, 1, 1, 0, 0, size, *(int(time.time()),) * 3))

    def access(self, path: Any, mode: int, **_: Any) -> bool:
        return self.knows(self.resolved(path)) or self.real["access"](path, mode)

    def names(self, folder: str) -> list[str]:
        inside = [path for path in (*self.folders, *self.nodes) if path != "/" and posixpath.dirname(path) == folder]
        return [posixpath.basename(path) for path in inside]

    def listdir(self, path: Any = ".") -> list[str]:
        folder = self.resolved(path)
        if folder in self.nodes:
            raise failure(errno.ENOTDIR, path)
        return self.names(folder) if folder in self.folders else self.real["listdir"](folder)

    def scandir(self, path: Any = ".") -> Any:
        folder = self.resolved(path)
        if folder not in self.folders:
            return self.real["scandir"](folder)
        where = os.fsdecode(os.fspath(path))
        return Entries(Entry(where, name, self.stat(posixpath.join(folder, name))) for name in self.names(folder))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: None = None) -> None:
        folder = self.resolved(path)
        if self.knows(folder):
            raise failure(errno.EEXIST, path)
        if posixpath.dirname(folder) not in self.folders:
            raise failure(errno.ENOENT, path)
        self.folders.add(folder)

    def rmdir(self, path: Any, *, dir_fd: None = None) -> None:
        folder = self.resolved(path)
        if folder not in self.folders:
            raise failure(errno.ENOTDIR if folder in self.nodes else errno.ENOENT, path)
        if self.names(folder):
            raise failure(errno.ENOTEMPTY, path)
        self.folders.discard(folder)

    def unlink(self, path: Any, *, dir_fd: None = None) -> None:
        found = self.resolved(path)
        if found not in self.nodes:
            raise failure(errno.EISDIR if found in self.folders else errno.ENOENT, path)
        del self.nodes[found]

    remove = unlink

    def rename(self, source: Any, target: Any, **_: Any) -> None:
        old, new = self.resolved(source), self.resolved(target)
        if not self.knows(old) or posixpath.dirname(new) not in self.folders:
            raise failure(errno.ENOENT, source, None, target)
        if new in self.folders and (old in self.nodes or self.names(new)):
            raise failure(errno.EISDIR if old in self.nodes else errno.ENOTEMPTY, source, None, target)

        def moved(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(old + "/") else path

        self.nodes.pop(new, None)
        self.nodes = {moved(path): node for path, node in self.nodes.items()}
        self.folders = {moved(path) for path in self.folders}

    replace = rename

    def getcwd(self) -> str:
        return self.here

    def chdir(self, path: Any) -> None:
        folder = self.resolved(path)
        if folder not in self.folders:
            raise failure(errno.ENOTDIR if folder in self.nodes else errno.ENOENT, path)
        self.here = folder

    def chmod(self, path: Any, mode: int, **_: Any) -> None:
        self.stat(path)

    def utime(self, path: Any, *arguments: Any, **_: Any) -> None:
        self.stat(path)

    # As `builtins.open`.

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        flags = {"r": 0, "w": CREATING | EMPTYING, "a": CREATING | APPENDING, "x": CREATING | EXCLUSIVE}
        kinds = [flags[letter] for letter in mode if letter in flags] if isinstance(mode, str) else []
        if len(kinds) != 1 or set(mode) - set("rwaxbt+"):
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        wanted = kinds[0] | (os.O_RDWR if "+" in mode else os.O_RDONLY if "r" in mode else os.O_WRONLY)
        if opener is not None:
            file = opener(file, wanted)
        if isinstance(file, int):
            raw = self.opened.get(file) or self.standard.get(file)
        elif not wanted & WRITING and not self.knows(self.resolved(file)):
            try:
                return self.real_open(self.resolved(file), mode, buffering, encoding, errors, newline)
            except OSError as error:
                error.filename = file
                raise
        else:
            raw = self.handle(file, wanted)
        if raw is None:
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd)
        if buffering == 0:
            if "b" not in mode:
                raise ValueError("can't have unbuffered text I/O")
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        buffered = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        opened: Any = buffered
        if "b" not in mode:
            opened = io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline, buffering == 1)
            opened.mode = mode
        if wanted & WRITING:
            self.writers.add(opened)
        return opened

    # As a finder and loader of `sys.meta_path`, for the modules that the program was sent with.

    def find_spec(self, name: str, path: Iterable[str] | None = None, target: Any = None) -> Any:
        for folder in sys.path if path is None else path:
            place = posixpath.join(self.resolved(folder or "."), name.rpartition(".")[2])
            for file, is_package in ((f"{place}/__init__.py", True), (f"{place}.py", False)):
                if file in self.nodes:
                    spec = _ModuleSpec(name, self, origin=file, is_package=is_package)
                    spec.has_location = True
                    if is_package:
                        spec.submodule_search_locations = [place]
                    return spec
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        file = module.__spec__.origin
        exec(compile(bytes(self.nodes[file].data), file, "exec", dont_inherit=True), vars(module))
