"""JSON of strangers that nests deeply is refused at each door, on every Python.

Python 3.11 refuses to parse a thousand levels; 3.12 and later parse them, and recursive code failed on the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astra_jax.base.errors import InputError
from astra_jax.base.nesting import MOST_NESTING
from astra_jax.base.typed import decode_any_json, decode_json
from astra_jax.sft.rename_entities import rename_entities
from synthesis.astra_format.candidates import leaves, literals
from synthesis.astra_format.sft import import_record
from synthesis.core.chat_format import MalformedCall, parse_arguments, parse_json
from synthesis.core.chatml import ChatML
from synthesis.core.llama3_chat import LLAMA3
from synthesis.core.matching import contains
from synthesis.core.records import Answer, Message, ToolCall, Trajectory
from synthesis.core.stages import Rejected
from synthesis.core.tool_results import server_text
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.sources import sources_of
from synthesis.pipeline.structured_output import BadAnswer, read_answer
from synthesis.servers.configured import read_sources
from synthesis.servers.registry import read_registries

LEVELS = [MOST_NESTING + 50, 900, 3_000, 9_000, 100_000]
KINDS = {"arrays": ("[", "]"), "objects": ('{"a":', "}"), "both": ('[{"a":', "}]")}


class Open(msgspec.Struct, frozen=True):
    anything: dict[str, object]


def is_malformed(call: object) -> bool:
    return isinstance(call, MalformedCall)


def refuses(error: type[Exception], read: Callable[[str, Path], object]) -> Callable[[str, Path], bool]:
    """A door that raises `error`."""

    def door(text: str, folder: Path) -> bool:
        with pytest.raises(error):
            read(text, folder)
        return True

    return door


def written(text: str, folder: Path) -> Path:
    """A file with this text."""
    (folder / "given.json").write_text(text)
    return folder / "given.json"


def renamed(text: str) -> str:
    """The tool's output in a conversation after its entities were renamed."""
    messages = [
        Message("user", "Which?"),
        Message("assistant", "", tool_calls=[ToolCall("1", "find", {"city": "Niamey"})]),
        Message("tool", text, tool_call_id="1"),
    ]
    trajectory = Trajectory("t", "t", "s", "geography", "en", [], messages, 0, {}, 1.0)
    return rename_entities(trajectory, np.random.default_rng(0)).messages[2].content


def imported(text: str, folder: Path) -> object:
    del folder
    record = {"messages": [{"role": "user", "content": "Hi"}], "tools": text}
    return import_record(json.dumps(record).encode(), 0)


DOORS: dict[str, Callable[[str, Path], bool]] = {
    "a call in ChatML": lambda text, _: is_malformed(
        ChatML().parse_assistant(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>').calls[0]
    ),
    "a call of Llama 3": lambda text, _: is_malformed(
        LLAMA3.parse_assistant(f'{{"name": "f", "parameters": {text}}}').calls[0]
    ),
    "arguments as text": refuses(ValueError, lambda text, _: parse_arguments(f'{{"x": {text}}}')),
    "a value": refuses(RecursionError, lambda text, _: parse_json(text)),
    "a typed value": refuses(
        msgspec.DecodeError, lambda text, _: decode_json(f'{{"anything": {{"x": {text}}}}}', Open)
    ),
    "any value": refuses(msgspec.DecodeError, lambda text, _: decode_any_json(text)),
    "a tool's output that is renamed": lambda text, _: renamed(text) == text,
    "an output that is matched": lambda text, _: not contains({"found": text}, Answer("Niamey")),
    "a server's text": lambda text, _: server_text(text).startswith(text[:10]),
    "a string in a released record": lambda text, _: list(leaves(text)) == [text],
    "a string in tool code": lambda text, _: literals(f"X = {text!r}") == ([], []),
    "a column of a record": refuses(Rejected, imported),
    "a record": refuses(Rejected, lambda text, _: import_record(text.encode(), 0)),
    "a teacher's answer": refuses(BadAnswer, lambda text, _: read_answer(f'{{"anything": {{"x": {text}}}}}', Open)),
    "a file of MCP servers": refuses(InputError, lambda text, folder: read_sources([written(text, folder)])),
    "a registry": lambda text, folder: set(read_registries([written(text, folder)]).reasons()) == {"not_json"},
    "a taxonomy": refuses(
        InputError, lambda text, folder: sources_of(EnvironmentsConfig(taxonomy=str(written(text, folder))))
    ),
    "a file of questions": refuses(
        InputError, lambda text, folder: sources_of(EnvironmentsConfig(questions=str(written(text, folder))))
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_json_that_nests_deeply_is_refused(door: str, tmp_path: Path) -> None:
    for kind, (start, end) in KINDS.items():
        for levels in LEVELS:
            repeats = levels // len([one for one in start if one in "[{"])
            assert DOORS[door](f'{start * repeats}"x"{end * repeats}', tmp_path), f"{levels} levels of {kind}"


def test_json_of_many_brackets_that_nests_little_is_read() -> None:
    value = {"anything": {"x": [[[1]] for _ in range(MOST_NESTING)], "text": "[" * 3 * MOST_NESTING}}
    text = json.dumps(value)
    assert decode_json(text, Open) == decode_json(text.encode(), Open) == Open(value["anything"])
    assert decode_any_json(text) == parse_json(text) == value
