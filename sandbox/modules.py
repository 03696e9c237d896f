"""Modules that a tool finds loaded, may import, or must not use. Standard library only."""

from __future__ import annotations

import contextlib
import gc
import sys
import types


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALWAYS = _words(
    """
    abc bisect codecs collections.abc contextlib copy datetime encodings.ascii encodings.latin_1 encodings.utf_16
    encodings.utf_8_sig enum functools io itertools json keyword math operator os.path random re string struct time
    types uuid warnings weakref
    """
)
"""Modules loaded before any tool code, in this order. Importing them costs a call nothing and needs no file.

They are small or needed by the sandbox: a call copies its slot, and its cost grows with the slot's memory.
"""

ON_DEMAND = _words(
    """
    array ast base64 binascii calendar cmath colorsys csv dataclasses decimal difflib encodings.idna fnmatch fractions
    graphlib hashlib heapq hmac html html.parser inspect locale logging numbers pathlib pprint queue secrets shlex
    socket statistics textwrap threading traceback typing unicodedata urllib.parse xml.etree.ElementTree zlib zoneinfo
    _strptime
    """
)
"""Modules loaded, in this order, in the slots of tools that name them; in all slots if calls cannot read files.

In such a slot importing them costs a call nothing either.
"""

PRELOADED = ALWAYS + ON_DEMAND

NAMED_BYTES = (len(ON_DEMAND) + 7) // 8
_NEEDS = {"strptime": "_strptime"}  # modules that functions import when called, by function name

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

_NOT_FOR_TOOLS = frozenset(_words("inspect locale logging os.path pathlib queue socket threading"))
_FURTHER = frozenset(_words("__future__ collections sys urllib"))

ALLOWED = (frozenset(PRELOADED) | _FURTHER) - _NOT_FOR_TOOLS
"""Modules that a validated tool may import: they compute, and depend on nothing but their arguments."""


DEEPEST = 4
"""Most parts of a module name in these sets."""


def is_among(name: str, modules: frozenset[str]) -> bool:
    """Return whether a dotted module name, or a package that contains it, is one of `modules`."""
    parts = name.split(".", DEEPEST)  # an untrusted name may have any number of parts
    return any(".".join(parts[:n]) in modules for n in range(1, min(len(parts), DEEPEST) + 1))


def named(code: types.CodeType) -> bytes:
    """Return the modules of `ON_DEMAND` that the code may import, by its names. Only dynamic imports may be missing.

    Returns:
        `NAMED_BYTES` bytes, a bit for each module.
    """
    names: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop()
        names.update(one.co_names)
        codes += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    parts = {part for name in names for part in name.split(".")}  # `from xml.etree import ElementTree` has two names
    parts |= {module for name, module in _NEEDS.items() if name in names}
    bits = sum(1 << place for place, module in enumerate(ON_DEMAND) if parts.issuperset(module.split(".")))
    return bits.to_bytes(NAMED_BYTES)


def load_named(bits: bytes | bytearray) -> None:
    """Load the modules that `named` returned."""
    wanted = int.from_bytes(bits)
    load(*(name for place, name in enumerate(ON_DEMAND) if wanted >> place & 1))


def load(*names: str) -> None:
    """Import modules for all calls that are forked later. Missing ones are left to the tool's own import."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(ImportError):
            __import__(name)
    if missing:
        gc.freeze()  # no collection in a call touches them
