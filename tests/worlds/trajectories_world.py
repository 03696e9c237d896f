"""What tests of the stages of trajectory synthesis hand to them."""

from __future__ import annotations

from typing import Any

from synthesis.offline.teacher import OfflineTeacher
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.context import TrajectoryContext
from synthesis.trajectories.execution import ToolExecutor


def context(
    teacher: Any = None, *, sandbox: Any = None, connections: Any = None, executor: Any = None, seed: int = 0,
    **config: Any,
) -> TrajectoryContext:  # fmt: skip
    """A context; stages that call no tool need neither sandbox nor connections. By default nothing is held out."""
    teacher = teacher or OfflineTeacher()
    executor = executor or ToolExecutor(sandbox=sandbox, connections=connections, teacher=teacher, seed=seed)
    return TrajectoryContext(
        TrajectoriesConfig(**{"partition": None, **config}),
        teacher,
        sandbox,
        seed,
        connections=connections,
        executor=executor,
    )
