"""Self-test that finds the strongest isolation that works here, by attacks and not by reading settings.

| Tier | Layers | Where |
|------|--------|-------|
| A | namespaces, pivoted root, Landlock, seccomp, rlimits | Linux hosts and VMs, as root or as an ordinary user |
| B | Landlock, or namespaces and pivoted root; seccomp, rlimits | a container's default profile, gVisor |
| C | seccomp without any path, rlimits | neither of the two; only preloaded modules can be imported |
| D | rlimits | anything else: no isolation, refused unless asked for |
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.host import SlotClient, SlotError, ZygoteClient
from sandbox.limits import Limits, LockPlan
from sandbox.outcomes import Outcome, SandboxError
from sandbox.request import encode_request

TIERS = ("A", "B", "C", "D")
LAYERS = ("namespaces", "landlock", "seccomp", "own_uid", "cgroup")
"""Layers that can be left out. rlimits and the separate process of each call cannot."""

POLICIES = (*TIERS, "strict")
"""Tiers that may be required as the weakest; "strict" is A."""

ATTACKS = (
    "read_host_files",
    "list_host_directories",
    "write_files",
    "truncate_files",
    "open_sockets",
    "start_process",
    "start_thread",
    "signal_others",
    "raw_system_calls",
    "new_namespaces",
    "trace_parent",
    "raise_limits",
    "share_memory",
    "exhaust_memory",
    "read_environment",
)
"""Functions of `attacks.py`; all must be stopped in tiers A to C."""

ATTACKS_ON_LIMITS = ("exhaust_memory", "read_environment")
"""Attacks that even tier D must stop."""


@dataclass(frozen=True)
class Isolation:
    """Result of the self-test.

    Attributes:
        plan: the strongest plan that worked.
        layers: state of each layer in that plan, by name.
        rejected: why each stronger plan failed.
    """

    plan: LockPlan
    layers: dict[str, str]
    rejected: dict[str, str]


def plans(highest_tier: str = "A", leave_out: Collection[str] = ()) -> Iterator[tuple[str, LockPlan]]:
    """Yield plans with their names, strongest first.

    As root each plan is tried first with a separate user id for each slot, then without. Without a private root another
    user cannot read an interpreter below a private home.

    Args:
        highest_tier: tier to start at.
        leave_out: layers of `LAYERS` that no plan has.
    """
    wanted = {"namespaces", "landlock", "seccomp"} - set(leave_out)
    combinations = [
        {"namespaces", "landlock", "seccomp"},
        {"landlock", "seccomp"},
        {"namespaces", "seccomp"},
        {"seccomp"},
        # Without seccomp the others earn no tier, so this happens only on request.
        wanted if "seccomp" in leave_out else set(),
    ]
    drops = (True, False) if os.geteuid() == 0 and "own_uid" not in leave_out else (False,)
    for layers in combinations:
        tier = _tier(layers)
        if tier < highest_tier or not layers <= wanted:
            continue
        for drop in drops:
            name = f"tier {tier} ({', '.join([*sorted(layers), 'rlimits'])}{', own user ids' if drop else ''})"
            yield (
                name,
                LockPlan(
                    tier=tier,
                    namespaces="namespaces" in layers,
                    landlock="landlock" in layers,
                    seccomp="seccomp" in layers,
                    allow_open=layers != {"seccomp"},
                    drop_uid=drop,
                ),
            )


def _tier(layers: Collection[str]) -> str:
    if "seccomp" not in layers:
        return "D"
    return "CBA"[len(layers) - 1]


def require_tier(tier: str, minimum: str, allow_unisolated: bool, rejected: Mapping[str, str]) -> None:
    """Refuse isolation that is too weak.

    Args:
        tier: the effective tier.
        minimum: one of `POLICIES`.
        allow_unisolated: accept tier D, whatever the minimum.
        rejected: why each stronger plan failed.

    Raises:
        SandboxError: the tier is too weak. The message has the fix.
    """
    wanted = "A" if minimum == "strict" else minimum
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items()) or "no stronger tier was tried"
    if tier == "D" and allow_unisolated:
        return
    if tier == "D":
        raise SandboxError(
            "there is no isolation beyond rlimits (tier D), and untrusted code would run with the rights of whoever "
            "started the sandbox. Use a Linux kernel with seccomp, or set allow_unisolated=True if you trust the code. "
            f"Why not more: {reasons}"
        )
    if tier > wanted:
        raise SandboxError(
            f"isolation here is tier {tier}, minimum_tier asks for {wanted}. Run where the missing layers are allowed, "
            f"or accept less by minimum_tier={tier!r}. Why not more: {reasons}"
        )


async def find_isolation(
    zygote: ZygoteClient, *, highest_tier: str, leave_out: Collection[str], uid: int, seconds: float
) -> Isolation:
    """Try the plans in order; return the first whose slot opens, works, and stops every attack.

    Args:
        zygote: zygote to open slots with.
        highest_tier: tier to start at.
        leave_out: layers that no plan has.
        uid: user id for plans that change it.
        seconds: how long a slot may take to open.

    Raises:
        SlotError: not even tier D works; the message has every plan's reason.
    """
    rejected: dict[str, str] = {}
    source = Path(__file__).with_name("attacks.py").read_text(encoding="utf-8")
    for name, plan in plans(highest_tier, leave_out):
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


async def _first_weakness(slot: SlotClient, plan: LockPlan) -> str | None:
    """Return why this slot does not reach its tier, or None."""
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
    request = encode_request(function, arguments)
    assert isinstance(request, bytes)
    return request
