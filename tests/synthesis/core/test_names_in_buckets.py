"""What strangers name their objects in buckets, through Google's own client: nothing is written outside the copies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import fsspec
import gcsfs
import pytest

from synthesis.core.files import StorageError, location, names_itself
from synthesis.core.mirror import fetched, mirrored

OBJECTS = {
    "good/registry.jsonl": b"{}\n",
    "good/more/registry.jsonl": b"{}\n",
    "bad/registry.jsonl": b"{}\n",
    "bad/../../victim/registry.jsonl": b"planted",
    "run/run.json": b"{}",
    "run/../victim/journal.sqlite": b"planted",
}


async def answered(client: Any, method: str, path: str, *arguments: str, json_out: bool = False, **given: Any) -> Any:
    """The service's answer; the emulator keeps objects in folders, and has no such names."""
    assert method == "GET"
    path = path.format(*map(gcsfs.core.quote, arguments))
    if "/o/" in path:
        name = unquote(urlparse(path).path.split("/o/", 1)[1])
        if name not in OBJECTS:
            raise FileNotFoundError(name)
        return _told(name) if json_out else ({}, OBJECTS[name])
    given |= given.pop("params", None) or {}
    prefix, delimiter = given.get("prefix") or "", given.get("delimiter") or ""
    below = [name.removeprefix(prefix) for name in sorted(OBJECTS) if name.startswith(prefix)]
    folders = {f"{prefix}{rest.split(delimiter)[0]}{delimiter}" for rest in below if delimiter and delimiter in rest}
    files = [_told(prefix + rest) for rest in below if not (delimiter and delimiter in rest)]
    return {"kind": "storage#objects", "items": files, "prefixes": sorted(folders)}


def _told(name: str) -> dict[str, str]:
    of_all = {"kind": "storage#object", "generation": "1", "etag": "x", "updated": "2026-01-01T00:00:00.000Z"}
    return of_all | {"name": name, "size": str(len(OBJECTS[name]))}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's copies go: beside a folder of somebody else's."""
    monkeypatch.setattr(gcsfs.GCSFileSystem, "_call", answered)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon", "use_listings_cache": False})
    gcsfs.GCSFileSystem.clear_instance_cache()
    folder = tmp_path / "copies"
    for name in ("copies", "victim"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_file_that_is_read_stays_among_the_copies(copies: Path) -> None:
    """It was written over any file of this user's."""
    assert {path.name for path in fetched("gs://bucket/good").rglob("*")} == {"registry.jsonl", "more"}
    with pytest.raises(StorageError, match=r"gs://bucket/bad/\.\. is no name of a file; remove that object"):
        fetched("gs://bucket/bad")
    assert list((copies.parent / "victim").iterdir()) == []


@pytest.mark.asyncio
async def test_a_run_that_goes_on_fetches_nothing_from_elsewhere(copies: Path) -> None:
    with pytest.raises(StorageError, match="is no name of a file"):
        async with mirrored(location("gs://bucket/run")):
            pass
    assert list((copies.parent / "victim").iterdir()) == []


def test_what_is_a_name() -> None:
    assert all(map(names_itself, ("a", "...", "a.b", "ä b", "~")))
    assert not any(map(names_itself, ("", ".", "..", "a/b", "a\\b", "a\0b", "/")))
