"""Tokens: a byte-level BPE with Qwen3's special tokens; trained here for tiny models, or a real Qwen one from a folder.

The trained tokenizer cuts text before BPE so that a word has the same tokens wherever it stands: after a space, after a
quote, inside JSON. Real Qwen merges a space into the word behind it, so `France` in a question and `"France"` in a
call's arguments are different tokens; a model of a few million parameters would have to learn that pairing for every
entity. Here copying an entity is copying tokens. Numbers are cut after each two digits and codes (`OSL`) after each
capital, so that their tokens are few and each is frequent. The price is one token more for each space.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from synthesis.core.chat_format import (
    CALL_END,
    CALL_START,
    RESPONSE_END,
    RESPONSE_START,
    THINK_END,
    THINK_START,
    TURN_END,
    TURN_START,
    Segment,
)
from synthesis.core.chat_template import writes_thoughts
from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location, write_text
from synthesis.core.refusals import InputError, Refusal

PAD = "<|endoftext|>"
# The first three mark the frame (HF's `special`); the others are single tokens, but text that a reader wants to see.
FRAME_TOKENS = (PAD, TURN_START, TURN_END)
TEXT_TOKENS = (THINK_START, THINK_END, CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)
SPECIAL_TOKENS = FRAME_TOKENS + TEXT_TOKENS

# In this order: each Chinese or Japanese character alone, capitals that begin no word, runs of other letters, digits in
# pairs, runs of the rest.
_CJK = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_PIECES = rf"{_CJK}|\p{{Lu}}(?!\p{{Ll}})|(?:(?!{_CJK})[\p{{L}}\p{{M}}])+|\p{{N}}{{1,2}}|[^\p{{L}}\p{{M}}\p{{N}}]+"
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
_WINDOW = 1 << 16
"""Characters that are counted at a time; while tokenising, each token takes some hundred bytes."""
_SHRINKING = 3
"""Unicode's composition makes at most so many bytes one: of U+212A's three a K, of nine for U+0DDD three."""


class TokenizerError(Refusal):
    """A folder holds no usable tokenizer; the message says what is missing."""


class TooManyTokens(ValueError):
    """A text has more tokens than there is room for."""


class ChatTokenizer:
    """Text to ids and back. Made by `train` or `load`. Encoding lets other threads run meanwhile.

    Attributes:
        start_id: of `<|im_start|>`, which begins a turn.
        eos_id: of `<|im_end|>`, which ends a turn.
        pad_id: of `<|endoftext|>`.
        vocab_size: ids are below it; a model's embedding may be larger.
        thoughts: whether conversations of its model hold thoughts, see `chat_format.render`.
    """

    def __init__(self, tokenizer: Tokenizer, *, origin: str = "tokenizer", thoughts: bool = True) -> None:
        ids: dict[str, int] = {}
        for token in SPECIAL_TOKENS:
            token_id = tokenizer.token_to_id(token)
            if token_id is None or tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
                raise TokenizerError(
                    f"{origin}: {token!r} is not a single token of it; use a Qwen3 tokenizer, or one that "
                    "ChatTokenizer.train made"
                )
            ids[token] = token_id
        self._tokenizer = tokenizer
        self.thoughts = thoughts
        self.start_id: int = ids[TURN_START]
        self.eos_id: int = ids[TURN_END]
        self.pad_id: int = ids[PAD]
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        # A character of a token's name is a byte of its text, or more in one that was added.
        longest = max(len(token.encode()) if token in SPECIAL_TOKENS else len(token) for token in vocabulary)
        self._most_per_token = longest * (1 if tokenizer.normalizer is None else _SHRINKING)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, dir: Path | str) -> ChatTokenizer:
        """Train on texts and write an HF-loadable folder; the same texts give the same bytes.

        Args:
            texts: rendered conversations, tool documents; special tokens in them are cut out.
            vocab_size: the most; fewer when the texts do not have that many pairs that occur twice.
            dir: gets `tokenizer.json` and `tokenizer_config.json`.

        Raises:
            ValueError: `vocab_size` has no room for the bytes and the special tokens.
        """
        if vocab_size < _MIN_VOCAB:
            raise InputError(
                f"vocab_size is {vocab_size}; 256 bytes and {len(SPECIAL_TOKENS)} special tokens need {_MIN_VOCAB}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[AddedToken(t, special=t in FRAME_TOKENS, normalized=False) for t in SPECIAL_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(_without_special_tokens(texts), trainer=trainer)
        dir = Path(dir)
        dir.mkdir(parents=True, exist_ok=True)
        write_text(dir / "tokenizer_config.json", json.dumps(_HF_CONFIG, indent=2) + "\n")
        write_text(dir / "tokenizer.json", tokenizer.to_str(pretty=True))
        return cls(tokenizer, origin=str(dir))

    @classmethod
    def load(cls, dir: Folder) -> ChatTokenizer:
        """Load a folder that `train` wrote, or a real Qwen3 checkpoint's.

        Raises:
            TokenizerError: there is no tokenizer in it, or it lacks one of Qwen3's special tokens.
            TemplateError: its chat template writes no format that is trained here.
        """
        folder = location(dir)
        file = folder / "tokenizer.json"
        if file.exists():
            try:
                # `tokenizers` says "Exception" for whatever is wrong with the file.
                tokenizer = Tokenizer.from_buffer(file.read_bytes())
            except Exception as error:
                raise TokenizerError(f"{file} cannot be read ({error}); write it again") from None
            return cls(tokenizer, origin=str(dir), thoughts=writes_thoughts(folder))
        slow = all((folder / name).exists() for name in ("vocab.json", "merges.txt"))
        if slow and not in_bucket(folder):  # transformers converts it
            try:
                from transformers import AutoTokenizer
            except ImportError:
                raise TokenizerError(
                    f"{dir} has no tokenizer.json, and its vocab.json and merges.txt are converted by transformers: "
                    "pip install 'astra-jax[hf]', or give a folder with a tokenizer.json"
                ) from None

            tokenizer = AutoTokenizer.from_pretrained(str(dir)).backend_tokenizer
            return cls(tokenizer, origin=str(dir), thoughts=writes_thoughts(folder))
        raise TokenizerError(
            f"{dir} has neither tokenizer.json nor vocab.json with merges.txt; give a tokenizer's folder"
        )

    def check_fits(self, vocab_size: int) -> None:
        """Raises `ValueError`: a model with so many words has no row for some of the tokens."""
        if vocab_size < self.vocab_size:
            raise InputError(
                f"the model's vocab_size is {vocab_size}, the tokenizer has {self.vocab_size} tokens; make the model's "
                "at least as large"
            )

    @property
    def vocabulary_digest(self) -> str:
        """Tells one vocabulary from another; rollout servers say theirs, made in the same way, by our plugin."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        lines = (f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1]))
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def digest(self) -> str:
        """Of what it makes of texts, and of the chat format; the same however its file is written."""
        content = json.loads(self._tokenizer.to_str())
        parts = {name: content[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        text = json.dumps([parts, self.thoughts], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in the text become their single id. `decode(encode(text)) == text`."""
        return self.encode_segments([Segment(text, trainable=False)])[0]

    def most_characters(self, tokens: int) -> int:
        """Characters beyond which a text surely has more tokens than these: it need not be tokenised to know that."""
        return tokens * self._most_per_token

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_segments(self, segments: Sequence[Segment], *, most: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of the segments, each encoded on its own as in a rollout, and the loss mask (1: trainable).

        Args:
            most: ids of all segments together. A text that has far more costs time and memory for twice as many.

        Raises:
            TooManyTokens: there are more than `most`.
        """
        texts = [segment.text for segment in segments]
        if most is not None:
            self._check_roughly(texts, most)
        # In batches the interpreter is free for other threads, and without offsets it takes half the time.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if most is not None and (count := sum(map(len, encodings))) > most:
            raise TooManyTokens(f"{count} tokens")
        ids: list[int] = []
        mask: list[int] = []
        for segment, encoding in zip(segments, encodings, strict=True):
            ids += encoding.ids
            mask += [int(segment.trainable)] * len(encoding.ids)
        return ids, mask

    def _check_roughly(self, texts: Sequence[str], most: int) -> None:
        """Raises `TooManyTokens` at twice as many, which no cut through a text makes of what would fit: a window holds
        hundreds of tokens at least, and its ends cost a few."""
        count, size, windows = 0, 0, list[str]()
        for window in (text[at : at + _WINDOW] for text in texts for at in range(0, len(text), _WINDOW)):
            windows.append(window)
            size += len(window)
            if size >= _WINDOW:
                count += sum(map(len, self._tokenizer.encode_batch_fast(windows, add_special_tokens=False)))
                if count > 2 * most:
                    raise TooManyTokens(f"more than {most} tokens")
                size, windows = 0, []


_HF_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": TURN_END,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 131_072,
}


def _without_special_tokens(texts: Iterable[str]) -> Iterator[str]:
    # The trainer does not know special tokens inside texts: `<tool_call>` would train merges that are never used.
    cut = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    for text in texts:
        yield from (part for part in cut.split(text) if part)
