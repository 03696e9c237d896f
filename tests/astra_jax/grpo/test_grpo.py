"""GRPO: exact over packing and micro-batches, learns a bandit, resumes where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from checkpoint_world import cut_in_half
from episodes_world import MODEL, make_episode, of_prompts
from metrics_page import undocumented
from rollout_world import ScriptedSampler, call, make_environment
from selection import by_day
from sft_world import starting

from astra_jax.evaluation.episodes import EvalConfig, evaluate
from astra_jax.grpo import packing
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.losses import ObjectiveConfig, batch_advantages, token_weights
from astra_jax.grpo.packing import pack
from astra_jax.grpo.step import (
    build_micro_batches,
    grpo_optimizer,
    loss_sums,
    trainer_logprobs,
    update_step,
    with_episode_ratio,
    with_old_logps,
)
from astra_jax.grpo.train import train
from astra_jax.head import token_logprobs
from astra_jax.mesh import make_mesh
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.episode import Episode, EpisodeConfig
from astra_jax.rollout.records import Group
from astra_jax.rollout.sampler import Sampling
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.metrics import MetricWriter, read_metrics
from astra_jax.run.optimizers import initial_state
from synthesis.core.records import CodeTool
from synthesis.core.reward import Reward
from synthesis.core.workdir import WorkdirError

EPISODE = EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1)
CONFIG = GRPOConfig(
    steps=4,
    batch_size=2,
    group_size=4,
    learning_rate=1e-2,
    concurrent_groups=4,
    episode=EPISODE,
    row_buckets=(64, 128, 512, 800),
    micro_batch_size=2,
    weight_decay=0.0,
    checkpoint_every=2,
)

WIDE = dataclasses.replace(CONFIG, learning_rate=2e-2, micro_batch_size=8)
"""Used where many episodes of one length make a batch; one config, so that the programs are compiled once."""


ALTERNATIVES = {
    "paper": ObjectiveConfig(),
    "dr_grpo": ObjectiveConfig(scale_by_std=False, loss_agg_mode="fixed", fixed_tokens=40),
    "gspo": ObjectiveConfig(ratio="sequence", loss_agg_mode="episode", clip_low=0.003, clip_high=0.004),
    "group, sequence correction": ObjectiveConfig(tis="sequence", tis_cap=1.5, loss_agg_mode="group"),
    "kl, entropy": ObjectiveConfig(kl_coef=0.1, entropy_coef=0.05, loss_agg_mode="episode"),
}


def random_groups(seed: int, groups: int = 4, *, prompts: bool = False) -> list[Group]:
    rng = np.random.default_rng(seed)

    def episode() -> Episode:
        one = make_episode(rng, float(rng.random()), int(rng.integers(8, 60)))
        # As a random model says them, nearly: the product of an episode's weights is neither 0 nor always truncated.
        logprobs = [float(rng.normal(-np.log(MODEL.vocab_size), 0.2)) if m else 0.0 for m in one.loss_mask]
        return msgspec.structs.replace(one, logprobs=logprobs)

    found = [Group(i, "e", 0, [episode() for _ in range(rng.integers(2, 5))]) for i in range(groups)]
    if not prompts:
        return found
    sizes = [len(group.episodes) for group in found]
    every, _ = of_prompts([episode for group in found for episode in group.episodes], sizes, rng)
    return [msgspec.structs.replace(group, episodes=[every.pop(0) for _ in group.episodes]) for group in found]


def stepped(objective: ObjectiveConfig, *, rows: int, mini_batches: int, mesh=None, buckets=(128,), share=True):
    """Weights and metrics after an update of random groups, far enough from the old ones that ratios are clipped."""
    config = dataclasses.replace(
        CONFIG,
        batch_size=4,
        objective=objective,
        micro_batch_size=rows,
        mini_batches=mini_batches,
        learning_rate=3e-2,
        eps=1e-3,  # without it Adam's first step is the gradient's sign, which rounding decides
        row_buckets=(*buckets, 1024),
    )
    shardings = None if mesh is None else WIDER.param_shardings(mesh)
    state = initial_state(WIDER.init(jax.random.key(0)), grpo_optimizer(config), shardings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH", 1.0 if share else 0.0)
        start = WIDER.init(jax.random.key(7)) if objective.kl_coef else None
        reference = start if mesh is None or start is None else jax.device_put(start, shardings)
        options = {"mesh": mesh, "reference": reference}
        params, _, metrics = update_step(*state, random_groups(0, prompts=True), WIDER, config, **options)
    return jax.device_get(params), metrics


WIDER = dataclasses.replace(MODEL, n_layers=1, n_heads=8, n_kv_heads=4, d_model=64)


WAYS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 1, "buckets": (128, 256)},
    "devices": {"rows": 2, "buckets": (256,), "mesh": {"data": 2, "context": 2, "tensor": 2}},
}
DIVIDED = [
    (name, way)
    for name in ALTERNATIVES
    for way in WAYS
    # Of Dr. GRPO it is the advantages and the divisor that differ, before and behind the paper's program.
    if (name, way) != ("dr_grpo", "devices")
]


@cache
def undivided(name: str):
    return stepped(ALTERNATIVES[name], rows=16, mini_batches=2, share=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), by_day(DIVIDED, ("paper", "devices"), ("gspo", "rows"), ("kl, entropy", "devices"))
)
def test_every_objective_is_exact_over_packing_micro_batches_and_devices(name: str, way: str) -> None:
    objective, changes = ALTERNATIVES[name], dict(WAYS[way])
    want, want_metrics = undivided(name)
    if name in ("paper", "gspo"):
        shares = want_metrics["train/clipped_low_share"], want_metrics["train/clipped_high_share"]
        assert max(shares) > 0, "the second mini-batch's ratios are not 1"
    start = WIDER.init(jax.random.key(0))
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (start, want)), strict=True)) > 1e-2
    assert want_metrics["data/shared_share"] == 0
    if axes := changes.pop("mesh", None):
        changes["mesh"] = make_mesh(**axes)
    got, metrics = stepped(objective, mini_batches=2, **changes)
    assert metrics["data/shared_share"] > 0.1, "prompts lie in a row once"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert ("train/kl_reference" in metrics) == bool(objective.kl_coef)
    for metric in (
        "train/loss",
        "train/grad_norm",
        "train/mismatch_kl",
        "train/tis_clipped_share",
        "train/clipped_low_share",
        "train/clipped_high_share",
        "train/entropy",
        *(["train/kl_reference"] if objective.kl_coef else []),
    ):
        assert metrics[metric] == pytest.approx(want_metrics[metric], rel=2e-3, abs=1e-5), metric


def test_kl_and_entropy_have_the_gradient_of_the_plain_formula() -> None:
    """Of a micro-batch with common prompts, against full logits of each episode alone."""
    objective = ObjectiveConfig(kl_coef=0.2, entropy_coef=0.1, loss_agg_mode="group")
    episode = dataclasses.replace(EPISODE, temperature=0.8)
    config = dataclasses.replace(
        CONFIG, objective=objective, episode=episode, micro_batch_size=4, row_buckets=(128, 900)
    )
    params, start = MODEL.init(jax.random.key(0)), MODEL.init(jax.random.key(1))
    groups = random_groups(2, groups=2, prompts=True)
    batches, _ = build_micro_batches(groups, MODEL, config)
    tokens = [[sum(one.loss_mask) for one in group.episodes] for group in groups]
    advantages, _ = batch_advantages([group.rewards for group in groups], tokens, objective)
    weights = token_weights(tokens, objective)
    episodes = [one for group in groups for one in group.episodes]
    ids, mask, sampled = np.zeros((3, len(episodes), 101))
    for row, one in enumerate(episodes):
        n = len(one.token_ids)
        ids[row, :n], mask[row, :n], sampled[row, :n] = one.token_ids, one.loss_mask, one.logprobs
    ids, mask, sampled = ids.astype(np.int32), mask[:, 1:], sampled[:, 1:]
    advantage, weight = (np.array(x)[:, None] for x in (advantages, weights))

    @jax.jit
    def plain(params):
        def distributions(tree):
            at = jnp.broadcast_to(jnp.arange(101), ids.shape)
            x_btd, _ = MODEL.forward(tree, jnp.asarray(ids), at, jnp.ones_like(ids))
            return jax.nn.log_softmax((x_btd @ MODEL.head_kernel(tree))[:, :-1] / 0.8)

        every, first = distributions(params), distributions(start)
        logps, reference = (jnp.take_along_axis(x, ids[:, 1:, None], -1)[..., 0] for x in (every, first))
        old = jax.lax.stop_gradient(logps)
        correction = jnp.minimum(jnp.exp(old - sampled), objective.tis_cap)
        gain = jnp.exp(logps - old) * correction * advantage
        k3 = jnp.exp(reference - logps) - (reference - logps) - 1
        entropy = -(jnp.exp(every) * every).sum(-1)
        return (mask * (-gain + weight * (0.2 * k3 - 0.1 * entropy))).sum()

    before = [trainer_logprobs(start, batch, model=MODEL, config=config) for batch in batches]
    batches = [
        dataclasses.replace(batch, reference_logps_bt=logps) for batch, logps in zip(batches, before, strict=True)
    ]

    @jax.jit
    def ours(params):
        return sum(loss_sums(params, batch, model=MODEL, config=config)[0] for batch in batches)

    (loss, gradients), (want, wanted) = (jax.value_and_grad(one)(params) for one in (ours, plain))
    assert float(loss) == pytest.approx(float(want), rel=1e-4)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-3)


def test_what_an_update_needs_before_it_is_of_each_episode() -> None:
    """Old logprobs, mismatch and ratio of packed rows are those of each episode alone."""
    objective = ObjectiveConfig(ratio="sequence", tis="sequence")
    config = dataclasses.replace(CONFIG, objective=objective, micro_batch_size=4, row_buckets=(64, 1024))
    old, new = MODEL.init(jax.random.key(0)), MODEL.init(jax.random.key(1))
    episodes = [episode for group in random_groups(3) for episode in group.episodes]
    wide = dataclasses.replace(config, row_buckets=(128, 1024))

    def prepared(config, episodes):
        (batch,) = pack(episodes, [0.0] * len(episodes), row_buckets=config.row_buckets[:1], rows=8)
        batch = with_old_logps(old, batch, model=MODEL, config=config)
        return jax.device_get(with_episode_ratio(new, batch, model=MODEL, config=config))

    batch = prepared(wide, episodes)
    found = 0
    for episode in episodes:
        alone = prepared(config, [episode])
        n = len(episode.token_ids)
        sampled = np.array(episode.loss_mask[1:]) > 0
        change = logprobs_of(new, episode) - logprobs_of(old, episode)
        mismatch = logprobs_of(old, episode) - np.array(episode.logprobs[1:])
        np.testing.assert_allclose(alone.episode_log_ratio_bt[0, :n], change[sampled].mean(), atol=1e-5)
        np.testing.assert_allclose(alone.episode_mismatch_bt[0, :n], mismatch[sampled].sum(), atol=1e-4)
        for row in range(8):
            for segment in range(1, batch.segment_ids_bt[row].max() + 1):
                at = batch.segment_ids_bt[row] == segment
                if batch.tokens_bt[row][at].tolist() == episode.token_ids:
                    found += 1
                    for name in ("old_logps_bt", "episode_log_ratio_bt", "episode_mismatch_bt"):
                        packed, single = getattr(batch, name)[row][at], getattr(alone, name)[0, :n]
                        np.testing.assert_allclose(packed, single, atol=1e-4)
    assert found == len(episodes)


def logprobs_of(params, episode: Episode) -> np.ndarray:
    n = len(episode.token_ids)
    ids = jnp.asarray([episode.token_ids + [0] * (65 - n)])
    return np.asarray(_logprobs(params, ids)[0, : n - 1])


@jax.jit
def _logprobs(params, ids):
    x_btd, _ = MODEL.forward(params, ids, jnp.arange(65)[None], jnp.ones_like(ids))
    return token_logprobs(x_btd[:, :-1], MODEL.head_kernel(params), ids[:, 1:])[0]


def test_a_bandit_is_learnt():
    """Real engine, real update; the reward is the share of even tokens: ten updates raise it from 0.5 to over 0.85."""
    prompt = [1, 2, 3]

    async def learn() -> tuple[list[float], float]:
        params = MODEL.init(jax.random.key(0))
        opt_state = grpo_optimizer(WIDE).init(params)
        means, worst = [], 0.0
        async with Engine(jax.tree.map(jnp.copy, params), MODEL, EngineConfig(slots=32, max_length=32)) as engine:
            for update in range(10):
                jobs = [
                    engine.generate(prompt, Sampling(max_tokens=12, stop_ids=(), seed=update * 100 + i))
                    for i in range(32)
                ]
                completions = await asyncio.gather(*jobs)
                episodes = []
                for c in completions:
                    value = float(np.mean([t % 2 == 0 for t in c.token_ids]))
                    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
                    mask, logprobs = [0] * 3 + [1] * 12, [0.0] * 3 + c.logprobs
                    ids = prompt + c.token_ids
                    episodes.append(
                        Episode("b", ids, 3, mask, logprobs, [update] * len(ids), [], score, 1, "answered", [])
                    )
                means.append(float(np.mean([e.reward for e in episodes])))
                groups = [Group(i, "b", update, episodes[i * 8 : i * 8 + 8]) for i in range(4)]
                params, opt_state, metrics = update_step(params, opt_state, groups, MODEL, WIDE)
                worst = max(worst, metrics["train/mismatch_abs"])
                await engine.load_weights(params, update + 1)
        return means, worst

    means, mismatch = asyncio.run(learn())
    assert means[0] < 0.6 and means[-1] > 0.85, means
    assert mismatch < 1e-4, "on policy, sampler and trainer agree"


def by_seed(session: str, turn: int, seed: int) -> str:
    """Half of the episodes solve the first sub-question of France, the others answer at once."""
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


def model_for(tokenizer) -> Qwen3Config:
    return dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, max_positions=1024)


async def test_resumed_equals_uninterrupted(pool, chat_tokenizer, tmp_path):
    model = model_for(chat_tokenizer)
    params = model.init(jax.random.key(1))
    environments = [make_environment("a"), make_environment("b", "Japan"), make_environment("c")]

    async def run(workdir, policy_type=ScriptedSampler, **changes):
        policy = policy_type(chat_tokenizer, by_seed)
        config = dataclasses.replace(CONFIG, **changes)
        result = await train(
            config, model, starting(params), environments, chat_tokenizer, pool, workdir, policy=policy, progress=False
        )
        assert policy.version == result.steps == 4
        return result

    class DiesAtThree(ScriptedSampler):
        async def load_weights(self, params, version):
            if version == 3:
                raise ConnectionError("the server is gone")
            await super().load_weights(params, version)

    straight = await run(tmp_path / "straight")
    with pytest.raises(ConnectionError):
        await run(tmp_path / "resumed", DiesAtThree)
    resumed = await run(tmp_path / "resumed")  # from update 3, which was saved when the server was gone
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), straight.params, params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    rows = [read_metrics(tmp_path / name / "metrics") for name in ("straight", "resumed")]
    assert [[r["step"] for r in run] for run in rows] == [[1, 2, 3, 4]] * 2
    for a, b in zip(*rows, strict=True):
        measured = ("seconds/", "rollout/tokens_per_second", "goodput/", "perf/")
        same = [k for k in a if not k.startswith(measured)]
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
    assert rows[0][0]["rollout/calls"] > 0 and 0 < rows[0][0]["rollout/reward"] < 1
    assert len(resumed.history) == 1
    assert (await run(tmp_path / "resumed")).history == []
    cut_in_half(tmp_path / "resumed" / "checkpoints" / "states" / "4")
    again = await run(tmp_path / "resumed")  # from the one before
    assert len(again.history) == 1
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(WorkdirError, match="grpo.mini_batches is 1 there, 2 here"):
        await run(tmp_path / "resumed", mini_batches=2)


async def trained(config, pool, tokenizer, workdir, engine, environments=None):
    """`train` of a small random model on France."""
    model = model_for(tokenizer)
    params = model.init(jax.random.key(1))
    environments = environments or [make_environment()]
    return await train(
        config, model, starting(params), environments, tokenizer, pool, workdir, policy=engine, progress=False
    )


def test_an_update_is_taken_at_its_learning_rate() -> None:
    """Of Adam's first step, the longest that any weight takes is the rate itself."""
    start = MODEL.init(jax.random.key(0))

    def longest(update: int, **changes: float) -> float:
        config = dataclasses.replace(CONFIG, batch_size=2, steps=8, learning_rate=1e-2, weight_decay=0.0, **changes)
        state = initial_state(jax.tree.map(jnp.copy, start), grpo_optimizer(config))
        params, _, metrics = update_step(*state, random_groups(0, 2), MODEL, config, policy_version=update)
        moved = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, start)))
        assert metrics["train/learning_rate"] == pytest.approx(moved, rel=1e-3)
        return moved

    assert [longest(update) for update in (0, 7)] == pytest.approx([1e-2, 1e-2], rel=1e-3), "constant, as in the paper"
    rates = [longest(update, warmup_fraction=0.25, final_fraction=0.1) for update in (0, 1, 7)]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-3], rel=1e-3)


async def test_a_rate_that_falls_belongs_to_its_number_of_steps(pool, chat_tokenizer, tmp_path) -> None:
    def run(**changes: Any) -> Any:
        config = dataclasses.replace(CONFIG, **changes)
        policy = ScriptedSampler(chat_tokenizer, by_seed)
        return trained(config, pool, chat_tokenizer, tmp_path / str(config.constant_rate), policy)

    falling = await run(steps=2, final_fraction=0.1)
    assert [row["train/learning_rate"] for row in falling.history] == pytest.approx(
        [CONFIG.learning_rate * x for x in (1, 0.1)]
    )
    longer = await run(steps=3, final_fraction=0.1)
    assert longer.steps == 3 and longer.history[-1]["train/learning_rate"] == pytest.approx(0.1 * CONFIG.learning_rate)
    assert (await run(steps=1)).steps == 1
    assert (await run(steps=2)).steps == 2


async def test_a_batch_is_drawn_by_one_version(pool, chat_tokenizer, tmp_path, monkeypatch):
    """That of its update, strictly online."""
    seen = []

    def spy(params, opt_state, groups, *arguments, **options):
        seen.append({(group.update, version) for group in groups for e in group.episodes for version in e.sampled_by})
        return update_step(params, opt_state, groups, *arguments, **options)

    class Slow(ScriptedSampler):
        async def generate(self, *arguments, **options):
            await asyncio.sleep(0.01)  # so that an update of the weights could come in between
            return await super().generate(*arguments, **options)

    monkeypatch.setattr("astra_jax.grpo.train.update_step", spy)
    config = dataclasses.replace(CONFIG, max_off_policy_steps=0, episodes_every=2)
    result = await trained(config, pool, chat_tokenizer, tmp_path, Slow(chat_tokenizer, by_seed))
    assert seen == [{(version, version)} for version in range(4)]
    assert [row["filling/mean_age"] for row in result.history] == [0] * 4 and not undocumented(result.history)
    pages = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert pages == ["update_00002.html", "update_00004.html"]


async def test_with_async_rollouts_sampling_continues_during_an_update(pool, chat_tokenizer, tmp_path, monkeypatch):
    """Online there are none; with `async_rollouts` those of the next batch are asked for while the device is busy."""
    busy = False

    def update(*arguments, **options):
        nonlocal busy
        busy = True
        time.sleep(0.3)
        busy = False
        return update_step(*arguments, **options)

    class Remote(ScriptedSampler):
        asked = 0

        async def generate(self, *arguments, **options):
            Remote.asked += busy
            await asyncio.sleep(0.01)
            return await super().generate(*arguments, **options)

    async def asked_meanwhile(name: str, **changes) -> int:
        Remote.asked = 0
        changed = dataclasses.replace(CONFIG, steps=3, checkpoint_every=100, **changes)
        await trained(changed, pool, chat_tokenizer, tmp_path / name, Remote(chat_tokenizer, by_seed))
        return Remote.asked

    monkeypatch.setattr("astra_jax.grpo.train.update_step", update)
    assert await asked_meanwhile("online") == 0
    assert await asked_meanwhile("overlapped", async_rollouts=True) > 8


async def test_the_embedded_engine_samples_while_its_weights_are_trained(pool, chat_tokenizer, tmp_path):
    """The update donates the arrays that it trains: the engine must have its own."""
    script = ScriptedSampler(chat_tokenizer, by_seed)

    class Both(Engine):
        async def generate(self, token_ids, sampling, *, session=""):
            brief = dataclasses.replace(sampling, max_tokens=2)
            real = await super().generate(token_ids, brief, session=session)  # uses the weights
            assert real.token_ids
            completion = await script.generate(token_ids, sampling, session=session)
            return dataclasses.replace(completion, versions=[real.policy_version] * len(completion.token_ids))

        def release(self, session):
            super().release(session)
            script.release(session)

    model = model_for(chat_tokenizer)
    params = model.init(jax.random.key(1))
    config = dataclasses.replace(CONFIG, async_rollouts=True)
    async with Both(params, model, EngineConfig(slots=16, max_length=1024, min_window=1024)) as engine:
        result = await trained(config, pool, chat_tokenizer, tmp_path, engine)
    assert result.steps == 4 and engine.version == 4


async def test_pages_show_episodes(pool, chat_tokenizer, tmp_path):
    def script(session: str, turn: int, seed: int) -> str:
        return by_seed(session, turn, seed) if seed % 2 else "<b>no</b>"

    config = dataclasses.replace(CONFIG, steps=1, episodes_every=1)
    await trained(config, pool, chat_tokenizer, tmp_path, ScriptedSampler(chat_tokenizer, script))
    page = (tmp_path / "episodes" / "update_00001.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "How many people live in the capital of France?" in page and ">capital_of<" in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page and "<b>no</b>" not in page and page.count("<script") == 1
    assert "Reward 0.67" in page and "Reward 0.00" in page and "train/grad_norm" in page


async def test_environments_that_cannot_be_trained_on_are_refused_at_the_start(pool, chat_tokenizer, tmp_path):
    good = make_environment()
    capital, population = good.tools
    broken = CodeTool(capital.spec, "def capital_of(country):\n    raise OSError('no disk')\n")
    wrong = CodeTool(capital.spec, "def capital_of(country):\n    return 'Lyon'\n")
    for tools, message in (
        ([broken, population], r"environment france: its tool capital_of, called with .*France.* fails .*no disk"),
        ([wrong, population], r"its tool capital_of, .* does not give the answer to its sub-question 1"),
        ([population], "it has no tool capital_of"),
    ):
        environments = [good, msgspec.structs.replace(good, tools=tools)]
        with pytest.raises(ValueError, match=message):
            await trained(
                CONFIG, pool, chat_tokenizer, tmp_path, ScriptedSampler(chat_tokenizer, by_seed), environments
            )


async def test_a_run_resumes_with_another_rate_group_size_and_objective(pool, chat_tokenizer, tmp_path, capsys) -> None:
    model = model_for(chat_tokenizer)
    params = model.init(jax.random.key(1))

    async def run(**changes):
        policy, config = ScriptedSampler(chat_tokenizer, by_seed), dataclasses.replace(CONFIG, **changes)
        arguments = (config, model, starting(params), [make_environment()], chat_tokenizer, pool, tmp_path)
        return await train(*arguments, policy=policy, progress=False)

    await run(steps=1)
    changes = {
        "group_size": 3, "learning_rate": 1e-3, "objective": ObjectiveConfig(clip_high=0.3, loss_agg_mode="episode")
    }  # fmt: skip
    rows = (await run(steps=2, **changes)).history
    assert [row["step"] for row in rows] == [2] and rows[0]["train/learning_rate"] == pytest.approx(1e-3)
    said = capsys.readouterr().err
    assert "from step 2 on: grpo.objective.clip_high is 0.3, it was 0.28" in said
    assert "from step 2 on: grpo.group_size is 3, it was 4" in said
    recorded = json.loads((tmp_path / "run.json").read_text())["changes"]
    assert sorted(one["setting"] for one in recorded) == [
        "grpo.group_size", "grpo.learning_rate", "grpo.objective.clip_high", "grpo.objective.loss_agg_mode",
        "grpo.steps",
    ]  # fmt: skip
    assert {"step": 1, "setting": "grpo.steps", "before": 1, "now": 2} in recorded
    assert "extended from 1 to 2 steps: the learning rate continues at 0.001, on its schedule over 2 steps; in " in said
    with pytest.raises(WorkdirError, match="has done 2 steps, and the run is to have 1 in all"):
        await run(steps=1, **changes)
    with pytest.raises(
        WorkdirError, match=r"grpo.batch_size is 2 there, 1 here \(--config.grpo.batch_size\).*--weights="
    ):
        await run(steps=2, batch_size=1, **changes)


@pytest.fixture
def run_with_reference(pool, chat_tokenizer, tmp_path):
    """Train with a term of the reference: the weights at the start, or those of another key."""
    model = model_for(chat_tokenizer)

    async def run(name: str, steps: int, key: int = 1, **changes):
        policy = ScriptedSampler(chat_tokenizer, by_seed)
        objective = ObjectiveConfig(kl_coef=0.1)
        config = dataclasses.replace(CONFIG, steps=steps, **{"objective": objective} | changes)
        start = starting(model.init(jax.random.key(key)))
        arguments = (config, model, start, [make_environment()], chat_tokenizer, pool, tmp_path / name)
        return await train(*arguments, policy=policy, progress=False)

    return run


async def test_a_resumed_run_has_the_same_reference(run_with_reference) -> None:
    run = run_with_reference
    straight = await run("straight", 2)
    assert [row["train/kl_reference"] > 1e-6 for row in straight.history] == [False, True], "at first they are equal"
    await run("resumed", 1)
    with pytest.raises(WeightsError, match="started from were other ones; give those as --weights"):
        await run("resumed", 2, key=2)
    resumed = await run("resumed", 2)
    assert_same(resumed.params, straight.params)
    assert resumed.history[0]["train/kl_reference"] == straight.history[1]["train/kl_reference"]


@pytest.mark.parametrize("offload", by_day([False, True], False))
async def test_the_reference_can_come_when_a_run_resumes(run_with_reference, offload: bool) -> None:
    """Its start is known. In the host's memory the reference is the same."""
    await run_with_reference("later", 1, objective=ObjectiveConfig())
    later = await run_with_reference("later", 2, optimizer_offload=offload)
    assert later.history[0]["train/kl_reference"] > 1e-6


def assert_same(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


async def test_stops_when_no_group_is_valid(pool, chat_tokenizer, tmp_path, capsys):
    model = model_for(chat_tokenizer)
    params = model.init(jax.random.key(1))
    config = dataclasses.replace(CONFIG, max_groups_per_step=3)
    policy = ScriptedSampler(chat_tokenizer, lambda session, turn, seed: "No.")
    arguments = (config, model, starting(params), [make_environment()], chat_tokenizer, pool, tmp_path)
    result = await train(*arguments, policy=policy, progress=False)
    assert (result.stopped, result.steps) == ("exhausted", 0)
    # Said while nothing valid comes, and at the end, with the reason; and a row.
    told = capsys.readouterr().err.splitlines()
    assert any("update 0: 2 groups sampled, 0 valid, 2 of equal rewards; at most 3" in line for line in told)
    assert any("no batch of 2 valid groups: 3 groups sampled, 0 valid, 3 of equal rewards" in line for line in told)
    assert any("france: reward mean 0, min 0, max 0, 12 episodes in 3 groups" in line for line in told)
    assert result.advice.startswith("All 12 episodes scored 0. Try easier environments (astra difficulty")
    [row] = read_metrics(tmp_path / "metrics")  # no update has it
    assert row["step"] == 0 and row["exhausted/groups_sampled"] == row["exhausted/groups_equal"] == 3
    assert row["exhausted/reward_max"] == 0
    assert [name for name in row if name.startswith(("rollout/", "train/"))] == ["train/skipped_steps"]
    page = (tmp_path / "episodes" / "exhausted_00000.html").read_text()
    assert "no batch for update 0" in page and "Best group" in page and "Worst group" in page
    assert "All 12 episodes scored 0." in page and "How many people live in the capital of France?" in page
    with MetricWriter(tmp_path / "metrics") as writer:  # the same command resumes: the row leaves
        writer.truncate(0)
    assert read_metrics(tmp_path / "metrics") == []
    np.testing.assert_array_equal(jax.tree.leaves(result.params)[0], jax.tree.leaves(params)[0])
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        assert checkpointer.latest() == 0  # what comes after finds weights
    with pytest.raises(ValueError, match="at least one environment"):
        await train(config, model, starting(params), [], chat_tokenizer, pool, tmp_path, policy=policy)


@pytest.mark.nightly
async def test_train_with_the_embedded_engine(pool, chat_tokenizer, tmp_path):
    """Random weights score nothing, but everything is real: engine, sandbox, filling; it ends exhausted."""
    model = model_for(chat_tokenizer)
    episode = dataclasses.replace(EPISODE, max_response_tokens=40)
    config = dataclasses.replace(CONFIG, max_groups_per_step=2, episode=episode)
    params = model.init(jax.random.key(2))
    result = await train(
        config, model, starting(params), [make_environment()], chat_tokenizer, pool, tmp_path, progress=False
    )
    assert result.stopped == "exhausted"


async def test_evaluate(pool, chat_tokenizer):
    environments = [make_environment("a"), make_environment("b", "Japan")]
    config = EvalConfig(episodes_per_environment=3, episode=EPISODE, temperature=0.0)
    policy = ScriptedSampler(
        chat_tokenizer, lambda session, turn, seed: "No." if turn else call("capital_of", country="France")
    )
    result = await evaluate(policy, environments, chat_tokenizer, pool, config=config, progress=False)
    # France: 1 of 2 in 1 call, F1 2/3; Japan: none. Each calls a tool that both questions need.
    assert result.f1 == pytest.approx(1 / 3, abs=1e-5)
    assert (result.episodes, result.masked_episodes, result.recall, result.mean_calls, result.mean_turns) == (
        6,
        0,
        0.25,
        1,
        2,
    )
    assert result.by_structure == {"multi_hop": pytest.approx(1 / 3, abs=1e-5)}
    assert result.irrelevant_share == 0
    policy = ScriptedSampler(
        chat_tokenizer,
        lambda session, turn, seed: (
            "No." if turn else call("mayor_of", city="Paris") + call("capital_of", country="France")
        ),
    )
    both = await evaluate(policy, environments, chat_tokenizer, pool, config=config, progress=False)
    assert both.irrelevant_share == 0.5 and both.mean_calls == 2
    low, high = result.f1_interval
    assert 0 <= low < result.f1 < high <= 1
    with pytest.raises(ValueError, match="at least one environment"):
        await evaluate(policy, [], chat_tokenizer, pool, config=config)


def test_bad_configs_are_refused():
    with pytest.raises(ValueError, match="group_size is 1"):
        dataclasses.replace(CONFIG, group_size=1)
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(CONFIG, episode=dataclasses.replace(EPISODE, temperature=0.0))
    with pytest.raises(ValueError, match="row_buckets"):
        dataclasses.replace(CONFIG, row_buckets=(64,))
    with pytest.raises(ValueError, match="max_groups_per_step is 1, batch_size 2: no batch could be filled"):
        dataclasses.replace(CONFIG, max_groups_per_step=1)
    with pytest.raises(ValueError, match="min_reward_std is 0.5; use a number .* no batch could be filled"):
        dataclasses.replace(CONFIG, min_reward_std=0.5)
    with pytest.raises(ValueError, match="mini_batches is 3, which does not divide batch_size"):
        dataclasses.replace(CONFIG, mini_batches=3)
    with pytest.raises(ValueError, match="deadline_seconds is 0"):
        dataclasses.replace(CONFIG, deadline_seconds=0)
