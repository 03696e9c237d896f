"""The offline teacher's worlds with state: one of ten, and a task in it that lies in the wanted split."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from synthesis.core.records import Language
from synthesis.environments.teacher_answers import WorldAnswer
from synthesis.offline.worlds.accounts import BANK, SHOP
from synthesis.offline.worlds.appointments import CALENDAR, CLINIC, RESTAURANT
from synthesis.offline.worlds.drawing import drawn_world, signature
from synthesis.offline.worlds.holdings import LIBRARY, TODO, WAREHOUSE
from synthesis.offline.worlds.places import COURSES, GARAGE
from synthesis.pipeline.partition import Partition, Split

WORLDS = (LIBRARY, RESTAURANT, TODO, WAREHOUSE, BANK, CLINIC, CALENDAR, SHOP, GARAGE, COURSES)


def _world(variables: Mapping[str, Any], language: Language, rng: random.Random) -> WorldAnswer:
    if language != "en":
        raise ValueError(f"there are worlds in English only, not in {language}")
    partition: Partition = variables["partition"]
    split: Split = variables["split"]
    by_source = partition.by == "source"
    tasks = [
        (world, task)
        for world in WORLDS
        if variables["domain"] in ("", world.name)
        for task in world.tasks
        if by_source or partition.split_of_signature(signature(world, task)) == split
    ]
    if not tasks:
        raise ValueError(f"no world of domain {variables['domain']!r} has a task in the split {split}")
    # Every world as often as any other, however many tasks it has.
    name = rng.choice(sorted({world.name for world, _ in tasks}))
    world, task = rng.choice([one for one in tasks if one[0].name == name])
    return drawn_world(world, task, lambda entity: by_source or partition.split_of_entity(entity) == split, rng)


HANDLERS = {"WorldAnswer": _world}
"""Rules by answer type, for `synthesis.offline.teacher.OfflineTeacher`."""
