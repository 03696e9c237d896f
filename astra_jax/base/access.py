"""Access to an HTTP service: address, token, TLS, and limits on time and size."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from astra_jax.base.settings import Bound, Count, Port, Seconds, SecondsOrZero, SettingError, Settings, Total

Part = Annotated[float, Bound(above=0, most=1)]
CHALLENGE = {"WWW-Authenticate": "Bearer"}
"""Headers of the answer to a request without the right token."""


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def network_of(address: str) -> str:
    """Return the key of a caller: its IPv4 address, or the /64 network of its IPv6 address."""
    try:
        one = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a local socket
        return address
    return str(ipaddress.ip_network((one, 64), strict=False)) if one.version == 6 else address


def shows_token(headers: Mapping[str, str], token: str | None) -> bool:
    """Return whether the headers have the token as a bearer token, in constant time. Always True if `token` is None."""
    if token is None:
        return True
    kind, _, given = headers.get("Authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("utf-8", "surrogateescape"), token.encode()
    )


@functools.lru_cache(64)
def names_this_machine(host: str | None) -> bool:
    """Return whether a `Host` header names a loopback address. A site's own name may resolve to such an address."""
    try:
        return host is not None and is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # a host like "["
        return False


def is_own_origin(origin: str | None, host: str | None) -> bool:
    """Return whether an `Origin` header names the service's own pages. Programs send none; browsers do with posts."""
    return origin is None or (host is not None and origin.partition("://")[2].lower() == host.lower())


def keyless(url: str, named: str) -> str:
    """Return the URL unchanged if errors, logs and cards may show it.

    Raises:
        SettingError: the URL has a user or a password. The message does not show them.
    """
    if "@" in urlsplit(url).netloc:
        raise SettingError(
            f"{named} has a user or password before its host, where logs would show it; use a key's file"
        )
    return url


def trusting(ca_file: str | None) -> ssl.SSLContext | None:
    """Return the TLS context that checks a service's certificate with this CA file. None: the system's authorities.

    Raises:
        SettingError: the file cannot be read, or has no certificate.
    """
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # includes SSLError
        raise SettingError(f"{ca_file} is not a file of certificates (PEM): {_reason(error)}") from None


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Settings):
    """Address, token, TLS and limits of an HTTP service.

    Attributes:
        host: address to listen on. Other than loopback needs a token.
        port: TCP port; 0 takes a free one.
        token: token that callers must send; None asks for none.
        drain_seconds: time that requests in flight have to finish after the service receives SIGTERM.
        tls_cert: PEM file of the certificate and its chain. With it the service accepts HTTPS only.
        tls_key: PEM file of the certificate's key, without a password.
        header_seconds: limit for a TLS handshake, for a request's line and headers after their first byte, and for
            the rest of a refused body.
        body_seconds: limit for a request's body.
        idle_seconds: how long a connection may stay open between two requests.
        stall_seconds: how long a caller may read nothing of an answer that waits for it.
        max_connections: open connections, at most half of the descriptors that the process may open. More wait in the
            kernel's queue.
        address_share: largest share of `max_connections` for one address; more are closed. Use 1 behind a proxy.
        max_headers: headers of a request.
        max_header_bytes: bytes of a request's line, and of each header.
        max_pending_bytes: bytes of the bodies of all requests in flight. A request above this is answered with 429.
    """

    RISK: ClassVar[str]
    """Harm that anyone who reaches the service could do, for messages."""
    TOKEN_NAME: ClassVar[str] = "token"
    """Name of the token for the service's users."""

    host: str = "127.0.0.1"
    port: Port = 0
    token: str | None = field(default=None, repr=False)
    drain_seconds: SecondsOrZero = 60.0
    tls_cert: str | None = None
    tls_key: str | None = None
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 60.0
    idle_seconds: Seconds = 75.0
    stall_seconds: Seconds = 60.0
    max_connections: Count = 2048
    address_share: Part = 0.75
    max_headers: Count = 64
    max_header_bytes: Count = 8190
    max_pending_bytes: Total = 256 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token and not is_loopback(self.host):
            raise SettingError(
                f"{type(self).__name__}.host={self.host!r} can be reached from other machines, and no "
                f"{self.TOKEN_NAME} is set: whoever reaches it could {self.RISK}; set one, or listen on 127.0.0.1"
            )
        self.tls()

    @property
    def scheme(self) -> str:
        """URL scheme of the service's addresses."""
        return "https" if self.tls_cert else "http"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the service, or None without TLS.

        Raises:
            SettingError: one of the two files is missing or unreadable, or the key is not the certificate's.
        """
        given = {name: value for name in ("tls_cert", "tls_key") if (value := getattr(self, name))}
        if not given:
            return None
        here = type(self).__name__
        if len(given) == 1:
            (name, path), other = given.popitem(), "tls_key" if self.tls_cert else "tls_cert"
            raise SettingError(f"{here}.{name}={path} without {other}: give the certificate and its key")
        for name, path in given.items():
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise SettingError(f"{here}.{name}={path} cannot be read: {_reason(error)}") from None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password OpenSSL would ask the terminal for one.
            context.load_cert_chain(self.tls_cert or "", self.tls_key, password="")
        except (OSError, ValueError) as error:
            raise SettingError(
                f"{here}.tls_cert={self.tls_cert}, tls_key={self.tls_key}: not a certificate (PEM) and its key without "
                f"a password ({_reason(error)})"
            ) from None
        return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
