"""Operations that differ between bucket services: a check that a folder can be used, and conditional writes of objects.

A conditional write replaces only the version that the writer saw. Its stamp is an object's generation in Google Cloud
Storage (`gs://`), and its entity tag in S3 and compatible services (`s3://`). Clients, credentials and addresses are
the services' own: Application Default Credentials; AWS's environment variables and files, with AWS_ENDPOINT_URL for
another service than Amazon's.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import Any, Protocol

from etils import epath

from astra_jax.base.files import GCS, S3, StorageError, first_line, in_bucket

_PATIENCE = 60.0
"""Seconds; by itself tensorstore tries for much longer."""
_MARK, _WRITTEN = ".writable-", b"writable"
"""Test object of a folder: the start of its name, followed by a unique part, and its content."""


class Guarded(Protocol):
    """An object that is written only over what its writer saw."""

    def write(self, data: bytes, over: str) -> str | None:
        """Make the object, where `over` is empty, or replace that of this stamp. None: what is there is another."""
        ...

    def read(self) -> tuple[str, bytes]:
        """Its stamp and content, both empty if there is none."""
        ...

    def remove(self, stamp: str) -> None:
        """Remove the object, if it is still that of this stamp."""
        ...


def guarded(file: epath.Path, timeout: float) -> Guarded:
    """Return the object of a place in a bucket.

    Args:
        timeout: of each request, in seconds.
    """
    kind = _OnS3 if os.fspath(file).startswith(S3) else _OnGCS
    return kind(file.parts[2], "/".join(file.parts[3:]), timeout)


def check_writable(folder: epath.Path) -> None:
    """See that a run can keep its files in a bucket, with all clients that will; a folder on disk always passes.

    Raises:
        StorageError: it cannot.
    """
    if in_bucket(folder):
        (_try_s3 if os.fspath(folder).startswith(S3) else _try_gcs)(folder)


def _see(mark: epath.Path) -> None:
    """Raises OSError: what was written is not there, for etils' client."""
    if mark.read_bytes() != _WRITTEN or mark not in mark.parent.iterdir():
        raise OSError(f"{mark} was written and is not there")


# ---------------------------------------------------------------------------------------------------------------------
# Google Cloud Storage


class _OnGCS:
    def __init__(self, bucket: str, name: str, timeout: float) -> None:
        from google.cloud import storage

        self._blob, self._timeout = storage.Client().bucket(bucket).blob(name), timeout

    def write(self, data: bytes, over: str) -> str | None:
        from google.api_core.exceptions import PreconditionFailed

        try:
            self._blob.upload_from_string(data, if_generation_match=int(over or 0), timeout=self._timeout)
        except PreconditionFailed:
            return None
        return str(self._blob.generation)

    def read(self) -> tuple[str, bytes]:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        while True:
            try:
                self._blob.reload(timeout=self._timeout)
                generation = int(self._blob.generation)
                return str(generation), self._blob.download_as_bytes(
                    if_generation_match=generation, timeout=self._timeout
                )
            except NotFound:
                return "", b""
            except PreconditionFailed:  # written between the two questions
                continue

    def remove(self, stamp: str) -> None:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with contextlib.suppress(NotFound, PreconditionFailed):
            self._blob.delete(if_generation_match=int(stamp), timeout=self._timeout)


def _try_gcs(folder: epath.Path) -> None:
    import tensorstore
    from google.api_core.exceptions import NotFound
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    bucket, mark = folder.parts[2], folder / f"{_MARK}{uuid.uuid4().hex}"
    try:
        storage.Client().get_bucket(bucket)  # Orbax asks for its kind
        store = tensorstore.KvStore.open(f"{folder}/").result()
        store.write(mark.name, _WRITTEN).result(timeout=_PATIENCE)  # as arrays are written
        _see(mark)  # as all else is
        mark.unlink()
    except NotFound:
        raise StorageError(
            f"{folder}: there is no bucket {bucket}; make it (gcloud storage buckets create {GCS}{bucket}), or "
            "give another"
        ) from None
    except DefaultCredentialsError as error:
        raise StorageError(
            f"{folder}: there are no credentials ({first_line(error)}); run gcloud auth application-default login, or "
            "name a key's file in GOOGLE_APPLICATION_CREDENTIALS"
        ) from None
    except Exception as error:  # of three libraries, without a common base
        raise StorageError(
            f"{folder} cannot be used ({first_line(error)}); see that the service can be reached from here, and that "
            "the account has roles/storage.objectUser and roles/storage.legacyBucketReader on the bucket"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# S3


class _OnS3:
    def __init__(self, bucket: str, name: str, timeout: float) -> None:
        self._client = _s3(timeout)
        self._object = {"Bucket": bucket, "Key": name}

    def write(self, data: bytes, over: str) -> str | None:
        condition = {"IfMatch": over} if over else {"IfNoneMatch": "*"}
        try:
            return self._client.put_object(**self._object, **condition, Body=data)["ETag"]
        except Exception as error:
            # 409: two wrote at once; 404: of what was there, which is gone.
            if _status(error) in (404, 409, 412) and _code(error) != "NoSuchBucket":
                return None
            raise

    def read(self) -> tuple[str, bytes]:
        try:
            found = self._client.get_object(**self._object)
        except Exception as error:
            if _code(error) == "NoSuchKey":
                return "", b""
            raise
        return found["ETag"], found["Body"].read()

    def remove(self, stamp: str) -> None:
        """Remove the object if its stamp is current; not every S3-compatible service does this in one step."""
        if self.read()[0] == stamp:
            self._client.delete_object(**self._object)


def _s3(timeout: float) -> Any:
    from botocore.config import Config
    from botocore.session import get_session

    config = Config(
        connect_timeout=timeout, read_timeout=timeout, retries={"mode": "standard", "total_max_attempts": 2}
    )
    return get_session().create_client("s3", config=config)


def _status(error: Exception) -> int | None:
    """Return the HTTP status of the answer in botocore's error."""
    return getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _try_s3(folder: epath.Path) -> None:
    from botocore.exceptions import NoCredentialsError, NoRegionError, PartialCredentialsError

    bucket, mark = folder.parts[2], folder / f"{_MARK}{uuid.uuid4().hex}"
    try:
        _s3(_PATIENCE).list_objects_v2(Bucket=bucket, MaxKeys=1)
        mark.write_bytes(_WRITTEN)
        _see(mark)
        heeded = guarded(mark, _PATIENCE).write(b"written again", over="") is None
        mark.unlink()
    except (NoCredentialsError, PartialCredentialsError, NoRegionError) as error:
        raise StorageError(
            f"{folder}: credentials or their region are missing ({first_line(error)}); run aws configure, or set "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION"
        ) from None
    except Exception as error:  # of two libraries, without a common base
        if _code(error) == "NoSuchBucket":
            raise StorageError(
                f"{folder}: there is no bucket {bucket}; make it (aws s3 mb {S3}{bucket}), or give another"
            ) from None
        raise StorageError(
            f"{folder} cannot be used ({first_line(error)}); see that the service can be reached from here "
            "(AWS_ENDPOINT_URL, where it is not Amazon's), and that the account may list the bucket, and read, write "
            "and delete its objects"
        ) from error
    if not heeded:
        raise StorageError(
            f"{folder} cannot be used: its service ignores If-None-Match and overwrites objects, so two runs could use "
            "one folder; use a service that supports it"
        )
