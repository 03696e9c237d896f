"""What programs that serve HTTP share: they listen until they are told to stop, then let what is in flight end."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

from launch.flags import cli
from synthesis.core.terminal import say

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox.http_service import HttpService


def told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C, which end nothing any more. Ask for it before what takes long to open."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


def check_address(host: str, port: int) -> None:
    """See that an address can be had, before what takes long to open.

    Raises:
        UsageError: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise cli.UsageError(f"--host={host} --port={port}: {error.strerror or error}") from None


async def listen(service: HttpService, host: str, port: int) -> None:
    """Start a service.

    Raises:
        UsageError: the address of --host and --port cannot be had.
    """
    try:
        await service.start()
    except OSError as error:
        raise cli.UsageError(f"--host={host} --port={port}: {error.strerror or error}") from None


def ended(cut: int, what: str) -> int:
    """Say what a stop has cut off. Returns the exit code: 0, or 3 when it was anything."""
    say(f"stopped; {cut} {what} were cut off" if cut else "stopped")
    return 3 if cut else 0
