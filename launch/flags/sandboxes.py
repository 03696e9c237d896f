"""Flags of every program that runs tool code: where it runs, and how strongly it must be isolated."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.flags import cli, shared

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox import Sandbox, SandboxPool

_TIER = shared.sandbox_tier()
_URLS = flags.DEFINE_list(
    "sandbox_url",
    [],
    "Sandbox services (astra sandbox_server) that run tool code, separated by commas; by default this machine.",
)
_OWN = flags.DEFINE_string("sandbox", None, "Your own sandbox for tool code: my_module:MySandbox; docs/extending.md.")
_KEY_FILE = flags.DEFINE_string(
    "sandbox_key_file", None, "File whose first line is the key of the --sandbox_url services."
)
_CA_FILE = flags.DEFINE_string(
    "sandbox_ca_file",
    None,
    "PEM file of the authority that signed the certificates of --sandbox_url; by default the system's authorities.",
)
FLAGS = (_TIER, _URLS, _OWN, _KEY_FILE, _CA_FILE)
_CALLS_A_CPU = 4
"""Concurrent calls for each CPU, as in a pool that has the machine to itself."""


def given() -> list[str]:
    """Return the names of these flags that the user gave."""
    return [flag.name for flag in FLAGS if flag.present]


def sandbox_from_flags() -> AbstractAsyncContextManager[Sandbox]:
    """Return the sandbox, not yet open. Raises `cli.UsageError`."""
    return sandbox_maker_from_flags()()


def sandbox_maker_from_flags(*, one_a_cpu: bool = False) -> Callable[[], AbstractAsyncContextManager[Sandbox]]:
    """Return a function that makes the sandbox, not yet open. It can be pickled and called on another machine.

    Args:
        one_a_cpu: make a pool for one CPU of the machine, with its share of the memory.

    Raises:
        cli.UsageError: flags contradict each other.
    """
    if _OWN.value is not None:
        from synthesis.core.references import referred

        for flag in (_URLS, _KEY_FILE, _CA_FILE, _TIER):
            if flag.present:
                raise cli.UsageError(f"--sandbox={_OWN.value} replaces --{flag.name}; leave one of them out")
        own: Callable[[], AbstractAsyncContextManager[Sandbox]] = referred(_OWN.value)
        return own
    unisolated = _TIER.value == shared.UNISOLATED
    if _URLS.value:
        from sandbox.fleet import SandboxFleet

        urls = tuple(url.strip().rstrip("/") for url in _URLS.value)
        if "" in urls or len(set(urls)) < len(urls):
            raise cli.UsageError(f"--sandbox_url={','.join(_URLS.value)}: name each service once")
        return partial(
            SandboxFleet,
            urls,
            token=cli.token_of(_KEY_FILE),
            minimum_tier=_TIER.value,
            allow_unisolated=unisolated,
            ca_file=cli.certificates_of(_CA_FILE),
        )
    for flag in (_KEY_FILE, _CA_FILE):
        if flag.value:
            raise cli.UsageError(f"--{flag.name} is for a sandbox service; give --sandbox_url too")
    return partial(_pool, minimum_tier=_TIER.value, allow_unisolated=unisolated, one_a_cpu=one_a_cpu)


def _pool(*, one_a_cpu: bool, **config: Any) -> SandboxPool:
    """Return a pool. Its configuration is made on the machine it runs on: it depends on that interpreter and memory."""
    from sandbox import SandboxConfig, SandboxPool

    if one_a_cpu:
        cpus = os.cpu_count() or 1
        config |= {"concurrency": _CALLS_A_CPU, "memory_share": SandboxConfig.memory_share / cpus}
    return SandboxPool(SandboxConfig(**config))
