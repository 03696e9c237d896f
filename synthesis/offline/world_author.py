"""The offline teacher's worlds with state: a sampler over packaged ones, all of them proven when they were made.

`worlds.jsonl.gz` has a line about the file, then one for each kind of world, such as a library: its tables, tools and
code, and its worlds. A world is rows and the tasks over them.
"""

from __future__ import annotations

import functools
import gzip
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from astra_jax.base.typed import decode_json
from synthesis.core.records import Language
from synthesis.environments.dependency_graph import signature_of
from synthesis.environments.teacher_answers import ToolDocumentAnswer, WorldAnswer, WorldRow, WorldStep, WorldTable
from synthesis.pipeline.partition import Partition, Split

WORLDS = Path(__file__).with_name("worlds.jsonl.gz")


class _Task(msgspec.Struct, frozen=True):
    question: str
    sub_questions: list[WorldStep]


class _World(msgspec.Struct, frozen=True):
    rows: list[WorldRow]
    tasks: list[_Task]


class _Kind(msgspec.Struct, frozen=True):
    domain: str
    tables: list[WorldTable]
    tools: list[ToolDocumentAnswer]
    code: str
    open: list[str]
    worlds: list[_World]


class PackagedTask(NamedTuple):
    """A task with its world, and what decides the split that it is in."""

    kind: _Kind
    world: _World
    task: _Task
    signature: str
    entities: list[str]

    def answer(self) -> WorldAnswer:
        """The whole world, as the teacher is asked for it."""
        kind, task = self.kind, self.task
        return WorldAnswer(
            task.question,
            kind.domain,
            kind.tables,
            self.world.rows,
            kind.tools,
            kind.code,
            task.sub_questions,
            kind.open,
        )


@functools.cache
def packaged_tasks() -> tuple[PackagedTask, ...]:
    """Every task of the packaged worlds, in the order of the file."""
    _, *lines = gzip.decompress(WORLDS.read_bytes()).splitlines()
    return tuple(
        PackagedTask(kind, world, task, signature_of(task.sub_questions), task.sub_questions[0].subjects)
        for kind in (decode_json(line, _Kind) for line in lines)
        for world in kind.worlds
        for task in world.tasks
    )


def _world(variables: Mapping[str, Any], language: Language, rng: random.Random) -> WorldAnswer:
    """A world and a task whose structure and entities all lie in the wanted split."""
    if language != "en":
        raise ValueError(f"there are worlds in English only, not in {language}")
    partition: Partition = variables["partition"]
    split: Split = variables["split"]
    tasks = [
        one
        for one in packaged_tasks()
        if variables["domain"] in ("", one.kind.domain)
        and (partition.by == "source" or partition.split(one.entities, one.signature) == split)
    ]
    if not tasks:
        raise ValueError(f"no world of domain {variables['domain']!r} has a task in the split {split}")
    # Each kind of world as often as any other, however many of its tasks are in the split.
    domain = rng.choice(sorted({one.kind.domain for one in tasks}))
    return rng.choice([one for one in tasks if one.kind.domain == domain]).answer()


HANDLERS = {"WorldAnswer": _world}
"""Rules by answer type, for `synthesis.offline.teacher.OfflineTeacher`."""
