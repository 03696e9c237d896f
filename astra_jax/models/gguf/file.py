"""GGUF file: its metadata of a model, and its tensors one at a time.

The format, ggml's, in version 3: a magic, counts, key-value pairs, a table of tensors, and their data, each at an
offset. The header is parsed here, because files may be untrusted: an error names the bad key or tensor. The package
`gguf` decodes the blocks of quantised weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from astra_jax.base.errors import UserError

VERSIONS = (2, 3)
READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors, by ggml's names, that are converted to float32."""

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 16
"""Most keys, and most tensors; a model of a hundred layers has some thousands."""
_MOST_ITEMS = 1 << 22
"""Most items of an array; the largest vocabularies have a few hundred thousand tokens and merges."""
_LONGEST_TEXT = 1 << 24
"""Most bytes of a text; the longest are chat templates."""
_ALIGNMENT = 32


class GGUFError(UserError):
    """Error: a file is not GGUF, is damaged, or has something unsupported. The message names the key or the tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """Position and type of a tensor in the file.

    Attributes:
        shape: the slowest axis first, as in a Hugging Face checkpoint; ggml has the opposite order.
        kind: ggml's type, one of `READ`.
        start: offset of its data, in bytes from the start of the file.
        size: size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


class GGUFFile:
    """Header of a file, checked completely; tensors are read on request.

    Attributes:
        path: path of the file.
        metadata: the key-value pairs; arrays are lists.
        tensors: by name, in the file's order.

    Raises:
        GGUFError: it is not a GGUF file, or a key or tensor does not fit into it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            header = _Header(file, self.path, size)
            tensor_count, key_count = header.opening()
            self.metadata: dict[str, Any] = dict(header.pairs(key_count))
            entries = list(header.table(tensor_count))
            alignment = self.metadata.get("general.alignment", _ALIGNMENT)
            if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
                raise self.error("general.alignment", f"is {alignment!r}; it must be a power of two")
            data = -(-file.tell() // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            tensor = self._placed(name, shape, kind, data + offset)
            if tensor.start % alignment:
                raise self.error(name, f"begins at byte {tensor.start}, which is not a multiple of {alignment}")
            if tensor.start + tensor.size > size:
                raise self.error(name, f"ends at byte {tensor.start + tensor.size}, and the file at {size}")
            if name in self.tensors:
                raise self.error(name, "is in it twice")
            self.tensors[name] = tensor

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        gguf = _gguf()
        known = {one.value: one.name for one in gguf.GGMLQuantizationType}
        stored = known.get(kind, f"number {kind}")
        if stored not in READ:
            raise GGUFError(
                f"{self.path}: tensor {name} is of type {stored}; read are {', '.join(READ)}: take the model in one of "
                "these"
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
        if not 1 <= len(shape) <= 4 or not all(shape) or shape[-1] % block:
            raise self.error(name, f"of type {stored} has shape {list(shape)}, whose rows are no blocks of {block}")
        return StoredTensor(name, shape, stored, start, math.prod(shape) // block * block_bytes)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor in float32.

        Raises:
            GGUFError: it is missing, or has a number that is not finite.
        """
        gguf = _gguf()
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.error(name, "is missing")
        kind = gguf.GGMLQuantizationType[tensor.kind]
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        raw = np.fromfile(self.path, np.uint8, tensor.size, offset=tensor.start)
        if len(raw) < tensor.size:
            raise self.error(name, f"has {len(raw)} of {tensor.size} bytes")
        values = gguf.dequantize(raw.reshape(shape), kind)
        if not np.isfinite(values).all():
            raise self.error(name, "has a number that is not finite")
        return values

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key.

        Args:
            default: value if the key is missing; None is an error.

        Raises:
            GGUFError: the key is missing, or its value is of another type.
        """
        found = self.metadata.get(key, default)
        if found is None:
            raise self.error(key, "is missing", "key")
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.error(key, f"is {str(found)[:80]!r}, not what it is elsewhere", "key")
        return found

    def error(self, name: str, problem: str, what: str = "tensor") -> GGUFError:
        """Return an error about a tensor or a key."""
        return GGUFError(f"{self.path}: {what} {name[:200]} {problem}; copy the file again, or take another")


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise GGUFError("GGUF files are read with the package gguf: pip install 'astra-jax[gguf]'") from None
    return gguf


class _Header:
    """Reader of a header from start to end; it accepts no size beyond the file's own."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self._size = file, path, size
        self._at = "its beginning"

    def opening(self) -> tuple[int, int]:
        """Return the number of tensors and the number of keys."""
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise GGUFError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._number("I")
        if version not in VERSIONS:
            raise GGUFError(
                f"{self._path} is of version {version} of GGUF (or of another byte order); read are "
                f"{' and '.join(map(str, VERSIONS))}, little-endian: convert the model again"
            )
        counts = self._number("Q"), self._number("Q")
        for count, what in zip(counts, ("tensors", "keys"), strict=True):
            if count > _MOST_ENTRIES:
                raise self._error(f"says that there are {count} {what}")
        return counts

    def pairs(self, count: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for i in range(count):
            self._at = f"key number {i + 1} of {count}"
            key = self._text()
            self._at = f"key {key[:200]}"
            if key in seen:
                raise self._error("is there twice")
            seen.add(key)
            yield key, self._value(self._number("I"))

    def table(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yield name, shape, number of the type and offset of each tensor."""
        for i in range(count):
            self._at = f"tensor number {i + 1} of {count}"
            name = self._text()
            self._at = f"tensor {name[:200]}"
            dimensions = self._number("I")
            if dimensions > 4:
                raise self._error(f"has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))
            if math.prod(shape) > 1 << 40:
                raise self._error(f"has shape {list(reversed(shape))}, more than any file holds")
            yield name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self._reader(kind)()
        inner, count = self._number("I"), self._number("Q")
        if count > _MOST_ITEMS:
            raise self._error(f"has {count} items")
        read = self._reader(inner)
        return [read() for _ in range(count)]

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self._text
        if kind not in _SCALARS:
            raise self._error(f"has a value of type {kind}")
        return lambda: self._number(_SCALARS[kind])

    def _text(self) -> str:
        length = self._number("Q")
        if length > _LONGEST_TEXT:
            raise self._error(f"has a text of {length} bytes")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("has a text that is not UTF-8") from None

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise GGUFError(
                f"{self._path}: the file ends at byte {self._size}, in {self._at}: it is cut off; copy it again"
            )
        return data

    def _error(self, problem: str) -> GGUFError:
        return GGUFError(f"{self._path}: {self._at} {problem}; copy the file again, or take another")
