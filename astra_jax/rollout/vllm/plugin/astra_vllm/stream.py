"""Reader of weights in a trainer's memory, from each of its hosts.

    tcp://HOST:PORT        an item: the trainer's first host, which names the others

A host lists its part of a version as boxes of leaves (`layout.py`), of at most 64 MiB, each with its SHA-256. The API
process pulls them from all hosts at once into the memory that the workers of every rank read. So each byte is sent once
per server, whatever its tensor parallelism.

A box with an unchanged digest is not requested, and for few changes only the changed numbers are sent. The digest
always covers the whole box. A box that does not match is requested again completely.

Servers pull rather than trainers push: a server opens no additional port, and receives only what it requested under its
lease.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from astra_vllm.layout import (
    DTYPES,
    Leaf,
    Parts,
    PolicyCheckpointError,
    Range,
    Shapes,
    Span,
    all_bytes,
    item_bytes,
    laid_out,
)
from astra_vllm.wire import Lost, NotTheTrainer, TrainerConnection

SCHEME = "tcp://"
CONNECTIONS = 16
"""Connections to all hosts of a trainer together, or one per host if there are more hosts. A single host gets a
quarter."""
TRIES = 3
SECONDS = 60.0
"""Timeout for receiving a byte from a host."""
MOST_BOX_BYTES = 256 << 20
_MOST_BOXES = 1 << 16
_MOST_HOSTS = 1 << 12
_SHOWN = 200
_BLOCK_BITS = 16


class Damaged(Exception):
    """The received data differ from what was announced."""


@dataclass(frozen=True)
class ListedBox:
    """Part of a leaf on one host.

    Attributes:
        number: the host's index of the box.
        ranges: start and end along each axis.
        digest: SHA-256 of its bytes, in the order of its axes.
    """

    number: int
    leaf: str
    ranges: Range
    digest: str


class PolicyStream:
    """A version that a trainer serves; only its list of boxes is read until it is compared with the model.

    Args:
        item: `tcp://HOST:PORT`.
        version: label, `RUN:UPDATE`.
        key: of syncs.

    Attributes:
        spans: all tensors in the order of their leaves; empty before `compare`.
        read_bytes: bytes received by `read` from all hosts, including failed boxes.

    Raises:
        PolicyCheckpointError: no trainer with the key and this version answers, or it lacks a part of a leaf.
    """

    def __init__(self, item: str, version: str, key: str) -> None:
        self.item, self._version, self._key = item[:_SHOWN], version, key
        self.spans: list[Span] = []
        self.read_bytes, self._counting = 0, threading.Lock()
        first = item.removeprefix(SCHEME).rstrip("/")
        if not _is_address(first):
            raise PolicyCheckpointError(f"{self.item!r} is not an address of a trainer: give tcp://HOST:PORT")
        found = self._listed(first)
        hosts = found["hosts"]
        if not isinstance(hosts, list) or not 0 < len(hosts) <= _MOST_HOSTS or not all(map(_is_address, hosts)):
            raise PolicyCheckpointError(f"{self.item} names no hosts: {str(hosts)[:_SHOWN]}")
        with ThreadPoolExecutor(min(CONNECTIONS, len(hosts))) as threads:
            every = [found, *threads.map(self._listed, hosts[1:])]
        self._leaves = _leaves(self.item, found)
        by_host = dict(zip([first, *hosts[1:]], every, strict=True))
        if other := [host for host, one in by_host.items() if one["leaves"] != found["leaves"]]:
            raise PolicyCheckpointError(f"{self.item} and its host {other[0]} have other leaves")
        self._boxes = {host: _boxes(host, one) for host, one in by_host.items()}
        _check_cover(self.item, self._leaves, [box for boxes in self._boxes.values() for box in boxes])
        self._failed = threading.Event()

    @property
    def bytes(self) -> int:
        """Total bytes of all tensors."""
        return all_bytes(self.spans)

    def compare(self, expected: Shapes, optional: Shapes, dtype: str) -> None:
        """See `PolicyCheckpoint.compare`."""
        self.spans = laid_out(self.item, len(self._leaves), self._leaves, expected, optional, dtype)

    def read(self, buffer: memoryview, parts: Parts) -> None:
        """Fill a buffer in the order of `spans`.

        Args:
            buffer: of `self.bytes` bytes.
            parts: digests of its contents, updated even if this raises.

        Raises:
            PolicyCheckpointError: names host and leaf of the part that could not be read.
        """
        whole, arrays, start = np.frombuffer(buffer, np.uint8), {}, 0
        for leaf in self._leaves:
            size = item_bytes(leaf.dtype)
            end = start + math.prod(leaf.shape) * size
            arrays[leaf.name] = start, whole[start:end].view(f"u{size}").reshape(leaf.shape)
            start = end
        self._failed.clear()
        each = max(1, min(CONNECTIONS // 4, CONNECTIONS // len(self._boxes)))
        with ThreadPoolExecutor(each * len(self._boxes), thread_name_prefix="pull") as threads:
            done = []
            for host, boxes in self._boxes.items():
                missing = deque(box for box in boxes if parts.get((arrays[box.leaf][0], box.ranges)) != box.digest)
                done += [threads.submit(self._pull, host, missing, arrays, parts) for _ in range(each)]
        for one in done:
            one.result()

    def _pull(
        self, host: str, missing: deque[ListedBox], arrays: dict[str, tuple[int, np.ndarray]], parts: Parts
    ) -> None:
        """Pull boxes from a host until none is left."""
        connection: TrainerConnection | None = None
        try:
            while missing and not self._failed.is_set():
                try:
                    box = missing.popleft()
                except IndexError:  # another thread took the last one
                    return
                for left in reversed(range(TRIES)):
                    try:
                        connection = connection or TrainerConnection(host, self._key, SECONDS)
                        self._take(connection, host, box, arrays[box.leaf], parts)
                        break
                    except (Lost, Damaged) as error:
                        if connection is not None:
                            connection.close()
                        connection = None
                        if not left:
                            raise PolicyCheckpointError(
                                f"{self.item}: leaf {box.leaf} could not be had of {host}: {error}"
                            ) from None
                        time.sleep(0.2)
        except NotTheTrainer as error:
            self._failed.set()
            raise PolicyCheckpointError(f"{self.item}: {error}") from None
        except BaseException:
            self._failed.set()
            raise
        finally:
            if connection is not None:
                connection.close()

    def _take(
        self, connection: TrainerConnection, host: str, box: ListedBox, array: tuple[int, np.ndarray], parts: Parts
    ) -> None:
        start, leaf = array
        place = leaf[tuple(slice(*one) for one in box.ranges)]
        has = parts.pop((start, box.ranges), "")  # its contents are undefined from here
        answer = self._answer(connection, host, {"want": self._version, "box": box.number, "has": has})
        size, form = answer.get("bytes"), answer.get("form")
        # In a leaf with several axes a box need not be contiguous.
        target = place if place.flags.c_contiguous else np.ascontiguousarray(place)
        if form == "whole" and size == target.nbytes:
            connection.fill(target.data)
        elif form == "changes" and isinstance(size, int) and 0 < size <= target.nbytes:
            changes = bytearray(size)
            connection.fill(memoryview(changes))
            apply_changes(target.reshape(-1), changes)
        else:
            raise Damaged(f"{form!r:.40} of {size!r:.20} bytes was announced for {target.nbytes}")
        with self._counting:
            self.read_bytes += size
        if hashlib.sha256(target.data).hexdigest() != box.digest:
            raise Damaged("it has not the digest that was announced")
        if target is not place:
            place[...] = target
        parts[start, box.ranges] = box.digest

    def _listed(self, address: str) -> dict[str, Any]:
        """Return a host's list of boxes of the version."""
        for left in reversed(range(TRIES)):
            try:
                connection = TrainerConnection(address, self._key, SECONDS)
                try:
                    return self._answer(connection, address, {"want": self._version})
                finally:
                    connection.close()
            except NotTheTrainer as error:
                raise PolicyCheckpointError(f"{self.item}: {error}") from None
            except Lost as error:
                if not left:
                    raise PolicyCheckpointError(f"{self.item}: {error}") from None
                time.sleep(0.2)
        raise AssertionError

    def _answer(self, connection: TrainerConnection, address: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = connection.ask(message)
        except (ValueError, RecursionError) as error:
            raise PolicyCheckpointError(f"{self.item}: {address} answers no JSON ({error})") from None
        if "error" in answer:
            raise PolicyCheckpointError(f"{self.item}: {address}: {str(answer['error'])[:_SHOWN]}")
        if "box" not in message and not {"hosts", "leaves", "boxes"} <= answer.keys():
            raise PolicyCheckpointError(f"{self.item}: {address} lists {json.dumps(answer)[:_SHOWN]}")
        return answer


def apply_changes(flat: np.ndarray, changes: bytes | bytearray) -> None:
    """Write changed numbers to their positions.

    Args:
        flat: [N] unsigned numbers; modified.
        changes: the number of changes in each block of 65,536 (uint32), the offset of each in its block (uint16), and
            its new value; all little-endian.

    Raises:
        Damaged: they do not match an array of this size.
    """
    blocks = -(-flat.size >> _BLOCK_BITS)
    counts = np.frombuffer(changes, "<u4", min(blocks, len(changes) // 4)).astype(np.int64)
    total = int(counts.sum())
    if len(changes) != 4 * blocks + total * (2 + flat.itemsize):
        raise Damaged(f"{len(changes)} bytes are no changes of {flat.size} numbers")
    low = np.frombuffer(changes, "<u2", total, 4 * blocks)
    where = np.repeat(np.arange(blocks) << _BLOCK_BITS, counts) + low
    if total and int(where.max()) >= flat.size:
        raise Damaged(f"a number beyond the {flat.size} would change")
    flat[where] = np.frombuffer(changes, f"<u{flat.itemsize}", total, 4 * blocks + 2 * total)


def _is_address(text: object) -> bool:
    if not isinstance(text, str) or len(text) > _SHOWN:
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and 0 < one < 1 << 48 for one in value)


def _leaves(item: str, found: dict[str, Any]) -> list[Leaf]:
    try:
        leaves = [Leaf(str(name), tuple(shape), str(dtype)) for name, (shape, dtype) in sorted(found["leaves"].items())]
        plain = all(_is_sizes(shape) for shape, _ in found["leaves"].values())
    except (AttributeError, TypeError, ValueError) as error:
        raise PolicyCheckpointError(f"{item} lists leaves in another form ({error!r})") from None
    if not plain or not leaves:
        raise PolicyCheckpointError(f"{item} lists no leaves, or one without a shape")
    return leaves


def _boxes(host: str, found: dict[str, Any]) -> list[ListedBox]:
    try:
        boxes = [
            ListedBox(number, str(leaf), tuple((int(low), int(high)) for low, high in ranges), str(digest))
            for number, (leaf, ranges, digest) in enumerate(found["boxes"])
        ]
    except (TypeError, ValueError) as error:
        raise PolicyCheckpointError(f"{host} lists boxes in another form ({error!r})") from None
    if len(boxes) > _MOST_BOXES:
        raise PolicyCheckpointError(f"{host} lists {len(boxes)} boxes, more than {_MOST_BOXES}")
    return boxes


def _check_cover(item: str, leaves: Sequence[Leaf], boxes: Sequence[ListedBox]) -> None:
    """Check that each number of each leaf is in exactly one box.

    Raises:
        PolicyCheckpointError: names the first leaf for which this is false.
    """
    by_leaf: dict[str, list[Range]] = {leaf.name: [] for leaf in leaves}
    for box in boxes:
        if box.leaf not in by_leaf:
            raise PolicyCheckpointError(f"{item}: a box is of {box.leaf[:_SHOWN]!r}, which is not a leaf")
        by_leaf[box.leaf].append(box.ranges)
    for leaf in leaves:
        ranges, rank = by_leaf[leaf.name], len(leaf.shape)
        size = item_bytes(leaf.dtype) if leaf.dtype in DTYPES else 1
        held = 0
        for one in ranges:
            inside = len(one) == rank and all(
                0 <= low < high <= n for (low, high), n in zip(one, leaf.shape, strict=True)
            )
            if not inside or (count := math.prod(high - low for low, high in one)) * size > MOST_BOX_BYTES:
                raise PolicyCheckpointError(f"{item}: leaf {leaf.name} of shape {list(leaf.shape)} has the box {one}")
            held += count
        if held != math.prod(leaf.shape) or _any_overlap(ranges):
            raise PolicyCheckpointError(
                f"{item}: leaf {leaf.name}: its boxes are not each of its {math.prod(leaf.shape)} numbers once"
            )


def _any_overlap(ranges: Sequence[Range]) -> bool:
    bounds = np.asarray(ranges, np.int64)  # [boxes, axes, 2]
    low, high = bounds[..., 0], bounds[..., 1]
    return any(
        bool(((low[i + 1 :] < high[i]) & (low[i] < high[i + 1 :])).all(axis=1).any()) for i in range(len(ranges) - 1)
    )
