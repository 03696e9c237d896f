"""Compiler options of programs: the chip's (`chips.CHIPS`), overridden by the run's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from astra_jax.base.errors import InputError
from astra_jax.base.progress import log_above_progress
from astra_jax.run.chips import chip_of
from astra_jax.run.hosts import is_first

_OPTION = re.compile(r"[a-z0-9_]{1,120}=\S{1,200}")

Options = tuple[tuple[str, str], ...]
"""(name, value), sorted, since they are part of a key."""


def compiler_options(device_kind: str, own: Sequence[str] = ()) -> Options:
    """Return the compiler options of programs for a device.

    Args:
        device_kind: JAX's name. A kind that is not in the table, such as a CPU, has no options of its own.
        own: NAME=VALUE each, overriding the chip's; NAME= uses the compiler's default.

    Raises:
        InputError: one is not NAME=VALUE.
    """
    chip = chip_of(device_kind)
    options = dict(chip.compiler_options) if chip is not None else {}
    for one in own:
        name, _, value = one.partition("=")
        if one == f"{name}=" and _OPTION.fullmatch(f"{one}x"):
            options.pop(name, None)
        elif _OPTION.fullmatch(one):
            options[name] = value
        else:
            raise InputError(f"compiler_options: {one!r} is not NAME=VALUE; write for example xla_jf_conv_fusion=true")
    return tuple(sorted(options.items()))


def check_options(own: Sequence[str], mesh: Mesh | None) -> None:
    """Raise an error for run options that the compiler of its devices does not accept.

    Raises:
        InputError: the option or its value is not supported; the message names it.
    """
    if not own:
        return
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    place = jax.sharding.SingleDeviceSharding(device)
    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=place))
    for one in own:
        options = dict(compiler_options(device.device_kind, [one]))
        name = one.partition("=")[0]
        try:
            nothing.compile({name: options[name]} if name in options else None)
        except jax.errors.JaxRuntimeError as error:
            first = str(error).splitlines()[0]
            raise InputError(f"compiler_options: {one!r}, on {device.device_kind}: {first}; leave it out") from None


class Program:
    """A jitted function with the compiler options of the devices that hold its first argument.

    `jax.jit` takes compiler options where it is called, and learns the devices only when the function is called.

    Args:
        function: the function to compile.
        settings: name of a static keyword argument whose value is a `TrainingConfig`. The function receives its
            `as_jit_key()`, so that runs that differ only in `HostOnly` settings share a program; the compiler gets its
            `compiler_options`. None: no argument is such a configuration.
        own: compiler options, NAME=VALUE each, that replace the chip's.
        jit_arguments: further arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        settings: str | None = None,
        own: Sequence[str] = (),
        **jit_arguments: Any,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._settings, self._own, self._of_jit = function, settings, tuple(own), jit_arguments
        self._jitted: dict[Options, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._with_jit_key(kwargs)
        return self._told(args, kwargs)(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile it for arguments of these shapes, types and shardings. A later call with such arguments compiles
        nothing."""
        kwargs = self._with_jit_key(kwargs)
        self._told(args, kwargs).lower(*args, **kwargs).compile()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower it as `jax.jit` does."""
        kwargs = self._with_jit_key(kwargs)
        return self._for(args, kwargs)[0].lower(*args, **kwargs)

    def cache_size(self) -> int:
        """Return the number of compiled programs."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _told(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        before = len(self._jitted)
        jitted, options = self._for(args, kwargs)
        if options and len(self._jitted) > before and is_first():
            told = ", ".join("=".join(one) for one in options)
            log_above_progress(f"{getattr(self._function, '__name__', 'a program')} is compiled with {told}")
        return jitted

    def _for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Options]:
        own = (*self._own, *(kwargs[self._settings].compiler_options if self._settings else ()))
        options = compiler_options(_device_kind(args), own)
        if options not in self._jitted:
            jitted = jax.jit(self._function, compiler_options=dict(options) or None, **self._of_jit)
            self._jitted.setdefault(options, jitted)  # two threads may be here at once
        return self._jitted[options], options

    def _with_jit_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self._settings is None else kwargs | {self._settings: kwargs[self._settings].as_jit_key()}


def program(**arguments: Any) -> Callable[[Callable[..., Any]], Program]:
    """Return a decorator that makes a `Program` with these arguments."""
    return functools.partial(Program, **arguments)


class CompiledAhead:
    """Programs that a thread compiles one by one, while the start of a run does other work.

    with CompiledAhead({"train_step": lambda: train_step.compile(...)}) as ahead:
        ...
        ahead.wait("train_step")
        train_step(...)

    Only one compiles at a time: a compiler uses all of the host's cores, and several hosts need the same order. Leaving
    `with` waits for the program being compiled, which cannot be cancelled; later ones are skipped.

    Args:
        jobs: by name; each compiles a program.
    """

    def __init__(self, jobs: Mapping[str, Callable[[], None]]) -> None:
        self._pool = ThreadPoolExecutor(1, "compiling")
        self._jobs: dict[str, Future[None]] = {name: self._pool.submit(job) for name, job in jobs.items()}

    def wait(self, name: str) -> None:
        """Wait until a program is compiled. Returns at once if it has not started or has failed; the caller then
        compiles it and sees the error."""
        job = self._jobs.pop(name, None)
        if job is None or job.cancel():
            return
        if (error := job.exception()) is not None:
            logging.info("%s was not compiled ahead: %s", name, error)

    def __enter__(self) -> CompiledAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _device_kind(args: tuple[Any, ...]) -> str:
    sharding = getattr(next(iter(jax.tree.leaves(args[:1])), None), "sharding", None)
    device = next(iter(sharding.device_set)) if sharding is not None else jax.devices()[0]
    kind: str = device.device_kind
    return kind
