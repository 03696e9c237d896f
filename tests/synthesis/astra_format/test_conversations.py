"""A user's own conversations, in the forms in which others write them: read to the same, kept whole, refused by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astra_jax.base.errors import InputError
from synthesis.astra_format.conversations import kept_dataset
from synthesis.astra_format.sft import import_record, write_records
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory
from synthesis.core.stages import Rejected

PARAMETERS = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}
TOOL = {"name": "capital_of", "description": "Capital of a country.", "parameters": PARAMETERS}
FUNCTION = {"type": "function", "function": TOOL}
CALL = {"name": "capital_of", "arguments": {"country": "Peru"}}
ASKED = {"role": "user", "content": "And Peru's?"}
ANSWER = {"role": "assistant", "content": "Lima."}
ARGUMENTS = '{"country": "Peru"}'
OPENAI_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "capital_of", "arguments": ARGUMENTS}}],
}
OPENAI = [ASKED, OPENAI_CALL, {"role": "tool", "tool_call_id": "a", "content": "Lima"}, ANSWER]
EXPECTED = [
    Message("user", "And Peru's?"),
    Message("assistant", "", tool_calls=[ToolCall("", "capital_of", {"country": "Peru"})]),
    Message("tool", "Lima", name="capital_of"),
    Message("assistant", "Lima."),
]

ROWS: dict[str, dict[str, Any]] = {
    "openai": {"messages": OPENAI, "tools": [FUNCTION]},
    "openai, functions": {
        "functions": [TOOL],
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {**CALL, "arguments": ARGUMENTS},
            },
            {"role": "function", "name": "capital_of", "content": "Lima"},
            ANSWER,
        ],
    },
    "trl": {
        "messages": [
            ASKED,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "name": "capital_of", "content": "Lima"},
            ANSWER,
        ],
        "tools": json.dumps([FUNCTION]),
    },
    "trl, prompt and completion": {"prompt": [ASKED], "completion": OPENAI[1:], "tools": json.dumps([TOOL])},
    "qwen-agent": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": "", "function_call": {**CALL, "arguments": ARGUMENTS}},
            {"role": "function", "name": "capital_of", "content": [{"text": "Lima"}]},
            ANSWER,
        ],
        "tools": [TOOL],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "And Peru's?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "Lima"},
            {"from": "gpt", "value": "Lima."},
        ],
        "tools": json.dumps([TOOL]),
    },
    "hermes": {
        "conversations": [
            {"from": "human", "value": "And Peru's?"},
            {"from": "gpt", "value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
            {"from": "tool", "value": '<tool_response>\n{"name": "capital_of", "content": "Lima"}\n</tool_response>'},
            {"from": "gpt", "value": "Lima."},
        ],
        "tools": json.dumps([FUNCTION]),
    },
    "messages under ShareGPT's name": {"conversations": OPENAI, "tools": [FUNCTION]},
    "anthropic": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "And Peru's?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "capital_of", "input": {"country": "Peru"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Lima"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Lima."}]},
        ],
        "tools": [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": PARAMETERS}],
    },
}


ALPACA = {
    "instruction": "Name the capital.",
    "input": "Peru",
    "output": "Lima.",
    "history": [["And Chile's?", "Santiago."]],
}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def without_ids(messages: list[Message]) -> list[Any]:
    return [(m.role, m.content, m.reasoning, m.name, [(c.name, c.arguments) for c in m.tool_calls]) for m in messages]


@pytest.mark.parametrize("form", ROWS)
def test_each_form_is_the_same_conversation(tmp_path: Path, form: str) -> None:
    file = written(tmp_path / "own.jsonl", ROWS[form])
    [one] = read_dataset(kept_dataset([file], tmp_path / "cache"), Trajectory)
    assert without_ids(one.messages) == without_ids(EXPECTED)
    assert one.tools == [ToolSpec("capital_of", "Capital of a country.", PARAMETERS)]
    assert one.id == "own-000000" and one.scores == {}
    call, result = one.messages[1].tool_calls[0], one.messages[2]
    assert result.tool_call_id == call.id


@pytest.mark.parametrize("form", ROWS)
def test_a_system_column_is_the_system_message_in_each_form(tmp_path: Path, form: str) -> None:
    """LLaMA-Factory's, and of rows that were made of a template: without it the model learns to answer nobody."""
    own = {"role": "system", "content": "Be brief."}
    column = "conversations" if "conversations" in ROWS[form] else "messages"
    rows = [{**ROWS[form], "system": "Be brief."}]
    if "prompt" not in ROWS[form]:
        first = own if "role" in ROWS[form][column][0] else {"from": "system", "value": "Be brief."}
        rows += [{**rows[0], column: [first, *ROWS[form][column]]}]
    read = read_dataset(kept_dataset([written(tmp_path / "own.jsonl", *rows)], tmp_path / "cache"), Trajectory)
    assert len(read) == len(rows)
    for one in read:
        assert without_ids(one.messages) == without_ids([Message("system", "Be brief."), *EXPECTED])


def test_an_alpaca_row_is_a_conversation_and_what_it_has_beside_is_as_in_each_form(tmp_path: Path) -> None:
    """Stanford's columns, and LLaMA-Factory's `history` and `system`; `text` and unknown columns are counted."""
    asked = Message("user", "Name the capital.\nPeru")
    earlier = [Message("user", "And Chile's?"), Message("assistant", "Santiago.")]
    plain = ALPACA | {"input": "", "history": []}
    rows = [ALPACA, plain, plain | {"system": "Be brief.", "text": "Below is an instruction", "weight": 0.5}]
    card = kept_dataset([written(tmp_path / "own.jsonl", *rows)], tmp_path / "cache")
    whole, short, system = read_dataset(card, Trajectory)
    answer = Message("assistant", "Lima.")
    assert without_ids(whole.messages) == without_ids([*earlier, asked, answer])
    assert without_ids(short.messages) == without_ids([Message("user", "Name the capital."), answer])
    assert without_ids(system.messages)[0][:2] == ("system", "Be brief.") and system.messages[-1].weight == 0.5
    for change, said in (
        ({"output": ["Lima."]}, "column output: wants a text"),
        ({"history": [["And Chile's?"]]}, "column history: wants pairs"),
        ({"rejected": "Cusco."}, "SFT takes no pairs of answers"),
        ({"completion": "Lima"}, "the row's conversation is in 'instruction'"),
    ):
        with pytest.raises(Rejected, match=said):
            import_record(json.dumps(ALPACA | change).encode(), 0)


def test_blocks_of_a_turn_are_its_thinking_text_and_calls_and_results_come_with_a_question(tmp_path: Path) -> None:
    thinks = {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Both.", "signature": "x"}, {"type": "text", "text": "One moment."},
        *({"type": "tool_use", "id": id, "name": "capital_of", "input": {"country": of}} for id, of in CAPITALS),
    ]}  # fmt: skip
    results = [{"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": id}], "is_error": False}
               for id, _ in reversed(CAPITALS)]  # fmt: skip
    asks = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    talk = {"system": [{"type": "text", "text": "Be brief."}], "messages": [BLOCKS[0], thinks, asks, ANSWER]}
    row = {**ROWS["anthropic"], **talk}
    [one] = read_dataset(kept_dataset([written(tmp_path / "own.jsonl", row)], tmp_path / "cache"), Trajectory)
    assert [(m.role, m.content, m.reasoning, m.tool_call_id) for m in one.messages] == [
        ("system", "Be brief.", "", ""), ("user", "And Peru's?", "", ""), ("assistant", "One moment.", "Both.", ""),
        ("tool", "b", "", "b"), ("tool", "a", "", "a"), ("user", "And?", "", ""), ("assistant", "Lima.", "", ""),
    ]  # fmt: skip
    assert [(call.id, call.arguments["country"]) for call in one.messages[2].tool_calls] == CAPITALS


CAPITALS = [("a", "Peru"), ("b", "Chad")]


def test_what_columnar_files_fill_up_is_taken_out(tmp_path: Path) -> None:
    """In a .parquet file of objects all rows have the fields of all: arguments and schemas get nulls."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = {"name": "area_of", "description": "", "parameters": {"type": "object", "properties": {
        "region": {"type": "string"}}, "required": []}}  # fmt: skip
    asks = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "b", "type": "function", "function": {"name": "area_of", "arguments": {"region": "Puno"}}}]}  # fmt: skip
    objects = {**OPENAI_CALL, "tool_calls": [{"id": "a", "type": "function", "function": CALL}]}
    rows = [
        {"messages": [ASKED, objects, OPENAI[2], ANSWER], "tools": [TOOL]},
        {"messages": [ASKED, asks], "tools": [other]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "own.parquet")
    first, second = read_dataset(kept_dataset([tmp_path / "own.parquet"], tmp_path / "cache"), Trajectory)
    assert first.messages[1].tool_calls[0].arguments == {"country": "Peru"}
    assert first.tools[0].parameters == PARAMETERS
    assert second.messages[-1].tool_calls[0].arguments == {"region": "Puno"}  # it ends in a call, and that is fine


def test_it_is_read_once_and_kept_by_what_is_in_it(tmp_path: Path, monkeypatch) -> None:
    file, cache = written(tmp_path / "a.jsonl", ROWS["openai"]), tmp_path / "cache"
    kept = kept_dataset([file], cache, source="a.jsonl")
    card = read_card(kept)
    assert card["source"] == "a.jsonl" and card["rows"] == card["count"] == 1 and card["skipped"] == {}
    with monkeypatch.context() as patched:  # the same bytes elsewhere are not read again
        patched.setattr("synthesis.astra_format.conversations.import_record", None)
        assert kept_dataset([written(tmp_path / "b.jsonl", ROWS["openai"])], cache) == kept
    assert kept_dataset([written(tmp_path / "a.jsonl", ROWS["openai"], ROWS["trl"])], cache) != kept
    assert kept_dataset([file, tmp_path / "b.jsonl"], cache).parent == cache


def test_what_is_killed_while_it_is_written_is_not_read(tmp_path: Path, monkeypatch) -> None:
    file, cache = written(tmp_path / "a.jsonl", ROWS["openai"], ROWS["trl"]), tmp_path / "cache"

    def killed(data: bytes, row: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("synthesis.astra_format.conversations.import_record", killed)
        with pytest.raises(KeyboardInterrupt):
            kept_dataset([file], cache)
    assert not list(cache.iterdir())
    assert len(read_dataset(kept_dataset([file], cache), Trajectory)) == 2


def test_another_process_that_was_first_is_believed(tmp_path: Path, monkeypatch) -> None:
    from synthesis.core import datasets

    file, cache = written(tmp_path / "a.jsonl", ROWS["openai"]), tmp_path / "cache"
    write = datasets.write_dataset

    def beside(path: Path, *arguments: Any, **more: Any) -> str:
        monkeypatch.setattr(datasets, "write_dataset", write)
        kept_dataset([file], cache)
        return write(path, *arguments, **more)

    monkeypatch.setattr(datasets, "write_dataset", beside)
    kept = kept_dataset([file], cache)
    assert [one.name for one in cache.iterdir()] == [kept.name] and len(read_dataset(kept, Trajectory)) == 1


def tampered(**change: Any) -> dict[str, Any]:
    return {**ROWS["openai"], **change}


BLOCKS = ROWS["anthropic"]["messages"]
USE = BLOCKS[1]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?"}]}
BAD: list[tuple[Any, str]] = [
    ({"text": "a", "label": 1}, "it is of no known form; its keys are label, text; known are messages with tools"),
    (tampered(messages=[IMAGE, ANSWER]), "message 0: the content has an item that is not text, of type 'image_url'"),
    (tampered(images=["x.png"]), "the column 'images' .* is not read: the models here read text alone"),
    (tampered(messages=OPENAI[:1]), "no_assistant_turn"),
    (tampered(messages=[ASKED, OPENAI_CALL, ASKED, ANSWER]), "call_without_result: capital_of, id a"),
    (tampered(messages=[ASKED, OPENAI_CALL, ASKED, OPENAI_CALL]), "call_without_result"),
    (tampered(messages=[ASKED, OPENAI[2], ANSWER]), "result_without_call"),
    (tampered(tools=[]), "unknown_tool: 'capital_of'"),
    (tampered(tools="[{]"), "column tools: "),
    (tampered(messages=[ASKED, {**ANSWER, "weight": -1}]), "bad_mark: message 1: 'weight' is -1; it wants true, false"),
    (tampered(messages=[ASKED, {**ANSWER, "spoken": 1}]), "unknown_key: message 1: the key 'spoken' .1. is not known"),
    (
        tampered(messages=[{"role": "oracle", "content": "a"}]),
        "message 0: the role 'oracle' is not known; use one of sys",
    ),
    (tampered(messages=[*BLOCKS[:1], USE | {"role": "user"}, ANSWER]), "message 1: a message of role 'user' holds"),
    (tampered(messages=[*BLOCKS[:1], {**USE, "content": [*USE["content"], "Well."]}]), "a text behind a call"),
    (tampered(messages=[*BLOCKS[:1], {**USE, "content": [{**USE["content"][0], "odd": 1}]}]), "unknown_key: message 1"),
    ({"conversations": [{"from": "oracle", "value": "a"}]}, "turn 0: .*from is 'oracle'"),
    (
        {"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]},
        "leaked_markup: .*<tool_call> without </tool_call>",
    ),
    ({"conversations": [{"from": "function_call", "value": "{"}]}, "turn 0: a call that is not JSON"),
    (
        tampered(system="Be long.", messages=[{"role": "system", "content": "Be brief."}, *OPENAI]),
        "column system: it is 'Be long.', and the conversation's own is 'Be brief.'",
    ),
    (tampered(system=["Be brief."]), "column system: wants a text, and is"),
    ([1], "no record"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_refused_by_its_number_or_left_out_and_counted(tmp_path: Path, row: Any, message: str) -> None:
    file, cache = written(tmp_path / "own.jsonl", ROWS["openai"], row), tmp_path / "cache"
    with pytest.raises(InputError, match=rf"own.jsonl, row 1 \(counted from 0\): .*{message}"):
        kept_dataset([file], cache)
    assert not list(cache.iterdir())
    kept = kept_dataset([file], cache, skip_bad=True)
    card = read_card(kept)
    assert len(read_dataset(kept, Trajectory)) == 1 and card["rows"] == 2 and sum(card["skipped"].values()) == 1
    assert "row 1 (counted from 0)" in next(iter(card["examples"].values()))


def test_nothing_that_can_be_trained_on_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of 1 rows can be trained on"):
        kept_dataset([written(tmp_path / "own.jsonl", {"text": "a"})], tmp_path / "cache", skip_bad=True)


def test_a_defect_may_be_accepted_by_its_name(tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", tampered(tools=[]))
    assert read_card(kept_dataset([file], tmp_path / "cache", accept=["unknown_tool"]))["count"] == 1
    with pytest.raises(InputError, match="there is no defect 'bad_arguments'; use bad_schema, "):
        kept_dataset([file], tmp_path / "cache", accept=["bad_arguments"])


@pytest.mark.parametrize("name", ["own.csv", "gone.jsonl"])
def test_what_is_no_file_of_rows_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=name):
        kept_dataset([tmp_path / name], tmp_path / "cache")


def test_export_is_read_back(tmp_path: Path) -> None:
    [one] = read_dataset(
        kept_dataset([written(tmp_path / "own.jsonl", ROWS["hermes"])], tmp_path / "cache"), Trajectory
    )
    for form in ("qwen", "openai", "trl"):
        write_records(tmp_path / f"{form}.jsonl", [one], form=form)  # type: ignore[arg-type]
        [back] = read_dataset(kept_dataset([tmp_path / f"{form}.jsonl"], tmp_path / "cache"), Trajectory)
        assert back.messages == one.messages and back.tools == one.tools
