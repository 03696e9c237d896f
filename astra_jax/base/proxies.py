"""Proxies that the environment names: never for addresses of this machine, and named in messages."""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request

from astra_jax.base.access import is_loopback

_OWN = ("localhost", "127.0.0.1", "127.0.1.1", "::1")
"""Names of this machine. `no_proxy` has no notation for 127.0.0.0/8 that all clients read; see `may_be_proxied`."""


def exempt_this_machine() -> None:
    """Add this machine's names to `no_proxy`, for all clients of this process and of its child processes."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return
    given = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    entries = [one.strip() for one in given.split(",") if one.strip()]
    exempt = "*" if "*" in entries else ",".join(dict.fromkeys((*entries, *_OWN, socket.gethostname())))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = exempt


def may_be_proxied(url: str) -> bool:
    """Return whether the environment may name a proxy for an address: false for those of this machine."""
    return not is_loopback(urllib.parse.urlsplit(url).hostname or "")


def via(url: str) -> str:
    """Return " (through http_proxy=http://HOST:PORT)" where the environment names a proxy for an address, or "".

    The user and the password of the proxy are left out.
    """
    address = urllib.parse.urlsplit(url)
    if not may_be_proxied(url) or urllib.request.proxy_bypass(address.netloc.rpartition("@")[2]):
        return ""
    names = (f"{address.scheme}_proxy", f"{address.scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return ""
    value = os.environ[name]
    scheme, _, rest = value.rpartition("://")
    place = rest.rpartition("@")[2].partition("/")[0]
    return f" (through {name}={f'{scheme}://' if scheme else ''}{place})"
