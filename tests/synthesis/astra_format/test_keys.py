"""Marks by which other trainers say what is trained, and keys that nobody here knows: honoured, or refused by name."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_conversations import (
    ALPACA,
    ANSWER,
    ARGUMENTS,
    ASKED,
    CALL,
    FUNCTION,
    OPENAI,
    OPENAI_CALL,
    ROWS,
    TOOL,
    written,
)

from astra_jax.base.errors import InputError
from synthesis.astra_format import keys
from synthesis.astra_format.conversations import kept_dataset
from synthesis.astra_format.forms import FORMS
from synthesis.astra_format.sft import import_record, write_records
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Trajectory, encode
from synthesis.core.stages import Rejected

ROOT = Path(__file__).parent.parent.parent.parent
QWEN = [
    ASKED,
    {"role": "assistant", "content": "", "function_call": {**CALL, "arguments": ARGUMENTS}},
    {"role": "function", "name": "capital_of", "content": "Lima"},
    ANSWER,
]
TALKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": ("messages", OPENAI),
    "qwen-agent": ("messages", QWEN),
    "messages under ShareGPT's name": ("conversations", OPENAI),
    "sharegpt": ("conversations", ROWS["sharegpt"]["conversations"]),
    "hermes": ("conversations", ROWS["hermes"]["conversations"]),
    "anthropic": ("messages", ROWS["anthropic"]["messages"]),
    "completion": ("completion", OPENAI[1:]),
    "trajectory": ("trajectory", QWEN),
}
"""By form, a call and an answer of the assistant, which come last and last but two."""


def row_of(form: str, call: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The conversation with these keys on the turn of the call, and on the answer."""
    column, talk = TALKS[form]
    marked = [*talk[:-3], {**talk[-3], **call}, talk[-2], {**talk[-1], **answer}]
    row: dict[str, Any] = {column: marked, "tools": [FUNCTION]}
    return row | ({"prompt": [ASKED]} if form == "completion" else {})


def read(path: Path, *rows: dict[str, Any]) -> list[Trajectory]:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        written(path, *rows)
    return list(read_dataset(kept_dataset([path], path.parent / "cache"), Trajectory))


def weights(one: Trajectory) -> list[float]:
    return [message.weight for message in one.messages if message.role == "assistant"]


def record(row: dict[str, Any]) -> Trajectory:
    return import_record(json.dumps(row).encode(), 0)[0]


def refused(row: dict[str, Any]) -> str:
    with pytest.raises(Rejected) as caught:
        record(row)
    return f"{caught.value.reason}: {caught.value.detail}"


# ---------------------------------------------------------------------------------------------------------------------
# Marks


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", TALKS)
def test_each_mark_is_honoured_in_each_form(tmp_path: Path, form: str, suffix: str) -> None:
    """0 and false, of either side of the conversation's assistant; in a .parquet file all rows have all marks."""
    rows, wanted = [], []
    for name, mark in keys.MARKS.items():
        no, yes = (True, False) if mark.inverse else (False, True)
        rows += [row_of(form, {name: no}, {name: yes}), row_of(form, {}, {name: no}), row_of(form, {}, {name: yes})]
        wanted += [[0, 1], [1, 0], [1, 1]]
    assert [weights(one) for one in read(tmp_path / f"own.{suffix}", *rows)] == wanted


def test_numbers_weigh_and_marks_are_multiplied() -> None:
    assert weights(record(row_of("messages", {"weight": 0}, {"weight": 0.25}))) == [0, 0.25]
    assert weights(record(row_of("sharegpt", {"loss_weight": 2.5, "loss_mask": 0.5}, {"masked": 1}))) == [1.25, 0]
    whole = row_of("hermes", {"weight": 0.5}, {}) | {"weight": 0.5}
    assert weights(record(whole)) == [0.25, 0.5]
    assert weights(record(row_of("messages", {}, {}) | {"train": False})) == [0, 0]


def test_marks_that_ask_for_nothing_change_no_byte() -> None:
    """Of records, so that a dataset without marks, and its digest, are as they were."""
    plain = record(row_of("messages", {}, {}))
    asks_nothing = row_of("messages", {"train": True, "weight": 1}, {"masked": False, "loss": None}) | {"weight": 1.0}
    assert encode(record(asks_nothing)) == encode(plain) and b"weight" not in encode(plain)
    assert b'"loss_weight":0.5' in encode(record(row_of("messages", {}, {"weight": 0.5})))
    old = msgspec.json.decode(encode(plain), type=Trajectory)
    assert weights(old) == [1, 1]


@pytest.mark.parametrize(("position", "role"), [(0, "user"), (2, "tool")])
@pytest.mark.parametrize("name", keys.MARKS)
def test_a_mark_of_another_role_may_say_what_is_done_anyway(position: int, role: str, name: str) -> None:
    """Train on a user's turn: that is refused by the mark's name; not to, is how it is."""
    no, yes = (True, False) if keys.MARKS[name].inverse else (False, True)
    for form, column in (("messages", "messages"), ("sharegpt", "conversations")):
        row = row_of(form, {}, {})
        row[column][position] = {**row[column][position], name: no}
        assert weights(record(row)) == [1, 1]
        row[column][position] = {**row[column][position], name: yes}
        said = refused(row)
        assert f"'{name}' is {yes}" in said and f"message {position}: " in said and f"role {role};" in said


@pytest.mark.parametrize("value", ["false", [0, 1], {"a": 1}, -0.5, 1e9, 1001])
@pytest.mark.parametrize("name", keys.MARKS)
def test_a_mark_that_is_none_is_refused_with_its_value(name: str, value: Any) -> None:
    said = refused(row_of("messages", {}, {name: value}))
    assert f"bad_mark: message 3: '{name}' is " in said and "it wants true, false or a number from 0 to" in said


def test_a_prompts_turns_are_context() -> None:
    said = {"role": "assistant", "content": "Which country?"}
    row = {"prompt": [ASKED, said, ASKED], "completion": [ANSWER]}
    assert weights(record(row)) == [0, 1]
    row["prompt"] = [ASKED, {**said, "train": True}, ASKED]
    assert weights(record(row)) == [0, 1]
    row["completion"] = "Lima."
    assert weights(record(row)) == [0, 1]


def test_parts_of_one_turn_have_one_weight() -> None:
    text = {"role": "assistant", "content": "I look it up."}
    talk = [QWEN[0], {**text, "weight": 0.5}, {**QWEN[1], "weight": 0.5}, *QWEN[2:]]
    assert weights(record({"messages": talk, "tools": [TOOL]})) == [0.5, 1]
    talk[2] = QWEN[1]
    assert "message 2: it is of the same turn as" in refused({"messages": talk, "tools": [TOOL]})


def test_what_is_honoured_is_on_the_card_and_comes_back_from_an_export(tmp_path: Path) -> None:
    rows = [row_of("messages", {"train": False}, {"weight": 0.5}), row_of("sharegpt", {}, {"weight": 0})]
    path = written(tmp_path / "own.jsonl", *rows)
    kept = kept_dataset([path], tmp_path / "cache")
    assert read_card(kept)["weights"] == {"0": 2, "0.5": 1}
    records = list(read_dataset(kept, Trajectory))
    for form in ("qwen", "openai"):
        write_records(tmp_path / f"{form}.jsonl", records, form=form)  # type: ignore[arg-type]
        back = list(read_dataset(kept_dataset([tmp_path / f"{form}.jsonl"], tmp_path / "cache"), Trajectory))
        assert [one.messages for one in back] == [one.messages for one in records]
    with pytest.raises(InputError, match="own-000000 has a turn of weight 0, and TRL trains every turn alike"):
        write_records(tmp_path / "trl.jsonl", records, form="trl")


# ---------------------------------------------------------------------------------------------------------------------
# Keys

UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("a message", row_of("messages", {}, {"emphasis": 2}), "message 3: the key 'emphasis' (2) is not known"),
    (
        "spans of a message",
        row_of("messages", {}, {"train_detail": [{"begin_offset": 0}]}),
        "message 3: the key 'train_d",
    ),
    ("a user's message", {"messages": [{**ASKED, "hint": "x"}, ANSWER]}, "message 0: the key 'hint' ('x')"),
    (
        "a picture",
        {"messages": [{**ASKED, "images": ["a.png"]}, ANSWER]},
        "message 0: 'images' is given, and the models",
    ),
    ("a turn", row_of("sharegpt", {}, {"emphasis": 2}), "turn 3: the key 'emphasis' (2)"),
    ("a turn of Hermes", row_of("hermes", {"recipient": "all"}, {}), "turn 1: the key 'recipient' ('all')"),
    ("a prompt", {"prompt": [{**ASKED, "hint": "x"}], "completion": "a"}, "message 0: the key 'hint'"),
    ("a trajectory", row_of("trajectory", {"emphasis": 2}, {}), "message 1: the key 'emphasis'"),
    (
        "a call",
        row_of("messages", {"tool_calls": [{**OPENAI_CALL["tool_calls"][0], "result": "Lima"}]}, {}),  # type: ignore[index]
        "message 1: a call: the key 'result' ('Lima')",
    ),
    (
        "a call's function",
        row_of("messages", {"tool_calls": [{"id": "a", "function": {**CALL, "arguments_json": "{}"}}]}, {}),
        "message 1: a call's function: the key 'arguments_json'",
    ),
    (
        "a text of the content",
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a", "train": False}]}]},
        "message 1: a text of the content: the key 'train' (False)",
    ),
    (
        "a tool",
        {**ROWS["openai"], "tools": [{**TOOL, "argument_map": {"a": 1}}]},
        "the tool 'capital_of': the key 'argument",
    ),
    (
        "a tool's function",
        {**ROWS["openai"], "tools": [{"type": "function", "function": {**TOOL, "usage_notes": "x"}}]},
        "the tool 'capital_of': the key 'usage_notes'",
    ),
]


@pytest.mark.parametrize(("row", "message"), [one[1:] for one in UNKNOWN], ids=[one[0] for one in UNKNOWN])
def test_an_unknown_key_is_refused_by_its_name(row: dict[str, Any], message: str) -> None:
    said = refused(row)
    assert said.startswith("unknown_key: ") and message in said and "; remove it, or " in said or "text alone" in said


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_what_is_empty_is_never_unknown(nothing: Any) -> None:
    """A columnar file has the keys of all rows in each."""
    extra = {"emphasis": nothing, "images": nothing, "train": nothing, "train_detail": nothing}
    for form in TALKS:
        assert weights(record(row_of(form, extra, extra) | extra | {"chosen": nothing})) == [1, 1]
    call = {"tool_calls": [{**OPENAI_CALL["tool_calls"][0], "result": nothing}]}  # type: ignore[index]
    row = row_of("messages", call, {}) | {"tools": [{"type": "function", "function": {**TOOL, "usage_notes": nothing}}]}
    assert weights(record(row)) == [1, 1]


COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"chosen": [ANSWER]}, "SFT takes no pairs of answers"),
    ({"rejected": "no"}, "SFT takes no pairs of answers"),
    ({"label": False}, "its name speaks of training"),
    ({"label": True}, "its name speaks of training"),
    ({"labels": [-100, 1]}, "its name speaks of training"),
    ({"loss_mask": [0, 1]}, "its name speaks of training"),
    ({"assistant_masks": [0, 1]}, "its name speaks of training"),
    ({"sampleWeight": 0.5}, "its name speaks of training"),
    ({"mask_history": True}, "its name speaks of training"),
    ({"train_on_inputs": True}, "its name speaks of training"),
    ({"roles_to_train": {"a": 1}}, "its name speaks of training"),
    ({"mask": "Assistant"}, "it does not say whether it names what is trained"),
    ({"skip": True}, "its name speaks of training"),
    ({"images": ["x.png"]}, "the models here read text alone"),
    ({"history": [["a", "b"]]}, "turns are read from the conversation's own column"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "the chat format takes no arguments"),
    ({"system_prompt": "Be brief."}, "rename it to system"),
    ({"completion": "Lima."}, "the row's conversation is in 'messages'"),
    ({"conversations": [{"from": "human", "value": "?"}]}, "the row's conversation is in 'messages'"),
    ({"my_tools": [TOOL]}, "it holds tools; rename it to tools"),
    ({"extra_functions": json.dumps([FUNCTION])}, "it holds tools; rename it to tools"),
]


@pytest.mark.parametrize(("column", "why"), COLUMNS, ids=[next(iter(one)) for one, _ in COLUMNS])
def test_a_column_that_would_change_what_is_trained_is_refused_by_its_name(column: dict[str, Any], why: str) -> None:
    said = refused(ROWS["openai"] | column)
    assert said.startswith(f"unknown_key: the column {next(iter(column))!r} (") and why in said


REAL: dict[str, dict[str, Any]] = {
    "ultrachat": {"prompt": "And Peru's?", "prompt_id": "f0e3"},
    "tulu": {"id": "flan_1", "source": "ai2-adapt-dev/flan"},
    "openhermes": {
        "custom_instruction": False, "topic": None, "model_name": "gpt-4", "views": 3.0, "language": "en", "title": "x",
        "idx": "1", "hash": 12, "avatarUrl": "https://a", "skip_prompt_formatting": False, "category": "coding",
    },
    "hermes": {"id": "85f2", "category": "IoT", "subcategory": "Cameras", "task": "View a feed"},
    "nemotron": {
        "uuid": "a", "license": "cc", "generator": "qwen", "version": "v1", "reasoning": "off",
        "used_in_training": ["nano"], "metadata": {"expected_answer": "x"},
    },
    "toucan": {
        "subset_name": "single", "question": "And Peru's?", "target_tools": "capital_of", "tools_used": ["capital_of"],
        "response_quality_assessment": "{}", "num_tools": 1,
    },
    "lists": {
        "domains": ["geo"], "embedding": [0.1, 0.2], "scores": {"a": 1}, "label": "geography", "labels": ["a", "b"],
        "is_correct": True, "split": "train", "train_split": "a", "reward": 0.5, "mcp_info": "weather",
        "num_training_tokens": 12, "text": "<|im_start|>", "parallel_tool_calls": False, "quality_label": 3,
        "mask_history": False, "ctime": 1.5, "tool_stats": {"a": 1}, "original": [ASKED],
    },
    "same system": {"system_prompt": "Be brief.", "system": "Be brief."},
}  # fmt: skip
"""Columns of datasets that people train on, which change nothing."""


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_metadata_of_real_datasets_is_not_read_and_said(tmp_path: Path, name: str, form: str) -> None:
    plain = record(ROWS[form] | ({"system": "Be brief."} if name == "same system" else {}))
    row = ROWS[form] | REAL[name]
    one, defects = import_record(json.dumps(row).encode(), 0)
    assert one.messages == plain.messages and one.tools == plain.tools and one.reward is None
    quiet = {"mask_history", "system"}  # it says what is done; it is read
    wanted = {column for column, value in REAL[name].items() if value is not None} - quiet
    assert {defect.detail for defect in defects if defect.name == "unread_column"} == wanted
    card = read_card(kept_dataset([written(tmp_path / "own.jsonl", row, row, ROWS[form])], tmp_path / "cache"))
    assert card["unread"] == dict.fromkeys(wanted, 2)


def test_metadata_of_messages_turns_calls_and_tools_is_no_matter() -> None:
    about = {"id": "m1", "timestamp": 1.5, "model": "gpt-4", "usage": {"a": 1}, "metadata": {"train": 0}, "score": 0.5}
    about |= {"refusal": None, "annotations": [1], "finish_reason": "stop", "turn_identifier": 3, "toxic": False}
    for form in TALKS:
        row = row_of(form, about, about)
        first = row["prompt" if form == "completion" else TALKS[form][0]]
        first[0] = {**first[0], **about, "name": "ada"}
        assert weights(record(row)) == [1, 1]
    call = {"id": "a", "type": "function", "index": 0, "function": {**CALL, "index": 0}}
    tool = {"type": "function", "strict": True, "function": {**TOOL, "strict": True, "returns": {"type": "string"}}}
    row = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}], "tools": [tool]}
    plain = record(row | {"tools": [FUNCTION]})
    assert record(row).tools == plain.tools and record(row).messages[1].tool_calls[0].arguments == {"country": "Peru"}


# ---------------------------------------------------------------------------------------------------------------------
# Nulls of calls

TEXT = {"type": "string"}
NULLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # by name: properties of the schema, arguments, what is left
    "not in the schema": ({"city": TEXT}, {"city": "Oslo", "other": None}, {"city": "Oslo"}),
    "of a type without null": ({"city": TEXT, "day": TEXT}, {"city": "Oslo", "day": None}, {"city": "Oslo"}),
    "of a type with null": ({"day": {"type": ["string", "null"]}}, {"day": None}, {"day": None}),
    "nullable": ({"day": {"type": "string", "nullable": True}}, {"day": None}, {"day": None}),
    "an alternative": ({"day": {"anyOf": [TEXT, {"type": "null"}]}}, {"day": None}, {"day": None}),
    "no alternative": ({"day": {"oneOf": [TEXT, {"type": "number"}]}}, {"day": None}, {}),
    "one of the values": ({"day": {"enum": ["a", None]}}, {"day": None}, {"day": None}),
    "none of the values": ({"day": {"enum": ["a", "b"]}}, {"day": None}, {}),
    "the default": ({"day": {"type": "string", "default": None}}, {"day": None}, {"day": None}),
    "referred to": ({"day": {"$ref": "#/$defs/day"}}, {"day": None}, {"day": None}),
    "of no type": ({"day": {"description": "Any."}}, {"day": None}, {"day": None}),
    "in an object": (
        {"where": {"type": "object", "properties": {"city": TEXT, "zip": TEXT}}},
        {"where": {"city": "Oslo", "zip": None, "other": None}},
        {"where": {"city": "Oslo"}},
    ),
    "in a list of objects": (
        {"stops": {"type": "array", "items": {"type": "object", "properties": {"a": TEXT}}}},
        {"stops": [{"a": "x", "b": None}, {"a": None, "b": None}, None]},
        {"stops": [{"a": "x"}, {}, None]},
    ),
    "an object of nulls alone": ({"city": TEXT}, {"city": "a", "other": {"a": None, "b": {"c": None}}}, {"city": "a"}),
    "an object that was empty": ({"where": {"type": "object"}}, {"where": {}}, {"where": {}}),
    "further properties": ({}, {"a": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NULLS)
def test_a_null_that_the_schema_does_not_allow_is_not_trained(tmp_path: Path, name: str) -> None:
    properties, arguments, wanted = NULLS[name]
    schema = {"type": "object", "properties": properties, "$defs": {"day": {"type": ["string", "null"]}}}
    tool = {"name": "weather", "description": "", "parameters": schema}
    call = {"name": "weather", "arguments": arguments}
    rows = [
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": call}]}], "tools": json.dumps([tool])},
        {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": json.dumps(call)}],
         "tools": json.dumps([tool])},
    ]  # fmt: skip
    for row in rows:
        one, defects = import_record(json.dumps(row).encode(), 0)
        assert one.messages[1].tool_calls[0].arguments == wanted
        assert ("null_argument" in {defect.name for defect in defects}) == (wanted != arguments)


def test_schemas_that_refer_to_themselves_cost_little() -> None:
    node: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/node"}] * 9, "properties": {"a": {"$ref": "#/$defs/node"}}}
    schema = {"type": "object", "properties": {"a": node}, "$defs": {"node": node}}
    arguments: dict[str, Any] = {"b": None}
    for _ in range(20):
        arguments = {"a": arguments, "b": None}
    call = {"function": {"name": "weather", "arguments": arguments}}
    row = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    row["tools"] = [{"name": "weather", "description": "", "parameters": schema}]
    assert record(row).messages[1].tool_calls[0].arguments == {}


def test_a_required_null_stays() -> None:
    schema = {"type": "object", "properties": {"city": TEXT}, "required": ["city"]}
    call = {"function": {"name": "weather", "arguments": {"city": None}}}
    row = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    row["tools"] = [{"name": "weather", "description": "", "parameters": schema}]
    assert record(row).messages[1].tool_calls[0].arguments == {"city": None}


def test_a_table_is_read_alike_from_parquet_and_from_the_jsonl_that_is_written_of_it(tmp_path: Path) -> None:
    """As `datasets.to_json` does: each call has the arguments of all calls."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}}

    tools = json.dumps([tool("weather", city=TEXT, at={"type": ["string", "null"]}), tool("area", of=TEXT, unit=TEXT)])
    calls: list[tuple[str, dict[str, Any]]] = [
        ("weather", {"city": "Oslo"}), ("weather", {"at": None}), ("area", {"of": "Puno", "unit": "km2"}),
    ]  # fmt: skip
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": "",
                              "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}], "tools": tools}
        for name, arguments in calls
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "own.parquet")
    written(tmp_path / "own.jsonl", *table.to_pylist())
    found = []
    for suffix in ("parquet", "jsonl"):
        kept = kept_dataset([tmp_path / f"own.{suffix}"], tmp_path / "cache")
        found.append([one.messages[1].tool_calls[0].arguments for one in read_dataset(kept, Trajectory)])
        card = read_card(kept)
        assert card["noted"]["null_argument"] > 0
        assert "row 0 (counted from 0): weather.of" in card["examples"]["null_argument"]
    # Whether a null that the schema allows was filled in, nobody can say: it stays, the same from both.
    assert found[0] == found[1] == [{"city": "Oslo", "at": None}, {"at": None}, {"of": "Puno", "unit": "km2"}]


# ---------------------------------------------------------------------------------------------------------------------
# The page


def table(head: str, lines: list[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|" + " --- |" * columns, *lines])


def tables() -> dict[str, str]:
    """Forms, marks and columns as docs/sft.md has them, from the rows that the tests read and the lists in the code."""

    def quoted(names: Any) -> str:
        return ", ".join(f"`{name}`" for name in names)

    forms = []
    for name, row in (ROWS | {"alpaca": ALPACA}).items():
        turns = [turn for column in row.values() if isinstance(column, list) for turn in column]
        own = dict.fromkeys(key for turn in turns if "role" in turn or "from" in turn for key in turn)
        forms.append(f"| {name} | {quoted(row)} | {quoted(own)} |")
    marks = [
        f"| `{name}` | {mark.trainers} | {'true, 1' if mark.inverse else 'false, 0'} | "
        f"{f'to {mark.most:g}' if mark.most > 1 else 'to 1'} | {'yes' if mark.of_row else 'no'} |"
        for name, mark in keys.MARKS.items()
    ]
    why: dict[str, list[str]] = {}
    for name, reason in keys.REFUSED_COLUMNS.items():
        why.setdefault(reason, []).append(name)
    why["the models here read text alone"] += sorted(keys.MEDIA)
    columns = [f"| {quoted(names)} | {reason} |" for reason, names in why.items()]
    return {
        "forms": table("| Form | Columns | Keys of messages or turns |", forms),
        "marks": table("| Key | Trainers | Not trained | Weights | Of a row too |", marks),
        "columns": table("| Column | Why it is refused |", columns),
    }


@pytest.mark.parametrize("name", ["forms", "marks", "columns"])
def test_the_page_has_the_tables(name: str) -> None:
    """ASTRA_WRITE_TABLES=1 writes them."""
    page = ROOT / "docs" / "sft.md"
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: made by tests/synthesis/astra_format/test_keys.py -->\n\n", "\n\n<!-- end -->"
    before, _, rest = text.partition(begin)
    there, _, behind = rest.partition(end)
    if os.environ.get("ASTRA_WRITE_TABLES"):
        page.write_text(before + begin + tables()[name] + end + behind, encoding="utf-8")
    else:
        assert there == tables()[name], "ASTRA_WRITE_TABLES=1 writes docs/sft.md"


def test_every_form_that_an_error_names_has_a_row() -> None:
    columns = set(itertools.chain(*ROWS.values(), ALPACA)) | {"trajectory"}
    assert all(form.split()[0] in columns for form in FORMS)
