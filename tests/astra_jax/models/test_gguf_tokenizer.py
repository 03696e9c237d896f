"""Tokenizers of GGUF files against transformers' reading of the same files, on texts in ten scripts."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from gguf_world import SCRIPTS, SMOLLM2, smollm2, texts, trained, write
from tokenizers import Tokenizer

from astra_jax.models.gguf.convert import convert
from astra_jax.models.gguf.file import GGUFError, GGUFFile
from astra_jax.models.gguf.tokenizer import PRE_TOKENIZERS, HFTokenizer

COUNT = 1_000


def hf(folder: Path, name: str):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


def ids(tokenizer: Tokenizer, wanted: list[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch_fast(wanted, add_special_tokens=False)]


def test_the_texts_are_in_ten_scripts_and_different() -> None:
    assert len(SCRIPTS) == 10 and len(set(texts(COUNT, numerals=True))) > 990


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "llama3", "gpt-2"])
def test_ids_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    write(tmp_path / "a.gguf", pre=pre, vocabulary=trained(PRE_TOKENIZERS[pre]()))
    ours, theirs = HFTokenizer(GGUFFile(tmp_path / "a.gguf"), 1_000), hf(tmp_path, "a.gguf")
    wanted = [*texts(COUNT, numerals=True), "<|im_start|>user\nWhat?<|im_end|>\n", "a<|endoftext|>b"]
    assert ids(ours.tokenizer, wanted) == ids(theirs.backend_tokenizer, wanted)
    for text in wanted:
        assert ours.tokenizer.decode(ours.tokenizer.encode(text).ids, skip_special_tokens=False).endswith(text)
    apart = [unicodedata.normalize("NFD", text) for text in texts(COUNT, numerals=True)]
    composed = [unicodedata.normalize("NFC", text) for text in apart]
    assert (ids(ours.tokenizer, apart) == ids(ours.tokenizer, composed)) == (pre == "qwen2")


def test_qwens_tokenizer_composes_characters_as_its_own_does(tmp_path: Path) -> None:
    """The file does not say it; what transformers makes of the model's own files does."""
    converter = pytest.importorskip("transformers.convert_slow_tokenizer").Qwen2Converter
    write(tmp_path / "a.gguf", pre="qwen2", vocabulary=trained(PRE_TOKENIZERS["qwen2"]()))
    ours = HFTokenizer(GGUFFile(tmp_path / "a.gguf"), 1_000).tokenizer
    content = json.loads(ours.to_str())["model"]
    theirs = converter(None).converted(content["vocab"], [tuple(pair) for pair in content["merges"]])
    apart = [unicodedata.normalize("NFD", text) for text in texts(COUNT, numerals=True)]
    assert ids(ours, apart) == ids(theirs, apart)


def test_a_file_that_does_not_say_how_it_cuts_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", pre="default")
    with pytest.raises(GGUFError, match="'default', by which each program cuts .* gguf-new-metadata --pre-tokenizer"):
        HFTokenizer(GGUFFile(tmp_path / "a.gguf"), 1_000)


def test_transformers_reads_the_folder_that_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "a.gguf", pre="llama-bpe", vocabulary=trained(PRE_TOKENIZERS["llama-bpe"]()))
    tokenizer = HFTokenizer(GGUFFile(tmp_path / "a.gguf"), 1_000)
    (tmp_path / "hf").mkdir()
    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    assert tokenizer.save(tmp_path / "hf") == files
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.chat_template == "{{ messages[0].content }}"
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    # Of Llama 3 a text begins with a token of its own, and a piece that is a token is that token.
    assert theirs("Oslo")["input_ids"] == [1, *tokenizer.tokenizer.encode("Oslo", add_special_tokens=False).ids]
    assert tokenizer.tokenizer.model.ignore_merges
    for text in texts(50, numerals=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids(tokenizer.tokenizer, [text])[0]


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, [2]),
        ({"eos": 0}, [0, 2]),  # <|im_end|>, as llama.cpp finds it
        ({"eos": 0, "eot": 1}, [0, 1]),
        ({"eos": 0, "eot": 2, "eom": 1}, [0, 2, 1]),
    ],
)
def test_a_turn_ends_with_what_the_file_says_or_llama_cpp_finds(tmp_path: Path, keys, ends) -> None:
    """In every file of the folder, which transformers' `generate` and vLLM read."""
    named = {f"tokenizer.ggml.{name}_token_id": one for name, one in keys.items()}
    write(tmp_path / "a.gguf", keys=named)
    convert(tmp_path / "a.gguf", tmp_path / "hf")
    for name in ("generation_config.json", "config.json"):
        content = json.loads((tmp_path / "hf" / name).read_text())
        assert (content["eos_token_id"], content["bos_token_id"], content["pad_token_id"]) == (ends, 1, 0)
    write(tmp_path / "b.gguf", keys=named | {"tokenizer.ggml.eot_token_id": 9_999})
    with pytest.raises(GGUFError, match="key tokenizer.ggml.eot_token_id is 9999, of"):
        convert(tmp_path / "b.gguf", tmp_path / "other")


@pytest.mark.nightly
def test_ids_of_smollm2_are_those_of_transformers() -> None:
    """But for texts with numerals: llama.cpp and SmolLM2's own tokenizer cut each digit off before all else, so that
    spaces before one are a piece of their own; transformers does not know `smollm`, and cuts as GPT-2's does."""
    from tokenizers import pre_tokenizers

    path = smollm2()
    ours, theirs = HFTokenizer(GGUFFile(path), 49_152).tokenizer, hf(path.parent, SMOLLM2).backend_tokenizer
    plain = texts(COUNT, numerals=False)
    assert not any(char.isnumeric() and not "一" <= char <= "鿿" for text in plain for char in text)
    assert ids(ours, plain) == ids(theirs, plain)
    numeral = texts(COUNT, numerals=True)
    differing = [text for text, a, b in zip(numeral, ids(ours, numeral), ids(theirs, numeral), strict=True) if a != b]
    for text in differing:
        beyond_ascii = any(char.isnumeric() and not char.isascii() for char in text)
        behind_spaces = any(
            a.isspace() and b.isspace() and c.isdigit() for a, b, c in zip(text, text[1:], text[2:], strict=False)
        )
        assert beyond_ascii or behind_spaces
    assert differing
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    assert ids(ours, numeral) == ids(theirs, numeral)
