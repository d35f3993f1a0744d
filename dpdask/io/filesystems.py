"""Stores by URL: their options, what goes wrong in them said in one line, and the versions that buckets keep of files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Literal

import fsspec

from dpdask.errors import (
    DpdaskError,
    InputError,
    MissingError,
    OutputError,
    SpecError,
    TemporaryError,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_LIBRARIES = {
    "botocore",
    "aiobotocore",
    "s3fs",
    "aiohttp",
    "azure",
    "adlfs",
    "google",
    "gcsfs",
    "requests",
    "urllib3",
}

_CREDENTIALS = ("Credential", "Authentication", "Unauthorized", "Token", "RefreshError")

_BUSY = {408, 425, 429}


Fault = Literal["missing", "short", "exists", "refused", "full", "busy", "other"]


def classify(error: BaseException) -> Fault | None:
    """Return the kind of a failure, or None if it is no failure of a storage."""
    of_library = type(error).__module__.partition(".")[0] in _LIBRARIES
    if not of_library and not isinstance(error, OSError):
        return None
    chain = [error]  # s3fs keeps the answer of the store in the cause
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    status = next((found for found in map(_status, chain) if found is not None), None)
    if status == 507 or any(map(_is_full, chain)):
        return "full"
    if status == 404 or isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing"
    if status in (409, 412) or isinstance(error, FileExistsError):
        return "exists"
    if status == 416:
        return "short"
    if status in (401, 403) or any(map(_is_refusal, chain)):
        return "refused"
    is_busy = of_library or isinstance(error, ConnectionError | TimeoutError)
    if status is not None:
        is_busy = status in _BUSY or status >= 500
    return "busy" if is_busy else "other"


def _answer(error: BaseException) -> dict[str, Any]:
    # botocore keeps a dictionary there, other libraries an object
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else {}


def _status(error: BaseException) -> int | None:
    found = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status_code", "status", "code"):
        found = found if found is not None else getattr(error, name, None)
    return int(found) if isinstance(found, int | str) and str(found).isdecimal() else None


def _is_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _FULL) or "Quota" in str(
        _answer(error).get("Error", {}).get("Code", "")
    )


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, PermissionError) or any(
        word in type(error).__name__ for word in _CREDENTIALS
    ):
        return True
    # all that gcsfs says of 403
    return type(error) is OSError and str(error).startswith("Forbidden:")


def mask(name: str) -> str:
    """Return a file's path without the values in its folders' names, for messages: `sex=…/part-0.parquet`."""
    *folders, last = name.split("/")
    return "/".join(
        [
            *(f"{folder.partition('=')[0]}=…" if "=" in folder else folder for folder in folders),
            last,
        ]
    )


def report_change(where: str) -> InputError:
    """Return the error about an input file that is not the one that was found first."""
    return InputError(
        "this file changed since the run began",
        mask(where),
        "restore it and run again, or `dpdask abort` the run",
    )


def explain(fault: Fault, error: Exception, where: str, *, writing: bool = False) -> DpdaskError:
    """Return the error of one line that a failure becomes."""
    where = mask(where)
    if fault == "short":
        return report_change(where)
    if fault == "missing" and not writing:
        return MissingError("this file is missing", where, "restore it and run again")
    if fault == "missing":
        return OutputError(
            "its folder, bucket or container does not exist", where, "create it and run again"
        )
    if fault == "refused":
        refusal = OutputError if writing else InputError
        return refusal(
            "permission denied", where, "check the credentials, give this user access and run again"
        )
    if fault == "full":
        return TemporaryError(
            "no space left on the device", where, "free space and run again to resume"
        )
    name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
    return TemporaryError(f"the storage failed ({name})", where, "run again to resume")


Options = Mapping[str, Any]

# also the names of extras
KINDS = {
    "s3": "s3",
    "s3a": "s3",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "gs": "gcs",
    "gcs": "gcs",
}

# S3's words in an answer to a removal of many: of what is not there, and of what may pass
_GONE = {"NoSuchKey", "NoSuchVersion"}
_PASSING = {"ConcurrentModification", "InternalError", "OperationAborted", "RequestTimeout"}
_PASSING |= {"ServiceUnavailable", "SlowDown"}

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


def list_options() -> dict[str, Options]:
    """Return the options of all buckets that have some, as jobs gave them: without secrets."""
    return dict(_ACTIVE)


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


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a store's URL and the path in it.

    It keeps no listings, and makes each request once: `storage.call_storage` is what tries again.
    """
    protocol = url.rpartition("::")[2].partition("://")[0]
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


_PAGE = 1000  # what S3 lists or removes by one request

Entries = list[dict[str, Any]]


def protocols(fs: Any) -> set[str]:
    """Return the protocols of a file system."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def keeps_versions(fs: Any, path: str) -> bool:
    """Return whether the bucket of a path keeps versions, or kept them once; False if nobody says."""
    return "s3" in protocols(fs) and _has_versions(fs, path.partition("/")[0])


@lru_cache(maxsize=64)
def _has_versions(fs: Any, bucket: str) -> bool:
    try:
        return "Status" in fs.call_s3("get_bucket_versioning", Bucket=bucket)
    except PermissionError:
        return False


def find_first_version(fs: Any, path: str, *, alone: bool = False) -> str:
    """Return the oldest version of a file; it stays `alone` if the later ones are to be removed."""
    versions, markers = list_versions(fs, path)
    if markers:  # those since it was last removed
        older = list_versions(fs, path, after=markers[0]["VersionId"])[0]
        removed = {each["VersionId"] for each in older}
        versions = [each for each in versions if each["VersionId"] not in removed]
    if not versions:
        raise FileNotFoundError(path)
    if alone:
        delete_versions(fs, path, versions[:-1])
    return str(versions[-1]["VersionId"])


def list_versions(
    fs: Any, path: str, *, exact: bool = True, after: str | None = None
) -> tuple[Entries, Entries]:
    """Return the versions and delete markers of one file, or of all whose path begins so, newest first.

    With `after`, only what is older than this version or marker of the file.
    """
    bucket, _, key = path.partition("/")
    place = {} if after is None else {"KeyMarker": key, "VersionIdMarker": after}
    found: dict[str, Entries] = {"Versions": [], "DeleteMarkers": []}
    while True:
        page = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=key, MaxKeys=_PAGE, **place)
        for kind, entries in found.items():
            entries += [each for each in page.get(kind, ()) if each["Key"] == key or not exact]
        if not page.get("IsTruncated") or (exact and page["NextKeyMarker"] != key):
            return found["Versions"], found["DeleteMarkers"]
        markers = {name: page.get(f"Next{name}") for name in ("KeyMarker", "VersionIdMarker")}
        place = {name: marker for name, marker in markers.items() if marker}


def delete_versions(fs: Any, path: str, entries: Entries) -> None:
    """Remove versions and delete markers from the bucket of a path."""
    bucket = path.partition("/")[0]
    objects = [{name: each[name] for name in ("Key", "VersionId")} for each in entries]
    for start in range(0, len(objects), _PAGE):
        wanted = {"Objects": objects[start : start + _PAGE], "Quiet": True}
        answer = fs.call_s3("delete_objects", Bucket=bucket, Delete=wanted)
        # another driver may remove the same ones at once
        codes = {each.get("Code") for each in answer.get("Errors", ())} - _GONE
        if codes and codes <= _PASSING:
            raise TemporaryError("the store is busy", f"s3://{bucket}", "run again to resume")
        if codes:
            hint = "allow s3:DeleteObjectVersion, or use a bucket without versions"
            raise OutputError("old versions of files cannot be removed", f"s3://{bucket}", hint)
