"""The server of OpenAI's API, through the `openai` client: equal to transformers and the trainer, whole or streamed."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest
from rollout_world import decisive
from selection import by_day
from serving_world import (
    CONVERSATION,
    KEY,
    Drip,
    by_heart,
    model,
    on_engine,
    rendered,
    serving,
    trainer_logps,
    without_ids,
)
from sft_world import TOOL, make_tokenizer

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.serving.service import ServingConfig

IDS = {"extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def params(tokenizer):
    return decisive(model(tokenizer.vocab_size))


@pytest.fixture(scope="module")
def server(params, tokenizer):
    """The random model."""
    with serving(on_engine(params, model(tokenizer.vocab_size)), tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def learned(tokenizer):
    """The model that knows `CONVERSATION` by heart."""
    config = model(tokenizer.vocab_size)
    with serving(on_engine(by_heart(config, tokenizer, [rendered()]), config), tokenizer) as running:
        yield running


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(3, 60)).tolist() for _ in range(count)]


def complete(server, prompt, **options):
    extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
    return server.client().completions.create(model="tiny", prompt=prompt, extra_body=extra, **options)


def post(server, path: str, body, **headers):
    """Status, headers and JSON of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def get(server, path: str, **headers) -> tuple[int, str]:
    try:
        request = urllib.request.Request(f"{server.url}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(true, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn


@pytest.mark.slow
@pytest.mark.parametrize("tie", by_day([True, False], False))
def test_greedy_equals_transformers_generate(tie, tokenizer, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = model(tokenizer.vocab_size, tie=tie)
    params = decisive(config)
    save_hf(params, config, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = random_prompts(tokenizer.vocab_size, 5)
    with serving(on_engine(params, config), tokenizer) as server:
        got = complete(server, prompts, max_tokens=24, temperature=0, logprobs=0)
    for prompt, choice in zip(prompts, got.choices, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert choice.token_ids == expected[0, len(prompt) :].tolist()
        logps = trainer_logps(params, config, prompt, choice.token_ids, 1.0)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logps, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_equal_the_trainers(server, params, tokenizer, temperature):
    prompts = random_prompts(tokenizer.vocab_size, 3, seed=1)
    got = complete(server, prompts, max_tokens=20, temperature=temperature, seed=3, logprobs=0)
    for prompt, choice in zip(prompts, got.choices, strict=True):
        logps = trainer_logps(params, model(tokenizer.vocab_size), prompt, choice.token_ids, temperature)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logps, atol=1e-4)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 20


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(server, tokenizer):
    prompts = random_prompts(tokenizer.vocab_size, 7, seed=2)
    alone = complete(server, prompts[3], max_tokens=16, seed=11).choices[0]
    crowd = complete(server, prompts, max_tokens=16, seed=11).choices[3]
    assert alone.token_ids == crowd.token_ids
    assert complete(server, prompts[3], max_tokens=16, seed=12).choices[0].token_ids != alone.token_ids
    unseeded = {tuple(complete(server, prompts[3], max_tokens=16).choices[0].token_ids) for _ in range(2)}
    assert len(unseeded) == 2


def test_choices_are_prompt_by_prompt_and_have_seeds_of_their_own(server, tokenizer):
    texts = ["France", "Japan and Peru"]
    got = complete(server, texts, n=3, max_tokens=10, seed=5)
    assert [choice.index for choice in got.choices] == list(range(6))
    assert got.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    assert got.usage.completion_tokens == 60
    for i, choice in enumerate(got.choices):
        single = complete(server, texts[i // 3], max_tokens=10, seed=5 + i % 3).choices[0]
        assert (choice.token_ids, choice.text) == (single.token_ids, single.text)
        assert choice.prompt_token_ids == tokenizer.encode(texts[i // 3])
    assert len({choice.text for choice in got.choices}) == 6


@pytest.mark.parametrize("stop", [None, [":"]])
def test_a_streamed_completion_adds_up_to_the_whole(server, stop):
    options = {"n": 2, "max_tokens": 60, "seed": 8, "logprobs": 0, "stop": stop}
    whole = complete(server, ["Kenya", "Norway"], **options)
    texts, ids, logps, finishes = ({i: kind() for i in range(4)} for kind in (str, list, list, list))
    stream = complete(server, ["Kenya", "Norway"], stream=True, stream_options={"include_usage": True}, **options)
    usage = []
    for chunk in stream:
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            logps[choice.index] += choice.logprobs.token_logprobs
            finishes[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    for i, choice in enumerate(whole.choices):
        assert (texts[i], ids[i], finishes[i]) == (choice.text, choice.token_ids, [choice.finish_reason])
        np.testing.assert_allclose(logps[i], choice.logprobs.token_logprobs, atol=1e-5)
    assert usage[-1] == whole.usage and not any(usage[:-1])
    assert len(usage) > 8  # in more than one part each
    assert not stop or {choice.finish_reason for choice in whole.choices} >= {"stop"}


def test_stops(server, tokenizer):
    free = complete(server, "Peru", max_tokens=80, seed=4, logprobs=0).choices[0]
    text = free.text
    at = next(i for i in range(20, len(text)) if text.find(text[i : i + 3]) == i and "\ufffd" not in text[i : i + 3])
    stopped = complete(server, "Peru", max_tokens=80, seed=4, stop=["never ever", text[at : at + 3]]).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[:at], "stop", text[at : at + 3])
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    # The token that completes the stop string is the last one.
    assert at + 3 <= free.logprobs.text_offset[len(stopped.token_ids)] < at + 3 + 12
    stop_id = free.token_ids[9]
    by_id = complete(server, "Peru", max_tokens=80, seed=4, extra_body={"stop_token_ids": [stop_id]}).choices[0]
    cut = free.token_ids.index(stop_id) + 1
    assert (by_id.token_ids, by_id.stop_reason) == (free.token_ids[:cut], stop_id)
    assert free.text.startswith(by_id.text) and free.finish_reason == "length"


def test_token_strings_as_ids(server):
    got = complete(
        server, "Peru", max_tokens=5, seed=4, logprobs=0, extra_body={"return_tokens_as_token_ids": True}
    ).choices[0]
    assert got.logprobs.tokens == [f"token_id:{i}" for i in got.token_ids]


def test_a_completion_ends_at_the_context(server, tokenizer):
    prompt = random_prompts(tokenizer.vocab_size, 1)[0] * 20
    prompt = prompt[:500]
    got = complete(server, prompt, max_tokens=400).choices[0]
    assert (len(got.token_ids), got.finish_reason) == (12, "length")


# ---------------------------------------------------------------------------------------------------------------------
# Conversations

TOOLS = [TOOL.to_openai()]
QUESTION = [{"role": "user", "content": CONVERSATION[0].content}]


def ask(server, messages, **options):
    return server.client().chat.completions.create(
        **{"model": "tiny", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 150, **options}
    )


def added_up(chunks) -> tuple[dict, str]:
    """The message that a stream's deltas of one choice make."""
    message: dict = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                assert call.pop("index") == len(message["tool_calls"])
                message["tool_calls"].append(call)
            finish = choice.finish_reason or finish
    return message, finish


def test_a_conversation_with_tools(learned, tokenizer):
    first = ask(learned, QUESTION, **IDS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Let me see.", "I look them up.")
    arguments = [json.loads(call.function.arguments) for call in message.tool_calls]
    assert arguments == [{"country": "Peru"}, {"country": "Kenya"}]
    assert len({call.id for call in message.tool_calls}) == 2

    before = learned.policy.stats.snapshot()
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result.content}
        for call, result in zip(message.tool_calls, CONVERSATION[2:4], strict=True)
    ]
    second = ask(learned, [*QUESTION, message.model_dump(exclude_none=True), *results], **IDS)
    assert second.choices[0].message.content == CONVERSATION[4].content
    assert second.choices[0].finish_reason == "stop" and not second.choices[0].message.tool_calls
    # The second turn's prompt begins with all that was seen and said: only what is new is prefilled.
    seen = [*first.prompt_token_ids, *first.choices[0].token_ids]
    assert second.prompt_token_ids[: len(seen)] == seen
    stats = learned.policy.stats.since(before)
    assert stats.prompt_tokens == len(second.prompt_token_ids)
    assert stats.prefilled_tokens == len(second.prompt_token_ids) - len(seen)


def test_a_streamed_conversation_adds_up_to_the_whole(learned):
    whole = ask(learned, QUESTION).choices[0]
    chunks = list(ask(learned, QUESTION, stream=True, stream_options={"include_usage": True}))
    message, finish = added_up(chunks)
    assert without_ids(message) == without_ids(whole.message.model_dump(exclude_none=True))
    assert finish == whole.finish_reason == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens > 0
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == "Let me see." and not any("<" in (c.choices[0].delta.content or "") for c in chunks[:-1])
    kinds = ["tool_calls" in c.choices[0].delta.model_dump(exclude_unset=True) for c in chunks[:-1]]
    assert sum(kinds) == 2  # each call is one delta


def test_a_call_that_is_cut_off_stays_text(learned):
    calls = ask(learned, QUESTION, logprobs=True, **IDS).choices[0]
    cut = ask(learned, QUESTION, max_tokens=len(calls.token_ids) - 4).choices[0]
    assert cut.finish_reason == "length" and len(cut.message.tool_calls) == 1
    assert "<tool_call>" in cut.message.content
    chunks = ask(learned, QUESTION, max_tokens=len(calls.token_ids) - 4, stream=True)
    message, finish = added_up(chunks)
    assert without_ids(message) == without_ids(cut.message.model_dump(exclude_none=True)) and finish == "length"
    assert len(calls.logprobs.content) == len(calls.token_ids)


def test_without_tools_nothing_is_a_call(learned):
    shown = ask(learned, QUESTION, n=2, tool_choice="none", tools=TOOLS)
    assert shown.usage.prompt_tokens < ask(learned, QUESTION, max_tokens=1).usage.prompt_tokens  # no tool documents
    assert all(choice.message.tool_calls is None and choice.index == i for i, choice in enumerate(shown.choices))


def test_thinking_can_be_switched_off(learned, tokenizer):
    got = ask(
        learned,
        QUESTION,
        max_tokens=1,
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert tokenizer.decode(got.prompt_token_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETE, b"{", None, "the body is not JSON"),
        (COMPLETE, [], None, "is a JSON list; send an object"),
        (COMPLETE, {}, "prompt", "missing required field `prompt`"),
        (COMPLETE, {"prompt": "x", "temperature": "hot"}, "temperature", 'temperature is "hot": Expected `float`'),
        (COMPLETE, {"prompt": "x", "temperature": -1}, "temperature", "temperature is -1.0; use 0 (greedy)"),
        (COMPLETE, {"prompt": "x", "top_p": 0}, "top_p", "top_p is 0"),
        (COMPLETE, {"prompt": "x", "n": 0}, "n", "n is 0; use a number from 1 to 128"),
        (COMPLETE, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0; use a number from 1"),
        (COMPLETE, {"prompt": "x", "top_q": 1}, "top_q", "unknown field 'top_q'"),
        (COMPLETE, {"prompt": "x", "presence_penalty": 2.5}, "presence_penalty", "use a number from -2.0 to 2.0"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"3": 5}}, "logit_bias", "is not supported here"),
        (COMPLETE, {"prompt": "x", "top_k": -2}, "top_k", "top_k is -2"),
        (COMPLETE, {"prompt": "x", "best_of": 3}, "best_of", "best_of is 3"),
        (COMPLETE, {"prompt": "x", "ignored": ["user"]}, "ignored", "unknown field 'ignored'"),
        (CHAT, {**HELLO, "prompt_logprobs": 1}, "prompt_logprobs", "send echo and logprobs to /v1/completions"),
        (CHAT, {**HELLO, "guided_json": {}}, "guided_json", "send response_format instead"),
        (COMPLETE, {"prompt": "x", "logprobs": 21}, "logprobs", "use a number from 0 to 20"),
        (COMPLETE, {"prompt": "x", "stop": ["", "a"]}, "stop", "empty string"),
        (COMPLETE, {"prompt": "x", "stop_token_ids": [11, 12, 13]}, "stop_token_ids", "at most 4 are watched for"),
        (COMPLETE, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        (COMPLETE, {"prompt": []}, "prompt", "prompt is empty"),
        (COMPLETE, {"prompt": [1, "x"]}, "prompt", "mixes token ids with texts"),
        (COMPLETE, {"prompt": [1] * 600}, "prompt", "prompt has 600 tokens; prompt and completion have room for 512"),
        (COMPLETE, {"prompt": [100_000]}, "prompt", "has token id 100000; ids are from 0 to"),
        (COMPLETE, {"prompt": ""}, "prompt", "prompt has no tokens"),
        (CHAT, {"messages": []}, "messages", "messages is empty"),
        (CHAT, {**HELLO, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "unknown field `x`"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "use one of developer, system"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "content is missing"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "send a string, or parts of type text",
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "send a JSON object as a string",
        ),
        (CHAT, {**HELLO, "tools": [{"type": "retrieval"}]}, "tools[0]", "only functions are offered here"),
        (
            CHAT,
            {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 9_000}}}]},
            "tools[0].function.parameters",
            "more than 5000 values",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server, path, body, param, message):
    status, _, answer = post(server, path, body)
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"], error
    assert error["param"] == param
    assert error["code"] == ("context_length_exceeded" if "room for" in message else None)


def test_fields_that_change_nothing_are_taken(server):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "presence_penalty": 0, "top_k": -1, "stop": None}
    harmless |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "max_completion_tokens": 2}
    status, headers, answer = post(server, CHAT, {**HELLO, **harmless})
    assert status == 200 and answer["usage"]["completion_tokens"] <= 2
    assert headers["Astra-Ignored-Fields"] == "user, metadata, store"


def test_errors_reach_the_client_as_its_own(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="'gpt' *; 'tiny' is served here") as caught:
        client.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="at most 511 are taken"):
        client.completions.create(model="tiny", prompt=[1] * 512)
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'openai/gpt' *; 'tiny' is served here"):
        client.models.retrieve("openai/gpt")
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert post(server, "/v1/nothing", {})[0] == 404
    status, body = get(server, "/v1/completions")
    assert status == 405 and "error" in json.loads(body)


def test_a_key_is_asked_for(tokenizer):
    with pytest.raises(ValueError, match="no API key is set: .*; set one, or listen on 127.0.0.1"):
        ServingConfig("tiny", host="0.0.0.0")
    with serving(lambda: Drip(tokenizer), tokenizer, token=KEY, max_body_bytes=2_000) as server:
        assert get(server, "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": f"Basic {KEY}"}):
            assert get(server, "/metrics", **headers)[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client(KEY).completions.create(model="tiny", prompt="x", max_tokens=2).choices
        headers = {"Authorization": f"Bearer {KEY}"}
        status, _, answer = post(server, COMPLETE, {"prompt": "x" * 3_000}, **headers)
        assert status == 413 and "larger than 2000 bytes" in answer["error"]["message"]


# ---------------------------------------------------------------------------------------------------------------------
# Under way


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_slot(tokenizer, stream):
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        client = server.client().with_options(timeout=1 if not stream else 60)
        options = {"model": "tiny", "prompt": "x", "max_tokens": 9_000, "n": 2, "stream": stream}
        if stream:
            with client.completions.create(**options) as answer:
                next(iter(answer))
                assert server.policy.running == 2
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**options)
        until(lambda: server.policy.running == 0, 5)


def test_a_stop_string_frees_the_slot(tokenizer):
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        got = server.client().completions.create(model="tiny", prompt="x", max_tokens=9_000, stop="p d")
        assert (got.choices[0].text, server.policy.running) == ("dri", 0)


def test_a_full_queue_is_answered_429(tokenizer):
    with serving(lambda: Drip(tokenizer), tokenizer, max_waiting=1) as server:
        with server.client().completions.create(model="tiny", prompt="x", max_tokens=9_000, n=3, stream=True) as busy:
            next(iter(busy))
            status, headers, answer = post(server, COMPLETE, {"prompt": "x"})
            assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
            assert int(headers["Retry-After"]) >= 1
        until(lambda: server.policy.running == 0, 5)
        assert post(server, COMPLETE, {"prompt": "x"})[0] == 200
        # What it could not take with nobody there is no matter of waiting.
        status, headers, answer = post(server, COMPLETE, {"prompt": ["x", "y"], "n": 2})
        assert (status, answer["error"]["param"]) == (400, "n") and "takes 3 at once" in answer["error"]["message"]


def test_stopping_lets_requests_end_and_takes_no_more(tokenizer):
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        got: list[str] = []

        def request() -> None:
            got.append(server.client().completions.create(model="tiny", prompt="x", max_tokens=100).choices[0].text)

        thread = threading.Thread(target=request)
        thread.start()
        until(lambda: server.policy.running == 1)
        assert server.run(server.service.stop()) == 0  # none was cut off
        thread.join()
        assert len(tokenizer.encode(got[0])) == 100
        with pytest.raises(openai.APIConnectionError):
            server.client().models.list()


def test_a_failed_policy_is_said_to_have_failed(tokenizer):
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        stream = server.client().completions.create(model="tiny", prompt="x", max_tokens=9_000, stream=True)
        next(iter(stream))
        server.policy.failure = ValueError("no memory")
        with pytest.raises(openai.APIError, match="the policy broke"):
            list(stream)
        status, body = get(server, "/health")
        assert status == 503 and "no memory" in json.loads(body)["status"]
        assert post(server, COMPLETE, {"prompt": "x"})[0] == 503


def test_metrics(params, tokenizer):
    with serving(on_engine(params, model(tokenizer.vocab_size)), tokenizer) as server:
        complete(server, [[1, 2, 3], [4, 5]], max_tokens=6)
        post(server, CHAT, {"messages": []})
        post(server, "/nowhere", {})
        status, text = get(server, "/metrics")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert status == 200
        assert values['astra_serving_requests_total{endpoint="/v1/completions",status="200"}'] == "1.0"
        assert values['astra_serving_requests_total{endpoint="/v1/chat/completions",status="400"}'] == "1.0"
        assert values['astra_serving_requests_total{endpoint="other",status="404"}'] == "1.0"
        assert values['astra_serving_tokens_total{kind="prompt"}'] == "5.0"
        assert values['astra_serving_tokens_total{kind="completion"}'] == "12.0"
        assert values["astra_serving_time_to_first_token_seconds_count"] == "2.0"
        assert float(values["astra_serving_time_per_token_seconds_sum"]) > 0
        assert values["astra_serving_running"] == values["astra_serving_waiting"] == "0.0"
