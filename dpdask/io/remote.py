"""Remote files to read by ranges: what lies close together comes by one request, and each request is made again while the store is busy."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from dpdask.io.faults import report_change
from dpdask.io.filesystems import call_storage, is_local, open_filesystem

_GAP_BYTES = 2**22  # about what a store sends in the time of a request
_BLOCK_BYTES = 2**23

Range = tuple[int, int]


class RemoteFile(io.RawIOBase):
    """A remote file, as long as it was when it was found.

    Parameters
    ----------
    url
        The file.
    size
        Its length in bytes.
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
        """Go to a place, as files do.

        Parameters
        ----------
        offset
            How far.
        whence
            From where: the start, the present place, or the end.
        """
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
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
    """Return the bytes of each range of a file, by one request each.

    Parameters
    ----------
    url
        The file.
    ranges
        Pairs of a start and an end.
    size
        The file's length.

    Raises
    ------
    InputError
        If the file is missing, or has another length, as far as the ranges tell.
    """
    starts = [start for start, _ in ranges]
    ends = [end + (end == size) for _, end in ranges]  # one byte more than there was: a file that grew is noticed

    def read(fs: Any, path: str) -> list[bytes]:
        if is_local(fs):
            return _read_local(path, starts, ends)
        if len(ranges) == 1:
            return [bytes(fs.cat_file(path, start=starts[0], end=ends[0]))]
        return [bytes(part) for part in fs.cat_ranges([path] * len(ranges), starts, ends, on_error="raise")]

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
