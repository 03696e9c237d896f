"""Supervised fine-tuning on agent trajectories (paper §2.1): predict the assistant's tokens, nothing else.

One step:
  1. Take a batch of packed rows (`astra_jax.sft.data`): several conversations a row, told apart by segment ids.
  2. For each of `accumulation` micro-batches add up the negative logprob of every assistant token (thinking, calls and
     answers; never tool output, user or system), and its gradient (`sft_update.py`).
  3. Divide once by the batch's number of assistant tokens, clip, take an AdamW step. The learning rate warms up
     linearly and then follows a cosine.
  4. Log; every `checkpoint_every` steps save weights, optimizer and the position in the data, so that a run that was
     killed goes on by itself, and to the bit as if it had not been. A run that is asked to stop saves first.

On several hosts each runs this program. They make the same batches and train on their parts of them.

Run it with `python -m launch.sft --config=configs/sft_qwen3_14b.py --data=DATASET --workdir=DIR`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from etils import epath
from jax.sharding import Mesh

from astra_jax.mesh import check_batch
from astra_jax.models.hf_checkpoint import write_config
from astra_jax.models.model import Model, Params
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.chips import chip_of
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import check_same_run, run_identity
from astra_jax.run.metrics import MetricWriter
from astra_jax.run.optimizers import initial_state
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataStats, TokenBatch, scan, steps_for_epochs, trajectories
from astra_jax.sft.samples import Sampler
from astra_jax.sft.step import learning_rate, loss_sums, sft_optimizer, to_device, train_step
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, read_card
from synthesis.core.files import location, on_disk, write_text
from synthesis.core.progress import progress_bar

_FREE = (
    *("checkpoint_every", "keep_states", "keep_params", "log_every", "epochs"),
    *("eval_every", "eval_batches", "sample_every", "samples", "sample_tokens"),
)
"""Settings that may change when a run goes on: what is computed does not depend on them. (What `epochs` came to is in
`steps`.)"""


@dataclass(frozen=True)
class SFTResult:
    """What a run came to.

    Attributes:
        params: after `steps` steps.
        stopped: `finished`, or `preempted`: asked to stop; the same call goes on from there.
        final_loss: of the last step.
        stats: the dataset's.
        history: this run's metric rows.
    """

    params: Params
    steps: int
    stopped: Literal["finished", "preempted"]
    final_loss: float
    stats: DataStats
    history: list[dict[str, float]]


def train(
    config: SFTConfig,
    model: Model,
    params: Params,
    dataset_path: Folder,
    tokenizer: ChatTokenizer,
    workdir: Folder,
    *,
    held_out: Folder | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    stop: Callable[[int], bool] = lambda step: False,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> SFTResult:
    """Train from `params`, or go on from the latest checkpoint in `workdir`.

    Args:
        params: the starting weights; copied, so the caller's arrays stay valid.
        dataset_path: a dataset of `Trajectory` records.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/`, `samples/` and `profile/`. All hosts share it.
        held_out: a dataset whose loss is logged every `eval_every` steps (`held_out_loss`), and whose conversations are
            what samples answer.
        mesh: devices to train on; None is one device.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        stop: asked after each step, with its number, whether to save and return (`Preemption.asked`). On several hosts
            all must answer alike.
        on_step: called with the step and its metrics after each logged step, before its checkpoint.

    Raises:
        DatasetError: a dataset is missing, corrupt, or has nothing to train on.
        WorkdirError: `workdir` has a checkpoint of another run.
        CheckpointError: no checkpoint there can be read, or one could not be written.
        StorageError: metrics or samples could not be written to a bucket.
        ValueError: the loss mask of a batch is empty or full, the model's vocabulary is too small or its context too
            short, or the mesh does not divide the batch.
    """
    folder = location(workdir)
    if model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model.vocab_size}, the tokenizer has {tokenizer.vocab_size} tokens; "
            "make the model's at least as large"
        )
    model.check_length(config.data.seq_len, "data.seq_len")
    if mesh is not None:
        check_batch(mesh, config.data.rows // config.accumulation, config.data.seq_len, "data.seq_len")
    stats = scan(dataset_path, tokenizer, config.data)
    steps = config.steps or steps_for_epochs(stats, config.data, config.epochs)
    identity = _identity(config, model, dataset_path, tokenizer, steps)
    checkpointer = Checkpointer(folder / "checkpoints", keep_states=config.keep_states, keep_params=config.keep_params)
    batches = BatchIterator(dataset_path, tokenizer, config.data)
    evaluation = None if held_out is None else _Evaluation(held_out, tokenizer, config, model, mesh)
    sampler = _sampler(held_out or dataset_path, tokenizer, config, model, mesh)

    shardings = None if mesh is None else model.param_shardings(mesh)
    params, opt_state = initial_state(params, sft_optimizer(config, steps), shardings)
    start, loss = 0, float("nan")

    def check(extra: dict[str, Any]) -> None:
        check_same_run(extra["identity"], identity, folder)

    if (found := checkpointer.restore_latest((params, opt_state), check)) is not None:
        start, params, opt_state, extra = found
        batches.set_state(extra["batches"])
        loss = extra["loss"]

    writer = None
    if is_first():
        writer = MetricWriter(folder / "metrics")
        writer.truncate(start)
        write_config(model, folder / "checkpoints")  # so that launch.convert can read them
    history: list[dict[str, float]] = []
    stopped: Literal["finished", "preempted"] = "finished"
    step, clock = start, _Clock(model)
    bar = progress_bar(total=steps, initial=start, desc="SFT", disable=not progress or not is_first(), unit="step")
    try:
        with _trace(profile, folder / "profile") as trace:
            while step < steps:
                step += 1
                trace(step)
                batch = next(batches)
                shares = _shares(batch, step)
                clock.add(batch)
                on_device = to_device(batch, config.accumulation, mesh)
                params, opt_state, metrics = train_step(
                    params, opt_state, on_device, model=model, config=config, steps=steps, mesh=mesh
                )
                bar.update()
                if stop(step):
                    stopped = "preempted"
                save = step % config.checkpoint_every == 0 or step == steps or stopped == "preempted"
                if step % config.log_every == 0 or save:
                    row = {name: float(value) for name, value in jax.device_get(metrics).items()} | shares
                    loss = row["loss"]
                    row["learning_rate"] = float(learning_rate(config, steps)(step - 1))
                    row |= clock.read()
                    if evaluation is not None and (step % config.eval_every == 0 or step == steps):
                        row["held_out_loss"] = evaluation.loss(params)
                    history.append({"step": step, **row})
                    if writer is not None:
                        writer.write(step, row)
                    bar.set_postfix(loss=f"{loss:.4f}", tokens_per_second=f"{row['tokens_per_second']:.0f}")
                    if on_step is not None:
                        on_step(step, row)
                sampled = sampler is not None and (step % config.sample_every == 0 or step == steps)
                if sampler is not None and sampled:
                    text = "\n".join(map(str, sampler.draw(params)))
                    if writer is not None:
                        writer.write_text(step, "samples", text)
                        write_text(folder / "samples" / f"{step:08d}.txt", text)
                if save:
                    if writer is not None:
                        writer.flush()
                    extra = {"identity": identity, "batches": batches.get_state(), "loss": loss}
                    clock.saved(checkpointer.save(step, params=params, state=opt_state, extra=extra))
                if step % config.log_every == 0 or save or sampled:
                    clock.start()
                if stopped == "preempted":
                    break
    finally:
        bar.close()
        batches.close()
        try:
            checkpointer.close()
        finally:
            if writer is not None:
                writer.close()
    return SFTResult(params, step, stopped, loss, stats, history)


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


class _Clock:
    """Tokens, arithmetic, memory and time since the last row of metrics."""

    def __init__(self, model: Model) -> None:
        self._model = model
        chip = chip_of(jax.devices()[0].device_kind)
        self._peak = chip.flops * jax.device_count() if chip is not None else None
        self._saving = 0.0
        self.start()

    def start(self) -> None:
        self._tokens, self._flops, self._started = 0, 0.0, time.perf_counter()

    def add(self, batch: TokenBatch) -> None:
        self._tokens += int((batch.segment_ids_bt > 0).sum())
        if self._peak is not None:
            self._flops += self._model.batch_flops(batch.segment_ids_bt)

    def saved(self, seconds: float) -> None:
        """How long the last checkpoint kept the loop; in the next row."""
        self._saving = seconds

    def read(self) -> dict[str, float]:
        """Tokens a second; of known chips the share of their peak (documents by their own length, padding and
        recomputation for nothing), of devices that tell it their most memory in use; this process's most memory;
        seconds of the last checkpoint."""
        seconds = time.perf_counter() - self._started
        found = {"tokens_per_second": self._tokens / seconds, "checkpoint_seconds": self._saving}
        found["peak_host_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self._peak is not None:
            found["mfu"] = self._flops / seconds / self._peak
        memory = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            found["peak_memory_gib"] = memory["peak_bytes_in_use"] / 2**30
        return found


class _Evaluation:
    """The loss on the first batches of a held-out dataset, always the same ones: nothing renamed or left out."""

    def __init__(
        self, path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
    ) -> None:
        data = dataclasses.replace(config.data, rename_entities=0.0, workers=0)
        count = min(config.eval_batches, steps_for_epochs(scan(path, tokenizer, data), data, 1))
        batches = BatchIterator(path, tokenizer, data)
        self._batches = [next(batches) for _ in range(count)]
        batches.close()
        self._sums = jax.jit(partial(loss_sums, model=model, remat=config.remat, mesh=mesh))
        self._accumulation, self._mesh = config.accumulation, mesh

    def loss(self, params: Params) -> float:
        """Per trained token, in nats."""
        total, count = 0.0, 0.0
        for batch in self._batches:
            whole = to_device(batch, self._accumulation, self._mesh)
            for i in range(self._accumulation):
                loss, (tokens, _) = self._sums(params, jax.tree.map(lambda x, i=i: x[i], whole))
                total, count = total + float(loss), count + float(tokens)
        return total / count


def _sampler(
    path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
) -> Sampler | None:
    if not config.sample_every:
        return None
    limits = {"count": config.samples, "max_tokens": config.sample_tokens}
    return Sampler(trajectories(path), tokenizer, model, config.data, mesh=mesh, **limits)


@contextlib.contextmanager
def _trace(steps: tuple[int, int] | None, target: epath.Path) -> Iterator[Callable[[int], None]]:
    """Told of each step before it begins; traces from the first to the last of `steps`."""
    running = False

    def at(step: int) -> None:
        nonlocal running
        if steps is not None and not running and step == steps[0]:
            jax.profiler.start_trace(str(folder))
            running = True
        elif running and steps is not None and step > steps[1]:
            stop()

    def stop() -> None:
        nonlocal running
        jax.profiler.stop_trace()
        running = False

    with on_disk(target) as folder:
        try:
            yield at
        finally:
            if running:
                stop()


def _shares(batch: TokenBatch, step: int) -> dict[str, float]:
    """Mask share (of the real tokens) and padding share (of all places).

    Raises:
        ValueError: no token is trained on, or every one is: the renderer and the tokenizer disagree.
    """
    real = batch.segment_ids_bt > 0
    mask_share = float(batch.loss_mask_bt[real].mean())
    if mask_share in (0.0, 1.0):
        raise ValueError(
            f"step {step}: the loss mask covers {mask_share:.0%} of the batch's tokens; assistant tokens must be some, "
            "and not all: check the dataset's messages and the tokenizer"
        )
    return {"mask_share": mask_share, "padding_share": float(1 - real.mean())}


def _identity(
    config: SFTConfig, model: Model, dataset_path: Folder, tokenizer: ChatTokenizer, steps: int
) -> dict[str, Any]:
    """What a run must share with its checkpoint: all that changes what is computed. JSON, flat, dotted names."""
    sft = dataclasses.asdict(config)
    for name in _FREE:
        del sft[name]
    return run_identity(
        sft=sft | {"steps": steps},
        model=dataclasses.asdict(model),
        dataset=read_card(dataset_path)["digest"],
        vocab_size=tokenizer.vocab_size,
    )
