"""Calls, results and thinking that stand as text in a row's messages: read, refused by row, or left as talk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astra_jax.base.errors import InputError
from synthesis.astra_format.conversations import kept_dataset
from synthesis.astra_format.text_calls import FRAMES
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Message, Trajectory

PARAMETERS = {
    "type": "object",
    "properties": {"harbour": {"type": "string"}, "hours": {"type": "integer"}},
    "required": ["harbour"],
}
TOOL = {"name": "tide", "description": "Tide at a harbour.", "parameters": PARAMETERS}
CALL = '{"name": "tide", "arguments": {"harbour": "Brest"}}'
LLAMA = '{"name": "tide", "parameters": {"harbour": "Brest"}}'
BREST, LATER = ("tide", {"harbour": "Brest"}), ("tide", {"harbour": "Brest", "hours": 3})

READ: dict[str, tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = {
    # The text, then what it says, thinks and calls.
    "Hermes": (f"<tool_call>\n{CALL}\n</tool_call>", "", "", [BREST]),
    "Hermes, several behind text": (
        f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "I look.", "", [BREST, BREST],
    ),
    "Hermes in Python": ("<tool_call>{'name': 'tide', 'arguments': {'harbour': 'Brest'}}</tool_call>", "", "", [BREST]),
    "arguments as text": (
        f"<tool_call>{json.dumps({'name': 'tide', 'arguments': json.dumps(BREST[1])})}</tool_call>", "", "", [BREST],
    ),
    "a tag in an argument": (
        '<tool_call>{"name": "tide", "arguments": {"harbour": "a </tool_call> b"}}</tool_call>', "", "",
        [("tide", {"harbour": "a </tool_call> b"})],
    ),
    "a list in tags": (f"<tool_calls>[{CALL}, {CALL}]</tool_calls>", "", "", [BREST, BREST]),
    "a tag in the singular": (f"<function_call>{CALL}</function_call>", "", "", [BREST]),
    "tool_use": (f"<tool_use>{CALL}</tool_use>", "", "", [BREST]),
    "GLM": (
        "<tool_call>tide\n<arg_key>harbour</arg_key>\n<arg_value>Brest</arg_value>\n<arg_key>hours</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>", "", "", [LATER],
    ),
    "Qwen3-Coder": (
        "So.\n\n<tool_call>\n<function=tide>\n<parameter=harbour>\nBrest\n</parameter>\n<parameter=hours>\n3\n"
        "</parameter>\n</function>\n</tool_call>", "So.", "", [LATER],
    ),
    "Llama 3": (LLAMA, "", "", [BREST]),
    "Llama 3 with its tag": (f"<|python_tag|>{LLAMA}<|eom_id|>", "", "", [BREST]),
    "Llama 3, two": (f"<|python_tag|>{LLAMA}; {LLAMA}", "", "", [BREST, BREST]),
    "Llama 3.1, functions": ('<function=tide>{"harbour": "Brest"}</function>', "", "", [BREST]),
    "Llama 4": ('[tide(harbour="Brest"), tide(harbour="Brest", hours=3)]', "", "", [BREST, LATER]),
    "xLAM": (f"[{CALL}]", "", "", [BREST]),
    "one code block": (f"```json\n{CALL}\n```", "", "", [BREST]),
    "Mistral": (f"[TOOL_CALLS] [{CALL}]</s>", "", "", [BREST]),
    "Mistral, newer": (
        '[TOOL_CALLS]tide[ARGS]{"harbour": "Brest"}[TOOL_CALLS]tide[CALL_ID]a1[ARGS]{"harbour": "Brest"}', "", "",
        [BREST, BREST],
    ),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n```json\n" + json.dumps(BREST[1])
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "", "", [BREST],
    ),
    "DeepSeek V3.1": (
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide<｜tool▁sep｜>" + json.dumps(BREST[1])
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "So.", "", [BREST],
    ),
    "Kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:0<|tool_call_argument_begin|>"
        + json.dumps(BREST[1]) + "<|tool_call_end|><|tool_calls_section_end|>", "", "", [BREST],
    ),
    "LFM2": ('<|tool_call_start|>[tide(harbour="Brest")]<|tool_call_end|>I look.', "I look.", "", [BREST]),
    "Granite": (f"<|tool_call|>[{CALL}]", "", "", [BREST]),
    "Phi-4": (f"<|tool_call|>[{CALL}]<|/tool_call|>", "", "", [BREST]),
    "Phi-4-mini": (f"functools[{CALL}]", "", "", [BREST]),
    "Anthropic": (
        '<function_calls>\n<invoke name="tide">\n<parameter name="harbour">Brest</parameter>\n</invoke>\n'
        "</function_calls>", "", "", [BREST],
    ),
    "MiniMax": (
        '<minimax:tool_call>\n<invoke name="tide"><parameter name="harbour">Brest</parameter>\n'
        '<parameter name="hours">3</parameter></invoke>\n</minimax:tool_call>', "", "", [LATER],
    ),
    "Anthropic, bare": ('<invoke name="tide"><parameter name="harbour">Brest</parameter></invoke>', "", "", [BREST]),
    "LM Studio": (f"[TOOL_REQUEST]{CALL}[END_TOOL_REQUEST]", "", "", [BREST]),
    "Glaive": (
        """<functioncall> {"name": "tide", "arguments": '{"harbour": "Brest"}'} <|endoftext|>""", "", "", [BREST],
    ),
    "ReAct": ('Thought: So.\nAction: tide\nAction Input: {"harbour": "Brest"}', "Thought: So.", "", [BREST]),
    "GPT-OSS": (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>commentary to=functions.tide "
        '<|constrain|>json<|message|>{"harbour": "Brest"}<|call|>', "", "Easy.", [BREST],
    ),
    "GPT-OSS, an answer": (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>High.<|return|>",
        "High.", "Easy.", [],
    ),
    "thinking, then a call": (f"<think>\nEasy.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", "", "Easy.", [BREST]),
    "thinking": ("<thinking>Easy.</thinking>\nHigh.", "High.", "Easy.", []),
    "reasoning": ("<reasoning>\nEasy.\n</reasoning>High.", "High.", "Easy.", []),
    "Magistral": ("[THINK]Easy.[/THINK]High.", "High.", "Easy.", []),
    "Kimi's thinking": ("◁think▷Easy.◁/think▷High.", "High.", "Easy.", []),
    "no thinking": ("<think>\n\n</think>\n\nHigh.", "High.", "", []),
}  # fmt: skip
REFUSED = {
    "no JSON": ('<tool_call>{"name": "tide", "arguments": {</tool_call>', "leaked_markup: .*cannot be read"),
    "not closed": (f"<tool_call>{CALL}", "leaked_markup: .*<tool_call> without </tool_call>: '<tool_call>"),
    "no name": ("<tool_call>{}</tool_call>", "leaked_markup: .*names no function: '{}'"),
    "no tool of the row": (CALL.replace("tide", "moon").join(("<tool_call>", "</tool_call>")), "unknown_tool: 'moon'"),
    "bare, no tool of the row": (LLAMA.replace("tide", "moon"), "leaked_markup: .*a call written as text"),
    "within a sentence": (f"Sure: {CALL}", "leaked_markup: .*a call of 'tide' written as text.*Sure"),
    "thinking": ("<think>Easy. High.", "leaked_markup: .*<think> without </think>: '<think>Easy"),
    "reasoning": ("<reasoning>Easy. High.", "leaked_markup: .*<reasoning> without </reasoning>"),
    "Mistral": ("[TOOL_CALLS] tide please", "leaked_markup: .*cannot be read"),
    "a turn's end": ("High.<|im_end|>", "leaked_markup: .*the special token"),
}
TALK = {
    "a code block": f"Hermes writes:\n```\n<tool_call>\n{CALL}\n</tool_call>\n```\nand waits.",
    "one code block, another tool": '```json\n{"name": "moon", "arguments": {}}\n```',
    "a code span": "Calls stand between `<tool_call>` and `</tool_call>`.",
    "quotation marks": 'The tag "<tool_call>" opens a call.',
    "code": "Write `tide(harbour)`:\n```python\nprint(tide('Brest'))\n```\nDone.",
    "JSON": '{"harbour": "Brest", "tide": "high"}',
    "JSON with the tool's name": '{"name": "tide", "height": 3}',
    "a list": "[1, 2]",
    "Action": "Action: call the harbour master.\nInput: none.",
}


def read(folder: Path, *rows: dict[str, Any]) -> list[Trajectory]:
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_dataset(kept_dataset([file], folder / "cache"), Trajectory)


def rows_of(text: str) -> list[dict[str, Any]]:
    """One turn in each form in which a row may have it."""
    asked, answer = {"role": "user", "content": "Tide?"}, {"role": "assistant", "content": text}
    turns = [{"from": "human", "value": "Tide?"}, {"from": "gpt", "value": text}]
    tools = json.dumps([TOOL])
    return [
        {"messages": [asked, answer], "tools": [TOOL]},
        {"conversations": turns, "tools": tools},
        {"prompt": [asked], "completion": [answer], "tools": tools},
        {"prompt": "Tide?", "completion": text, "tools": tools},
    ]


def plain(messages: list[Message]) -> list[Any]:
    return [(m.role, m.content, m.reasoning, [(c.name, c.arguments) for c in m.tool_calls]) for m in messages]


def test_every_frame_has_an_example() -> None:
    assert {frame for frame in FRAMES if any(frame in text for text, *_ in READ.values())} == set(FRAMES)


@pytest.mark.parametrize("form", READ)
def test_what_models_write_is_read(tmp_path: Path, form: str) -> None:
    text, content, reasoning, calls = READ[form]
    found = read(tmp_path, *rows_of(text))
    assert len(found) == 4
    for one in found:
        assert plain(one.messages) == [("user", "Tide?", "", []), ("assistant", content, reasoning, calls)]


def test_a_parquet_file_is_read_the_same(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "own.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([rows_of(text)[0] for text, *_ in READ.values()]), path)
    found = read_dataset(kept_dataset([path], tmp_path / "cache"), Trajectory)
    assert [plain(one.messages)[1][1:] for one in found] == [(*wanted,) for _, *wanted in READ.values()]


@pytest.mark.parametrize("case", REFUSED)
def test_what_looks_like_a_call_and_is_none_is_refused_by_row(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    for row in rows_of(text):
        with pytest.raises(InputError, match=rf"own.jsonl, row 1 \(counted from 0\): {message}"):
            read(tmp_path, rows_of("High.")[0], row)


@pytest.mark.parametrize("case", TALK)
def test_talk_of_calls_stays_text(tmp_path: Path, case: str) -> None:
    text = TALK[case]
    asked = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}
    *answered, question = read(tmp_path, *rows_of(text), asked)
    assert {(one.messages[1].content, len(one.messages[1].tool_calls)) for one in answered} == {(text, 0)}
    assert question.messages[0].content == text


RESULTS = {
    "Hermes": '<tool_response>\n{"name": "tide", "content": {"at": 7}}\n</tool_response>',
    "Qwen": '<tool_response>\n{"at": 7}\n</tool_response>',
    "tool_result": '<tool_result>{"at": 7}</tool_result>',
    "Mistral": '[TOOL_RESULTS]{"at": 7}[/TOOL_RESULTS]',
    "ReAct": 'Observation: {"at": 7}',
}


@pytest.mark.parametrize("form", RESULTS)
def test_results_in_the_users_text_are_results_where_calls_wait(tmp_path: Path, form: str) -> None:
    call, result = READ["Hermes"][0], RESULTS[form]
    said = [("user", "Tide?"), ("assistant", call), ("user", result), ("assistant", "At 7."), ("user", result)]
    [one] = read(tmp_path, {"tools": [TOOL], "messages": [{"role": role, "content": text} for role, text in said]})
    assert [(m.role, m.content) for m in one.messages[2:]] == [
        ("tool", '{"at": 7}'), ("assistant", "At 7."), ("user", result),
    ]  # fmt: skip
    assert one.messages[2].tool_call_id == one.messages[1].tool_calls[0].id
    turns = [{"from": "human" if role == "user" else "gpt", "value": text} for role, text in said]
    [shared] = read(tmp_path, {"tools": [TOOL], "conversations": turns})
    assert shared.messages == one.messages


def test_two_results_and_a_question_in_one_message(tmp_path: Path) -> None:
    text = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>\nAnd now?"
    said = [("user", "Tide?"), ("assistant", READ["a list in tags"][0]), ("user", text), ("assistant", "High.")]
    [one] = read(tmp_path, {"tools": [TOOL], "messages": [{"role": role, "content": text} for role, text in said]})
    assert [(m.role, m.content) for m in one.messages[2:]] == [
        ("tool", "a"), ("tool", "b"), ("user", "And now?"), ("assistant", "High."),
    ]  # fmt: skip


def test_calls_in_text_beside_tool_calls_are_the_same_or_refused(tmp_path: Path) -> None:
    structured = {"tool_calls": [{"type": "function", "function": json.loads(CALL)}]}
    row = rows_of(READ["Hermes, several behind text"][0])[0]
    row["messages"][1] |= structured
    with pytest.raises(InputError, match="leaked_markup: message 1: its text has other calls than its tool_calls"):
        read(tmp_path, row)
    row["messages"][1]["content"] = READ["Hermes"][0]
    [one] = read(tmp_path, row)
    assert plain(one.messages)[1] == ("assistant", "", "", [BREST])


DETAILS = [{"type": "reasoning.text", "text": "Easy.", "signature": "x"}, {"type": "reasoning.encrypted", "data": "y"}]


@pytest.mark.parametrize(
    ("details", "reasoning"),
    [
        (DETAILS, "Easy."),
        (json.dumps(DETAILS), "Easy."),
        ([{"type": "reasoning.summary", "summary": "Easy."}], "Easy."),
        (DETAILS[1:], ""),
    ],
)
def test_reasoning_details_are_thinking(tmp_path: Path, details: Any, reasoning: str) -> None:
    row = rows_of("High.")[0]
    row["messages"][1]["reasoning_details"] = details
    [one] = read(tmp_path, row)
    assert plain(one.messages)[1] == ("assistant", "High.", reasoning, [])
    card = read_card(next((tmp_path / "cache").iterdir()))
    assert card["noted"] == ({} if reasoning else {"encrypted_reasoning": 1})


def test_what_is_read_in_another_form_is_counted(tmp_path: Path) -> None:
    read(tmp_path, *rows_of(READ["Hermes"][0]), *rows_of(TALK["a code block"]), *rows_of("High."))
    card = read_card(next((tmp_path / "cache").iterdir()))
    assert card["noted"] == {"calls_in_text": 4, "call_in_code_block": 4}
    assert "row 0 (counted from 0): message 1: tide in its text is read as a call" in card["examples"]["calls_in_text"]
