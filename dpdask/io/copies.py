"""Files with the same rows: copies, links, and compressed copies, whatever their names."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dpdask.errors import InputError
from dpdask.io import csv
from dpdask.io.faults import storage_faults
from dpdask.io.fragment import Fragment
from dpdask.io.remote import open_remote
from dpdask.io.threads import map_files


def check_copies(fragments: Sequence[Fragment], released: Sequence[Fragment] = (), *, apart: Collection[str]) -> None:
    """Check that no file is a copy of another one, or of a released one; see `find_copies`.

    Raises
    ------
    InputError
        If one is.
    """
    known = {fragment.url for fragment in released}
    for file, other in find_copies(fragments, released, apart=apart):
        what = f"rows seen again: this file is a copy of {other.name}{', which was released' if other.url in known else ''}"
        raise InputError(what, file.name, "remove it, or, if it holds other rows that happen to be equal, put them into a file with more rows")


def find_copies(fragments: Sequence[Fragment], known: Sequence[Fragment] = (), *, apart: Collection[str]) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield a fragment of each file that is a copy of a known file or of one before it, and a fragment of that file.

    Files are read only if their footers, or the beginnings of their texts, agree. Without rows, or with other values of the partition
    columns `apart`, they are no copies, unless they are one file under two names.
    """
    fresh = {fragment.url for fragment in fragments}
    alike: dict[str, dict[str, Fragment]] = {}
    for fragment in (*known, *fragments):
        if fragment.n_rows != 0:
            alike.setdefault(fragment.alike or fragment.version, {}).setdefault(fragment.url, fragment)
    for files in alike.values():
        if len(files) > 1 and not fresh.isdisjoint(files):
            places = [repr([each for each in file.constants if each[0] in apart]) for file in files.values()]
            shared = Counter(places)
            compared = [file for file, place in zip(files.values(), places, strict=True) if shared[place] > 1]
            digests = dict(zip((file.url for file in compared), map_files(_digest, compared), strict=True))
            seen: dict[object, Fragment] = {}
            for file, place in zip(files.values(), places, strict=True):
                digest = digests.get(file.url)
                marks = [*([] if digest is None else [(digest, place)]), *_identify(file)]
                other = next((seen[mark] for mark in marks if mark in seen), file)
                seen |= dict.fromkeys(marks, other)
                if other is not file and file.url in fresh:
                    yield file, other


def _identify(fragment: Fragment) -> list[object]:
    """Return what a local file is to the system, whatever it is called."""
    path = fragment.url.removeprefix("file://")
    if path == fragment.url:
        return []
    with storage_faults(fragment.name):
        about = Path(path).stat()
        return [(about.st_dev, about.st_ino)]


def _digest(fragment: Fragment) -> bytes | None:
    with storage_faults(fragment.name):
        if fragment.format == "csv":
            return csv.digest(fragment.url)
        with open_remote(fragment.url) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # fsspec's files have readinto
