"""What a dataset gives under a configuration, kept: to count it each conversation is tokenised, minutes for a real set.

Kept below the run's folder under a digest of all that it depends on: the dataset's own digest, the tokenizer with its
chat format, the settings that change an example, and this version of the code. What cannot be read, or is of something
else, is counted anew and written again.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
from absl import logging

import astra_jax
from astra_jax.run.digests import digest_of_json
from astra_jax.run.hosts import is_first
from astra_jax.sft.data import DataConfig, DataStats, scan
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, check_dataset
from synthesis.core.files import location, write_text
from synthesis.core.records import Trajectory
from synthesis.core.typed import decode_json

FOLDER = "statistics"
_WITHOUT_EFFECT = ("rename_entities", "rehearsed", "workers", "packing_bins", "seed")
"""Settings that decide in which order examples come and how they are named, of which nothing is counted."""


def kept_statistics(path: Folder, tokenizer: ChatTokenizer, config: DataConfig, workdir: Folder) -> DataStats:
    """What `scan` counts; from the run's folder where it was counted before. On several hosts the first one writes.

    Args:
        workdir: gets `statistics/`.

    Raises:
        DatasetError: as `scan`.
        StorageError, OSError: it could not be written.
    """
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in _WITHOUT_EFFECT}
    of = {
        "dataset": check_dataset(path, Trajectory)["digest"],
        "tokenizer": tokenizer.digest,
        "settings": settings,
        "version": astra_jax.__version__,
    }
    file = location(workdir) / FOLDER / f"{digest_of_json(of)[:32]}.json"
    try:
        return _read(file.read_bytes(), of)
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError) as error:  # msgspec's and json's too
        logging.warning("%s is not what was counted (%s); it is counted anew", file, error)
    stats = scan(path, tokenizer, config)
    if is_first():
        counted = dataclasses.asdict(stats)
        write_text(file, json.dumps({"of": of, "stats": counted, "digest": digest_of_json(counted)}) + "\n")
    return stats


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    of: dict[str, Any]
    stats: DataStats
    digest: str


def _read(content: bytes, of: dict[str, Any]) -> DataStats:
    """Raises `ValueError`: it is damaged, or of something else."""
    kept = decode_json(content, _Kept)
    if kept.of != of:
        raise ValueError("it is of other data")
    if digest_of_json(dataclasses.asdict(kept.stats)) != kept.digest:
        raise ValueError("its digest is another")
    return kept.stats
