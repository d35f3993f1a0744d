"""The one place that opens a file system for a URL, and the one place that calls it again after a failure that may pass."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import OutputError, SpecError
from dpdask.io import versions
from dpdask.io.faults import Fault, classify, storage_faults

MAX_PUT_BYTES = 5000 * 2**20  # the largest single put: 5 GiB on S3, 5000 MiB on Azure

_SINGLE = 2 * MAX_PUT_BYTES  # s3fs and gcsfs write larger files in parts; S3 gateways check no condition when these are put together
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.3
_EXTRAS = {"s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure", "abfss": "azure", "gs": "gcs", "gcs": "gcs"}

_MEMORY = threading.Lock()

T = TypeVar("T")


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    A remote one keeps no listings, and makes each request once: `call_storage` is what tries again.

    Raises
    ------
    SpecError
        If no file system is installed for the URL, or its options are wrong.
    """
    protocol = url.partition("://")[0]
    extra = _EXTRAS.get(protocol)
    try:
        fsspec.get_filesystem_class(protocol.rpartition("::")[2])
    except (ValueError, ImportError):
        hint = f"install dpdask[{extra}]" if extra else "install the fsspec package for it"
        raise SpecError("no file system is installed for this URL", f"{protocol}://", hint) from None
    try:
        if extra is None:
            return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]  # fsspec is untyped
        if extra == "azure":
            azure = _azure()
            return azure(**azure._get_kwargs_from_urls(url), use_listings_cache=False), azure._strip_protocol(url)
        options: dict[str, Any] = {"use_listings_cache": False}
        if extra == "s3":
            settings = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            options["config_kwargs"] = {**settings, "retries": {"total_max_attempts": 1}}
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, TypeError, KeyError):
        raise SpecError("the store cannot be opened with these options", f"{protocol}://", "check its credentials in the environment") from None
    fs.retries = 1
    return fs, path


@cache
def _azure() -> Any:
    """Return Azure's file system with single puts: of a blob in blocks, two writers' blocks would mix; and with no retries of its own."""
    from adlfs import AzureBlobFileSystem
    from azure.storage.blob.aio import BlobServiceClient

    class AzureFileSystem(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs is untyped
        def do_connect(self) -> None:
            super().do_connect()
            found: Any = self.service_client
            self.service_client: Any = BlobServiceClient(found.url, credential=found.credential, max_single_put_size=MAX_PUT_BYTES, retry_total=0)

    return AzureFileSystem


def call_storage(url: str, call: Callable[[Any, str], T], *, writing: bool = False) -> T:
    """Return what a call on a URL's file system returns; try again while the store is busy.

    A store that refuses is asked once more with a new file system, since credentials may have been renewed outside.

    Parameters
    ----------
    url
        The file or folder.
    call
        Called with the file system and the path; may be called again, so it must do no harm the second time.
    writing
        As for `storage_faults`.
    """
    renewed = False
    attempt = 0
    while True:
        fs, path = open_filesystem(url)
        with storage_faults(path, writing=writing):
            try:
                return call(fs, path)
            except Exception as error:
                fault = classify(error)
                if fault is Fault.REFUSED and not renewed and not is_local(fs):
                    renewed = True
                    if open_filesystem(url)[0] is fs:  # else another thread has done so
                        type(fs).clear_instance_cache()
                elif fault is Fault.BUSY and attempt < _TRIES - 1:
                    _wait(attempt)
                    attempt += 1
                else:
                    raise


def _wait(attempt: int) -> None:
    """Wait before another attempt: twice as long each time, and not at the same moment as other processes."""
    jitter = uuid.uuid4().int % 1000 / 1000
    time.sleep(_FIRST_WAIT_SECONDS * 2**attempt * (0.5 + jitter))


def create_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file by one request, which fails if the file exists.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    data
        The content, at most `MAX_PUT_BYTES`.

    Raises
    ------
    OutputError
        If the file system has no such request, or the content is too large for one.
    """
    protocols = _protocols(fs)
    if len(data) > MAX_PUT_BYTES:
        raise OutputError(f"this file is larger than one request can write ({MAX_PUT_BYTES // 2**20} MiB)", path, "lower output.rows_per_shard")
    if "memory" in protocols:
        with _MEMORY:
            fs.pipe_file(path, data, mode="create")
    elif "s3" in protocols:
        version = fs.pipe_file(path, data, mode="create", chunksize=_SINGLE).get("VersionId")
        if version is not None and versions.keep_first(fs, path) != version:
            raise FileExistsError(path)
    elif "gs" in protocols:
        fs.pipe_file(path, data, mode="create", chunksize=_SINGLE)
    elif protocols & set(_EXTRAS):
        fs.pipe_file(path, data, mode="create")
    else:
        raise OutputError(
            "this file system cannot write a file only if it does not exist", path, "write to a local folder, or to s3://, az:// or gs://"
        )


def settle_file(fs: Any, path: str) -> None:
    """Remove what other writers left of a file that is there, where a bucket keeps versions.

    Parameters
    ----------
    fs, path
        The file system and the path in it.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    if "s3" in _protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
        versions.keep_first(fs, path)


def replace_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file, whole, also if it exists.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    data
        The content.
    """
    answer = fs.pipe_file(path, data)
    if "s3" in _protocols(fs) and answer and answer.get("VersionId"):
        versions.keep_from(fs, path, answer["VersionId"])


def read_file(fs: Any, path: str) -> bytes:
    """Return a file's content.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    """
    if "s3" not in _protocols(fs):
        return bytes(fs.cat_file(path))
    return bytes(fs.cat_file(path, version_id=versions.first_version(fs, path), max_concurrency=1))  # else its size is asked for first


def remove_file(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with the versions that an S3 bucket keeps.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    recursive
        Whether the path is a folder.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    if "s3" in _protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
        with suppress(OutputError):  # who may not remove versions hides them: what is private in them is encrypted
            versions.remove_versions(fs, path, recursive=recursive)
            return
    fs.rm(path, recursive=recursive)
    if recursive and not is_local(fs) and fs.find(path):  # s3fs passes over files that it may not remove
        raise PermissionError(path)


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def is_local(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return isinstance(fs, LocalFileSystem)
