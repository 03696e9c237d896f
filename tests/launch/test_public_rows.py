"""Rows of the shapes that TRL, axolotl and public datasets of calls document, with other words, read by the program."""

from __future__ import annotations

import json
from typing import Any

import pytest
from programs_world import programs
from sft_world import make_tokenizer

LAMP = {
    "type": "function",
    "function": {
        "name": "dim_lamp",
        "description": "Dims a lamp.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "level": {"type": "integer"}},
            "required": ["room", "level"],
        },
        "return": {"type": "string", "description": "The level that it has now."},
    },
}
ARGUMENTS = {"room": "attic", "level": 3}
CALL = {"name": "dim_lamp", "arguments": ARGUMENTS}
TEXT = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TRAINED = f"{TEXT}<|im_end|>"
ASKED, DONE = {"role": "user", "content": "Dim the attic."}, {"role": "assistant", "content": "It is dim."}
RESULT = {"role": "tool", "name": "dim_lamp", "content": "3"}
SAID = "It is dim.<|im_end|>"
PLAIN = [{"role": "user", "content": "Which sea is salty?"}, {"role": "assistant", "content": "All of them."}]

ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # A row, and what is trained of it.
    "TRL, language modelling": ({"messages": PLAIN}, ["All of them."]),
    "TRL, prompt and completion": ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, ["All of them."]),
    "TRL, text": ({"prompt": "Which sea is salty?", "completion": " All of them."}, ["All of them."]),
    "TRL, tools": (
        {
            "messages": [
                ASKED,
                {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
                RESULT,
                DONE,
            ],
            "tools": [LAMP],
        },
        [TRAINED, SAID],
    ),
    "TRL, tools as text": (
        {
            "prompt": [ASKED],
            "completion": [{"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}],
            "tools": json.dumps([LAMP]),
        },
        [TRAINED],
    ),
    "TRL, Harmony": (
        {
            "messages": [
                {"role": "developer", "content": "Be kind."},
                PLAIN[0],
                {"role": "assistant", "thinking": "Easy.", "content": "All of them."},
            ]
        },
        ["<think>\nEasy.\n</think>\n\nAll of them."],
    ),
    "axolotl, chat_template": ({"conversations": PLAIN}, ["All of them."]),
    "axolotl, ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "Which sea is salty?"},
                {"from": "gpt", "value": "All of them."},
            ]
        },
        ["All of them."],
    ),
    "axolotl, tools": (
        {
            "tools": [LAMP],
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {**CALL, "arguments": json.dumps(ARGUMENTS)}}
                    ],
                },
                {**RESULT, "tool_call_id": "c1"},
                DONE,
            ],
        },
        [TRAINED, SAID],
    ),
    "Hermes": (
        {
            "conversations": [
                {"from": "system", "value": f"Serve well. Here are your tools: <tools> {[LAMP]!r} </tools>"},
                {"from": "human", "value": "Dim the attic."},
                {"from": "gpt", "value": f"<tool_call>\n{CALL!r}\n</tool_call>"},
                {"from": "tool", "value": '<tool_response>\n{"name": "dim_lamp", "content": "3"}\n</tool_response>'},
                {"from": "gpt", "value": "It is dim."},
            ]
        },
        [TRAINED, SAID],
    ),
    "Glaive": (
        {
            "messages": [
                {"role": "system", "content": f"You may use these functions -\n{json.dumps(LAMP['function'])}"},
                ASKED,
                {
                    "role": "assistant",
                    "content": f'<functioncall> {{"name": "dim_lamp", "arguments": {json.dumps(ARGUMENTS)!r}}}',
                },
                RESULT,
                DONE,
            ]
        },
        [TRAINED, SAID],
    ),
    "xLAM": (
        {
            "messages": [ASKED, {"role": "assistant", "content": json.dumps([CALL])}],
            "tools": json.dumps(
                [
                    {
                        "name": "dim_lamp",
                        "description": "Dims a lamp.",
                        "parameters": {"room": {"type": "str"}, "level": {"type": "int"}},
                    }
                ]
            ),
        },
        [TRAINED],
    ),
}


@pytest.fixture(scope="module")
def preview(tmp_path_factory) -> list[str]:
    """What the program shows of each row."""
    folder = tmp_path_factory.mktemp("public")
    make_tokenizer(folder / "hf")
    lines = "".join(json.dumps(row) + "\n" for row, _ in ROWS.values())
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    given = {"config": "sft:0.6b", "weights": folder / "hf", "data": folder / "rows.jsonl", "workdir": folder / "run"}
    with programs("launch.sft", folder) as start:
        ended = start.begin(
            *(f"--{name}={value}" for name, value in given.items()), f"--preview={len(ROWS)}",
            NO_COLOR="1", XDG_CACHE_HOME=str(folder / "cache"),
        ).wait()  # fmt: skip
    assert ended.code == 0 and f"{len(ROWS)} of {len(ROWS)} rows" in ended.out, ended.errors
    assert "2 rows with tools_in_system, such as" in ended.out and "3 rows with calls_in_text, such as" in ended.out
    return ended.out.split("\nrows-0")[1:]


@pytest.mark.parametrize("number", range(len(ROWS)), ids=list(ROWS))
def test_a_public_row_is_trained_as_it_is_meant(preview: list[str], number: int) -> None:
    _, wanted = list(ROWS.values())[number]
    trained = [piece.partition("»")[0] for piece in preview[number].split("«")[1:]]
    assert len(trained) == len(wanted)
    for piece, text in zip(trained, wanted, strict=True):
        assert text in piece
    assert (preview[number].count('"name": "dim_lamp", "description"')) == (TRAINED in wanted)
