"""Episodes in rows: nothing is lost, prompts of a group lie there once, and losses and gradients are those of whole
episodes in rows of their own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from episodes_world import MODEL, make_episode, of_prompts, with_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from astra_jax.attention.documents import before, numbers
from astra_jax.grpo import packing
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.packing import bucket_for, first_fit, pack
from astra_jax.grpo.step import accumulate, trainer_logprobs
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.gradients import zero_gradients

WIDE = GRPOConfig(
    batch_size=2,
    group_size=4,
    episode=EpisodeConfig(max_prompt_tokens=600, max_response_tokens=200),
    row_buckets=(64, 128, 512, 800),
    micro_batch_size=8,
)
"""One config, so that the programs are compiled once."""


@pytest.fixture(autouse=True, scope="module")
def whatever_it_is_worth():
    """Prompts lie in a row once also where they save little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH", 1.0)
        yield


def gradients_of(params, episodes, advantages, *, rows: int, packed: bool, groups=None):
    batches = pack(episodes, advantages, row_buckets=(64, 128), rows=rows, packed=packed, groups=groups)
    total = float(sum(sum(e.loss_mask) for e in episodes))
    gradients, losses, sums = zero_gradients(params), 0.0, []
    for batch in batches:
        gradients, (loss, (part, *_)) = accumulate(params, gradients, batch, model=MODEL, config=WIDE)
        losses += float(loss) / total
        sums.append(part)
    gradients = jax.tree.map(lambda g: g / total, gradients)
    return gradients, losses, jax.tree.map(lambda *xs: float(sum(xs)), *sums)


def test_packed_equals_padded_and_one_micro_batch_equals_many():
    rng = np.random.default_rng(0)
    params = MODEL.init(jax.random.key(0))
    episodes = [make_episode(rng, float(i % 2), int(rng.integers(8, 60))) for i in range(8)]
    advantages = rng.normal(0, 1, 8).tolist()
    # The reference: every episode in a row of its own, all rows in one micro-batch.
    want, want_loss, want_sums = gradients_of(params, episodes, advantages, rows=8, packed=False)
    assert want_sums.tokens == sum(sum(e.loss_mask) for e in episodes)
    got, loss, sums = gradients_of(params, episodes, advantages, rows=2, packed=True)
    assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(sums), jax.tree.leaves(want_sums), rtol=1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_that_lie_in_a_row_once_change_neither_losses_nor_gradients(rows: int) -> None:
    """Against each episode whole, in a row of its own; one group has several rows, one a single episode, one prompts
    that part before their ends."""
    rng = np.random.default_rng(3)
    params = MODEL.init(jax.random.key(0))
    sizes = [7, 2, 1, 3]
    episodes = [make_episode(rng, float(i % 2), int(rng.integers(8, 60))) for i in range(sum(sizes))]
    episodes, groups = of_prompts(episodes, sizes, rng)
    prompt = episodes[-1].token_ids[: episodes[-1].prompt_tokens]
    episodes[-1] = with_prompt([*prompt[: len(prompt) // 2], 1, 2, 3, 4, 5], make_episode(rng, 1.0, 20))
    advantages = rng.normal(0, 1, len(episodes)).tolist()
    want, want_loss, want_sums = gradients_of(params, episodes, advantages, rows=8, packed=False)
    got, loss, sums = gradients_of(params, episodes, advantages, rows=rows, packed=True, groups=groups)
    assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(sums), jax.tree.leaves(want_sums), rtol=1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    rows=st.one_of(st.none(), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
def test_every_token_lies_in_a_row_once_and_prompts_once_a_row(sizes, rows, seed) -> None:
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, 0.0, int(n)) for n in rng.integers(4, 80, sum(sizes))]
    episodes, groups = of_prompts(episodes, sizes, rng)
    batches = pack(episodes, range(len(episodes)), row_buckets=(128, 256), rows=rows, groups=groups, policy_version=5)
    found = {}
    for batch in batches:
        for tokens, segments, positions, advantages, mask, logps, ages in zip(
            batch.tokens_bt, batch.segment_ids_bt, batch.positions_bt, batch.advantages_bt, batch.loss_mask_bt,
            batch.sampler_logps_bt, batch.ages_bt, strict=True,
        ):  # fmt: skip
            documents = {int(one): np.flatnonzero(segments == one) for one in np.unique(segments[segments > 0])}
            assert sorted(map(int, numbers(np.array([*documents], np.int32)))) == list(range(1, len(documents) + 1))
            prompts = [int(before(one)) for one in documents if before(one)]
            in_row = []
            for one, at in documents.items():
                assert (np.diff(at) == 1).all()
                if one in prompts:
                    assert not mask[at].any() and prompts.count(one) > 1
                    continue
                index = int(advantages[at[0]])
                behind = documents[int(before(one))] if before(one) else at[:0]
                both = np.concatenate([behind, at])
                assert behind.max(initial=-1) < at[0], "a prompt comes before what goes on from it"
                assert tokens[both].tolist() == episodes[index].token_ids and index not in found
                assert positions[both].tolist() == list(range(len(both)))
                assert mask[both].tolist() == episodes[index].loss_mask
                np.testing.assert_allclose(logps[both], episodes[index].logprobs, rtol=1e-6)
                assert ages[both].tolist() == [5 * one for one in episodes[index].loss_mask]
                found[index] = True
                in_row.append((groups[index], int(before(one))))
            shared = [group for group, prompt in set(in_row) if prompt]
            assert len(shared) == len(set(shared)), "once a row"
    assert len(found) == len(episodes)


def test_rows_are_as_long_as_takes_the_least_room() -> None:
    """Eight episodes of 20 tokens after a prompt of 61: a row of 128 has three of them, one of 256 has nine."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, MODEL.vocab_size, 61).tolist()
    episodes = [with_prompt(prompt, make_episode(rng, 0.0, 23)) for _ in range(8)]
    (batch,) = pack(episodes, [0.0] * 8, row_buckets=(128, 256, 512), rows=1, groups=[0] * 8)
    assert batch.tokens_bt.shape == (1, 256) and int((batch.segment_ids_bt > 0).sum()) == 60 + 8 * 21
    whole = pack(episodes, [0.0] * 8, row_buckets=(128, 256, 512), rows=1)
    assert [batch.tokens_bt.shape for batch in whole] == [(1, 128)] * 8


def test_where_prompts_save_little_episodes_are_whole(monkeypatch) -> None:
    """Seven of 30 tokens after a prompt of 11 take three rows of 128, whole ones seven of 64: 0.86 of the room."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, MODEL.vocab_size, 11).tolist()
    episodes = [with_prompt(prompt, make_episode(rng, 0.0, 33)) for _ in range(7)]
    given = {"row_buckets": (64, 128), "rows": 1, "groups": [0] * 7}

    def shapes() -> set[tuple[int, int]]:
        return {batch.tokens_bt.shape for batch in pack(episodes, [0.0] * 7, **given)}

    assert shapes() == {(1, 128)}
    monkeypatch.setattr(packing, "WORTH", 2 / 3)
    assert shapes() == {(1, 64)}


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(4, 128), min_size=1, max_size=30),
    rows=st.one_of(st.none(), st.integers(1, 5)),
    seed=st.integers(0, 99),
)
def test_packing_keeps_every_token_once(lengths, rows, seed):
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, 0.0, n) for n in lengths]
    batches = pack(episodes, list(range(len(episodes))), row_buckets=(64, 128), rows=rows)
    found, rows = {}, rows or 1  # left open it is one
    for batch in batches:
        assert batch.tokens_bt.shape == (rows, bucket_for(max(lengths), (64, 128)))
        for row in range(rows):
            for segment in range(1, batch.segment_ids_bt[row].max() + 1):
                at = np.flatnonzero(batch.segment_ids_bt[row] == segment)
                assert (np.diff(at) == 1).all() and batch.positions_bt[row][at].tolist() == list(range(len(at)))
                index = int(batch.advantages_bt[row][at[0]])
                ids = batch.tokens_bt[row][at].tolist()
                assert index not in found and ids == episodes[index].token_ids
                assert batch.loss_mask_bt[row][at].tolist() == episodes[index].loss_mask
                np.testing.assert_allclose(batch.sampler_logps_bt[row][at], episodes[index].logprobs, rtol=1e-6)
                found[index] = ids
        assert not batch.loss_mask_bt[batch.segment_ids_bt == 0].any()
    assert len(found) == len(episodes)
    assert all(sum(lengths[i] for i in row) <= 128 for row in first_fit(lengths, 128))


def test_too_long_an_episode_is_refused():
    with pytest.raises(ValueError, match="raise the largest row bucket"):
        pack([make_episode(np.random.default_rng(0), 0.0, 200)], [1.0], row_buckets=(64, 128), rows=1)


def test_arithmetic_is_that_of_whole_episodes_less_the_prompts_that_are_not_computed_again() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, MODEL.vocab_size, 31).tolist()
    episodes = [with_prompt(prompt, make_episode(rng, 0.0, int(n))) for n in (13, 23, 43)]
    shapes = {"row_buckets": (256,), "rows": 1}
    (once,) = pack(episodes, [0.0] * 3, **shapes, groups=[0] * 3)
    (whole,) = pack(episodes, [0.0] * 3, **shapes)
    shared = (np.arange(256) < 30).astype(np.int32)[None]
    saved = MODEL.batch_flops(whole.segment_ids_bt) - MODEL.batch_flops(once.segment_ids_bt)
    assert saved == pytest.approx(2 * MODEL.batch_flops(shared))


def test_no_logprob_stands_where_nothing_is_predicted() -> None:
    """At the first token of each document, the prompt's and those that go on from it, and on padding it is 0."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, MODEL.vocab_size, 31).tolist()
    episodes = [with_prompt(prompt, make_episode(rng, 0.0, int(n))) for n in (13, 23)]
    (batch,) = pack(episodes, [0.0] * 2, row_buckets=(128,), rows=1, groups=[0, 0])
    logps = np.asarray(trainer_logprobs(MODEL.init(jax.random.key(0)), batch, model=MODEL, config=WIDE))[0]
    segments = batch.segment_ids_bt[0]
    first = np.diff(segments, prepend=-1) != 0
    assert first[:-1].sum() == 4 and not logps[first | (segments == 0)].any()
    assert (logps[~first & (segments > 0)] < 0).all()
