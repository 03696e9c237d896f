"""Online multi-turn GRPO (paper §3): sample groups of episodes, keep those that differ, take one step, repeat.

One step:
  1. Roll out groups of `group_size` episodes, each group one environment with its tools and seeded irrelevant ones,
     until `batch_size` groups have Std(reward) > delta. Valid surplus waits for the next step.
  2. Advantage = (reward - group mean) / group deviation, the same for every sampled token of the episode.
  3. Pack the episodes into rows; sum the clipped objective over all sampled tokens, divide by their number (eq. 32).
     No KL term, no entropy bonus. What the sampler computed differently (kernels, or weights one step old) is
     corrected by truncated importance sampling. See `step.py`, and `losses.py` for other objectives.
  4. Step, hand the new weights to the policy, log, checkpoint.

With `async_steps=1` the groups of the next step are rolled out during steps 2 to 4; the policy gets the new weights
when both are done, so that a batch is still drawn by one version, the one before.

On several hosts each runs this program. The first one samples and tells the others its batch.

Run it with `python -m launch.grpo --config=grpo:14b`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import check_environments, select_environments
from astra_jax.grpo.episode_pages import write_episodes
from astra_jax.grpo.rollouts import GroupBatch, Rollouts, on_every_host
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.mesh import check_batch
from astra_jax.models.model import Model, Params
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.engine.room import check_room
from astra_jax.rollout.policy import TrainablePolicy
from astra_jax.run.batch import on_mesh
from astra_jax.run.compiler import check_options
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import run_identity, settings_of
from astra_jax.run.shell import Stopped, TrainingRun
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder
from synthesis.core.progress import say_beside_bars
from synthesis.core.records import ToolEnvironment, encode
from synthesis.core.refusals import InputError

_FREE = ("steps", "episodes_every", "max_groups_per_step", "row_buckets", "concurrent_groups", "deadline_seconds")
"""May change when a run goes on, beside what may in every loop."""


@dataclass(frozen=True)
class GRPOResult:
    """What a run came to.

    Attributes:
        params: after `steps` steps.
        stopped: `finished`; `preempted`: asked to stop, the same call goes on; or `exhausted`: see
            `max_groups_per_step`.
        history: this run's metric rows.
    """

    params: Params
    steps: int
    stopped: Stopped
    history: list[dict[str, float]]


async def train(
    config: GRPOConfig,
    model: Model,
    start: Callable[[], Params],
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox,
    workdir: Folder,
    *,
    policy: TrainablePolicy | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
) -> GRPOResult:
    """Train from what `start` gives, or go on from the latest checkpoint in `workdir`.

    SIGTERM ends it, saved: after a step, or before the rollouts that it interrupts.

    Args:
        start: gives the starting policy's weights; called where there is no checkpoint. They are taken over: a step
            donates them, and nothing of them stays on the devices.
        environments: at least one; each must be scorable, its prompt must fit, and its reference calls must succeed.
            `config.solve_rates` may leave some out.
        sandbox: where calls run; already started.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/`, `episodes/`, `profile/`. All hosts share it.
        policy: who samples; by default an embedded engine is made and closed here. On several hosts only the first
            one's samples; the others' `update` takes part in publishing weights.
        mesh: devices of the update; None is one device.
        profile: first and last step of a trace for TensorBoard or Perfetto.

    Raises:
        ValueError: no environments, or one that cannot be used, or without a solve rate where one is needed; a model
            whose vocabulary is too small or its context too short; a mesh that does not divide a micro-batch; several
            hosts without a policy. The message names it.
        SettingError: the devices have no room for the embedded engine's cache.
        NonFiniteError: a loss or gradient was not finite.
        Exception: what `TrainingRun` raises.
    """
    config = on_mesh(config, mesh)
    longest = _check(config, model, tokenizer, mesh)
    if jax.process_count() > 1 and (policy is None or mesh is None):
        raise InputError("on several hosts give a mesh of all their devices, and rollout servers as the policy")
    slots = config.concurrent_groups * config.group_size
    if policy is None:
        check_room(model, slots, longest, mesh)
    given, environments = len(environments), select_environments(environments, config)
    if is_first():
        if progress and len(environments) < given:
            kept = f"{len(environments)} of {given} environments"
            say_beside_bars(f"{kept} have a solve rate within {config.solve_rates}")
        await check_environments(environments, tokenizer, sandbox, config.episode, seed=config.seed)
    settings = settings_of(config, free=_FREE)
    identity = run_identity(
        grpo=settings,
        model=dataclasses.asdict(model),
        environments=_digest(environments),
        tokenizer=tokenizer.digest,
    )

    async with AsyncExitStack() as stack:
        shell = TrainingRun(
            "GRPO", config, model, workdir, steps=config.steps, identity=identity, profile=profile, progress=progress
        )
        run = stack.enter_context(shell)
        step, params, opt_state, extra = run.begin(start, grpo_optimizer(config), mesh)
        if policy is None:
            policy = Engine(params, model, EngineConfig(slots=slots, max_length=longest))
            stack.push_async_callback(policy.close)
        rollouts = Rollouts(policy, sandbox, environments, tokenizer, config)
        if extra is not None:
            rollouts.load(extra["rollouts"])
        copies = bool(config.async_steps) and policy.samples_with_given_arrays

        async def fill(step: int, version: int) -> None:
            if is_first():
                await rollouts.fill(step, version, lambda missing: run.bar.set_postfix_str(f"{missing} groups missing"))

        filling: asyncio.Task[None] | None = None
        stack.push_async_callback(lambda: _cancelled(filling))
        await policy.update(jax.tree.map(jnp.copy, params) if copies else params, step)
        while step < config.steps and run.stopped is None:
            started = time.perf_counter()
            filling = filling or asyncio.create_task(fill(step, step))
            if not await run.finished(filling):
                break
            filling = None
            batch = await asyncio.to_thread(on_every_host, rollouts.take() if is_first() else None)
            if batch is None:
                run.stopped = "exhausted"
                run.log(step + 1, rollouts.exhausted_row())
                break
            waited, start_of_update = time.perf_counter() - started, time.perf_counter()
            if config.async_steps and step + 1 < config.steps:
                filling = asyncio.create_task(fill(step + 1, step))
            run.meter.start()
            with run.traced(step + 1):
                # In a thread, so that rollouts go on meanwhile, and servers are looked after.
                params, opt_state, metrics = await asyncio.to_thread(
                    update_step, params, opt_state, batch.groups, model, config, mesh=mesh, on_rows=run.meter.add
                )
            speed, seconds_of_update = run.meter.read(), time.perf_counter() - start_of_update
            step += 1
            run.check(step, metrics)
            run.settle()
            run.notice(step)
            if filling is not None and run.stopped is None:
                await run.finished(filling)  # its batch is drawn by one version, to the end
            start_of_sync = time.perf_counter()
            if run.stopped is None:
                await policy.update(jax.tree.map(jnp.copy, params) if copies else params, step)
            now = time.perf_counter()
            seconds = {"rollout": batch.filling.seconds, "update": seconds_of_update, "wait": waited}
            seconds |= {"sync": now - start_of_sync, "step": now - started}
            row = run.log(step, _row(batch, metrics, speed, seconds))
            if run.writer is not None and config.episodes_every and step % config.episodes_every == 0:
                write_episodes(run.folder / "episodes" / f"update_{step:05}.html", step, batch.groups, row)
            if run.due(step):
                run.save(step, params, opt_state, {"rollouts": rollouts.state()})
            run.bar.update()
            if "rollout/reward" in row:  # not when the whole batch came from the surplus
                run.bar.set_postfix(reward=f"{row['rollout/reward']:.3f}", valid=f"{row['filling/valid_share']:.0%}")
        if run.stopped is not None:
            run.save(step, params, opt_state, {"rollouts": rollouts.state()})
        return GRPOResult(params=params, steps=step, stopped=run.stopped or "finished", history=run.history)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _check(config: GRPOConfig, model: Model, tokenizer: ChatTokenizer, mesh: Mesh | None) -> int:
    """Refuse what does not fit together; the longest sequence, in tokens."""
    tokenizer.check_fits(model.vocab_size)
    longest = config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(longest, "episode.max_prompt_tokens + max_response_tokens")
    check_options(config.compiler_options, mesh)
    if mesh is not None:
        for bucket in config.row_buckets:
            check_batch(mesh, config.micro_batch_size or 1, bucket, "a length in row_buckets")
    return longest


def _row(
    batch: GroupBatch, metrics: Mapping[str, float], speed: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of one step, by name."""
    rollout, counts = batch.filling.rollout, batch.filling.counts
    sampled = rollout.get("sampled_tokens", 0.0) * counts["episodes"]
    groups = {
        "rollout": rollout,
        "train": {**metrics, **{name: value for name, value in speed.items() if name != "tokens_per_second"}},
        "filling": counts,
        "seconds": seconds,
        "tokens_per_second": {
            "rollout": sampled / batch.filling.seconds,
            "update": metrics["trained_tokens"] / seconds["update"],
        },
    }
    return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}


def _digest(environments: Sequence[ToolEnvironment]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(encode(one)).digest() for one in environments)).hexdigest()
