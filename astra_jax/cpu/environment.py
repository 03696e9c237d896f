"""What a process on CPUs is started with. Imports no jax."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

_MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.top_pad=268435456:"
    "glibc.malloc.trim_threshold=20000000000"
)
_RETURNING_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
"""32 MiB, glibc's most: what is as large is mapped by itself, and given back when it is freed. What is smaller is kept,
up to the 64 MiB that a thread's heap has: where the first threshold alone is set, glibc gives back all but 128 KiB at a
heap's end whenever something is freed, and a matmul has its packed weights there (SmolLM2-135M, a token of each of 16
rows that see 256 positions: 90 ms, and 53 with both)."""
_WIDE_VECTORS = "--xla_cpu_prefer_vector_width"


def cpu_environment(environment: Mapping[str, str], *, large: bool = False) -> dict[str, str]:
    """`environment` with what makes XLA's CPU backend fast on Linux, where the user has not set it otherwise.

    GLIBC_TUNABLES: a malloc that keeps what it is given. XLA allocates its temporaries anew each step, and by default
        glibc maps and unmaps them: a training step of the quickstart's model spends a fifth of its time in page faults
        (327 ms against 273 ms).
    XLA_FLAGS: vectors as wide as the processor's where it has AVX-512; XLA's default is half of that (a step of 29
        million parameters takes 3.1 s against 3.6 s).

    Args:
        large: for models of 100 million parameters and more, of which single arrays have 100 MB: malloc gives those
            back. Kept, they leave holes that the next ones do not fit into, and memory grows with each checkpoint.
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
    """What Linux says of it; elsewhere nothing."""
    said = Path("/proc/cpuinfo")
    return said.read_text(encoding="utf-8") if said.exists() else ""


def multiplies_bfloat16_slowly(said: str) -> bool:
    """Whether bfloat16 products are no faster than float32's, and much slower where they are many.

    Of processors with x86's instructions, those without one for bfloat16 products (AVX2 alone, as most laptops have, or
    the first AVX-512), for which XLA makes float32 of the operands, tile by tile; and Intel's with AVX-512 BF16 where
    there is no matrix unit (AMX), or a virtual machine hides it: their instruction, which XLA uses, gains nothing.

    Args:
        said: what `processor` returns.
    """
    has = _instructions(said)
    if "amx_bf16" in has or not has:  # of others than x86 nothing is known
        return False
    return "avx512_bf16" not in has or "GenuineIntel" in said


def _instructions(said: str) -> set[str]:
    """Flags of the first core."""
    return set(next((line for line in said.splitlines() if line.startswith("flags")), "").split())
