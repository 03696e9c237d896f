"""Online multi-turn GRPO (paper §3): sample groups of episodes, keep those that differ, take one step, repeat.

One step:
  1. Roll out groups of `group_size` episodes, each group one environment with its tools and seeded irrelevant ones,
     until `batch_size` groups have Std(reward) > delta. Valid surplus waits for the next step.
  2. Advantage = (reward - group mean) / group deviation, the same for every sampled token of the episode.
  3. Pack the episodes into rows; sum the clipped objective over all sampled tokens, divide by their number (eq. 32).
     By default no KL term and no entropy bonus. What the sampler computed differently (kernels, or weights one step
     old) is corrected by truncated importance sampling. See `step.py`, and `losses.py` for other objectives.
  4. Step, hand the new weights to the policy, log, checkpoint.

With `async_steps=k` rollouts go on during steps 2 to 4, and across them: the policy gets new weights in the middle of
episodes, each token is labelled with the version that drew it, and a group is trained on when its oldest token is at
most k updates old. See `ahead.py`.

On several hosts each runs this program. The first one samples and tells the others its batch.

Run it with `python -m launch.grpo --config=grpo:14b`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from astra_jax.grpo.ahead import AsyncRollouts
from astra_jax.grpo.config import ROOM, GRPOConfig
from astra_jax.grpo.dump import FOLDER as BATCHES
from astra_jax.grpo.dump import BatchDump, DumpedUpdate
from astra_jax.grpo.environments import check_environments, select_environments
from astra_jax.grpo.episode_pages import write_episodes, write_exhausted
from astra_jax.grpo.held_out import FOLDER as HELD_OUT
from astra_jax.grpo.held_out import HeldOutEvaluation, check_apart
from astra_jax.grpo.journal import FOLDER as JOURNALS
from astra_jax.grpo.journal import Journals, kept_bytes
from astra_jax.grpo.packing import bucket_for
from astra_jax.grpo.replay import NoPolicy, Replay
from astra_jax.grpo.rollouts import GroupBatch, Rollouts, on_every_host
from astra_jax.grpo.step import abstract_arguments, accumulate, grpo_optimizer, take_step, update_step
from astra_jax.grpo.summary import summarise
from astra_jax.mesh import check_batch
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.model import Model, Params
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.engine.room import check_room
from astra_jax.rollout.policy import TrainablePolicy
from astra_jax.run import moments
from astra_jax.run.batch import on_mesh
from astra_jax.run.compiler import CompiledAhead, check_options
from astra_jax.run.digests import digest_of_json
from astra_jax.run.frozen import Origin
from astra_jax.run.hosts import awaited, failure_of_any, is_first, reached
from astra_jax.run.identity import model_settings, run_id, run_identity, settings_of
from astra_jax.run.matmuls import check_matmul
from astra_jax.run.shell import Stopped, TrainingRun
from astra_jax.run.summary import RunSummary, TimeLeft
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.datasets import Folder
from synthesis.core.environment import AnyEnvironment, fingerprint
from synthesis.core.files import location
from synthesis.core.progress import say_beside_bars
from synthesis.core.refusals import InputError
from synthesis.core.terminal import say

_FREE = (
    *("steps", "episodes_every", "max_groups_per_step", "row_buckets", "concurrent_groups", "deadline_seconds"),
    *("dump_batches", "max_masked_share", "eval_every", "eval_samples"),
)
"""May change when a run goes on, beside what may in every loop."""


@dataclass(frozen=True)
class GRPOResult:
    """What a run came to.

    Attributes:
        params: what was trained, the weights or the adapters, after `steps` steps.
        base: the frozen weights under adapters.
        stopped: `finished`; `preempted`: asked to stop, the same call goes on; or `exhausted`: see
            `max_groups_per_step`.
        history: this run's metric rows.
        skipped: steps that changed nothing, since their loss or gradient was not finite.
        advice: of an exhausted run, on the first host: whether all rewards were 0 or the maximum, and what to try.
        held_out: the last evaluation on held-out environments in a line, behind the first one; "" without any.
    """

    params: Params
    base: Params | None
    steps: int
    stopped: Stopped
    history: list[dict[str, float]]
    skipped: int
    advice: str = ""
    held_out: str = ""


async def train(
    config: GRPOConfig,
    model: Model,
    start: Callable[[], Params],
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    workdir: Folder,
    *,
    policy: TrainablePolicy | None = None,
    replay: Replay | None = None,
    held_out: Sequence[AnyEnvironment] = (),
    origin: Origin | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    on_summary: Callable[[RunSummary], None] = say,
) -> GRPOResult:
    """Train from what `start` gives, or go on from the latest checkpoint in `workdir`.

    SIGTERM, to any host, ends it, saved: after a step, or in the rollouts that it interrupts. What is finished of a
    batch is kept as it comes, also from a kill (`journal.py`).

    Args:
        start: gives the starting policy's weights; called where there is no checkpoint. They are taken over: a step
            donates them, and nothing of them stays on the devices. With adapters it is called always, and they stay.
            With `objective.kl_coef` it is called when the run resumes, too, and must give the weights of its start.
        environments: at least one, records or others; each must be scorable, its prompt must fit, and the reference
            calls of a record must succeed. `config.solve_rates` may leave some out.
        sandbox: where the calls of records run; already started.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/`, `episodes/`, `profile/`, and in `rollouts/`
            the batch under way. All hosts share it.
        policy: who samples; by default an embedded engine is made and closed here. On several hosts only the first
            one's samples; the others' `update` takes part in publishing weights.
        replay: the batches of a run that wrote them, which are trained on instead: then nothing is sampled, and
            environments and sandbox are not used.
        held_out: environments to evaluate on, none of which is trained on (`held_out.py`).
        origin: where `start` reads the weights; with adapters, whose checkpoints do not have them, it is kept there.
        mesh: devices of the update; None is one device.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        on_summary: called on the first host before the first step, with the run's table; not with `replay`.

    Raises:
        ValueError: no environments, or one that cannot be used, or without a solve rate where one is needed; adapters'
            targets that the model does not have; a model whose vocabulary is too small or its context too short; a mesh
            that does not divide a micro-batch; several hosts without a policy. The message names it.
        SettingError: the devices have no room for the embedded engine's cache.
        WeightsError: a run with `objective.kl_coef` resumes with other weights from `start`.
        NonFiniteError: a loss or gradient was not finite.
        Exception: what `TrainingRun` raises.
    """
    config = on_mesh(config, mesh)
    longest = _check(config, model, tokenizer, mesh)
    if replay is not None:
        if held_out:
            raise InputError("batches that are replayed are not sampled, and nothing is evaluated; leave held_out out")
        policy, environments = NoPolicy(), ()
    if jax.process_count() > 1 and (policy is None or mesh is None):
        raise InputError("on several hosts give a mesh of all their devices, and rollout servers as the policy")
    slots = config.episodes_at_once
    if isinstance(policy, Engine) and policy.config.max_length < longest:
        raise InputError(
            f"the engine's max_length is {policy.config.max_length}, and an episode has up to {longest} tokens "
            "(episode.max_prompt_tokens + max_response_tokens); give an engine that holds them"
        )
    if policy is None:
        check_room(model, slots, longest, mesh, config.stored, settings=ROOM)
    if replay is None:
        given, environments = len(environments), select_environments(environments, config)
        if is_first():
            await check_environments(environments, tokenizer, sandbox, config.episode)
            if held_out:
                check_apart(held_out, environments)
                await check_environments(held_out, tokenizer, sandbox, config.episode)
            on_summary(summarise(config, given, len(environments), len(held_out)))
    settings = settings_of(config, free=_FREE) | ({} if config.constant_rate else {"steps": config.steps})
    identity = run_identity(
        grpo=settings,
        model=model_settings(model),
        environments=_digest(environments) if replay is None else replay.environments,
        tokenizer=tokenizer.digest,
    )
    if replay is not None:
        replay.check(identity, config.steps)
    async with AsyncExitStack() as stack:
        shell = TrainingRun(
            "GRPO",
            config,
            model,
            workdir,
            steps=config.steps,
            identity=identity if replay is None else identity | {"replay": replay.run},
            origin=origin,
            kept=lambda: sum(kept_bytes(location(workdir) / one) for one in (JOURNALS, HELD_OUT)),
            profile=profile,
            progress=progress,
        )
        run = stack.enter_context(shell)
        ahead = stack.enter_context(CompiledAhead(_programs(model, config, longest, mesh)))
        step, params, opt_state, extra = run.begin(start, grpo_optimizer(config), mesh)
        started_from = run.digest(params) if extra is None else extra.get("started_from", "")
        reference = None
        if config.objective.kl_coef and config.lora.rank is None and step < config.steps:
            reference = _reference(run, start, params if extra is None else None, started_from)

        def of_policy(params: Params, copied: bool = False) -> Params:
            """What samples: of what is trained, a copy; what is frozen is shared."""
            return adapters.joined(jax.tree.map(jnp.copy, params) if copied else params, run.base, config.lora)

        if policy is None:
            policy = Engine(
                of_policy(params), model, EngineConfig(slots=slots, max_length=longest, stored=config.stored)
            )
            stack.push_async_callback(policy.close)
        journals = None
        if is_first() and replay is None:
            journals = Journals(run.folder / JOURNALS, run_id(run.folder), digest_of_json(identity))
        kind = AsyncRollouts if config.async_steps else Rollouts
        rollouts = replay or kind(policy, sandbox, environments, tokenizer, config, journals)
        stack.push_async_callback(rollouts.close)
        if extra is not None:
            rollouts.load(extra["rollouts"])
        copies = bool(config.async_steps) and policy.samples_with_given_arrays
        dump: BatchDump | None = None
        if config.dump_batches and is_first():
            id = run_id(run.folder)
            dump = BatchDump(run.folder / BATCHES, run=id, identity=identity, tokenizer=tokenizer)
            dump.begin(step)

        evaluation = None
        if held_out and is_first():
            where = run.folder / HELD_OUT
            arguments = policy, sandbox, held_out, tokenizer, config, where
            evaluation = HeldOutEvaluation(*arguments, run=run_id(run.folder), progress=progress)

        async def evaluate(step: int, weights: str) -> None:
            """Log the rewards of the current weights on held-out environments, where that is due."""
            if evaluation is None or not evaluation.is_due(step):
                return
            run.amend(step, await evaluation.evaluate(step, weights))
            if policy.samples_with_given_arrays and not config.async_steps:
                # Its caches are emptied: keys and values of an evaluation, copied, round otherwise than computed ones.
                await policy.update(of_policy(params), step)

        async def fill(step: int) -> None:
            def told(missing: int) -> None:
                run.bar.set_postfix_str(f"{missing} groups missing")

            if is_first():
                await rollouts.fill(step, told)

        def save() -> None:
            before = run.saved
            run.save(step, params, opt_state, {"rollouts": rollouts.state(), "started_from": started_from})
            # The checkpoint before is whole once the next one is begun, and may be gone on from. One that is saved
            # twice, since the run is asked to stop behind it, may still be written.
            if journals is not None and before is not None and before != step:
                journals.forget(before - config.async_steps)

        def keep() -> None:
            """Save what was trained, before servers that fail end the run."""
            if step:
                save()

        async def failed(work: Awaitable[Any]) -> Exception | None:
            """What it failed of; of several hosts, which all call this, on any of them."""
            failure = None
            try:
                await awaited(work)
            except Exception as error:
                failure = error
            return await asyncio.to_thread(failure_of_any, failure)

        async def follow(step: int, weights: str) -> None:
            if is_first():
                await rollouts.follow(step, weights)

        async def dumped(update: int, batch: GroupBatch) -> DumpedUpdate | None:
            if dump is None:
                return None
            return await asyncio.to_thread(dump.write, update, batch.groups, msgspec.to_builtins(batch.filling))

        async def committed(written: Awaitable[DumpedUpdate | None], before: str, after: str) -> None:
            if (line := await written) is not None and dump is not None:
                await asyncio.to_thread(dump.commit, line, before, after)

        async def sync(step: int, weights: str) -> Exception | None:
            """Have the policy sample with what is trained, and rollouts know of it; what that failed of."""
            failure = await failed(follow(step, weights))
            return failure or await failed(policy.update(of_policy(params, copies), step))

        async def or_kept(work: Awaitable[Any]) -> None:
            if (failure := await failed(work)) is not None:
                keep()
                raise failure

        advice = ""
        sampling: asyncio.Task[None] | None = None
        writing: asyncio.Task[DumpedUpdate | None] | None = None

        async def finished(work: Coroutine[Any, Any, None]) -> bool:
            """Wait for what samples; False where the run is to stop."""
            nonlocal sampling
            sampling = asyncio.create_task(work)
            await or_kept(run.finished(sampling))
            await run.agree()
            return run.stopped is None

        async def evaluated(step: int, weights: str) -> bool:
            """Evaluate where that is due; False where the run is to stop."""
            return run.stopped is None and (not held_out or await finished(evaluate(step, weights)))

        stack.push_async_callback(lambda: _cancelled(sampling, writing))
        weights, time_left = run.digest(params), TimeLeft(config.steps)
        if (failure := await sync(step, weights)) is not None:
            raise failure
        while await evaluated(step, weights) and step < config.steps:
            started = time.perf_counter()
            if not await finished(fill(step)):
                break
            batch = await asyncio.to_thread(on_every_host, rollouts.take() if is_first() else None)
            if batch is None:
                run.stopped = "exhausted"
                exhausted = rollouts.exhaustion()
                row = run.log(step, exhausted.metrics())
                if is_first():
                    advice, page = exhausted.advice, run.folder / "episodes" / f"exhausted_{step:05}.html"
                    write_exhausted(page, exhausted, row)
                    for line in (*exhausted.lines(), f"  episodes: {page}"):
                        say_beside_bars(line)
                break
            writing = asyncio.create_task(dumped(step, batch))  # beside the update
            waited, start_of_update = time.perf_counter() - started, time.perf_counter()
            if not config.async_steps:
                await or_kept(policy.sleep())
            run.meter.start()
            with run.traced(step + 1):
                # In a thread, so that rollouts may go on meanwhile, and servers are looked after.
                params, opt_state, metrics = await asyncio.to_thread(
                    update_step,
                    params,
                    opt_state,
                    batch.groups,
                    model,
                    config,
                    base=run.base,
                    reference=reference,
                    mesh=mesh,
                    update=step,
                    on_rows=run.meter.add,
                    before=ahead.wait,
                    # It may take hours, in which hosts wait for one another: they see that each goes on.
                    on_result=partial(reached, step + 1) if jax.process_count() > 1 else None,
                )
            speed, seconds_of_update = run.meter.read(), time.perf_counter() - start_of_update
            step += 1
            run.check(step, metrics)
            run.settle()
            run.notice(step)
            before, weights = weights, run.digest(params)
            if (failure := await failed(committed(writing, before, weights))) is not None:
                raise failure  # nothing is saved: the next start has the batch from its journal, and writes it
            # What fails from here on is raised when the step is logged and saved.
            start_of_publish = time.perf_counter()
            if run.stopped is None:
                failure = await failed(policy.prepare(of_policy(params), step))
            seconds_of_publish = time.perf_counter() - start_of_publish
            start_of_sync = time.perf_counter()
            if run.stopped is None and failure is None:
                failure = await sync(step, weights)
            now = time.perf_counter()
            seconds = {"rollout": batch.filling.seconds, "update": seconds_of_update, "wait": waited}
            seconds |= {"publish": seconds_of_publish, "sync": now - start_of_sync, "step": now - started}
            time_left.add(step, now - started)
            row = run.log(step, _row(batch, metrics, speed, seconds) | policy.metrics())
            if failure is not None:
                keep()
                raise failure
            if run.writer is not None and config.episodes_every and step % config.episodes_every == 0:
                write_episodes(run.folder / "episodes" / f"update_{step:05}.html", step, batch.groups, row)
            if run.due(step):
                save()
            run.bar.update()
            if "rollout/reward" in row:  # not when the whole batch came from the surplus
                run.bar.set_postfix(reward=f"{row['rollout/reward']:.3f}", valid=f"{row['filling/valid_share']:.0%}")
        await rollouts.close()
        if run.stopped is not None:
            save()
        elif journals is not None:
            run.checkpointer.wait()
            journals.forget()
        summary, stopped = "" if evaluation is None else evaluation.summary, run.stopped or "finished"
        return GRPOResult(params, run.base, step, stopped, run.history, run.skipped.count, advice, summary)


def _reference(run: TrainingRun, start: Callable[[], Params], params: Params | None, started_from: str) -> Params:
    """The weights that the run started from, for the KL term; they lie where the optimizer's statistics do.

    Args:
        params: these weights, of which a copy is made; None: the run resumes, and `start` gives them again.
        started_from: their digest, as the checkpoint has it; "": it has none.

    Raises:
        WeightsError: `start` gives other weights, or nobody knows which they were.
    """
    is_away = run.config.optimizer_memory == "host"
    if params is not None:
        return moments.away(params) if is_away else jax.tree.map(jnp.copy, params)
    found = start()
    if run.digest(found) != started_from:
        why = "were other ones" if started_from else "are not recorded: an earlier version of the program saved it"
        raise WeightsError(
            f"objective.kl_coef is set, and the weights that {run.folder} started from {why}; give "
            "those as --weights, or set it to 0"
        )
    return moments.away(found) if is_away else found


async def _cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    for task in tasks:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _check(config: GRPOConfig, model: Model, tokenizer: ChatTokenizer, mesh: Mesh | None) -> int:
    """Refuse what does not fit together; the longest sequence, in tokens."""
    tokenizer.check_fits(model.vocab_size)
    longest = config.episode.max_prompt_tokens + config.episode.max_response_tokens
    model.check_length(longest, "episode.max_prompt_tokens + max_response_tokens")
    check_options(config.compiler_options, mesh)
    check_matmul(config.matmul, model, mesh)
    adapters.check(model, config.lora)
    if mesh is not None:
        for length, field in config.row_lengths.items():
            check_batch(mesh, config.micro_batch_size or 1, length, field)
    return longest


def _programs(model: Model, config: GRPOConfig, longest: int, mesh: Mesh | None) -> dict[str, Callable[[], None]]:
    """What an update runs, to be compiled while the first rollouts are made.

    The lengths of rows are those that whole episodes may need; a longer one, which a batch may take where prompts lie
    in a row once, is compiled when it is first taken. On CPUs, which sample meanwhile, and with whose time a program
    that no batch needs would be paid, several are left to the first batch that has them.
    """
    if config.mini_batches > 1 or config.objective.corrects_episodes or config.objective.kl_coef:
        return {}  # what is computed before has a place that the compiler chooses
    largest = bucket_for(longest, config.row_buckets)
    lengths = sorted(bucket for bucket in config.row_buckets if bucket <= largest)
    if len(lengths) > 1 and jax.default_backend() == "cpu":
        return {}

    def accumulating(length: int) -> Callable[[], None]:
        def compile_one() -> None:
            params, _, gradients, batch, _ = abstract_arguments(model, config, length, mesh)
            base = adapters.abstract_base(model, config.lora, mesh)
            accumulate.compile(params, gradients, batch, base=base, model=model, config=config, mesh=mesh)

        return compile_one

    def compile_step() -> None:
        params, opt_state, gradients, _, total = abstract_arguments(model, config, largest, mesh)
        take_step.compile(params, opt_state, gradients, total, total, config=config, mesh=mesh)

    return {"take_step": compile_step} | {f"accumulate {length}": accumulating(length) for length in lengths}


def _row(
    batch: GroupBatch, metrics: Mapping[str, float], speed: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of one step, by name."""
    rollout, counts = batch.filling.rollout, batch.filling.counts
    sampled = rollout.get("sampled_tokens", 0.0) * counts["episodes"]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    trained = {**metrics, "reward": sum(rewards) / len(rewards)}
    groups = {
        "rollout": rollout,
        "train": {**trained, **{name: value for name, value in speed.items() if name != "tokens_per_second"}},
        "filling": counts,
        "seconds": seconds,
        "tokens_per_second": {
            "rollout": sampled / batch.filling.seconds,
            "update": metrics["trained_tokens"] / seconds["update"],
        },
    }
    return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}


def _digest(environments: Sequence[AnyEnvironment]) -> str:
    return hashlib.sha256(b"".join(map(fingerprint, environments))).hexdigest()
