"""What a turn counts in the loss: as much as the data say, in batches, in the loss, and on the preview."""

from __future__ import annotations

import io
from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest
from sft_world import make_dataset, make_tokenizer, trajectory

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft import preview
from astra_jax.sft.data import BatchIterator, DataConfig, by_round, scan, tokenise
from astra_jax.sft.step import loss_sums
from synthesis.core.datasets import DatasetError
from synthesis.core.records import CallError, Message, ToolCall, Trajectory

TOGETHER = DataConfig(seq_len=512, packing_bins=4, split_at_user_turns=False)
APART = replace(TOGETHER, split_at_user_turns=True)


def talk(*weights: float) -> Trajectory:
    """A conversation in which the user speaks before each turn of the assistant."""
    messages = []
    for i, weight in enumerate(weights):
        messages += [Message("user", f"question {i}?"), Message("assistant", f"answer {i}.").weighed(weight)]
    return msgspec.structs.replace(trajectory(0, ["France"]), messages=messages, tools=[])


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return make_tokenizer(tokenizer_dir)


def spans(example, tokenizer) -> dict[float, str]:
    """The text of each weight."""
    found: dict[float, str] = {}
    for token, weight in zip(example.tokens, example.loss_mask.tolist(), strict=True):
        found[weight] = found.get(weight, "") + tokenizer.decode([int(token)])
    return found


def test_each_turn_has_its_weight(tokenizer):
    example = tokenise(talk(1, 0, 0.25, 2), tokenizer, TOGETHER)
    text = spans(example, tokenizer)
    assert set(text) == {0.0, 0.25, 1.0, 2.0} and example.loss_mask.dtype == np.float32
    for number, weight in enumerate((1.0, 0.0, 0.25, 2.0)):
        assert [w for w, said in text.items() if f"answer {number}.<|im_end|>" in said] == [weight]
    context = tokenizer.decode(example.tokens[example.context].tolist())
    assert "answer 1." in context and "question" not in context and "answer 0" not in context
    plain = tokenise(talk(1, 1, 1, 1), tokenizer, TOGETHER)
    np.testing.assert_array_equal(plain.tokens, example.tokens)
    assert not plain.context.any() and set(plain.loss_mask.tolist()) == {0.0, 1.0}


def test_rounds_apart_of_context_are_no_examples(tokenizer, tmp_path):
    """Their turns are context of the later ones; a conversation of context alone is dropped by its reason."""
    parts = by_round(talk(0, 1, 0, 0.5), APART)
    assert [len(part.messages) for part in parts] == [4, 8]
    texts = [spans(tokenise(part, tokenizer, APART), tokenizer) for part in parts]
    assert "answer 1." in texts[0][1.0] and "answer 3." in texts[1][0.5] and set(texts[1]) == {0.0, 0.5}
    records = [talk(0, 1, 0, 0.5), talk(0, 0), talk(1)]
    for config, examples in ((APART, 3), (TOGETHER, 2)):
        stats = scan(make_dataset(tmp_path / str(config.split_at_user_turns), records), tokenizer, config)
        assert len(stats.lengths) == examples and stats.dropped == {"untrained": 1}
        made = [tokenise(part, tokenizer, config) for one in records for part in by_round(one, config)]
        assert stats.trainable == sum(np.count_nonzero(one.loss_mask) for one in made)
        with BatchIterator(tmp_path / str(config.split_at_user_turns), tokenizer, config, 1) as batches:
            assert {0.5, 1.0} <= set(next(batches).loss_mask_bt.ravel().tolist())
    with pytest.raises(DatasetError, match=r"no conversation can be trained on: 1 untrained \("):
        scan(make_dataset(tmp_path / "none", records[1:2]), tokenizer, APART)


@pytest.mark.parametrize("kind", ["unknown_tool", "invalid_arguments", "tool_error"])
def test_calls_that_the_schema_refused_are_context(tokenizer, tmp_path, kind: str):
    """A tool's own error is not the model's mistake, so that call is trained on."""
    messages = [
        Message("user", "question?"),
        Message("assistant", "first try.", tool_calls=[ToolCall("call_1", "capital", {"cuntry": "France"})]),
        Message("tool", "error", tool_call_id="call_1"),
        Message("assistant", "second try.", tool_calls=[ToolCall("call_2", "capital", {"country": "France"})]),
        Message("tool", "Paris", tool_call_id="call_2"),
        Message("assistant", "Paris."),
    ]
    record = msgspec.structs.replace(trajectory(0, ["France"]), messages=messages, errors=[CallError("call_1", kind)])
    refused = kind != "tool_error"
    for config in (APART, TOGETHER):
        [example] = by_round(record, config)
        text = spans(tokenise(example, tokenizer, config), tokenizer)
        assert ("first try." in text[0.0]) is refused and "second try." in text[1.0]
        folder = make_dataset(tmp_path / f"{kind}{config.split_at_user_turns}", [record])
        stats = scan(folder, tokenizer, config)
        assert stats.refused == refused and not stats.dropped
        with BatchIterator(folder, tokenizer, config, 1) as batches:
            assert np.count_nonzero(next(batches).loss_mask_bt) == stats.trainable


def test_a_cut_ends_behind_the_last_trained_turn_that_fits(tokenizer):
    whole = tokenise(talk(1, 0, 1), tokenizer, TOGETHER)
    cut = tokenise(talk(1, 0, 1), tokenizer, replace(TOGETHER, seq_len=len(whole.tokens) - 3))
    assert cut.cut and cut.loss_mask[-1] == 1 and not cut.context.any()
    none = tokenise(
        talk(0, 1), tokenizer, replace(TOGETHER, seq_len=len(tokenise(talk(1), tokenizer, TOGETHER).tokens) + 8)
    )
    assert none.dropped == "too_long"


def test_the_loss_and_its_gradient_are_torchs_weighted_mean(tokenizer, tokenizer_dir, tmp_path):
    """Packed here, one conversation after the other there; divided by the sum of weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = Qwen3Config(
        vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=64,
        tie_embeddings=True, max_positions=512, dtype="float32",
    )  # fmt: skip
    params = model.init(jax.random.key(0))
    save_hf(params, model, tmp_path / "hf")
    records = [talk(1, 0, 0.25), talk(0.5), talk(0, 3, 1)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with BatchIterator(make_dataset(tmp_path / "data", records), tokenizer, TOGETHER, 1) as batches:
        batch = next(batches)
    total, count, seen = torch.zeros(()), 0.0, set()
    for segment in range(1, int(batch.segment_ids_bt.max()) + 1):
        ours = batch.segment_ids_bt[0] == segment
        ids = torch.tensor(batch.tokens_bt[0, ours].astype(np.int64))[None]
        weight = torch.tensor(batch.loss_mask_bt[0, ours])[1:]
        losses = torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total, count = total + (losses * weight).sum(), count + float(weight.sum())
        seen.add((tuple(ids[0].tolist()), tuple(batch.loss_mask_bt[0, ours].tolist())))
    (total / count).backward()
    made = [tokenise(one, tokenizer, TOGETHER) for one in records]
    assert seen == {(tuple(one.tokens.tolist()), tuple(one.loss_mask.tolist())) for one in made}

    def mean(params):
        loss, (weights, _) = loss_sums(params, batch, model=model)
        return loss / weights, weights

    (loss, weights), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    assert float(weights) == pytest.approx(count, rel=1e-6)
    assert float(loss) == pytest.approx(total.item() / count, rel=1e-5)
    ours = np.asarray(next(leaf for leaf in jax.tree.leaves(gradients) if leaf.shape == (model.vocab_size, 32)))
    np.testing.assert_allclose(ours, theirs.get_input_embeddings().weight.grad.numpy(), atol=2e-6)


@pytest.mark.parametrize("colour", [True, False])
def test_the_preview_shows_context_and_weights(tokenizer, tmp_path, monkeypatch, colour):
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    out = io.StringIO()
    preview.show(make_dataset(tmp_path / "data", [talk(1, 0, 0.25)]), tokenizer, TOGETHER, 1, out)
    said = out.getvalue()
    assert "tokens are trained on, " in said and "of them with another weight than 1; " in said
    assert "are of turns of weight 0" in said
    for number, shade, mark in ((0, "32", "«"), (1, "31", "«weight 0: "), (2, "33", "«weight 0.25: ")):
        assert f"answer {number}." in said.split(f"\x1b[{shade}m" if colour else mark)[-1 if number else 1]
