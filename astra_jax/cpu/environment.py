"""Environment of a process on CPUs. Imports no jax."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

_MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.top_pad=268435456:"
    "glibc.malloc.trim_threshold=20000000000"
)
_RETURNING_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
"""Settings of glibc's malloc that return memory of large arrays.

The mmap threshold is 32 MiB, glibc's maximum: larger arrays are mapped separately and returned when they are freed.
Smaller ones are kept, up to the 64 MiB of a thread's heap. With the first threshold alone, glibc returns all but 128
KiB at a heap's end after each free, and a matmul has its packed weights there. (SmolLM2-135M, a token of each of 16
rows that see 256 positions: 90 ms, and 53 with both.)
"""
_WIDE_VECTORS = "--xla_cpu_prefer_vector_width"


def cpu_environment(environment: Mapping[str, str], *, large: bool = False) -> dict[str, str]:
    """Return `environment` with settings that make XLA's CPU backend fast on Linux, unless the user set them.

    GLIBC_TUNABLES: a malloc that keeps freed memory. XLA allocates its temporaries in each step, and by default glibc
        maps and unmaps them. A training step of the quickstart's model spends a fifth of its time in page faults
        (327 ms against 273 ms).
    XLA_FLAGS: vectors as wide as the processor's if it has AVX-512; XLA's default is half of that (a step of 29
        million parameters takes 3.1 s against 3.6 s).

    Args:
        large: True for models of 100 million parameters and more, with arrays of 100 MB, which malloc then returns. If
            they were kept, their holes would not fit later arrays, and memory would grow with each checkpoint.
    """
    ours = dict(environment)
    if sys.platform != "linux":
        return ours
    ours.setdefault("GLIBC_TUNABLES", _RETURNING_MALLOC if large else _MALLOC)
    flags_so_far = ours.get("XLA_FLAGS", "")
    if _WIDE_VECTORS not in flags_so_far and "avx512f" in _instructions(processor()):
        ours["XLA_FLAGS"] = f"{flags_so_far} {_WIDE_VECTORS}=512".strip()
    return ours


def processor() -> str:
    """Return Linux' description of the processor; empty on other systems."""
    said = Path("/proc/cpuinfo")
    return said.read_text(encoding="utf-8") if said.exists() else ""


def multiplies_bfloat16_slowly(said: str) -> bool:
    """Return whether bfloat16 products are no faster than float32's, and much slower if there are many.

    This is True for two kinds of x86 processors. Some have no instruction for bfloat16 products (AVX2 alone, as most
    laptops have, or the first AVX-512), so XLA converts the operands to float32, tile by tile. Others are Intel's with
    AVX-512 BF16 but without a matrix unit (AMX), or with one that a virtual machine hides. XLA uses their instruction,
    which gains nothing.

    Args:
        said: result of `processor`.
    """
    has = _instructions(said)
    if "amx_bf16" in has or not has:  # nothing is known about others than x86
        return False
    return "avx512_bf16" not in has or "GenuineIntel" in said


def _instructions(said: str) -> set[str]:
    """Return the flags of the first core."""
    return set(next((line for line in said.splitlines() if line.startswith("flags")), "").split())
