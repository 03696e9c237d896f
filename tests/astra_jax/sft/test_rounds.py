"""Conversations whose user speaks several times: what is trained is what the model's template shows when it serves."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from plain_world import CHATML, make_folder
from sft_world import TOOL, make_dataset, make_tokenizer, trajectories, trajectory
from template_world import PLAIN_CHATML, qwen3_template, template
from transformers import PreTrainedTokenizerFast

from astra_jax.run.identity import check_same_run
from astra_jax.sft import preview
from astra_jax.sft.data import BatchIterator, DataConfig, by_round, round_ends, scan, steps_for_epochs, tokenise
from astra_jax.sft.rename_entities import rename_entities
from astra_jax.tokenizer import ChatTokenizer
from synthesis.astra_format.sft import to_chat_record, to_trl_record
from synthesis.core.chatml import QWEN3
from synthesis.core.llama3_chat import LLAMA3
from synthesis.core.openai_messages import to_openai
from synthesis.core.records import Dialogue, Goal, Message, ToolCall, ToolSpec, Trajectory
from synthesis.core.workdir import WorkdirError

APART = DataConfig(seq_len=2_048, packing_bins=4)
TALK = trajectory(0, ["France", "Japan", "Peru"])
TOLD = msgspec.structs.replace(
    TALK,
    messages=[
        Message("system", "Confirm each change."),
        *TALK.messages[:4],
        Message("user", "Thank you, that is all."),
        Message("assistant", "You are welcome.", reasoning="There is nothing to look up."),
    ],
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def hf(tokenizer):
    """Hugging Face's renderer with Qwen3's own template; what is rendered is text, so any vocabulary serves."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    made.chat_template = qwen3_template()

    def render(messages, *, opened: bool, tools=(TOOL,)) -> str:
        said = to_openai(messages)
        for one in said:
            for call in one.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        shown = [tool.to_openai() for tool in tools]
        return str(made.apply_chat_template(said, tools=shown, add_generation_prompt=opened, tokenize=False))

    return render


def trained(example, tokenizer) -> str:
    return tokenizer.decode([t for t, m in zip(example.tokens, example.loss_mask, strict=True) if m])


@pytest.mark.parametrize("talk", [TALK, TOLD], ids=["three requests", "policy and thanks"])
@pytest.mark.parametrize("keep", [True, False])
def test_each_round_is_what_the_template_shows_when_the_user_has_spoken(tokenizer, hf, talk, keep):
    """Thoughts of earlier rounds are gone, those since the user spoke are there; and trained on are these turns alone,
    each token of which the served model would have to emit."""
    config = replace(APART, keep_reasoning=keep)
    parts = by_round(talk, config)
    assert len(parts) == sum(message.role == "user" for message in talk.messages)
    learnt = []
    for part in parts:
        example = tokenise(part, tokenizer, config)
        assert tokenizer.decode(example.tokens) == hf(part.messages, opened=False)
        last = max(i for i, message in enumerate(part.messages) if message.role == "user")
        prompt = hf(part.messages[: last + 1], opened=True)
        first = int(np.flatnonzero(example.loss_mask)[0])
        assert tokenizer.decode(example.tokens[:first]) == prompt  # what a server is sent, to the byte
        # The later turns of the round: the template opens each on what was said, and the model goes on from there.
        for i in range(last + 1, len(part.messages)):
            if part.messages[i].role == "assistant":
                opened = hf(part.messages[:i], opened=True)
                assert tokenizer.decode(example.tokens).startswith(opened)
        learnt.append(trained(example, tokenizer))
    every = [message for message in talk.messages if message.role == "assistant"]
    for message in every:  # each turn, with its thought, once
        assert sum(text.count(message.content or message.reasoning) for text in learnt) >= 1
        if message.reasoning:
            assert sum(message.reasoning in text for text in learnt) == 1


def test_a_conversation_of_one_request_is_what_it_was(tokenizer):
    one = trajectory(0, ["France"])
    assert by_round(one, APART) == [one]
    apart, together = tokenise(one, tokenizer, APART), tokenise(one, tokenizer, replace(APART, rounds="together"))
    assert apart.tokens.tolist() == together.tokens.tolist() and apart.loss_mask.tolist() == together.loss_mask.tolist()


def test_a_tool_that_is_there_later_is_shown_from_then_on_alone(tokenizer, hf):
    """As a server renders each request: the first round without it, the second with it, to the byte."""
    late = ToolSpec("look_up", "Finds it.", {"type": "object", "properties": {}})
    messages = [
        Message("user", "Find it."), Message("assistant", "No tool of mine finds that."),
        Message("user", "You have more tools now."),
        Message("assistant", "", "", [ToolCall("call_1", "look_up", {})]), Message("tool", "7", tool_call_id="call_1"),
        Message("assistant", "It is 7."),
    ]  # fmt: skip
    dialogue = Dialogue("later_tool", [Goal("Find it.")], 2, hidden_tools=["look_up"], restored_at_turn=2)
    one = msgspec.structs.replace(TALK, messages=messages, tools=[TOOL, late], dialogue=dialogue)
    first, second = by_round(one, APART)
    assert [tool.name for tool in first.tools] == [TOOL.name] and second.tools == [TOOL, late]
    for example, end in ((first, 2), (second, 6)):
        shown = hf(messages[:end], opened=False, tools=example.tools)
        assert tokenizer.decode(tokenise(example, tokenizer, APART).tokens) == shown
    assert tokenise(one, tokenizer, replace(APART, rounds="together")).dropped == "tools_change"
    for row in (to_chat_record(one), to_trl_record(one)):
        tools = row["tools"] if isinstance(row["tools"], list) else json.loads(row["tools"])
        assert [tool["function"]["name"] for tool in tools] == [TOOL.name] and len(row["messages"]) == 2


def test_where_rounds_end():
    assert round_ends(["user", "assistant", "user", "assistant"]) == [2, 4]
    assert round_ends(["system", "user", "assistant", "tool", "assistant", "user", "assistant"]) == [5, 7]
    assert round_ends(["user", "user", "assistant", "user"]) == [3]  # nobody answers the last one
    assert round_ends(["assistant", "user", "assistant"]) == [1, 3]
    assert round_ends(["user"]) == [1] and round_ends([]) == [0]


FORMATS = {
    "qwen3": ((*CHATML, *QWEN3.text_tokens), "qwen3"),
    "instruct": ((*CHATML, *QWEN3.text_tokens), "qwen3_instruct_2507"),
    "qwen2_5": ((*CHATML, "<tool_call>", "</tool_call>"), "qwen2_5"),
    "llama3": (LLAMA3.frame, "llama3_1"),
    "plain": (CHATML, ""),
}


def talk_of(roles: list[str], rng: random.Random) -> Trajectory:
    """A conversation whose messages are all different; assistants think at random."""
    messages = [
        Message(role, f"text {i}.", f"thought {i}." if role == "assistant" and rng.random() < 0.5 else "")
        for i, role in enumerate(roles)
    ]
    return msgspec.structs.replace(TALK, messages=messages, tools=[])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounds", ["apart", "together"])
def test_each_turn_of_the_assistant_is_trained_once(name, rounds, tmp_path):
    """Whoever speaks first, and however often: over all examples of a conversation."""
    special, chat_template = FORMATS[name]
    plain = PLAIN_CHATML.partition("\n")[2]
    text = template(chat_template) if chat_template else plain
    tokenizer = ChatTokenizer.load(make_folder(tmp_path, special=special, chat_template=text))
    config, rng = replace(APART, rounds=rounds), random.Random(0)
    greetings = [["assistant", "user", "assistant"], ["system", "assistant", "assistant", "user", "user", "assistant"],
                 ["assistant"], ["assistant", "user", "assistant", "user", "assistant"]]  # fmt: skip
    drawn = [rng.choices(["user", "assistant", "tool"], [4, 5, 1], k=rng.randint(1, 9)) for _ in range(150)]
    some = [["system", *roles] if rng.random() < 0.3 else roles for roles in drawn if "assistant" in roles]
    for roles in greetings + some:
        one = talk_of(roles, rng)
        learnt = "".join(trained(tokenise(part, tokenizer, config), tokenizer) for part in by_round(one, config))
        for i, message in enumerate(one.messages):
            assert learnt.count(f"text {i}.") == (message.role == "assistant"), (roles, i)
            assert learnt.count(f"thought {i}.") == bool(message.reasoning and name == "qwen3"), (roles, i)


def test_batches_hold_each_round_once_and_the_scan_counts_them(tokenizer, tmp_path):
    records = [*trajectories(12), TOLD]
    data = make_dataset(tmp_path / "data", records)
    examples = [tokenise(part, tokenizer, APART) for one in records for part in by_round(one, APART)]
    stats = scan(data, tokenizer, APART)
    assert len(stats.lengths) == len(examples) > len(records) and not stats.dropped
    assert stats.trainable == sum(int(example.loss_mask.sum()) for example in examples)
    together = scan(data, tokenizer, replace(APART, rounds="together"))
    assert len(together.lengths) == len(records)
    wanted = sorted((example.tokens.tolist(), example.loss_mask.tolist()) for example in examples)
    seen = []
    with BatchIterator(data, tokenizer, APART, 1) as batches:
        state = None
        for number in range(steps_for_epochs(stats, APART, 1, 3.0)):
            state = batches.get_state() if number == 1 else state
            batch = next(batches)
            for segment in range(1, batch.segment_ids_bt.max() + 1):
                where = np.flatnonzero(batch.segment_ids_bt[0] == segment)
                seen.append((batch.tokens_bt[0][where].tolist(), batch.loss_mask_bt[0][where].tolist()))
        batches.set_state(json.loads(json.dumps(state)))
        again = next(batches)
    assert sorted({json.dumps(one) for one in seen}) == sorted({json.dumps(list(one)) for one in wanted})
    with BatchIterator(data, tokenizer, APART, 1) as fresh:
        next(fresh)
        np.testing.assert_array_equal(next(fresh).tokens_bt, again.tokens_bt)


def test_renamed_rounds_still_agree_with_themselves():
    """A value that is given when it is asked for, a change of mind, a follow-up: all are one name throughout."""
    call, result = ToolCall("call_1", "capital_of", {"country": "Norway"}), '{"result": "Oslo"}'
    messages = [
        Message("user", "Tell me the capital of a certain country."),
        Message("assistant", "Which country do you mean?"),
        Message("user", "I mean Norway."),
        Message("assistant", "", "I need the capital of Norway.", [call]),
        Message("tool", result, tool_call_id="call_1", name="capital_of"),
        Message("assistant", "The answer is Oslo."),
        Message("user", "And what is the area of that?"),
        Message("assistant", "I have no tool that finds the area of Oslo."),
    ]
    record = Trajectory("t", "t", "s", "d", "en", [TOOL], messages, 0, {}, 1.0)
    renamed = rename_entities(record, np.random.default_rng(3))
    (made,) = [one for message in renamed.messages for one in message.tool_calls]
    country, city = made.arguments["country"], json.loads(renamed.messages[4].content)["result"]
    assert country != "Norway" and city != "Oslo" and renamed.messages[2].content == f"I mean {country}."
    assert renamed.messages[5].content == f"The answer is {city}." and renamed.messages[7].content.endswith(
        f"of {city}."
    )
    assert renamed.messages[:2] == messages[:2]


def test_a_run_of_before_there_was_a_choice_had_rounds_together():
    saved = {"sft.batch_size": 4}
    check_same_run(saved, {"sft.batch_size": 4, "sft.data.rounds": "together"}, "run")
    with pytest.raises(WorkdirError, match="sft.data.rounds is 'together' there, 'apart' here"):
        check_same_run(saved, {"sft.batch_size": 4, "sft.data.rounds": "apart"}, "run")


def test_the_preview_shows_them_apart(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    preview.show(make_dataset(tmp_path / "data", [TOLD]), tokenizer, APART, 5, out)
    assert out.getvalue().count("tokens are trained on") == 2
