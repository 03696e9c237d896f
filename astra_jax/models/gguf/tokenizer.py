"""Conversion of a GGUF file's tokenizer to Hugging Face's form: byte-level BPE, special tokens, and the chat template.

A file names the way in which its tokenizer splits text before BPE, without its definition. llama.cpp has the
definitions (`src/llama-vocab.cpp`), and so does this table. Unknown names are refused: with another split the model
would get other tokens than in its training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from astra_jax.base.files import write_text
from astra_jax.models.gguf.file import GGUFError, GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Kinds of tokens, as llama.cpp numbers them; 1 is an ordinary one."""

# The expressions of the models' own tokenizers; they differ in how many digits form a piece.
_QWEN2, _LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": lambda: _split(_QWEN2),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "llama-bpe": lambda: _split(_LLAMA3),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`.

`default` is missing, since it means that the converter did not know: llama.cpp then splits by four expressions in a
row, and warns; transformers splits as GPT-2. Neither knows how the model was trained.
"""
_COMPOSED = ("qwen2",)
"""Pre-tokenizers with Unicode normalisation NFC first, as in the models' own tokenizers; the file does not state it."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe")
"""Pre-tokenizers for which a piece that is a token is that token, whatever the merges would give.

A text also starts with a special token, unless the file states otherwise.
"""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
_NEEDED_BYTES = (*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes that must have a token; a byte without one disappears from texts.

SmolLM2 has none for six control characters, nor for unused planes of Unicode.
"""


def _letter(byte: int) -> str:
    """Return the character of a byte in byte-level BPE: printable bytes are themselves, others start at U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in seen else chr(0x100 + sum(one not in seen for one in range(byte)))


class HFTokenizer:
    """A file's tokenizer in Hugging Face's form.

    Attributes:
        tokenizer: content of `tokenizer.json`.
        config: content of `tokenizer_config.json`.
        template: the chat template; "" if there is none.
        ends: ids of the tokens that end a text or a turn.

    Raises:
        GGUFError: the kind of tokenizer or split is not supported; a key is missing or does not fit.
    """

    def __init__(self, file: GGUFFile, rows: int) -> None:
        """
        Args:
            rows: of the embedding.
        """
        kind = file.value("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise GGUFError(f"{file.path}: key tokenizer.ggml.model is {kind[:80]!r}; read is 'gpt2', byte-level BPE")
        pre = file.value("tokenizer.ggml.pre", str)
        if pre == "default":
            raise GGUFError(
                f"{file.path}: key tokenizer.ggml.pre is 'default', by which each program cuts text otherwise; write "
                "its model's with gguf-new-metadata --pre-tokenizer=NAME (of the package gguf), or take a newer file; "
                f"read are {', '.join(map(repr, PRE_TOKENIZERS))}"
            )
        if pre not in PRE_TOKENIZERS:
            raise GGUFError(
                f"{file.path}: key tokenizer.ggml.pre is {pre[:80]!r}; read are {', '.join(map(repr, PRE_TOKENIZERS))}"
            )
        self._file = file
        tokens, kinds = self._texts("tokens"), self._kinds()
        if len(tokens) > rows or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
            problem = f"has {len(tokens)} tokens, {len(set(tokens))} different ones, for {rows} rows"
            raise file.error("tokenizer.ggml.tokens", f"{problem} and {len(kinds)} kinds", "key")
        self.tokenizer = Tokenizer(self._model(tokens, kinds, whole_words=pre in _WHOLE_WORDS))
        if pre in _COMPOSED:
            self.tokenizer.normalizer = normalizers.NFC()
        self.tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
        self.tokenizer.decoder = decoders.ByteLevel()
        self._add(tokens, kinds)
        self.config = self._config(tokens)
        if file.value("tokenizer.ggml.add_bos_token", bool, pre in _WHOLE_WORDS):
            self._begin_with_bos(tokens)
        self.template: str = file.value("tokenizer.chat_template", str, "")
        self.ends = self._ends(tokens, kinds)

    def save(self, folder: Path) -> list[str]:
        """Write the files into a folder; return their names."""
        files = {
            "tokenizer.json": self.tokenizer.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(self.config, indent=2, ensure_ascii=False) + "\n",
        }
        if self.template:
            files["chat_template.jinja"] = self.template
        if self.ends:
            named = {"bos_token_id": "bos", "pad_token_id": "padding"}
            ids = {name: self._file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
            content = {name: one for name, one in ids.items() if one is not None} | {"eos_token_id": self.ends}
            files["generation_config.json"] = json.dumps(content, indent=2) + "\n"
        for name, text in files.items():
            write_text(folder / name, text)
        return list(files)

    def _texts(self, name: str) -> list[str]:
        key = f"tokenizer.ggml.{name}"
        found = self._file.value(key, list)
        if not found or not all(isinstance(one, str) and one for one in found):
            raise self._file.error(key, "has something else than texts", "key")
        return found

    def _kinds(self) -> list[int]:
        key = "tokenizer.ggml.token_type"
        found = self._file.value(key, list)
        if not all(isinstance(one, int) for one in found):
            raise self._file.error(key, "has something else than numbers", "key")
        return found

    def _model(self, tokens: list[str], kinds: list[int], *, whole_words: bool) -> models.BPE:
        # An entry that no text can become is not a token: it only pads the embedding.
        vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
        merges: list[tuple[str, str]] = []
        for i, merge in enumerate(self._texts("merges")):
            first, _, second = merge.partition(" ")
            for one in (first, second, first + second):
                if one not in vocabulary:
                    raise self._file.error(
                        "tokenizer.ggml.merges", f"number {i} makes {one!r}, which is not a token", "key"
                    )
            merges.append((first, second))
        for byte in _NEEDED_BYTES:
            if _letter(byte) not in vocabulary:
                raise self._file.error("tokenizer.ggml.tokens", f"has no token for the byte {byte:#04x}", "key")
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)

    def _add(self, tokens: list[str], kinds: list[int]) -> None:
        for wanted in (_CONTROL, _USER_DEFINED):
            self.tokenizer.add_tokens(
                [
                    AddedToken(token, special=wanted == _CONTROL, normalized=False)
                    for token, kind in zip(tokens, kinds, strict=True)
                    if kind == wanted
                ]
            )

    def _config(self, tokens: list[str]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            key = f"tokenizer.ggml.{key}_token_id"
            if key in self._file.metadata:
                token = self._file.value(key, int)
                if not 0 <= token < len(tokens):
                    raise self._file.error(key, f"is {token}, of {len(tokens)} tokens", "key")
                config[f"{name}_token"] = tokens[token]
        length = [value for key, value in self._file.metadata.items() if key.endswith(".context_length")]
        if length and isinstance(length[0], int):
            config["model_max_length"] = length[0]
        return config

    def _ends(self, tokens: list[str], kinds: list[int]) -> list[int]:
        """Return the end tokens that the file names; without an end of turn, the control tokens that llama.cpp uses."""
        found, eot = [], "tokenizer.ggml.eot_token_id"
        for key in ("tokenizer.ggml.eos_token_id", eot, "tokenizer.ggml.eom_token_id"):
            if key in self._file.metadata:
                found.append(self._file.value(key, int))
                if not 0 <= found[-1] < len(tokens):
                    raise self._file.error(key, f"is {found[-1]}, of {len(tokens)} tokens", "key")
        if eot not in self._file.metadata:
            found += [i for i, one in enumerate(tokens) if one in _TURN_ENDS and kinds[i] == _CONTROL]
        return list(dict.fromkeys(found))

    def _begin_with_bos(self, tokens: list[str]) -> None:
        if "bos_token" not in self.config:
            raise self._file.error("tokenizer.ggml.bos_token_id", "is missing, and a text begins with it", "key")
        bos = self.config["bos_token"]
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokens.index(bos))],
        )
