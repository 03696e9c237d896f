"""What strangers name their objects in buckets, through Google's own client: nothing is written outside the copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from astra_jax.base.files import names_itself

READS = """
import asyncio, os, sys, tempfile
from urllib.parse import unquote, urlparse

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
import fsspec, gcsfs
from astra_jax.base.files import StorageError, location
from synthesis.core.mirror import fetched, mirrored

OBJECTS = {
    "good/registry.jsonl": b"{}",
    "good/more/registry.jsonl": b"{}",
    "bad/registry.jsonl": b"{}",
    "bad/../../victim/registry.jsonl": b"planted",
    "run/run.json": b"{}",
    "run/../victim/journal.sqlite": b"planted",
}

def told(name):
    of_all = {"kind": "storage#object", "generation": "1", "etag": "x", "updated": "2026-01-01T00:00:00.000Z"}
    return of_all | {"name": name, "size": str(len(OBJECTS[name]))}

async def answered(client, method, path, *arguments, json_out=False, **given):
    assert method == "GET"
    path = path.format(*map(gcsfs.core.quote, arguments))
    if "/o/" in path:
        name = unquote(urlparse(path).path.split("/o/", 1)[1])
        if name not in OBJECTS:
            raise FileNotFoundError(name)
        return told(name) if json_out else ({}, OBJECTS[name])
    given |= given.pop("params", None) or {}
    prefix, delimiter = given.get("prefix") or "", given.get("delimiter") or ""
    below = [name.removeprefix(prefix) for name in sorted(OBJECTS) if name.startswith(prefix)]
    folders = {f"{prefix}{rest.split(delimiter)[0]}{delimiter}" for rest in below if delimiter and delimiter in rest}
    files = [told(prefix + rest) for rest in below if not (delimiter and delimiter in rest)]
    return {"kind": "storage#objects", "items": files, "prefixes": sorted(folders)}

gcsfs.GCSFileSystem._call = answered
for name in ("gcs", "gs"):
    fsspec.config.conf[name] = {"token": "anon", "use_listings_cache": False}

async def goes_on():
    async with mirrored(location("gs://bucket/run")):
        print("fetched")

print(sorted(path.name for path in fetched("gs://bucket/good").rglob("*")))
for read in (lambda: fetched("gs://bucket/bad"), lambda: asyncio.run(goes_on())):
    try:
        print(read())
    except StorageError as error:
        print(error)
"""


def test_what_is_read_stays_among_the_copies(tmp_path: Path) -> None:
    """It was written over any file of this user's. The emulator keeps objects in folders, and has no such names, so the
    client's requests are answered here, in a process of its own: clients are made once in each."""
    (tmp_path / "copies").mkdir()
    (tmp_path / "victim").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "copies"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", READS]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout
    remedy = "is not the name of a file; remove that object, or give another folder"
    assert said.splitlines() == [
        "['more', 'registry.jsonl', 'registry.jsonl']",
        f"gs://bucket/bad/.. {remedy}",
        f"gs://bucket/run/.. {remedy}",
    ]
    assert list((tmp_path / "victim").iterdir()) == []


def test_what_is_a_name() -> None:
    assert all(map(names_itself, ("a", "...", "a.b", "ä b", "~")))
    assert not any(map(names_itself, ("", ".", "..", "a/b", "a\\b", "a\0b", "/")))
