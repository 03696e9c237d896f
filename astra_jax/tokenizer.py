"""Tokenizer: a byte-level BPE with the tokens of a chat format; trained here for tiny models, or a model's own.

The trained tokenizer splits text before BPE so that a word has the same tokens everywhere: after a space, after a
quote, inside JSON. Qwen's tokenizer merges a space into the next word, so `France` in a question and `"France"` in a
call's arguments are different tokens. A model of a few million parameters would have to learn that pairing for every
entity. Here copying an entity is copying tokens. Numbers are split after each two digits and codes (`OSL`) after each
capital, so that their tokens are few and each is frequent. The price is one more token for each space.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from etils import epath
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from astra_jax import chat_files
from astra_jax.base.errors import InputError
from astra_jax.base.files import in_bucket, location, write_text
from astra_jax.chat_files import TokenizerError as TokenizerError
from synthesis.core.chat_format import ChatFormat, Segment
from synthesis.core.chat_template import FoundFormat, format_of, template_of
from synthesis.core.chatml import QWEN3, QWEN3_INSTRUCT, THINK_END, THINK_START, ChatML
from synthesis.core.datasets import Folder

SPECIAL_TOKENS = QWEN3.needed
"""Special tokens of a tokenizer that is trained here: the frame's (HF's `special`), and others that stay visible."""
ROWS = 128
"""An embedding that tokens were added to has a multiple of this many rows, which any mesh divides."""

# In this order: each Chinese or Japanese character alone, capitals that begin no word, runs of other letters, digits
# in pairs, runs of the rest.
_CJK = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_PIECES = rf"{_CJK}|\p{{Lu}}(?!\p{{Ll}})|(?:(?!{_CJK})[\p{{L}}\p{{M}}])+|\p{{N}}{{1,2}}|[^\p{{L}}\p{{M}}\p{{N}}]+"
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
MAX_END_IDS = 4
"""Most tokens that end a turn: the engine checks for this many."""
_WINDOW = 1 << 16
"""Characters that are counted at a time; while tokenising, each token takes some hundred bytes."""
_SHRINKING = 3
"""Largest factor by which Unicode's composition shortens text.

For example, the three bytes of U+212A become one, K; the nine bytes for U+0DDD become three.
"""


_SLOW = ("tokenizer.model", "spiece.model", "tiktoken.model", "vocab.txt")
"""Files of tokenizers in other forms than that of `tokenizers`."""
_ROUND_TRIPS = ("word", " Word", "two  words, 1.5 !", "\n", '{"a": [1, "B"]}')
"""Texts like the starts and ends of pieces of conversations; all ASCII, which every vocabulary has."""

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of single-byte tokens in vocabularies of characters."""
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_VISIBLE}))
}
"""Byte for each character of a token's name, in byte-level BPE."""


class TooManyTokens(ValueError):
    """Error: a text has more tokens than allowed."""


class ChatTokenizer:
    """Converter of text to ids and back. Made by `train` or `load`. Encoding lets other threads run meanwhile.

    Attributes:
        format: chat format of its model, to render and parse conversations; has the tokenizer's control tokens.
        eos_id: id of the token that ends a turn.
        pad_id: id of the padding token.
        end_ids: every token with which a model ends a turn, `eos_id` first; the others are from the model's
            `generation_config.json`. If the folder has none, it is `pad_id`, which documents end with.
        frame_ids: ids of the tokens that mark the frame, `eos_id` and `pad_id` among them.
        special_ids: `frame_ids` and the ids of all other tokens that are part of no text.
        added: tokens that its model's folder does not have: those of tool calls, if the model has none.
        new_ids: ids of added tokens that the folder's vocabulary does not have either: no model was trained on them.
        changed_files: contents of the files, by name, that a model trained in the format has in place of its folder's.
            They have the end tokens and, if the folder's template writes no tools or is missing, the template and added
            tokens.
        vocab_size: ids are below it; a model's embedding may be larger.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        origin: str = "tokenizer",
        chat_format: ChatFormat = QWEN3,
        added: Sequence[str] = (),
        new: Collection[str] = (),
        ends: Sequence[int] | None = None,
    ) -> None:
        # A folder that was saved after truncating or padding keeps doing so; here a text has all its tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids: dict[str, int] = {}
        for token in (*chat_format.needed, *added):
            token_id = tokenizer.token_to_id(token)
            if token_id is None or tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
                raise TokenizerError(
                    f"{origin}: {token!r} is not a single token of it; use the tokenizer of the chat template's model, "
                    "or one that ChatTokenizer.train made"
                )
            ids[token] = token_id
        self._tokenizer = tokenizer
        own = tokenizer.get_added_tokens_decoder().values()
        # Special tokens that the format does not escape itself.
        control = {one.content for one in own if one.special and chat_format.escape(one.content) == one.content}
        self.format = dataclasses.replace(chat_format, control=tuple(sorted(control - {""})))
        self.eos_id: int = ids[chat_format.turn_end]
        self.pad_id: int = ids[chat_format.pad]
        others = (self.pad_id,) if ends is None else ends
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *others)))
        for token_id in self.end_ids:
            if tokenizer.id_to_token(token_id) is None:
                raise TokenizerError(f"{origin}: eos_token_id {token_id} is not a token of the tokenizer; change it")
        if len(self.end_ids) > MAX_END_IDS:
            raise TokenizerError(
                f"{origin}: {len(self.end_ids)} tokens end a turn, at most {MAX_END_IDS} are watched for; name fewer "
                "as eos_token_id of generation_config.json"
            )
        self.frame_ids = frozenset(ids[token] for token in chat_format.frame)
        tags = frozenset(chat_format.text_tokens)
        special = (
            i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special and one.content not in tags
        )
        self.special_ids = self.frame_ids | frozenset(special)
        self.added = tuple(added)
        self.new_ids = frozenset(ids[token] for token in new)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        # A character of a token's name is a byte of its text, or more in an added token.
        whole = {one.content for one in own}
        longest = max(len(token.encode()) if token in whole else len(token) for token in vocabulary)
        self._most_per_token = longest * (1 if tokenizer.normalizer is None else _SHRINKING)
        self.changed_files: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, dir: Path | str) -> ChatTokenizer:
        """Train on texts and write an HF-loadable folder; the same texts give the same bytes.

        Args:
            texts: rendered conversations, tool documents; special tokens in them are cut out.
            vocab_size: the largest size; smaller if the texts do not have that many pairs that occur twice.
            dir: gets `tokenizer.json`, `tokenizer_config.json`, the chat template and `generation_config.json`.

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
            special_tokens=[AddedToken(t, special=t in QWEN3.frame, normalized=False) for t in SPECIAL_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(_without_special_tokens(texts), trainer=trainer)
        dir = Path(dir)
        dir.mkdir(parents=True, exist_ok=True)
        write_text(dir / "tokenizer_config.json", json.dumps(_HF_CONFIG, indent=2) + "\n")
        write_text(dir / "chat_template.jinja", template_of(QWEN3))
        made = cls(tokenizer, origin=str(dir))
        write_text(dir / "generation_config.json", made.generation_config())
        write_text(dir / "tokenizer.json", tokenizer.to_str(pretty=True))
        return made

    @classmethod
    def load(cls, dir: Folder, *, generation: Folder | None = None) -> ChatTokenizer:
        """Load a folder that `train` wrote, or a model's folder whose chat template is one of the supported formats.

        If the model has no tokens for tools, they are added: `added` lists them, `rows` returns the rows of its
        extended embedding, and `changed_files` has the folder's changed files.

        Args:
            generation: the model's folder, whose files name the end tokens if those of `dir` do not.

        Raises:
            TokenizerError: the folder has no tokenizer, it lacks a token of the format, or it does not restore text.
            TemplateError: its chat template is not a supported format.
        """
        folder = location(dir)
        of_model, ends = folder, chat_files.end_ids(folder)
        if ends is None and generation is not None:  # an adapter's folder may have no other file of a model
            of_model = location(generation)
            ends = chat_files.end_ids(of_model)
        tokenizer = cls._read(folder)
        taken = frozenset(tokenizer.get_vocab(with_added_tokens=True))
        found = format_of(folder, taken)
        made = cls._with_tools(tokenizer, str(dir), found, ends)
        made._check_text_comes_back(str(dir))
        own_template = found.knows_tools and found.has_template
        files = chat_files.changed_files(
            folder,
            made.format.turn_end,
            made.end_ids,
            made.pad_id,
            template=None if own_template else template_of(made.format),
            generation=of_model,
        )
        if made.added:
            files["tokenizer.json"] = made._tokenizer.to_str(pretty=True)
        made.changed_files = MappingProxyType(files)
        return made

    @staticmethod
    def _read(folder: epath.Path) -> Tokenizer:
        file = folder / "tokenizer.json"
        if file.exists():
            try:
                # `tokenizers` raises a plain "Exception" for every problem of the file.
                return Tokenizer.from_buffer(file.read_bytes())
            except Exception as error:
                raise TokenizerError(f"{file} cannot be read ({error}); write it again") from None
        slow = all((folder / name).exists() for name in ("vocab.json", "merges.txt"))
        if slow and not in_bucket(folder):  # transformers converts it
            try:
                from transformers import AutoTokenizer
            except ImportError:
                raise TokenizerError(
                    f"{folder} has no tokenizer.json, and its vocab.json and merges.txt are converted by transformers: "
                    "pip install 'astra-jax[hf]', or give a folder with a tokenizer.json"
                ) from None

            converted: Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
            return converted
        if (model := next((name for name in _SLOW if (folder / name).exists()), None)) is not None:
            raise TokenizerError(
                f"{folder} has {model} and no tokenizer.json, the only form that is read; write it once with "
                f'python -c "from transformers import AutoTokenizer as A; A.from_pretrained({str(folder)!r})'
                f'.save_pretrained({str(folder)!r})" (needs pip install transformers sentencepiece tiktoken)'
            )
        raise TokenizerError(
            f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; give a tokenizer's folder"
        )

    @classmethod
    def _with_tools(
        cls, tokenizer: Tokenizer, origin: str, found: FoundFormat, ends: Sequence[int] | None
    ) -> ChatTokenizer:
        taken = tokenizer.get_vocab(with_added_tokens=True)
        if found.knows_tools:
            # Two formats write the same; the model has tokens for thoughts of one of them.
            unthinking = found.format == QWEN3_INSTRUCT and not {THINK_START, THINK_END} & taken.keys()
            return cls(tokenizer, origin=origin, chat_format=ChatML() if unthinking else found.format, ends=ends)
        # Also if the vocabulary has it as an ordinary token, which BPE splits.
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in found.format.text_tokens])
        for token in found.format.text_tokens:
            number = tokenizer.token_to_id(token)
            if number in taken.values() and number != taken.get(token):
                raise TokenizerError(
                    f"{origin}: its ids have gaps, so that {token!r} would be {number}, which is taken; number its "
                    "tokens without gaps"
                )
        new = [token for token in found.format.text_tokens if token not in taken]
        added = found.format.text_tokens
        return cls(tokenizer, origin=origin, chat_format=found.format, added=added, new=new, ends=ends)

    def generation_config(self) -> str:
        """Return Hugging Face's `generation_config.json`, for a model without one: end tokens and padding."""
        return chat_files.generation_config(None, self.end_ids, self.pad_id)

    def _check_text_comes_back(self, origin: str) -> None:
        """Check that pieces of a conversation, encoded separately, decode to the same text. Raises `TokenizerError`.

        A tokenizer that adds a space before each piece or changes letters would train on other text.
        """
        for text in _ROUND_TRIPS:
            if (found := self.decode(self.encode(text))) != text:
                raise TokenizerError(
                    f"{origin}: its tokenizer does not give text back: {text!r} becomes {found!r}. Use one without "
                    "add_prefix_space (Metaspace: prepend_scheme 'never', and no Strip in the decoder) and without a "
                    "normalizer that changes ASCII; such a model's conversations would be trained as other text"
                )

    def rows(self, stored: int) -> int:
        """Return the embedding's rows with the added tokens; `stored`: rows in the model's folder."""
        return stored if not self.added or self.vocab_size <= stored else padded(self.vocab_size)

    def spelled(self, stored: int, *, own: bool = False) -> dict[int, tuple[int, ...]]:
        """Return the missing tokens of an embedding with `stored` rows, by id, as ids of tokens that it has.

        A missing token becomes its text's tokens without the added ones: `<tool_call>` is `<`, `tool`, `_`, `call`,
        `>`.

        Args:
            own: True if the folder is the embedding's too. Then rows at `new_ids` are unused: some models have more
                rows than tokens (Qwen2 151,936 for 151,646), and the other rows were never trained.
        """
        content = json.loads(self._tokenizer.to_str())
        rowless = self.new_ids if own else frozenset()
        missing = {
            one["id"]: one["content"] for one in content["added_tokens"] if one["id"] >= stored or one["id"] in rowless
        }
        if not missing:
            return {}
        content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] not in missing]
        before = Tokenizer.from_str(json.dumps(content))
        spelled = {number: before.encode(text, add_special_tokens=False).ids for number, text in missing.items()}
        return {number: tuple(ids) for number, ids in spelled.items() if ids and max(ids) < stored}

    def check_fits(self, vocab_size: int) -> None:
        """Check that a model with `vocab_size` rows has one for each token. Raises `ValueError`."""
        if vocab_size < self.vocab_size:
            raise InputError(
                f"the model's vocab_size is {vocab_size}, the tokenizer has {self.vocab_size} tokens; make the model's "
                "at least as large"
            )

    @property
    def definition(self) -> str:
        """Content of `tokenizer.json`."""
        return self._tokenizer.to_str()

    @property
    def ids(self) -> frozenset[int]:
        """All ids; there may be gaps below `vocab_size`."""
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def vocabulary_digest(self) -> str:
        """Digest that identifies a vocabulary; rollout servers report theirs, computed the same way by our plugin."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        lines = (f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1]))
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def digest(self) -> str:
        """Digest of the tokenisation and the chat format; independent of how its file is written."""
        content = json.loads(self._tokenizer.to_str())
        parts = {name: content[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        text = json.dumps([parts, self.format.identity], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Return token ids; special tokens in the text become their single id. `decode(encode(text)) == text`."""
        return self.encode_segments([Segment(text, trainable=False)])[0]

    def most_characters(self, tokens: int) -> int:
        """Return the number of characters above which a text surely has more tokens than this; nothing is encoded."""
        return tokens * self._most_per_token

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; a part of a character is not valid UTF-8."""
        text = self.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if byte := _FALLBACK.fullmatch(token):
            return bytes([int(byte.group(1), 16)])
        return bytes(map(_BYTES.__getitem__, token)) if token and _BYTES.keys() >= set(token) else text.encode()

    def encode_segments(self, segments: Sequence[Segment], *, most: int | None = None) -> tuple[list[int], list[int]]:
        """Return token ids of the segments, each encoded separately as in a rollout, and the loss mask (1: trainable).

        Args:
            most: most ids of all segments together. A text with far more costs the time and memory of twice as many.

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
        """Raise `TooManyTokens` at twice as many tokens.

        Splitting a text that fits never gives that many: a window has hundreds of tokens at least, and its ends cost a
        few.
        """
        count, size, windows = 0, 0, list[str]()
        for window in (text[at : at + _WINDOW] for text in texts for at in range(0, len(text), _WINDOW)):
            windows.append(window)
            size += len(window)
            if size >= _WINDOW:
                count += sum(map(len, self._tokenizer.encode_batch_fast(windows, add_special_tokens=False)))
                if count > 2 * most:
                    raise TooManyTokens(f"more than {most} tokens")
                size, windows = 0, []


def padded(tokens: int) -> int:
    """Return the rows of an embedding that tokens were added to."""
    return -(-tokens // ROWS) * ROWS


_HF_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": QWEN3.turn_end,
    "pad_token": QWEN3.pad,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 131_072,
}


def _without_special_tokens(texts: Iterable[str]) -> Iterator[str]:
    # The trainer ignores special tokens inside texts: `<tool_call>` would train merges that are never used.
    cut = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    for text in texts:
        yield from (part for part in cut.split(text) if part)
