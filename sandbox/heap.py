"""Makes a process's memory cheap to fork, once all that its forks need is loaded. Standard library only.

A fork copies each page that it changes: most of what a call costs (docs/sandbox.md).
"""

from __future__ import annotations

_POOL_BYTES = (1 << 14) - 48  # of CPython's allocator on 64-bit machines, without its header: blocks of one size
_MOST_BYTES = 1 << 20
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
