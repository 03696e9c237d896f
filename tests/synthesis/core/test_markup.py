"""Markup of chat formats is found in every text that a model may be trained on, and text about markup is left alone."""

from __future__ import annotations

import pytest

from synthesis.core.markup import markup_in, split_thought

TOOLS = ("find_city", "find")

TOKENS = [
    "Oslo.<|im_end|>", "Oslo.<|eot_id|>", "Oslo.</s>", "<s>Oslo.", "Oslo.<end_of_turn>", "Oslo.<|endoftext|>",
    "Oslo.<|return|>", "Oslo.<eos>", "<unused94>Oslo.", "<0x0A>Oslo.", "Oslo. [/INST]", "<<SYS>> Be brief.",
    "Oslo.<｜end▁of▁sentence｜>", "Oslo.<turn|>", "Oslo.<ctrl42>", "]<]minimax[>[Oslo.", "Oslo.im_end|>", "Oslo.<|",
    "Oslo <co: 0>is large</co: 0>", "Oslo【3†source】", "Oslo \ue200cite\ue202turn0search0\ue201", "Oslo<|\"|>",
    "Lint passesresponse<|sep|>", "Oslo.\n</parameter>\n</function>", "[unused11]Oslo", "<|start|>assistant Oslo",
    "Oslo.[e~[", "]~b]ai\nOslo.", "]~!b[]~b]ai\nOslo.", "[gMASK]<sop>Oslo", "Oslo.[|endofturn|]", "[|assistant|]Oslo.",
    "<role>ASSISTANT</role>Oslo.", "Oslo.<_end>", "find(a=1)<bot_end>", "<<function>>find(a=1)", "[UNUSED_TOKEN_145]",
    "Oslo.<end_of_sentence>", "<beginning_of_sentence>ai Oslo", "Oslo.[end_header_id]",
]  # fmt: skip
CALLS = [
    '<tool_call>\n{"name": "x"}', "</tool_call>", "<|python_tag|>{}", '[TOOL_CALLS]x{"a": 1}', "<TOOLCALL>[]",
    "<｜tool▁calls▁begin｜>", "I look.\n\n<｜DSML｜function_calls", "<|tool_calls_section_begin|>", "<arg_key>a",
    "<minimax:tool_call>", '<invoke name="x">', "</invoke>",
    'x[ARGS]{"a": 1}', "<|tool_call|>[]", "<function_call> {}", "<function=x>",
    "<tool_call|>", "<|tool_call>call:x{a:1}", "<start_function_call>call:x{a:1}", "functools[{}]", "functions.x:0",
    "to=functions.x json", "```tool_code\nx(a)\n```", "print(default_api.x(a=1))", "Action: ```json\n[{}]\n```",
    'Action: x\nAction Input: {"a": 1}', "✿FUNCTION✿: x", "<longcat_tool_call>", "<tool_calls:6124c78e>", "<tool_calls",
    "<seed:tool_call>", "<xai:function_call name=", "[TOOL_REQUEST]{}[END_TOOL_REQUEST]", "<|START_ACTION|>[]",
    "<use_mcp_tool>", "multi_tool_use.parallel", "**Tool Call:**\n```json\n{}\n```", "```xml\n<tool_call>\n```",
    '`<tool_call>{"a": 1}</tool_call>`', "<|open|>toolscall", "<tool_response>\n{}\n</tool_response>",
    'Oslo.>>>find\n{"a": 1}',
]  # fmt: skip
THOUGHTS = [
    "<think>\nI could", "so.</think>", "<thinking>a</thinking>b", "<thought>a</thought>b", "<reasoning>a", "◁think▷a",
    "[THINK]a[/THINK]b", "<seed:think>a</seed:think>b", "<|channel|>analysis<|message|>a", "<longcat_think>a",
    "<mm:think>a", "<think:6124c78e>a", "<|begin_of_thought|>a", "<|START_THINKING|>a", "<scratchpad>a",
    "analysisThe user asks.assistantfinalOslo.", "Here is my thought process: a", "<seed:cot_budget_reflect>a",
    "<scratch_pad>a",
]  # fmt: skip
WRITTEN = [
    '{"name": "find_city", "arguments": {"name": "Oslo"}}', '```json\n{"tool_name": "find", "parameters": {}}\n```',
    'I look it up: {"type": "function", "name": "find", "parameters": {}}', "[find_city(name='Oslo'), find(a=1)]",
    '[{"name": "find", "arguments": {}}]', "find(a=1)", 'find_city\n{"name": "Oslo"}', 'find_city{"name": "Oslo"}',
    "{'name': 'find', 'arguments': {}}", "<find_city>\n<name>Oslo</name>\n</find_city>", "print(find(a=1))",
    '{"tool_uses": [{"recipient_name": "functions.find", "parameters": {}}]}', "functions.find(a=1)",
    '{"name": "find", "arguments": {"a": "cut o', 'commentary to=find json{"a": 1}',
    "<tool>find_city</tool>\n<args>{}</args>", "<tool_name> find </tool_name>",
]  # fmt: skip
BARE = [
    '{"name": "web_search", "arguments": {"query": "Oslo"}}', '[{"name": "x", "parameters": {}}]',
    '{"type": "function", "function": {"name": "x", "parameters": {}}}', '{"tool_calls": [{"name": "x"}]}',
    "{'name': 'x', 'arguments': {}}", '{"name": "x", "arguments": "{}"}',
]  # fmt: skip
OF_TURNS = [
    "assistant\nOslo.",
    "<answer>\nOslo.\n</answer>",
    "thought\nI look.",
    ">>>all\nOslo.",
    "Oslo.\n</answer>",
    "model\nOslo.",
    "all\nOslo.",
    "Oslo.[EOS]",
    "[BOS]Oslo.",
    "Oslo. [EOT]\n",
]
ABOUT = [
    "Write `<think>` first.", "A thought begins with <b>bold</b> text.", 'It ends with "<|im_end|>", always.',
    "Use “</s>” for the end.", "```\n<think>\n</think>\n```\nis what it writes.", "~~~text\n<|im_start|>user\n~~~",
    "`<tool_call>` opens a call.", "「<think>」是什么意思？", "It costs <s>10</s> 9 euros.", "<p>Hello, <i>you</i></p>",
    "5 < 6 | 7 > 3", "x |> f <| y", "data|>filter()", "Vec<[u8]> and List<String>", "I [think] so [1].", "call: 5",
    "My assistant and I\nwent.", "find_city finds a city; find(a=1) would not.", "The name is find.", "2<|x|<3",
    "<details><summary>More</summary></details>", "The response is <response>ok</response> there.", "Think about it.",
    "The model number is 5.", '{"name": "Oslo", "arguments": 5}', "Find the city\n{in Norway}",
    "COMMAND [ARGS]...", '{"name": "Oslo", "population": 700000}', '{"name": "Ada B.", "parameters": {}}',
    "Answer: <b>5</b>", "Model\nIt has 7 doors.", "The route:\nModel\nCity", "Assistant\nJane Roe",
    "[|x|] is an F# array.",
    "See functions.py:12 and lib/functions.test.ts:7.",
    "See https://example.com/?from=a&to=find", "An [EOS] token ends it.", "All\ncities", "<role>admin</role>",
    "<tool>hammer</tool>", "The values [e, f] and ]a, b[ are intervals.",
]  # fmt: skip


@pytest.mark.parametrize("text", [*TOKENS, *CALLS, *THOUGHTS])
def test_markup_of_every_format_is_found_and_named(text: str) -> None:
    found = markup_in(text)
    assert found.startswith(("the special token '", "the call tag '", "the thinking tag '")) and len(found) < 100


@pytest.mark.parametrize("text", WRITTEN)
def test_a_call_of_an_offered_tool_that_is_written_out_is_found(text: str) -> None:
    assert markup_in(text, TOOLS) in ("a call of 'find' written as text", "a call of 'find_city' written as text")
    assert markup_in(text.replace("functions.", ""), ("other",)) == ""


@pytest.mark.parametrize("text", BARE)
def test_a_turn_that_is_nothing_but_a_call_is_one_of_whatever_tool(text: str) -> None:
    assert markup_in(text, turn=True) == "a call written as text" and not markup_in(f"It says {text}", turn=True)


@pytest.mark.parametrize("text", OF_TURNS)
def test_what_only_a_turn_may_not_begin_with(text: str) -> None:
    assert markup_in(text, turn=True) and not markup_in(text)


@pytest.mark.parametrize("text", ABOUT)
def test_text_about_markup_is_left_alone(text: str) -> None:
    assert markup_in(text, TOOLS, turn=True) == ""


def test_what_is_not_quoted_is_markup_whatever_the_text_is_about() -> None:
    assert markup_in("What does <think> mean?") == "the thinking tag '<think>'"
    assert markup_in("What does `<think>` mean? <think>Well") == "the thinking tag '<think>'"
    assert markup_in("`a` <think> `b`") == "the thinking tag '<think>'"
    assert markup_in("```\ncode\n```\n<|im_end|>") == "the special token '<|im_end|>'"
    assert markup_in("```\n<|im_end|>") == "the special token '<|im_end|>'"  # the block is never closed


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>\nWhy.\n</think>\n\nA.", "Why.", "\n\nA."),
        ("Why.</think>A.", "Why.", "A."),
        ("Why. </think>\nA.", "Why.", "\nA."),
        ("<think>Tags like `</think>` end it.</think>A.", "Tags like `</think>` end it.", "A."),
        ("Write `</think>` to end it.", "", "Write `</think>` to end it."),
        ("Models write </think> in their text.", "", "Models write </think> in their text."),
        ("<think>Why.", "", "<think>Why."),
    ],
)
def test_thinking_is_split_off_where_it_ends(text: str, thought: str, rest: str) -> None:
    assert split_thought(text) == (thought, rest)
