"""What both training loops are wrapped in: nothing that is not finite is saved, one run in a workdir, SIGTERM saves."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rollout_world import ScriptedSampler, call, make_environment
from selection import by_day
from sft_world import AfterUpdate, make_dataset, starting, trajectories

from astra_jax.base.files import RemovedError
from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.step import take_step
from astra_jax.models.decoder import Decoder
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run import finite
from astra_jax.run.checkpoints import Checkpointer, CheckpointError
from astra_jax.run.finite import NonFiniteError
from astra_jax.run.gradients import accumulate_scan
from astra_jax.run.identity import check_same_run, model_settings, run_identity
from astra_jax.run.metrics import read_metrics
from astra_jax.run.optimizers import apply_gradients, initial_state, make_optimizer
from astra_jax.run.weights import load_orbax, save_orbax
from astra_jax.sft import step as sft_step
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from synthesis.core.workdir import WorkdirError, locked

SFT = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4, too_long="cut"),
    batch_size=2,
    steps=3,
    learning_rate=1e-2,
    checkpoint_every=1,
    sample_every=0,
)
GRPO = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=4,
    micro_batch_size=2,
    learning_rate=1e-2,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(512, 800),
    checkpoint_every=10,
)


@pytest.fixture(scope="module")
def model(chat_tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=chat_tokenizer.vocab_size,
        d_model=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=32,
        tie_embeddings=True,
        max_positions=1024,
    )


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "trajectories", trajectories(8, longest=2))


@pytest.fixture
def run_sft(model, params, dataset, chat_tokenizer, tmp_path):
    def run(config=SFT, start=params, **options):
        return sft.train(config, model, starting(start), dataset, chat_tokenizer, tmp_path, progress=False, **options)

    return run


def saved_steps(workdir) -> list[int]:
    checkpointer = Checkpointer(workdir / "checkpoints", reading=True)
    try:
        return checkpointer.params_steps()
    finally:
        checkpointer.close()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def test_gradients_of_bfloat16_weights_are_added_up_in_float32() -> None:
    """1,024 micro-batches of one gradient: bfloat16 stops at 256 of them."""
    weights = {"w_d": jnp.ones(4, jnp.bfloat16)}
    batch = jnp.full((1_024, 1, 4), 0.5, jnp.bfloat16)

    def loss(params, batch, base, mesh):
        total = jnp.sum((batch * params["w_d"]).astype(jnp.float32))
        return total, jnp.float32(1)

    gradients, (total, count) = jax.jit(partial(accumulate_scan, loss))(weights, None, batch)
    np.testing.assert_array_equal(gradients["w_d"], np.full(4, 512.0, np.float32))
    assert (float(total), float(count)) == (2_048.0, 1_024.0)


def test_grpo_moves_bfloat16_weights_by_updates_below_their_last_place() -> None:
    """At the paper's learning rate, of weights as they are initialised; rounded to nearest hardly any moves."""
    start = {"w_df": (0.02 * jax.random.normal(jax.random.key(0), (64, 64))).astype(jnp.bfloat16)}

    def changed(config: GRPOConfig) -> float:
        params, state = initial_state(starting(start)(), make_optimizer(config, config.learning_rate))
        for step in range(100):
            gradients = {"w_df": jax.random.normal(jax.random.key(step), (64, 64)) + 1}
            given = (gradients, jnp.float32(1), jnp.float32(config.learning_rate))
            params, state, _ = take_step(params, state, *given, config=config)
        return float((params["w_df"] != start["w_df"]).mean())

    config = dataclasses.replace(GRPO, learning_rate=2e-6, weight_decay=0.0)
    assert changed(config) > 0.5 > 0.2 > changed(dataclasses.replace(config, rounding="nearest"))


OPTIMIZERS = [(name, dtype) for name in ("adamw", "muon") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "dtype"), by_day(OPTIMIZERS, ("adamw", "bfloat16"), ("muon", "float32")))
def test_one_broken_gradient_changes_nothing(params, name, broken, dtype) -> None:
    step, own, state, gradients = optimizer_steps(params, name, dtype, rate=1e-2)
    own, state, said = step(own, state, gradients, jnp.float32(2))
    assert math.isfinite(said["gradient_norm"]) and said["weights_finite"]
    spoilt = jax.tree.map(jnp.copy, gradients)
    spoilt["embed_vd"] = spoilt["embed_vd"].at[3, 2].set(broken)
    after, later, said = step(own, state, spoilt, jnp.float32(2))
    assert not math.isfinite(said["gradient_norm"]) and said["weights_finite"]
    check_same(own, after)
    places = (find_schedules(one) for one in (state, later))
    for before, behind in zip(*places, strict=True):  # it takes its place there, as the log has it
        assert behind.count == before.count + 1
    check_same(*(jax.tree.map(without_place, one, is_leaf=is_schedule) for one in (state, later)))


def is_schedule(x: object) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)


def find_schedules(state: object) -> list[optax.ScaleByScheduleState]:
    return [one for one in jax.tree.leaves(state, is_leaf=is_schedule) if is_schedule(one)]


def without_place(x):
    return () if is_schedule(x) else x


@pytest.mark.parametrize("rate", [math.nan, 1e38])
@pytest.mark.parametrize(("name", "dtype"), by_day(OPTIMIZERS, ("adamw", "bfloat16"), ("muon", "float32")))
def test_an_update_that_breaks_a_weight_is_told(params, name, rate, dtype) -> None:
    """The gradient is finite; what the step makes of one weight, at least, is not."""
    step, own, state, gradients = optimizer_steps(params, name, dtype, rate=rate)
    own["embed_vd"] = own["embed_vd"].at[3, 2].set(3e38)
    *_, said = step(own, state, jax.tree.map(jnp.negative, gradients), jnp.float32(2))
    assert math.isfinite(said["gradient_norm"]) and not said["weights_finite"]


def optimizer_steps(params, name: str, dtype: str, *, rate: float):
    """(a step, weights of a type, the optimizer's state, gradients that are all 1)."""
    config = dataclasses.replace(GRPO, optimizer=name, weight_decay=0.1)
    own, state = initial_state(
        jax.tree.map(lambda x: x.astype(dtype), starting(params)()), make_optimizer(config, lambda step: rate)
    )
    return partial(taken, jnp.float32(rate), config=config), own, state, jax.tree.map(jnp.ones_like, own)


@partial(jax.jit, static_argnames="config")
def taken(rate, params, state, gradients, total, *, config: GRPOConfig):
    """A step at any rate: one program for each optimizer and type of weights."""
    optimizer = make_optimizer(config, lambda step: rate)
    return apply_gradients(params, state, gradients, total, optimizer=optimizer, rounding="stochastic")


def check_same(before, after) -> None:
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(old, np.float32), np.asarray(new, np.float32))


# ---------------------------------------------------------------------------------------------------------------------
# What is not finite


@pytest.fixture(scope="module")
def huge(params):
    """Finite weights that make no finite loss."""
    return params | {"embed_vd": params["embed_vd"].at[5].set(3e38)}


def test_a_broken_step_ends_the_run_before_it_is_saved(run_sft, huge, tmp_path) -> None:
    with pytest.raises(NonFiniteError, match="step 1: .*loss is (nan|inf).*nothing was saved yet.*on_nonfinite=skip"):
        run_sft(start=huge)
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_rate_that_is_no_number_ends_the_run_at_its_first_step(run_sft, tmp_path, monkeypatch, on_nonfinite) -> None:
    """Settings refuse such a rate; a schedule, or a rate beyond what the weights hold, comes to the same."""
    monkeypatch.setattr(sft_step, "learning_rate", lambda config, steps: lambda count: math.nan * count)
    config = dataclasses.replace(SFT, on_nonfinite=on_nonfinite, b1=0.91)
    with pytest.raises(NonFiniteError, match="step 1 made weights that are not finite, .*: nothing was saved yet"):
        run_sft(config)
    assert saved_steps(tmp_path) == []


SKIP = dataclasses.replace(SFT, on_nonfinite="skip")


@pytest.fixture
def break_steps(monkeypatch):
    """Make the gradients of given steps infinite; `None`: of all."""
    step = sft.train_step

    def broken(*steps: int) -> None:
        taken = iter(range(1, 1_000))

        def train_step(params, opt_state, batch, **options):
            params, opt_state, metrics = step(params, opt_state, batch, **options)
            return params, opt_state, metrics | ({"gradient_norm": math.inf} if next(taken) in steps else {})

        train_step.compile = step.compile  # type: ignore[attr-defined]
        monkeypatch.setattr(sft, "train_step", train_step)

    return broken


def test_broken_steps_can_be_left_out_and_are_counted(run_sft, break_steps) -> None:
    break_steps(2)
    result = run_sft(SKIP)
    assert (result.steps, result.skipped, result.stopped) == (3, 1, "finished")
    assert [row["skipped_steps"] for row in result.history] == [0, 1, 1]


def test_a_run_whose_steps_were_all_left_out_is_no_success(run_sft, huge, tmp_path) -> None:
    """It exited with 0, with weights that nothing was trained on."""
    message = "3 of 3 steps changed nothing, from step 1 on: .* step 3 was trained by 0 steps only. Lower learning_rate"
    for _ in range(2):  # the same command again has nothing left to do, and is no success either
        with pytest.raises(NonFiniteError, match=message):
            run_sft(SKIP, start=huge)
    assert [row["skipped_steps"] for row in read_metrics(tmp_path / "metrics")] == [1, 2, 3]
    check_same(huge, load_params(tmp_path, huge))


def load_params(workdir, like):
    checkpointer = Checkpointer(workdir / "checkpoints", reading=True)
    try:
        return checkpointer.restore_params(checkpointer.params_steps()[-1], like)
    finally:
        checkpointer.close()


@pytest.mark.parametrize(("broken", "is_refused"), by_day([((1, 4), False), ((2, 3, 4), True)], ((2, 3, 4), True)))
def test_more_than_half_of_the_steps_left_out_is_no_success(run_sft, break_steps, broken, is_refused) -> None:
    break_steps(*broken)
    config = dataclasses.replace(SKIP, steps=4)
    if is_refused:
        with pytest.raises(NonFiniteError, match="3 of 4 steps changed nothing, from step 2 on"):
            run_sft(config)
    else:
        assert run_sft(config).skipped == 2


@pytest.mark.parametrize("log_every", by_day([1, 4], 4))
def test_steps_left_out_in_a_row_end_a_run_also_over_starts(run_sft, break_steps, tmp_path, monkeypatch, log_every):
    monkeypatch.setattr(finite, "MAX_SKIPPED_IN_A_ROW", 6)
    break_steps(2, *range(4, 30))
    config = dataclasses.replace(SKIP, steps=30, log_every=log_every, checkpoint_every=5)
    with pytest.raises(RuntimeError, match="killed"):
        run_sft(config, hooks=[AfterUpdate(killed_at(8))])
    break_steps(*range(30))
    message = "the last [67] steps, up to step (9|10), changed nothing: .* of [78] steps in all, from step 2 on. "
    with pytest.raises(NonFiniteError, match=f"{message}The last checkpoint is of step 5. Lower learning_rate"):
        run_sft(config)
    assert saved_steps(tmp_path) == [5] and read_metrics(tmp_path / "metrics")[-1]["skipped_steps"] >= 5


def killed_at(last: int):
    """A function that ends the run when a step is logged, before it is saved."""

    def on_step(step, row) -> None:
        if step == last:
            raise RuntimeError("killed")

    return on_step


def test_a_run_that_goes_on_counts_all_that_it_left_out_and_traces_the_rest(run_sft, break_steps, tmp_path) -> None:
    break_steps(1)
    with pytest.raises(RuntimeError, match="killed"):
        run_sft(SKIP, hooks=[AfterUpdate(killed_at(2))])
    break_steps()
    rows = run_sft(SKIP, profile=(1, 2)).history
    assert [(row["step"], row["skipped_steps"]) for row in rows] == [(2, 1), (3, 1)]
    assert list((tmp_path / "profile").rglob("*.xplane.pb")), "from step 2, as the first step was taken before"


def test_a_start_that_saved_nothing_counts_in_goodput(run_sft, tmp_path) -> None:
    config = dataclasses.replace(SFT, steps=2, checkpoint_every=100)
    began = []
    for last in (2, 1):
        with pytest.raises(RuntimeError, match="killed"):
            run_sft(config, hooks=[AfterUpdate(killed_at(last))])
        began += [row["goodput/began"] for row in read_metrics(tmp_path / "metrics")]
    began += [row["goodput/began"] for row in run_sft(config).history]
    assert began == began[:1] * 5


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_is_set_during_a_run_changes_no_goodput(run_sft, monkeypatch, jump) -> None:
    real = time.time

    def on_step(step, row) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + jump)

    rows = run_sft(hooks=[AfterUpdate(on_step)]).history
    assert all(0 <= row["goodput/kept_seconds"] < 3600 and 0 <= row["goodput/share"] <= 1 for row in rows)
    kept = [row["goodput/kept_seconds"] for row in rows]
    assert kept == sorted(kept) and kept[0] < kept[-1]


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_weights_that_are_broken_are_no_start(run_sft, params, tmp_path, on_nonfinite) -> None:
    """Also where no token reads them: they would be in every checkpoint."""
    broken = params | {"embed_vd": params["embed_vd"].at[5, 0].set(jnp.nan)}
    with pytest.raises(NonFiniteError, match=r"the weights to start from: \['embed_vd'\] holds numbers"):
        run_sft(dataclasses.replace(SFT, on_nonfinite=on_nonfinite), start=broken)
    assert saved_steps(tmp_path) == []


def test_a_checkpoint_that_is_broken_is_not_gone_on_from(run_sft, params, model, tmp_path) -> None:
    """Versions before saved such."""
    run_sft(dataclasses.replace(SFT, steps=2))
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    like = initial_state(starting(params)(), sft_step.sft_optimizer(SFT, 3))
    held, state, extra = checkpointer.restore(2, like)
    held["embed_vd"] = held["embed_vd"].at[5, 0].set(jnp.inf)
    checkpointer.save(2, params=held, state=state, extra=extra | {"identity": extra["identity"] | {"sft.steps": 3}})
    checkpointer.close()
    with pytest.raises(NonFiniteError, match="checkpoints, step 2: .*embed_vd"):
        run_sft()


async def test_grpo_hands_no_broken_weights_to_its_policy(pool, model, huge, chat_tokenizer, tmp_path) -> None:
    policy = ScriptedSampler(chat_tokenizer, by_seed)
    arguments = (GRPO, model, starting(huge), [make_environment()], chat_tokenizer, pool, tmp_path)
    with pytest.raises(NonFiniteError, match="step 1"):
        await grpo.train(*arguments, policy=policy, progress=False)
    assert policy.version == 0 and saved_steps(tmp_path) == []


class Unsure(ScriptedSampler):
    """Of one token it says no logprob that is a number."""

    async def generate(self, *arguments, **options):
        made = await super().generate(*arguments, **options)
        return dataclasses.replace(made, logprobs=[math.nan, *made.logprobs[1:]])


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
async def test_grpo_takes_no_step_from_logprobs_that_are_no_numbers(
    pool, model, params, chat_tokenizer, tmp_path, on_nonfinite
) -> None:
    config = dataclasses.replace(GRPO, steps=1, on_nonfinite=on_nonfinite)
    arguments = (config, model, starting(params), [make_environment()], chat_tokenizer, pool, tmp_path)
    run = grpo.train(*arguments, policy=Unsure(chat_tokenizer, by_seed), progress=False)
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="step 1: loss is nan"):
            await run
        assert saved_steps(tmp_path) == []
    else:
        with pytest.raises(NonFiniteError, match="1 of 1 steps changed nothing, from step 1 on"):
            await run
        assert read_metrics(tmp_path / "metrics")[0]["skipped_steps"] == 1
        check_same(params, load_params(tmp_path, params))


# ---------------------------------------------------------------------------------------------------------------------
# One run in a workdir


def test_a_workdir_in_use_is_refused(run_sft, tmp_path) -> None:
    # Who holds a workdir may enter it again; here it is somebody else, as each thread is.
    with ThreadPoolExecutor(1) as other:
        held = locked(tmp_path)
        other.submit(held.__enter__).result()
        with pytest.raises(WorkdirError, match=r"in use by another process \(process \d+ of "):
            run_sft()
        other.submit(held.__exit__, None, None, None).result()
    with locked(tmp_path):
        assert run_sft().steps == 3


@pytest.mark.parametrize(("log_every", "last"), [(1, 1), (100, 3)])
def test_sft_stops_when_its_workdir_is_removed(
    model, params, dataset, chat_tokenizer, tmp_path, log_every, last
) -> None:
    """Training to the end took hours, and nothing of it was on the disk."""
    workdir, logged = tmp_path / "run", []

    def on_step(step, row) -> None:
        logged.append(step)
        if step == last:
            shutil.rmtree(workdir)

    config = dataclasses.replace(SFT, log_every=log_every, checkpoint_every=100)  # no save is under way at the removal
    hooks = [AfterUpdate(on_step)]
    with pytest.raises(RemovedError, match=f"^{workdir} was removed, moved or replaced while"):
        sft.train(
            config, model, starting(params), dataset, chat_tokenizer, workdir, progress=False, hooks=hooks
        )  # fmt: skip
    assert logged == [last] and not workdir.exists()


async def test_grpo_stops_within_the_batch_when_its_workdir_is_removed(
    pool, model, params, chat_tokenizer, tmp_path
) -> None:
    workdir, sampled = tmp_path / "run", []

    class Removes(ScriptedSampler):
        async def generate(self, *arguments, **options):
            sampled.append(len(sampled))
            if len(sampled) == 5 and workdir.exists():
                workdir.rename(tmp_path / "elsewhere")
            return await super().generate(*arguments, **options)

    arguments = (GRPO, model, starting(params), [make_environment()], chat_tokenizer, pool, workdir)
    with pytest.raises(RemovedError, match=f"^{workdir} was removed, moved or replaced while"):
        await grpo.train(*arguments, policy=Removes(chat_tokenizer, by_seed), progress=False)
    assert not workdir.exists()
    assert read_metrics(tmp_path / "elsewhere" / "metrics") == [], "not one update was made"


def test_a_checkpoint_of_the_version_before_is_of_the_same_run() -> None:
    before = {
        "sft.data.rows": 32,
        "sft.accumulation": 4,
        "sft.rounding": "nearest",
        "sft.remat": "full",
        "grpo.groups_per_batch": 256,
        "grpo.micro_batch_rows": 1,
        "grpo.row_buckets": [4096],
        "grpo.mini_batches": 1,
        "grpo.delta": 0.01,
        "grpo.objective.normalisation": "batch",
        "grpo.objective.proximal": "trainer",
        "grpo.max_faults": 3,
        "model.param_dtype": "float32",
    }
    now = {
        "sft.batch_size": 32,
        "grpo.batch_size": 256,
        "grpo.mini_batches": 1,
        "grpo.min_reward_std": 0.01,
        "grpo.objective.loss_agg_mode": "batch",
        "grpo.objective.ratio_reference": "trainer",
        "model.param_dtype": "float32",
    }
    check_same_run(before, now, "DIR")
    with pytest.raises(WorkdirError, match="sft.batch_size is 32 there, 16 here"):
        check_same_run(before, now | {"sft.batch_size": 16}, "DIR")
    halves = {"model.param_dtype": "bfloat16"}
    with pytest.raises(WorkdirError, match="grpo.rounding is 'nearest' there, 'stochastic' here"):
        check_same_run(
            before | halves, now | halves | {"sft.rounding": "nearest", "grpo.rounding": "stochastic"}, "DIR"
        )


def test_a_run_of_another_family_of_equal_sizes_is_refused(model, params, dataset, chat_tokenizer, tmp_path) -> None:
    llama, qwen2 = LlamaConfig(**vars(model)), Qwen2Config(**vars(model) | {"attention_bias": True})

    def train(one: Decoder) -> None:
        start = starting(one.init(jax.random.key(0)))
        sft.train(SFT, one, start, dataset, chat_tokenizer, tmp_path, progress=False)

    train(llama)
    for other in (model, qwen2):
        with pytest.raises(WorkdirError, match=f"model.family is 'llama' there, '{other.family}' here"):
            train(other)
    # A run of the version before did not say its family; it had Qwen3's weights, and no other family takes them.
    now = run_identity(model=model_settings(model))
    check_same_run({name: value for name, value in now.items() if name != "model.family"}, now, "DIR")
    save_orbax(params, model, tmp_path / "before")
    for other in (llama, qwen2):
        with pytest.raises(CheckpointError, match="another model"):
            load_orbax(tmp_path / "before", other)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics, traces, and the wish to stop


def test_what_is_held_out_is_measured_on_steps_that_are_not_logged_otherwise(run_sft, dataset, tmp_path) -> None:
    config = dataclasses.replace(SFT, steps=7, log_every=5, eval_every=3, checkpoint_every=100)
    rows = run_sft(config, held_out=dataset).history
    assert [row["step"] for row in rows] == [3, 5, 6, 7]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [3, 6, 7]


def by_seed(session: str, turn: int, seed: int) -> str:
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


@pytest.mark.parametrize("async_steps", by_day([0, 1], 1))
async def test_sigterm_in_the_middle_of_rollouts_saves_and_resumes_to_the_bit(
    pool, model, params, chat_tokenizer, tmp_path, async_steps
) -> None:
    environments = [make_environment("a"), make_environment("b", "Japan")]
    config = dataclasses.replace(GRPO, async_steps=async_steps)

    class Notified(ScriptedSampler):
        """Is sent SIGTERM while it draws the second step's episodes."""

        async def generate(self, *arguments, **options):
            if self.version == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return await super().generate(*arguments, **options)

    async def run(name, kind=ScriptedSampler):
        policy = kind(chat_tokenizer, by_seed)
        arguments = (config, model, starting(params), environments, chat_tokenizer, pool, tmp_path / name)
        return await grpo.train(*arguments, policy=policy, progress=False, profile=(1, 1))

    straight = await run("straight")
    stopped = await run("resumed", Notified)
    assert stopped.stopped == "preempted" and 1 <= stopped.steps < 3
    assert saved_steps(tmp_path / "resumed") == [stopped.steps]
    resumed = await run("resumed")
    assert (resumed.stopped, resumed.steps) == ("finished", 3)
    if not async_steps:  # else the batch that was under way is drawn again by newer weights
        for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
            np.testing.assert_array_equal(a, b)
    assert [row["step"] for row in read_metrics(tmp_path / "resumed" / "metrics")] == [1, 2, 3]
    assert list((tmp_path / "straight" / "profile").rglob("*.xplane.pb"))


def test_a_setting_of_todays_does_not_part_a_run_from_its_past() -> None:
    before = {"config.trajectories.votes": 3}
    check_same_run(before, before | {"config.trajectories.attempts": 3}, "DIR")
    later = before | {"config.trajectories.attempts": 2}
    with pytest.raises(WorkdirError, match="config.trajectories.attempts is 2 there, 3 here"):
        check_same_run(later, later | {"config.trajectories.attempts": 3}, "DIR")
