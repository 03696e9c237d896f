"""Buckets for tests: S3 by moto's server, Google Cloud Storage by `gcp-storage-emulator`, in a process of its own, and
what it lacks of the service.

Added here, as the service documents them, because tensorstore relies on them: an object's generation in the answer to a
read, the conditions `ifGenerationMatch` and `ifGenerationNotMatch`, and the range of a list (`startOffset`,
`endOffset`). The bucket `readonly` answers each write with 403. What is still not as there: no credentials, no TLS, no
limit of one write a second to an object, no listing of more than one page, no hierarchical namespaces, no gRPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

BUCKETS = ("bucket", "readonly")
"""Of Google's; S3's is `bucket` alone."""


T = TypeVar("T", bound="Buckets")


class Buckets(Protocol):
    """A running emulator of either service."""

    scheme: ClassVar[str]

    @property
    def environment(self) -> dict[str, str]:
        """What leads all clients there."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the bucket `bucket`."""
        ...

    def get(self, name: str) -> bytes:
        """An object of the bucket `bucket`."""
        ...

    def names(self, prefix: str) -> list[str]:
        """The objects of the bucket `bucket` whose names begin so, without that beginning."""
        ...

    def place(self, name: str) -> str:
        """The object's or folder's address."""
        return f"{self.scheme}bucket/{name}"

    def copy(self, prefix: str, folder: Path) -> Path:
        """All objects whose names begin so, as files."""
        for name in self.names(prefix):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.get(prefix + name))
        return folder


@dataclass(frozen=True)
class S3(Buckets):
    """Moto's server, in a thread of this process. It looks at no credentials."""

    port: int
    scheme: ClassVar[str] = "s3://"

    @property
    def environment(self) -> dict[str, str]:
        anybody = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
        there = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_DEFAULT_REGION": "us-east-1"}
        return anybody | there | {"AWS_EC2_METADATA_DISABLED": "true"}

    @cached_property
    def client(self) -> Any:
        from botocore.session import get_session

        named = {"endpoint_url": "ENDPOINT_URL", "region_name": "DEFAULT_REGION"}
        named |= {f"aws_{name.lower()}": name for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
        given = {option: self.environment[f"AWS_{name}"] for option, name in named.items()}
        return get_session().create_client("s3", **given)

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=name, Body=data)

    def get(self, name: str) -> bytes:
        return self.client.get_object(Bucket="bucket", Key=name)["Body"].read()

    def names(self, prefix: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        return [one["Key"].removeprefix(prefix) for one in found]


@contextlib.contextmanager
def s3_storage() -> Iterator[S3]:
    """An emulator with the bucket `bucket`, empty."""
    moto = pytest.importorskip("moto.server", reason="needs pip install 'moto[s3]' flask flask-cors")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        made = S3(server.get_host_and_port()[1])
        made.client.create_bucket(Bucket="bucket")
        yield made
    finally:
        server.stop()


@contextlib.contextmanager
def used(started: Callable[[], contextlib.AbstractContextManager[T]]) -> Iterator[T]:
    """An emulator that this process's clients are led to: the only one of its service, for they are made once, and keep
    the address."""
    with started() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        forget_clients()
        yield made


def forget_clients() -> None:
    """Have clients of buckets made anew; another file's tests in this process had an emulator of their own."""
    import gcsfs
    import s3fs
    from etils.epath import backend

    backend.fsspec_backend._get_filesystem.cache_clear()
    gcsfs.GCSFileSystem.clear_instance_cache()
    s3fs.S3FileSystem.clear_instance_cache()


@dataclass(frozen=True)
class Storage(Buckets):
    """A running emulator of Google Cloud Storage."""

    port: int
    scheme: ClassVar[str] = "gs://"

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": self.url,  # gcsfs, google-cloud-storage
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self.url,  # ArrayRecord
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # tensorstore; else it looks for a machine of Google's
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for gRPC
        }

    def put(self, name: str, data: bytes) -> None:
        where = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={urllib.parse.quote(name, safe='')}"
        request = urllib.request.Request(self.url + where, data, {"Content-Type": "application/octet-stream"})
        urllib.request.urlopen(request, timeout=30).close()

    def get(self, name: str) -> bytes:
        where = f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}?alt=media"
        with urllib.request.urlopen(self.url + where, timeout=30) as answer:
            return answer.read()

    def names(self, prefix: str) -> list[str]:
        where = f"/storage/v1/b/bucket/o?prefix={urllib.parse.quote(prefix, safe='')}"
        with urllib.request.urlopen(self.url + where, timeout=30) as answer:
            return [item["name"].removeprefix(prefix) for item in json.load(answer)["items"]]

    def remove(self, name: str) -> None:
        """Remove an object of `gs://bucket`."""
        where = f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}"
        urllib.request.urlopen(urllib.request.Request(self.url + where, method="DELETE"), timeout=30).close()


@contextlib.contextmanager
def storage() -> Iterator[Storage]:
    """An emulator with the buckets `BUCKETS`, empty."""
    pytest.importorskip("gcp_storage_emulator", reason="needs pip install gcp-storage-emulator")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    made = Storage(port)
    process = subprocess.Popen(
        [sys.executable, __file__, str(port)],
        env={**os.environ, **made.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                made.names("")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        yield made
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The process


def _completed(handler: Callable[..., None], lists: bool) -> Callable[..., None]:
    """A handler of the emulator's, with what it lacks; it serves one request at a time."""
    from gcp_storage_emulator.exceptions import NotFound

    def handle(request: Any, response: Any, storage: Any) -> None:
        def asked(name: str) -> str | None:
            return request.query.get(name, [None])[0]

        bucket = request.params.get("bucket_name")
        name = request.params.get("object_id") or asked("name")
        if asked("uploadType") == "multipart":  # as Google's client writes what is small
            name = request.data["meta"]["name"]
        generation = "0"  # there is none
        if bucket and name:
            with contextlib.suppress(NotFound):
                generation = storage.get_file_obj(bucket, name)["generation"]
        if bucket == "readonly" and request.method != "GET":
            response.status = HTTPStatus.FORBIDDEN
            reason = "caller does not have storage.objects.create access"
            response.json({"error": {"code": 403, "message": reason}})
        elif asked("ifGenerationMatch") not in (None, generation):
            response.status = HTTPStatus.PRECONDITION_FAILED
        elif asked("ifGenerationNotMatch") == generation:
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            handler(request, response, storage)
            if request.method == "GET" and name:
                response["x-goog-generation"] = generation
            if lists and response.status == HTTPStatus.OK:
                first, last = asked("startOffset") or "", asked("endOffset")
                answer = json.loads(response._content)
                answer["items"] = [
                    item for item in answer["items"] if first <= item["name"] and (last is None or item["name"] < last)
                ]
                response.json(answer)

    return handle


def _serve(port: int) -> None:
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import buckets, objects
    from gcp_storage_emulator.storage import Storage as Emulated

    server.HANDLERS = tuple(
        (path, {method: _completed(handler, handler is objects.ls) for method, handler in handlers.items()})
        for path, handlers in server.HANDLERS
    )
    # At each write it writes out all that it knows of all objects, into its memory: 38 ms of the 39 that a write took.
    Emulated._write_config_to_file = lambda storage: None
    made = server.create_server("localhost", port, in_memory=True)
    for name in BUCKETS:
        buckets.create_bucket(name, made._storage)
    made.run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
