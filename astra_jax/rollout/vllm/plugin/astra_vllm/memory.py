"""Shared memory for a checkpoint's tensors: the API process fills it and the workers map it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator

import torch

from astra_vllm.layout import Parts

Place = tuple[str, tuple[int, ...], str, int]
"""(HF name, shape, dtype, first byte) of a tensor. A worker receives it as a list."""


class SharedMemory:
    """Memory that other processes of this user can open by path while it exists. Unlike /dev/shm it is not limited in
    size.

    Args:
        size: bytes.

    Attributes:
        parts: digests of its contents, so that a stream can skip unchanged parts.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: Parts = {}
        self._descriptor = os.memfd_create("policy", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        self.view = memoryview(mmap.mmap(self._descriptor, size))
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        os.close(self._descriptor)  # the mapping ends with the last array on it


def mapped(path: str) -> mmap.mmap:
    """Map the memory of another process's `SharedMemory.path`."""
    with open(path, "r+b") as file:
        # Shared and populated at once. Writable only because torch requires it; nothing is written.
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def tensors(memory: mmap.mmap | memoryview, places: Iterable[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with its name, without copies."""
    for name, shape, dtype, start in places:
        flat = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start)
        yield name, flat.view(tuple(shape))
