"""Data read as a type: JSON, MessagePack and plain values into structs, from any number of threads.

msgspec (0.22) looks at a struct's fields when the type is first asked for, and other threads see what it has of them by
then: two that ask at once end the process by a segmentation fault, in a decoder's first use and in `msgspec.convert`
alike. Here a type is looked at by one thread, before anybody reads by it. So nothing else in the project makes
msgspec's decoders, or gives it a type to read by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from sandbox.protocol import MOST_NESTING, check_nesting

T = TypeVar("T")

_looking = threading.RLock()
_MOST_KINDS = 1024
"""How many types are kept at hand; forms of answers are made while a run goes on."""


def _looked_at(decoder: Callable[[Any], T]) -> Callable[[Any], T]:
    def made(kind: Any) -> T:
        with _looking:
            return decoder(kind)

    return lru_cache(_MOST_KINDS)(made)


_json: Callable[[Any], msgspec.json.Decoder[Any]] = _looked_at(msgspec.json.Decoder)
_msgpack: Callable[[Any], msgspec.msgpack.Decoder[Any]] = _looked_at(msgspec.msgpack.Decoder)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """What decodes JSON as `kind`. Raises `TypeError`: msgspec reads nothing as such a type."""
    return _json(kind)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """What decodes MessagePack as `kind`. Raises `TypeError`: msgspec reads nothing as such a type."""
    return _msgpack(kind)


def decode_json(data: bytes | msgspec.Raw | str, kind: type[T]) -> T:
    """Return the value that a JSON text holds, which a stranger may have written.

    Raises:
        msgspec.ValidationError: it is JSON but not a `kind`; the message names the field.
        msgspec.DecodeError: it is not JSON, or nests deeper than `sandbox.protocol.MOST_NESTING`.
    """
    if isinstance(data, str):
        brackets = data.count("[") + data.count("{")
    else:
        data = bytes(data)
        brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_NESTING:
        decode_any_json(data)
    return json_decoder(kind).decode(data)


def decode_any_json(data: bytes | str) -> Any:
    """Return the plain value that a JSON text holds. Raises as `decode_json` does."""
    try:
        return check_nesting(msgspec.json.decode(data))
    except RecursionError:
        raise msgspec.DecodeError(f"it is nested too deeply, more than {MOST_NESTING} levels") from None


@overload
def decode_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: bytes | bytearray | memoryview, kind: UnionType) -> Any: ...
def decode_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """The value that is written in MessagePack. Raises as `decode_json` does."""
    return _msgpack(kind).decode(data)


@overload
def convert_to(value: Any, kind: type[T]) -> T: ...
@overload
def convert_to(value: Any, kind: UnionType) -> Any: ...
def convert_to(value: Any, kind: Any) -> Any:
    """Plain dictionaries, lists, strings and numbers as `kind`. Raises `msgspec.ValidationError`: they are none."""
    _msgpack(kind)
    return msgspec.convert(value, kind)


def value_or_json(given: Any, kind: type[T]) -> T:
    """What is given, as `kind`, or what the JSON says that is given as text. Raises as `decode_json` does."""
    return decode_json(given, kind) if isinstance(given, str) else convert_to(given, kind)
