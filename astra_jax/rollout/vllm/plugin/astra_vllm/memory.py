"""A checkpoint's tensors in memory that the API process fills and the workers map."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator

import torch

from astra_vllm.layout import Parts

Place = tuple[str, tuple[int, ...], str, int]
"""(HF name, shape, dtype, first byte) of a tensor. Arrives in a worker as a list."""


class SharedMemory:
    """Memory that other processes of this user can open by path while it is held; unlike /dev/shm it is not small.

    Args:
        size: bytes.

    Attributes:
        parts: digests of what is in it, for a stream that need not fill it anew.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: Parts = {}
        self._descriptor = os.memfd_create("policy", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        self.view = memoryview(mmap.mmap(self._descriptor, size))
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        os.close(self._descriptor)  # the mapping goes with the last array on it


def mapped(path: str) -> mmap.mmap:
    """The memory behind another process's `SharedMemory.path`."""
    with open(path, "r+b") as file:
        # Shared, so that its pages are mapped at once; torch wants it writable, and nothing writes.
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def tensors(memory: mmap.mmap | memoryview, places: Iterable[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by its name, not copied."""
    for name, shape, dtype, start in places:
        flat = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start)
        yield name, flat.view(tuple(shape))
