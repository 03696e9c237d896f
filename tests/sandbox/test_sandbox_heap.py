"""What makes a zygote's memory cheap to fork: new objects side by side. Each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandbox import SandboxPool
from sandbox.libc import LIBC

ROOT = Path(__file__).resolve().parents[2]


def said(code: str, **environment: str) -> dict:
    """What a fresh interpreter prints as JSON."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


GAPS = """
    import json
    from sandbox import heap
    filled = {filled}
    many = [bytes(100) for _ in range(20_000)]
    del many[::28]  # one in each page
    if filled:
        heap.fill_gaps()
    made = [bytes(100) for _ in range(200)]  # 29 to a page
    print(json.dumps({{"pages": len({{id(one) >> 12 for one in made}}), "kept": len(heap._KEPT)}}))
"""


def test_what_is_made_after_the_gaps_are_filled_lies_side_by_side() -> None:
    filled, bare = said(GAPS.format(filled=True)), said(GAPS.format(filled=False))
    assert filled["pages"] <= 200 // 28 + 2 and filled["kept"] >= 20_000 // 28, filled
    assert bare["pages"] > 100, bare


CHUNKS = """
    import json
    from sandbox import heap
    many = [bytes(3_000) for _ in range(400)]
    del many[::2]
    if {filled}:
        heap.fill_gaps()
    end = max(id(one) for one in many)
    print(json.dumps(sum(id(one) < end for one in [bytes(2_000) for _ in range(100)])))
"""


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="for glibc 2.33 and later")
def test_what_is_large_is_made_behind_all_that_there_is() -> None:
    assert said(CHUNKS.format(filled=False)) == 100
    assert said(CHUNKS.format(filled=True)) == 0


def test_with_another_allocator_little_is_taken() -> None:
    assert said(GAPS.format(filled=True), PYTHONMALLOC="malloc")["kept"] * 32 <= 1 << 20


@pytest.mark.skipif(sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11), reason="counted on 3.11")
async def test_a_call_changes_few_pages() -> None:
    """Its cost, counted: each of its faults takes some three microseconds. There were 186, then 150."""
    count = "import resource\ndef f():\n    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
    async with SandboxPool() as pool:
        faults = [(await pool.call(count, "f", {})).value for _ in range(3)]
    assert min(faults) < 180, faults
