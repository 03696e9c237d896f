"""What programs that serve HTTP share: they listen until they are told to stop, then let what is in flight end."""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol

from launch import cli


class Stoppable(Protocol):
    """An HTTP service: `sandbox.service.Service`, `astra_jax.serving.service.Service`."""

    port: int

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address cannot be had."""

    async def stop(self) -> int:
        """Take nothing more, let what is in flight end, then close. Returns how much was cut off."""


def told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C, which end nothing any more. Ask for it before what takes long to open."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


async def listen(service: Stoppable, host: str, port: int) -> None:
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
