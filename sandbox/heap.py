"""Makes a process's memory cheap to fork, once all that its forks need is loaded. Standard library only.

A fork copies what describes the memory, mapping by mapping, and later each page that it changes: most of what a call
costs (docs/sandbox.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools

from sandbox.libc import LIBC

_POOL_BYTES = (1 << 14) - 48  # of CPython's allocator on 64-bit machines, without its header: blocks of one size
_MOST_BYTES = 1 << 20
_READ, _WRITE, _EXECUTE = 1, 2, 4
_KEPT: list[object] = []


def fill_gaps() -> None:
    """Take the free blocks of all pools that are in use, for ever.

    The allocator hands those out first, so what a call makes was spread over as many pages as there were gaps. Now it
    begins pools of its own, side by side. Where another allocator is in use, hardly any.
    """
    for size in range(16, 513, 16):
        blocks: list[object] = []
        previous = in_a_row = 0
        while len(blocks) * size < _MOST_BYTES:
            # The header of `bytes` is too large for the two smallest.
            block = object() if size == 16 else size / 3 if size == 32 else bytes(size - 33)
            blocks.append(block)
            in_a_row = in_a_row + 1 if id(block) == previous + size else 1
            previous = id(block)
            if in_a_row == _POOL_BYTES // size:  # all of a pool: it was a new one, and goes back
                _KEPT.extend(blocks[:-in_a_row])
                break


def merge_mappings() -> None:
    """Make a library two mappings, where the linker makes five: its code with its constants, and its data.

    The constants become executable, the table of addresses that was bound at the start writable again. No page is both.
    It is for speed alone: what the kernel does not show, or refuses, stays as it is.
    """
    mappings: list[list[str]] = []
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as file:
        mappings = [line.split(maxsplit=5) for line in file]
    for _, group in itertools.groupby((one for one in mappings if len(one) == 6), key=lambda one: one[5]):
        library = list(group)
        if not any(one[1] == "r-xp" for one in library):
            continue
        for one, after in itertools.zip_longest(library, library[1:]):
            if one[1] == "r--p":
                start, end = (int(address, 16) for address in one[0].split("-"))
                access = _READ | (_WRITE if after and after[1] == "rw-p" else _EXECUTE)
                LIBC.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), access)
