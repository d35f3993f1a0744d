"""Files of stores, written and read as a whole, by as few requests as there can be.

An S3 bucket may keep versions: of a file that is created once the oldest version counts, of one that
is replaced the newest; whoever removes a file removes all its versions.
"""

from __future__ import annotations

import glob
import io
import os
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from dpdask.errors import OutputError
from dpdask.io import filesystems
from dpdask.io.faults import report_change
from dpdask.io.filesystems import KINDS, call_storage, is_local, open_filesystem, protocols

_PAGE = 1000  # what S3 lists or removes by one request

Entries = list[dict[str, Any]]


def _keeps_versions(fs: Any, path: str) -> bool:
    """Return whether a file's bucket keeps versions, or kept them once; False if nobody says."""
    return "s3" in protocols(fs) and _bucket_keeps_versions(fs, path.partition("/")[0])


@lru_cache(maxsize=64)
def _bucket_keeps_versions(fs: Any, bucket: str) -> bool:
    try:
        return "Status" in fs.call_s3("get_bucket_versioning", Bucket=bucket)
    except PermissionError:
        return False


def _find_first(fs: Any, path: str, *, alone: bool = False) -> str:
    """Return the oldest version of a file; it stays `alone` if the later ones are to be removed."""
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    if alone:
        _delete(fs, path, versions[:-1])
    return str(versions[-1]["VersionId"])


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


def _delete(fs: Any, path: str, entries: Entries) -> None:
    bucket = path.partition("/")[0]
    objects = [{name: each[name] for name in ("Key", "VersionId")} for each in entries]
    for start in range(0, len(objects), _PAGE):
        wanted = {"Objects": objects[start : start + _PAGE], "Quiet": True}
        if fs.call_s3("delete_objects", Bucket=bucket, Delete=wanted).get("Errors"):
            hint = "allow s3:DeleteObjectVersion, or use a bucket without versions"
            raise OutputError("old versions of files cannot be removed", f"s3://{bucket}", hint)


_GLOB = re.compile(r"[*?\[]")
_MEMORY = threading.Lock()


def create_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file by one request, which fails if the file exists."""
    names = protocols(fs)
    if len(data) > filesystems.MAX_PUT_BYTES:
        most = filesystems.MAX_PUT_BYTES // 2**20
        what = f"this file is larger than one request can write ({most} MiB)"
        raise OutputError(what, path, "lower output.rows_per_shard")
    if names.isdisjoint({*KINDS, "memory"}):
        hint = "write to a local folder, or to s3://, az:// or gs://"
        raise OutputError("this file system has no create-if-absent operation", path, hint)
    # s3fs and gcsfs write larger files in parts; S3 gateways check no condition when these are put
    # together
    whole = {"chunksize": 2 * filesystems.MAX_PUT_BYTES} if names & {"s3", "gs"} else {}
    with _MEMORY if "memory" in names else nullcontext():
        answer = fs.pipe_file(path, data, mode="create", **whole)
    version = answer.get("VersionId") if "s3" in names else None
    if version is not None and _find_first(fs, path, alone=True) != version:
        raise FileExistsError(path)


def settle_file(fs: Any, path: str) -> None:
    """Remove what other writers left of a file that is there, where a bucket keeps versions."""
    if _keeps_versions(fs, path):
        _find_first(fs, path, alone=True)


def replace_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file, whole, also if it exists."""
    answer = fs.pipe_file(path, data)
    version = answer and answer.get("VersionId") if "s3" in protocols(fs) else None
    if version:
        older = _list(fs, path, after=version)[0]
        # who may not remove versions keeps them: the newest is read, and what is private in them is
        # encrypted
        with suppress(OutputError):
            _delete(fs, path, [each for each in older if each["VersionId"] != version])


def read_file(fs: Any, path: str, *, replaced: bool = False) -> bytes:
    """Return a file's content; `replaced` says that `replace_file` writes it, not `create_file`."""
    if replaced or not _keeps_versions(fs, path):
        return bytes(fs.cat_file(path))
    return bytes(fs.cat_file(path, version_id=_find_first(fs, path)))


def remove_file(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with the versions that a bucket keeps.

    Nothing is removed that is written meanwhile.
    """
    if _keeps_versions(fs, path):
        found = [_list(fs, path), *([_list(fs, f"{path}/", exact=False)] if recursive else [])]
        # who may not remove versions hides them: what is private in them is encrypted
        with suppress(OutputError):
            for versions, markers in found:
                # a version whose marker went first would be there again
                _delete(fs, path, [*versions, *markers])
            return
    fs.rm(path, recursive=recursive)
    # s3fs passes over files that it may not remove
    if recursive and not is_local(fs) and fs.find(path):
        raise PermissionError(path)


def is_glob(url: str) -> bool:
    """Return whether a URL has signs that stand for other names."""
    return _GLOB.search(url) is not None


def find_files(url: str) -> tuple[str, dict[str, int | None]]:
    """Return the folder that names are relative to, and the path and size of each file, by path.

    What is no file has no size: a folder that is not looked into (a link to one, or one that a glob
    names beside files), a pipe, a device. All is from listings alone.
    """

    def find(fs: Any, path: str) -> tuple[str, dict[str, Any]]:
        fs.invalidate_cache()
        if is_glob(path):
            base = _GLOB.split(path)[0].rpartition("/")[0]
            if not is_local(fs):
                return base, fs.glob(path, detail=True)
            names = glob.glob(path, recursive=True, include_hidden=True)  # noqa: PTH207 - it goes through links to folders
            broken = {"type": "file", "size": 0}  # a link to nothing
            return base, {
                name.rstrip("/"): fs.info(name) if fs.exists(name) else broken for name in names
            }
        try:
            info = fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return path.rpartition("/")[0], {}
        if info["type"] == "directory":
            return path.rstrip("/"), fs.find(path, detail=True)
        return path.rpartition("/")[0], {path: info}

    def measure(fs: Any, path: str) -> tuple[str, dict[str, int | None]]:
        base, found = find(fs, path)
        entered = {name.rpartition("/")[0] for name in found}
        return base, {
            name: info["size"] if info["type"] == "file" or _is_file(fs, name) else None
            for name, info in sorted(found.items())
            if info["type"] != "directory" or name not in entered
        }

    return call_storage(url, measure)


def _is_file(fs: Any, name: str) -> bool:
    """Return whether a name that is no file in a listing can be read: a link to a file can.

    A link to nothing counts as well, and is found missing when it is read.
    """
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

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as files do."""
        self._place = offset + (0, self._place, self._size)[whence]
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
    # one byte more than there was: a file that grew is noticed
    asked = [(start, end + (end == size)) for start, end in ranges]

    def read(fs: Any, path: str) -> list[bytes]:
        if is_local(fs):  # Python opens it faster than fsspec does
            with Path(path).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), end - start, start) for start, end in asked]
        if len(asked) == 1:
            return [bytes(fs.cat_file(path, start=asked[0][0], end=asked[0][1]))]
        starts, ends = zip(*asked, strict=True)
        return list(map(bytes, fs.cat_ranges([path] * len(asked), starts, ends, on_error="raise")))

    found = call_storage(url, read) if ranges else []
    if any(len(part) != end - start for part, (start, end) in zip(found, ranges, strict=True)):
        raise report_change(url.rpartition("/")[2])
    return found


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that lie close together as one."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
