"""Keys of finished work: which stages a changed setting repeats, and stages of the user's own."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from astra_jax.base.errors import InputError
from astra_jax.base.former_settings import FORMER_SYNTHESIS_SETTINGS
from astra_jax.base.settings import declared
from synthesis.core.stages import Journal
from synthesis.environments import pipeline as environments
from synthesis.environments.config import EnvironmentsConfig
from synthesis.pipeline.context import Context
from synthesis.pipeline.own_stages import load_own_stages
from synthesis.pipeline.pipeline_run import PipelineRun, resolved
from synthesis.pipeline.stage_keys import DeclaredSettings, StageSpec, digest_of, free_settings, growing_settings
from synthesis.trajectories import pipeline as trajectories
from synthesis.trajectories.config import TrajectoriesConfig

TRACKS: dict[type, tuple[StageSpec[Any, Any], ...]] = {
    EnvironmentsConfig: environments.STAGES,
    TrajectoriesConfig: trajectories.STAGES,
}


@pytest.mark.parametrize("kind", TRACKS)
def test_a_changed_setting_repeats_the_stages_that_declare_it(kind: type) -> None:
    settings = resolved(kind())

    def prints(changed: dict[str, Any]) -> dict[str, str]:
        return {one.label: one.fingerprint(changed, 0, {"name": "t"}) for one in TRACKS[kind]}

    before = prints(settings)
    for name in declared(kind):
        after = prints({**settings, name: "another"})
        repeated = {label for label, digest in before.items() if digest != after[label]}
        assert repeated == {one.label for one in TRACKS[kind] if name in one.reads}, name
    for one in TRACKS[kind]:
        assert {*one.reads} <= declared(kind).keys() - free_settings(kind) - growing_settings(kind)
        assert one.fingerprint(settings, 1, {"name": "t"}) != before[one.label]
        assert one.fingerprint(settings, 0, {"name": "u"}) != before[one.label]


def test_a_stage_reads_declared_and_free_settings_alone() -> None:
    stage = StageSpec("a", environments.Draft, str, ("partition_salt", "held_out_entities", "held_out_questions"))
    config = EnvironmentsConfig(concurrency=7)
    found: Any = DeclaredSettings(config, stage, free_settings(EnvironmentsConfig))
    assert (found.concurrency, found.partition_salt) == (7, "astra")
    with pytest.raises(InputError, match="stage a reads the setting split_by, which it does not declare"):
        assert found.partition
    stage = dataclasses.replace(stage, reads=(*stage.reads, "split_by"))
    assert DeclaredSettings(config, stage, ()).partition == config.partition
    with pytest.raises(AttributeError):
        assert found.nonsense


class Item(msgspec.Struct, frozen=True):
    id: str
    words: int = 0


def item_id(item: Item) -> str:
    return item.id


MAKE = StageSpec("make", Item, str, id=item_id)
PLAIN = StageSpec("plain", Item, str)
MINE = """
from synthesis.core.stages import Rejected

async def short(item, context):
    if item.words > context.config.limit:
        raise Rejected("long", item.id)
    return [item]

short.reads = ("limit",)

async def undeclared(item, context):
    return [item] * context.config.limit

async def twice(item, context):
    return [item, item]

async def nothing(item, context):
    return None

async def leaves(item, context):
    raise SystemExit(0)

def plain(item, context):
    return [item]

async def unknown(item, context):
    return [item]

unknown.reads = ("size",)
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    own_stages: Any = dataclasses.field(default_factory=dict)
    limit: int = 3
    other: int = 0
    attempts: int = 1


def test_a_fingerprint_omits_what_runs_of_before_a_setting_had() -> None:
    stage = StageSpec("a", Item, str, ("limit", "other"), undeclared={"limit": 3})

    def digest(stage: StageSpec[Any, Any], value: int = 3, **earlier: int) -> str:
        return stage.fingerprint({"limit": value, "other": 0}, 0, {}, earlier=earlier)

    before = digest(dataclasses.replace(stage, reads=("other",)))
    assert digest(stage) == before != digest(stage, 4)
    assert digest(stage, limit=4) == before != digest(stage, 4, limit=4)
    assert digest(stage, other=0) == digest(dataclasses.replace(stage, reads=())) != digest(stage, other=1)
    assert digest(dataclasses.replace(stage, code="edited")) != digest(stage)
    former, today = next(iter(FORMER_SYNTHESIS_SETTINGS.items()))
    renamed = dataclasses.replace(stage, reads=(today,))
    assert renamed.fingerprint({today: 7}, 0, {}) == digest_of([{former: 7}, 0, {}])


class Run:
    """A run of one stage and the user's own after it; counts the calls of ours."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.py"
        self.file.write_text(MINE)
        self.journal = folder / "journal.sqlite"
        self.made = 0

    async def __call__(self, *names: str, **settings: int) -> tuple[list[str], dict[str, int]]:
        async def make(number: int, context: Any) -> list[Item]:
            self.made += 1
            return [Item(f"item-{number}", number)]

        config = Limits({"make": tuple(f"{self.file}:{name}" for name in names)}, **settings)
        executor: Any = SimpleNamespace(teacher=SimpleNamespace(), costs={}, records_at_once=lambda wanted: wanted)
        context: Any = Context(config, executor.teacher, None, 0)  # type: ignore[arg-type]
        with Journal(self.journal) as journal:
            pipeline: Any = PipelineRun(
                executor, context, journal, self.file.parent, config=config, concurrency=4, seed=0, stages=(MAKE, PLAIN)
            )
            found = [one.id for one in await pipeline.stage(MAKE, make, range(6))]
        return found, pipeline.summary.rejected.get(f"make+{self.file}:short", {})


async def test_own_stages_come_after_ours_and_run_again_when_they_change(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert await run("short") == ([f"item-{number}" for number in range(4)], {"long": 2})
    assert run.made == 6
    assert await run("short", limit=1) == (["item-0", "item-1"], {"long": 4})
    assert await run("short", limit=1, other=1) == (["item-0", "item-1"], {"long": 4})
    assert (await run())[0] == [f"item-{number}" for number in range(6)] and run.made == 6
    rows = sqlite_stages(run.journal)
    run.file = tmp_path / "edited.py"  # a loaded module is not read again
    run.file.write_text(MINE.replace("> context", ">= context"))
    assert (await run("short"))[0] == ["item-0", "item-1", "item-2"]
    assert (run.made, len(sqlite_stages(run.journal)) - len(rows)) == (6, 1)


def sqlite_stages(path: Path) -> set[str]:
    return {row[0] for row in sqlite3.connect(path).execute("SELECT stage FROM done")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undeclared", "mine.py:undeclared reads the setting limit, which it does not declare"),
        ("twice", "mine.py:twice returned two records with the id item-0; give each its own"),
        ("nothing", "mine.py:nothing returned None; return a list of Item records"),
        ("leaves", "mine.py:leaves raised SystemExit: 0"),
        ("plain", "mine.py:plain is <function plain"),
        ("unknown", "mine.py:unknown reads the setting 'size', which does not exist"),
        ("nobody", "mine.py has no nobody"),
    ],
)
async def test_what_is_no_stage_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        await Run(tmp_path)(name)


def test_stages_that_none_of_ones_own_can_follow_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="own_stages: no stage 'plain' that yours can follow; there are make"):
        load_own_stages({"plain": ["mine:short"]}, [MAKE, PLAIN], ())


def test_trajectories_leave_out_by_default_what_environments_hold_out() -> None:
    assert TrajectoriesConfig().partition == EnvironmentsConfig().partition
