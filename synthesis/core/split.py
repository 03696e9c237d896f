"""Split conversations into a part to train on and a part that is held out.

The split depends on the conversations' content, the share and the seed alone. So it is the same for every batch size,
on any number of devices and hosts, for any order of the rows, and when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.datasets import Folder, each_record, read_card, write_once
from synthesis.core.records import Trajectory

_VERSION = 1
"""Version of the rule. With another number a dataset is split again."""


def split_conversations(path: Folder, share: float, seed: int, cache: Path) -> tuple[Path, Path]:
    """Return the folders of two datasets: the part to train on, and the held-out part. They are written if needed.

    Every record is in exactly one part. Equal conversations are in the same part. The held-out part has those with the
    smallest digests of seed and content, up to `share` of all records, rounded up.

    Args:
        path: a dataset of `Trajectory` records.
        share: of the held-out part, between 0 and 1.
        cache: the folder of such datasets.

    Raises:
        InputError: there are fewer than two different conversations.
        DatasetError: the dataset cannot be read, or the parts could not be written.
    """
    card = read_card(path)
    key = hashlib.sha256(json.dumps([_VERSION, card["digest"], share, seed]).encode()).hexdigest()[:32]
    digests = [_digest(record, seed) for record in each_record(path, Trajectory)]
    held = _held_out(digests, math.ceil(share * len(digests) - 1e-9))

    def part(name: str, is_held_out: bool) -> Path:
        chosen = (
            record
            for record, digest in zip(each_record(path, Trajectory), digests, strict=True)
            if (digest in held) is is_held_out
        )
        split = {"of": card["digest"], "share": share, "seed": seed, "part": name}
        source = card.get("source") or str(path)
        return write_once(cache / f"{key}-{name}", Trajectory, chosen, card={"source": source, "split": split})

    return part("train", False), part("held_out", True)


def _digest(record: Trajectory, seed: int) -> bytes:
    """Digest what a conversation shows to a model: its tools and messages, without its id and scores."""
    content = msgspec.json.encode([record.tools, record.messages])
    return hashlib.sha256(str(seed).encode() + b"\0" + content).digest()


def _held_out(digests: list[bytes], count: int) -> set[bytes]:
    """Return the digests of the held-out conversations. At least one conversation is left to train on."""
    rows = Counter(digests)
    if len(rows) < 2:
        raise InputError(f"{len(digests)} conversations, {len(rows)} of them different, cannot be split into two parts")
    held: set[bytes] = set()
    found = 0
    for digest in sorted(rows)[:-1]:
        if found >= count:
            break
        held.add(digest)
        found += rows[digest]
    return held
