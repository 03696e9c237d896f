"""Which modules a tool finds loaded, may import, and has no business with. Standard library only."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PRELOADED = _words(
    """
    abc array ast base64 binascii bisect calendar cmath codecs collections.abc colorsys contextlib copy csv
    dataclasses datetime decimal difflib enum fnmatch fractions functools graphlib hashlib heapq hmac html
    html.parser inspect io itertools json keyword locale logging math numbers operator os.path pathlib pprint
    queue random re secrets shlex statistics string struct textwrap threading time traceback types typing
    unicodedata urllib.parse uuid warnings weakref xml.etree.ElementTree zlib zoneinfo encodings.ascii
    encodings.idna encodings.latin_1 encodings.utf_16 encodings.utf_8_sig _strptime
    """
)
"""Loaded before any tool code, in this order: an import of them costs a call nothing and needs no file."""

NETWORK = frozenset(
    _words(
        """
    aiohttp asynchat asyncore asyncio ftplib http httpx imaplib nntplib poplib requests select selectors smtpd smtplib
    socket socketserver ssl telnetlib urllib.error urllib.request urllib.response urllib.robotparser urllib3 websocket
    websockets wsgiref xmlrpc
        """
    )
)
"""Modules whose purpose is the network, or waiting for it."""

_NOT_FOR_TOOLS = frozenset(_words("inspect locale logging os.path pathlib queue threading"))
_FURTHER = frozenset(_words("__future__ collections sys urllib"))

ALLOWED = (frozenset(PRELOADED) | _FURTHER) - _NOT_FOR_TOOLS
"""What a validated tool may import: modules that compute, and depend on nothing but their arguments."""


def is_among(name: str, modules: frozenset[str]) -> bool:
    """Whether a dotted module name, or a package it is in, is one of `modules`."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in modules for n in range(1, len(parts) + 1))
