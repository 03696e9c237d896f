"""Access control of a server: which checkpoints it loads, and from whom. Set at startup by environment variables.

    ASTRA_SYNC_ROOT       folder, or gs://BUCKET/FOLDER, below which the trainer publishes: nothing else is ever opened
    ASTRA_SYNC_KEY_FILE   file whose first line is the sync key: sampling needs no such key

Without a key, only this machine may reach the server. With a key it can also pull weights from the memory of a trainer
with the same key; for that alone it needs no root.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = "ASTRA_SYNC_ROOT"
KEY_FILE = "ASTRA_SYNC_KEY_FILE"
KEY_HEADER = "X-Astra-Sync-Key"
PROTOCOL = 4
"""Version of these endpoints. Version 1 required no key and opened any path. Version 2 did not separate runs, so two
trainers could overwrite each other's weights. Version 3 loaded only files."""
_DEV_MODE = "VLLM_SERVER_DEV_MODE"
_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[A-Za-z0-9_=.-]+)+)")
"""Bucket addresses without URL syntax for anything but a name: no queries, escapes or further stores."""
_SHOWN = 200


class NotTaken(Exception):
    """This server does not load the checkpoint. The message says which it loads."""


class SyncRoot:
    """Folder below which checkpoints are loaded.

    Args:
        text: an absolute path, or `gs://BUCKET/FOLDER`.

    Raises:
        RuntimeError: it is neither.
    """

    def __init__(self, text: str) -> None:
        self._text = text.rstrip("/")
        self._bucket = _bucket(self._text)
        if self._bucket is None and not (self._text.startswith("/") and "\0" not in self._text):
            raise RuntimeError(
                f"astra_sync: {ROOT}={text!r}: give the folder that the trainer publishes to (its --publish_dir), as "
                "an absolute path other than / or as gs://BUCKET/FOLDER"
            )

    def store(self, item: str) -> dict[str, Any]:
        """Return tensorstore's description of an item's key-value store, with links and `..` resolved.

        Raises:
            NotTaken: it is not below the root.
        """
        problem = (
            f"{item[:_SHOWN]!r} is not below {ROOT}={self._text}, whence alone this server takes checkpoints: publish "
            "there, or start the server with another"
        )
        if self._bucket is not None:
            found, (bucket, folder) = _bucket(item.rstrip("/")), self._bucket
            if found is None or found[0] != bucket or not found[1].startswith(f"{folder}/"):
                raise NotTaken(problem)
            return {"driver": "gcs", "bucket": bucket, "path": f"{found[1]}/"}
        if not item.startswith("/") or "\0" in item:
            raise NotTaken(problem)
        try:
            path, root = Path(item).resolve(), Path(self._text).resolve()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.stat()  # Python 3.13's `resolve` does not report links in a circle
        except (OSError, RuntimeError) as error:  # a link cycle, or a name that is too long
            raise NotTaken(f"{item[:_SHOWN]!r} cannot be followed: {error}") from None
        if path == root or not path.is_relative_to(root):
            raise NotTaken(problem)
        for one in (path.parent / "_CHECKPOINT_METADATA", *path.rglob("*")):
            # Reading a pipe would never end, and a link may lead anywhere.
            if one.exists() and not (one.resolve().is_relative_to(root) and (one.is_file() or one.is_dir())):
                raise NotTaken(f"{one} is not a file below {ROOT}={self._text}")
        return {"driver": "file", "path": f"{path}/"}


def _bucket(text: str) -> tuple[str, str] | None:
    """Return bucket and path of a `gs://` address, or None."""
    match = _BUCKET.fullmatch(text)
    if match is None or {".", ".."} & set(match[2].split("/")):
        return None
    return match[1], match[2][1:]


@dataclass(frozen=True)
class SyncAccess:
    """Permissions for syncing weights.

    Attributes:
        root: of checkpoints; None if no files are loaded.
        key: required for syncs; None only if no other machine can reach the server.
        local: the server listens on a socket file, so `Host` is not checked.
    """

    root: SyncRoot | None
    key: str | None
    local: bool

    @classmethod
    def of(
        cls, environment: Mapping[str, str], *, host: str | None, socket: str | None, api_keys: Iterable[str]
    ) -> SyncAccess:
        """Create it from a server's environment and arguments.

        Args:
            host: vLLM's `--host`; None listens on all interfaces.
            socket: vLLM's `--uds`.
            api_keys: vLLM's own, which permit sampling.

        Raises:
            RuntimeError: the weights would not be protected, so the server does not start.
        """
        root = environment.get(ROOT)
        if not root and not environment.get(KEY_FILE):
            raise RuntimeError(
                f"astra_sync: {ROOT} is not set: give the folder that the trainer publishes to (its --publish_dir, by "
                "default WORKDIR/policy), below which alone checkpoints are then taken; or, for weights from the "
                f"trainer's memory alone (its --rollout_sync=direct), a key in {KEY_FILE}"
            )
        key = _key_in(environment[KEY_FILE]) if environment.get(KEY_FILE) else None
        reachable = not socket and not is_loopback(host)
        if key is None and reachable:
            raise RuntimeError(
                f"astra_sync: --host={host or 'everywhere'} can be reached from other machines, and {KEY_FILE} is not "
                "set: whoever may sample could replace the weights; name a file with a key of its own, or listen on "
                "127.0.0.1"
            )
        if key is not None and key in api_keys:
            raise RuntimeError(
                f"astra_sync: the key in {KEY_FILE} is the --api-key too: whoever may sample could replace the weights"
            )
        if environment.get(_DEV_MODE, "0").strip() not in ("", "0") and (reachable or key is not None):
            raise RuntimeError(
                f"astra_sync: {_DEV_MODE} opens /pause, /update_weights and more to whoever reaches the server, past "
                f"the key of {KEY_FILE}: unset it, or listen on 127.0.0.1 without a key"
            )
        return cls(SyncRoot(root) if root else None, key, bool(socket))

    def below(self, item: str) -> SyncRoot:
        """Return the folder that contains allowed file items. Raises `NotTaken` if there is none."""
        if self.root is None:
            raise NotTaken(
                f"{item[:_SHOWN]!r} is of files, and this server was started without {ROOT}: set it, or give the "
                "trainer --rollout_sync=direct"
            )
        return self.root

    def key_of_streams(self, item: str) -> str:
        """Return the key shared with a trainer. Raises `NotTaken` if there is none."""
        if self.key is None:
            raise NotTaken(
                f"{item[:_SHOWN]!r} is a trainer's memory, and this server was started without {KEY_FILE}, by which it "
                "would know that trainer: set it to a file with the key of syncs"
            )
        return self.key

    def refusal(self, headers: Mapping[str, str], *, syncs: bool) -> tuple[int, str] | None:
        """Return status and text for a request that is not permitted, or None.

        Args:
            syncs: the request is a sync; otherwise permission to sample is enough.
        """
        if headers.get("origin") is not None:
            return 403, "pages of other sites get nothing here: a trainer sends no Origin"
        given = headers.get(KEY_HEADER)
        if self.key is None:
            host = headers.get("host", "")
            if not self.local and not _names_this_machine(host):  # a site may resolve its own name to this address
                return 403, f"the host {host[:80]!r} is not this machine: ask for 127.0.0.1"
        elif given is None and syncs:
            return 403, (
                f"syncs show the key of this server's {KEY_FILE} in {KEY_HEADER}: give the trainer "
                "--rollout_sync_key_file; one that is older than this plugin has no such flag"
            )
        elif given is not None and not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.key.encode()):
            return (
                403,
                f"another key than that of this server's {KEY_FILE}: check the trainer's --rollout_sync_key_file",
            )
        if syncs and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, "send application/json"
        return None


def is_loopback(host: str | None) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname)
    except ValueError:  # for a host like "["
        return False


def _key_in(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise RuntimeError(f"astra_sync: {KEY_FILE}={file} cannot be read: {error}") from None
    if not key:
        raise RuntimeError(f"astra_sync: {KEY_FILE}={file} has no key on its first line")
    return key
