"""Publishing of weights that rollout servers pull from the trainer's memory, without files.
    publisher = DirectPublisher(model, key=..., run="r1", host="10.0.0.1")
    item = publisher.publish(params, 1)         # tcp://10.0.0.1:41207; `VLLMConfig.sync="direct"` hands it over

Each host copies its own devices' part of a version, one replica of each shard, and serves it over TCP (`wire.py`). It
serves boxes: contiguous parts of leaves of at most `BOX_BYTES`, each with its SHA-256. Servers get the first host's
address, and that host names the others. A server pulls the boxes it lacks from each (`plugin/astra_vllm/stream.py`).

If a server has the previous version of a box, only the changed numbers are sent, unless that is more than half of the
box. After a step of 1e-6 about a hundredth of the numbers differ in bfloat16. With adapters, which are merged here,
only the adapted matrices differ. So servers have the trainer's exact bits and need no adapters. The digest of the whole
resulting box checks a change.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from astra_jax.base.access import is_loopback
from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from astra_jax.base.settings import SettingError
from astra_jax.models.model import Model, Params
from astra_jax.rollout.vllm.publishing import stacked_hf_tensors
from astra_jax.rollout.vllm.wire import Answer, WeightServer
from astra_jax.run.hosts import allgather_bytes

BOX_BYTES = 64 << 20
_BLOCK_BITS = 16
_LAGGING_SECONDS = 45.0
"""Seconds that a server waits for a version that the first host has copied and this host has not."""
_MOST_ADDRESS = 512
_SAMPLE = 4096
_MOST_CHANGED = 0.3
"""Share of changed numbers in a sample of a box above which its changes are not computed."""

Range = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Box:
    """Part of a leaf.

    Attributes:
        ranges: start and end along each axis of the leaf.
        numbers: [N] unsigned integers of the leaf's bit width.
        digest: their SHA-256.
        changes: see `changes_of`; None if there is no previous box or too many changes.
        before: digest of the box to which the changes apply.
    """

    leaf: str
    ranges: Range
    numbers: np.ndarray
    digest: str
    changes: bytes | None
    before: str


@dataclass(frozen=True)
class _Version:
    leaves: dict[str, tuple[list[int], str]]
    boxes: list[_Box]


class DirectPublisher:
    """Publisher that serves a policy's weights from the memory of the trainer's hosts. Each host must create one and
    publish.

    Host memory: the published weights' bytes over the number of hosts, kept for returning servers (29.5 GB of Qwen3-14B
    in bfloat16 on four hosts: 7.4 GB). From the next `publish` until a server requests that version, as much again,
    plus at most half for the changes. On the devices there is a copy in the published dtype during the copy, as with
    `Publisher`.

    Args:
        model: the policy's config.
        key: of syncs; servers have the same (`ASTRA_SYNC_KEY_FILE`).
        run: the run's id; the first host's is used.
        host, port: of this machine, as servers reach it; port 0 lets the system choose.
        dtype: of the published weights.

    Raises:
        InputError: it cannot listen at that address.
    """

    def __init__(self, model: Model, *, key: str, run: str, host: str, port: int = 0, dtype: str = "bfloat16") -> None:
        self.model, self.dtype = model, dtype
        self._changed = threading.Condition()
        self._held: dict[int, _Version] = {}  # in order of publication
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._server = WeightServer(host, port, key, self._answer)
        every = allgather_bytes(f"{run} {self._server.address}".encode(), _MOST_ADDRESS)
        self._run = every[0].decode().partition(" ")[0]
        self._hosts = [one.decode().partition(" ")[2] for one in every]

    def publish(self, params: Params, version: int) -> str:
        """Start copying a version; `params` may be donated once this returns.

        Args:
            version: replaces an existing version of the same number.

        Returns:
            The address from which servers take it, once `wait` has returned.
        """
        with self._changed:
            for old in [*self._held][:-1]:
                del self._held[old]
        tensors = _apart(params, model=self.model, dtype=self.dtype)
        for tensor in tensors.values():
            for shard in tensor.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
        self._pending = version, tensors
        return f"tcp://{self._hosts[0]}"

    def wait(self) -> None:
        """Wait until the published version can be pulled."""
        if self._pending is None:
            return
        (version, tensors), self._pending = self._pending, None
        with self._changed:
            before = next(reversed(self._held.values()), None)
        old = {} if before is None else {(box.leaf, box.ranges): box for box in before.boxes}
        leaves = {name: (list(tensor.shape), tensor.dtype.name) for name, tensor in tensors.items()}
        boxes: list[_Box] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="digest") as threads:
            for name in sorted(tensors):
                for shard in tensors.pop(name).addressable_shards:
                    if shard.replica_id == 0:  # one replica of each shard across all hosts
                        boxes += threads.map(partial(_boxed, old), _cut(name, shard))
        with self._changed:
            self._held.pop(version, None)
            self._held[version] = _Version(leaves, boxes)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        with self._changed:
            self._held.clear()

    def _answer(self, message: dict[str, Any]) -> Answer:
        """Answer a server that has the key."""
        label, number = message.get("want"), message.get("box")
        version = self._wanted(label)
        if isinstance(version, str):
            return {"error": version}, None
        if number is None:
            boxes = [(box.leaf, box.ranges, box.digest) for box in version.boxes]
            return {"hosts": self._hosts, "leaves": version.leaves, "boxes": boxes}, None
        if not isinstance(number, int) or not 0 <= number < len(version.boxes):
            return {"error": f"it has no box {number!r:.40}"}, None
        box = version.boxes[number]
        if box.changes is not None and message.get("has") == box.before:
            return {"form": "changes", "bytes": len(box.changes)}, memoryview(box.changes)
        return {"form": "whole", "bytes": box.numbers.nbytes}, box.numbers.data.cast("B")

    def _wanted(self, label: object) -> _Version | str:
        """Return the served version, or the reason why it is not served. Older versions are dropped."""
        run, _, update = str(label).rpartition(":")
        if run != self._run:
            return f"this is the run {self._run}, which has no weights {label!r:.100}"
        if not (update.isascii() and update.isdecimal() and len(update) < 20):
            return f"{label!r:.100} is not a label"
        number = int(update)
        with self._changed:
            if len(self._hosts) > 1 and number > max(self._held, default=-1):
                self._changed.wait_for(lambda: number in self._held, _LAGGING_SECONDS)
            if (found := self._held.get(number)) is None:
                there = ", ".join(f"{self._run}:{one}" for one in self._held) or "none yet"
                return f"weights {run}:{number} are not served (there are {there})"
            for old in list(itertools.takewhile(lambda one: one != number, self._held)):
                del self._held[old]
            return found


def listening_address(sources: Sequence[str], given: str = "") -> tuple[str, int]:
    """Return the address at which this host serves weights: the source address of its packets to the rollout servers.

    Args:
        sources: addresses of servers, see `VLLMConfig.urls`.
        given: overrides it: `HOST:PORT`, `HOST` or `:PORT`.

    Raises:
        SettingError: `given` has none of these forms.
        InputError: no server's address is routable.
    """
    try:
        parts = urlsplit(f"//{given}")
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        host, port = "", -1
    if port < 0 or (given and not (host or port)) or parts.path or parts.username:
        raise SettingError(f"--publish_address is {given[:200]!r}; give HOST:PORT, HOST or :PORT of this machine")
    if host:
        return host, port
    found, problem = [], "no server is named"
    for source in sources:
        to = urlsplit(source.removeprefix("dns+"))
        try:
            (family, kind, *_, address), *_ = socket.getaddrinfo(to.hostname, to.port or 80, type=socket.SOCK_DGRAM)
            with socket.socket(family, kind) as one:
                one.connect(address)  # sends nothing
                found.append(str(one.getsockname()[0]))
        except OSError as error:
            problem = f"{source}: {first_line(error)}"
    if not found:
        raise InputError(f"no way to the rollout servers is known ({problem}): give --publish_address")
    return next((one for one in found if not is_loopback(one)), found[0]), port


def changes_of(old: np.ndarray, new: np.ndarray) -> bytes | None:
    """Return the changes that turn `old` into `new`, or None if they exceed half of `new`. All parts are little-endian:

    - the number of changes in each block of 65,536 (uint32);
    - the offset of each change in its block (uint16);
    - the new value of each.

    Args:
        old, new: [N] unsigned numbers.
    """
    step = max(1, old.size // _SAMPLE)
    if np.mean(old[::step] != new[::step]) > _MOST_CHANGED:
        return None
    where = np.flatnonzero(old != new)
    blocks = -(-new.size >> _BLOCK_BITS)
    if 4 * blocks + where.size * (2 + new.itemsize) > new.nbytes // 2:
        return None
    counts = np.bincount(where >> _BLOCK_BITS, minlength=blocks)
    low = where & ((1 << _BLOCK_BITS) - 1)
    return b"".join((counts.astype("<u4").tobytes(), low.astype("<u2").tobytes(), new[where].tobytes()))


@partial(jax.jit, static_argnames=("model", "dtype"))
def _apart(params: Params, *, model: Model, dtype: str) -> dict[str, jax.Array]:
    """Return `stacked_hf_tensors` as copies, since a parameter's own buffer may be donated."""
    return {name: jnp.copy(x) for name, x in stacked_hf_tensors(params, model=model, dtype=dtype).items()}


def _cut(leaf: str, shard: jax.Shard) -> Iterator[tuple[str, Range, np.ndarray]]:
    """Yield the boxes of a shard: views of it on CPUs, otherwise of its copy in host memory."""
    data = np.ascontiguousarray(np.asarray(shard.data))
    numbers = data.view(f"u{data.itemsize}")
    origin = [one.start or 0 for one in shard.index]
    for ranges in pieces(data.shape, BOX_BYTES // data.itemsize):
        part = numbers[tuple(slice(*one) for one in ranges)]
        placed = tuple((low + at, high + at) for (low, high), at in zip(ranges, origin, strict=True))
        yield leaf, placed, part.reshape(-1)


def _boxed(before: dict[tuple[str, Range], _Box], part: tuple[str, Range, np.ndarray]) -> _Box:
    leaf, ranges, numbers = part
    digest = hashlib.sha256(numbers.data).hexdigest()
    old = before.get((leaf, ranges))
    if old is None or old.digest == digest or old.numbers.dtype != numbers.dtype:
        return _Box(leaf, ranges, numbers, digest, None, "")
    return _Box(leaf, ranges, numbers, digest, changes_of(old.numbers, numbers), old.digest)


def pieces(shape: Sequence[int], most: int) -> Iterator[Range]:
    """Cut an array into contiguous boxes of at most `most` numbers."""
    axis = next((i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= most), len(shape) - 1)
    step = max(1, most // math.prod(shape[axis + 1 :]))
    rest = tuple((0, n) for n in shape[axis + 1 :])
    for place in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            end = min(start + step, shape[axis])
            yield (*((i, i + 1) for i in place), (start, end), *rest)
