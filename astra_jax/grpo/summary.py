"""Table of a GRPO run's tasks, steps and outputs, printed before the first step."""

from __future__ import annotations

from astra_jax.grpo.config import GRPOConfig
from astra_jax.run.summary import FEWEST_STEPS, RunSummary, interval_warnings, times


def summarise(config: GRPOConfig, read: int, used: int, held_out: int) -> RunSummary:
    """Make the table of a run.

    Args:
        read: tasks that were given.
        used: tasks that `config.solve_rates` selects.
        held_out: tasks to evaluate on.
    """
    steps, groups, size = config.steps, config.batch_size, config.group_size
    rows = [("tasks", f"{read:,} read, {read - used:,} dropped, {used:,} used")]
    alarm = ""
    if dropped := read - used:
        reason = f"{dropped:,} have a solve rate outside solve_rates={config.solve_rates}"
        rows.append(("dropped", reason))
        alarm = f"{dropped:,} of {read:,} tasks are dropped: {reason}" if dropped * 2 > read else ""
    rows += [
        ("steps", f"{steps:,}: at least {steps * groups / used:.3g} passes over the tasks"),
        ("a step", f"{groups:,} groups whose rewards differ, of {size} episodes each: {groups * size:,} episodes"),
    ]
    intervals = {"checkpoint_every": config.checkpoint_every}
    if held_out:
        count = 1 + (times(steps, config.eval_every) if config.eval_every else 1)
        rows.append(("evaluations", f"{count:,}, each of {held_out:,} held-out tasks"))
        intervals |= {"eval_every": config.eval_every} if config.eval_every else {}
    else:
        rows.append(("evaluations", "none: there are no held-out tasks"))
    rows.append(("checkpoints", f"{times(steps, config.checkpoint_every):,}"))
    few = f"{steps} steps are fewer than {FEWEST_STEPS}: raise --config.grpo.steps"
    warnings = [few] if steps < FEWEST_STEPS else []
    return RunSummary(tuple(rows), alarm, (*warnings, *interval_warnings("grpo", steps, intervals)))
