"""Who may reach an HTTP service: anybody on this machine, or whoever shows a token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

CHALLENGE = {"WWW-Authenticate": "Bearer"}
"""Headers of an answer to who did not show the token."""


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shows_token(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request has `Authorization: Bearer TOKEN`, in constant time; None asks for nothing."""
    if token is None:
        return True
    kind, _, given = headers.get("Authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("utf-8", "surrogateescape"), token.encode()
    )
