"""A few packed kilobytes may be any number of bytes: no more of a file is taken in than it may have."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from astra_jax.base import files
from astra_jax.base.errors import InputError
from synthesis.astra_format.records import read_rows
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.sources import SourceError, sources_of
from synthesis.servers.registry import read_registries


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a file of 8 MiB, of which the bounds let 1 in, as one line or as one value; 8 kB packed."""
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 1 << 20)

    def make(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(b'{"a":"' + b"x" * (8 << 20) + b'"}'))
        return path

    return make


def test_what_is_within_the_bounds_is_read_packed_or_not(tmp_path: Path) -> None:
    text = b'{"a": 1}\n\n{"b": 2}'
    (tmp_path / "plain.jsonl").write_bytes(text)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text))
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        assert files.read_unpacked(tmp_path / name) == text
        assert b"".join(files.unpacked_lines(tmp_path / name)) == text


def test_lines_are_bounded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 10)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"123456789\n" * 5 + b"12345678901\n")
    found = []
    with pytest.raises(InputError, match=r"a\.jsonl, line 6 has more than"):
        found.extend(files.unpacked_lines(path))
    assert len(found) == 5


def test_a_registry(bomb) -> None:
    for name in ("registry.jsonl.gz", "registry.json.gz"):
        (rejected,) = read_registries([bomb(name)]).rejected
        assert rejected.reason == "registry_unreadable" and "has more than 1 MiB" in rejected.detail


def test_texts_and_questions(bomb) -> None:
    path = str(bomb("texts.jsonl.gz"))
    for config in (EnvironmentsConfig(questions=path), EnvironmentsConfig(knowledge=path)):
        with pytest.raises(SourceError, match="has more than 1 MiB"):
            sources_of(config)


def test_released_records(bomb) -> None:
    with pytest.raises(InputError, match="has more than 1 MiB"):
        read_rows(bomb("records.jsonl.gz"))
