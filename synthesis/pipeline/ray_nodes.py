"""The machines of a Ray cluster: where a run's workers are put, and where no more of them are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synthesis.pipeline.ray_worker import WorkerLine


@dataclass
class WorkerSlot:
    """The place of one worker; the actor in it changes when it dies.

    Attributes:
        node: that it was put on; "": Ray chooses.
        actor: None: there is no machine for it at the moment.
        name: of the actor.
        line: to it, once it is ready.
    """

    number: int
    cpus: int
    node: str = ""
    actor: Any = None
    name: str = ""
    line: WorkerLine | None = None
    ready: bool = False
    load: int = 0
    unready_deaths: int = 0
    opening: asyncio.Task[None] | None = field(default=None, repr=False)


class RayNodes:
    """The machines of a cluster as last looked at, and those that workers cannot begin on."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._left_out: set[str] = set()
        self.look()

    def look(self) -> None:
        """Ask the cluster which machines there are, once for all that is started then."""
        self._known: list[dict[str, Any]] = self._ray.nodes()

    def room(self) -> int:
        """For how many workers there is room in all, other programs' aside."""
        return sum(self._cpus().values())

    def choose(self, slot: WorkerSlot, others: Sequence[WorkerSlot]) -> dict[str, Any] | None:
        """Where a worker is put, as Ray's options: on the machine with the most CPUs that no worker of ours has.

        Where none has room, Ray may wait for one (an autoscaler adds it then). None: it would take one that is left
        out.
        """
        free = self._cpus()
        for one in others:
            if one is not slot and one.actor is not None and one.node in free:
                free[one.node] -= one.cpus
        fitting = [node for node in free if not slot.cpus or free[node] >= slot.cpus]
        slot.node = max(fitting, key=lambda node: free[node], default="")
        if slot.node:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            return {"scheduling_strategy": affinity(slot.node, soft=False)}
        return None if self._left_out else {}

    def leave_out(self, node: str) -> str | None:
        """Start nothing there; how it is called, the first time."""
        if not node or node in self._left_out:
            return None
        self._left_out.add(node)
        (name, *_) = [one["NodeManagerHostname"] for one in self._known if one["NodeID"] == node] or [""]
        return f"the machine {name} (node {node})"

    def _cpus(self) -> dict[str, int]:
        alive = [node for node in self._known if node["Alive"] and node["NodeID"] not in self._left_out]
        return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
