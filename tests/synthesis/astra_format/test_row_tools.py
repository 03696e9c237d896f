"""The tools of a row: in any column, any vendor's form, or in its system message; never less than its calls need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astra_jax.base.errors import InputError
from synthesis.astra_format.conversations import kept_dataset
from synthesis.astra_format.tools import TOOL_COLUMNS
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Message, ToolSpec, Trajectory

SCHEMA = {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]}
BARE = {"name": "tide", "description": "Tide at a harbour."}
TOOL = {**BARE, "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": TOOL}
MOON = {"type": "function", "function": {"name": "moon", "description": "Phase of the moon.", "parameters": {}}}
TALK = [
    {"role": "user", "content": "Tide?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "tide", "arguments": {"harbour": "Brest"}}}]},
]

FORMS: dict[str, Any] = {
    "OpenAI": [FUNCTION],
    "a function": [TOOL],
    "JSON": json.dumps([FUNCTION]),
    "JSON of each": [json.dumps(FUNCTION)],
    "a line each": "\n".join(map(json.dumps, (FUNCTION, MOON))),
    "Python": repr([FUNCTION]),
    "one": FUNCTION,
    "by name": {"tide": {"description": BARE["description"], "parameters": SCHEMA}},
    "Anthropic": [{**BARE, "input_schema": SCHEMA}],
    "MCP": {"tools": [{**BARE, "inputSchema": SCHEMA}]},
    "Gemini": [{"functionDeclarations": [{**BARE, "parameters": {**SCHEMA, "type": "OBJECT"}}]}],
    "Gemini, in upper case": {
        "function_declarations": [
            {**BARE, "parameters": {**SCHEMA, "type": "OBJECT", "properties": {"harbour": {"type": "STRING"}}}}
        ]
    },
    "Bedrock": [{"toolSpec": {**BARE, "inputSchema": {"json": SCHEMA}}}],
    "LangChain": [{**BARE, "args": SCHEMA["properties"]}],
    "LangChain's schema": [{**BARE, "args_schema": SCHEMA}],
    "smolagents": [{**BARE, "inputs": SCHEMA["properties"], "output_type": "string"}],
    "flat, marked": [{**BARE, "parameters": {"harbour": {"type": "string", "required": True}}}],
    "flat, types alone": [{**BARE, "parameters": {"harbour": "string"}}],
    "xLAM": json.dumps([{**BARE, "parameters": {"harbour": {"type": "str"}}}]),
    "named": [{**BARE, "parameters": [{"name": "harbour", "type": "string", "required": True}]}],
    "at the top": [{**BARE, "properties": SCHEMA["properties"], "required": ["harbour"]}],
}


def read(folder: Path, *rows: dict[str, Any]) -> list[Trajectory]:
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_dataset(kept_dataset([file], folder / "cache"), Trajectory)


def noted(folder: Path) -> dict[str, int]:
    [kept] = (folder / "cache").iterdir()
    return read_card(kept)["noted"]


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_is_the_same_in_each_form(tmp_path: Path, form: str) -> None:
    [one] = read(tmp_path, {"messages": TALK, "tools": FORMS[form]})
    assert one.tools[0] == ToolSpec("tide", "Tide at a harbour.", SCHEMA)


def test_a_parquet_file_has_the_same_tools(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, form in enumerate(FORMS):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{"messages": TALK, "tools": FORMS[form]}]), path)
        [one] = read_dataset(kept_dataset([path], tmp_path / "cache"), Trajectory)
        assert one.tools[0] == ToolSpec("tide", "Tide at a harbour.", SCHEMA), form


@pytest.mark.parametrize("column", TOOL_COLUMNS)
def test_each_column_of_tools_is_read(tmp_path: Path, column: str) -> None:
    calls, plain = {"messages": TALK, column: [TOOL]}, {"messages": [*TALK[:1], {"role": "assistant", "content": "a"}]}
    for one in read(tmp_path, calls, {**plain, column: json.dumps([TOOL])}):
        assert one.tools == [ToolSpec("tide", "Tide at a harbour.", SCHEMA)]
        assert any('"name": "tide"' in segment.text for segment in QWEN3.render(one.messages, one.tools))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": [BARE]}, "no_parameters: tool tide lists no parameters, and message 1 calls it with harbour"),
        ({"tools": [{**BARE, "fields": SCHEMA}]}, "unknown_key: the tool 'tide': the key 'fields' "),
        ({"tools": [{**BARE, "my_params": SCHEMA}]}, "unknown_key: the tool 'tide': .* or call it parameters"),
        ({"tools": [TOOL], "functions": [MOON]}, "bad_record: the columns tools and functions hold different tools"),
        ({"tools": "tide(harbour)"}, "bad_record: column tools: its tools are no JSON"),
        ({"tools": 3}, "bad_record: column tools: wants a list of tools, and is 3"),
        ({"tools": [MOON]}, "unknown_tool: 'tide' is called, and the row lists moon"),
        ({"available_tools": ["tide"]}, "unknown_tool: 'tide' is called, and the row lists no tools"),
        ({"system": "You have tide(harbour)."}, "unknown_tool: 'tide' is called, and the row lists no tools"),
    ],
)
def test_a_row_whose_calls_fit_no_tool_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"own.jsonl, row 0 \(counted from 0\): {message}"):
        read(tmp_path, {"messages": TALK, **row})


def test_what_is_no_fault_of_tools_is_read(tmp_path: Path) -> None:
    free = {**BARE, "parameters": {"type": "object", "additionalProperties": True}}
    nothing = [TALK[0], {"role": "assistant", "tool_calls": [{"function": {"name": "tide", "arguments": "{}"}}]}]
    nulls = [TALK[0], {"role": "assistant", "tool_calls": [{"function": {"name": "tide", "arguments": {"a": None}}}]}]
    same = {"tools": [TOOL], "functions": json.dumps([TOOL]), "available_tools": ["tide"]}
    rows = [{"messages": TALK, "tools": [free]}, {"messages": nothing, "tools": [BARE]}, {"messages": TALK, **same}]
    assert len(read(tmp_path, *rows, {"messages": nulls, "tools": [BARE]})) == 4


def test_a_json_schema_stays_as_it_is_given(tmp_path: Path) -> None:
    """Training shows the document that a server will show."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": "Tide",
        "properties": {"harbour": {"$ref": "#/$defs/Harbour"}, "at": {"type": ["string", "null"], "default": None}},
        "$defs": {"Harbour": {"type": "string", "x-kind": 1}}, "additionalProperties": False,
    }  # fmt: skip
    [one] = read(tmp_path, {"messages": TALK, "tools": [{**BARE, "parameters": schema}]})
    assert one.tools[0].parameters == schema and noted(tmp_path) == {}
    read(tmp_path, {"messages": TALK, "tools": FORMS["xLAM"]})
    assert {"tools_rewritten": 1} in [read_card(one)["noted"] for one in (tmp_path / "cache").iterdir()]


HERMES = (
    "Answer as a sailor. Signatures of functions stand within <tools></tools> tags. Here are your tools: <tools> "
    f"{json.dumps([FUNCTION])} </tools> For each function call return JSON:\n<tool_call>\n{{}}\n</tool_call>"
)
SYSTEMS = {
    "Hermes": (HERMES, "Answer as a sailor."),
    "Hermes, Python": (f"Be brief.\n<tools>{[FUNCTION]!r}</tools>", "Be brief."),
    "JSON": (f"You have these tools:\n{json.dumps([TOOL], indent=2)}\nBe brief.", "Be brief."),
    "Glaive": (f"You have functions. Use them if you must -\n{json.dumps(TOOL, indent=4)}\n", "You have functions."),
}


@pytest.mark.parametrize("column", [{}, {"tools": [FUNCTION]}, {"tools": "[]"}], ids=["alone", "beside", "empty"])
@pytest.mark.parametrize("form", SYSTEMS)
def test_tools_in_the_system_message_are_listed_once(tmp_path: Path, form: str, column: dict[str, Any]) -> None:
    text, rest = SYSTEMS[form]
    rows = [{"messages": [{"role": "system", "content": text}, *TALK], **column}]
    rows += [{"messages": TALK, "system": text, **column}]
    for one in read(tmp_path, *rows):
        assert one.tools == [ToolSpec("tide", "Tide at a harbour.", SCHEMA)]
        assert one.messages[0] == Message("system", rest)
    assert noted(tmp_path) == {"tools_in_system": 2}


def test_what_qwens_template_wrote_is_taken_out_to_the_letter(tmp_path: Path) -> None:
    tool = ToolSpec("tide", "Tide at a harbour.", SCHEMA)
    for system in ([Message("system", "Be brief.")], []):
        [written, *_] = QWEN3.render([*system, Message("user", "Tide?")], [tool])
        text = written.text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
        [one] = read(tmp_path, {"messages": [{"role": "system", "content": text}, *TALK]})
        assert one.messages[:-2] == system and one.tools == [tool]


def test_a_system_message_that_lists_other_tools_or_none_stays(tmp_path: Path) -> None:
    texts = [HERMES, "<tools>tide(harbour)</tools>", 'Write {"name": "tide", "arguments": {}}. Example: {"a": 1}']
    rows = [{"system": text, "messages": TALK, "tools": [FUNCTION, MOON]} for text in texts]
    for one, text in zip(read(tmp_path, *rows), texts, strict=True):
        assert one.messages[0].content == text and len(one.tools) == 2
    assert noted(tmp_path) == {"tools_stay_in_system": 2}
