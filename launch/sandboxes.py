"""The flags of every program that runs tool code: where it runs, and how well isolated it has to be."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from absl import flags

from launch import cli

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox import Sandbox

_URL = flags.DEFINE_string(
    "sandbox_url", None, "Sandbox service (launch.sandbox_server) in which tool code runs; by default this machine."
)
_TOKEN_FILE = flags.DEFINE_string("sandbox_token_file", None, "File whose first line is the service's token.")
_TIER = flags.DEFINE_enum(
    "sandbox_tier",
    "C",
    ["A", "B", "C", "D", "strict"],
    "Weakest isolation to accept, see docs/sandbox.md; strict is A. D trusts the code.",
)


def sandbox_from_flags() -> AbstractAsyncContextManager[Sandbox]:
    """The sandbox, not yet open. Raises `cli.UsageError`."""
    from sandbox import SandboxConfig, SandboxPool

    unisolated = _TIER.value == "D"
    if _URL.value:
        from sandbox.remote import RemotePool

        token = cli.token_of(_TOKEN_FILE)
        return RemotePool(_URL.value, token=token, minimum_tier=_TIER.value, allow_unisolated=unisolated)
    if _TOKEN_FILE.value:
        raise cli.UsageError("--sandbox_token_file is for a service: give --sandbox_url too")
    return SandboxPool(SandboxConfig(minimum_tier=_TIER.value, allow_unisolated=unisolated))
