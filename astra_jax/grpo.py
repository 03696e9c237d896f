"""Online multi-turn GRPO (paper §3): sample groups of episodes, keep those that differ, take one step, repeat.

One update:
  1. Roll out groups of `group_size` episodes, each group one environment with its tools and seeded irrelevant ones,
     until `groups_per_batch` groups have Std(reward) > delta. Valid surplus waits for the next update.
  2. Advantage = (reward - group mean) / group deviation, the same for every sampled token of the episode.
  3. Pack the episodes into rows; sum the clipped objective over all sampled tokens, divide by their number (eq. 32).
     No KL term, no entropy bonus. Old logprobs are the trainer's own under the weights that the update starts from;
     with one update a batch they equal the current ones, so the ratio is 1 and its gradient is the policy gradient.
     What the sampler computed differently (kernels, or weights one update old) is corrected by truncated importance
     sampling.
  4. Step, hand the new weights to the engine, log, checkpoint.

Run it with `python -m launch.grpo --config=configs/grpo_qwen3_14b.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from tqdm import tqdm

from astra_jax.checkpoints import Checkpointer
from astra_jax.head import summed_loss
from astra_jax.losses import ObjectiveSums, PolicyTerms, group_advantages, grpo_objective
from astra_jax.mesh import check_batch, zigzag
from astra_jax.metrics import MetricWriter
from astra_jax.models.qwen3.modules import Params, forward, head_kernel
from astra_jax.models.qwen3.moe import RouterSums, router_metrics
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.models.qwen3.sharding import batch_sharding, param_shardings
from astra_jax.models.qwen3.weights import write_config
from astra_jax.optimizers import OptimizerName, initial_state, make_optimizer
from astra_jax.rollout.engine import Engine, EngineConfig
from astra_jax.rollout.episode import EpisodeConfig, episode_stats, make_task
from astra_jax.rollout.filling import Group, GroupBuffer, fill
from astra_jax.rollout.groups import GroupSampler
from astra_jax.rollout.packing import PolicyBatch, pack
from astra_jax.run_identity import check_same_run, run_identity
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.records import ToolEnvironment, encode


@dataclass(frozen=True)
class GRPOConfig:
    """Defaults are the paper's where it gives one; those it leaves open are ours, with the reason.

    Attributes:
        updates: optimizer steps. The paper's curves run to about 140.
        groups_per_batch: valid groups in an update (paper: batch 256 = mini-batch 256, so one update a batch).
        group_size: episodes of a group. Ours: 8, the least that gives a usable deviation on F1's coarse grid.
        optimizer: see `astra_jax.optimizers`.
        learning_rate: constant (paper).
        clip_low: ours: 0.2, PPO's.
        clip_high: ours: 0.28, DAPO's higher upper clip, so that rare good tokens can grow.
        delta: a group trains when Std(reward) > delta. Ours: 0.01, below the smallest deviation that one differing
            episode of 8 causes, above rounding.
        tis_cap: upper bound of the importance weight between trainer and sampler. Ours: 2; None leaves it out.
        surplus_max_age: updates that a valid surplus group may wait (paper: it trains one update late); 0 drops it.
        oversample: groups under way over those expected to be needed. Ours: 1.25, see `filling.fill`.
        concurrent_groups: upper bound of groups under way; slots / group_size keeps an engine full.
        max_groups_per_update: stop training (result `exhausted`) when a batch needs more; None samples on (paper).
        episode: turns, token limits, sampling and reward.
        row_buckets: allowed lengths of packed rows; the smallest that holds the batch's longest episode is used.
        micro_batch_rows: rows of one gradient accumulation step.
        remat: the forward's rematerialisation policy.
        b1, b2, eps, weight_decay, max_grad_norm: AdamW and clipping by global norm. Ours: verl's defaults,
            which the paper's framework would have used.
        checkpoint_every: updates between full checkpoints; the last update is always saved.
        seed: of environment order, distractors and sampling.
    """

    updates: int = 140
    groups_per_batch: int = 256
    group_size: int = 8
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 2e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    delta: float = 0.01
    tis_cap: float | None = 2.0
    surplus_max_age: int = 1
    oversample: float = 1.25
    concurrent_groups: int = 64
    max_groups_per_update: int | None = None
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    row_buckets: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768, 74_752)
    micro_batch_rows: int = 1
    remat: str = "none"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    checkpoint_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; advantages are relative to the group: use at least 2")
        if self.episode.temperature <= 0 or self.episode.top_p < 1:
            raise ValueError(
                f"episode.temperature is {self.episode.temperature} and top_p {self.episode.top_p}; training needs "
                "samples from the policy's own distribution: use a positive temperature and top_p 1"
            )
        longest = self.episode.max_prompt_tokens + self.episode.max_response_tokens
        if max(self.row_buckets) < longest - 1:
            raise ValueError(
                f"the largest of row_buckets ({self.row_buckets}) must hold an episode of {longest} tokens"
            )


@dataclass(frozen=True)
class GRPOResult:
    """`params` after `updates` updates; `history`: this run's metric rows; `exhausted`: see `max_groups_per_update`."""

    params: Params
    updates: int
    stopped: Literal["finished", "exhausted"]
    history: list[dict[str, float]]


# ---------------------------------------------------------------------------------------------------------------------
# The update


def loss_fn(
    params: Params,
    batch: PolicyBatch,
    tokens_total: jax.Array,
    *,
    model: Qwen3Config,
    config: GRPOConfig,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, tuple[ObjectiveSums, jax.Array, RouterSums | None]]:
    """One micro-batch's share of the batch loss.

    Args:
        tokens_total: sampled tokens of the *whole* batch: the shares of all micro-batches add up to eq. 32.

    Returns:
        (share of the loss, (metric sums, sum of token entropies, the router's statistics or None)).
    """
    batch = jax.tree.map(lambda x: zigzag(x, 1 if mesh is None else mesh.shape["context"]), batch)
    places = (batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt)
    x_btd, router = forward(params, model, *places, remat=config.remat, mesh=mesh)

    def objective(logps: jax.Array, entropies: jax.Array, batch: PolicyBatch) -> tuple[jax.Array, Any]:
        terms = PolicyTerms(
            logps=logps,
            old_logps=jax.lax.stop_gradient(logps),
            sampler_logps=batch.sampler_logps_bt,
            advantages=batch.advantages_bt,
            mask=batch.mask_bt,
        )
        loss, sums = grpo_objective(terms, clip_low=config.clip_low, clip_high=config.clip_high, tis_cap=config.tis_cap)
        return loss, (sums, jnp.sum(entropies * batch.mask_bt))

    loss, (sums, entropy) = summed_loss(
        objective,
        x_btd,
        head_kernel(params, model),
        batch.targets_bt,
        batch,
        temperature=config.episode.temperature,
        mesh=mesh,
    )
    return loss / tokens_total, (sums, entropy, router)


@partial(jax.jit, static_argnames=("model", "config", "mesh"), donate_argnames=("gradients",))
def accumulate(
    params: Params,
    gradients: Params,
    batch: PolicyBatch,
    tokens_total: jax.Array,
    *,
    model: Qwen3Config,
    config: GRPOConfig,
    mesh: Mesh | None = None,
) -> tuple[Params, jax.Array, ObjectiveSums, jax.Array, RouterSums | None]:
    """Add one micro-batch's gradients. Returns (gradients, loss share, metric sums, entropy sum, router sums)."""
    grad_fn = jax.value_and_grad(partial(loss_fn, model=model, config=config, mesh=mesh), has_aux=True)
    (loss, (sums, entropy, router)), new = grad_fn(params, batch, tokens_total)
    return jax.tree.map(jnp.add, gradients, new), loss, sums, entropy, router


def grpo_optimizer(config: GRPOConfig) -> optax.GradientTransformation:
    """The configured optimizer at a constant learning rate."""
    return make_optimizer(
        config.optimizer,
        config.learning_rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


@partial(jax.jit, static_argnames=("config",), donate_argnames=("params", "opt_state"))
def apply_gradients(
    params: Params, opt_state: Any, gradients: Params, *, config: GRPOConfig
) -> tuple[Params, Any, jax.Array]:
    """One optimizer step. Returns (params, optimizer state, gradient norm before clipping)."""
    updates, opt_state = grpo_optimizer(config).update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(gradients)


def update_step(
    params: Params,
    opt_state: Any,
    groups: Sequence[Group],
    model: Qwen3Config,
    config: GRPOConfig,
    *,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, float]]:
    """One on-policy update from a batch of valid groups; `params` and `opt_state` are donated.

    Returns:
        (params, optimizer state, metrics).
    """
    episodes = [episode for group in groups for episode in group.episodes]
    advantages = [float(a) for group in groups for a in group_advantages(group.rewards)]
    batches = pack(episodes, advantages, row_buckets=config.row_buckets, rows=config.micro_batch_rows)
    tokens_total = jnp.float32(sum(batch.mask_bt.sum() for batch in batches))

    gradients = jax.tree.map(jnp.zeros_like, params)
    parts = []
    for batch in batches:
        if mesh is not None:
            batch = jax.device_put(batch, batch_sharding(mesh))
        gradients, *part = accumulate(params, gradients, batch, tokens_total, model=model, config=config, mesh=mesh)
        parts.append(part)
    params, opt_state, norm = apply_gradients(params, opt_state, gradients, config=config)

    losses, sums, entropies, routers = zip(*jax.device_get(parts), strict=True)
    total = jax.tree.map(lambda *xs: float(sum(xs)), *sums)
    cells = sum(batch.tokens_bt.size for batch in batches)
    metrics = {
        "loss": float(sum(losses)),
        "gradient_norm": float(norm),
        "entropy": float(sum(entropies)) / total.tokens,
        "mismatch_kl": total.mismatch_kl / total.tokens,
        "mismatch_abs": total.mismatch_abs / total.tokens,
        "clipped_low_share": total.clipped_low / total.tokens,
        "clipped_high_share": total.clipped_high / total.tokens,
        "tis_clipped_share": total.tis_clipped / total.tokens,
        "trained_tokens": total.tokens,
        "row_fill": sum(int((batch.segment_ids_bt > 0).sum()) for batch in batches) / cells,
    }
    if routers[0] is not None:
        router = jax.tree.map(lambda *xs: sum(xs), *routers)
        metrics |= {name: float(value) for name, value in router_metrics(router).items()}
    return params, opt_state, metrics


# ---------------------------------------------------------------------------------------------------------------------
# The loop


async def train(
    config: GRPOConfig,
    model_config: Qwen3Config,
    params: Params,
    environments: Sequence[ToolEnvironment],
    tokenizer: ChatTokenizer,
    pool: Sandbox,
    workdir: Path | str,
    *,
    engine: Any = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> GRPOResult:
    """Train from `params`, or from the latest checkpoint in `workdir`.

    Args:
        params: the starting policy; copied, so the caller's arrays stay valid.
        environments: at least one; each must be scorable (`sub_tasks_by_tool`) and its prompt must fit.
        pool: where calls run; already started.
        workdir: gets `checkpoints/` and `metrics/`.
        engine: a policy with `update(params, version)`; by default an embedded engine is made and closed here.
        mesh: devices of the update; None is one device.

    Raises:
        ValueError: no environments, or one that cannot be used; a model whose vocabulary is too small or its context
            too short; a mesh that does not divide a micro-batch. The message names it.
        WorkdirError: `workdir` has a checkpoint of another run.
    """
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model_config.vocab_size}, the tokenizer has {tokenizer.vocab_size} tokens; "
            "make the model's at least as large"
        )
    longest = config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model_config.check_length(longest, "episode.max_prompt_tokens + max_response_tokens")
    if mesh is not None:
        for bucket in config.row_buckets:
            check_batch(mesh, config.micro_batch_rows, bucket, "a length in row_buckets")
    if not environments:
        raise ValueError("train needs at least one environment; the dataset is empty or its split has none")
    for environment in environments:  # refuse now what would fail in the middle of a run
        make_task(environment, tokenizer, config.episode, seed=config.seed)
    workdir = Path(workdir)
    checkpointer, writer = Checkpointer(workdir / "checkpoints"), MetricWriter(workdir / "metrics")
    shardings = None if mesh is None else param_shardings(model_config, mesh)
    params, opt_state = initial_state(params, grpo_optimizer(config), shardings)
    buffer = GroupBuffer(config.groups_per_batch, delta=config.delta, max_age=config.surplus_max_age)
    start, next_index = 0, 0
    identity = _identity(config, model_config, environments)
    if (latest := checkpointer.latest()) is not None:
        check_same_run(checkpointer.read_extra(latest)["identity"], identity, workdir)
        params, opt_state, extra = checkpointer.restore(latest, (params, opt_state))
        buffer.load(extra["buffer"])
        start, next_index = latest, extra["next_index"]
    writer.truncate(start)
    write_config(model_config, workdir / "checkpoints")  # so that launch.convert can read them

    own_engine = engine is None
    if own_engine:
        slots = config.concurrent_groups * config.group_size
        engine = Engine(params, model_config, EngineConfig(slots=slots, max_length=longest), version=start)
    await engine.update(params, start)
    rollouts = {"group_size": config.group_size, "seed": config.seed, "next_index": next_index}
    sampler = GroupSampler(engine, pool, environments, tokenizer, config.episode, **rollouts)

    def save() -> None:
        extra = {"identity": identity, "buffer": buffer.state(), "next_index": sampler.next_index}
        checkpointer.save(update, params=params, state=opt_state, extra=extra)

    history: list[dict[str, float]] = []
    stopped: Literal["finished", "exhausted"] = "finished"
    update = start
    bar = tqdm(total=config.updates, initial=start, desc="GRPO", disable=not progress, unit="update")
    try:
        while update < config.updates:
            clock = time.perf_counter()
            sampler.begin(update)
            buffer.begin(update)
            filled = await fill(
                buffer,
                sampler,
                oversample=config.oversample,
                concurrent=config.concurrent_groups,
                max_groups=config.max_groups_per_update,
                on_group=lambda group, valid: bar.set_postfix_str(f"{buffer.missing} groups missing"),
            )
            rollout_seconds, clock = time.perf_counter() - clock, time.perf_counter()
            if not filled:
                stopped = "exhausted"
                if checkpointer.latest() != update:
                    save()
                break
            groups = buffer.take()
            params, opt_state, metrics = update_step(params, opt_state, groups, model_config, config, mesh=mesh)
            update_seconds, clock = time.perf_counter() - clock, time.perf_counter()
            update += 1
            await engine.update(params, update)
            sync_seconds = time.perf_counter() - clock

            sampled = sum(sum(episode.loss_mask) for episode in sampler.finished)
            row = {
                **_named(
                    "rollout", episode_stats(sampler.finished)
                ),  # all scored episodes: valid groups' only is biased
                **_named("train", metrics),
                **_named("filling", buffer.metrics(groups, update - 1)),
                "filling/voided_episodes": sampler.voided,
                **_named("seconds", {"rollout": rollout_seconds, "update": update_seconds, "sync": sync_seconds}),
                "tokens_per_second/rollout": sampled / rollout_seconds,
                "tokens_per_second/update": metrics["trained_tokens"] / update_seconds,
            }
            writer.write(update, row)
            history.append(row)
            if update % config.checkpoint_every == 0 or update == config.updates:
                save()
            bar.update()
            if "rollout/reward" in row:  # not when the whole batch came from the surplus
                bar.set_postfix(reward=f"{row['rollout/reward']:.3f}", valid=f"{buffer.counts.valid_share:.0%}")
    finally:
        bar.close()
        writer.close()
        checkpointer.close()
        if own_engine:
            await engine.close()
    return GRPOResult(params=params, updates=update, stopped=stopped, history=history)


def _named(group: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _identity(config: GRPOConfig, model_config: Qwen3Config, environments: Sequence[ToolEnvironment]) -> dict[str, Any]:
    """What a run must share with its checkpoint: all that changes what is computed."""
    grpo = asdict(config)
    for name in ("updates", "checkpoint_every", "max_groups_per_update", "remat"):
        del grpo[name]
    digest = hashlib.sha256(b"".join(hashlib.sha256(encode(e)).digest() for e in environments)).hexdigest()
    return run_identity(grpo=grpo, model=asdict(model_config), environments=digest)
