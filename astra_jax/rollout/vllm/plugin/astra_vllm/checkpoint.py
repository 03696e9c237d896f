"""Reading what the trainer published: an Orbax item whose leaves are Hugging Face tensors, stacked over layers.

A leaf's name has a `{}` for each stacked axis: `model.layers.{}.mlp.up_proj.weight` of shape [28, 3072, 1024] holds 28
tensors of [3072, 1024].
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

_MARKER = "_CHECKPOINT_METADATA"
_ITEM_METADATA = "_METADATA"
DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that are taken; tensorstore and torch have the same names for them."""


class PolicyCheckpointError(Exception):
    """The checkpoint cannot be used; the message names the first thing that is wrong with it."""


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in the buffer that `PolicyCheckpoint.read` fills.

    Attributes:
        name: Hugging Face's.
        dtype: of `DTYPES`.
        start: first byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return 4 if dtype == "float32" else 2


class PolicyCheckpoint:
    """An opened item; only its metadata have been read.

    Args:
        item: a folder, or a URL that tensorstore knows (`gs://`, `s3://`).

    Raises:
        PolicyCheckpointError: nothing there, not committed, or not an item of the expected form.
    """

    def __init__(self, item: str) -> None:
        self.item = item.rstrip("/")
        self._base = self.item if re.match(r"^[a-z0-9]+://", self.item) else "file://" + str(Path(self.item).absolute())
        # Files are mapped: read into buffers first, 0.9 GB take 0.8 s instead of 0.2, most of it in page faults.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_mode": {"mode": "memmap"}})
        self._require_commit()
        metadata = self._json(f"{self._base}/", _ITEM_METADATA)
        try:
            keys = [
                tuple(str(key["key"]) for key in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()
            ]
            driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        except (KeyError, TypeError, AttributeError) as error:
            raise PolicyCheckpointError(f"{self.item}: {_ITEM_METADATA} is not of an Orbax item ({error!r})") from None
        if nested := [key for key in keys if len(key) != 1]:
            raise PolicyCheckpointError(
                f"{self.item}: leaf {'.'.join(nested[0])} is nested; a published policy has leaves named "
                "as Hugging Face names its tensors. Give the `params` item that the trainer's Publisher wrote"
            )
        self._leaves = {key[0]: self._open(key[0], driver) for key in sorted(keys)}
        self.spans = list(self._spans())

    def _require_commit(self) -> None:
        parent = self._base.rpartition("/")[0]
        if "orbax-checkpoint-tmp" in parent or "orbax-checkpoint-tmp" in self._base:
            raise PolicyCheckpointError(f"{self.item} is still being written: give its final path")
        marker = self._json(f"{parent}/", _MARKER)
        if not marker.get("commit_timestamp_nsecs"):
            raise PolicyCheckpointError(f"{self.item} was not committed: {_MARKER} has no commit_timestamp_nsecs")

    def _json(self, base: str, name: str) -> dict[str, Any]:
        try:
            value = ts.KvStore.open(base).result().read(name).result().value
            if not value:
                raise PolicyCheckpointError(f"{base}{name} is not there: no checkpoint, or one that was not finished")
            content = json.loads(value)
        except (ValueError, OSError) as error:
            raise PolicyCheckpointError(f"{base}{name} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise PolicyCheckpointError(f"{base}{name} is not a JSON object")
        return content

    def _open(self, name: str, driver: str) -> ts.TensorStore:
        store = {"driver": "ocdbt", "base": f"{self._base}/", "path": f"{name}/"}
        try:
            array = ts.open({"driver": driver, "kvstore": store}, open=True, read=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise PolicyCheckpointError(f"{self.item}: leaf {name} cannot be opened: {error}") from None
        if array.dtype.name not in DTYPES:
            raise PolicyCheckpointError(f"{self.item}: leaf {name} is {array.dtype.name}; publish {', '.join(DTYPES)}")
        if name.count("{}") > array.rank:
            raise PolicyCheckpointError(f"{self.item}: leaf {name} has only {array.rank} axes")
        return array

    def _spans(self) -> Iterator[Span]:
        start = 0
        for name, array in self._leaves.items():
            stacked = name.count("{}")
            shape = tuple(array.shape)
            for place in itertools.product(*map(range, shape[:stacked])):
                span = Span(name.format(*place), shape[stacked:], array.dtype.name, start)
                yield span
                start += span.bytes

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return self.spans[-1].start + self.spans[-1].bytes if self.spans else 0

    def compare(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Check every tensor's name and shape.

        Args:
            expected: the server's model.
            optional: names that may be there too.

        Raises:
            PolicyCheckpointError: names the first tensor that is missing, left over or of another shape.
        """
        found = {span.name: span.shape for span in self.spans}
        for name, shape in sorted(expected.items()):
            if name not in found:
                raise PolicyCheckpointError(
                    f"{self.item}: tensor {name} is missing; the model's has shape {list(shape)}"
                )
            if found[name] != shape:
                raise PolicyCheckpointError(
                    f"{self.item}: tensor {name} has shape {list(found[name])}, the model's has {list(shape)}"
                )
        if left := sorted(set(found) - set(expected) - optional):
            raise PolicyCheckpointError(f"{self.item}: tensor {left[0]} is not part of the model")

    def read(self, buffer: memoryview) -> None:
        """Read all tensors, in the order of `spans`; every chunk is read, so a damaged one is noticed here.

        Args:
            buffer: of `self.bytes` bytes.

        Raises:
            PolicyCheckpointError: names the leaf that cannot be read.
        """
        whole = np.frombuffer(buffer, np.uint8)
        reads: list[tuple[str, Any]] = []
        start = 0
        for name, array in self._leaves.items():
            count = math.prod(array.shape) * item_bytes(array.dtype.name)
            target = whole[start : start + count].view(array.dtype.numpy_dtype).reshape(array.shape)
            reads.append((name, ts.array(target, context=self._context).write(array)))
            start += count
        errors = []
        for name, done in reads:  # all of them: the buffer is used again
            try:
                done.result()
            except (ValueError, OSError) as error:
                errors.append(f"{self.item}: leaf {name} cannot be read: {error}")
        if errors:
            raise PolicyCheckpointError(errors[0])
