"""S3 buckets that keep versions: of a file created once the oldest version counts, of a replaced one the newest; removal removes all versions.

Some gateways (radosgw 16 to date) accept a put in such a bucket although its condition (`If-None-Match: *`) fails. The order of the versions is
the same for all, so the first writer still wins. The order is that of the listing: times are whole seconds in many stores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dpdask.errors import OutputError

_PAGE = 1000  # what S3 lists or removes by one request

Entries = list[dict[str, Any]]


@lru_cache(maxsize=64)
def keeps_versions(fs: Any, bucket: str) -> bool:
    """Return whether a bucket keeps versions, or kept them once; False if this user may not know.

    Parameters
    ----------
    fs
        An S3 file system.
    bucket
        The bucket's name.
    """
    try:
        return "Status" in fs.call_s3("get_bucket_versioning", Bucket=bucket)
    except PermissionError:
        return False


def first_version(fs: Any, path: str) -> str | None:
    """Return the version that is the content of a file that is created once; None if its bucket keeps no versions.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    bucket = path.partition("/")[0]
    if not keeps_versions(fs, bucket):
        return None
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    return str(versions[-1]["VersionId"])


def keep_first(fs: Any, path: str) -> str:
    """Remove all versions of a file but the oldest, which is returned.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    OutputError
        If there are others, and this user may not remove versions.
    """
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    _delete(fs, path, versions[:-1])
    return str(versions[-1]["VersionId"])


def remove_older(fs: Any, path: str, version: str) -> None:
    """Remove the versions of a file that are older than one, at most `_PAGE`.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.
    version
        The oldest version that stays.

    Raises
    ------
    OutputError
        If this user may not remove versions.
    """
    bucket, _, key = path.partition("/")
    page = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=key, MaxKeys=_PAGE, KeyMarker=key, VersionIdMarker=version)
    _delete(fs, path, [each for each in page.get("Versions", ()) if each["Key"] == key and each["VersionId"] != version])


def remove_versions(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with all versions that are there now, and none that is written meanwhile.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.
    recursive
        Whether the path may be a folder.

    Raises
    ------
    OutputError
        If this user may not remove versions.
    """
    found = [_list(fs, path), *([_list(fs, f"{path}/", exact=False)] if recursive else [])]
    for versions, markers in found:
        _delete(fs, path, [*versions, *markers])  # a version whose marker went first would be there again


def _live(fs: Any, path: str) -> Entries:
    """Return a file's versions since it was last removed, the newest first."""
    versions, markers = _list(fs, path)
    if not markers:
        return versions
    removed = {each["VersionId"] for each in _list(fs, path, after=markers[0]["VersionId"])[0]}
    return [each for each in versions if each["VersionId"] not in removed]


def _list(fs: Any, path: str, *, exact: bool = True, after: str | None = None) -> tuple[Entries, Entries]:
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
        place = {name: page[f"Next{name}"] for name in ("KeyMarker", "VersionIdMarker") if page.get(f"Next{name}")}


def _delete(fs: Any, path: str, entries: Entries) -> None:
    bucket = path.partition("/")[0]
    objects = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in entries]
    for start in range(0, len(objects), _PAGE):
        if fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects[start : start + _PAGE], "Quiet": True}).get("Errors"):
            hint = "allow s3:DeleteObjectVersion, or use a bucket without versions"
            raise OutputError("old versions of files cannot be removed", f"s3://{bucket}", hint)
