"""Reader of published weights: an Orbax item whose leaves are named as in `layout.py`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from astra_vllm.access import SyncRoot
from astra_vllm.layout import Leaf, Parts, PolicyCheckpointError, Shapes, Span, all_bytes, item_bytes, laid_out

_SHOWN = 200
_MOST_METADATA_BYTES = 16 << 20
_LEAF = re.compile(r"[A-Za-z0-9_]+(?:\.(?:[A-Za-z0-9_]+|\{\}))*")
_PLAIN_CODECS = {"bytes", "transpose", "crc32c", "sharding_indexed"}
_MARKER = "_CHECKPOINT_METADATA"
_ITEM_METADATA = "_METADATA"


def _packers(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the compressors and filters in a zarr array's metadata that change the size of chunks."""
    if metadata.get("compressor"):
        yield str(metadata["compressor"].get("id"))
    yield from (str(one.get("id")) for one in metadata.get("filters") or ())
    for codec in metadata.get("codecs") or ():
        if codec["name"] not in _PLAIN_CODECS:
            yield str(codec["name"])
        configuration = codec.get("configuration") or {}
        for inner in ("codecs", "index_codecs"):
            yield from _packers({"codecs": configuration.get(inner)})


class PolicyCheckpoint:
    """An item of which only metadata are read until it is compared with the model.

    Args:
        item: a folder, or `gs://BUCKET/FOLDER`.
        root: the folder that must contain it.

    Attributes:
        spans: all tensors in reading order; empty before `compare`.
        read_bytes: bytes read by `read`.

    Raises:
        NotTaken: it is not below the root.
        PolicyCheckpointError: nothing is there, it was not committed, or it is not of the expected form.
    """

    def __init__(self, item: str, root: SyncRoot) -> None:
        self.item = item.rstrip("/")[:_SHOWN]
        self._store = root.store(item)
        # Files are memory-mapped: for 0.9 GB, reading into buffers takes 0.8 s instead of 0.2, mostly page faults.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_mode": {"mode": "memmap"}})
        self._require_commit()
        metadata = self._json(self._store, _ITEM_METADATA)
        try:
            keys = [
                tuple(str(key["key"]) for key in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()
            ]
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        except (KeyError, TypeError, AttributeError) as error:
            raise PolicyCheckpointError(f"{self.item}: {_ITEM_METADATA} is not of an Orbax item ({error!r})") from None
        for key in keys:
            if len(key) != 1 or not _LEAF.fullmatch(key[0]):
                raise PolicyCheckpointError(
                    f"{self.item}: leaf {'.'.join(key)[:_SHOWN]!r} is nested, or no name; a published policy has "
                    "leaves named as Hugging Face names its tensors. Give the `params` item that the trainer's "
                    "Publisher wrote"
                )
        self._names = sorted({key[0] for key in keys})
        self._leaves: dict[str, ts.TensorStore] = {}
        self.spans: list[Span] = []
        self.read_bytes = 0

    def _require_commit(self) -> None:
        folder = self._store["path"].rstrip("/").rpartition("/")[0]
        if "orbax-checkpoint-tmp" in self._store["path"]:
            raise PolicyCheckpointError(f"{self.item} is still being written: give its final path")
        marker = self._json({**self._store, "path": f"{folder}/"}, _MARKER)
        if not marker.get("commit_timestamp_nsecs"):
            raise PolicyCheckpointError(f"{self.item} was not committed: {_MARKER} has no commit_timestamp_nsecs")

    def _json(self, store: dict[str, Any], name: str) -> dict[str, Any]:
        try:
            path = Path(store["path"], name)
            if store["driver"] == "file" and path.exists() and path.stat().st_size > _MOST_METADATA_BYTES:
                raise PolicyCheckpointError(f"{path} has more than the {_MOST_METADATA_BYTES} bytes of any metadata")
            value = ts.KvStore.open(store).result().read(name).result().value
            if not value:
                raise PolicyCheckpointError(
                    f"{store['path']}{name} is not there: no checkpoint, or one that was not finished"
                )
            content = json.loads(value)
        except (ValueError, OSError, RecursionError) as error:
            raise PolicyCheckpointError(f"{store['path']}{name} cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise PolicyCheckpointError(f"{store['path']}{name} is not a JSON object")
        return content

    def _open(self, name: str) -> ts.TensorStore:
        store = {"driver": "ocdbt", "base": self._store, "path": f"{name}/"}
        # By default tensorstore reads missing chunks as zeros.
        spec = {"driver": self._driver, "kvstore": store, "fill_missing_data_reads": False}
        try:
            array = ts.open(spec, open=True, read=True, context=self._context).result()
            metadata = array.spec().to_json()["metadata"]
        except (ValueError, OSError) as error:
            raise PolicyCheckpointError(f"{self.item}: leaf {name} cannot be opened: {error}") from None
        if packed := sorted(_packers(metadata)):
            raise PolicyCheckpointError(
                f"{self.item}: leaf {name} is stored with {packed[0]}, which may unpack to any size; publish it "
                "uncompressed"
            )
        layout = array.chunk_layout
        for chunk in (layout.read_chunk.shape, layout.write_chunk.shape):
            parts = chunk or (None,) * array.rank
            if any(part is None or part > max(whole, 1) for part, whole in zip(parts, array.shape, strict=True)):
                shape = list(array.shape)
                raise PolicyCheckpointError(f"{self.item}: leaf {name} of shape {shape} has larger chunks, {chunk}")
        return array

    @property
    def bytes(self) -> int:
        """Total bytes of all tensors."""
        return all_bytes(self.spans)

    def compare(self, expected: Shapes, optional: Shapes, dtype: str) -> None:
        """Check every tensor's name, shape and dtype, without allocating their size.

        Args:
            expected: the server's model.
            optional: tensors that may also be present.
            dtype: in which the model is served; the checkpoint must match, unless this is float32.

        Raises:
            PolicyCheckpointError: names the first tensor that is missing, unexpected or of another shape or dtype.
        """
        self.spans = laid_out(self.item, len(self._names), self._opened(), expected, optional, dtype)

    def _opened(self) -> Iterator[Leaf]:
        for name in self._names:
            array = self._leaves[name] = self._open(name)
            yield Leaf(name, tuple(array.shape), array.dtype.name)

    def read(self, buffer: memoryview, parts: Parts) -> None:
        """Read all tensors in the order of `spans`. Every chunk is read, so damage is detected here.

        Args:
            buffer: of `self.bytes` bytes.
            parts: digests of the buffer's earlier contents; cleared.

        Raises:
            PolicyCheckpointError: names the leaf that cannot be read.
        """
        parts.clear()
        whole = np.frombuffer(buffer, np.uint8)
        reads: list[tuple[str, Any]] = []
        start = 0
        for name, array in self._leaves.items():
            count = math.prod(array.shape) * item_bytes(array.dtype.name)
            target = whole[start : start + count].view(array.dtype.numpy_dtype).reshape(array.shape)
            reads.append((name, ts.array(target, context=self._context).write(array)))
            start += count
        errors = []
        for name, done in reads:  # wait for all, since the buffer is reused
            try:
                done.result()
            except (ValueError, OSError) as error:
                errors.append(f"{self.item}: leaf {name} cannot be read: {error}")
        if errors:
            raise PolicyCheckpointError(errors[0])
        self.read_bytes = start
