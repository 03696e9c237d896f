"""Finds the strongest isolation that holds here, by attack rather than by reading settings, and names it.

| Tier | Layers | Where |
|------|--------|-------|
| A | namespaces, pivoted root, Landlock, seccomp, rlimits | Linux hosts and VMs, as root or as an ordinary user |
| B | Landlock, seccomp, rlimits | containers whose profile refuses namespaces (Kubernetes' default) |
| C | seccomp without any path, rlimits | kernels without Landlock; only preloaded modules can be imported |
| D | rlimits | anything else: no isolation, refused unless asked for |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.host import Slot, SlotError, Zygote
from sandbox.outcomes import Outcome
from sandbox.protocol import Limits, Plan

TIERS = ("A", "B", "C", "D")

ATTACKS = (
    "read_host_files",
    "list_host_directories",
    "write_files",
    "open_sockets",
    "start_process",
    "start_thread",
    "signal_others",
    "raw_system_calls",
    "new_namespaces",
    "trace_parent",
    "raise_limits",
    "exhaust_memory",
    "read_environment",
)
"""Functions of `attacks.py`; all must be stopped in tiers A to C."""

ATTACKS_ON_LIMITS = ("exhaust_memory", "read_environment")
"""What even tier D must stop."""


@dataclass(frozen=True)
class Isolation:
    """What the self-test found.

    Attributes:
        plan: the strongest plan that held.
        layers: each layer's state in that plan, by name.
        rejected: why each stronger plan did not hold.
    """

    plan: Plan
    layers: dict[str, str]
    rejected: dict[str, str]


def plans(highest_tier: str = "A") -> Iterator[tuple[str, Plan]]:
    """Plans with their names, strongest first.

    As the superuser each is tried with a user id of its own for each slot, then without: an interpreter below a private
    home cannot be read by another user where there is no private root to put it in.
    """
    drops = (True, False) if os.geteuid() == 0 else (False,)
    for tier in TIERS[TIERS.index(highest_tier) :]:
        for drop in drops:
            name = f"tier {tier}{', own user ids' if drop else ''}"
            yield (
                name,
                Plan(
                    tier=tier,
                    namespaces=tier == "A",
                    landlock=tier in "AB",
                    seccomp=tier in "ABC",
                    allow_open=tier in "ABD",
                    drop_uid=drop,
                ),
            )


async def find_isolation(zygote: Zygote, *, highest_tier: str, uid: int, seconds: float) -> Isolation:
    """Try the plans in order; return the first whose slot opens, works, and stops every attack.

    Args:
        zygote: to open slots with.
        highest_tier: where to begin.
        uid: for plans that change the user id.
        seconds: how long a slot may take to open.

    Raises:
        SlotError: not even tier D works; the message has every plan's reason.
    """
    rejected: dict[str, str] = {}
    source = Path(__file__).with_name("attacks.py").read_text(encoding="utf-8")
    for name, plan in plans(highest_tier):
        try:
            slot = await zygote.open_slot(plan, Limits(), uid, seconds)
        except SlotError as error:
            rejected[name] = str(error)
            continue
        try:
            await slot.load(source)
            reason = await _first_weakness(slot, plan)
        except SlotError as error:
            reason = str(error)
        finally:
            slot.close()
        if reason is None:
            return Isolation(plan, slot.layers, rejected)
        rejected[name] = reason
    raise SlotError("; ".join(f"{name}: {reason}" for name, reason in rejected.items()))


async def _first_weakness(slot: Slot, plan: Plan) -> str | None:
    """Why this slot does not deserve its tier, or None."""
    controls: dict[str, tuple[dict[str, int], object]] = {"innocent": ({"left": 2, "right": 3}, {"sum": 5})}
    if plan.allow_open:
        controls["lazy_import"] = ({}, "read")
    for name, (arguments, expected) in controls.items():
        result = await slot.call(_request(name, arguments))
        if result.value != expected:
            return f"{name} does not work: {result.kind} {result.error or result.value}"
    for name in ATTACKS if plan.seccomp else ATTACKS_ON_LIMITS:
        result = await slot.call(_request(name, {}))
        if result.kind is not Outcome.OK:
            return f"{name}: {result.kind}: {result.error}"
        if result.value is not None:
            return f"{name}: {result.value}"
    return None


def _request(function: str, arguments: dict[str, int]) -> bytes:
    return json.dumps({"function": function, "seed": 0, "arguments": arguments}).encode()
