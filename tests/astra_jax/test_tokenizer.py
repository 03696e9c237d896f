"""The trained tokenizer: exact, the same everywhere, deterministic, and one that HF loads."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from astra_jax.rollout.engine.worker import MAX_STOPS
from astra_jax.tokenizer import MAX_END_IDS, SPECIAL_TOKENS, ChatTokenizer, TokenizerError, TooManyTokens
from synthesis.core.chat_format import Segment
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Message, ToolCall, ToolSpec

TOOL = ToolSpec(
    "capital_of_country",
    "The capital of a country.",
    {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
)


def conversation(country: str, capital: str, question: str = "What is the capital of {}?") -> list[Message]:
    return [
        Message("user", question.format(country)),
        Message("assistant", "", tool_calls=[ToolCall("call_0", "capital_of_country", {"country": country})]),
        Message("tool", f'{{"result": "{capital}"}}'),
        Message("assistant", capital, reasoning="The tool says so."),
    ]


FACTS = [
    ("France", "Paris"),
    ("Japan", "Tokyo"),
    ("Burkina Faso", "Ouagadougou"),
    ("中国", "北京"),
    ("Côte d'Ivoire", "Abidjan"),
]
TEXTS = ["".join(s.text for s in QWEN3.render(conversation(*fact), [TOOL])) for fact in FACTS] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    ChatTokenizer.train(TEXTS, 480, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> ChatTokenizer:
    return ChatTokenizer.load(folder)


pieces = st.sampled_from(
    [*SPECIAL_TOKENS, "France", " ", "\n", '": "', "北京", "é", "e\u0301", "🚀", "\x00", "\r\n", "42", "<|im_"]
)


@given(st.lists(pieces | st.text(max_size=6), max_size=10).map("".join))
def test_decoding_what_was_encoded_gives_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(st.lists(pieces | st.text(max_size=6), max_size=10).map("".join))
def test_encoding_beside_other_threads_gives_what_encoding_alone_does(tokenizer, text):
    assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    text, beats = "the capital of France " * 40_000, 0
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    while encoding.is_alive():
        encoding.join(0.002)
        beats += 1
    assert beats > 10


class Counting:
    """Counts what a tokenizer is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.characters = 0
        self._tokenizer = tokenizer

    def encode_batch_fast(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("part", ["a", "<|im_end|>", "capital ", "é", "<|im_"])
def test_far_too_many_tokens_are_refused_when_twice_as_many_are_counted(folder, part):
    tokenizer = ChatTokenizer.load(folder)
    counting = tokenizer._tokenizer = Counting(tokenizer._tokenizer)
    segments = [Segment(part * 500_000, trainable=False), Segment(part * 200, trainable=True)]
    with pytest.raises(TooManyTokens, match="more than 10000 tokens"):
        tokenizer.encode_segments(segments, most=10_000)
    assert counting.characters <= 20_000 * len(part) + 2 * 65_536


def test_exactly_as_many_tokens_as_there_is_room_for_are_taken(tokenizer):
    for segments in (
        [Segment("France, 北京", trainable=False), Segment("<|im_end|>", trainable=True)],
        [Segment("of France " * 30_000, trainable=False)],
    ):
        ids, mask = tokenizer.encode_segments(segments)
        assert tokenizer.encode_segments(segments, most=len(ids)) == (ids, mask)
        with pytest.raises(TooManyTokens, match=f"{len(ids)} tokens"):
            tokenizer.encode_segments(segments, most=len(ids) - 1)


@given(st.lists(pieces | st.text(max_size=6), max_size=10).map("".join))
def test_no_text_has_more_characters_than_its_tokens_hold(tokenizer, text):
    assert len(text) <= tokenizer.most_characters(len(tokenizer.encode(text)))


def test_composing_characters_makes_a_text_no_shorter_than_a_third(folder):
    def size(text: str) -> int:
        return len(text.encode())

    for character in (chr(i) for i in range(0x30000) if not 0xD800 <= i < 0xE000):
        composed = size(unicodedata.normalize("NFC", character))
        assert max(size(character), size(unicodedata.normalize("NFD", character))) <= 3 * composed
    composing = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = ChatTokenizer(composing).most_characters(7)
    composing.normalizer = normalizers.NFC()
    assert ChatTokenizer(composing).most_characters(7) == 3 * plain


@pytest.mark.parametrize(
    "word", ["France", "Ouagadougou", "Zanzibar", "北京", "capital_of_country", "Côte d'Ivoire", "1998"]
)
@pytest.mark.parametrize("frame", ["{}", "in {}", '"{}"', "of {}?", '{{"country": "{}"}}', "\n{}.", "({})", "名叫{}的"])
def test_an_entity_has_the_same_tokens_wherever_it_stands(tokenizer, word, frame):
    alone, framed = tokenizer.encode(word), tokenizer.encode(frame.format(word))
    assert any(framed[i : i + len(alone)] == alone for i in range(len(framed)))


def test_special_tokens_are_single_and_the_ends_are_qwen3s(tokenizer):
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.decode([tokenizer.eos_id]) == "<|im_end|>"
    assert tokenizer.decode([tokenizer.pad_id]) == "<|endoftext|>"
    assert len({tokenizer.encode(token)[0] for token in SPECIAL_TOKENS}) == len(SPECIAL_TOKENS) == 9


def test_tokens_of_special_tokens_are_not_trained(tmp_path):
    trained = ChatTokenizer.train(["<|im_end|>" * 100], 400, tmp_path)
    assert trained.vocab_size == 256 + len(SPECIAL_TOKENS)


def test_the_mask_marks_exactly_the_tokens_of_trainable_segments(tokenizer):
    segments = QWEN3.render(conversation("France", "Paris"), [TOOL])
    ids, mask = tokenizer.encode_segments(segments)
    assert len(ids) == len(mask)
    assert tokenizer.decode(ids) == "".join(segment.text for segment in segments)
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(trained) == "".join(segment.text for segment in segments if segment.trainable)


def test_ids_of_an_append_only_rollout_are_those_of_the_whole_conversation(tokenizer):
    messages = conversation("Japan", "Tokyo")
    whole, _ = tokenizer.encode_segments(QWEN3.render(messages, [TOOL]))
    ids, _ = tokenizer.encode_segments(QWEN3.render(messages[:1], [TOOL], add_generation_prompt=True))
    turns = [segment.text for segment in QWEN3.render(messages, [TOOL]) if segment.trainable]
    ids += tokenizer.encode(turns[0]) + tokenizer.encode(QWEN3.tool_results_text([messages[2].content]))
    ids += tokenizer.encode(turns[1]) + tokenizer.encode("\n")
    assert ids == whole


def test_training_is_deterministic_over_processes(folder, tmp_path):
    code = (
        "import sys; from astra_jax.tokenizer import ChatTokenizer\n"
        "ChatTokenizer.train(eval(sys.stdin.read()), 480, sys.argv[1])"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], input=repr(TEXTS), text=True, check=True, cwd=root, timeout=60
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        ours, theirs = ((path / name).read_bytes() for path in (folder, tmp_path))
        assert hashlib.sha256(ours).hexdigest() == hashlib.sha256(theirs).hexdigest()


def test_transformers_loads_the_folder_and_agrees(folder, tokenizer):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:5], "plain  words\n\n and 12 numbers"]:
        assert hf(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
        assert hf.decode(tokenizer.encode(text)) == text
    assert (hf.eos_token_id, hf.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)


@pytest.mark.parametrize(
    ("files", "others"),
    [
        ({}, ["<|endoftext|>"]),  # what documents end with
        ({"generation_config.json": [["<|endoftext|>", "<|im_end|>"]]}, ["<|endoftext|>"]),
        ({"generation_config.json": ["<|im_end|>"]}, []),
        ({"generation_config.json": ["<|im_start|>"], "config.json": ["<|endoftext|>"]}, ["<|im_start|>"]),
        ({"generation_config.json": [None], "config.json": ["<|im_start|>"]}, ["<|im_start|>"]),
    ],
)
def test_a_turn_ends_with_what_the_model_says(folder, tokenizer, tmp_path, files, others) -> None:
    """Also where the first is an id and no list, and where `generation_config.json` has none."""

    def ids(token):
        return [ids(one) for one in token] if isinstance(token, list) else tokenizer.encode(token)[0] if token else None

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    for name, [tokens] in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids(tokens)}))
    loaded = ChatTokenizer.load(tmp_path)
    assert loaded.end_ids == (loaded.eos_id, *map(ids, others)) and loaded.digest == tokenizer.digest
    assert json.loads(loaded.generation_config())["eos_token_id"] == list(loaded.end_ids)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (100_000, "eos_token_id 100000 is not a token of the tokenizer"),
        ("<|im_end|>", "generation_config.json: eos_token_id is '<.im_end.>'; use a token id or a list of them"),
        ([1, True], "use a token id or a list"),
        ([1, 2, 3, 4, 5], "tokens end a turn, at most 4 are watched for"),
    ],
)
def test_end_tokens_that_are_none_are_refused(folder, tmp_path, said, message) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(TokenizerError, match=message):
        ChatTokenizer.load(tmp_path)
    assert MAX_END_IDS <= MAX_STOPS, "the engine watches for all of them"


@pytest.mark.parametrize("how", ["truncation", "padding"])
def test_a_folder_that_cuts_or_fills_up_gives_every_token_and_no_more(folder, tokenizer, how, tmp_path):
    """As Hugging Face saves one after a call with `truncation=True` or `padding=True`."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if how == "truncation":
        stored.enable_truncation(16)
    else:
        stored.enable_padding(pad_id=tokenizer.pad_id, pad_token=QWEN3.pad)
    stored.save(str(tmp_path / "tokenizer.json"))
    loaded = ChatTokenizer.load(tmp_path)
    segments = QWEN3.render(conversation(*FACTS[2]), [TOOL])
    assert loaded.encode_segments(segments) == tokenizer.encode_segments(segments)
    assert loaded.digest == tokenizer.digest and loaded.definition == tokenizer.definition


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 200.*265"):
        ChatTokenizer.train(TEXTS, 200, tmp_path)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="neither tokenizer.json nor"):
        ChatTokenizer.load(tmp_path)
    plain = Tokenizer(models.BPE())
    plain.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"'<\|im_end\|>' is not a single token"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"):
        ChatTokenizer.load(tmp_path)


def test_empty_segments_encode_to_nothing(tokenizer):
    assert tokenizer.encode_segments([]) == ([], [])
    assert tokenizer.encode_segments([Segment("", True)]) == ([], [])


def test_codes_are_cut_into_capitals_and_numbers_into_pairs_of_digits(tmp_path):
    tokenizer = ChatTokenizer.train([*TEXTS, *["OSL OSL Oslo Oslo 2034 347 2034 347"] * 50], 480, tmp_path)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("OSL 2034 347")]
    assert pieces == ["O", "S", "L", " ", "20", "34", " ", "34", "7"]
    assert len(tokenizer.encode("Oslo")) == 1
