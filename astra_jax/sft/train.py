"""Supervised fine-tuning on agent trajectories (paper §2.1), trained on the assistant's tokens only, by their weights.

One step:
  1. Take a batch of packed rows (`data.py`): several conversations a row, with segment ids. Padding that all
     rows of a micro-batch end with is cut off, as far as `row_buckets` allow.
  2. Sum the negative logprobs of the trained tokens, times their weights, and the gradients over micro-batches
     (`step.py`). Trained tokens are the assistant's thinking, calls and answers, never tool output, user or system.
  3. Divide once by the sum of the weights, clip, take an optimizer step.
  4. Log; every `checkpoint_every` steps save weights, optimizer state and the position in the data.

A resumed run equals an uninterrupted one bit for bit. On several hosts each runs this program: they make the same
batches and train on their parts of them. Run it with `astra sft --config=sft:14b --data=DATASET`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from astra_jax.base.terminal import say
from astra_jax.models.model import Model, Params
from astra_jax.run.compiler import CompiledAhead
from astra_jax.run.frozen import WeightsSource
from astra_jax.run.hooks import Hook
from astra_jax.run.hosts import is_first
from astra_jax.run.optimizers import learning_rate
from astra_jax.run.summary import RunSummary
from astra_jax.run.trainer import RunContext
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator
from astra_jax.sft.hooks import own_hooks
from astra_jax.sft.job import SFTResult, compile_step, prepare
from astra_jax.sft.step import sft_optimizer, step_inputs, train_step
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder


def train(
    config: SFTConfig,
    model: Model,
    start: Callable[[], Params],
    dataset: Folder,
    tokenizer: ChatTokenizer,
    workdir: Folder,
    *,
    held_out: Folder | None = None,
    rehearsal: Folder | None = None,
    origin: WeightsSource | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    hooks: Sequence[Hook] = (),
    on_summary: Callable[[RunSummary], None] = say,
) -> SFTResult:
    """Train from what `start` returns, or resume from the latest checkpoint in `workdir`. SIGTERM saves and stops.

    Args:
        start: returns the starting weights, which the run takes over. Called only without a checkpoint; with adapters
            always.
        dataset: a dataset of `Trajectory` records.
        workdir: on disk or in a bucket, shared by all hosts; gets `checkpoints/`, `metrics/`, `samples/`,
            `statistics/` and `profile/`.
        held_out: a dataset for `eval/loss` and for the openings of samples.
        rehearsal: a dataset of conversations without tools (`rehearsal.rehearse`), mixed in by
            `config.data.self_generated_ratio`.
        origin: the source of `start`'s weights; with adapters it is stored beside the checkpoints.
        mesh: devices to train on; None is one device.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        hooks: called after the loop's own.
        on_summary: called on the first host with the table before compilation.

    Raises:
        DatasetError: a dataset is missing, corrupt, or has nothing to train on.
        ValueError: settings, model, tokenizer, data or mesh do not fit together.
        Exception: what `RunContext` raises.
    """
    job = prepare(config, model, dataset, tokenizer, workdir, held_out=held_out, rehearsal=rehearsal, mesh=mesh)
    config, steps = job.config, job.steps
    if is_first():
        on_summary(job.summary)
    rate = learning_rate(config, steps)
    update = partial(train_step, model=model, config=config, steps=steps, mesh=mesh)
    with (
        BatchIterator(dataset, tokenizer, config.data, config.batch_size, rehearsal=rehearsal) as batches,
        CompiledAhead({"train_step": partial(compile_step, model, config, steps, mesh)}) as ahead,
        RunContext(
            *("SFT", config, model, workdir, job),
            origin=origin,
            log_every=config.log_every,
            profile=profile,
            progress=progress,
        ) as run,
    ):
        state = run.restore_or_init(start, sft_optimizer(config, steps), mesh)
        run.add_state("batches", batches)
        run.add_hooks([*own_hooks(config, model, dataset, held_out, tokenizer, mesh), *hooks])
        ahead.wait("train_step")
        while not run.is_over(state):
            with run.step(state):
                batch = next(batches)
                run.meter.add(batch.segment_ids_bt)
                inputs = step_inputs(batch, state.step + 1, config, mesh)
                state.params, state.opt_state, metrics = update(
                    state.params, state.opt_state, inputs.batch, base=state.base, bucket_ids_a=inputs.bucket_ids_a
                )
            run.end_step(state, metrics)
            if run.is_logged(state.step):
                row = {name: float(value) for name, value in jax.device_get(metrics).items()}
                row |= {"train/learning_rate": float(rate(state.step - 1)), **inputs.metrics, **run.meter.read()}
                run.log(state, batch, row)
            run.save_if_due(state)
        run.finish(state)
    return SFTResult.of(run, state, job)
