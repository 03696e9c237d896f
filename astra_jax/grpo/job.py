"""A GRPO job: checks before its first update, programs to compile ahead, metrics of an update, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import MEMORY_SETTINGS, GRPOConfig
from astra_jax.grpo.environments import check_environments, digest_of_environments, select_environments
from astra_jax.grpo.held_out import check_apart
from astra_jax.grpo.losses import objective_function
from astra_jax.grpo.packing import bucket_for
from astra_jax.grpo.replay import Replay
from astra_jax.grpo.rollouts import GroupBatch
from astra_jax.grpo.step import abstract_arguments, accumulate, take_step
from astra_jax.grpo.summary import summarise
from astra_jax.mesh import check_batch
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.model import Model, Params
from astra_jax.rollout.engine.cache_memory import check_cache_fits
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.sampler import TrainableSampler
from astra_jax.run import moments
from astra_jax.run.batch import on_mesh
from astra_jax.run.compiler import check_options
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import model_settings, run_identity, settings_of
from astra_jax.run.matmuls import check_matmul
from astra_jax.run.metrics import todays_metrics
from astra_jax.run.state import TrainState, digest_of_weights
from astra_jax.run.summary import RunSummary
from astra_jax.run.trainer import RunContext, StopReason
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.environment import AnyEnvironment


@dataclass(frozen=True)
class GRPOJob:
    """A GRPO run that can start.

    Attributes:
        config: as given, with the mesh's micro-batch size.
        steps: updates of the whole run.
        identity: what checkpoints must share with the run.
        batch_identity: what batches must share with the run that replays them.
        environments: those to train on.
        longest: tokens of the longest episode.
    """

    config: GRPOConfig
    steps: int
    identity: dict[str, Any]
    batch_identity: dict[str, Any]
    environments: Sequence[AnyEnvironment]
    longest: int


@dataclass(frozen=True)
class GRPOResult:
    """Result of a GRPO run.

    Attributes:
        params: the trained arrays, weights or adapters, after `steps` updates.
        base: frozen weights under adapters.
        stopped: `finished`; `preempted`: the run received SIGTERM; `stopped`: a hook stopped it; after both the same
            call resumes it; `exhausted`: see `max_groups_per_step`.
        history: this process's rows of metrics.
        skipped: updates that changed nothing, because their loss or gradient was not finite.
        advice: for an exhausted run, on the first host: whether all rewards were 0 or the maximum, and what to try.
        held_out: the last and the first evaluation on held-out environments in a line; "" without any.
    """

    params: Params
    base: Params | None
    steps: int
    stopped: StopReason
    history: list[dict[str, float]]
    skipped: int
    advice: str = ""
    held_out: str = ""

    @classmethod
    def of(cls, run: RunContext, state: TrainState, *, advice: str, held_out: str) -> GRPOResult:
        """Return the result of a run whose loop is over."""
        return cls(
            params=state.params,
            base=state.base,
            steps=state.step,
            stopped=run.stopped or "finished",
            history=run.history,
            skipped=run.finite.skipped.count,
            advice=advice,
            held_out=held_out,
        )


async def prepare(
    config: GRPOConfig,
    model: Model,
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    *,
    policy: TrainableSampler | None,
    replay: Replay | None,
    held_out: Sequence[AnyEnvironment],
    mesh: Mesh | None,
    on_summary: Callable[[RunSummary], None],
) -> GRPOJob:
    """Check that a run's parts fit together. Arguments and errors as in `train.train`."""
    config = on_mesh(config, mesh)
    longest = _check_model(config, model, tokenizer, mesh)
    if replay is not None and held_out:
        raise InputError("batches that are replayed are not sampled, and nothing is evaluated; leave held_out out")
    if jax.process_count() > 1 and (mesh is None or (policy is None and replay is None)):
        raise InputError("on several hosts give a mesh of all their devices, and rollout servers as the policy")
    if isinstance(policy, Engine) and policy.config.max_length < longest:
        raise InputError(
            f"the engine's max_length is {policy.config.max_length}, and an episode has up to {longest} tokens "
            "(episode.max_prompt_tokens + max_response_tokens); give an engine that holds them"
        )
    if policy is None and replay is None:
        check_cache_fits(
            model, config.episodes_at_once, longest, mesh, config.weight_quantization, settings=MEMORY_SETTINGS
        )
    if replay is None:
        given, environments = len(environments), select_environments(environments, config)
        if is_first():
            await check_environments(environments, tokenizer, sandbox, config.episode)
            if held_out:
                check_apart(held_out, environments)
                await check_environments(held_out, tokenizer, sandbox, config.episode)
            on_summary(summarise(config, given, len(environments), len(held_out)))
    settings = settings_of(config) | ({} if config.constant_rate else {"steps": config.steps})
    identity = run_identity(
        grpo=settings,
        model=model_settings(model),
        environments=digest_of_environments(environments) if replay is None else replay.environments,
        tokenizer=tokenizer.digest,
    )
    if replay is None:
        return GRPOJob(config, config.steps, identity, identity, environments, longest)
    replay.check(identity, config.steps)
    return GRPOJob(config, config.steps, identity | {"replay": replay.run}, identity, (), longest)


def _check_model(config: GRPOConfig, model: Model, tokenizer: ChatTokenizer, mesh: Mesh | None) -> int:
    """Check that settings, model, tokenizer and mesh fit together; returns the tokens of the longest episode."""
    tokenizer.check_fits(model.vocab_size)
    longest = config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(longest, "episode.max_prompt_tokens + max_response_tokens")
    check_options(config.compiler_options, mesh)
    check_matmul(config.matmul_quantization, model, mesh)
    objective_function(config.objective)  # refused here and not after the first rollouts
    adapters.check(model, config.lora)
    if mesh is not None:
        for length, field in config.row_lengths.items():
            check_batch(mesh, config.micro_batch_size or 1, length, field)
    return longest


def reference_params(run: RunContext, start: Callable[[], Params], state: TrainState) -> Params | None:
    """Return the weights that the run started from, for the KL term, beside the optimizer's statistics in memory.

    Returns:
        None if the objective has no KL term, if they are the adapters' base, or if the run is done.

    Raises:
        WeightsError: the run resumes, and `start` returns other weights, or a checkpoint does not say which they were.
    """
    config: Any = run.config
    started_from = run.constant("started_from", state.digest)
    if not config.objective.kl_coef or config.lora.rank is not None or run.is_over(state):
        return None
    is_on_host = config.optimizer_offload
    if run.saved is None:
        return moments.away(state.params) if is_on_host else jax.tree.map(jnp.copy, state.params)
    found = start()
    if digest_of_weights(found, {}) != started_from:
        why = "were other ones" if started_from else "are not recorded: an earlier version of the program saved it"
        raise WeightsError(
            f"objective.kl_coef is set, and the weights that {run.folder} started from {why}; give "
            "those as --weights, or set it to 0"
        )
    return moments.away(found) if is_on_host else found


def programs(job: GRPOJob, model: Model, mesh: Mesh | None) -> dict[str, Callable[[], None]]:
    """Return functions that compile the programs of an update, to run during the first rollouts.

    Rows have the lengths that whole episodes may need. A longer row, possible if episodes share a prompt, is compiled
    when first needed. On CPUs, which also sample meanwhile, several lengths are left to the first batch that needs
    them.
    """
    config = job.config
    if config.mini_batches > 1 or config.objective.corrects_episodes or config.objective.kl_coef:
        return {}  # the compiler chooses the placement of what is computed before
    largest = bucket_for(job.longest, config.row_buckets)
    lengths = sorted(bucket for bucket in config.row_buckets if bucket <= largest)
    if len(lengths) > 1 and jax.default_backend() == "cpu":
        return {}

    def compile_accumulate(length: int) -> None:
        params, _, gradients, batch, _ = abstract_arguments(model, config, length, mesh)
        base = adapters.abstract_base(model, config.lora, mesh)
        accumulate.compile(params, gradients, batch, base=base, model=model, config=config, mesh=mesh)

    def compile_step() -> None:
        params, opt_state, gradients, _, total = abstract_arguments(model, config, largest, mesh)
        take_step.compile(params, opt_state, gradients, total, total, config=config, mesh=mesh)

    return {
        "take_step": compile_step,
        **{f"accumulate {length}": partial(compile_accumulate, length) for length in lengths},
    }


def step_metrics(
    batch: GroupBatch, metrics: Mapping[str, float], speed: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return a step's row of metrics by name. Each name is in docs/metrics.md, which tests compare with rows.

    Args:
        metrics: of the update.
        speed: of `Meter`.
        seconds: of the parts of the step.
    """
    rollout, counts = batch.filling.rollout, batch.filling.counts
    sampled = rollout.get("sampled_tokens", 0.0) * counts["episodes"]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    groups = {
        "rollout": {**rollout, "tokens_per_second": sampled / batch.filling.seconds},
        "filling": counts,
        "seconds": {"rollout": batch.filling.seconds, **seconds},
    }
    row = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
    # A replayed batch may have been counted by an earlier version.
    return {**todays_metrics(row), **metrics, "train/reward": sum(rewards) / len(rewards), **speed}
