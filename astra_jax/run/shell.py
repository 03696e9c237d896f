"""What a training loop is wrapped in, the same for SFT and GRPO: everything that is not the algorithm.

    with TrainingRun("SFT", config, model, workdir, steps=steps, identity=identity) as run:
        step, params, opt_state, extra = run.begin(start, optimizer, mesh)
        while step < steps and not run.stopped:
            step += 1
            with run.traced(step):
                ...
            run.check(step, metrics)
            run.log(step, row)
            if run.due(step):
                run.save(step, params, opt_state, extra)

It holds the workdir, restores the latest checkpoint of the same run, notices a wish to stop (SIGTERM), traces steps,
writes metrics, and lets nothing that is not finite into a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from astra_jax.models import adapters, peft
from astra_jax.models.hf_checkpoint import write_config
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Model, Params
from astra_jax.run import frozen, moments, trackers
from astra_jax.run.checkpoints import Checkpointer, named
from astra_jax.run.config import TrainingConfig
from astra_jax.run.digests import digest_of_json, digests_of
from astra_jax.run.goodput import Goodput
from astra_jax.run.hosts import failure_of_any, from_first, is_first, reached
from astra_jax.run.identity import check_same_run, resume_changes
from astra_jax.run.meter import Meter
from astra_jax.run.metrics import MetricWriter, read_metrics
from astra_jax.run.optimizers import abstract_state, all_finite, initial_state, learning_rate
from astra_jax.run.preemption import Preemption
from astra_jax.run.record import write_changes
from astra_jax.run.starts import Starts, is_fault
from synthesis.core.datasets import Folder
from synthesis.core.files import RemovedError, location, on_disk
from synthesis.core.leases import LeaseError
from synthesis.core.progress import progress_bar, say_beside_bars
from synthesis.core.refusals import Refusal
from synthesis.core.workdir import WorkdirError, locked

Stopped = Literal["finished", "preempted", "exhausted"]
"""Why a run ended: all steps are done; it was asked to stop, and the same command goes on; GRPO: no more batches."""


_LOOK_SECONDS = 0.2


MOST_SKIPPED_IN_A_ROW = 10
"""Steps that `on_nonfinite=skip` leaves out one after another before a run stops: the weights do not change meanwhile,
so that only another batch can help, and ten of them did not. `max_faults` has the same default."""


class NonFiniteError(Refusal):
    """A loss, a gradient or a weight was not finite, so that the run cannot go on, or is not trained."""


@dataclasses.dataclass
class Skipped:
    """Steps that changed nothing, since their loss or gradient was not finite; checkpoints carry them on.

    Attributes:
        count: of the whole run.
        in_a_row: up to the newest step.
        first: the first of them; 0 where there is none.
    """

    count: int = 0
    in_a_row: int = 0
    first: int = 0

    def add(self, step: int, *, is_finite: bool) -> None:
        """Count a step."""
        self.in_a_row = 0 if is_finite else self.in_a_row + 1
        self.count += not is_finite
        self.first = self.first or (0 if is_finite else step)


class TrainingRun:
    """The life of one run in one workdir.

    Args:
        name: beside the progress bar.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/` and `profile/`. All hosts share it.
        steps: that the run has in all.
        identity: what a checkpoint must share with this run, see `identity.run_identity`.
        origin: where the weights to start from come from; with adapters it is kept beside the checkpoints.
        kept: how much is done since the last checkpoint that survives a fault, in whatever unit; looked at at the
            start.
        profile: first and last step of a trace for TensorBoard or Perfetto; a run that goes on amid them traces the
            rest.
        progress: whether to show a bar.

    Attributes:
        base: the frozen weights under adapters, from `begin` on; None where all weights are trained.
        history: the rows of metrics that this process logged.
        stopped: why the loop is to end; None while it goes on.
        saved: the step of the newest checkpoint, if there is one.
        skipped: steps that changed nothing, of earlier starts too.
        changes: settings that were changed when the run resumed: of each its step, name and values before and after.

    Raises:
        NonFiniteError: when it is left, all steps are done, and more than half of them changed nothing.
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
        *,
        steps: int,
        identity: Mapping[str, Any],
        origin: frozen.Origin | None = None,
        kept: Callable[[], int] = lambda: 0,
        profile: tuple[int, int] | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = location(workdir)
        self.config, self.model, self.steps = config, model, steps
        self.base: Params | None = None
        self.history: list[dict[str, float]] = []
        self.stopped: Stopped | None = None
        self.saved: int | None = None
        self.skipped = Skipped()
        self.changes: list[dict[str, Any]] = []
        self.meter = Meter(model)
        self.writer: MetricWriter | None = None
        self._name, self._identity, self._profile, self._progress = name, dict(identity), profile, progress
        self._origin, self._frozen = origin, frozen.Frozen(config.lora, origin, model.param_dtype, {})
        self._unchecked: list[tuple[int, Any, Any, Any]] = []
        self._starts, self._kept = Starts(self.folder, config.max_faults), kept
        self._changed: dict[str, tuple[Any, Any]] = {}
        self._tracing = False
        self._saving_seconds = 0.0
        self._started, self._monotonic = time.time(), time.monotonic()

    def __enter__(self) -> TrainingRun:
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
        try:
            self._stack.__exit__(kind, error, trace)
            if error is None:
                self._check_trained()
        except BaseException as failed:  # the last checkpoint, for instance
            error = failed
            raise
        finally:
            # A lost lease is another process's to count, and a removed workdir must not be made again.
            if is_first() and not is_fault(error) and not isinstance(error, (LeaseError, RemovedError)):
                self._starts.take_back()

    def begin(
        self, start: Callable[[], Params], optimizer: optax.GradientTransformation, mesh: Mesh | None
    ) -> tuple[int, Params, Any, dict[str, Any] | None]:
        """The state to train from: the latest checkpoint's, or what `start` gives with a new optimizer's. With adapters
        what `start` gives stays as it is (`base`), and `params` are the adapters.

        Args:
            start: called only where there is no checkpoint, and after that is known: never do two states lie side by
                side; with adapters always, since no checkpoint has the weights under them. What it gives is taken
                over; nobody else may use it.

        Returns:
            (steps done, params, optimizer state, what was saved with them, or None).

        Raises:
            FaultsError: too many starts have ended with a fault and without progress.
            WeightsError: the adapters of the checkpoint were trained on other weights than those of `start`.
            NonFiniteError: a weight is not finite: nothing that is made of them can be saved.
        """
        self._count()
        model, lora = self.model, self.config.lora
        trained, shardings = adapters.abstract_trained(model, lora), adapters.trained_shardings(model, lora, mesh)
        step, extra = 0, None

        def check(extra: dict[str, Any]) -> None:
            saved = extra["identity"]
            changed = resume_changes(saved, self._identity)
            same = {name: value for name, value in saved.items() if name not in changed}
            same |= {name: now for name, (_, now) in changed.items() if name in self._identity}
            check_same_run(same, self._identity, self.folder, weights=self.folder / "checkpoints")
            self._changed = changed
            if lora.rank is not None:
                before = dataclasses.replace(self._frozen, digests=extra["frozen"])
                self._laid_down(start, mesh)
                before.compare(self._frozen, "the weights to start from")

        memory = self.config.optimizer_memory
        like = abstract_state(trained, optimizer, shardings, memory=memory)
        if (found := self.checkpointer.restore_latest(like, check)) is not None:
            step, params, opt_state, extra = found
            if step > self.steps:
                raise WorkdirError(
                    f"{self.folder} has done {step} steps, and the run is to have {self.steps} in all (steps, or what "
                    f"epochs come to): give at least {step} steps, or train fewer in another --workdir"
                )
            opt_state = moments.restored(opt_state)
            self.saved = step
            self.skipped = Skipped(**extra.get("skipped", {}))
            self._note_changes(step, extra)
        else:
            first = start() if lora.rank is None else self._first_adapters(start, mesh)
            params, opt_state = initial_state(first, optimizer, shardings, memory=memory)
        if broken := _not_finite(params) or (self.base and _not_finite(self.base)):
            where = "the weights to start from" if found is None else f"{self.checkpointer.dir}, step {step}"
            raise NonFiniteError(f"{where}: {broken} holds numbers that are not finite; give other weights")
        if is_first():
            write_config(self.model, self.folder / "checkpoints")  # so that launch.convert can read them
            if self.base is not None:
                frozen.write(self._frozen, self.folder / "checkpoints")
            folder = self.folder / "metrics"
            shown = json.loads(json.dumps(dataclasses.asdict(self.config)))
            self.writer = MetricWriter(folder, trackers.opened(self.config.log_to, folder, shown))
            rows = read_metrics(folder)
            self.writer.truncate(step)
            kept = [row for row in rows if row["step"] <= step]
            # Of rows that are forgotten, too: of a start that came to nothing there may be no others.
            began = next((row["goodput/began"] for row in rows if row.get("goodput/began")), self._started)
            self._goodput = Goodput(kept, self._now(), began)
        self.bar = progress_bar(
            total=self.steps, initial=step, desc=self._name, unit="step", disable=not (self._progress and is_first())
        )
        self.meter.start()
        reached(step)
        return step, params, opt_state, extra

    def _note_changes(self, step: int, extra: Mapping[str, Any]) -> None:
        """Record and print the settings that differ from those of the checkpoint of `step`."""
        changed = dict(self._changed) if step < self.steps else {}  # a run that is finished computes nothing by them
        steps = f"{self._name.lower()}.steps"
        planned, _ = changed.pop(steps, (None, None))
        planned = extra.get("steps", planned)  # the identity has it only where the learning rate is not constant
        if step < self.steps and planned not in (None, self.steps):
            changed[steps] = (planned, self.steps)
        now = [{"step": step, "setting": name, "before": old, "now": new} for name, (old, new) in changed.items()]
        self.changes = [*extra.get("changes", []), *now]
        if now and is_first():
            write_changes(self.folder, self.changes)
            for one in now:
                line = f"from step {step + 1} on: {one['setting']} is {one['now']}, it was {one['before']}"
                say_beside_bars(self._extension(step, changed) if one["setting"] == steps else line)

    def _extension(self, step: int, changed: Mapping[str, tuple[Any, Any]]) -> str:
        """A line on another number of steps, and on the learning rate, whose schedule is over the new number."""
        loop = self._name.lower()
        planned, steps = changed[f"{loop}.steps"]
        schedule = ("learning_rate", "warmup_fraction", "final_fraction")
        past = {name: changed[f"{loop}.{name}"][0] for name in schedule if f"{loop}.{name}" in changed}
        before = learning_rate(dataclasses.replace(self.config, **past), planned)(step - 1)
        return (
            f"{'extended' if planned < steps else 'shortened'} from {planned} to {steps} steps: the learning rate "
            f"continues at {float(learning_rate(self.config, steps)(step)):.3g}, on its schedule over {steps} steps; "
            f"in step {step} it was {float(before):.3g}"
        )

    def _count(self) -> None:
        """Note this start. Raises `FaultsError`, on several hosts on each."""
        failure: Exception | None = None
        try:
            if is_first():
                self._starts.begin(self.checkpointer.latest() or 0, self._kept())
        except Exception as error:
            failure = error
        if (failure := failure_of_any(failure)) is not None:
            raise failure

    def _laid_down(self, start: Callable[[], Params], mesh: Mesh | None) -> Params:
        """The frozen weights, on their devices; read once."""
        if self.base is None:
            lora = self.config.lora

            def places(lora: LoRA) -> Any:
                return jax.tree.map(lambda x: x.sharding, adapters.abstract_base(self.model, lora, mesh))

            base = jax.device_put(start(), places(dataclasses.replace(lora, stored="none")))
            self._frozen = frozen.frozen(base, lora, self._origin)
            adapters.store(base, lora)
            self.base = jax.device_put(base, places(lora))
        return self.base

    def _first_adapters(self, start: Callable[[], Params], mesh: Mesh | None) -> Params:
        base = self._laid_down(start, mesh)
        lora, places = self.config.lora, adapters.trained_shardings(self.model, self.config.lora, mesh)

        def drawn(base: Params) -> Params:
            return adapters.initial_adapters(self.model, lora, jax.random.key(0), base)

        begun: Params = jax.jit(drawn, out_shardings=places)(base)
        if self._origin is None or self._origin.adapter is None:
            return begun
        found, loaded = peft.load(self._origin.adapter, self.model, shardings=places)

        def continued(begun: Params, loaded: Params) -> Params:
            return peft.continued(begun, loaded, lora, found.tokens)

        return jax.jit(continued, out_shardings=places)(begun, loaded)  # type: ignore[no-any-return]

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return step % self.config.checkpoint_every == 0 or step == self.steps or self.stopped is not None

    def notice(self, step: int) -> None:
        """Look whether the run is asked to stop after this step. On several hosts each must call it after each step."""
        if self._preemption.asked() and step < self.steps:
            self.stopped = "preempted"

    async def finished(self, task: asyncio.Task[None]) -> bool:
        """Wait for what a step waits for, raising what it raises; but a run that is asked to stop stops then, and the
        answer is no. Of several hosts the first one's task decides, the others' do nothing; see `agree`."""
        stop = False
        while not task.done() and not stop:
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            stop = not task.done() and self._preemption.noticed()
        if not stop:
            task.result()
        if stop:
            self.stopped = "preempted"
        return not stop

    async def agree(self) -> None:
        """Stop on every host where the first one's `finished` did; all must call it, none of which has failed."""
        if jax.process_count() > 1:
            asked = bytes([self.stopped is not None])
            if await asyncio.to_thread(from_first, asked) != bytes([False]):
                self.stopped = self.stopped or "preempted"

    def digest(self, params: Params) -> str:
        """Of the weights, to the bit: those that are trained, and those under them. On several hosts each must call
        it."""
        return digest_of_json(digests_of(named(params)) | {"frozen": dict(self._frozen.digests)})

    @contextlib.contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Around a step: a trace, if it is one of those to be traced; and other hosts see that it is begun and over."""
        reached(step)
        if self._profile is not None and not self._tracing and self._profile[0] <= step <= self._profile[1]:
            jax.profiler.start_trace(str(self._trace_folder))
            self._tracing = True
        yield
        if self._profile is not None and step >= self._profile[1]:
            self._end_trace()
        reached(step)

    def check(self, step: int, metrics: dict[str, Any]) -> None:
        """Note a step's `loss`, `gradient_norm` and `weights_finite`, which is taken out of the metrics; `settle` looks
        at them."""
        whole = metrics.pop("weights_finite")
        self._unchecked.append((step, metrics["loss"], metrics["gradient_norm"], whole))

    def settle(self) -> None:
        """Fetch what `check` has noted; before anything is logged or saved.

        Raises:
            NonFiniteError: a step's loss or gradient was not finite, and `on_nonfinite` is `stop`; or a weight is not.
        """
        noted, self._unchecked = self._unchecked, []
        for step, loss, norm, whole in jax.device_get(noted):
            loss, norm = float(loss), float(norm)
            saved = "nothing was saved yet" if self.saved is None else f"the checkpoint of step {self.saved} is whole"
            lower = f"Lower learning_rate (it is {self.config.learning_rate})"
            if not whole:  # there is nothing that a later step could go on from
                raise NonFiniteError(
                    f"step {step} made weights that are not finite, of loss {loss} and gradient_norm {norm}; they are "
                    f"given up: {saved}. {lower}, or see to the other settings of the optimizer"
                )
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            self.skipped.add(step, is_finite=is_finite)
            if is_finite:
                continue
            if self.config.on_nonfinite == "stop":
                raise NonFiniteError(
                    f"step {step}: loss is {loss}, gradient_norm is {norm}, so the step was not taken; {saved}. {lower}"
                    ", see to the data of that step, or set on_nonfinite=skip to leave such steps out"
                )

    def log(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """Write a step's metrics, with what the last checkpoint took; the row as it was written.

        Raises:
            NonFiniteError: the last `MOST_SKIPPED_IN_A_ROW` steps changed nothing; nothing of them is saved.
        """
        whole = {**row, "checkpoint_seconds": self._saving_seconds, "skipped_steps": float(self.skipped.count)}
        if self.writer is not None:
            whole |= self._goodput.step(self._now())
        self.history.append({"step": step, **whole})
        if self.writer is not None:
            self.writer.write(step, whole)
        if self.skipped.in_a_row >= MOST_SKIPPED_IN_A_ROW:
            saved = "Nothing was saved" if self.saved is None else f"The last checkpoint is of step {self.saved}"
            raise NonFiniteError(
                f"on_nonfinite=skip: the last {self.skipped.in_a_row} steps, up to step {step}, changed nothing: their "
                f"loss or gradient was not finite, as of {self.skipped.count} steps in all, from step "
                f"{self.skipped.first} on. {saved}. {self._remedy()}"
            )
        return whole

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to a step's row, which is the newest one; or write that row, where there is none yet."""
        if self.history and self.history[-1]["step"] == step:
            self.history[-1] |= values
        else:
            self.history.append({"step": step, **values})
        if self.writer is not None:
            self.writer.amend(step, values)

    def save(self, step: int, params: Params, opt_state: Any, extra: Mapping[str, Any]) -> None:
        """Save the full state of a step in the background; a step that is saved already is left alone."""
        if self.saved == step:
            return
        self.settle()
        if self.writer is not None:
            self.writer.flush()
        whole = {
            "identity": self._identity,
            "steps": self.steps,
            "skipped": dataclasses.asdict(self.skipped),
            "changes": self.changes,
            **extra,
        }
        if self.base is not None:
            whole["frozen"] = dict(self._frozen.digests)
        self._saving_seconds = self.checkpointer.save(step, params=params, state=opt_state, extra=whole)
        self.saved = step

    def _check_trained(self) -> None:
        """Raises `NonFiniteError`: the run is finished, and more than half of its steps changed nothing."""
        if self.stopped is None and self.skipped.count * 2 > self.steps:
            of = "The result" if self.saved is None else f"The checkpoint of step {self.saved}"
            raise NonFiniteError(
                f"on_nonfinite=skip: {self.skipped.count} of {self.steps} steps changed nothing, from step "
                f"{self.skipped.first} on: their loss or gradient was not finite. {of} was trained by "
                f"{self.steps - self.skipped.count} steps only. {self._remedy()}, and use another workdir"
            )

    def _remedy(self) -> str:
        return f"Lower learning_rate (it is {self.config.learning_rate}), or see to the data of these steps"

    def _now(self) -> float:
        """Seconds of the wall clock as this process found it; it does not follow when that clock is set."""
        return self._started + time.monotonic() - self._monotonic

    def _end_trace(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

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


def _not_finite(params: Params) -> str:
    """The first weight with a number that is not finite, or ""; on several hosts the same on each."""
    leaves = [
        (path, x) for path, x in jax.tree.leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]  # numbers of 8 bits are finite, if their scales are
    sound = jax.device_get(jax.jit(lambda xs: [all_finite(x) for x in xs])([leaf for _, leaf in leaves]))
    return next((jax.tree_util.keystr(path) for (path, _), fine in zip(leaves, sound, strict=True) if not fine), "")
