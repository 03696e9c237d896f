"""Forecast of the number of records in each stage of a whole run, from the rates of a preview."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import count

from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.task_sampler import wanted_tasks


def small(config: TrajectoriesConfig, records: int) -> TrajectoriesConfig:
    """Return the configuration with a preview's number of tasks to write."""
    fewer = (dataclasses.replace(config, trajectories=one) for one in count(1))
    return next(one for one in fewer if wanted_tasks(one) >= records)


def expected(config: TrajectoriesConfig, rates: Mapping[str, float], inputs: Mapping[str, int]) -> dict[str, float]:
    """Return the number of inputs of each stage, and under "" the number of trajectories.

    A chain is verified once, for however many tasks. So this overestimates a run that samples many chains repeatedly.

    Args:
        config: of the whole run.
        rates: the share of its inputs that each stage passes.
        inputs: of each stage in the preview.
    """
    tasks = float(wanted_tasks(config))
    written = tasks * rates.get("tasks", 1.0)
    chosen = written * config.augmented if config.augmentations else 0.0
    rated = written + chosen * rates.get("augment", 1.0)
    most = math.ceil(config.trajectories * (1 + config.oversample_ratio / 2))
    runs = min(most, rated * rates.get("score", 1.0))
    ended = runs * rates.get("interact", 1.0)
    # Only conversations of several turns have a user to judge.
    seen = inputs.get("interact", 0) * rates.get("interact", 1.0)
    users = ended * min(1.0, inputs.get("user", 0) / seen) if seen else 0.0
    judged = ended - users + users * rates.get("user", 1.0)
    return {
        "propose": inputs.get("propose", 0),
        "verify": tasks * inputs.get("verify", 0) / max(1, inputs.get("tasks", 1)),
        "tasks": tasks,
        "augment": chosen,
        "score": rated,
        "interact": runs,
        **({"user": users} if config.behaviours else {}),
        "judge": judged,
        "": min(config.trajectories, judged * rates.get("judge", 1.0)),
    }
