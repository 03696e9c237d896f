"""Settings that were changed when a run resumed: recorded in the workdir, and printed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from astra_jax.base.progress import log_above_progress
from astra_jax.run.config import TrainingConfig
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import check_same_run, resume_changes
from astra_jax.run.optimizers import learning_rate
from astra_jax.run.record import write_changes


class ResumedSettings:
    """Settings of a run compared with the checkpoint that it resumes from.

    Args:
        loop: `sft` or `grpo`.
        identity: of this run, see `identity.run_identity`.

    Attributes:
        changes: all changes of the run so far: the step, the setting, and its values before and after.
    """

    def __init__(
        self, loop: str, config: TrainingConfig, steps: int, identity: Mapping[str, Any], folder: epath.Path
    ) -> None:
        self._loop, self._config, self._steps, self._identity, self._folder = loop, config, steps, identity, folder
        self._changed: dict[str, tuple[Any, Any]] = {}
        self.changes: list[dict[str, Any]] = []

    def check(self, saved: Mapping[str, Any]) -> None:
        """Check that a checkpoint belongs to this run.

        Args:
            saved: the identity in the checkpoint.

        Raises:
            WorkdirError: a setting differs that must not change.
        """
        changed = resume_changes(saved, self._identity)
        same = {name: value for name, value in saved.items() if name not in changed}
        same |= {name: now for name, (_, now) in changed.items() if name in self._identity}
        check_same_run(same, self._identity, self._folder, weights=self._folder / "checkpoints")
        self._changed = changed

    def record(self, step: int, extra: Mapping[str, Any]) -> None:
        """Record and print the settings that differ from those of the checkpoint of `step`.

        Args:
            extra: the checkpoint's data besides arrays.
        """
        changed = dict(self._changed) if step < self._steps else {}  # a finished run does not use them
        name = f"{self._loop}.steps"
        planned, _ = changed.pop(name, (None, None))
        planned = extra.get("steps", planned)  # the identity has it only if the learning rate is not constant
        if step < self._steps and planned not in (None, self._steps):
            changed[name] = (planned, self._steps)
        new = [{"step": step, "setting": one, "before": old, "now": now} for one, (old, now) in changed.items()]
        self.changes = [*extra.get("changes", []), *new]
        if new and is_first():
            write_changes(self._folder, self.changes)
            for one in new:
                line = f"from step {step + 1} on: {one['setting']} is {one['now']}, it was {one['before']}"
                log_above_progress(self._extension(step, changed) if one["setting"] == name else line)

    def _extension(self, step: int, changed: Mapping[str, tuple[Any, Any]]) -> str:
        """Describe a changed number of steps, and the learning rate, whose schedule spans the new number."""
        planned, steps = changed[f"{self._loop}.steps"]
        schedule = ("learning_rate", "warmup_fraction", "final_fraction")
        past = {one: changed[f"{self._loop}.{one}"][0] for one in schedule if f"{self._loop}.{one}" in changed}
        before = learning_rate(dataclasses.replace(self._config, **past), planned)(step - 1)
        return (
            f"{'extended' if planned < steps else 'shortened'} from {planned} to {steps} steps: the learning rate "
            f"continues at {float(learning_rate(self._config, steps)(step)):.3g}, on its schedule over {steps} steps; "
            f"in step {step} it was {float(before):.3g}"
        )
