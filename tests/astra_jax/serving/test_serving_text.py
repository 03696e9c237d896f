"""Tokens to text, text to messages: deltas add up to the whole, however the text is cut."""

from __future__ import annotations

import json
import random

import pytest
from serving_world import without_ids
from sft_world import make_tokenizer

from astra_jax.serving.messages import FirstCall, TurnDeltas, message_of
from astra_jax.serving.sampled import Detokenizer
from synthesis.core import chatml
from synthesis.core.chatml import QWEN3, ChatML
from synthesis.core.llama3_chat import LLAMA3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call> <tool_call> \\"北京\\""}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>'
TURNS = [
    "plain",
    "",
    "\n\n",
    "two\n\nlines\n",
    "<think>\nwhy\n\nnot\n</think>\n\nbecause\n",
    "<think>\n\n</think>\n\n" + GOOD,
    "<think>never closed " + GOOD,
    "text\n" + GOOD + "\n" + GOOD,
    "text\n\n\n" + GOOD + "\n\nbetween\n" + GOOD + "\nafter\n\n",
    GOOD + BAD + GOOD,
    "a\n" + BAD + "\nb",
    "text\n" + GOOD[:-20],
    "<tool_call>nothing</tool_call> more <tool_call>",
    "less < than <tool <think> </thin",
    "<think>a</think>b</think>c\n" + GOOD,
    "<thin air",
    "<think>a</think>\n<think>\n" + GOOD + "\n</think>\n" + GOOD,
    "<think>a</think>" + GOOD + "<think>" + GOOD,
    "so <think>" + BAD + "</think><think>" + GOOD + "</think>" + GOOD,
    "é北京🙂\n" + GOOD + "🙂",
]


OTHERS = [
    '{"name": "f", "parameters": {"x": "<|python_tag|>"}}',
    '<|python_tag|>{"name": "f", "parameters": {}}',
    '{"name": "f", "parameters": ',
    "{a set}",
    "<| plain",
]
"""As Llama 3 says calls, and what only begins so."""


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("chat_format", [QWEN3, ChatML(), LLAMA3], ids=["qwen3", "plain", "llama3"])
@pytest.mark.parametrize("text", TURNS + OTHERS)
def test_deltas_add_up_to_the_message(text, chat_format, tools):
    expected = without_ids(message_of(text, chat_format, tools=tools))
    rng = random.Random(0)
    for pieces in (1, 2, 3, 7, len(text)):
        for _ in range(20 if chat_format == QWEN3 else 5):
            cuts = sorted(rng.choices(range(len(text) + 1), k=pieces - 1)) if pieces < len(text) else range(len(text))
            ends = [0, *cuts, len(text)]
            pieces_of_it = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            assert streamed(pieces_of_it, TurnDeltas(chat_format, tools)) == expected


def streamed(pieces, deltas):
    """The message that a stream's deltas add up to."""
    made = [delta for piece in pieces for delta in deltas.push(piece)]
    made += deltas.finish()
    got = {name: "".join(d.get(name, "") for d in made) for name in ("content", "reasoning_content")}
    calls = [call for d in made for call in d.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls))) and deltas.called == bool(calls)
    return without_ids({"role": "assistant", **got, "tool_calls": calls})


SCRAPS = [
    *(
        "<think>",
        "</think>",
        "\n",
        "\n\n",
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        '"',
        " ",
        "hi",
        "<",
        "<tool",
        "é",
    ),
    *('{"name": "a", "arguments": {}}', '{"name": "a", "arguments": {"x": "</tool_call>"}}', GOOD, BAD),
    *('{"name": "a", "arguments": {"x": "<tool_call>"}}', '{"name": "b", "arguments": {"x": "</think>"}}'),
    *(
        "<|python_tag|>",
        '{"name": "a", "parameters": {}}',
        '{"name": "a", "arguments": {"x": %s}}' % ("[" * 99 + "]" * 99),
    ),
    *('{"name": "a", "arguments": {"x": 1', "tru", "\\u00"),
]


@pytest.mark.parametrize("chat_format", [QWEN3, ChatML(), LLAMA3], ids=["qwen3", "plain", "llama3"])
def test_deltas_of_any_scraps_add_up_to_the_message(chat_format):
    rng = random.Random(5)
    for _ in range(700):
        text = "".join(rng.choices(SCRAPS, k=rng.randint(1, 9)))
        if chat_format.thought_end and "</think>" in text and not text.lstrip("\n").startswith("<think>"):
            continue  # comes too late, as `TurnDeltas` says
        tools, form = rng.random() < 0.85, rng.random() < 0.2
        pieces, rest = [], text
        while rest:
            size = rng.choice((1, 1, 2, 3, 7, 20))
            pieces.append(rest[:size])
            rest = rest[size:]
        expected = without_ids(message_of(text, chat_format, tools=tools, form=form))
        assert streamed(pieces, TurnDeltas(chat_format, tools, form)) == expected, (text, tools, form)


def test_a_call_is_read_once_however_many_tokens_come_behind_it(monkeypatch):
    """A brace is missing, as it often is; and what is whole is not read again for each token either."""
    slip = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}\n</tool_call>\n'
    read, real = 0, chatml.decoded

    def decoded(text, start):
        nonlocal read
        read += 1
        return real(text, start)

    monkeypatch.setattr(chatml, "decoded", decoded)
    for call in (slip, GOOD):
        text = call * 200 + "and so on. " * 200
        expected, read = without_ids(message_of(text, QWEN3, tools=True)), 0
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        assert streamed(pieces, TurnDeltas(QWEN3, True)) == expected
        assert read <= 200 * (2 + call.count("</tool_call>"))  # as it comes, for each tag that may close it; at the end
    first, read = FirstCall(QWEN3), 0
    assert not any(map(first.push, [(slip * 200)[i : i + 4] for i in range(0, len(slip) * 200, 4)]))
    assert read <= 200 and first.push(GOOD)


@pytest.mark.parametrize("before", ["", "text\n", BAD, '<tool_call>{"name": "a", "arguments": {}\n</tool_call>\n' * 2])
def test_the_first_call_is_the_first_that_can_be_executed(before):
    text = before + GOOD + "\n" + GOOD
    first = FirstCall(QWEN3)
    ended = next(i for i, character in enumerate(text) if first.push(character))
    assert ended + 1 == len(before + GOOD)
    assert len(message_of(text[: ended + 1], QWEN3, tools=True)["tool_calls"]) == 1


def test_what_may_begin_a_tag_and_stands_before_one_is_sent_once():
    text = "a <tool_cal" + GOOD + " <tool" + GOOD
    assert streamed(text, TurnDeltas(QWEN3, True)) == without_ids(message_of(text, QWEN3, tools=True))


def test_a_malformed_call_stays_in_the_content():
    message = message_of(f"a\n{BAD}\n{GOOD}", QWEN3, tools=True)
    assert message["content"] == f"a\n{BAD}" and len(message["tool_calls"]) == 1
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["x"] == '</tool_call> <tool_call> "北京"'


def test_bytes_that_are_no_text_are_decoded_a_few_times_at_most(tokenizer, monkeypatch):
    broken = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"]
    rng, decoded, real = random.Random(2), 0, tokenizer.decode

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return real(ids)

    for ids in (rng.choices(broken, k=2_000), broken[-1:] * 2_000, broken[:1] * 2_000):
        decoded = 0
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "decode", decode)
            growing = Detokenizer(tokenizer)
            text = "".join([*(growing.push(i) for i in ids), growing.finish()])
        assert text == real(ids) and decoded < 60 * len(ids)


def test_text_grows_by_whole_characters_and_adds_up(tokenizer):
    rng = random.Random(1)
    text = "é北京🙂 naïve <tool_call> ok"
    for ids in (tokenizer.encode(text), [rng.randrange(tokenizer.vocab_size) for _ in range(400)]):
        kept = [i for i in ids if tokenizer.decode([i]) not in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
        growing = Detokenizer(tokenizer)
        parts = [growing.push(i) for i in ids]
        assert "".join([*parts, growing.finish()]) == tokenizer.decode(kept)
    assert not any("\ufffd" in part for part in map(Detokenizer(tokenizer).push, tokenizer.encode(text)))
    # What may be the beginning of a stop string waits.
    stopping = Detokenizer(tokenizer, stops=["京🙂 na", "🙂 x"])
    shown = ""
    for i in tokenizer.encode(text):
        shown += stopping.push(i)
        if stopping.stop:
            break
        assert "京" not in shown
    assert (shown, stopping.stop) == ("é北", "京🙂 na")
