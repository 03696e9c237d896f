"""Nothing of another call is left in a call's memory: neither what it was asked nor what it returned or printed."""

from __future__ import annotations

import asyncio
import textwrap

import pytest

from sandbox import SandboxConfig, SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = textwrap.dedent(
    '''
    import ctypes, errno

    LIBC, PAGE = ctypes.CDLL(None, use_errno=True), 4096

    def say(secret, size=0, seconds=0):
        print(secret)
        total = 0
        for i in range(int(seconds * 2e7)):
            total += i
        return [secret, "x" * size]

    def read(address):
        """A page at any address, b"" where there is none: the kernel says so of a path that it cannot read."""
        LIBC.access(ctypes.c_void_p(address), 0)
        return b"" if ctypes.get_errno() == errno.EFAULT else ctypes.string_at(address, PAGE)

    def search(reversed_secret, own=False):
        """Where the secret is in this process's memory: on the heap, and in what surrounds Python's objects."""
        wanted = reversed_secret.encode()
        LIBC.sbrk.restype = ctypes.c_void_p
        keep = wanted[::-1] if own else None
        found, pages, end = [], 0, LIBC.sbrk(0) & -PAGE
        around = [id(one) & -PAGE for one in (object(), {}, "".join(["a", "b"]))]
        spans = [(end - (64 << 20), end)] + [(one - (16 << 20), one + (16 << 20)) for one in around]
        for start, stop in spans:
            for address in range(start, stop, PAGE):
                page = read(address)
                pages += bool(page)
                # Compared backwards, so that the search does not find what it searches with.
                if page and wanted in page[::-1]:
                    found.append(hex(address))
        return {"pages": pages, "found": found}
    '''
)
SECRET = "the secret of another episode, 7f3a9c51"


@pytest.mark.parametrize("size", [0, 200_000])
async def test_no_call_finds_what_another_one_was_asked_or_returned(size: int) -> None:
    # One slot for all; the search reads its memory by ctypes, which validation would not let a tool import.
    async with SandboxPool(SandboxConfig(max_slots=1, spare_slots=0, concurrency=1)) as pool:
        for _ in range(5):
            assert (await pool.call(TOOL, "say", {"secret": SECRET, "size": size})).value[0] == SECRET
        result = await pool.call(TOOL, "search", {"reversed_secret": SECRET[::-1]})
        assert result.value["pages"] > 1000 and result.value["found"] == []


async def test_not_even_of_calls_that_run_at_the_same_time() -> None:
    async with SandboxPool(SandboxConfig(max_slots=4, concurrency=4)) as pool:
        await pool.call(TOOL, "say", {"secret": "none"})
        others = [
            asyncio.create_task(pool.call(TOOL, "say", {"secret": SECRET, "size": 200_000, "seconds": 0.1}))
            for _ in range(12)
        ]
        search = await pool.call(TOOL, "search", {"reversed_secret": SECRET[::-1]})
        assert search.value["found"] == [], search
        assert all(result.value[0] == SECRET for result in await asyncio.gather(*others))


async def test_a_call_does_find_its_own() -> None:
    """That the search can find something."""
    async with SandboxPool() as pool:
        result = await pool.call(TOOL, "search", {"reversed_secret": SECRET[::-1], "own": True})
        assert result.value["found"]
