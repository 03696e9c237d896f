"""Preparation of a process's memory for cheap forks, once everything that its forks need is loaded.

A fork copies each page that it changes: this is most of a call's cost (docs/sandbox.md). Standard library only.
"""

from __future__ import annotations

import ctypes

from sandbox.libc import LIBC

_POOL_BYTES = (1 << 14) - 48  # a pool of CPython's allocator on 64-bit machines, without its header: blocks of one size
_MOST_BYTES = 1 << 20
_KEPT: list[object] = []
_M_MXFAST = 1
_CHUNKS = (*(1 << bits for bits in range(16, 10, -1)), *range(1024, 512, -16))  # bytes, from the largest on


class _Account(ctypes.Structure):
    """Result of `mallinfo2`: bytes, except for the counts."""

    _fields_ = [("others", ctypes.c_size_t * 9), ("at_the_end", ctypes.c_size_t)]


def fill_gaps() -> None:
    """Allocate the free gaps between used memory, for ever.

    Allocators use gaps first, so a call's objects would be spread over as many pages as there are gaps. Without gaps
    they lie side by side. With allocators other than CPython's and glibc's (2.33), hardly any memory is taken.
    """
    _fill_pools()
    if hasattr(LIBC, "mallinfo2"):
        _fill_chunks()


def _fill_pools() -> None:
    """Fill CPython's small blocks in all pools that are in use."""
    for size in range(16, 513, 16):
        blocks: list[object] = []
        previous = in_a_row = 0
        while len(blocks) * size < _MOST_BYTES:
            # The header of `bytes` is too large for the two smallest.
            block = object() if size == 16 else size / 3 if size == 32 else bytes(size - 33)
            blocks.append(block)
            in_a_row = in_a_row + 1 if id(block) == previous + size else 1
            previous = id(block)
            if in_a_row == _POOL_BYTES // size:  # a whole pool: it was a new one, and is freed
                _KEPT.extend(blocks[:-in_a_row])
                break


def _fill_chunks() -> None:
    """Fill the C library's larger chunks below the end of its heap. Pages without data are given back."""
    size, address = ctypes.c_size_t, ctypes.c_size_t
    LIBC.mallinfo2.restype, LIBC.sbrk.restype, LIBC.malloc.restype = _Account, address, address
    LIBC.malloc.argtypes, LIBC.free.argtypes = [size], [address]
    # Otherwise each call's process merges small free chunks with their neighbours.
    LIBC.mallopt(_M_MXFAST, 0)
    LIBC.malloc_trim(0)
    end = LIBC.sbrk(0) - LIBC.mallinfo2().at_the_end
    for wanted in _CHUNKS:
        while (chunk := LIBC.malloc(wanted)) and chunk < end:
            pass  # kept, and not written to
        LIBC.free(chunk)
