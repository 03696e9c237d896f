"""Text that continues what is given: an assistant's message as transformers' template leaves it open, and a prompt that
is echoed with the logprobs of transformers' model, as evaluation harnesses ask for it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from rollout_world import decisive
from serving_world import CONVERSATION, Scripted, by_heart, model, on_engine, rendered, serving
from sft_world import TOOL, make_tokenizer

from astra_jax.models.hf_checkpoint import save_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
QUESTION: list[Any] = [{"role": "user", "content": CONVERSATION[0].content}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return make_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder, tokenizer):
    """transformers' tokenizer of the same folder."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def ask(server, messages: list[Any], *, extra: dict[str, Any] = CONTINUE, **options: Any) -> Any:
    body = {"return_token_ids": True, **extra}
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 60, **options}
    return server.client().chat.completions.create(extra_body=body, **options)


# ---------------------------------------------------------------------------------------------------------------------
# A message


@pytest.fixture(scope="module")
def learned(tokenizer):
    config = model(tokenizer.vocab_size)
    with serving(on_engine(by_heart(config, tokenizer, [rendered()]), config), tokenizer) as running:
        yield running


@pytest.mark.parametrize(
    ("last", "tools"),
    [
        ({"content": "Let me"}, True),
        ({"content": "Let me "}, False),
        ({"content": "two\n\nlines\n", "reasoning_content": "why"}, True),
        ({"content": "<think>\nwhy\n</think>\n\nbecause"}, False),
        ({"content": "", "reasoning_content": "why"}, True),
        ({"content": "a <b> & 北京 🙂"}, False),
    ],
)
def test_a_message_is_continued_where_transformers_leaves_it_open(learned, theirs, last, tools):
    messages = [{"role": "system", "content": "Be terse."}, *QUESTION, {"role": "assistant", **last}]
    shown = [TOOL.to_openai()] if tools else None
    got = ask(learned, messages, tools=shown, max_tokens=1)
    expected = theirs.apply_chat_template(messages, tools=shown, continue_final_message=True, return_dict=True)
    assert got.prompt_token_ids == expected["input_ids"]


def test_the_answer_is_what_follows_whole_and_streamed(learned):
    said = {"role": "assistant", "content": "Let me", "reasoning_content": "I look them up."}
    tools = [TOOL.to_openai()]
    choice = ask(learned, [*QUESTION, said], tools=tools, max_tokens=150).choices[0]
    assert choice.message.content == " see." and choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments)["country"] for call in choice.message.tool_calls] == ["Peru", "Kenya"]
    chunks = list(ask(learned, [*QUESTION, said], tools=tools, max_tokens=150, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    new_turn = ask(learned, [*QUESTION, said], extra={}, max_tokens=1)  # as vLLM without the field
    assert learned.service._tokenizer.decode(new_turn.prompt_token_ids).endswith("<|im_start|>assistant\n")


def test_what_cannot_be_continued_is_refused(tokenizer):
    said = {"role": "assistant", "content": "Let me"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with serving(lambda: Scripted(tokenizer, lambda _: "x"), tokenizer) as server:
        both, neither = {**CONTINUE, "add_generation_prompt": True}, {"add_generation_prompt": False}
        for messages, options, param, why in (
            (QUESTION, {}, "messages", "has the role user"),
            ([*QUESTION, {**said, "tool_calls": [call]}], {}, "messages", "has tool_calls"),
            ([*QUESTION, {**said, "content": "<think>\nLet"}], {}, "messages", "would be escaped"),
            ([*QUESTION, said], {"response_format": {"type": "json_object"}}, "continue_final_message", "a form"),
            ([*QUESTION, said], {"extra": both}, "continue_final_message", "both"),
            ([*QUESTION, said], {"extra": neither}, "add_generation_prompt", "or leave it out"),
        ):
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                ask(server, messages, **options)
            assert refused.value.param == param


# ---------------------------------------------------------------------------------------------------------------------
# A prompt


@pytest.fixture(scope="module")
def reference(folder, tokenizer):
    """(transformers' model, our parameters)."""
    config = model(tokenizer.vocab_size)
    params = decisive(config)
    save_hf(params, config, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), params


@pytest.fixture(scope="module")
def server(reference, tokenizer):
    with serving(on_engine(reference[1], model(tokenizer.vocab_size)), tokenizer) as running:
        yield running


TEXTS = ["The capital of Peru is Lima.", "北京 🙂", "a"]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [True, False])
def test_prompts_are_echoed_with_transformers_logprobs(server, reference, tokenizer, as_ids, max_tokens):
    ids = [tokenizer.encode(text) for text in TEXTS]
    prompts: Any = ids if as_ids else TEXTS
    options = {"max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 2, "seed": 1}
    got = server.client().completions.create(model="tiny", prompt=prompts, **options)
    for one, text, choice in zip(ids, TEXTS, got.choices, strict=True):
        found = choice.logprobs
        assert choice.text.startswith(text)
        new = got.usage.completion_tokens // len(TEXTS)
        assert new == max_tokens and len(found.tokens) == len(one) + max_tokens and choice.finish_reason == "length"
        assert "".join(found.tokens).startswith(text) or "bytes:" in "".join(found.tokens)
        assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
        assert len(text) in found.text_offset or not max_tokens
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        with torch.no_grad():
            logits = reference[0](torch.tensor([one])).logits[0]
        expected = torch.log_softmax(logits, -1).numpy()
        places = np.arange(len(one) - 1)
        np.testing.assert_allclose(found.token_logprobs[1 : len(one)], expected[places, one[1:]], atol=1e-4)
        for i in places:
            shown = found.top_logprobs[i + 1]
            assert found.token_logprobs[i + 1] == shown[found.tokens[i + 1]]
            np.testing.assert_allclose(max(shown.values()), expected[i].max(), atol=1e-4)
            is_greedy = max(shown.values()) == found.token_logprobs[i + 1]  # as lm-eval reads it
            assert is_greedy == (expected[i].argmax() == one[i + 1])


def test_a_streamed_echo_adds_up_to_the_whole(server):
    create = server.client().completions.create
    options: Any = {"model": "tiny", "prompt": TEXTS, "max_tokens": 5, "seed": 3, "echo": True, "logprobs": 1, "n": 2}
    whole = create(**options).choices
    texts, logprobs = ([[] for _ in whole] for _ in range(2))
    for chunk in create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            logprobs[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    for i, choice in enumerate(whole):
        assert "".join(texts[i]) == choice.text
        assert logprobs[i] == list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))


def test_an_echo_without_logprobs_is_text_alone(server):
    got = server.client().completions.create(model="tiny", prompt=TEXTS[0], max_tokens=0, echo=True)
    assert (got.choices[0].text, got.choices[0].logprobs, got.usage.completion_tokens) == (TEXTS[0], None, 0)
    with pytest.raises(openai.BadRequestError, match="use a number from 1"):
        server.client().completions.create(model="tiny", prompt="x", max_tokens=0)


def test_a_long_prompt_is_scored_in_pieces(server, reference, tokenizer):
    ids = (tokenizer.encode(TEXTS[0]) * 100)[:500]
    got = server.client().completions.create(model="tiny", prompt=[ids], max_tokens=0, echo=True, logprobs=0)
    with torch.no_grad():
        logps = torch.log_softmax(reference[0](torch.tensor([ids])).logits[0], -1).numpy()
    expected = logps[np.arange(499), ids[1:]]
    np.testing.assert_allclose(got.choices[0].logprobs.token_logprobs[1:], expected, atol=2e-4)
    assert got.usage.prompt_tokens_details.cached_tokens == 0
    again = server.client().completions.create(model="tiny", prompt=[ids], max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 499
