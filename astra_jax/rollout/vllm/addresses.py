"""Addresses of the rollout servers, fixed or looked up repeatedly during a run.

    http://a:8000              a server
    @FILE                      a file with one of them in each line (# begins a comment)
    dns+http://servers:8000    every address that the name has: the pods of a headless service

A failed or empty look-up changes nothing. A file being rewritten or an unavailable name server says nothing about the
rollout servers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from astra_jax.base.access import is_loopback, keyless
from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from astra_jax.base.settings import SettingError
from astra_jax.rollout.vllm.server import Unreachable

_LOOKED_UP = {"dns+http": "http", "dns+https": "https"}
_MOST_BYTES = 1 << 20
"""Size limit of a file of addresses."""


def check_source(source: str, way: str) -> None:
    """Check that a source has one of the three forms.

    Args:
        way: sync method, see `VLLMConfig.sync`.

    Raises:
        SettingError: it has none, or a server there cannot be used with this method.
    """
    if source.startswith("@"):
        if not source[1:].strip():
            raise SettingError("VLLMConfig.urls has '@' without a file; name the file of addresses, as in @FILE")
        return
    keyless(source, "VLLMConfig.urls")
    try:
        parts = urlsplit(source)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https", *_LOOKED_UP):
        raise SettingError(
            f"VLLMConfig.urls has {source!r}; give servers as http://HOST:PORT, a file of them as @FILE, or a name "
            "that is looked up as dns+http://NAME:PORT"
        )
    if parts.scheme in _LOOKED_UP and port is None:
        raise SettingError(f"VLLMConfig.urls has {source!r} without a port, which DNS does not give; add :PORT")
    if way == "reload" and (parts.scheme in _LOOKED_UP or not is_loopback(host)):
        raise SettingError(
            f"VLLMConfig.sync='reload' with {source}: vLLM's development endpoints ask for no API key, so that "
            "whoever reaches them can replace the weights; bind that server to 127.0.0.1 and tunnel to it, or use "
            "sync='plugin'"
        )


class Addresses:
    """Server addresses from `VLLMConfig.urls`.

    Args:
        sources: in the forms above.
        way: see `check_source`.
    """

    def __init__(self, sources: Sequence[str], way: str) -> None:
        self._sources, self._way = tuple(sources), way

    @property
    def change(self) -> bool:
        """True if the addresses may change over time."""
        return any(source.startswith("@") or urlsplit(source).scheme in _LOOKED_UP for source in self._sources)

    def of_files(self) -> list[str]:
        """Return the explicit addresses, in order, without trailing slashes or duplicates.

        Raises:
            InputError: a file is unreadable, names no server, or has an invalid line.
        """
        found: dict[str, None] = {}
        for source in self._sources:
            if source.startswith("@"):
                found |= dict.fromkeys(self._written(Path(source[1:].strip())))
            elif urlsplit(source).scheme not in _LOOKED_UP:
                found[source] = None
        return list(dict.fromkeys(url.rstrip("/") for url in found))

    async def read(self) -> dict[str, str | None]:
        """Return the servers' current addresses, each with the name in its certificate if that differs.

        Raises:
            InputError: as `of_files`.
            PolicyError: a name has no address.
        """
        found: dict[str, str | None] = dict.fromkeys(await asyncio.to_thread(self.of_files))
        for source in self._sources:
            if not source.startswith("@") and urlsplit(source).scheme in _LOOKED_UP:
                found |= await _looked_up(source)
        return found

    def _written(self, file: Path) -> list[str]:
        try:
            with file.open("rb") as opened:
                text = opened.read(_MOST_BYTES + 1)
            lines = [line.partition("#")[0].strip() for line in text.decode("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"VLLMConfig.urls: {file} is not a file of addresses: {first_line(error)}") from None
        if len(text) > _MOST_BYTES:
            raise InputError(f"VLLMConfig.urls: {file} is larger than {_MOST_BYTES:,} bytes; write one address a line")
        urls = [line for line in lines if line]
        if not urls:
            raise InputError(f"VLLMConfig.urls: {file} names no server; write one address a line")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise InputError(f"VLLMConfig.urls: {file} has the line {url[:200]!r}; write http://HOST:PORT")
            try:
                check_source(url, self._way)
            except SettingError as error:
                raise InputError(f"{file}: {error}") from None
        return urls


async def _looked_up(source: str) -> dict[str, str | None]:
    parts = urlsplit(source)
    name, scheme = str(parts.hostname), _LOOKED_UP[parts.scheme]
    try:
        loop = asyncio.get_running_loop()
        answers = await loop.getaddrinfo(name, parts.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"VLLMConfig.urls: the name of {source} has no address: {first_line(error)}") from None
    hosts = sorted({str(address[0]) for *_, address in answers})
    shown = (f"[{host}]" if ":" in host else host for host in hosts)
    return {f"{scheme}://{host}:{parts.port}": name if scheme == "https" else None for host in shown}
