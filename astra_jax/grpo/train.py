"""Online multi-turn GRPO (paper §3): sample groups of episodes, keep groups whose rewards differ, take a step, repeat.

One step:
  1. Roll out groups of episodes of one environment until `batch_size` groups differ in reward (`rollouts.py`).
  2. Advantage = (reward - group mean) / group deviation, the same for every sampled token of the episode.
  3. Pack the episodes into rows; sum the clipped objective over all sampled tokens, divide by their number (eq. 32).
     Truncated importance sampling corrects for numerical differences of the sampler (`step.py`, `losses.py`).
  4. Take an optimizer step, load the new weights into the sampler, log, save.

With `async_rollouts` rollouts continue during steps 2 to 4. On several hosts the first one samples and
sends the others its batch. Run it with `astra grpo --config=grpo:14b`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from jax.sharding import Mesh

from astra_jax.base.terminal import say
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.job import GRPOResult, prepare, programs, reference_params, step_metrics
from astra_jax.grpo.replay import Replay
from astra_jax.grpo.source import BatchRecorder, RolloutSource, embedded_engine, open_source, unsaved_bytes
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.models.model import Model, Params
from astra_jax.rollout.sampler import TrainableSampler
from astra_jax.run.compiler import CompiledAhead
from astra_jax.run.frozen import WeightsSource
from astra_jax.run.hooks import Hook
from astra_jax.run.meter import Timer
from astra_jax.run.state import TrainState
from astra_jax.run.summary import RunSummary
from astra_jax.run.trainer import RunContext
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder
from synthesis.core.environment import AnyEnvironment


async def train(
    config: GRPOConfig,
    model: Model,
    start: Callable[[], Params],
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    workdir: Folder,
    *,
    policy: TrainableSampler | None = None,
    replay: Replay | None = None,
    held_out: Sequence[AnyEnvironment] = (),
    origin: WeightsSource | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    hooks: Sequence[Hook] = (),
    on_summary: Callable[[RunSummary], None] = say,
) -> GRPOResult:
    """Train from what `start` returns, or resume from the latest checkpoint in `workdir`. SIGTERM saves and stops.

    Args:
        start: returns the starting weights, which the run takes over. Called only without a checkpoint; with adapters
            or `objective.kl_coef` always.
        environments: at least one; each must be scorable, and the reference calls of a record must succeed.
        sandbox: runs the calls of records; already started.
        workdir: on disk or in a bucket, shared by all hosts; gets `checkpoints/`, `metrics/`, `episodes/`, `profile/`,
            and in `rollouts/` finished episodes of the batch in progress, from which a killed run resumes.
        policy: samples; None makes and closes an embedded engine. On several hosts only the first one's samples.
        replay: batches of an earlier run to train on; then nothing is sampled.
        held_out: environments to evaluate on, none of which is trained on.
        origin: the source of `start`'s weights; with adapters it is stored beside the checkpoints.
        mesh: devices of the update; None is one device.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        hooks: called after the loop's own.
        on_summary: called on the first host with the table, before the first step; not with `replay`.

    Raises:
        ValueError: settings, model, tokenizer, environments or mesh do not fit together; the message names the cause.
        Exception: what `RunContext` and `reference_params` raise.
    """
    job = await prepare(
        *(config, model, environments, tokenizer, sandbox),
        policy=policy,
        replay=replay,
        held_out=held_out,
        mesh=mesh,
        on_summary=on_summary,
    )
    async with AsyncExitStack() as stack:
        run = stack.enter_context(
            RunContext(
                *("GRPO", job.config, model, workdir, job),
                origin=origin,
                unsaved_progress=partial(unsaved_bytes, workdir),
                profile=profile,
                progress=progress,
            )
        )
        ahead = stack.enter_context(CompiledAhead(programs(job, model, mesh)))
        state = run.restore_or_init(start, grpo_optimizer(job.config), mesh)
        reference = reference_params(run, start, state)
        if policy is None and replay is None:
            policy = await stack.enter_async_context(embedded_engine(job, model, state))
        source = await stack.enter_async_context(
            open_source(run, job, policy, tokenizer, sandbox, held_out=held_out, replay=replay, progress=progress)
        )
        run.add_hooks(hooks)
        recorder = await stack.enter_async_context(BatchRecorder(run, job, state.step, tokenizer))
        update = partial(
            update_step,
            base=state.base,
            reference=reference,
            mesh=mesh,
            on_rows=run.meter.add,
            before_program=ahead.wait,
            on_result=run.heartbeat,
        )
        await _loop(run, state, source, recorder, update)
        return GRPOResult.of(run, state, advice=source.advice, held_out=source.held_out_summary)


async def _loop(
    run: RunContext, state: TrainState, source: RolloutSource, recorder: BatchRecorder, update: Callable[..., Any]
) -> None:
    """Train until all steps are done or the run is to stop."""
    await source.load_weights(state)
    await source.evaluate_if_due(state)
    while not run.is_over(state):
        timer = Timer()
        with timer("wait"):
            batch = await source.next_batch(state)
        if batch is None:
            break
        recorder.start(state, batch)
        await source.sleep(state)
        with run.step(state), timer("update"):
            state.params, state.opt_state, metrics = await asyncio.to_thread(
                update, state.params, state.opt_state, batch.groups, run.model, run.config, policy_version=state.step
            )
        run.end_step(state, metrics)
        speed = run.meter.read()
        await recorder.commit(state)
        try:
            if run.stopped is None:
                with timer("publish"):
                    await source.publish(state)
                with timer("sync"):
                    await source.load_weights(state)
        finally:
            row = step_metrics(batch, metrics, speed, timer.seconds)
            run.log(state, batch, {**row, **source.metrics})
        run.save_if_due(state)
        await source.evaluate_if_due(state)
    await source.close()
    run.finish(state)
