"""Rollout source of a run: its batches on every host, loading of weights into the sampler, and evaluations.

Consumes: batches of `Rollouts` or of a `Replay`, on the first host, and the weights of each update.
Waits for: `next_batch` waits for the first host's batch, and sends it to the others.
Unblocked by: a full batch, SIGTERM on any host, or a failure on any host, which every host raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from astra_jax.base.files import location
from astra_jax.base.progress import log_above_progress
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.dump import FOLDER as BATCHES
from astra_jax.grpo.dump import BatchDump, DumpedUpdate
from astra_jax.grpo.episode_pages import logged_samples, write_episodes, write_exhausted
from astra_jax.grpo.held_out import FOLDER as HELD_OUT
from astra_jax.grpo.held_out import HeldOutEvaluation
from astra_jax.grpo.job import GRPOJob
from astra_jax.grpo.journal import FOLDER as JOURNALS
from astra_jax.grpo.journal import Journals, kept_bytes
from astra_jax.grpo.replay import NoSampler, Replay
from astra_jax.grpo.rollouts import GroupBatch, Rollouts, on_every_host
from astra_jax.models.model import Model
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.sampler import TrainableSampler
from astra_jax.run.digests import digest_of_json
from astra_jax.run.hooks import Hook, Run
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import run_id
from astra_jax.run.state import TrainState
from astra_jax.run.trainer import RunContext
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder
from synthesis.core.environment import AnyEnvironment
from synthesis.core.workdir import RunEnding, record_ending


class RolloutSource:
    """Batches of rollouts, sampled online, asynchronously, or replayed. The first host samples; the others receive.

    Args:
        policy: samples, on the first host. The others' takes part in publishing weights.
        batches: source of the first host's batches. A further kind has the methods of `Replay`, and is chosen in
            `open_source`.
        evaluation: on held-out environments, on the first host.
        is_evaluated: whether there are held-out environments; the same on every host.

    Attributes:
        advice: for an exhausted run, whether all rewards were 0 or the maximum, and what to try.
    """

    def __init__(
        self,
        run: RunContext,
        config: GRPOConfig,
        policy: TrainableSampler,
        batches: Rollouts | Replay,
        evaluation: HeldOutEvaluation | None,
        *,
        is_evaluated: bool,
    ) -> None:
        self._run, self._config, self._policy, self._batches = run, config, policy, batches
        self._evaluation, self._is_evaluated = evaluation, is_evaluated
        self.advice = ""

    async def next_batch(self, state: TrainState) -> GroupBatch | None:
        """Return the batch of the next update, on every host the same; None if the run is to stop.

        Raises:
            Exception: sampling failed, on any host; the state is saved.
        """
        if not await self._run.wait(_on_first(self._batches.fill, state.step, self._show_missing), state):
            return None
        batch = await asyncio.to_thread(on_every_host, self._batches.take() if is_first() else None)
        if batch is None:
            self._run.stopped = "exhausted"
            self._report_exhausted(state)
        return batch

    async def sleep(self, state: TrainState) -> None:
        """Have the sampler free device memory for an update. With `async_rollouts` it continues sampling."""
        if not self._config.async_rollouts:
            await self._run.collective(self._policy.sleep(), save=state)

    async def publish(self, state: TrainState) -> None:
        """Write or send new weights while sampling continues. Raises as `load_weights`."""
        await self._run.collective(self._policy.publish_weights(state.inference_params(), state.step), save=state)

    async def load_weights(self, state: TrainState) -> None:
        """Sample with these weights from now on.

        Raises:
            Exception: a server could not load them; the state is saved.
        """
        digest = state.digest()  # every host takes part
        await self._run.collective(_on_first(self._batches.set_version, state.step, digest), save=state)
        # A copy if sampling continues during the next update, which donates these arrays.
        is_copied = self._config.async_rollouts and self._policy.aliases_params
        weights = state.inference_params(copied=is_copied)
        await self._run.collective(self._policy.load_weights(weights, state.step), save=state)

    async def evaluate_if_due(self, state: TrainState) -> None:
        """Log the rewards of the current weights on held-out environments. Raises as `next_batch`."""
        if self._is_evaluated and self._run.stopped is None:
            await self._run.wait(_on_first(self._evaluate, state), state)

    async def _evaluate(self, state: TrainState) -> None:
        assert self._evaluation is not None, "it is there on the first host"
        if not self._evaluation.is_due(state.step):
            return
        self._run.amend(state.step, await self._evaluation.evaluate(state.step, state.digest()))
        if self._policy.aliases_params and not self._config.async_rollouts:
            # Empty its caches: copied keys and values of an evaluation round differently from computed ones.
            await self._policy.load_weights(state.inference_params(), state.step)

    @property
    def held_out_summary(self) -> str:
        """The last and the first evaluation on held-out environments in a line; "" without any."""
        return "" if self._evaluation is None else self._evaluation.summary

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the sampler, by name."""
        return self._policy.metrics()

    async def close(self) -> None:
        """Cancel running rollouts; finished episodes are in the journal."""
        unfinished = await self._batches.close()
        if unfinished and self._run.stopped in ("preempted", "stopped"):
            log_above_progress(f"{unfinished} unfinished episodes are cancelled; they start again when the run resumes")

    def get_state(self) -> dict[str, Any]:
        """Return the state between two batches as JSON values."""
        return self._batches.state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        self._batches.load(state)

    def _show_missing(self, missing: int) -> None:
        self._run.bar.set_postfix_str(f"{missing} groups missing")

    def _report_exhausted(self, state: TrainState) -> None:
        exhausted = self._batches.exhaustion()
        row = self._run.write_row(state.step, exhausted.metrics())
        if is_first():
            self.advice = exhausted.advice
            record_ending(self._run.folder, RunEnding("exhausted", self.advice))
            page = self._run.folder / "episodes" / f"exhausted_{state.step:05}.html"
            write_exhausted(page, exhausted, row)
            for line in (*exhausted.lines(), f"  episodes: {page}"):
                log_above_progress(line)


@asynccontextmanager
async def open_source(
    run: RunContext,
    job: GRPOJob,
    policy: TrainableSampler | None,
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    *,
    held_out: Sequence[AnyEnvironment],
    replay: Replay | None,
    progress: bool,
) -> AsyncIterator[RolloutSource]:
    """Open the rollout source of a run, restore its state, and add the hooks that belong to it. See `train.train`."""
    config, journals, evaluation = job.config, None, None
    if policy is None or replay is not None:
        policy = NoSampler()
    if is_first():
        id = run_id(run.folder)
        if replay is None:
            journals = Journals(run.folder / JOURNALS, id, digest_of_json(job.batch_identity))
            run.add_hooks([JournalCleanup(journals, config.steps_ahead)])
        if held_out:
            evaluation = HeldOutEvaluation(
                *(policy, sandbox, held_out, tokenizer, config, run.folder / HELD_OUT), run=id, progress=progress
            )
    if config.episodes_every:
        run.add_hooks([EpisodePages(config.episodes_every)])
    batches = replay or Rollouts(policy, sandbox, job.environments, tokenizer, config, journals)
    source = RolloutSource(run, config, policy, batches, evaluation, is_evaluated=bool(held_out))
    try:
        run.add_state("rollouts", source)
        yield source
    finally:
        await source.close()


@asynccontextmanager
async def embedded_engine(job: GRPOJob, model: Model, state: TrainState) -> AsyncIterator[Engine]:
    """Open the embedded engine, with room for the run's episodes."""
    config = EngineConfig(
        slots=job.config.episodes_at_once,
        max_length=job.longest,
        weight_quantization=job.config.weight_quantization,
    )
    engine = Engine(state.inference_params(), model, config)
    try:
        yield engine
    finally:
        await engine.close()


def unsaved_bytes(workdir: Folder) -> int:
    """Bytes of rollouts and evaluations in a workdir that no checkpoint has yet."""
    return sum(kept_bytes(location(workdir) / folder) for folder in (JOURNALS, HELD_OUT))


class BatchRecorder:
    """Writes the batches of a run beside its updates, on the first host; on other hosts it only takes part.

    Args:
        job: whose settings say whether batches are written at all.
        step: of the state that the run starts from.
    """

    def __init__(self, run: RunContext, job: GRPOJob, step: int, tokenizer: ChatTokenizer) -> None:
        self._run, self._before = run, ""
        self._dump: BatchDump | None = None
        self._writing: asyncio.Task[DumpedUpdate] | None = None
        if job.config.dump_batches and is_first():
            id, identity = run_id(run.folder), job.batch_identity
            self._dump = BatchDump(run.folder / BATCHES, run=id, identity=identity, tokenizer=tokenizer)
            self._dump.begin(step)

    async def __aenter__(self) -> BatchRecorder:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for a shard that is being written; nothing refers to it."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def start(self, state: TrainState, batch: GroupBatch) -> None:
        """Write a batch, which the next update trains on."""
        self._before = state.digest()
        if self._dump is not None:
            filling = msgspec.to_builtins(batch.filling)
            writing = asyncio.to_thread(self._dump.write, state.step, batch.groups, filling)
            self._writing = asyncio.create_task(writing)

    async def commit(self, state: TrainState) -> None:
        """Make the batch a part of the dataset, when its update is done and before that is saved.

        Raises:
            Exception: it could not be written. Nothing is saved, so the next start reads the batch from its journal.
        """
        await self._run.collective(self._commit(state.digest()))

    async def _commit(self, after: str) -> None:
        if self._dump is not None and self._writing is not None:
            await asyncio.to_thread(self._dump.commit, await self._writing, self._before, after)


class EpisodePages(Hook):
    """Write a page of sampled episodes every `episodes_every` updates to `workdir/episodes`, and to the trackers."""

    def __init__(self, every: int) -> None:
        self._every = every

    def after_update(self, run: Run, state: TrainState, batch: GroupBatch, row: Mapping[str, float]) -> None:
        if state.step % self._every == 0:
            page = run.folder / "episodes" / f"update_{state.step:05}.html"
            written = write_episodes(page, state.step, batch.groups, row)
            if run.writer is not None:
                run.writer.write_samples(state.step, logged_samples(batch.groups), written)


class JournalCleanup(Hook):
    """Remove journals of rollouts that no checkpoint needs any more."""

    def __init__(self, journals: Journals, steps_ahead: int) -> None:
        self._journals, self._steps_ahead = journals, steps_ahead

    def after_save(self, run: Run, state: TrainState, previous: int) -> None:
        # The run may resume from the previous checkpoint, which is complete; so journals since that one stay.
        self._journals.forget(previous - self._steps_ahead)

    def on_stop(self, run: Run, state: TrainState) -> None:
        if run.stopped is None:
            run.checkpointer.wait()
            self._journals.forget()


async def _on_first(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Await `work(*arguments)` on the first host; nothing on the others."""
    if is_first():
        await work(*arguments)
