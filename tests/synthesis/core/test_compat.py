"""Data of earlier versions with former names is read, and keys of stages do not change with names."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from astra_jax.base.former_settings import FORMER_SYNTHESIS_SETTINGS
from synthesis.core.compat import (
    FORMER_KEYS,
    FORMER_REASONS,
    decode_stored,
    encode_for_fingerprint,
    todays_card,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.journal import Journal
from synthesis.core.records import (
    CodeExecution,
    Dialogue,
    EmulatedExecution,
    Goal,
    GroupExecution,
    Message,
    Provenance,
    Task,
    TaskScores,
    ToolCall,
    ToolOrigin,
    ToolServer,
    ToolSpec,
    Trajectory,
    decode,
    encode,
)
from synthesis.core.stages import Rejected, run_stage
from synthesis.environments.config import EnvironmentsConfig
from synthesis.trajectories.config import TrajectoriesConfig

PARAMETERS = {"type": "object", "properties": {"licence": {"type": "string"}, "says": {"type": "string"}}}
TOOL = ToolSpec("find", "Find a text.", PARAMETERS)
DIALOGUE = Dialogue(
    "later_tool", [Goal("Find it."), Goal("Now?", ["find"])], 2, hidden_tools=["find"], restored_at_turn=2
)
TASK = Task("t", "s", "en", "dialogue", "original", "Find it.", ["find"], TaskScores(5, 5, 5), DIALOGUE)
RECORDS = [
    ToolServer("s", "S", "A server.", "texts", "en", [TOOL], CodeExecution("x = 1"), license="MIT"),
    ToolServer("g", "G", "A group.", "texts", "en", [TOOL], GroupExecution({"find": ToolOrigin("s", "find")})),
    ToolServer("e", "E", "Emulated.", "texts", "en", [TOOL], EmulatedExecution(), license='a "licence": MIT'),
    TASK,
    Trajectory(
        "t", "t", "s", "texts", "en", [TOOL],
        [Message("user", 'He said "says": yes'),
         Message("assistant", "", "", [ToolCall("c", "find", {"says": "licence"})])],
        0, {}, 1 / 3, dialogue=DIALOGUE, provenance=Provenance("Teacher", license="MIT"),
    ),
]  # fmt: skip
FORMER = {"license": "licence", "utterance": "says", "behaviour": "conduct", "hidden_tools": "withheld"}
FORMER |= {"restored_at_turn": "returned"}


def former(data: bytes) -> bytes:
    """A record as it was written."""
    return re.sub(rb'"(\w+)":', lambda one: f'"{FORMER.get(one[1].decode(), one[1].decode())}":'.encode(), data)


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: f"{type(one).__name__}-{one.id}")
def test_records_are_read_with_former_keys_and_written_with_todays(record: msgspec.Struct) -> None:
    written = encode(record)
    assert former(written) != written
    assert decode(former(written), type(record)) == record == decode(written, type(record))
    assert decode_stored(b"[" + former(written) + b"]", list[type(record)]) == [record]  # type: ignore[misc]


def test_fingerprints_are_of_former_keys() -> None:
    """So that a run of an earlier version finds what its journal has. Dictionaries are sorted, structs are not."""
    for record in RECORDS:
        assert encode_for_fingerprint(record) == former(msgspec.json.encode(record, order="deterministic"))
    plain = [{"b": 1, "a": [{"license": 2}]}, 0, {"name": "x"}]
    assert encode_for_fingerprint([*plain, [TASK]]) == former(
        msgspec.json.encode([*plain, [TASK]], order="deterministic")
    ).replace(b'"licence":2', b'"license":2')


def test_names_of_today_are_there() -> None:
    structs = {one.__name__: one for one in (ToolServer, Provenance, Goal, Dialogue)}
    for name, kind in structs.items():
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert fields >= set(FORMER_KEYS[name].values()) and not fields & FORMER_KEYS[name].keys()
    configs = (TrajectoriesConfig, EnvironmentsConfig, OpenAITeacherConfig)
    settings = {name for config in configs for name in config.__dataclass_fields__}
    assert settings >= set(FORMER_SYNTHESIS_SETTINGS.values()) and not settings & FORMER_SYNTHESIS_SETTINGS.keys()
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in Path(__file__).parents[3].glob("synthesis/*/*.py")
        if path.name != "compat.py"
    )
    for then, today in FORMER_REASONS.items():
        assert f'"{today}"' in code and f'"{then}"' not in code


async def test_reasons_in_a_journal_have_todays_names(tmp_path: Path) -> None:
    async def work(item: str) -> list[Task]:
        raise Rejected("straddles_split", "as an earlier version called it")

    with Journal(tmp_path / "journal.sqlite") as journal:
        for _ in range(2):
            result = await run_stage("one", work, ["a"], key=str, out=Task, journal=journal)
            assert result.rejected == {"mixed_split": 1} and result.details.keys() == {"mixed_split"}


def test_cards_are_read_with_former_names() -> None:
    card = {
        "kind": "Task", "config": {"surplus": 0.5, "seed": 1}, "rejected": {"tasks": {"one_server": 2, "no_tools": 1}},
        "provenance": {"licences": ["MIT"]}, "statistics": {"conducts": {"done": 1}},
    }  # fmt: skip
    assert todays_card(card) == {
        "kind": "Task", "config": {"oversample_ratio": 0.5, "seed": 1},
        "rejected": {"tasks": {"single_server": 2, "no_tools": 1}},
        "provenance": {"licenses": ["MIT"]}, "statistics": {"behaviours": {"done": 1}},
    }  # fmt: skip
    assert todays_card({"rejected": 3, "config": None}) == {"rejected": 3, "config": None}
