"""S3 buckets that keep versions: of a file written once the oldest version counts, and what is removed is removed with all versions.

Some gateways (radosgw 16 to date) accept a put in such a bucket although its condition (`If-None-Match: *`) fails. The order of the versions is
the same for all, so the first writer still wins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dpdask.errors import OutputError


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
    """Return the version that is a file's content; None if its bucket keeps no versions.

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
    return versions[-1]


def keep_first(fs: Any, path: str) -> str:
    """Remove all versions of a file but the oldest, which is returned.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.
    """
    versions = _live(fs, path)
    if not versions:
        raise FileNotFoundError(path)
    bucket, _, key = path.partition("/")
    _delete(fs, bucket, [{"Key": key, "VersionId": version} for version in versions[:-1]])
    return versions[-1]


def keep_from(fs: Any, path: str, version: str) -> None:
    """Remove all versions of a file that are older than one.

    Parameters
    ----------
    fs, path
        The S3 file system and the path in it.
    version
        The oldest version that stays.
    """
    versions = _live(fs, path)
    bucket, _, key = path.partition("/")
    older = versions[versions.index(version) + 1 :] if version in versions else []
    _delete(fs, bucket, [{"Key": key, "VersionId": each} for each in older])


def remove_versions(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with all versions; nothing happens if there is none.

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
    bucket, _, key = path.partition("/")
    for prefix in (key, f"{key}/") if recursive else (key,):
        while True:
            page = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=prefix)
            found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
            objects = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in found if prefix != key or each["Key"] == key]
            if not objects:
                break
            _delete(fs, bucket, objects)


def _live(fs: Any, path: str) -> list[str]:
    """Return a file's versions since it was last removed, the newest first."""
    bucket, _, key = path.partition("/")
    page = fs.call_s3("list_object_versions", Bucket=bucket, Prefix=key)
    removed = [marker["LastModified"] for marker in page.get("DeleteMarkers", ()) if marker["Key"] == key]
    versions = [version for version in page.get("Versions", ()) if version["Key"] == key]
    return [version["VersionId"] for version in versions if not removed or version["LastModified"] > max(removed)]


def _delete(fs: Any, bucket: str, objects: list[dict[str, str]]) -> None:
    if objects and fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True}).get("Errors"):
        hint = "allow s3:DeleteObjectVersion, or use a bucket without versions"
        raise OutputError("old versions of files cannot be removed", f"s3://{bucket}", hint)
