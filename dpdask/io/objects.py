"""Files of stores, written and read as a whole, by as few requests as there can be."""

from __future__ import annotations

import glob
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpdask.errors import OutputError
from dpdask.io import filesystems, versions
from dpdask.io.filesystems import call_storage, is_local, protocols
from dpdask.io.options import KINDS

_GLOB = re.compile(r"[*?\[]")
_BROKEN_LINK = {"type": "file", "size": 0}
_MEMORY = threading.Lock()


def create_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file by one request, which fails if the file exists.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    data
        The content, at most `filesystems.MAX_PUT_BYTES`.

    Raises
    ------
    OutputError
        If the file system has no such request, or the content is too large for one.
    """
    names = protocols(fs)
    if len(data) > filesystems.MAX_PUT_BYTES:
        raise OutputError(
            f"this file is larger than one request can write ({filesystems.MAX_PUT_BYTES // 2**20} MiB)", path, "lower output.rows_per_shard"
        )
    if "memory" in names:
        with _MEMORY:
            fs.pipe_file(path, data, mode="create")
    elif "s3" in names:  # s3fs and gcsfs write larger files in parts; S3 gateways check no condition when these are put together
        version = fs.pipe_file(path, data, mode="create", chunksize=2 * filesystems.MAX_PUT_BYTES).get("VersionId")
        if version is not None and versions.keep_first(fs, path) != version:
            raise FileExistsError(path)
    elif "gs" in names:
        fs.pipe_file(path, data, mode="create", chunksize=2 * filesystems.MAX_PUT_BYTES)
    elif names & set(KINDS):
        fs.pipe_file(path, data, mode="create")
    else:
        raise OutputError("this file system has no create-if-absent operation", path, "write to a local folder, or to s3://, az:// or gs://")


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
    if "s3" in protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
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
    if "s3" in protocols(fs) and answer and answer.get("VersionId"):
        with suppress(OutputError):  # who may not remove versions keeps them: the newest is read, and what is private in them is encrypted
            versions.remove_older(fs, path, answer["VersionId"])


def read_file(fs: Any, path: str, *, replaced: bool = False) -> bytes:
    """Return a file's content.

    Parameters
    ----------
    fs, path
        The file system and the path in it.
    replaced
        Whether `replace_file` writes the file, so that its newest version counts; of a file that `create_file` writes it is the oldest.
    """
    if replaced or "s3" not in protocols(fs):
        return bytes(fs.cat_file(path))
    return bytes(fs.cat_file(path, version_id=versions.first_version(fs, path)))


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
    if "s3" in protocols(fs) and versions.keeps_versions(fs, path.partition("/")[0]):
        with suppress(OutputError):  # who may not remove versions hides them: what is private in them is encrypted
            versions.remove_versions(fs, path, recursive=recursive)
            return
    fs.rm(path, recursive=recursive)
    if recursive and not is_local(fs) and fs.find(path):  # s3fs passes over files that it may not remove
        raise PermissionError(path)


def find_files(url: str) -> tuple[str, dict[str, int | None]]:
    """Return the folder that names are relative to, and the path and size of each file there, sorted by path; from listings alone.

    What is no file has no size: a folder that is not looked into (a link to one, or one that a glob names beside files), a pipe, a device.

    Parameters
    ----------
    url
        A file, a folder, or a glob.
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
            return base, measure(fs, {name.rstrip("/"): fs.info(name) if fs.exists(name) else _BROKEN_LINK for name in names})
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
