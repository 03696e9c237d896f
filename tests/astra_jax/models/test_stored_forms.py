"""Model folders in every form that strangers have: equal to transformers' reading, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from export_world import CHATML, SIZES, base_folder
from parity_world import logits_of
from plain_world import make_folder
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from astra_jax.models.hf_checkpoint import WeightsError, load_hf, read_config, save_hf, stored_dtype
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.run import weights
from astra_jax.tokenizer import ChatTokenizer, TokenizerError

MODEL = Qwen2Config(**(SIZES | {"tie_embeddings": True}))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(MODEL.init(jax.random.key(1)), MODEL, tmp_path / "hf")
    return tmp_path / "hf"


def logits(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ours and transformers'."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = np.arange(12)[None] * 7 % 512
    model = read_config(folder)
    ours = logits_of(load_hf(folder, model), model, tokens)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(tokens)).logits
    return ours, theirs.numpy()


@pytest.mark.parametrize("stored", ["both", "head alone"])
def test_a_tied_head_that_is_stored_is_read_as_transformers_reads_it(folder: Path, stored: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].copy()
    if stored == "head alone":
        del tensors[EMBEDDING]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = logits(folder)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_another_head_than_the_tied_one_is_refused_and_read_untied(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][511, 3] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"tie_word_embeddings true, and lm_head.weight differs .* false to do so"):
        load_hf(folder, read_config(folder))
    content = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(content))
    ours, theirs = logits(folder)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert np.abs(ours[..., 511] - ours[..., 510]).max() > 0


def test_tensors_that_an_index_leaves_out_are_named(folder: Path) -> None:
    save_hf(MODEL.init(jax.random.key(1)), MODEL, folder, max_bytes=20_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=f"tensor {name} is missing"):
        load_hf(folder, read_config(folder))


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model.bin", "write them once with transformers"),
        ("pytorch_model-00001-of-00002.bin", "write them once with transformers"),
        ("consolidated.00.pth", "write them once with transformers"),
        ("model-q4.gguf", "convert it: astra convert --from_gguf"),
    ],
)
def test_weights_in_other_files_are_refused_by_name(folder: Path, file: str, remedy: str) -> None:
    (folder / "model.safetensors").rename(folder / file)
    for read in (lambda: load_hf(folder, read_config(folder)), lambda: weights.check_stored(folder)):
        with pytest.raises(WeightsError, match=f"has {file} and no .*{remedy}"):
            read()


@pytest.mark.parametrize(
    ("said", "stored", "found"),
    [
        ({"torch_dtype": "bfloat16"}, np.float32, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, np.float32, "float32"),
        ({"dtype": None}, np.float32, "float32"),
        ({}, np.float32, "float32"),
        ({}, jnp.bfloat16, "bfloat16"),
        ({}, np.float16, "float16"),
        ({"dtype": "float16"}, np.float16, "float16"),
    ],
)
def test_the_dtype_is_the_configurations_else_that_of_the_tensors(folder: Path, said, stored, found) -> None:
    """As transformers reads it; float16 is refused, and read when another is asked for."""
    from transformers import AutoModelForCausalLM

    tensors = {name: one.astype(stored) for name, one in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    del content["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(content | said))
    assert str(AutoModelForCausalLM.from_pretrained(folder).dtype) == f"torch.{found}"
    if found == "float16":
        with pytest.raises(WeightsError, match=r"dtype is 'float16'.*--dtype"):
            stored_dtype(folder)
        ours, theirs = logits(folder)
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    else:
        assert stored_dtype(folder) == found


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def changed(folder: Path, how: str) -> Tokenizer:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if how == "lower case":
        made.normalizer = normalizers.Lowercase()
    elif how == "strip":
        made.normalizer = normalizers.Strip()
    elif how == "prefix space":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif how == "nfc":
        made.normalizer = normalizers.NFC()
    return made


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [("lower case", " Word", " word"), ("strip", " Word", "Word"), ("prefix space", "word", " word")],
)
def test_a_tokenizer_that_does_not_give_text_back_is_refused(tmp_path: Path, how: str, text: str, found: str) -> None:
    folder = make_folder(tmp_path)
    changed(folder, how).save(str(folder / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=f"does not give text back: '{text}' becomes '{found}'.*add_prefix_space"):
        ChatTokenizer.load(folder)


def sentencepiece(folder: Path, scheme: str) -> Path:
    """A tokenizer of characters and bytes, as sentencepiece's become: spaces are U+2581."""
    from tokenizers import AddedToken, models

    vocabulary = {token: i for i, token in enumerate((*CHATML, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"))}
    vocabulary |= {chr(one): len(vocabulary) + i for i, one in enumerate(range(33, 127))}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps if scheme == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(one, normalized=False) for one in CHATML])
    make_folder(folder)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_sentencepiece_that_puts_a_space_first_is_refused(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(TokenizerError, match="does not give text back.*prepend_scheme 'never'"):
        ChatTokenizer.load(sentencepiece(tmp_path, scheme))


@pytest.mark.parametrize("kind", ["nfc", "bytes", "clean up"])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    folder = sentencepiece(tmp_path, "never") if kind == "bytes" else make_folder(tmp_path)
    if kind == "nfc":
        changed(folder, kind).save(str(folder / "tokenizer.json"))
    elif kind == "clean up":
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"clean_up_tokenization_spaces": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, hf = ChatTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("Caf\u0065\u0301 , isn't it ?", "北京 🚀", '<|im_start|>user\n{"a": 1 , "b" : "c ."}<|im_end|>\n'):
        assert tokenizer.encode(text) == hf(text, add_special_tokens=False)["input_ids"]
        if kind != "nfc":
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("file", ["tokenizer.model", "tiktoken.model"])
def test_a_tokenizer_in_another_form_is_refused_by_name(tmp_path: Path, file: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / file)
    with pytest.raises(TokenizerError, match=f"has {file} and no tokenizer.json.*save_pretrained"):
        ChatTokenizer.load(folder)


def test_a_vocabulary_with_more_rows_than_tokens_is_read(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "qwen3")
    assert ChatTokenizer.load(base).vocab_size < read_config(base).vocab_size
    shutil.copytree(base, tmp_path / "again")
    ours, theirs = logits(tmp_path / "again")
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
