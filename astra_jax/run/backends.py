"""Start of JAX's backend, with errors that explain why it fails and how to fix it."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import re
import sys
from typing import NamedTuple

import jax

from astra_jax.base.errors import UserError
from astra_jax.base.terminal import say


class BackendError(UserError):
    """JAX cannot start its configured backend. The message says why, and what to install or set."""


class _Backend(NamedTuple):
    """Installation of a backend.

    Attributes:
        install: the command that installs its plugin.
        plugins: the distributions that may provide it.
        check: what to check if an installed plugin does not start.
    """

    install: str
    plugins: tuple[str, ...]
    check: str


_CUDA = _Backend(
    "pip install 'astra-jax[cuda]'",
    ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "Check that nvidia-smi lists a GPU, and that its driver is new enough for the plugin's CUDA",
)
_BACKENDS = {
    "cuda": _CUDA,
    "gpu": _CUDA,
    "rocm": _Backend("pip install 'jax[rocm7-local]'", ("jax-rocm7-plugin",), "Check that rocminfo lists a GPU"),
    "tpu": _Backend(
        "pip install 'astra-jax[tpu]'",
        ("libtpu",),
        "Check that this machine has a TPU, and that no other process uses it",
    ),
}
_NAMED = re.compile(r"[Bb]ackend:? '?([A-Za-z]\w*)'?")
_BEFORE = re.compile(r"Unable to initialize backend '\w+': ")
_BEHIND = (" (set JAX_PLATFORMS", " (you may need")
"""Starts of JAX's own advice after a reason."""


@functools.cache
def start_backend() -> None:
    """Start JAX's backend for later work. Warns if it is not the first one in JAX's settings.

    Raises:
        BackendError: it cannot start.
    """
    older = "JAX_PLATFORM_NAME"
    wanted = {"JAX_PLATFORMS": jax.config.values["jax_platforms"] or "", older: os.environ.get(older, "")}
    setting = " ".join(f"{name}={value}" for name, value in wanted.items() if value)
    names = [one for value in wanted.values() for one in value.split(",") if one]
    try:
        started = jax.devices()[0].client.platform
    except Exception as error:  # JAX raises many types, even an `AssertionError` without text
        raise BackendError(_explanation(str(error), setting, names)) from error
    aliases = {"gpu": ("cuda", "rocm"), "cuda": ("cuda", "gpu"), "rocm": ("rocm", "gpu")}
    if names and started not in aliases.get(names[0], names[:1]):
        say(f"warning: {setting}: JAX found no device of {names[0]}, and runs on {started}", file=sys.stderr)


def _explanation(text: str, setting: str, names: list[str]) -> str:
    found = _NAMED.search(text)
    first = names[0] if names else ""
    name = found[1] if found and len(names) != 1 else first
    reason = " ".join(text.split())
    if before := _BEFORE.match(reason):
        reason = reason[before.end() :]
    for advice in _BEHIND:
        reason = reason.partition(advice)[0]
    reason = reason.rstrip(".") or "it finds no device"
    what = f"{f'{setting}: ' if setting else ''}JAX cannot start {f'the backend {name}' if name else 'its backend'}"
    remedies = _remedies(name) if name else []
    return ". ".join([f"{what}: {reason}", *remedies, "To run on the processor, set JAX_PLATFORMS=cpu"])


def _remedies(name: str) -> list[str]:
    backend = _BACKENDS.get(name)
    if backend is None:
        near = difflib.get_close_matches(name, _BACKENDS, n=1)
        return [f"There is no backend {name}; {f'use {near[0]}' if near else 'JAX has cuda, rocm, tpu and cpu'}"]
    versions = {plugin: version for plugin in backend.plugins if (version := _version(plugin)) is not None}
    if not versions:
        return [f"Install its plugin: {backend.install}"]
    needed = _version("jaxlib")
    if name != "tpu" and (others := {plugin: one for plugin, one in versions.items() if one != needed}):
        unlike = ", ".join(f"{plugin} {version}" for plugin, version in others.items())
        return [f"jaxlib {needed} needs a plugin of its version, not {unlike}: {backend.install}"]
    return [backend.check, f"If so, install its plugin again: {backend.install}"]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
