"""Cache of dataset statistics, since counting tokenises each conversation and takes minutes for a real dataset.

The file is in the run's folder, named by a digest of all inputs: the dataset's digest, the tokenizer with its chat
format, the settings that affect examples, and the code version. If it is unreadable or does not match, the statistics
are counted and written again.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
from absl import logging

import astra_jax
from astra_jax.base.files import location, write_text
from astra_jax.base.typed import decode_json
from astra_jax.run.digests import digest_of_json
from astra_jax.run.hosts import is_first
from astra_jax.sft.data import DataConfig, DataStats, scan
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, check_dataset
from synthesis.core.records import Trajectory

FOLDER = "statistics"
_WITHOUT_EFFECT = ("rename_entities", "self_generated_ratio", "workers", "packing_bins", "seed")
"""Settings that affect only the order and naming of examples, not the statistics."""


def kept_statistics(path: Folder, tokenizer: ChatTokenizer, config: DataConfig, workdir: Folder) -> DataStats:
    """Return the result of `scan`, cached in the run's folder. On several hosts the first one writes it.

    Args:
        workdir: gets `statistics/`.

    Raises:
        DatasetError: as `scan`.
        StorageError, OSError: the file could not be written.
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
    except (ValueError, RecursionError) as error:  # includes errors of msgspec and json
        logging.warning("%s has changed since it was counted (%s); it is counted again", file, error)
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
    """Parse the file. Raises `ValueError` if it is damaged or does not match."""
    kept = decode_json(content, _Kept)
    if kept.of != of:
        raise ValueError("it is of other data")
    if digest_of_json(dataclasses.asdict(kept.stats)) != kept.digest:
        raise ValueError("its digest is another")
    return kept.stats
