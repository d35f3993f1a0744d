"""Files of stores, written and read as a whole, by as few requests as there can be."""

from __future__ import annotations

import glob
import io
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from dpdask.errors import OutputError
from dpdask.io import filesystems
from dpdask.io import objects as versions
from dpdask.io.faults import report_change
from dpdask.io.filesystems import KINDS, call_storage, is_local, open_filesystem, protocols

_PAGE = 1000  # what S3 lists or removes by one request

Entries = list[dict[str, Any]]


@lru_cache(maxsize=64)
def keeps_versions(fs: Any, bucket: str) -> bool:
    """Return whether a bucket keeps versions, or kept them once; False if this user may not know."""
    try:
        return "Status" in fs.call_s3("get_bucket_versioning", Bucket=bucket)
    except PermissionError:
        return False


def first_version(fs: Any, path: str) -> str | None:
    """Return the version that is the content of a file that is created once; None if its bucket keeps no versions."""
    bucket = path.partition("/")[0]
    if not keeps_versions(fs, bucket):
        return None
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    return str(versions[-1]["VersionId"])


def keep_first(fs: Any, path: str) -> str:
    """Remove all versions of a file but the oldest, which is returned."""
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    _delete(fs, path, versions[:-1])
    return str(versions[-1]["VersionId"])


def remove_older(fs: Any, path: str, version: str) -> None:
    """Remove the versions of a file that are older than one, at most `_PAGE`."""
    bucket, _, key = path.partition("/")
    page = fs.call_s3(
        "list_object_versions",
        Bucket=bucket,
        Prefix=key,
        MaxKeys=_PAGE,
        KeyMarker=key,
        VersionIdMarker=version,
    )
    _delete(
        fs,
        path,
        [
            each
            for each in page.get("Versions", ())
            if each["Key"] == key and each["VersionId"] != version
        ],
    )


def remove_versions(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with all versions that are there now, and none that is written meanwhile."""
    found = [_list(fs, path), *([_list(fs, f"{path}/", exact=False)] if recursive else [])]
    for there, markers in found:
        _delete(
            fs, path, [*there, *markers]
        )  # a version whose marker went first would be there again


def _live(fs: Any, path: str) -> Entries:
    """Return a file's versions since it was last removed, the newest first."""
    versions, markers = _list(fs, path)
    if not markers:
        return versions
    removed = {each["VersionId"] for each in _list(fs, path, after=markers[0]["VersionId"])[0]}
    return [each for each in versions if each["VersionId"] not in removed]


def _list(
    fs: Any, path: str, *, exact: bool = True, after: str | None = None
) -> tuple[Entries, Entries]:
    """Return the versions and the delete markers of one file, or of all whose path begins so; of each file the newest first.

    With `after`, only what is older than this version or marker of the file.
    """
    bucket, _, key = path.partition("/")
    place = {} if after is None else {"KeyMarker": key, "VersionIdMarker": after}
    versions: Entries = []
    markers: Entries = []
    while True:
        page = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=key, MaxKeys=_PAGE, **place)
        for kind, found in (("Versions", versions), ("DeleteMarkers", markers)):
            found += [each for each in page.get(kind, ()) if each["Key"] == key or not exact]
        if not page.get("IsTruncated") or (exact and page["NextKeyMarker"] != key):
            return versions, markers
        place = {
            name: page[f"Next{name}"]
            for name in ("KeyMarker", "VersionIdMarker")
            if page.get(f"Next{name}")
        }


def _delete(fs: Any, path: str, entries: Entries) -> None:
    bucket = path.partition("/")[0]
    objects = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in entries]
    for start in range(0, len(objects), _PAGE):
        if fs.call_s3(
            "delete_objects",
            Bucket=bucket,
            Delete={"Objects": objects[start : start + _PAGE], "Quiet": True},
        ).get("Errors"):
            hint = "allow s3:DeleteObjectVersion, or use a bucket without versions"
            raise OutputError("old versions of files cannot be removed", f"s3://{bucket}", hint)


_GLOB = re.compile(r"[*?\[]")
_BROKEN_LINK = {"type": "file", "size": 0}
_MEMORY = threading.Lock()


def create_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file by one request, which fails if the file exists."""
    names = protocols(fs)
    if len(data) > filesystems.MAX_PUT_BYTES:
        raise OutputError(
            f"this file is larger than one request can write ({filesystems.MAX_PUT_BYTES // 2**20} MiB)",
            path,
            "lower output.rows_per_shard",
        )
    if "memory" in names:
        with _MEMORY:
            fs.pipe_file(path, data, mode="create")
    elif (
        "s3" in names
    ):  # s3fs and gcsfs write larger files in parts; S3 gateways check no condition when these are put together
        version = fs.pipe_file(
            path, data, mode="create", chunksize=2 * filesystems.MAX_PUT_BYTES
        ).get("VersionId")
        if version is not None and versions.keep_first(fs, path) != version:
            raise FileExistsError(path)
    elif "gs" in names:
        fs.pipe_file(path, data, mode="create", chunksize=2 * filesystems.MAX_PUT_BYTES)
    elif names & set(KINDS):
        fs.pipe_file(path, data, mode="create")
    else:
        raise OutputError(
            "this file system has no create-if-absent operation",
            path,
            "write to a local folder, or to s3://, az:// or gs://",
        )


def settle_file(fs: Any, path: str) -> None:
    """Remove what other writers left of a file that is there, where a bucket keeps versions."""
    if "s3" in protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
        versions.keep_first(fs, path)


def replace_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file, whole, also if it exists."""
    answer = fs.pipe_file(path, data)
    if "s3" in protocols(fs) and answer and answer.get("VersionId"):
        with suppress(
            OutputError
        ):  # who may not remove versions keeps them: the newest is read, and what is private in them is encrypted
            versions.remove_older(fs, path, answer["VersionId"])


def read_file(fs: Any, path: str, *, replaced: bool = False) -> bytes:
    """Return a file's content.

    Parameters
    ----------
    replaced
        Whether `replace_file` writes the file, so that its newest version counts; of a file that
        `create_file` writes it is the oldest.
    """
    if replaced or "s3" not in protocols(fs):
        return bytes(fs.cat_file(path))
    return bytes(fs.cat_file(path, version_id=versions.first_version(fs, path)))


def remove_file(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with the versions that an S3 bucket keeps."""
    if "s3" in protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
        with suppress(
            OutputError
        ):  # who may not remove versions hides them: what is private in them is encrypted
            versions.remove_versions(fs, path, recursive=recursive)
            return
    fs.rm(path, recursive=recursive)
    if (
        recursive and not is_local(fs) and fs.find(path)
    ):  # s3fs passes over files that it may not remove
        raise PermissionError(path)


def find_files(url: str) -> tuple[str, dict[str, int | None]]:
    """Return the folder that names are relative to, and the path and size of each file there, sorted by path; from listings alone.

    What is no file has no size: a folder that is not looked into (a link to one, or one that a glob
    names beside files), a pipe, a device.
    """

    def measure(fs: Any, found: dict[str, Any]) -> dict[str, int | None]:
        entered = {name.rpartition("/")[0] for name in found}
        return {
            name: info["size"] if info["type"] == "file" or _is_file(fs, name) else None
            for name, info in found.items()
            if info["type"] != "directory" or name not in entered
        }

    def find(fs: Any, path: str) -> tuple[str, dict[str, int | None]]:
        fs.invalidate_cache()
        if _GLOB.search(path):
            base = _GLOB.split(path)[0].rpartition("/")[0]
            if not is_local(fs):
                return base, measure(fs, fs.glob(path, detail=True))
            names = glob.glob(path, recursive=True, include_hidden=True)  # noqa: PTH207 - it goes through links to folders
            return base, measure(
                fs,
                {
                    name.rstrip("/"): fs.info(name) if fs.exists(name) else _BROKEN_LINK
                    for name in names
                },
            )
        try:
            info = fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return path.rpartition("/")[0], {}
        if info["type"] == "directory":
            return path.rstrip("/"), measure(fs, fs.find(path, detail=True))
        return path.rpartition("/")[0], measure(fs, {path: info})

    base, found = call_storage(url, find)
    return base, {path: found[path] for path in sorted(found)}


def _is_file(fs: Any, name: str) -> bool:
    """Return whether a name that a listing does not call a file can be read as one: a link to a file can, and one to nothing is found missing."""
    if not is_local(fs):
        return not fs.isdir(name)
    return Path(name).is_file() or not Path(name).exists()


_GAP_BYTES = 2**22  # about what a store sends in the time of a request
_BLOCK_BYTES = 2**23

Range = tuple[int, int]


class RemoteFile(io.RawIOBase):
    """A remote file, as long as it was when it was found.

    Parameters
    ----------
    ranges
        What is read at once: pairs of a start and an end. All else is read when it is asked for.
    """

    def __init__(self, url: str, size: int, ranges: Iterable[Range] = ()) -> None:
        self._url, self._size, self._place = url, size, 0
        joined = join_ranges(ranges)
        self._parts = dict(zip(joined, read_ranges(url, joined, size), strict=True))

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as files do."""
        self._place = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        )
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the file goes, and return how far that was."""
        view = memoryview(buffer).cast("B")
        start, end = self._place, min(self._place + len(view), self._size)
        if end <= start:
            return 0
        view[: end - start] = self._find(start, end)
        self._place = end
        return end - start

    def _find(self, start: int, end: int) -> memoryview:
        for (first, last), part in self._parts.items():
            if first <= start and end <= last:
                return memoryview(part)[start - first : end - first]
        return memoryview(read_ranges(self._url, [(start, end)], self._size)[0])


def open_remote(url: str) -> IO[bytes]:
    """Return a file to read from its start to its end, block by block; a local one is opened as it is."""
    fs, path = open_filesystem(url)
    if is_local(fs):
        return fs.open(path, "rb")  # type: ignore[no-any-return]  # fsspec is untyped
    size = int(call_storage(url, lambda fs, path: fs.info(path)["size"]))
    return io.BufferedReader(RemoteFile(url, size), _BLOCK_BYTES)


def read_ranges(url: str, ranges: Sequence[Range], size: int) -> list[bytes]:
    """Return the bytes of each range of a file, by one request each."""
    starts = [start for start, _ in ranges]
    ends = [
        end + (end == size) for _, end in ranges
    ]  # one byte more than there was: a file that grew is noticed

    def read(fs: Any, path: str) -> list[bytes]:
        if is_local(fs):
            return _read_local(path, starts, ends)
        if len(ranges) == 1:
            return [bytes(fs.cat_file(path, start=starts[0], end=ends[0]))]
        return [
            bytes(part)
            for part in fs.cat_ranges([path] * len(ranges), starts, ends, on_error="raise")
        ]

    found = call_storage(url, read) if ranges else []
    if any(len(part) != end - start for part, (start, end) in zip(found, ranges, strict=True)):
        raise report_change(url.rpartition("/")[2])
    return found


def _read_local(path: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Return bytes of a local file, which Python opens faster than fsspec does."""
    parts = []
    with Path(path).open("rb") as file:
        for start, end in zip(starts, ends, strict=True):
            file.seek(start)
            parts.append(file.read(end - start))
    return parts


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that lie close together as one."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
