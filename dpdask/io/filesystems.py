"""The one place that opens a file system for a URL, and the one place that calls it again after a failure that may pass."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import SpecError
from dpdask.io.faults import Fault, classify, explain

Options = Mapping[str, Any]

KINDS = {
    "s3": "s3",
    "s3a": "s3",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "gs": "gcs",
    "gcs": "gcs",
}  # also the names of extras
_SECRET = re.compile(
    r"(^|_)([a-z]*(key|secret|token|credential|cookie|pwd|pass(wd|word|phrase|code))s?|pass|pw|[a-z]*sas|sig|jwt|bearer|[a-z]*authorization"
    r"|connection_string)($|_)|(^|_)([a-z]*auth|signature)$"
)
_NAMED = re.compile(r"([\w.-]+)\s*[=:]")  # in a value: of a connection string, a header's line
_USER, _QUERY = re.compile(r"(:|//).*@", re.DOTALL), re.compile(r"\?.")
_BY_NAME = "write {env: NAME} with the name of an environment variable that holds it"
# by root, in this process; secrets stand in it by the names of variables alone
_ACTIVE: dict[str, Options] = {}


def check_options(storage: object) -> dict[str, dict[str, Any]]:
    """Return a job's `storage:` block, by protocol, after checking that no secret stands in it.

    Values are never shown.
    """
    if not isinstance(storage, dict):
        what, hint = "a mapping of protocols to options is expected", "{s3: {endpoint_url: …}}"
        raise SpecError(what, "storage", f"write storage: {hint}")
    for protocol, options in storage.items():
        place = f"storage.{protocol}"
        if protocol not in fsspec.available_protocols():
            hint = "name one such as s3, az or gs"
            raise SpecError("no file system has this protocol", place, hint)
        if not isinstance(options, dict):
            hint = "write endpoint_url: … or the like below it"
            raise SpecError("a mapping of options is expected", place, hint)
        _check_value(options, place, secret=False)
    return storage


def _is_secret(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name)
    return _SECRET.search(snake.lower()) is not None


def _check_value(value: object, place: str, *, secret: bool) -> None:
    if isinstance(value, dict) and "env" in value:
        if len(value) > 1 or not isinstance(value["env"], str) or not value["env"]:
            what = "a reference has one key, the name of an environment variable"
            raise SpecError(what, place, "write {env: NAME}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_value(inner, f"{place}.{name}", secret=secret or _is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_value(inner, place, secret=secret)
    elif value is not None:
        text = value if isinstance(value, str) else ""
        found = {
            "a secret": secret,
            "a URL with a user or password": _USER.search(text),
            "a URL with a query": _QUERY.search(text),
            "a secret, by its name,": any(map(_is_secret, _NAMED.findall(text))),
        }
        for what in (what for what, is_there in found.items() if is_there):
            raise SpecError(f"{what.partition(',')[0]} must not appear in a job", place, _BY_NAME)


def root(url: str) -> str | None:
    """Return the bucket or container of a URL, with a name of its kind of store; None for local paths."""
    protocol, separator, rest = url.rpartition("::")[2].partition("://")
    if not separator or protocol in ("file", "local", "memory"):
        return None
    return f"{KINDS.get(protocol, protocol)}://{rest.partition('/')[0]}"


def by_root(storage: Mapping[str, Options], urls: Iterable[str]) -> dict[str, Options]:
    """Return the options of the buckets that some URLs lie in; empty ones where the environment decides."""
    kinds = {KINDS.get(protocol, protocol): options for protocol, options in storage.items()}
    roots = filter(None, map(root, urls))
    return {place: kinds.get(place.partition("://")[0], {}) for place in roots}


@contextmanager
def use_options(options: Mapping[str, Options]) -> Iterator[None]:
    """Open these buckets with these options, in this process, until the block ends."""
    before = dict(_ACTIVE)
    set_options(options)
    try:
        yield
    finally:
        _ACTIVE.clear()
        _ACTIVE.update(before)


def set_options(options: Mapping[str, Options]) -> None:
    """Open these buckets with these options from now on, in this process."""
    _ACTIVE.update(options)


def resolve_options(url: str) -> dict[str, Any]:
    """Return the options of a URL's bucket, with the values of the environment variables that they name.

    Privacy
    -------
    The result holds secrets: never put it in a message, log, file or graph.
    """
    found = _ACTIVE.get(root(url) or "", {})
    return {name: _resolve(value, name) for name, value in found.items()}


def _resolve(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_resolve(inner, name) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if "env" not in value:
        return {key: _resolve(inner, f"{name}.{key}") for key, inner in value.items()}
    found = os.environ.get(value["env"])
    if found is None:
        what = f"the environment variable {value['env']} is not set in this process"
        raise SpecError(what, f"storage, {name}", "set it for the driver and for every worker")
    return found


MAX_PUT_BYTES = 5000 * 2**20  # the largest single put: 5 GiB on S3, 5000 MiB on Azure
_GET_BYTES = 2**28
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.3

T = TypeVar("T")


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    A remote one keeps no listings, and makes each request once: `call_storage` is what tries again.
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
        what = "no file system is installed for this URL"
        raise SpecError(what, f"{protocol}://", hint) from None
    options = resolve_options(url)
    try:
        if kind is None or "::" in url:
            return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]  # fsspec is untyped
        options["use_listings_cache"] = False
        if kind == "azure":
            azure = _azure()
            options = {**azure._get_kwargs_from_urls(url), **options}
            return azure(**options), azure._strip_protocol(url)
        if kind == "s3":
            configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            settings = options.get("config_kwargs") or configured
            options["config_kwargs"] = {**settings, "retries": {"total_max_attempts": 1}}
            # else a file's size is asked for before it is read
            options.setdefault("max_concurrency", 1)
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, TypeError, KeyError):
        hint = "check its credentials, in the environment or in the job's `storage`"
        what = "the store cannot be opened with these options"
        raise SpecError(what, f"{protocol}://", hint) from None
    fs.retries = 1
    return fs, path


@cache
def _local() -> LocalFileSystem:
    # it has no state, and fsspec's search for one that exists takes longer than a small read
    return LocalFileSystem()


@cache
def _azure() -> Any:
    """Return Azure's file system without retries of its own, and with single puts.

    Of a blob in blocks, two writers' blocks would mix.
    """
    from adlfs import AzureBlobFileSystem
    from azure.storage.blob.aio import BlobServiceClient

    class AzureFileSystem(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs is untyped
        def do_connect(self) -> None:
            super().do_connect()
            found: Any = self.service_client
            names = ("max_single_put_size", "max_single_get_size", "max_chunk_get_size")
            sizes: Any = dict(zip(names, (MAX_PUT_BYTES, _GET_BYTES, _GET_BYTES), strict=True))
            self.service_client: Any = BlobServiceClient(
                found.url, credential=found.credential, retry_total=0, **sizes
            )

    return AzureFileSystem


def call_storage(url: str, call: Callable[[Any, str], T], *, writing: bool = False) -> T:
    """Return what a call on a URL's file system returns; try again while the store is busy.

    A store that refuses is asked once more with a new file system, since credentials may have been
    renewed outside.

    Parameters
    ----------
    call
        Called with the file system and the path; may be called again, so it must do no harm the
        second time.
    """
    renewed = False
    attempt = 0
    while True:
        fs, path = open_filesystem(url)
        try:
            return call(fs, path)
        except Exception as error:
            fault = classify(error)
            if fault is None:
                raise
            if fault is Fault.REFUSED and not renewed and not is_local(fs):
                renewed = True
                if open_filesystem(url)[0] is fs:  # else another thread has done so
                    type(fs).clear_instance_cache()
            elif fault is Fault.BUSY and attempt < _TRIES - 1:
                # twice as long each time, and not at the same moment as other processes
                jitter = uuid.uuid4().int % 1000 / 1000
                time.sleep(_FIRST_WAIT_SECONDS * 2**attempt * (0.5 + jitter))
                attempt += 1
            else:
                raise explain(fault, error, path, writing=writing) from None


def protocols(fs: Any) -> set[str]:
    """Return the protocols of a file system."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def is_local(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return isinstance(fs, LocalFileSystem)
