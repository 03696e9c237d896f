"""Context of a training run: everything in SFT's and GRPO's loops that is not the algorithm.

    with RunContext("SFT", config, model, workdir, job) as run:
        state = run.restore_or_init(start, optimizer, mesh)
        run.add_state("batches", batches)
        while not run.is_over(state):
            with run.step(state):
                state.params, state.opt_state, metrics = train_step(state.params, state.opt_state, next(batches))
            run.end_step(state, metrics)
            if run.is_logged(state.step):
                run.log(state, batch, row)
            run.save_if_due(state)
        run.finish(state)

The context holds the workdir, restores the latest checkpoint of the same run, calls hooks, and stops on SIGTERM. It
traces steps, writes metrics, and lets nothing that is not finite into a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import optax
from jax.sharding import Mesh

from astra_jax.base.files import RemovedError, location, on_disk
from astra_jax.base.leases import LeaseError
from astra_jax.base.progress import progress_bar
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import write_config
from astra_jax.models.model import Model, Params
from astra_jax.run import frozen, moments, trackers
from astra_jax.run.adapter_base import AdapterBase
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.config import TrainingConfig
from astra_jax.run.crash_loop import CrashLoopGuard, is_fault
from astra_jax.run.finite import FiniteCheck, NonFiniteError, Skipped, nonfinite_name
from astra_jax.run.goodput import Goodput
from astra_jax.run.hooks import Hook, Hooks
from astra_jax.run.hosts import allgather_exception, broadcast_from_host0, heartbeat, is_first, wait_with_heartbeat
from astra_jax.run.meter import Meter
from astra_jax.run.metrics import MetricWriter, read_metrics
from astra_jax.run.optimizers import abstract_state, initial_state
from astra_jax.run.preemption import Preemption
from astra_jax.run.resume import ResumedSettings
from astra_jax.run.state import TrainState
from astra_jax.run.summary import TimeLeft
from synthesis.core.datasets import Folder
from synthesis.core.workdir import RunEnding, WorkdirError, locked, record_ending

StopReason = Literal["finished", "preempted", "stopped", "exhausted"]
"""Why a run ended. `finished`: all steps are done. `preempted`: it received SIGTERM, or a hook stopped it; the same
command resumes it. `exhausted`: GRPO found no batch to train on."""

_POLL_SECONDS = 0.2
_SHOWN = ("train/loss", "perf/tokens_per_second", "rollout/reward", "filling/valid_share")
"""Metrics that the progress bar shows."""


class Stateful(Protocol):
    """A part of a run whose state is in every checkpoint, with the method names of Grain's iterators."""

    def get_state(self) -> Any:
        """Return the state as JSON values."""

    def set_state(self, state: Any) -> None:
        """Restore a state that `get_state` returned."""


class TrainingJob(Protocol):
    """A run that can start.

    Attributes:
        steps: number of steps of the whole run.
        identity: settings that a checkpoint must share with the run, see `identity.run_identity`.
    """

    @property
    def steps(self) -> int: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...


class RunContext:
    """One run in one workdir.

    Args:
        name: shown beside the progress bar: `SFT` or `GRPO`.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/` and `profile/`. All hosts share it.
        job: the run's number of steps and its identity.
        origin: the source of the starting weights; with adapters it is stored beside the checkpoints.
        unsaved_progress: returns how much work since the last checkpoint survives a fault, in any unit.
        log_every: steps between rows of metrics.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        progress: show a progress bar.

    Attributes:
        history: the rows of metrics that this process logged.
        stopped: why the loop ends before all steps are done; None while it runs, and after a finished run.
        saved: step of the newest checkpoint, if there is one.
        finite: counts of skipped steps, of earlier starts too.
        writer: writes metrics; None on other hosts than the first.

    Raises:
        NonFiniteError: on exit, if all steps are done and more than half of them changed nothing.
        WorkdirError: `workdir` has a checkpoint of another run, or another process works in it.
        CheckpointError: no checkpoint there can be read, or one could not be written.
        StorageError: metrics could not be written to a bucket.
    """

    def __init__(
        self,
        name: str,
        config: TrainingConfig,
        model: Model,
        workdir: Folder,
        job: TrainingJob,
        *,
        origin: frozen.WeightsSource | None = None,
        unsaved_progress: Callable[[], int] = lambda: 0,
        log_every: int = 1,
        profile: tuple[int, int] | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = location(workdir)
        self.config, self.model, self.steps = config, model, job.steps
        self.history: list[dict[str, float]] = []
        self.stopped: StopReason | None = None
        self.saved: int | None = None
        self.finite = FiniteCheck(config)
        self.meter = Meter(model)
        self.writer: MetricWriter | None = None
        self._name, self._identity, self._origin, self._progress = name, dict(job.identity), origin, progress
        self._log_every, self._profile = log_every, profile
        self._hooks = Hooks()
        self._settings = ResumedSettings(name.lower(), config, self.steps, self._identity, self.folder)
        self._starts, self._unsaved_progress = CrashLoopGuard(self.folder, config.max_failed_restarts), unsaved_progress
        self._parts: dict[str, Stateful] = {}
        self._constants: dict[str, str] = {}
        self._restored: dict[str, Any] | None = None
        self._time_left = TimeLeft(self.steps)
        self._number, self._step_started = 0, 0.0
        self._is_tracing = False
        self._saving_seconds = 0.0
        self._started, self._monotonic = time.time(), time.monotonic()

    def __enter__(self) -> RunContext:
        trackers.check_installed(self.config.log_to)
        with contextlib.ExitStack() as stack:
            if is_first():
                stack.enter_context(locked(self.folder))
            states, params = self.config.keep_states, self.config.keep_params
            self.checkpointer = Checkpointer(self.folder / "checkpoints", keep_states=states, keep_params=params)
            stack.callback(self._close)
            self._preemption = stack.enter_context(Preemption())
            if self._profile is not None:
                self._trace_folder = stack.enter_context(on_disk(self.folder / "profile"))
                stack.callback(self._end_trace)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and is_first() and self.stopped in ("preempted", "stopped"):
            record_ending(self.folder, RunEnding(self.stopped))
        try:
            self._stack.__exit__(kind, error, trace)
            if error is None and self.stopped is None:
                self.finite.check_trained(self.steps, self.saved)
        except BaseException as failed:  # the last checkpoint, for instance
            error = failed
            raise
        finally:
            # A lost lease is another process's to count, and a removed workdir must not be made again.
            if is_first() and not is_fault(error) and not isinstance(error, (LeaseError, RemovedError)):
                self._starts.take_back()

    # ------------------------------------------------------------------------------------------------ start and resume

    def restore_or_init(
        self, start: Callable[[], Params], optimizer: optax.GradientTransformation, mesh: Mesh | None
    ) -> TrainState:
        """Restore the latest checkpoint, or start from what `start` returns with a new optimizer state.

        Args:
            start: called only without a checkpoint, so that two states never use memory at once. With adapters it is
                always called, since no checkpoint contains the weights under them. The run takes over its arrays.

        Raises:
            FaultsError: too many starts have ended with a fault and without progress.
            WeightsError: the adapters of the checkpoint were trained on other weights than those of `start`.
            NonFiniteError: a weight is not finite.
        """
        self._count_start()
        model, lora, offload = self.model, self.config.lora, self.config.optimizer_offload
        base = None if lora.rank is None else AdapterBase(model, lora, start, self._origin, mesh)
        trained, shardings = adapters.abstract_trained(model, lora), adapters.trained_shardings(model, lora, mesh)

        def check(extra: dict[str, Any]) -> None:
            self._settings.check(extra["identity"])
            if base is not None:
                base.check(extra["frozen"])

        like = abstract_state(trained, optimizer, shardings, offload=offload)
        if (found := self.checkpointer.restore_latest(like, check)) is not None:
            step, params, opt_state, self._restored = found
            if step > self.steps:
                raise WorkdirError(
                    f"{self.folder} has done {step} steps, and the run is to have {self.steps} in all (steps, or what "
                    f"epochs come to): give at least {step} steps, or train fewer in another --workdir"
                )
            self.saved, self.finite.skipped = step, Skipped(**self._restored.get("skipped", {}))
            self.finite.loss = self._restored.get("loss", self.finite.loss)
            self._settings.record(step, self._restored)
            opt_state = moments.restored(opt_state)
        else:
            step = 0
            first = start() if base is None else base.initial_adapters()
            params, opt_state = initial_state(first, optimizer, shardings, offload=offload)
        frozen_params, digests = (None, {}) if base is None else (base.params, base.reference.digests)
        state = TrainState(step, params, opt_state, frozen_params, lora, digests)
        if broken := nonfinite_name(params) or (frozen_params and nonfinite_name(frozen_params)):
            where = "the weights to start from" if found is None else f"{self.checkpointer.dir}, step {step}"
            raise NonFiniteError(f"{where}: {broken} holds numbers that are not finite; give other weights")
        if is_first():
            write_config(model, self.folder / "checkpoints")  # so that astra convert can read them
            if base is not None:
                frozen.write(base.reference, self.folder / "checkpoints")
            self._open_metrics(step)
        self.bar = progress_bar(
            total=self.steps, initial=step, desc=self._name, unit="step", disable=not (self._progress and is_first())
        )
        heartbeat(step)
        return state

    def add_state(self, name: str, part: Stateful) -> None:
        """Include the state of a part in every checkpoint; restore it now if the run resumed."""
        self._parts[name] = part
        if self._restored is not None:
            part.set_state(self._restored[name])

    def add_hooks(self, hooks: Sequence[Hook]) -> None:
        """Also call these hooks, after the ones added before. On several hosts each must add the same ones."""
        self._hooks.add(hooks)

    def constant(self, name: str, value: Callable[[], str]) -> str:
        """Return a value that is fixed at the run's first start and saved in every checkpoint.

        Args:
            value: returns it if the run starts now; "" is returned for a run whose checkpoints do not have it.
        """
        self._constants[name] = value() if self._restored is None else self._restored.get(name, "")
        return self._constants[name]

    def _count_start(self) -> None:
        """Count this start. Raises FaultsError, on several hosts on each."""
        failure: Exception | None = None
        try:
            if is_first():
                self._starts.begin(self.checkpointer.latest() or 0, self._unsaved_progress())
        except Exception as error:
            failure = error
        if (failure := allgather_exception(failure)) is not None:
            raise failure

    def _open_metrics(self, step: int) -> None:
        folder = self.folder / "metrics"
        shown = json.loads(json.dumps(dataclasses.asdict(self.config)))
        self.writer = MetricWriter(folder, trackers.opened(self.config.log_to, folder, shown))
        rows = read_metrics(folder)
        self.writer.truncate(step)
        kept = [row for row in rows if row["step"] <= step]
        # Rows that are removed count too: after a start without progress there may be no others.
        began = next((row["goodput/started_at"] for row in rows if row.get("goodput/started_at")), self._started)
        self._goodput = Goodput(kept, self._now(), began)

    # ----------------------------------------------------------------------------------------------------------- steps

    def is_over(self, state: TrainState) -> bool:
        """Return whether the loop is to end: all steps are done, or the run is to stop."""
        return self.stopped is not None or state.step >= self.steps

    def stop(self) -> None:
        """End the loop after this step, with a checkpoint. On several hosts each must call it at the same step.

        The run counts as `stopped` and exits with 0: a supervisor does not start it again. The same command resumes it.
        """
        self.stopped = self.stopped or "stopped"

    @contextlib.contextmanager
    def step(self, state: TrainState) -> Iterator[None]:
        """Enclose a step: calls hooks, traces it if requested, and signals other hosts. Increments `state.step`."""
        self._hooks.call("before_step", self, state)
        if self.meter.was_read:
            self.meter.start()
        self._number = number = state.step + 1
        self._step_started = time.perf_counter()
        heartbeat(number)
        if self._profile is not None and not self._is_tracing and self._profile[0] <= number <= self._profile[1]:
            jax.profiler.start_trace(str(self._trace_folder))
            self._is_tracing = True
        yield
        if self._profile is not None and number >= self._profile[1]:
            self._end_trace()
        heartbeat(number)
        state.step = number

    @property
    def heartbeat(self) -> Callable[[], None] | None:
        """Tells other hosts, amid a long step, that this one is alive; None if there are no others."""
        return (lambda: heartbeat(self._number)) if jax.process_count() > 1 else None

    def end_step(self, state: TrainState, metrics: dict[str, Any]) -> None:
        """Check a step's `train/loss`, `train/grad_norm` and `weights_finite`, and whether to stop. On several
        hosts each must call it after each step.

        Args:
            metrics: arrays on the device, which are fetched only when the step is logged; `weights_finite` is removed.

        Raises:
            NonFiniteError: see `FiniteCheck.flush`.
        """
        self.finite.queue(state.step, metrics)
        if self._time_left.is_due:
            self.finite.flush(self.saved)
            self._time_left.add(state.step, time.perf_counter() - self._step_started)
        self.bar.update()
        if self._preemption.asked() and state.step < self.steps:
            self.stopped = "preempted"

    def is_logged(self, step: int) -> bool:
        """Return whether a step gets a row of metrics."""
        return step % self._log_every == 0 or self.is_save_due(step) or self._hooks.is_due(step, self.steps)

    def log(self, state: TrainState, batch: Any, row: Mapping[str, float]) -> dict[str, float]:
        """Write a step's row of metrics, with those of hooks; returns the row.

        Raises:
            NonFiniteError: too many steps in a row changed nothing; nothing of them is saved.
        """
        self.finite.flush(self.saved)
        measured = dict(row)
        self._hooks.call_due("measure", self.steps, self, state, batch, measured)
        whole = self.write_row(state.step, measured)
        shown = {name.rpartition("/")[2]: f"{whole[name]:.4g}" for name in _SHOWN if name in whole}
        self.bar.set_postfix(shown)
        self._hooks.call_due("after_update", self.steps, self, state, batch, whole)
        return whole

    def write_row(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """Write a row of metrics that no hook sees, such as that of an exhausted run; returns the row.

        Raises:
            NonFiniteError: see `log`.
        """
        skipped = float(self.finite.skipped.count)
        whole = {**row, "seconds/checkpoint": self._saving_seconds, "train/skipped_steps": skipped}
        if self.writer is not None:
            whole |= self._goodput.step(self._now())
        self.history.append({"step": step, **whole})
        if self.writer is not None:
            self.writer.write(step, whole)
        self.finite.check_progress(step, self.saved)
        return whole

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the newest row, if it is this step's; else write a row."""
        if self.history and self.history[-1]["step"] == step:
            self.history[-1] |= values
        else:
            self.history.append({"step": step, **values})
        if self.writer is not None:
            self.writer.amend(step, values)

    # ------------------------------------------------------------------------------------- waiting, together and alone

    async def wait(self, work: Awaitable[None], state: TrainState) -> bool:
        """Wait for this host's work, such as rollouts. Return False if the run is to stop, after cancelling the work.

        On several hosts each must call it, with work that ends at once if it has none.

        Raises:
            Exception: the work failed, on any host; `state` is saved first.
        """
        task = asyncio.ensure_future(work)
        try:
            await self.collective(self._wait_or_stop(task), save=state)
        finally:
            task.cancel()
        if jax.process_count() > 1:
            is_stopping = bytes([self.stopped is not None])
            if await asyncio.to_thread(broadcast_from_host0, is_stopping) != bytes([False]):
                self.stop()
        return self.stopped is None

    async def _wait_or_stop(self, task: asyncio.Future[None]) -> None:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_SECONDS)
            if not task.done() and self._preemption.noticed():
                self.stopped = "preempted"
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
        task.result()

    async def collective(self, work: Awaitable[Any], *, save: TrainState | None = None) -> None:
        """Wait for work of every host. If it fails on any host, every host raises.

        Args:
            save: a state to save before the error is raised, so that failing servers cost no step.
        """
        failure = None
        try:
            await wait_with_heartbeat(work)
        except Exception as error:
            failure = error
        if (failure := await asyncio.to_thread(allgather_exception, failure)) is not None:
            if save is not None and save.step:
                self.save(save)
            raise failure

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def is_save_due(self, step: int) -> bool:
        """Return whether to save after this step; the same on every host, and at each call for a step."""
        return step % self.config.checkpoint_every == 0 or step == self.steps or self.stopped is not None

    def save_if_due(self, state: TrainState) -> None:
        """Save the state if a checkpoint is due. Raises as `save`."""
        if self.is_save_due(state.step):
            self.save(state)

    def save(self, state: TrainState) -> None:
        """Save the full state in the background; a step that is saved already is not saved again.

        Raises:
            NonFiniteError: see `FiniteCheck.flush`.
        """
        if self.saved == state.step:
            return
        self.finite.flush(self.saved)
        self._hooks.call("before_save", self, state)
        if self.writer is not None:
            self.writer.flush()
        extra = {
            "identity": self._identity,
            "steps": self.steps,
            "skipped": dataclasses.asdict(self.finite.skipped),
            "loss": self.finite.loss,
            "changes": self._settings.changes,
            **({} if state.base is None else {"frozen": dict(state.base_digests)}),
            **self._constants,
            **{name: part.get_state() for name, part in self._parts.items()},
        }
        self._saving_seconds = self.checkpointer.save(
            state.step, params=state.params, state=state.opt_state, extra=extra
        )
        previous, self.saved = self.saved, state.step
        if previous is not None:
            self._hooks.call("after_save", self, state, previous)

    def finish(self, state: TrainState) -> None:
        """Save a run that stopped early, and call the hooks' `on_stop`, when the loop is over."""
        if self.stopped is not None:
            self.save(state)
        self._hooks.call("on_stop", self, state)
        self._hooks.report_failures()

    def _now(self) -> float:
        """Seconds since the epoch by a clock that does not jump when the machine's is set."""
        return self._started + time.monotonic() - self._monotonic

    def _end_trace(self) -> None:
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False

    def _close(self) -> None:
        try:
            self.checkpointer.close()
        finally:
            try:
                if self.writer is not None:
                    self.writer.close()
            finally:
                if hasattr(self, "bar"):
                    self.bar.close()
