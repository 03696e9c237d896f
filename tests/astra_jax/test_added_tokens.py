"""A model that knows no tools gets their tokens: tokenizer, embedding, template, and what is rendered with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from plain_world import ADDED, CHATML, SYSTEM, make_folder
from rollout_world import ScriptedSampler, call, make_environment, tiny_model
from selection import by_day
from sft_world import TOOL, trajectory
from template_world import PLAIN_CHATML, template
from tokenizers import Tokenizer

from astra_jax.chat_files import copy_tokenizer
from astra_jax.mesh import make_mesh
from astra_jax.models.hf_checkpoint import WeightsError, save_hf
from astra_jax.models.lora import LoRA
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig, make_task, run_episode
from astra_jax.run import frozen, weights
from astra_jax.run.checkpoints import named
from astra_jax.run.digests import digests_of
from astra_jax.sft.data import DataConfig, tokenise
from astra_jax.tokenizer import ChatTokenizer, TokenizerError, padded
from synthesis.core.chatml import QWEN3, ChatML
from synthesis.core.llama3_chat import LLAMA3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("plain"))


def test_tokens_of_calls_are_added_behind_all_others(plain: Path) -> None:
    before = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer = ChatTokenizer.load(plain)
    assert tokenizer.added == ADDED and tokenizer.vocab_size == before.get_vocab_size() + 4 == 388
    assert [tokenizer.encode(token) for token in ADDED] == [[384], [385], [386], [387]]
    assert isinstance(tokenizer.format, ChatML) and tokenizer.format.default_system == SYSTEM
    assert tokenizer.decode([tokenizer.eos_id]) == "<|im_end|>" and tokenizer.decode([tokenizer.pad_id]) == CHATML[0]
    text = "The capital of France, 北京"
    assert tokenizer.encode(text) == before.encode(text).ids
    # Room for them: a multiple of 128 rows, unless there is room already.
    assert (tokenizer.rows(384), tokenizer.rows(388), tokenizer.rows(400), padded(385)) == (512, 388, 400, 512)


def test_what_is_saved_beside_a_run_is_the_same_tokenizer_and_writes_calls(plain: Path, tmp_path: Path) -> None:
    tokenizer, own = ChatTokenizer.load(plain), ChatTokenizer.load(plain).changed_files
    assert copy_tokenizer(plain, tmp_path, but=own) == 0
    for name, text in own.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = ChatTokenizer.load(tmp_path)
    assert (again.digest, again.vocabulary_digest) == (tokenizer.digest, tokenizer.vocabulary_digest)
    assert again.format == tokenizer.format and again.added == () and again.changed_files == {}
    assert again.rows(400) == 400

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    one = trajectory(0, ["France", "中国"])
    messages = [{"role": m.role, "content": m.content} for m in one.messages]
    for given, message in zip(messages, one.messages, strict=True):
        if message.tool_calls:
            given["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
            ]
    ids = theirs.apply_chat_template(messages, tools=[TOOL.to_openai()], return_dict=True)["input_ids"]
    rendered = "".join(segment.text for segment in tokenizer.format.render(one.messages, one.tools))
    assert ids == tokenizer.encode(rendered) and {384, 385, 386, 387} < set(ids)


def test_of_a_model_without_a_system_it_is_the_same_format_again(tmp_path: Path) -> None:
    """Its template with tools is that of Qwen3-Instruct-2507, which has tokens of thoughts."""
    plain = PLAIN_CHATML.partition("\n")[2]
    folder = make_folder(tmp_path, chat_template=plain)
    tokenizer = ChatTokenizer.load(folder)
    assert tokenizer.added == ADDED and tokenizer.format.identity == ChatML().identity
    for name, text in tokenizer.changed_files.items():
        (folder / name).write_text(text, encoding="utf-8")
    again = ChatTokenizer.load(folder)
    assert (again.digest, again.format, again.added) == (tokenizer.digest, tokenizer.format, ())
    instruct = make_folder(
        tmp_path / "instruct", special=(*CHATML, *QWEN3.text_tokens), chat_template=template("qwen3_instruct_2507")
    )
    assert ChatTokenizer.load(instruct).format.identity is False


def test_a_tokenizer_of_qwen3_is_what_it_was(chat_tokenizer: ChatTokenizer) -> None:
    assert chat_tokenizer.added == () and chat_tokenizer.format == QWEN3
    assert chat_tokenizer.rows(77) == 77 and QWEN3.identity is True


def test_qwen2_5_needs_no_tokens_of_responses(tmp_path: Path) -> None:
    special = (*CHATML, "<tool_call>", "</tool_call>")
    tokenizer = ChatTokenizer.load(make_folder(tmp_path, special=special, chat_template=template("qwen2_5")))
    assert tokenizer.added == () and len(tokenizer.encode("<tool_response>")) > 1


def test_a_llama_needs_its_own_frame(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(make_folder(tmp_path, special=LLAMA3.frame, chat_template=template("llama3_1")))
    assert tokenizer.decode([tokenizer.eos_id]) == "<|eot_id|>" and len(tokenizer.frame_ids) == 5
    made = tokenise(trajectory(0, ["France"]), tokenizer, DataConfig(seq_len=2_000))
    said = tokenizer.decode([int(one) for one in made.tokens[made.loss_mask == 1]])
    assert said == '{"name": "capital_of", "parameters": {"country": "France"}}<|eot_id|>Paris<|eot_id|>'
    without = tuple(one for one in LLAMA3.frame if one != "<|end_header_id|>")
    folder = make_folder(tmp_path / "other", special=without, chat_template=template("llama3_1"))
    with pytest.raises(TokenizerError, match=r"'<\|end_header_id\|>' is not a single token"):
        ChatTokenizer.load(folder)


def test_ids_with_gaps_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 1  # so that the next id, which is how many there are, is that of the last
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="its ids have gaps"):
        ChatTokenizer.load(folder)


def test_trained_are_the_assistants_turns_with_the_added_tokens(plain: Path) -> None:
    tokenizer = ChatTokenizer.load(plain)
    made = tokenise(trajectory(0, ["France", "Japan"]), tokenizer, DataConfig(seq_len=2_000, split_at_user_turns=False))
    said = tokenizer.decode([int(one) for one in made.tokens[made.loss_mask == 1]])
    wanted = [
        f'<tool_call>\n{{"name": "capital_of", "arguments": {{"country": "{country}"}}}}\n</tool_call><|im_end|>'
        f"{capital}<|im_end|>"
        for country, capital in (("France", "Paris"), ("Japan", "Tokyo"))
    ]
    assert said == "".join(wanted)


def test_no_text_becomes_a_control_token_of_the_tokenizer(plain: Path) -> None:
    tokenizer = ChatTokenizer.load(plain)
    said = "".join((*CHATML, *ADDED))
    messages = [
        one if one.role == "assistant" else msgspec.structs.replace(one, content=said)
        for one in trajectory(0, ["France"]).messages
    ]
    ids, _ = tokenizer.encode_segments(tokenizer.format.render(messages, []))
    counted = {token: ids.count(tokenizer.encode(token)[0]) for token in (*CHATML, *ADDED)}
    # One system turn, four of the conversation; one call, one response.
    assert counted == dict(zip((*CHATML, *ADDED), (0, 5, 5, 0, 1, 1, 1, 1), strict=True))


async def test_a_rollout_is_rendered_and_read_in_the_models_format(plain: Path, pool) -> None:
    tokenizer, config = ChatTokenizer.load(plain), EpisodeConfig(max_prompt_tokens=4_000, max_response_tokens=2_000)
    turns = [call("capital_of", country="France"), call("population_of", city="Paris"), "2102650 people."]
    task = make_task(make_environment(), tokenizer, config, seed=3)
    assert tokenizer.decode(list(task.prompt_ids)).startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools")
    policy = ScriptedSampler(tokenizer, lambda session, turn, seed: turns[turn])
    episode = await run_episode(policy, pool, task, tokenizer, config, seed=1, session="s")
    assert episode.finish == "answered" and episode.reward == pytest.approx(1, abs=1e-5)
    segments = tokenizer.format.render(episode.messages, list(task.tools.values()))
    assert tokenizer.decode(episode.token_ids) == "".join(one.text for one in segments).removesuffix("\n")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def model(rows: int, *, tied: bool) -> Qwen3Config:
    return dataclasses.replace(tiny_model(rows, 256), n_kv_heads=2, tie_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "axes", by_day([None, {"tensor": 2}, {"tensor": 2, "fsdp": 2}], None, {"tensor": 2, "fsdp": 2})
)
def test_new_rows_are_the_mean_of_the_rows_that_spell_them(tmp_path: Path, tied: bool, axes: dict | None) -> None:
    """Of 381 rows, which no axis divides, on one device and over a mesh. The rest are the mean of all; of two that are
    spelled by the same tokens the second is shorter."""
    params = model(381, tied=tied).init(jax.random.key(0))
    save_hf(params, model(381, tied=tied), tmp_path / "hf")
    weights.save_orbax(params, model(381, tied=tied), tmp_path / "orbax")
    grown = model(512, tied=tied)
    spelled = {381: (3, 3, 5), 383: (380,), 384: (0, 7), 385: (7, 0)}
    shardings = None
    if axes is not None:
        count = int(np.prod(list(axes.values())))
        shardings = grown.param_shardings(make_mesh(**axes, devices=jax.devices()[:count]))
    for folder in ("hf", "orbax"):
        made = weights.load(tmp_path / folder, grown, shardings=shardings, rows=381, new_token_pieces=spelled)
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(lambda leaf: leaf.shape, grown.abstract_params())
        if shardings is not None:
            assert jax.tree.map(lambda leaf: leaf.sharding, made) == shardings
        changed = 0
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(params), strict=True):
            new, old = np.asarray(new), np.asarray(old)
            if new.shape == old.shape:
                assert np.array_equal(new, old)
                continue
            at = next(i for i, (a, b) in enumerate(zip(new.shape, old.shape, strict=True)) if a != b)
            kept, added = np.split(new, [381], axis=at)
            assert np.array_equal(kept, old), path
            wanted = np.repeat(old.mean(at, keepdims=True), 131, axis=at)
            for number, pieces in spelled.items():
                shorter = 0.99 if number == 385 else 1
                row = tuple(number - 381 if i == at else slice(None) for i in range(old.ndim))
                wanted[row] = shorter * np.take(old, np.array(pieces), axis=at).mean(at)
            np.testing.assert_allclose(added, wanted, atol=1e-7)
            changed += 1
        assert changed == (1 if tied else 2)
    as_it_is = weights.load(tmp_path / "hf", model(381, tied=tied), rows=381)
    assert all(map(np.array_equal, jax.tree.leaves(as_it_is), jax.tree.leaves(params)))
    with pytest.raises(ValueError, match=r"token 400 is spelled \(381,\), and there are 381 rows"):
        weights.load(tmp_path / "hf", grown, rows=381, new_token_pieces={400: (381,)})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes", by_day([None, {"tensor": 2, "fsdp": 2}], {"tensor": 2, "fsdp": 2}))
def test_spare_rows_of_added_tokens_are_made_of_the_rows_that_spell_them(plain, tmp_path, tied, axes) -> None:
    """384 tokens in 400 rows, of which the last sixteen were never trained."""
    tokenizer, big = ChatTokenizer.load(plain), model(400, tied=tied)
    params = big.init(jax.random.key(0))
    save_hf(params, big, tmp_path)
    spelled = tokenizer.new_token_pieces(400, own=True)
    assert spelled == tokenizer.new_token_pieces(384) and sorted(spelled) == sorted(tokenizer.new_ids) == [
        384,
        385,
        386,
        387,
    ]
    shardings = None if axes is None else big.param_shardings(make_mesh(**axes, devices=jax.devices()[:4]))
    made = weights.load(tmp_path, big, shardings=shardings, rows=400, new_token_pieces=spelled)
    if shardings is not None:
        assert jax.tree.map(lambda leaf: leaf.sharding, made) == shardings
    for name, at in (("embed_vd", 0), *(() if tied else (("head_dv", 1),))):
        old, new = (np.moveaxis(np.asarray(tree[name]), at, 0) for tree in (params, made))
        np.testing.assert_array_equal(np.delete(new, sorted(spelled), 0), np.delete(old, sorted(spelled), 0))
        for number, pieces in spelled.items():
            np.testing.assert_allclose(new[number], old[list(pieces)].mean(0), atol=1e-7)
    with pytest.raises(ValueError, match=r"token 385 is spelled \(384, 3\), and the row of 384 is made too"):
        weights.load(tmp_path, big, rows=400, new_token_pieces={384: (1, 2), 385: (384, 3)})


def test_tokens_that_a_vocabulary_has_keep_their_rows(tmp_path: Path) -> None:
    """Though its template knows no tools, and leaves them out: whoever trained the model may have trained them."""
    tokenizer = ChatTokenizer.load(make_folder(tmp_path, special=(*CHATML, *ADDED)))
    assert tokenizer.added == ADDED and tokenizer.new_ids == frozenset()
    assert tokenizer.new_token_pieces(400, own=True) == {}


@pytest.mark.parametrize("axes", by_day([{"fsdp": 2}, {"tensor": 2}], {"tensor": 2}))
@pytest.mark.parametrize("spare", [False, True])
def test_weights_with_made_rows_are_the_same_on_a_mesh_and_on_one_device(tmp_path: Path, axes, spare) -> None:
    """Means of thousands of rows are not, in their last bits: what is under adapters is told by what was read."""
    stored = dataclasses.replace(model(4_096, tied=False), d_model=64)
    params = jax.tree.map(lambda x: 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), stored.abstract_params())
    save_hf(params, stored, tmp_path)
    grown = stored if spare else dataclasses.replace(stored, vocab_size=4_224)
    spelled = {(4_000 if spare else 4_096) + i: (5 * i + 1, 5 * i + 2, 5 * i + 3, 77) for i in range(4)}
    how = {"rows": 4_096, "new_token_pieces": spelled}
    alone = weights.load(tmp_path, grown, **how)
    shardings = grown.param_shardings(make_mesh(**axes, devices=jax.devices()[:2]))
    origin = frozen.WeightsSource(str(tmp_path), **how)
    there = frozen.frozen(weights.load(tmp_path, grown, shardings=shardings, **how), LoRA(rank=2), origin)
    there.check(alone, tmp_path)
    # Rows that were read are told apart, and a file of before, whose digests are of all rows, is read.
    for name, at in (("embed_vd", (4_095, 3)), ("head_dv", (3, 4_095))):
        other = alone | {name: alone[name].at[at].add(1e-6)}
        with pytest.raises(WeightsError, match=f"{name} is not what the adapters were trained on .1 of"):
            there.check(other, tmp_path)
    before = dataclasses.replace(there, digests=digests_of(named(alone)))
    before.check(alone, tmp_path)
    frozen.write(before, tmp_path)
    read = frozen.read(tmp_path)
    assert read == dataclasses.replace(before, whole={}) and "whole" not in (tmp_path / frozen.FILE).read_text()
    read.check(alone, tmp_path)


def test_of_a_folder_that_cuts_texts_added_files_and_spellings_are_those_of_one_that_does_not(plain, tmp_path) -> None:
    folder, whole = make_folder(tmp_path), ChatTokenizer.load(plain)
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(2)
    stored.save(str(folder / "tokenizer.json"))
    cutting = ChatTokenizer.load(folder)
    assert cutting.changed_files == whole.changed_files and cutting.new_token_pieces(384) == whole.new_token_pieces(384)


def test_added_tokens_are_spelled_by_those_that_a_model_has_rows_for(plain: Path, tmp_path: Path) -> None:
    before, tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json")), ChatTokenizer.load(plain)
    wanted = {number: tuple(before.encode(token).ids) for number, token in enumerate(ADDED, start=384)}
    assert all(len(pieces) > 1 for pieces in wanted.values())
    assert tokenizer.new_token_pieces(384) == wanted and len(set(map(tuple, map(sorted, wanted.values())))) == 4
    assert tokenizer.new_token_pieces(386) == {number: wanted[number] for number in (386, 387)}
    assert tokenizer.new_token_pieces(388) == {}
    # A folder that has the tokens already, beside weights that have no rows for them.
    copy_tokenizer(plain, tmp_path, but=tokenizer.changed_files)
    for name, text in tokenizer.changed_files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert ChatTokenizer.load(tmp_path).new_token_pieces(384) == wanted
