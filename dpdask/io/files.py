"""A table of plain files: one file, a folder, or a glob, of Parquet or CSV; folders named `key=value` hold columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from dpdask.errors import InputError, MissingError, SpecError
from dpdask.io import csv, parquet
from dpdask.io.faults import Fault, classify, mask, storage_faults
from dpdask.io.filesystems import call_storage, open_filesystem, protocols
from dpdask.io.hive import partition_types, read_value, split_folders
from dpdask.io.listing import LOG_FOLDERS, DataFile, FoundColumn, Listing
from dpdask.io.objects import find_files
from dpdask.plurals import say_count
from dpdask.schema import Schema

_SUFFIXES: dict[str, Literal["parquet", "csv"]] = {".parquet": "parquet", ".parq": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv"}
PlainFormat = Literal["files", "parquet", "csv"]
_BOOKKEEPING = re.compile(r"(^|/)(_SUCCESS|_(common_)?metadata|_(committed|started)_\w+|\..+\.crc|\.DS_Store)$")
_OTHER_NAME = "whose name tells no format (with `format: parquet` or `format: csv`, files of any name are read)"
_HIDDEN = "(its name or a folder's begins with `_` or `.`; rename it if it holds rows)"
_NO_FILE = "other than files (a folder that a link or a glob names: name it itself, or end the glob with `/**`; or a pipe, socket or device)"
_GLOB = "*?["
_Table = tuple[str, str, Literal["parquet", "csv"]]  # path, name inside the table, format
_HOST = re.compile(r"\w+://[^/]*")


@dataclass(frozen=True, slots=True)
class Files:
    """The format of a table of plain files.

    Attributes
    ----------
    format
        `parquet` or `csv`: that of all files, whatever their names; `files`: their names tell it.
    """

    format: PlainFormat = "files"

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files at a URL; see `TableFormat.list_files`.

        Parameters
        ----------
        url
            A file, a folder, or a glob. Names that begin with `_` or `.` are passed over, except folders such
            as `_key=value`; files are taken in natural order (`part.2` before `part.10`).
        schema
            The declared columns.

        Raises
        ------
        InputError
            If there is no such table, or it has a file and its compressed copy.
        DataError
            If a folder's name cannot be read as its column's type.
        SpecError
            If it is a Delta or Iceberg table.
        """
        fs, _ = open_filesystem(url)
        tables, sizes, left_out = _find_tables(url, self.format)
        types = partition_types([name for _, name, _ in tables], schema)
        files = [
            DataFile(
                url=str(fs.unstrip_protocol(path)),
                name=name,
                format=format_,
                constants={column: read_value(text, column, types[column]) for column, text in split_folders(name).items()},
                n_bytes=sizes[path],
            )
            for path, name, format_ in tables
        ]
        return Listing(files=tuple(files), location=url, partitions=types, left_out=left_out)

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns of the first file and of its folders; see `TableFormat.read_columns`."""
        (path, name, format_), *_ = _find_tables(url, self.format)[0]
        shown = mask(name)
        with storage_faults(shown):
            fs, _ = open_filesystem(url)
            if format_ == "csv":
                names = csv.read_names(fs, path, shown)
                csv.check_names(names, shown)
                found = [FoundColumn(name=column, type=None) for column in names]
            else:
                found = [FoundColumn(name=column, type=type_, nullable=flag) for column, type_, flag in parquet.read_columns(fs, path, shown)]
        held = {column.name for column in found}
        return (*found, *(FoundColumn(name=column, type=None, in_folders=True) for column in split_folders(name) if column not in held))


def _find_tables(url: str, wanted: PlainFormat) -> tuple[list[_Table], Mapping[str, int | None], tuple[str, ...]]:
    """Return the files in natural order, the sizes that a listing told, and what is not read."""
    base, sizes = find_files(url)
    paths = list(sizes)
    _refuse_lakes(base, paths, url)
    named = [(path, path[len(base) :].lstrip("/")) for path in paths]
    hidden = {name for _, name in named if _is_hidden(name)}
    files = [(path, name) for path, name in named if name not in hidden and sizes[path] is not None]
    found = [(path, name, _format(name) if wanted == "files" else wanted) for path, name in files]
    tables = [(path, name, format_) for path, name, format_ in found if format_ is not None]
    left_out = (
        *_tell(len(files) - len(tables), "file", _OTHER_NAME),
        *_tell(sum(_BOOKKEEPING.search(name) is None for name in hidden), "hidden file", _HIDDEN),
        *_tell(len(named) - len(files) - len(hidden), "item", _NO_FILE),
    )
    if not tables:
        raise MissingError("; ".join(["there is no Parquet or CSV file here", *left_out]), url, "check this path")
    if any(format_ != tables[0][2] for _, _, format_ in tables):
        raise InputError("holds both Parquet and CSV files", url, "name one kind with a glob, such as folder/*.parquet")
    names = {name for _, name in files}
    for _, name, _ in tables:
        if name.lower().endswith(".gz") and name[:-3] in names:
            what = f"rows seen again: by its name this file is a compressed copy of {mask(name[:-3])}"
            raise InputError(what, mask(name), "remove one of the two, or rename one if it holds other rows")
    return sorted(tables, key=lambda file: natural(file[1])), sizes, left_out


def _tell(n: int, noun: str, why: str) -> tuple[str, ...]:
    return (f"not read: {say_count(n, noun)} {why}",) if n else ()


def is_glob(url: str) -> bool:
    """Return whether a URL has signs that stand for other names."""
    return any(sign in url for sign in _GLOB)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key of a name by which numbers in it count as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _format(name: str) -> Literal["parquet", "csv"] | None:
    return next((format_ for suffix, format_ in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


def _is_hidden(name: str) -> bool:
    *folders, last = PurePosixPath(name).parts
    return last[0] in "_." or any(folder[0] == "." or (folder[0] == "_" and "=" not in folder) for folder in folders)


def _refuse_lakes(base: str, paths: list[str], url: str) -> None:
    """Refuse a Delta or Iceberg table, or a part of one: its folder also holds deleted rows and the files of old versions.

    Raises
    ------
    SpecError
        If there is one in the folder, or around a file.
    """

    def look(fs: Any, _: str) -> list[str]:
        return [kind for folder in _folders(base, paths, inside=is_glob(url)) for kind in _kinds_in(fs, folder)]

    kinds = [kind for path in paths if (kind := _kind_of(path[len(base) :])) is not None] or call_storage(url, look)
    if kinds:
        table = {"delta": "a Delta table", "iceberg": "an Iceberg table"}[kinds[0]]
        what = f"this is {table}, or a part of one: read as plain files, it would give deleted rows and old versions too"
        raise SpecError(what, url, f"name the table's own folder, with `format: {kinds[0]}` beside `path`")


def _kind_of(name: str) -> str | None:
    """Return whose metadata a file is, by its path."""
    *_, folder, last = ["", *name.split("/")]
    if folder == "_delta_log":
        return "delta"
    return "iceberg" if folder == "metadata" and last.endswith(".metadata.json") else None


def _folders(base: str, paths: list[str], *, inside: bool) -> Iterator[str]:
    """Yield the folders whose metadata were not listed with the files: the table's and those around it; for a glob, those of the files too."""
    for path in sorted({path.rpartition("/")[0] for path in paths} if inside else ()):
        inner = path
        while len(inner) > len(base):
            yield inner
            inner = inner.rpartition("/")[0]
    top = _HOST.match(base)
    while len(base) > (top.end() if top else 0):
        yield base
        base = base.rpartition("/")[0]


def _kinds_in(fs: Any, folder: str) -> Iterator[str]:
    """Yield the formats whose metadata lie in a folder; one that this user may not list, or that has no listing, has none."""
    for inner in LOG_FOLDERS:
        try:
            found = [str(path) for path in fs.ls(f"{folder}/{inner}", detail=False)]
        except Exception as error:
            answered = isinstance(error, NotADirectoryError) or classify(error) in (Fault.MISSING, Fault.REFUSED)
            if not answered and not protocols(fs) & {"http", "https"}:  # a web server answers as it likes
                raise
            continue
        yield from filter(None, map(_kind_of, found))
