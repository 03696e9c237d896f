"""Hooks: code that runs at fixed points of a training loop.

Write a class, and name it with `--hooks=my_module:MyHook` (or pass an instance to `train`):

    class StopWhenSolved(Hook):
        hosts = "all"  # every host must stop at the same step

        def after_update(self, run, state, batch, row):
            if row.get("rollout/reward", 0.0) > 0.95:
                run.stop()

The loops call the hooks in their order, the loop's own first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import first_line
from astra_jax.base.progress import log_above_progress
from astra_jax.run.hosts import is_first
from synthesis.core.references import referred

if TYPE_CHECKING:
    from etils import epath

    from astra_jax.models.model import Model
    from astra_jax.run.checkpoints import Checkpointer
    from astra_jax.run.config import TrainingConfig
    from astra_jax.run.metrics import MetricWriter
    from astra_jax.run.state import TrainState


class Run(Protocol):
    """The parts of `trainer.RunContext` that hooks use.

    Attributes:
        folder: the workdir.
        steps: number of steps of the whole run.
        history: the rows of metrics that this process logged.
        stopped: why the loop ends before all steps are done; None while it runs, and after a finished run.
        writer: writes metrics; None on other hosts than the first.
    """

    folder: epath.Path
    config: TrainingConfig
    model: Model
    steps: int
    history: list[dict[str, float]]
    writer: MetricWriter | None
    checkpointer: Checkpointer

    @property
    def stopped(self) -> str | None: ...

    def stop(self) -> None:
        """End the loop after this step, with a checkpoint. On several hosts each must call it at the same step.

        The run counts as `stopped` and exits with 0: a supervisor does not start it again. The same command resumes it.
        """


class Hook:
    """Base class. Every method does nothing; override the ones you need.

    Attributes:
        hosts: `first`: only the first host calls this hook. `all`: every host does, for example to run a program on a
            mesh of all devices.
        is_fatal: an exception ends the run. If False, it is printed as a warning and counted.
        every: steps between two calls of `measure` and `after_update`, which are also called after the last step; such
            a step gets a row of metrics. 0: call them for each step that gets a row anyway.
    """

    hosts: Literal["first", "all"] = "first"
    is_fatal: bool = True
    every: int = 0

    def before_step(self, run: Run, state: TrainState) -> None:
        """Called before a step; `state.step` is the number of steps that are done."""

    def measure(self, run: Run, state: TrainState, batch: Any, row: Mapping[str, float]) -> Mapping[str, float]:
        """Return further metrics of a step, which are added to its row. Waits for the device.

        Args:
            batch: what the step trained on: `PackedBatch` in SFT, `GroupBatch` in GRPO.
            row: metrics so far, by name.
        """
        return {}

    def after_update(self, run: Run, state: TrainState, batch: Any, row: Mapping[str, float]) -> None:
        """Called when a step's row of metrics is written, before its checkpoint."""

    def before_save(self, run: Run, state: TrainState) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, run: Run, state: TrainState, previous: int) -> None:
        """Called when a checkpoint is being written and the one before, of step `previous`, is complete.

        Not called for a run's first checkpoint. The last one is complete after `run.checkpointer.wait()` in `on_stop`.
        """

    def on_stop(self, run: Run, state: TrainState) -> None:
        """Called once when the loop is over without an error.

        `run.stopped` is the reason, None if all steps are done.
        """


class HookError(UserError):
    """A hook raised an exception that would have ended the program."""


class Hooks:
    """Calls a run's hooks on the hosts that they are for."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._intervals: set[int] = set()
        self.failures: Counter[str] = Counter()

    def add(self, hooks: Sequence[Hook]) -> None:
        """Add hooks behind the present ones. On several hosts each must add the same ones."""
        self._hooks += [hook for hook in hooks if hook.hosts == "all" or is_first()]
        self._intervals |= {hook.every for hook in hooks if hook.every}

    def is_due(self, step: int, last: int) -> bool:
        """Return whether a hook with an interval is due after this step."""
        return any(step % every == 0 or step == last for every in self._intervals)

    def call(self, point: str, run: Run, state: TrainState, *arguments: Any) -> None:
        """Call one method of all hooks."""
        for hook in self._hooks:
            self._call(hook, point, run, state, *arguments)

    def report_failures(self) -> None:
        """Print how often each hook failed whose failures do not end a run."""
        for name, count in self.failures.items():
            log_above_progress(f"warning: hook {name} failed {count} times in this process")

    def call_due(self, point: str, last: int, run: Run, state: TrainState, batch: Any, row: dict[str, float]) -> None:
        """Call `measure` or `after_update` of the hooks that are due; what they return is added to `row`."""
        for hook in self._hooks:
            if not hook.every or state.step % hook.every == 0 or state.step == last:
                row |= self._call(hook, point, run, state, batch, row) or {}

    def _call(self, hook: Hook, point: str, *arguments: Any) -> Any:
        name = f"{type(hook).__name__}.{point}"
        try:
            return getattr(hook, point)(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if hook.is_fatal and isinstance(error, Exception):
                raise
            if hook.is_fatal:  # SystemExit would end the run like a finished one
                raise HookError(f"hook {name} raised {type(error).__name__}: {first_line(error)}") from error
            self.failures[name] += 1
            if self.failures[name] == 1:
                log_above_progress(
                    f"warning: hook {name}: {type(error).__name__}: {first_line(error)}; training continues"
                )
            return None


def load_hooks(names: Iterable[str]) -> list[Hook]:
    """Load the hooks that `--hooks` names, each as `my_module:MyHook` or `FOLDER/FILE.py:MyHook`.

    Raises:
        InputError: one cannot be imported, or is not a subclass or an instance of `Hook`.
    """
    hooks = []
    for name in names:
        found = referred(name)
        if isinstance(found, type) and issubclass(found, Hook):
            try:
                found = found()
            except UserError:
                raise
            except Exception as error:
                raise InputError(f"--hooks={name}: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(found, Hook):
            raise InputError(f"--hooks={name} is {type(found).__name__}; give a subclass of astra_jax.run.hooks.Hook")
        hooks.append(found)
    return hooks
