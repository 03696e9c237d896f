"""Programs that serve HTTP: flags of their address and limits; they listen until SIGTERM, then finish running
requests."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from astra_jax.base.access import Part, ReachConfig, is_loopback
from astra_jax.base.settings import Count, CountOrZero, Seconds, SecondsOrZero, Total
from astra_jax.base.terminal import make_output_optional, say
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from astra_jax.base.http_service import HttpService

Config = TypeVar("Config", bound=ReachConfig)

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; any but loopback needs --key_file.")
_KEY_FILE = flags.DEFINE_string("key_file", None, "File whose first line is the key that clients must send.")
_OF_REACH: tuple[flags.FlagHolder[Any], ...] = (
    flags.DEFINE_string("tls_cert", None, "PEM file of the certificate and its chain; turns on HTTPS."),
    flags.DEFINE_string("tls_key", None, "PEM file of the certificate's key, without a password."),
    number_flag("drain_seconds", 60.0, SecondsOrZero, "Seconds for running requests to finish after SIGTERM."),
    number_flag(
        "header_seconds",
        ReachConfig.header_seconds,
        Seconds,
        "Time limit in seconds for a TLS handshake, and for a request's headers.",
    ),
    number_flag("body_seconds", ReachConfig.body_seconds, Seconds, "Time limit in seconds for a request's body."),
    number_flag(
        "idle_seconds",
        ReachConfig.idle_seconds,
        Seconds,
        "Seconds that a connection may stay open between two requests.",
    ),
    number_flag(
        "stall_seconds", ReachConfig.stall_seconds, Seconds, "Seconds that a client may read nothing of its response."
    ),
    number_flag("max_connections", ReachConfig.max_connections, Count, "Maximum open connections; more wait."),
    number_flag(
        "address_share",
        ReachConfig.address_share,
        Part,
        "Maximum share of --max_connections for one client address; use 1 behind a proxy.",
    ),
    number_flag("max_headers", ReachConfig.max_headers, Count, "Maximum number of headers of a request."),
    number_flag(
        "max_header_bytes",
        ReachConfig.max_header_bytes,
        Count,
        "Maximum bytes of a request's line, and of each header.",
    ),
    number_flag(
        "max_pending_bytes",
        ReachConfig.max_pending_bytes,
        Total,
        "Maximum bytes of the bodies of all running requests; more get 429.",
    ),
)


def reached(kind: type[Config], **settings: Any) -> Config:
    """Return a service's configuration: the given settings, and address and limits from the flags.

    Raises:
        SettingError: a setting is refused.
        UsageError: the file of --key_file has no key.
    """
    of_reach = {flag.name: flag.value for flag in _OF_REACH}
    return kind(host=_HOST.value, token=cli.token_of(_KEY_FILE), **settings, **of_reach)


def max_waiting() -> flags.FlagHolder[int]:
    """Define the flag of services that have a queue."""
    return number_flag("max_waiting", 1024, CountOrZero, "Maximum waiting requests; more get 429.")


def stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and Ctrl-C set instead of ending the process. Call it before anything slow to
    open."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def check_address(port: int) -> None:
    """Check that the address of --host and a port is available, before anything slow is opened.

    Raises:
        UsageError: it is not.
    """
    host = _HOST.value
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise cli.UsageError(f"--host={host} --port={port}: {error.strerror or error}") from None


async def listen(service: HttpService) -> str:
    """Start a service. Return its address, without a path.

    Raises:
        UsageError: the address of --host and --port is not available.
    """
    config = service.config
    make_output_optional()
    try:
        await service.start()
    except OSError as error:
        raise cli.UsageError(f"--host={config.host} --port={config.port}: {error.strerror or error}") from None
    if not config.tls_cert and not is_loopback(config.host):
        say(
            f"warning: --host={config.host} without --tls_cert: the {config.TOKEN_NAME} and all data travel "
            "unencrypted; see docs/serving.md, Across machines",
            file=sys.stderr,
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{config.scheme}://{host}:{service.port}"


def ended(cut: int, what: str) -> int:
    """Print how many requests a stop has cut off. Return the exit code: 0, or 3 if there were any."""
    say(f"stopped; {cut} {what} were cut off" if cut else "stopped")
    return 3 if cut else 0
