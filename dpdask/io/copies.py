"""Files with the same rows: copies, links, and compressed copies, whatever their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from dpdask.errors import InputError
from dpdask.io import csv
from dpdask.io.faults import storage_faults
from dpdask.io.fragment import Fragment
from dpdask.io.remote import open_remote
from dpdask.io.threads import map_files


def check_copies(fragments: Sequence[Fragment], released: Sequence[Fragment] = ()) -> None:
    """Check that no file is a copy of another one, or of a released one.

    Raises
    ------
    InputError
        If one is.
    """
    known = {fragment.url for fragment in released}
    for file, other in find_copies(fragments, released):
        what = f"rows seen again: this file is a copy of {other.name}{', which was released' if other.url in known else ''}"
        raise InputError(what, file.name, "remove it, or, if it holds other rows that happen to be equal, put them into a file with more rows")


def find_copies(fragments: Sequence[Fragment], known: Sequence[Fragment] = ()) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield a fragment of each file that is a copy of a known file or of one before it, and a fragment of that file.

    Files are read only if their footers, or the beginnings of their texts, agree. Without rows, or with other values of partition
    columns, they are no copies.
    """
    fresh = {fragment.url for fragment in fragments}
    alike: dict[tuple[str, str], dict[str, Fragment]] = {}
    for fragment in (*known, *fragments):
        if fragment.n_rows != 0:
            alike.setdefault((fragment.alike, repr(fragment.constants)), {}).setdefault(fragment.url, fragment)
    for files in alike.values():
        if len(files) > 1 and not fresh.isdisjoint(files):
            seen: dict[bytes, Fragment] = {}
            for file, digest in zip(files.values(), map_files(_digest, list(files.values())), strict=True):
                other = file if digest is None else seen.setdefault(digest, file)
                if other is not file and file.url in fresh:
                    yield file, other


def _digest(fragment: Fragment) -> bytes | None:
    with storage_faults(fragment.name):
        if fragment.format == "csv":
            return csv.digest(fragment.url)
        with open_remote(fragment.url) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # fsspec's files have readinto
