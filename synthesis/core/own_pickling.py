"""Pickle a user's objects for processes of their own (cloudpickle)."""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, Final

import cloudpickle

from synthesis.core.own_process import named

_LOCK: Final = type(threading.Lock())
_RLOCK: Final = type(threading.RLock())
_CACHED: Final = type(functools.lru_cache(abs))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with locks, which arrive unlocked, and caches of functions that it pickles by value, empty."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _LOCK:
            return threading.Lock, ()
        if kind is _RLOCK:
            return threading.RLock, ()
        if kind is _CACHED and ("<locals>" in obj.__qualname__ or obj.__module__ == "__main__"):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def by_value(value: Any) -> bytes:
    """Pickle a value with everything that another process could not import. Raises whatever its own code raises."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def pickling_problem(value: Any) -> str:
    """Return why a value cannot be pickled; "" where it can. Nothing is kept of the pickle, however large."""
    try:
        _Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever __reduce__ and __getstate__ raise
        return named(error)
    return ""
