"""Who may reach an HTTP service: anybody on this machine, or whoever shows a token; and how long and how much."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from sandbox.settings import Bound, Count, Port, Seconds, SecondsOrZero, SettingError, Settings, Total

Part = Annotated[float, Bound(above=0, most=1)]
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


def network_of(address: str) -> str:
    """What callers are told apart by: the address, of IPv6 its first 64 bits, below which one caller has all."""
    try:
        one = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a socket of this machine
        return address
    return str(ipaddress.ip_network((one, 64), strict=False)) if one.version == 6 else address


def shows_token(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request has `Authorization: Bearer TOKEN`, in constant time; None asks for nothing."""
    if token is None:
        return True
    kind, _, given = headers.get("Authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("utf-8", "surrogateescape"), token.encode()
    )


@functools.lru_cache(64)
def names_this_machine(host: str | None) -> bool:
    """Whether a `Host` header is of a loopback address. A site may give its own name this machine's address."""
    try:
        return host is not None and is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # of a host like "["
        return False


def is_own_origin(origin: str | None, host: str | None) -> bool:
    """Whether an `Origin` header is of the service's own pages; programs send none, browsers do with what they post."""
    return origin is None or (host is not None and origin.partition("://")[2].lower() == host.lower())


def keyless(url: str, named: str) -> str:
    """An address, which errors, logs and cards show.

    Raises:
        SettingError: there is a user or a password in it, which are not shown here.
    """
    if "@" in urlsplit(url).netloc:
        raise SettingError(
            f"{named} has a user or password before its host, where logs would show it; use a key's file"
        )
    return url


def trusting(ca_file: str | None) -> ssl.SSLContext | None:
    """How a client checks a service's certificate: by this file of authorities, or None: by the system's.

    Raises:
        SettingError: the file cannot be read, or holds no certificate.
    """
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        raise SettingError(f"{ca_file} is no file of certificates (PEM): {_reason(error)}") from None


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Settings):
    """How a service is reached.

    Attributes:
        host: address to listen on; beyond loopback only with a token.
        port: 0 takes a free one.
        token: what callers must show; None asks for none.
        drain_seconds: how long requests in flight may go on once the service is told to stop.
        tls_cert: PEM file of the certificate and its chain; with it the service speaks HTTPS alone.
        tls_key: PEM file of its key, without a password.
        header_seconds: for a TLS handshake, for a request's line and headers once they have begun, and for what is
            still coming of a body that was refused.
        body_seconds: for a request's body.
        idle_seconds: how long a connection may stay open between two requests.
        stall_seconds: how long a caller may take nothing of an answer that waits for him.
        max_connections: open at once, and at most half of the descriptors that the process may open; further ones wait
            in the kernel's queue.
        address_share: of those, at most so much is one address's; what is above is hung up on. 1 behind a proxy.
        max_headers: of a request.
        max_header_bytes: of a request's line, and of each header.
        max_pending_bytes: of the bodies of all requests under way; what would make more is answered 429.
    """

    RISK: ClassVar[str]
    """What whoever reaches the service could do."""
    TOKEN_NAME: ClassVar[str] = "token"
    """What the service's users know the token as."""

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
        """Of the service's addresses."""
        return "https" if self.tls_cert else "http"

    def tls(self) -> ssl.SSLContext | None:
        """What the service encrypts with; None: it does not.

        Raises:
            SettingError: one of the two files is missing, cannot be read, or is not the other's.
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
            # A password is given, or OpenSSL would ask the terminal for one.
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
