"""SFT of adapters: only they are trained and saved, a killed run goes on to the bit, and its folder is a model."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs_world import programs
from sft_world import AfterUpdate, make_dataset, make_tokenizer, starting, trajectories

from astra_jax.base.errors import InputError
from astra_jax.models import adapters, hf_checkpoint, peft
from astra_jax.models.lora import LoRA
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import frozen, weights
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.identity import check_same_run, run_identity, settings_of
from astra_jax.run.metrics import read_metrics
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import train_step
from astra_jax.sft.train import train
from synthesis.core.workdir import WorkdirError

LORA = LoRA(rank=4, alpha=16.0)
CONFIG = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4),
    batch_size=4,
    micro_batch_size=2,
    steps=6,
    learning_rate=2e-2,
    checkpoint_every=2,
    sample_every=6,
    samples=1,
    sample_tokens=4,
    eval_every=3,
    lora=LORA,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, its weights, their folder, tokenizer, dataset)."""
    folder = tmp_path_factory.mktemp("lora")
    tokenizer = make_tokenizer(folder / "base")
    sizes = dict(d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=64)
    model = Qwen3Config(vocab_size=tokenizer.vocab_size, **sizes, tie_embeddings=True, max_positions=512)
    params = model.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, model, folder / "base")
    return model, params, folder / "base", tokenizer, make_dataset(folder / "data", trajectories(24, longest=2))


def trained(world, workdir, config=CONFIG, *, params=None, **options):
    model, first, base, tokenizer, data = world
    begin = starting(first if params is None else params)
    origin = frozen.WeightsSource(str(base))
    return train(config, model, begin, data, tokenizer, workdir, origin=origin, progress=False, **options)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """(workdir, result) of a run in one go, with a held-out dataset and samples."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, trained(world, workdir, held_out=world[4])


def equal(one, other) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


def test_it_learns_and_the_weights_under_the_adapters_stay_as_they_were(world, whole) -> None:
    workdir, result = whole
    losses = [row["train/loss"] for row in result.history]
    assert losses[-1] < losses[0] - 0.1
    held_out = [row["eval/loss"] for row in result.history if "eval/loss" in row]
    assert held_out[-1] < held_out[0]
    equal(result.base, world[1])
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(result.params))
    assert (workdir / "samples" / "00000006.txt").exists()


def test_a_checkpoint_holds_the_adapters_and_says_of_the_weights_where_and_what_they_are(world, whole) -> None:
    workdir, result = whole
    count = sum(leaf.size for leaf in jax.tree.leaves(adapters.abstract_adapters(world[0], LORA)))
    checkpointer = Checkpointer(workdir / "checkpoints", reading=True)
    try:
        like = jax.tree.map(jnp.zeros_like, result.params)
        equal(checkpointer.restore_params(6, like), result.params)
        extra = checkpointer.read_extra(6)
    finally:
        checkpointer.close()
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(result.params))
        == count
        < sum(leaf.size for leaf in jax.tree.leaves(world[1]))
    )
    card = frozen.read(workdir / "checkpoints")
    assert card is not None and card.lora == LORA and card.origin == frozen.WeightsSource(str(world[2]))
    assert extra["frozen"] == card.digests and len(card.digests) == len(jax.tree.leaves(world[1]))


def test_the_folder_of_a_run_is_read_as_whole_weights(world, whole) -> None:
    workdir, result = whole
    model = world[0]
    expected = adapters.without_adapters(adapters.attach_lora(result.params, result.base, LORA))
    equal(weights.load(workdir / "checkpoints", model), expected)
    half = dataclasses.replace(model, param_dtype="bfloat16")  # as it may be served
    equal(weights.load(workdir / "checkpoints", half), jax.tree.map(lambda x: x.astype("bfloat16"), expected))


def test_rows_of_tokens_that_the_weights_have_none_for_are_trained_beside_adapters(world, tmp_path) -> None:
    """The folder has four rows less than the tokenizer tokens; a run's checkpoints are a model all the same."""
    model, _, _, tokenizer, data = world
    stored = dataclasses.replace(model, vocab_size=model.vocab_size - 4)
    hf_checkpoint.save_hf(stored.init(jax.random.key(0)), stored, tmp_path / "base")
    new_token_pieces = {stored.vocab_size + i: (300 + i, 310) for i in range(4)}
    origin = frozen.WeightsSource(str(tmp_path / "base"), rows=stored.vocab_size, new_token_pieces=new_token_pieces)

    def start():
        return weights.load(tmp_path / "base", model, rows=stored.vocab_size, new_token_pieces=new_token_pieces)

    lora = dataclasses.replace(LORA, tokens=(stored.vocab_size, 7))
    config = dataclasses.replace(CONFIG, lora=lora, steps=2, sample_every=0)
    result = train(config, model, start, data, tokenizer, tmp_path / "run", origin=origin, progress=False)
    first = start()
    equal(result.base, first)
    rows = result.params["embed_vd"]["rows_id"]
    before = first["embed_vd"][jnp.array(lora.tokens)]
    assert rows.shape == before.shape and jnp.any(rows != before, axis=-1).all()
    assert run_identity(sft=settings_of(config))["sft.lora.tokens"] == list(lora.tokens)
    assert "sft.lora.tokens" not in run_identity(sft=settings_of(CONFIG))

    whole = adapters.without_adapters(adapters.attach_lora(result.params, first, lora))
    np.testing.assert_array_equal(whole["embed_vd"][jnp.array(lora.tokens)], rows)
    others = jnp.delete(jnp.arange(model.vocab_size), jnp.array(lora.tokens))
    np.testing.assert_array_equal(whole["embed_vd"][others], first["embed_vd"][others])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert frozen.read(checkpoints).origin == origin
    equal(weights.load(checkpoints, model), whole)
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    equal(weights.load_orbax(checkpoints, model, base=tmp_path / "moved"), whole)
    weights.save_orbax(first, model, tmp_path / "grown")
    equal(weights.load_orbax(checkpoints, model, base=tmp_path / "grown"), whole)


@pytest.mark.parametrize("more", [(), (5, 90)])
def test_a_run_continues_an_adapter_of_peft(more, world, tmp_path) -> None:
    """It starts with the adapter's own A, B and rows; a checkpoint goes before them when the run resumes."""
    model, first, base, tokenizer, data = world
    theirs = dataclasses.replace(LORA, targets=("k_proj", "q_proj"), tokens=(7, 3))
    begun = adapters.initial_adapters(model, theirs, jax.random.key(0), first)
    loaded = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), begun)
    peft.save(loaded, model, theirs, tmp_path / "adapter", base=str(base))
    own = dataclasses.replace(theirs, tokens=tuple(sorted({*theirs.tokens, *more})))
    config = dataclasses.replace(CONFIG, lora=own, sample_every=0, learning_rate=0.0, weight_decay=0.0, steps=1)
    origin = frozen.WeightsSource(str(base), adapter=str(tmp_path / "adapter"))

    def run(steps: int, rate: float):
        changed = dataclasses.replace(config, steps=steps, learning_rate=rate)
        return train(changed, model, starting(first), data, tokenizer, tmp_path / "run", origin=origin, progress=False)

    result = run(1, 0.0)
    whole = adapters.without_adapters(adapters.attach_lora(result.params, first, own))
    equal(whole, adapters.without_adapters(adapters.attach_lora(loaded, first, theirs)))
    at = jnp.array([own.tokens.index(token) for token in theirs.tokens])
    np.testing.assert_array_equal(result.params["embed_vd"]["rows_id"][at], loaded["embed_vd"]["rows_id"])
    assert frozen.read(tmp_path / "run" / "checkpoints").origin == origin
    shutil.rmtree(tmp_path / "adapter")
    assert [row["step"] for row in run(2, 1e-2).history] == [2]


class Killed(Exception):
    pass


def test_killed_and_resumed_equals_uninterrupted_to_the_bit(world, whole, tmp_path) -> None:
    def kill(step, _row) -> None:
        if step == 5:
            raise Killed

    compiled = train_step.cache_size()
    with pytest.raises(Killed):
        trained(world, tmp_path, hooks=[AfterUpdate(kill)])
    resumed = trained(world, tmp_path)
    assert train_step.cache_size() == compiled and len(resumed.history) == 2
    equal((resumed.params, resumed.base), (whole[1].params, whole[1].base))
    for ours, theirs in zip(read_metrics(tmp_path / "metrics"), read_metrics(whole[0] / "metrics"), strict=True):
        for name in ("step", "train/loss", "train/grad_norm"):
            assert ours[name] == theirs[name]


def test_a_run_over_8_bits_is_near_one_over_whole_weights_and_goes_on_to_the_bit(world, whole, tmp_path) -> None:
    """The same losses to a hundredth; its folder is read as what was trained, and other weights are refused."""
    config = dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, weight_quantization="int8"), sample_every=0)

    def kill(step, _row) -> None:
        if step == 3:
            raise Killed

    result = trained(world, tmp_path / "whole", config)
    kept = [x.dtype for x in jax.tree.leaves(result.base["layers"])]
    assert kept.count(jnp.int8) == 7
    with pytest.raises(Killed):
        trained(world, tmp_path / "killed", config, hooks=[AfterUpdate(kill)])
    resumed = trained(world, tmp_path / "killed", config)
    equal((resumed.params, resumed.base), (result.params, result.base))
    losses, others = ([row["train/loss"] for row in one.history] for one in (result, whole[1]))
    assert losses != others
    np.testing.assert_allclose(losses, others, rtol=0.01)

    expected = adapters.without_adapters(adapters.attach_lora(result.params, result.base, config.lora))
    equal(weights.load(tmp_path / "whole" / "checkpoints", world[0]), expected)
    assert frozen.read(tmp_path / "whole" / "checkpoints").digests == frozen.read(whole[0] / "checkpoints").digests
    changed = jax.tree.map(jnp.copy, world[1])
    changed["layers"]["mlp"]["up_df"] = changed["layers"]["mlp"]["up_df"].at[1, 2, 3].add(1e-6)
    with pytest.raises(hf_checkpoint.WeightsError, match=r"the weights to start from: layers.mlp.up_df .*1 of 13"):
        trained(world, tmp_path / "whole", config, params=changed)


def test_other_adapters_are_another_run(world, whole) -> None:
    with pytest.raises(WorkdirError, match="sft.lora.rank is 4 there, 2 here"):
        trained(world, whole[0], dataclasses.replace(CONFIG, lora=LoRA(rank=2, alpha=16.0)))
    saved = run_identity(sft=settings_of(CONFIG))
    for lora, said in [
        (LoRA(rank=4, alpha=8.0), "sft.lora.alpha is 16.0 there, 8.0 here"),
        (LoRA(rank=4, alpha=16.0, rank_stabilized=True), "sft.lora.rank_stabilized is False there, True here"),
        (LoRA(rank=4, alpha=16.0, targets=("q_proj",)), "sft.lora.targets is .'all-linear'. there, .'q_proj'. here"),
        (dataclasses.replace(LORA, tokens=(3,)), "sft.lora.tokens is None there, .3. here"),
        (
            dataclasses.replace(LORA, weight_quantization="int8"),
            "sft.lora.weight_quantization is None there, .int8. here",
        ),
        (LoRA(), "sft.lora.rank is 4 there, None here"),
    ]:
        ours = run_identity(sft=settings_of(dataclasses.replace(CONFIG, lora=lora)))
        with pytest.raises(WorkdirError, match=said):
            check_same_run(saved, ours, whole[0])
        with pytest.raises(WorkdirError, match="sft.lora"):
            check_same_run(ours, saved, whole[0])


def test_a_run_of_whole_weights_says_nothing_of_adapters(world, tmp_path) -> None:
    full = dataclasses.replace(CONFIG, lora=LoRA(), steps=1, sample_every=0)
    assert trained(world, tmp_path, full).base is None
    assert frozen.read(tmp_path / "checkpoints") is None
    with pytest.raises(InputError, match="trained all weights"):
        weights.load_adapters(tmp_path / "checkpoints", world[0])
    assert not any("lora" in name for name in run_identity(sft=settings_of(full)))


def test_other_weights_under_the_adapters_are_refused_by_name(world, whole, tmp_path) -> None:
    changed = jax.tree.map(jnp.copy, world[1])
    changed["layers"]["mlp"]["up_df"] = changed["layers"]["mlp"]["up_df"].at[1, 2, 3].add(1e-6)
    with pytest.raises(hf_checkpoint.WeightsError, match=r"the weights to start from: layers.mlp.up_df .*1 of 13"):
        trained(world, whole[0], params=changed)
    hf_checkpoint.save_hf(changed, world[0], tmp_path / "changed")
    with pytest.raises(hf_checkpoint.WeightsError, match=r"changed: layers.mlp.up_df"):
        weights.load_orbax(whole[0] / "checkpoints", world[0], base=tmp_path / "changed")


def test_adapters_whose_weights_are_gone_say_where_they_were(world, whole, tmp_path) -> None:
    shutil.copytree(whole[0] / "checkpoints", tmp_path / "copied")
    card = frozen.read(tmp_path / "copied")
    frozen.write(dataclasses.replace(card, origin=frozen.WeightsSource(str(tmp_path / "gone"))), tmp_path / "copied")
    with pytest.raises(hf_checkpoint.WeightsError, match="gone, which cannot be read.*--base"):
        weights.load(tmp_path / "copied", world[0])
    equal(weights.load_orbax(tmp_path / "copied", world[0], base=world[2])["final_norm_d"], world[1]["final_norm_d"])
    frozen.write(dataclasses.replace(card, origin=None), tmp_path / "copied")
    with pytest.raises(hf_checkpoint.WeightsError, match="does not name their base weights.*--base"):
        weights.load(tmp_path / "copied", world[0])
    (tmp_path / "copied" / frozen.FILE).write_text('{"lora": {"rank": 0}}')
    with pytest.raises(hf_checkpoint.WeightsError, match=frozen.FILE):
        weights.load(tmp_path / "copied", world[0])


def test_targets_that_there_are_not_are_refused_before_weights_are_read(world, tmp_path) -> None:
    def never():
        raise AssertionError("the weights were read")

    model, _, _, tokenizer, data = world
    config = dataclasses.replace(CONFIG, lora=LoRA(rank=2, targets=("experts",)))
    with pytest.raises(InputError, match="lora.targets has 'experts'.*q_proj"):
        train(config, model, never, data, tokenizer, tmp_path, progress=False)


@pytest.mark.slow
def test_the_command_merges_and_writes_what_peft_reads(world, whole, tmp_path) -> None:
    """`astra convert`: whole weights from adapters, adapters alone, and what is asked wrongly."""
    model, first, base, _, _ = world
    source, result = whole[0] / "checkpoints", whole[1]
    with programs("launch.convert", tmp_path) as convert:
        merged = convert(f"--from_orbax={source}", f"--to_hf={tmp_path / 'hf'}")
        assert merged.code == 0, merged.errors
        written = hf_checkpoint.load_hf(tmp_path / "hf", model)
        equal(written, adapters.without_adapters(adapters.attach_lora(result.params, first, LORA)))
        alone = convert(f"--from_orbax={source}", f"--to_peft={tmp_path / 'peft'}")
        assert alone.code == 0 and "parameters of adapters to" in alone.out, alone.errors
        lora, params = peft.load(tmp_path / "peft", model)
        assert lora.rank == 4
        equal(params, result.params)
        content = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
        assert content["base_model_name_or_path"] == str(base)
        assert "is not empty" in convert(f"--from_orbax={source}", f"--to_peft={tmp_path / 'peft'}").line
        orbax = convert(f"--from_hf={base}", f"--to_orbax={tmp_path / 'orbax'}")
        assert orbax.code == 0
        none = convert(f"--from_orbax={tmp_path / 'orbax'}", f"--to_peft={tmp_path / 'none'}")
        assert none.code == 2 and "trained all weights" in none.line
        assert "--base is for" in convert(f"--from_hf={base}", f"--to_orbax={tmp_path / 'o'}", f"--base={base}").line
