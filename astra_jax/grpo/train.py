"""Online multi-turn GRPO (paper §3): sample groups of episodes, keep those that differ, take one step, repeat.

One update:
  1. Roll out groups of `group_size` episodes, each group one environment with its tools and seeded irrelevant ones,
     until `groups_per_batch` groups have Std(reward) > delta. Valid surplus waits for the next update.
  2. Advantage = (reward - group mean) / group deviation, the same for every sampled token of the episode.
  3. Pack the episodes into rows; sum the clipped objective over all sampled tokens, divide by their number (eq. 32).
     No KL term, no entropy bonus. What the sampler computed differently (kernels, or weights one update old) is
     corrected by truncated importance sampling. See `grpo_update.py`, and `losses.py` for other objectives.
  4. Step, hand the new weights to the policy, log, checkpoint.

With `async_steps=1` the groups of the next update are rolled out during steps 2 to 4; the policy gets the new weights
when both are done, so that a batch is still drawn by one version, the one before.

On several hosts each runs this program. The first one samples and tells the others its batch.

Run it with `python -m launch.grpo --config=configs/grpo_qwen3_14b.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import check_environments, select_environments
from astra_jax.grpo.episode_pages import write_episodes
from astra_jax.grpo.rollouts import GroupBatch, Rollouts, on_every_host
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.mesh import check_batch
from astra_jax.models.hf_checkpoint import write_config
from astra_jax.models.model import Model, Params
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import check_same_run, run_identity
from astra_jax.run.metrics import MetricWriter
from astra_jax.run.optimizers import initial_state
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder
from synthesis.core.files import location
from synthesis.core.progress import progress_bar
from synthesis.core.records import ToolEnvironment, encode


@dataclass(frozen=True)
class GRPOResult:
    """`params` after `updates` updates; `history`: this run's metric rows; `exhausted`: see `max_groups_per_update`."""

    params: Params
    updates: int
    stopped: Literal["finished", "exhausted"]
    history: list[dict[str, float]]


async def train(
    config: GRPOConfig,
    model: Model,
    params: Params,
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox,
    workdir: Folder,
    *,
    engine: Any = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> GRPOResult:
    """Train from `params`, or from the latest checkpoint in `workdir` that can be read.

    Args:
        params: the starting policy; copied, so the caller's arrays stay valid.
        environments: at least one; each must be scorable, its prompt must fit, and its reference calls must succeed.
            `config.solve_rates` may leave some out.
        sandbox: where calls run; already started.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/` and `episodes/`. All hosts share it.
        engine: a policy with `update(params, version)`; by default an embedded engine is made and closed here. On
            several hosts only the first one's samples; the others' `update` takes part in publishing weights.
        mesh: devices of the update; None is one device.

    Raises:
        ValueError: no environments, or one that cannot be used, or without a solve rate where one is needed; a model
            whose vocabulary is too small or its context too short; a mesh that does not divide a micro-batch; several
            hosts without an engine. The message names it.
        WorkdirError: `workdir` has a checkpoint of another run.
        CheckpointError: a checkpoint could not be written, or none of those there can be read.
        StorageError: metrics or episodes could not be written to a bucket.
    """
    folder = location(workdir)
    longest = _check(config, model, tokenizer, mesh)
    if jax.process_count() > 1 and (engine is None or mesh is None):
        raise ValueError("on several hosts give a mesh of all their devices, and rollout servers as the engine")
    given, environments = len(environments), select_environments(environments, config)
    if is_first():
        if progress and len(environments) < given:
            kept = f"{len(environments)} of {given} environments"
            tqdm.write(f"{kept} have a solve rate within {config.solve_rates}", file=sys.stderr)
        await check_environments(environments, tokenizer, sandbox, config.episode, seed=config.seed)

    checkpointer = Checkpointer(folder / "checkpoints")
    shardings = None if mesh is None else model.param_shardings(mesh)
    params, opt_state = initial_state(params, grpo_optimizer(config), shardings)
    own_engine = engine is None
    if own_engine:
        slots = config.concurrent_groups * config.group_size
        engine = Engine(params, model, EngineConfig(slots=slots, max_length=longest))
    rollouts = Rollouts(engine, sandbox, environments, tokenizer, config)
    start, identity = 0, _identity(config, model, environments)

    def check(extra: dict[str, Any]) -> None:
        check_same_run(extra["identity"], identity, folder)

    if (found := checkpointer.restore_latest((params, opt_state), check)) is not None:
        start, params, opt_state, extra = found
        rollouts.load(extra["rollouts"])
    writer = None
    if is_first():
        write_config(model, folder / "checkpoints")  # so that launch.convert can read them
        writer = MetricWriter(folder / "metrics")
        writer.truncate(start)

    saved = start if found is not None else None

    def save() -> None:
        nonlocal saved
        if writer is not None:
            writer.flush()
        extra = {"identity": identity, "rollouts": rollouts.state()}
        checkpointer.save(update, params=params, state=opt_state, extra=extra)
        saved = update

    def weights() -> Params:
        # The embedded engine samples with the very arrays it is given, which the update donates.
        both = config.async_steps and isinstance(engine, Engine)
        return jax.tree.map(jnp.copy, params) if both else params

    history: list[dict[str, float]] = []
    stopped: Literal["finished", "exhausted"] = "finished"
    update = start
    bar = progress_bar(
        total=config.updates, initial=start, desc="GRPO", disable=not progress or not is_first(), unit="update"
    )

    async def fill(update: int, version: int) -> None:
        if is_first():
            await rollouts.fill(update, version, lambda missing: bar.set_postfix_str(f"{missing} groups missing"))

    filling: asyncio.Task[None] | None = None
    try:
        await engine.update(weights(), start)
        while update < config.updates:
            clock = time.perf_counter()
            await (filling or fill(update, update))
            filling = None
            batch = await asyncio.to_thread(on_every_host, rollouts.take() if is_first() else None)
            if batch is None:
                stopped = "exhausted"
                if saved != update:
                    save()
                break
            waited, start_of_update = time.perf_counter() - clock, time.perf_counter()
            if config.async_steps and update + 1 < config.updates:
                filling = asyncio.create_task(fill(update + 1, update))
            # In a thread, so that rollouts go on meanwhile, and servers are looked after.
            params, opt_state, metrics = await asyncio.to_thread(
                update_step, params, opt_state, batch.groups, model, config, mesh=mesh
            )
            seconds = {"rollout": batch.filling.seconds, "update": time.perf_counter() - start_of_update}
            update += 1
            if filling is not None:
                await filling  # its batch is drawn by one version, to the end
            start_of_sync = time.perf_counter()
            await engine.update(weights(), update)
            now = time.perf_counter()
            seconds |= {"sync": now - start_of_sync, "wait": waited, "step": now - clock}

            row = _row(batch, metrics, seconds)
            history.append(row)
            if writer is not None:
                writer.write(update, row)
                if config.episodes_every and update % config.episodes_every == 0:
                    write_episodes(folder / "episodes" / f"update_{update:05}.html", update, batch.groups, row)
            if update % config.checkpoint_every == 0 or update == config.updates:
                save()
            bar.update()
            if "rollout/reward" in row:  # not when the whole batch came from the surplus
                bar.set_postfix(reward=f"{row['rollout/reward']:.3f}", valid=f"{row['filling/valid_share']:.0%}")
    finally:
        if filling is not None:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
        bar.close()
        try:
            checkpointer.close()
        finally:
            if writer is not None:
                writer.close()
        if own_engine:
            await engine.close()
    return GRPOResult(params=params, updates=update, stopped=stopped, history=history)


def _check(config: GRPOConfig, model: Model, tokenizer: ChatTokenizer, mesh: Mesh | None) -> int:
    """Refuse what does not fit together; the longest sequence, in tokens."""
    if model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model.vocab_size}, the tokenizer has {tokenizer.vocab_size} tokens; "
            "make the model's at least as large"
        )
    longest = config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(longest, "episode.max_prompt_tokens + max_response_tokens")
    if mesh is not None:
        for bucket in config.row_buckets:
            check_batch(mesh, config.micro_batch_rows, bucket, "a length in row_buckets")
    return longest


def _row(batch: GroupBatch, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one update, by name."""
    rollout, counts = batch.filling.rollout, batch.filling.counts
    sampled = rollout.get("sampled_tokens", 0.0) * counts["episodes"]
    speeds = {
        "rollout": sampled / batch.filling.seconds,
        "update": metrics["trained_tokens"] / seconds["update"],
    }
    groups = {
        "rollout": rollout,
        "train": metrics,
        "filling": counts,
        "seconds": seconds,
        "tokens_per_second": speeds,
    }
    return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}


def _identity(config: GRPOConfig, model: Model, environments: Sequence[ToolEnvironment]) -> dict[str, Any]:
    """What a run must share with its checkpoint: all that changes what is computed."""
    grpo = asdict(config)
    for name in ("updates", "checkpoint_every", "episodes_every", "max_groups_per_update", "remat"):
        del grpo[name]
    digest = hashlib.sha256(b"".join(hashlib.sha256(encode(e)).digest() for e in environments)).hexdigest()
    return run_identity(grpo=grpo, model=asdict(model), environments=digest)
