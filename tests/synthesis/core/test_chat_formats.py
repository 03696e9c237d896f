"""The formats of models beside Qwen3, against their own templates; all formats: mask, escape, appending, parsing."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from template_world import PLAIN_CHATML, template

from synthesis.core.chat_format import ChatFormat, MalformedCall, NotInFormat, Segment
from synthesis.core.chat_template import FoundFormat, TemplateError, format_of, template_of
from synthesis.core.chatml import QWEN2_5, QWEN3, QWEN3_INSTRUCT, ChatML
from synthesis.core.llama3_chat import LLAMA3, LLAMA3_0
from synthesis.core.records import Message, ToolCall, ToolSpec

PLAIN = ChatML(default_system='You are a tiny assistant 🤏 of "few" words.\nBe kind.')
"""Of the plain template below; it knows no tools."""
CONTROL = ("<repo_name>", "[INST]")
FORMATS: dict[str, ChatFormat] = {
    "qwen3": QWEN3,
    "qwen3_instruct": QWEN3_INSTRUCT,
    "qwen2_5": QWEN2_5,
    "plain": PLAIN,
    "no system": ChatML(),
    "llama3": LLAMA3,
    "llama3, our template": LLAMA3,
    "llama3_0": LLAMA3_0,
}
BOS = "<|begin_of_text|>"


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


# ---------------------------------------------------------------------------------------------------------------------
# The reference: each model's template, rendered by transformers


@cache
def hf_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=BOS)


@cache
def reference(name: str) -> str:
    known = {"qwen3": "qwen3", "qwen3_instruct": "qwen3_instruct_2507", "qwen2_5": "qwen2_5", "llama3": "llama3_1"}
    return template(known[name]) if name in known else template_of(FORMATS[name])


def hf_render(name: str, messages: list[Message], tools: list[ToolSpec], *, opened: bool) -> str:
    def openai(message: Message) -> dict:
        given: dict = {"role": message.role, "content": message.content}
        if message.tool_calls:
            given["tool_calls"] = [
                {"type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.tool_calls
            ]
        return given

    return hf_tokenizer().apply_chat_template(
        [openai(message) for message in messages],
        tools=[tool.to_openai() for tool in tools] or None,
        chat_template=reference(name),
        add_generation_prompt=opened,
        tokenize=False,
    )


ORDINARY = [
    "",
    "\n",
    "\n\nleads and trails\n ",
    'it\'s "quoted" & <b>bold</b> \\ back\tslash',
    "a <| b |> c",
    "北京 🚀 \u2028",
]
texts = st.sampled_from(ORDINARY) | st.text(max_size=20).filter(
    lambda text: all(one.escape(text) == text for one in FORMATS.values())
)
json_values = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts | st.lists(texts, max_size=2)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
calls = st.builds(ToolCall, id=st.just("call_0"), name=names, arguments=st.dictionaries(texts, json_values, max_size=3))
tools_lists = st.lists(
    st.builds(ToolSpec, name=names, description=texts, parameters=st.dictionaries(texts, json_values, max_size=2)),
    max_size=3,
)
messages_lists = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=texts)
    | st.builds(Message, role=st.just("assistant"), content=texts, tool_calls=st.lists(calls, max_size=3)),
    min_size=1,
    max_size=7,
)


@given(messages=messages_lists, tools=tools_lists, opened=st.booleans())
@pytest.mark.parametrize("name", ["qwen2_5", "plain", "no system", "llama3", "llama3, our template", "llama3_0"])
def test_rendered_text_is_byte_equal_to_the_models_template(name, messages, tools, opened):
    try:
        ours = text_of(FORMATS[name].render(messages, tools, add_generation_prompt=opened))
    except NotInFormat:
        assert name.startswith("llama3")
        return
    assert ours == hf_render(name, messages, tools, opened=opened)


WEATHER = ToolSpec("weather", "天气 of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
OSLO = ToolCall("a", "weather", {"city": "Oslo"})
TWO = [OSLO, ToolCall("b", "weather", {"city": "北京"})]
TALK = [
    Message("system", "Be brief."),
    Message("user", "Weather in Oslo and 北京?"),
    Message("assistant", "Both at once.", reasoning="Two calls.", tool_calls=TWO),
    Message("tool", '{"sky":"rain"}'),
    Message("tool", '{"sky":"sun"}'),
    Message("assistant", "Rain, sun."),
    Message("user", "And Rome?"),
    Message("assistant", "Haze."),
]


@pytest.mark.parametrize("name", ["qwen2_5", "plain", "no system"])
def test_a_whole_conversation_trains_on_assistant_turns_alone(name):
    segments = FORMATS[name].render(TALK, [WEATHER])
    assert text_of(segments) == hf_render(name, TALK, [WEATHER], opened=False)
    assert [segment.text for segment in segments if segment.trainable] == [
        'Both at once.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call><|im_end|>',
        "Rain, sun.<|im_end|>",
        "Haze.<|im_end|>",
    ]


def test_llama3_has_one_call_a_turn_and_nothing_beside_it():
    talk = [*TALK[:2], Message("assistant", "Let me see.", tool_calls=[OSLO]), TALK[3], TALK[5]]
    segments = LLAMA3.render(talk, [WEATHER])
    assert text_of(segments) == hf_render("llama3", talk, [WEATHER], opened=False)
    trained = [segment.text for segment in segments if segment.trainable]
    assert trained == ['{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>', "Rain, sun.<|eot_id|>"]
    with pytest.raises(NotInFormat, match="one call a turn, not 2"):
        LLAMA3.render(TALK, [WEATHER])
    with pytest.raises(NotInFormat, match="a user's message, which has to come first"):
        LLAMA3.render(TALK[:1], [WEATHER])


def test_only_what_is_left_out_of_a_format_is_left_out():
    """No format but Qwen3's writes thoughts, and none but its two reads tags of them in a content."""
    thinking = [Message("user", "Why?"), Message("assistant", "a</think>b", reasoning=""), Message("user", "And?")]
    for name, one in FORMATS.items():
        said = next(segment.text for segment in one.render(thinking, []) if segment.trainable)
        assert said.startswith("b" if name.startswith("qwen3") else "a</think>b"), name
        hidden = text_of(one.render([Message("user", "?"), Message("assistant", "Yes.", reasoning="Because.")], []))
        assert ("Because." in hidden) == (name == "qwen3")


# ---------------------------------------------------------------------------------------------------------------------
# All formats


def with_control(name: str) -> ChatFormat:
    import dataclasses

    return dataclasses.replace(FORMATS[name], control=CONTROL)


def speaking(where: str, text: str) -> tuple[list[Message], list[ToolSpec]]:
    """A conversation in which a text stands in one place."""

    def at(place: str) -> str:
        return f"before {text} behind" if place == where else place

    document = ToolSpec("weather", at("description"), {"type": "object", "properties": {at("property"): {}}})
    call = ToolCall("a", at("called"), {at("argument's name"): at("argument")})
    messages = [
        Message("system", at("system")),
        Message("user", at("user")),
        Message("assistant", at("content")),
        Message("user", at("again")),
        Message("assistant", "", tool_calls=[call]),
        Message("tool", at("tool")),
        Message("system", at("later system")),
        Message("assistant", "answer"),
    ]
    return messages, [document]


PLACES = (
    "system",
    "user",
    "content",
    "again",
    "called",
    "argument",
    "argument's name",
    "tool",
    "description",
    "property",
)


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_opens_or_closes_anything(name):
    one = with_control(name)
    tags = [*one.needed, *one.text_tokens, *CONTROL, "<|python_tag|>", "<|eom_id|>"]
    for where, tag in product(PLACES, tags):
        if where == "content" and tag == "</think>":
            continue  # as the template has it, what stands before is thought
        hostile, innocent = one.render(*speaking(where, tag)), one.render(*speaking(where, "A WORD"))
        escape = f"\\u{ord(tag[0]):04x}{tag[1:]}"
        assert [Segment(part.text.replace("A WORD", escape), part.trainable) for part in innocent] == hostile
        results = one.tool_results_text(["A WORD"]).replace("A WORD", escape)
        # Llama's template writes an output as a JSON text.
        assert one.tool_results_text([tag]) == results
    assert one.escape("a < b <b> [x] <repo> <|") == "a < b <b> [x] <repo> <|"


@given(messages=messages_lists, tools=tools_lists, opened=st.booleans())
@pytest.mark.parametrize("name", FORMATS)
def test_each_assistant_turn_is_one_trainable_segment(name, messages, tools, opened):
    one = FORMATS[name]
    try:
        segments = one.render(messages, tools, add_generation_prompt=opened)
    except NotInFormat:
        return
    assert all(segment.text for segment in segments)
    assert all(a.trainable != b.trainable for a, b in zip(segments, segments[1:], strict=False))
    trained = [segment.text for segment in segments if segment.trainable]
    assert len(trained) == sum(message.role == "assistant" for message in messages)
    assert all(text.endswith(one.turn_end) and text.count(one.turn_end) == 1 for text in trained)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thought", ["", "First this."])
def test_appending_turns_and_results_gives_the_conversation(name, thought):
    one, messages = FORMATS[name], [Message("user", "Why?")]
    text = text_of(one.render(messages, [WEATHER], add_generation_prompt=True))
    for turn_calls in ([OSLO], [OSLO] if name.startswith("llama3") else TWO):
        messages.append(Message("assistant", "", reasoning=thought, tool_calls=turn_calls))
        rendered = one.render([*messages, Message("tool", "")], [WEATHER])
        text += [segment.text for segment in rendered if segment.trainable][-1]
        text += one.tool_results_text(['{"sky":"rain"}'] * len(turn_calls))
        messages += [Message("tool", '{"sky":"rain"}')] * len(turn_calls)
        assert text == text_of(one.render(messages, [WEATHER], add_generation_prompt=True))


@given(content=st.sampled_from(["", "Let me see.", "a\n\nb"]), turn_calls=st.lists(calls, max_size=3))
@pytest.mark.parametrize("name", FORMATS)
def test_parsing_a_rendered_turn_gives_the_turn_back(name, content, turn_calls):
    if name.startswith("llama3"):
        content, turn_calls = "" if turn_calls else content, turn_calls[:1]
    segments = FORMATS[name].render([Message("user", "?"), Message("assistant", content, tool_calls=turn_calls)], [])
    parsed = FORMATS[name].parse_assistant(next(one.text for one in segments if one.trainable))
    assert parsed.content == content and not parsed.reasoning
    assert [(one.name, one.arguments) for one in parsed.calls] == [(one.name, one.arguments) for one in turn_calls]


@given(
    st.lists(
        st.sampled_from(
            ["<|python_tag|>", "{", '{"name": "f", "parameters": {}}', '"name"', "}", "<|eot_id|>", " ", "x"]
        ),
        max_size=8,
    ).map("".join)
)
@pytest.mark.parametrize("name", FORMATS)
def test_parsing_never_raises(name, text):
    turn = FORMATS[name].parse_assistant(text)
    assert all(isinstance(call, ToolCall | MalformedCall) for call in turn.calls)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [ToolCall("call_0", "f", {"x": 1})], ""),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [ToolCall("call_0", "f", {})], ""),
        ('{"name": "f", "parameters": {"x": 1}', "not valid JSON", ""),
        ('{"name": "f", "parameters": {}} and more', "text behind", ""),
        ('{"name": "f", "parameters": [1]}', "'parameters' must be a JSON object", ""),
        ('{"name": 3, "parameters": {}}', "'name' must be", ""),
        ('{"answer": 3}', [], '{"answer": 3}'),
        ("{set of all x}", [], "{set of all x}"),
        ("Plain.", [], "Plain."),
    ],
)
def test_what_llama3_says_is_a_call_or_content(text, calls, content):
    turn = LLAMA3.parse_assistant(text + "<|eot_id|>")
    if isinstance(calls, str):
        (bad,) = turn.calls
        assert isinstance(bad, MalformedCall) and calls in bad.error
        assert LLAMA3.parse_assistant(text, keep_malformed=True).content == text
    else:
        assert (turn.calls, turn.content) == (calls, content)


# ---------------------------------------------------------------------------------------------------------------------
# Which format a folder has


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_llama3s_templates_are_its_format(tmp_path, name: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template(name))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": BOS}}))
    assert format_of(epath.Path(tmp_path)) == FoundFormat(LLAMA3)


ALWAYS_OPEN = template("llama3").replace("{% if add_generation_prompt %}", "").rpartition("{% endif %}")[0]
"""Llama 3's template as first released: the assistant's turn is opened unasked."""


@pytest.mark.parametrize("text", [template("llama3"), ALWAYS_OPEN], ids=["llama3", "always open"])
def test_llama_3_0_has_a_format_of_its_own_and_gets_tools(tmp_path, text: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    assert format_of(epath.Path(tmp_path)) == FoundFormat(LLAMA3_0, knows_tools=False)
    rendered = hf_tokenizer().apply_chat_template(
        [{"role": one.role, "content": one.content} for one in TALK if one.role != "tool"],
        chat_template=text,
        add_generation_prompt=True,
        tokenize=False,
    )
    plain = [Message(one.role, one.content) for one in TALK if one.role != "tool"]
    assert text_of(LLAMA3_0.render(plain, [], add_generation_prompt=True)) == rendered
    (tmp_path / "chat_template.jinja").write_text(template_of(LLAMA3_0))
    assert format_of(epath.Path(tmp_path)) == FoundFormat(LLAMA3_0)
    assert LLAMA3_0.identity != LLAMA3.identity


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (QWEN3.needed, FoundFormat(QWEN3, has_template=False)),
        ((*LLAMA3.frame, "<|python_tag|>"), FoundFormat(LLAMA3, has_template=False)),
        (QWEN2_5.frame, FoundFormat(ChatML(), knows_tools=False, has_template=False)),
        (("<s>", "</s>"), FoundFormat(QWEN3, has_template=False)),  # whose tokens are then missed by name
    ],
)
def test_a_base_model_without_a_template_gets_the_format_of_its_tokens(tmp_path, tokens, found) -> None:
    assert format_of(epath.Path(tmp_path), tokens) == found


def test_a_plain_template_gets_calls_in_tags_and_a_template_that_writes_them(tmp_path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        PLAIN_CHATML.replace("SYSTEM", json.dumps(PLAIN.default_system, ensure_ascii=False))
    )
    assert format_of(epath.Path(tmp_path)) == FoundFormat(PLAIN, knows_tools=False)
    (tmp_path / "chat_template.jinja").write_text(template_of(PLAIN))
    assert format_of(epath.Path(tmp_path)) == FoundFormat(PLAIN)
    (tmp_path / "chat_template.jinja").write_text(template_of(ChatML()))
    # Of no system's turn it is what Qwen3-Instruct-2507's is; the tokenizer tells them apart.
    assert format_of(epath.Path(tmp_path)) == FoundFormat(QWEN3_INSTRUCT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<|im_end|>\\n'", "<|im_end|>'"),
        ("+ message.content +", "+ message.content | trim +"),
        ("message.role +", "message.role | upper +"),
        ("{%- for message", "{{- tools | tojson if tools }}{%- for message"),
        ("message.content", "(message.tool_calls | tojson if message.tool_calls else message.content)"),
    ],
)
def test_a_plain_template_that_is_another_is_refused(tmp_path, old: str, new: str) -> None:
    text = PLAIN_CHATML.replace("SYSTEM", "'Be kind.'")
    assert old in text
    (tmp_path / "chat_template.jinja").write_text(text.replace(old, new))
    with pytest.raises(TemplateError, match="of no format that is trained here"):
        format_of(epath.Path(tmp_path))
