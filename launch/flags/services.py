"""What programs that serve HTTP share: the flags of how they are reached; they listen until they are told to stop, then
let what is in flight end."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from launch.flags import cli
from sandbox.access import ReachConfig, is_loopback

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox.http_service import HttpService

Config = TypeVar("Config", bound=ReachConfig)

_OF_REACH: tuple[flags.FlagHolder[Any], ...] = (
    flags.DEFINE_string("tls_cert", None, "PEM file of the certificate and its chain: HTTPS instead of HTTP."),
    flags.DEFINE_string("tls_key", None, "PEM file of the certificate's key, without a password."),
    flags.DEFINE_float(
        "header_seconds", ReachConfig.header_seconds, "For a TLS handshake, and for a request's headers."
    ),
    flags.DEFINE_float("body_seconds", ReachConfig.body_seconds, "For a request's body."),
    flags.DEFINE_float("idle_seconds", ReachConfig.idle_seconds, "For a connection between two requests."),
    flags.DEFINE_float("stall_seconds", ReachConfig.stall_seconds, "For a caller that takes nothing of an answer."),
    flags.DEFINE_integer("max_connections", ReachConfig.max_connections, "Open at once; further ones wait."),
    flags.DEFINE_float("address_share", ReachConfig.address_share, "Of those, one address's; 1 behind a proxy."),
    flags.DEFINE_integer("max_headers", ReachConfig.max_headers, "Of a request."),
    flags.DEFINE_integer("max_header_bytes", ReachConfig.max_header_bytes, "Of a request's line, and of each header."),
    flags.DEFINE_integer("max_pending_bytes", ReachConfig.max_pending_bytes, "Of all bodies under way; more are 429."),
)


def reached(kind: type[Config], **settings: Any) -> Config:
    """A service's configuration: these settings, and what the flags say of how it is reached.

    Raises:
        UsageError: one is refused.
    """
    try:
        return kind(**settings, **{flag.name: flag.value for flag in _OF_REACH})
    except ValueError as error:
        raise cli.UsageError(str(error)) from None


def told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C, which end nothing any more. Ask for it before what takes long to open."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


async def listen(service: HttpService) -> str:
    """Start a service. Returns its address, without a path.

    Raises:
        UsageError: the address of --host and --port cannot be had.
    """
    config = service.config
    try:
        await service.start()
    except OSError as error:
        raise cli.UsageError(f"--host={config.host} --port={config.port}: {error.strerror or error}") from None
    if not config.tls_cert and not is_loopback(config.host):
        print(
            f"warning: --host={config.host} without --tls_cert: the {config.TOKEN_NAME} and all else can be read on "
            "the way; see docs/serving.md, Across machines",
            file=sys.stderr,
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{config.scheme}://{host}:{service.port}"


def ended(cut: int, what: str) -> int:
    """Say what a stop has cut off. Returns the exit code: 0, or 3 when it was anything."""
    print(f"stopped; {cut} {what} were cut off" if cut else "stopped", flush=True)
    return 3 if cut else 0
