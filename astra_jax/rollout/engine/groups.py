"""Which sequences that decode begin alike: what they have in common is then read once for some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from astra_jax.rollout.engine.slots import CacheSlot, Shapes, common_prefix

MEMBERS = 4
"""Rows of a group, a static shape. Groups of GRPO are larger, and two groups of the same prompt read it twice; but rows
end one after the other, and those of fewer that are left still fill one."""

_ROW = 512
"""A row costs as much as reading so many positions more, in its matmuls (SmolLM2-135M on two cores: 600 to 900)."""

_GAIN = 0.9
"""What it has to cost at most of what rows by themselves do: it has programs of its own."""


class Grouped(NamedTuple):
    """Rows in groups of `MEMBERS`, as `device_steps.decode` takes them.

    Attributes:
        rows: how many the program has.
        placed: rows, and whose they are.
        alike_g: how many positions each group has alike.
        alike_window: holds those.
        window: holds what each row has behind those, with what a call draws.
    """

    rows: int
    placed: list[tuple[int, CacheSlot]]
    alike_g: np.ndarray
    alike_window: int
    window: int


@dataclass
class _Family:
    """Slots that begin as the first one does, `alike` positions at least."""

    slots: list[CacheSlot]
    alike: int


def grouped(ready: Sequence[CacheSlot], shapes: Shapes) -> Grouped | None:
    """How to decode some slots in groups; None: by themselves they cost about as little.

    Each sequence joins the family with which it has most in common, if that is half of what is cached of it, and nearly
    all that the family has in common already: prompts of several groups begin alike too.
    """
    if not shapes.shares or len(ready) < 2 * MEMBERS:
        return None
    parts = [
        (family.slots[i : i + MEMBERS], family.alike)
        for family in _families(ready)
        for i in range(0, len(family.slots), MEMBERS)
    ]
    if len(parts) * MEMBERS > shapes.slots:
        return None
    rows = shapes.decode_rows_for(len(parts) * MEMBERS)
    if rows % MEMBERS:
        return None
    ends = shapes.decode_chunk - 1

    def with_window(alike_window: int) -> tuple[int, Grouped]:
        """Up to so many positions of what each group has alike, and what that costs."""
        counts = [min(alike, alike_window) for _, alike in parts]
        longest = max(slot.length + ends - n for (slots, _), n in zip(parts, counts, strict=True) for slot in slots)
        window = shapes.power_for(longest)
        alike_g = np.zeros(rows // MEMBERS, np.int32)
        # Behind what is alike there must be room for the window.
        alike_g[: len(parts)] = [min(n, shapes.max_length - window) for n in counts]
        spent = rows * (window + _ROW) + len(alike_g) * alike_window
        return spent, Grouped(rows, placed, alike_g, alike_window, window)

    placed = [(MEMBERS * i + j, slot) for i, (slots, _) in enumerate(parts) for j, slot in enumerate(slots)]
    spent, best = min(map(with_window, shapes.powers), key=lambda one: one[0])
    alone = shapes.decode_rows_for(len(ready)) * (shapes.window_for(max(slot.length for slot in ready) + ends) + _ROW)
    return best if spent <= _GAIN * alone else None


def _families(ready: Sequence[CacheSlot]) -> list[_Family]:
    families: list[_Family] = []
    for slot in ready:
        cached = slot.ids[: slot.cached]
        best, most = None, 0
        for family in families:
            first = family.slots[0]
            alike = min(common_prefix(first.ids[: first.cached], cached), family.alike)
            if alike > most and (len(family.slots) == 1 or 4 * alike >= 3 * family.alike):
                best, most = family, alike
        if best is not None and 2 * most >= slot.cached:
            best.slots.append(slot)
            best.alike = most
        else:
            families.append(_Family([slot], slot.cached))
    return families
