"""What went wrong with a storage: failures of many libraries, told apart by kind and turned into one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from dpdask.errors import DpdaskError, InputError, MissingError, OutputError, TemporaryError

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


class Fault(Enum):
    """Kinds of failures of a storage: what is missing, shorter than asked for, there already, refused, full, busy, or another."""

    MISSING = "missing"
    SHORT = "short"
    EXISTS = "exists"
    REFUSED = "refused"
    FULL = "full"
    BUSY = "busy"
    OTHER = "other"


def classify(error: BaseException) -> Fault | None:
    """Return the kind of a failure, or None if it is no failure of a storage."""
    if (
        not isinstance(error, OSError)
        and type(error).__module__.partition(".")[0] not in _LIBRARIES
    ):
        return None
    chain = _chain(error)
    status = next((found for found in map(_status, chain) if found is not None), None)
    if any(_is_full(link) for link in chain) or status == 507:
        return Fault.FULL
    if isinstance(error, FileNotFoundError) or status == 404:
        return Fault.MISSING
    if isinstance(error, FileExistsError) or status in (409, 412):
        return Fault.EXISTS
    if status == 416:
        return Fault.SHORT
    if status in (401, 403) or any(_is_refusal(link) for link in chain):
        return Fault.REFUSED
    if status is not None:
        return Fault.BUSY if status in _BUSY or status >= 500 else Fault.OTHER
    libraries = type(error).__module__.partition(".")[0] in _LIBRARIES
    return (
        Fault.BUSY
        if libraries or isinstance(error, ConnectionError | TimeoutError)
        else Fault.OTHER
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes: s3fs keeps the answer of the store in the cause."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _answer(error: BaseException) -> dict[str, Any]:
    answer = getattr(
        error, "response", None
    )  # botocore keeps a dictionary there, other libraries an object
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
    return type(error) is OSError and str(error).startswith(
        "Forbidden:"
    )  # all that gcsfs says of 403


@contextmanager
def storage_faults(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn a file system's exceptions into errors with an exit code; the messages of libraries are not passed on.

    Parameters
    ----------
    writing
        Whether the output is written; then a refusal is an OutputError.
    """
    try:
        yield
    except DpdaskError:
        raise
    except Exception as error:
        fault = classify(error)
        if fault is None:
            raise
        raise explain(fault, error, where, writing=writing) from None


@contextmanager
def metadata_faults(where: str, hint: str) -> Iterator[None]:
    """Turn what a library raises while it reads a table's metadata into one line: of corrupt files that can be any exception."""
    with storage_faults(where):
        try:
            yield
        except DpdaskError:
            raise
        except Exception as error:
            if classify(error) is not None:
                raise
            raise InputError("its metadata cannot be read: they are corrupt", where, hint) from None


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
    if fault is Fault.SHORT:
        return report_change(where)
    if fault is Fault.MISSING and not writing:
        return MissingError("this file is missing", where, "restore it and run again")
    if fault is Fault.MISSING:
        return OutputError(
            "its folder, bucket or container does not exist", where, "create it and run again"
        )
    if fault is Fault.REFUSED:
        refusal = OutputError if writing else InputError
        return refusal(
            "permission denied", where, "check the credentials, give this user access and run again"
        )
    if fault is Fault.FULL:
        return TemporaryError(
            "no space left on the device", where, "free space and run again to resume"
        )
    name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
    return TemporaryError(f"the storage failed ({name})", where, "run again to resume")
