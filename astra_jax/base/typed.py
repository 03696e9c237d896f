"""Typed decoding: JSON, MessagePack and plain values into structs, from any number of threads.

msgspec (0.22) inspects a struct's fields at the first use of the type, and other threads see a partial result. Two
threads that do so at once crash the process with a segmentation fault, in a decoder's first use and in
`msgspec.convert`. Here one thread inspects a type before anybody decodes with it. So nothing else in the project makes
msgspec's decoders, or passes it a type to decode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from astra_jax.base.nesting import MOST_NESTING, check_nesting

T = TypeVar("T")

_looking = threading.RLock()
_MOST_KINDS = 1024
"""Maximum number of cached types; types of answers are made during a run."""


def _looked_at(decoder: Callable[[Any], T]) -> Callable[[Any], T]:
    def made(kind: Any) -> T:
        with _looking:
            return decoder(kind)

    return lru_cache(_MOST_KINDS)(made)


_json: Callable[[Any], msgspec.json.Decoder[Any]] = _looked_at(msgspec.json.Decoder)
_msgpack: Callable[[Any], msgspec.msgpack.Decoder[Any]] = _looked_at(msgspec.msgpack.Decoder)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the JSON decoder of `kind`. Raises `TypeError`: msgspec does not support the type."""
    return _json(kind)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the MessagePack decoder of `kind`. Raises `TypeError`: msgspec does not support the type."""
    return _msgpack(kind)


def decode_json(data: bytes | msgspec.Raw | str, kind: type[T]) -> T:
    """Return the value that a JSON text holds, which a stranger may have written.

    Raises:
        msgspec.ValidationError: it is JSON but not a `kind`; the message names the field.
        msgspec.DecodeError: it is not JSON, or nests deeper than `astra_jax.base.nesting.MOST_NESTING`.
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
    """Decode a MessagePack value. Raises as `decode_json` does."""
    return _msgpack(kind).decode(data)


@overload
def convert_to(value: Any, kind: type[T]) -> T: ...
@overload
def convert_to(value: Any, kind: UnionType) -> Any: ...
def convert_to(value: Any, kind: Any) -> Any:
    """Convert plain dictionaries, lists, strings and numbers to `kind`. Raises `msgspec.ValidationError`: they do not
    fit."""
    _msgpack(kind)
    return msgspec.convert(value, kind)


def value_or_json(given: Any, kind: type[T]) -> T:
    """Convert a value to `kind`; text is decoded as JSON. Raises as `decode_json` does."""
    return decode_json(given, kind) if isinstance(given, str) else convert_to(given, kind)
