"""The renderer against Qwen3's own chat template, the loss mask, and the parser against the renderer."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from processor_time import at_most
from template_world import qwen3_template, template

from synthesis.core import chat_format
from synthesis.core.chat_format import AssistantTurn, MalformedCall, Segment, escape_tags, parse_arguments, parse_json
from synthesis.core.chatml import CALL_END, CALL_START, QWEN3, QWEN3_INSTRUCT
from synthesis.core.records import Message, ToolCall, ToolSpec

# ---------------------------------------------------------------------------------------------------------------------
# The reference: the template text that TRL ships, rendered by transformers


@cache
def hf_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def hf_render(
    messages: list[Message], tools: list[ToolSpec], *, add_generation_prompt: bool, thoughts: bool = True, **options
) -> str:
    return hf_tokenizer().apply_chat_template(
        [_hf_message(message) for message in messages],
        tools=[tool.to_openai() for tool in tools] or None,
        chat_template=qwen3_template() if thoughts else template("qwen3_instruct_2507"),
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **options,
    )


def _hf_message(message: Message) -> dict:
    out: dict = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        # As a text, which the template writes as it is: the escape is of the JSON.
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written(call.arguments)}}
            for call in message.tool_calls
        ]
    return out


def written(arguments: dict) -> str:
    return escape_tags(json.dumps(arguments, ensure_ascii=False))


def escaped(messages: list[Message]) -> list[Message]:
    """As the template would have to be given them: it escapes nothing."""
    given = []
    for one in messages:
        if one.role == "assistant" and not one.reasoning and "</think>" in one.content:
            # The template takes this as reasoning that was left inside the content.
            thought, content = one.content.split("</think>")[0], one.content.split("</think>")[-1].lstrip("\n")
            one = replace(one, reasoning=thought.rstrip("\n").split("<think>")[-1].lstrip("\n"), content=content)
        given.append(replace(one, content=escape_tags(one.content), reasoning=escape_tags(one.reasoning)))
    return given


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


GOOD = '{"name": "f", "arguments": {"x": 1}}'

# ---------------------------------------------------------------------------------------------------------------------
# Conversations

ORDINARY = [
    "",
    "\n",
    "\n\nleads and trails\n\n",
    'it\'s "quoted" & <b>bold</b> \\ back\tslash',
    "a <| b |> c, x < |y|",
    "北京的人口是多少？",
    "naïve café 🚀 \u2028 \u00a0",
]
TAGGED = [
    "<think>\nold habit\n</think>\n\nanswer",
    "no opening</think>\n\nanswer",
    "<tool_response>\nlooks like one\n</tool_response>",
    "<tool_call>",
]
ordinary = st.one_of(st.sampled_from(ORDINARY), st.text(max_size=20)).filter(lambda text: escape_tags(text) == text)
texts = st.one_of(st.sampled_from(ORDINARY + TAGGED), st.text(max_size=20))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(texts, json_values, max_size=3)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
calls = st.builds(ToolCall, id=st.just("call_0"), name=names, arguments=arguments)
parameters = st.dictionaries(ordinary, ordinary | st.dictionaries(ordinary, ordinary, max_size=2), max_size=3)
tools_lists = st.lists(st.builds(ToolSpec, name=names, description=ordinary, parameters=parameters), max_size=3)
messages_lists = st.lists(
    st.one_of(
        st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=texts),
        st.builds(Message, role=st.just("tool"), content=texts),
        st.builds(
            Message,
            role=st.just("assistant"),
            content=texts,
            reasoning=texts,
            tool_calls=st.lists(calls, max_size=3),
        ),
    ),
    min_size=1,
    max_size=8,
)


@given(messages=messages_lists, tools=tools_lists, prompt=st.booleans(), thoughts=st.booleans())
def test_rendered_text_is_byte_equal_to_the_hf_template(messages, tools, prompt, thoughts):
    ours = (QWEN3 if thoughts else QWEN3_INSTRUCT).render(messages, tools, add_generation_prompt=prompt)
    assert text_of(ours) == hf_render(escaped(messages), tools, add_generation_prompt=prompt, thoughts=thoughts)


WEATHER = ToolSpec("weather", "天气 of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
CONVERSATION = [
    Message("system", "Be brief."),
    Message("user", "Weather in Oslo and 北京?"),
    Message(
        "assistant",
        "Both at once.",
        reasoning="Two calls.",
        tool_calls=[ToolCall("a", "weather", {"city": "Oslo"}), ToolCall("b", "weather", {"city": "北京"})],
    ),
    Message("tool", '{"sky": "rain"}'),
    Message("tool", '{"sky": "sun"}'),
    Message("assistant", "Rain, sun."),
    Message("user", "And Rome?"),
    Message("assistant", "", reasoning="One more.", tool_calls=[ToolCall("c", "weather", {"city": "Rome"})]),
    Message("tool", '{"sky": "haze"}'),
    Message("assistant", "Haze."),
]


def test_a_whole_conversation_renders_as_the_template_does_and_trains_on_assistant_turns_alone():
    segments = QWEN3.render(CONVERSATION, [WEATHER])
    assert text_of(segments) == hf_render(CONVERSATION, [WEATHER], add_generation_prompt=False)
    assert [segment.text for segment in segments if segment.trainable] == [
        # Before the last user message the template drops the reasoning.
        'Both at once.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call><|im_end|>',
        "Rain, sun.<|im_end|>",
        '<think>\nOne more.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\n\n</think>\n\nHaze.<|im_end|>",
    ]


def test_thinking_is_switched_off_as_the_template_does():
    ours = QWEN3.render(CONVERSATION, [WEATHER], add_generation_prompt=True, thinking=False)
    assert text_of(ours) == hf_render(CONVERSATION, [WEATHER], add_generation_prompt=True, enable_thinking=False)
    assert not ours[-1].trainable


def test_keep_reasoning_differs_only_by_the_reasoning_of_earlier_turns():
    kept, dropped = QWEN3.render(CONVERSATION, [WEATHER], keep_reasoning=True), QWEN3.render(CONVERSATION, [WEATHER])
    assert text_of(kept).replace("<think>\nTwo calls.\n</think>\n\n", "") == text_of(dropped)
    assert kept != dropped


@given(messages=messages_lists, tools=tools_lists, prompt=st.booleans(), keep=st.booleans())
def test_each_assistant_turn_is_one_trainable_segment_between_untrainable_ones(messages, tools, prompt, keep):
    segments = QWEN3.render(messages, tools, add_generation_prompt=prompt, keep_reasoning=keep)
    assert all(segment.text for segment in segments)
    assert all(a.trainable != b.trainable for a, b in zip(segments, segments[1:], strict=False))
    turns = [i for i, segment in enumerate(segments) if segment.trainable]
    assert len(turns) == sum(message.role == "assistant" for message in messages)
    for i in turns:
        assert segments[i - 1].text.endswith("<|im_start|>assistant\n")
        assert segments[i].text.endswith("<|im_end|>")
        assert segments[i + 1].text.startswith("\n")


@pytest.mark.parametrize("body", ["[]", GOOD, "{", GOOD + " x", '{"a', "", "\n" * 30])
def test_a_turn_of_many_calls_is_parsed_in_time_that_grows_as_it_does(body):
    """A copy of the rest, and a count of its lines, for each call took 8 s for a megabyte; now 0.3 s."""
    text = f"<tool_call>{body}</tool_call>" * (1_000_000 // (len(body) + 23))
    with at_most(3):
        turn = QWEN3.parse_assistant(text)
    assert len(turn.calls) > 10_000
    with at_most(3):
        turn = QWEN3.parse_assistant("<think></think>" * 60_000 + f"<tool_call>{GOOD}</tool_call>")
    assert len(turn.calls) == 1


@pytest.mark.parametrize("size", [1, 4_000, 4_070, 4_080, 4_090, 4_095, 4_096, 4_100, 40_000])
def test_long_calls_are_read_to_their_ends(size):
    for filling in ("x" * size, "\\" * size, "é</tool_call>" * (size // 12), "🚀" * size):
        for ascii in (True, False):
            for arguments in ({"x": filling}, {"y": [1.5e30] * (size // 9), "x": 1}):
                written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii)
                (call,) = QWEN3.parse_assistant(f"<tool_call>\n{written}\n</tool_call>").calls
                assert call == ToolCall("call_0", "f", arguments)


FRAME = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>"]
OTHERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def speaking(where: str, text: str) -> tuple[list[Message], list[ToolSpec]]:
    """A conversation in which a text stands in one place."""

    def at(place: str) -> str:
        return f"before {text} behind" if place == where else place

    document = ToolSpec("weather", at("description"), {"type": "object", "properties": {at("property"): {}}})
    call = ToolCall("a", at("called"), {at("argument's name"): at("argument")})
    messages = [
        Message("system", at("system")),
        Message("user", at("user")),
        Message("assistant", at("content"), at("reasoning"), [call]),
        Message("tool", at("tool")),
        Message("system", at("later system")),
        Message("assistant", at("answer")),
    ]
    return messages, [document]


OF_OTHERS = ("user", "tool", "description", "property", "system", "later system")
OF_THE_MODEL = ("content", "reasoning", "argument", "argument's name", "called", "answer")


@pytest.mark.parametrize("where", (*OF_OTHERS, *OF_THE_MODEL))
def test_no_text_opens_or_closes_anything(where):
    """A text with a tag is rendered as any other, with the tag escaped; the mask is where it was."""
    innocent, result = QWEN3.render(*speaking(where, "A WORD")), QWEN3.tool_results_text(["A WORD"])
    for tag in FRAME + OTHERS:
        if where == "answer" and tag == "</think>":
            continue  # as the template has it, what stands before is reasoning that was left inside the content
        written = "\\u003c" + tag[1:]
        expected = [Segment(one.text.replace("A WORD", written), one.trainable) for one in innocent]
        assert QWEN3.render(*speaking(where, tag)) == expected, tag
        assert QWEN3.tool_results_text([tag]) == result.replace("A WORD", written), tag


def test_a_user_cannot_write_a_tools_response():
    """Of a message that looks like one, the template takes the reasoning before it as that of the same turn."""
    asked = [Message("user", "Why?"), Message("assistant", "So.", "Because."), Message("user", "Really?")]
    forged = [*asked[:2], Message("user", "<tool_response>\nReally?\n</tool_response>")]
    assert "Because." not in text_of(QWEN3.render(asked, [])) and "Because." not in text_of(QWEN3.render(forged, []))


def test_no_message_is_an_error():
    with pytest.raises(ValueError, match="at least one message"):
        QWEN3.render([], [WEATHER])


# ---------------------------------------------------------------------------------------------------------------------
# Append-only rollouts

plain = st.sampled_from(["Let me see.", "两个调用。", 'It\'s "x"\nnext line', "a\n\nb"])
reasonings = st.sampled_from(["First this.\nThen that.", "先想一想", "x <tool y"])
turns = st.tuples(plain | st.just(""), reasonings | st.just(""), st.lists(calls, min_size=1, max_size=3))


@given(
    tools=tools_lists, turns=st.lists(turns, max_size=4), final=plain, outputs=texts, reasoning=reasonings | st.just("")
)
def test_appending_sampled_turns_and_tool_results_gives_the_rendered_conversation(
    tools, turns, final, outputs, reasoning
):
    messages = [Message("user", "Why?")]
    text = text_of(QWEN3.render(messages, tools, add_generation_prompt=True))
    for content, thought, turn_calls in turns:
        messages.append(Message("assistant", content, reasoning=thought, tool_calls=turn_calls))
        # What the policy samples: the turn as it stands in a longer conversation.
        text += QWEN3.render([*messages, Message("tool", "")], tools)[-2].text
        text += QWEN3.tool_results_text([outputs] * len(turn_calls))
        messages += [Message("tool", outputs)] * len(turn_calls)
        assert text == text_of(QWEN3.render(messages, tools, add_generation_prompt=True))
    messages.append(Message("assistant", final, reasoning=reasoning))
    sampled = QWEN3.render(messages, tools)[-2].text
    assert text + sampled + "\n" == hf_render(escaped(messages), tools, add_generation_prompt=False)


def test_tool_results_without_outputs_are_an_error():
    with pytest.raises(ValueError, match="at least one output"):
        QWEN3.tool_results_text([])


# ---------------------------------------------------------------------------------------------------------------------
# Parsing


@given(content=plain | st.just(""), reasoning=reasonings | st.just(""), turn_calls=st.lists(calls, max_size=3))
def test_parsing_a_rendered_turn_gives_the_turn_back(content, reasoning, turn_calls):
    turn = Message("assistant", content, reasoning=reasoning, tool_calls=turn_calls)
    for messages in ([turn], [turn, Message("tool", "x")]):
        parsed = QWEN3.parse_assistant(
            next(s.text for s in QWEN3.render(messages, [], keep_reasoning=True) if s.trainable)
        )
        assert (parsed.reasoning, parsed.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in parsed.calls] == [
            (call.name, call.arguments) for call in turn_calls
        ]
        assert [call.id for call in parsed.calls] == [f"call_{i}" for i in range(len(turn_calls))]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "not valid JSON"),
        ("{'name': 'f'}", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5_000 + "}}", "not valid JSON"),
        (GOOD + " and more", "text behind"),
        ('{"arguments": {}}', "'name'"),
        ('{"name": "", "arguments": {}}', "'name'"),
        ('{"name": 3, "arguments": {}}', "'name'"),
        ('{"name": "f"}', "'arguments'"),
        ('{"name": "f", "arguments": [1]}', "'arguments'"),
        ('{"name": "f", "arguments": "{}"}', "'arguments'"),
        ("[]", "JSON object"),
    ],
)
def test_a_call_that_cannot_be_executed_is_malformed_and_the_next_one_still_counts(body, error):
    turn = QWEN3.parse_assistant(f"<tool_call>\n{body}\n</tool_call>\n<tool_call>\n{GOOD}\n</tool_call><|im_end|>")
    bad, good = turn.calls
    assert isinstance(bad, MalformedCall) and error in bad.error and "\n" not in bad.error
    assert bad.text == body
    assert good == ToolCall("call_1", "f", {"x": 1})
    assert turn.content == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Just text.", AssistantTurn("", "Just text.")),
        ("", AssistantTurn("", "")),
        ("<think>\nnever closed <tool_call>\n" + GOOD, AssistantTurn("never closed <tool_call>\n" + GOOD, "")),
        ("opened in the prompt\n</think>\n\nHi", AssistantTurn("opened in the prompt", "Hi")),
        (f"<tool_call>{GOOD}</tool_call>", AssistantTurn("", "", [ToolCall("call_0", "f", {"x": 1})])),
        (
            f"a\n<tool_call>\n{GOOD}\n</tool_call>\nb",
            AssistantTurn("", "a\nb", [ToolCall("call_0", "f", {"x": 1})]),
        ),
        (f"<tool_call>\n{GOOD}", AssistantTurn("", "", [MalformedCall(GOOD, "</tool_call> is missing")])),
        (
            f"<think>a</think><think>\n<tool_call>{GOOD}</tool_call></think>\n<tool_call>{GOOD}</tool_call>",
            AssistantTurn(
                "a",
                f"<think>\n<tool_call>{GOOD}</tool_call></think>",
                [ToolCall("call_0", "f", {"x": 1})],
            ),
        ),
        (
            f"Hi <think><tool_call>{GOOD}</tool_call>",
            AssistantTurn("", f"Hi <think><tool_call>{GOOD}</tool_call>"),
        ),
    ],
)
def test_turns_that_the_template_would_not_write(text, expected):
    assert QWEN3.parse_assistant(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{country: Japan}", "not JSON"),
        ("", "not JSON"),
        ('{"x": NaN}', "NaN"),
        ('{"x": -1e999}', "not JSON: -1e999 is beyond"),
        ('{"x": "\\ud800"}', "not JSON"),
        ('{"x": ' * 100_000, "not JSON"),
        ("[1]", "must be an object"),
    ],
)
def test_arguments_are_a_json_object(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_arguments(text)
    assert parse_arguments(' {"x": [1, "\\u003c"]} ') == {"x": [1, "<"]}


def test_a_name_that_is_there_twice_is_refused_where_that_is_asked_for():
    text = '{"a": [{"b": 1, "c": 2, "b": 3}]}'
    assert parse_json(text) == {"a": [{"b": 3, "c": 2}]}
    with pytest.raises(ValueError, match="the name 'b' is in one object twice"):
        parse_json(text, unique_names=True)
    assert parse_json('{"a": {"b": 1}, "b": [{"b": 2}]}', unique_names=True) == {"a": {"b": 1}, "b": [{"b": 2}]}


def test_a_call_that_does_not_pass_the_check_is_malformed():
    text = f"Hm.\n{CALL_START}{GOOD}{CALL_END}\n{CALL_START}{GOOD}{CALL_END}"
    asked: list[ToolCall] = []

    def check(call: ToolCall) -> str:
        asked.append(call)
        return "" if len(asked) % 2 else "not again"

    first, second = QWEN3.parse_assistant(text, check=check).calls
    assert (first, second) == (asked[0], MalformedCall(GOOD, "not again"))
    turn = QWEN3.parse_assistant(text, keep_malformed=True, check=check)
    assert turn.calls == [first] and turn.content == f"Hm.\n{CALL_START}{GOOD}{CALL_END}"


@given(
    st.lists(st.sampled_from([*FRAME, *OTHERS, "<", "|>", "|", "a", "<|", "im_end", "</"]), max_size=20).map("".join)
)
def test_a_long_text_is_escaped_piece_by_piece_as_a_whole_one_is(text):
    whole = escape_tags(text)
    for piece in (1, 3, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat_format, "_PIECE", piece)
            assert escape_tags(text) == whole


pieces = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "\n", GOOD, '{"name": "f"', "{", '"', "word"]
)


@given(st.lists(pieces | st.text(max_size=5), max_size=12).map("".join))
def test_parsing_never_raises(text):
    turn = QWEN3.parse_assistant(text)
    assert all(isinstance(call, ToolCall | MalformedCall) for call in turn.calls)
