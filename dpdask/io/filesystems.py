"""The one place that opens a file system for a URL, and the one place that calls it again after a failure that may pass."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import SpecError
from dpdask.io.faults import Fault, classify, storage_faults
from dpdask.io.options import KINDS, resolve_options

MAX_PUT_BYTES = 5000 * 2**20  # the largest single put: 5 GiB on S3, 5000 MiB on Azure
_GET_BYTES = 2**28
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.3

T = TypeVar("T")


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    A remote one keeps no listings, and makes each request once: `call_storage` is what tries again.

    Raises
    ------
    SpecError
        If no file system is installed for the URL, or its options are wrong.
    """
    protocol = url.rpartition("::")[2].partition("://")[0] if "://" in url else "file"
    if protocol == "file" and "::" not in url:
        local = _local()
        return local, str(local._strip_protocol(url))
    kind = KINDS.get(protocol)
    try:
        fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError):
        hint = f"install dpdask[{kind}]" if kind else "install the fsspec package for it"
        raise SpecError("no file system is installed for this URL", f"{protocol}://", hint) from None
    options = resolve_options(url)
    try:
        if kind is None or "::" in url:
            return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]  # fsspec is untyped
        options["use_listings_cache"] = False
        if kind == "azure":
            azure = _azure()
            return azure(**{**azure._get_kwargs_from_urls(url), **options}), azure._strip_protocol(url)
        if kind == "s3":
            settings = options.get("config_kwargs") or fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            options["config_kwargs"] = {**settings, "retries": {"total_max_attempts": 1}}
            options.setdefault("max_concurrency", 1)  # else a file's size is asked for before it is read
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, TypeError, KeyError):
        hint = "check its credentials, in the environment or in the job's `storage`"
        raise SpecError("the store cannot be opened with these options", f"{protocol}://", hint) from None
    fs.retries = 1
    return fs, path


@cache
def _local() -> LocalFileSystem:
    """Return this machine's file system: it has no state, and fsspec's own search for one that exists takes longer than a small read."""
    return LocalFileSystem()


@cache
def _azure() -> Any:
    """Return Azure's file system with single puts: of a blob in blocks, two writers' blocks would mix; and with no retries of its own."""
    from adlfs import AzureBlobFileSystem
    from azure.storage.blob.aio import BlobServiceClient

    class AzureFileSystem(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs is untyped
        def do_connect(self) -> None:
            super().do_connect()
            found: Any = self.service_client
            sizes: Any = {"max_single_put_size": MAX_PUT_BYTES, "max_single_get_size": _GET_BYTES, "max_chunk_get_size": _GET_BYTES}
            self.service_client: Any = BlobServiceClient(found.url, credential=found.credential, retry_total=0, **sizes)

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


def protocols(fs: Any) -> set[str]:
    """Return the protocols of a file system."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def is_local(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return isinstance(fs, LocalFileSystem)
