"""What a tool finds loaded: little, what it names, and the rest where it asks for it."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandbox import PastCall, SandboxConfig, SandboxEpisode, SandboxPool
from sandbox.modules import ALWAYS, ON_DEMAND, PRELOADED

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = textwrap.dedent(
    f"""
    import sys

    OPENED = []

    def hear(event, given):
        if event == "open":
            OPENED.append(str(given[0]))

    def found():
        loaded = sorted(name for name in {PRELOADED!r} if name in sys.modules)
        return {{"opened": OPENED, "loaded": loaded}}

    def by_name(module):
        sys.addaudithook(hear)
        __import__(module)
        return found()
    """
)
FROM_PACKAGES = """
def import_parts():
    sys.addaudithook(hear)
    from xml.etree import ElementTree
    from urllib import parse
    return OPENED
"""
IMPORT_ALL = "\ndef import_all():\n    sys.addaudithook(hear)\n{}    return found()\n".format(
    "".join(f"    import {name}\n" for name in PRELOADED)
)
PARSE_A_DATE = textwrap.dedent(
    """
    import datetime

    def parse(text):
        sys.addaudithook(hear)
        return [str(datetime.datetime.strptime(text, "%Y-%m-%d")), OPENED]
    """
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(minimum_tier="B")) as pool:
        yield pool


async def test_what_a_tool_names_is_loaded_before_its_calls(pool: SandboxPool) -> None:
    result = await pool.call(LOOK + IMPORT_ALL, "import_all", {})
    assert result.value == {"opened": [], "loaded": sorted(PRELOADED)}


async def test_a_part_of_a_package_is_named_by_its_parts(pool: SandboxPool) -> None:
    assert (await pool.call(LOOK + FROM_PACKAGES, "import_parts", {})).value == []


async def test_what_it_does_not_name_is_no_part_of_them(pool: SandboxPool) -> None:
    loaded = set((await pool.call(LOOK, "found", {})).value["loaded"])
    assert loaded >= set(ALWAYS) and not loaded & {"dataclasses", "decimal", "hashlib", "inspect", "pathlib", "typing"}


@pytest.mark.parametrize("name", ["decimal", "dataclasses", "typing"])
async def test_what_only_a_call_knows_of_is_read_by_the_call(pool: SandboxPool, name: str) -> None:
    found = (await pool.call(LOOK, "by_name", {"module": name})).value
    assert name in ON_DEMAND and name in found["loaded"] and found["opened"]


async def test_functions_find_what_they_import_themselves(pool: SandboxPool) -> None:
    result = await pool.call(LOOK + PARSE_A_DATE, "parse", {"text": "2026-01-02"})
    assert result.value == ["2026-01-02 00:00:00", []]


async def test_what_one_call_needs_changes_nothing_for_another(pool: SandboxPool) -> None:
    """A call that repeats others needs more of the standard library; those after it find what those before it found."""
    before = (await pool.call(LOOK, "found", {})).value
    episode = SandboxEpisode(pool, LOOK)
    for _ in range(3):
        assert (await episode.call("found", {})).ok
    past = PastCall("found", {}, episode.history[0].digest, 0.5)
    assert (await pool.call(LOOK, "found", {}, history=[past])).ok
    assert (await pool.call(LOOK, "found", {})).value == before


async def test_where_no_file_can_be_read_all_of_it_is_there() -> None:
    async with SandboxPool(SandboxConfig(leave_out=("namespaces", "landlock"), spare_slots=0)) as pool:
        assert pool.tier == "C"
        for name in ON_DEMAND:
            result = await pool.call(LOOK, "by_name", {"module": name})
            assert result.value == {"opened": [], "loaded": sorted(PRELOADED)}
