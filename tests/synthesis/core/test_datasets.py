"""Datasets on disk: written whole or not at all, never read when corrupt or foreign."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from rollout_world import make_environment

from synthesis.core import datasets
from synthesis.core.datasets import (
    CARD_FILE,
    RECORDS_FILE,
    DatasetError,
    check_dataset,
    each_record,
    read_card,
    read_dataset,
    read_record,
    write_dataset,
)
from synthesis.core.records import (
    Answer,
    CodeTool,
    EmulatedExecution,
    ReferenceCall,
    ToolServer,
    ToolSpec,
    Trajectory,
)

ANSWERS = [Answer(value=f"value {i}", aliases=["重庆"]) for i in range(50)]


def test_round_trip_keeps_records_order_and_card(tmp_path):
    digest = write_dataset(tmp_path / "answers", Answer, ANSWERS, card={"seed": 3})
    assert read_dataset(tmp_path / "answers", Answer) == ANSWERS
    card = read_card(tmp_path / "answers")
    assert (card["count"], card["digest"], card["seed"], card["kind"]) == (50, digest, 3, "Answer")


def test_digest_depends_on_content_and_order_alone(tmp_path):
    first = write_dataset(tmp_path / "a", Answer, ANSWERS, card={"seed": 1})
    again = write_dataset(tmp_path / "b", Answer, ANSWERS, card={"seed": 2})
    reversed_ = write_dataset(tmp_path / "c", Answer, ANSWERS[::-1], card={"seed": 1})
    assert first == again != reversed_


def test_an_empty_dataset_is_a_dataset(tmp_path):
    write_dataset(tmp_path / "none", Answer, [], card={})
    assert read_dataset(tmp_path / "none", Answer) == []


def test_records_are_read_one_by_one(tmp_path):
    path = tmp_path / "answers"
    many = [Answer(value=number) for number in range(2500)]
    write_dataset(path, Answer, many, card={})
    assert list(each_record(path, Answer)) == many
    assert [read_record(path, Answer, index) for index in (0, 7, 1024, 2499)] == [many[i] for i in (0, 7, 1024, 2499)]
    for index in (-1, 2500):
        with pytest.raises(DatasetError, match=f"has no record {index}; it holds 2500"):
            read_record(path, Answer, index)
    with pytest.raises(DatasetError, match="holds Answer records, expected ReferenceCall"):
        read_record(path, ReferenceCall, 0)
    card = json.loads((path / CARD_FILE).read_text())
    (path / CARD_FILE).write_text(json.dumps({**card, "count": 2499}))
    records = each_record(path, Answer)
    assert [next(records) for _ in range(2500)] == many
    with pytest.raises(DatasetError, match="2500 records with digest .* its card says 2499"):
        next(records)


def test_a_failed_write_leaves_the_old_dataset(tmp_path):
    write_dataset(tmp_path / "answers", Answer, ANSWERS, card={})
    with pytest.raises(TypeError, match="record 1 is a ReferenceCall, not a Answer"):
        write_dataset(tmp_path / "answers", Answer, [ANSWERS[0], ReferenceCall(1, "t", {}, None)], card={})
    assert read_dataset(tmp_path / "answers", Answer) == ANSWERS


def test_missing_foreign_and_corrupt_datasets_are_named(tmp_path):
    path = tmp_path / "answers"
    with pytest.raises(DatasetError, match=f"no dataset at {path}"):
        read_dataset(path, Answer)
    write_dataset(path, Answer, ANSWERS, card={})
    with pytest.raises(DatasetError, match="holds Answer records, expected ReferenceCall"):
        read_dataset(path, ReferenceCall)
    data = bytearray((path / RECORDS_FILE).read_bytes())
    position = data.find(b"value 7")
    data[position : position + 7] = b"value 8"
    (path / RECORDS_FILE).write_bytes(data)
    with pytest.raises(DatasetError, match="delete .* and run its stage again"):
        read_dataset(path, Answer)


def test_a_large_dataset_has_several_files(tmp_path, monkeypatch):
    """The order, the digest and the places are those of one file."""
    many = [Answer(value=f"value {number}") for number in range(50)]
    path = tmp_path / "answers"
    one_file = write_dataset(path, Answer, many, card={})
    assert "shards" not in read_card(path)
    monkeypatch.setattr(datasets, "SHARD_BYTES", 400)
    assert write_dataset(path, Answer, many, card={}) == one_file
    assert read_card(path)["shards"] == len(list(path.glob("*.array_record"))) > 3
    assert read_dataset(path, Answer) == many
    assert [read_record(path, Answer, index) for index in range(50)] == many
    assert check_dataset(path, Answer)["count"] == 50
    (path / "records-00002.array_record").unlink()
    with pytest.raises(DatasetError, match="records-00002.array_record is missing"):
        check_dataset(path, Answer)
    card = json.loads((path / CARD_FILE).read_text())
    (path / CARD_FILE).write_text(json.dumps({**card, "shards": 10**12}))
    with pytest.raises(DatasetError, match="shards is 1000000000000, no number of files"):
        read_dataset(path, Answer)


def test_a_card_of_another_schema_version_is_refused(tmp_path):
    path = tmp_path / "answers"
    write_dataset(path, Answer, ANSWERS, card={})
    card = json.loads((path / CARD_FILE).read_text())
    (path / CARD_FILE).write_text(json.dumps({**card, "schema_version": 0}))
    with pytest.raises(DatasetError, match="schema_version is 0"):
        read_dataset(path, Answer)


def test_tools_whose_arguments_nobody_could_check_are_refused(tmp_path):
    """The servers and environments that calls are made to; a trajectory's tools are only shown."""
    tool = ToolSpec("look_up", "", {"type": "object", "properties": {"x": {"$ref": "http://127.0.0.1/x.json"}}})
    environment = replace(make_environment(), distractors={"low": [CodeTool(tool, "")]})
    server = ToolServer("s", "", "", "", "en", [tool], EmulatedExecution())
    for number, record in enumerate([environment, server]):
        kind = type(record)
        write_dataset(tmp_path / str(number), kind, [record], card={})
        with pytest.raises(DatasetError, match="record 0: the schema of tool 'look_up' .*[$]ref"):
            read_dataset(tmp_path / str(number), kind)
    run = Trajectory("t", "t", "s", "d", "en", [tool], [], 0, {}, 1.0)
    write_dataset(tmp_path / "runs", Trajectory, [run], card={})
    assert read_dataset(tmp_path / "runs", Trajectory) == [run]
