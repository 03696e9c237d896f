"""What programs that serve HTTP share: they listen until they are told to stop, then let what is in flight end."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from launch.flags import cli

if TYPE_CHECKING:  # --help does not wait for it
    from sandbox.http_service import HttpService


def told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C, which end nothing any more. Ask for it before what takes long to open."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


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
    print(f"stopped; {cut} {what} were cut off" if cut else "stopped", flush=True)
    return 3 if cut else 0
