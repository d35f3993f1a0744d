"""The files of a table in any format, and of a table of plain files.

Plain files are one file, a folder, or a glob, of Parquet or CSV; folders named `key=value` hold
columns.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from dpdask.arrays import freeze_class
from dpdask.errors import DataError, InputError, MissingError, SpecError, say_count
from dpdask.io import csv, parquet
from dpdask.io.csv import csv_type
from dpdask.io.filesystems import KINDS, classify, mask, protocols
from dpdask.io.folders import read_value, split_folders
from dpdask.io.footer import Footer, find_ranges
from dpdask.io.storage import call_storage, is_local, open_filesystem, storage_faults
from dpdask.schema import Schema

TABLES = {"delta": "a Delta table", "iceberg": "an Iceberg table"}
LOG_FOLDERS = ("_delta_log", "metadata")  # of Delta and Iceberg tables
PlainFormat = Literal["files", "parquet", "csv"]
_ID = b"PARQUET:field_id"
_SUFFIXES: dict[str, Literal["parquet", "csv"]] = {
    **dict.fromkeys((".parquet", ".parq", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".csv.gz"), "csv"),
}
_BOOKKEEPING = re.compile(
    r"(^|/)(_SUCCESS|_(common_)?metadata|_(committed|started)_\w+|\..+\.crc|\.DS_Store)$"
)
_OTHER_NAME = "whose name tells no format (with `format: parquet` or `format: csv`, files of any name are read)"
_HIDDEN = "(its name or a folder's begins with `_` or `.`; rename it if it holds rows)"
_NO_FILE = "other than files (a folder that a link or a glob names: name it itself, or end the glob with `/**`; or a pipe, socket or device)"
_GLOB = re.compile(r"[*?\[]")
_HOST = re.compile(r"\w+://[^/]*")
_Table = tuple[str, str, Literal["parquet", "csv"]]  # path, name inside the table, format


@freeze_class
class DataFile:
    """One file of a table."""

    url: str = field(repr=False)
    # Its path inside the table, which names its fragments; folders may hold values.
    name: str = field(repr=False)
    format: Literal["parquet", "csv"]
    # The partition columns with their values in this file.
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Its deleted rows, as `fragment.pack` writes them.
    deleted: bytes = field(default=b"", repr=False)
    n_bytes: int | None = None  # its length, if a listing told it


class TableField(NamedTuple):
    """One column of a table that keeps its own schema: Delta or Iceberg."""

    name: str  # its name and Arrow type in the table
    type: pa.DataType
    names: tuple[str, ...]  # the names that it may have in a file that has no field ids
    # Its number in files that have field ids; None if columns are found by name alone.
    field_id: int | None = None
    default: Any = None  # its value in files that were written before the table got it
    optional: bool = True


@freeze_class
class Listing:
    """The files of a table."""

    files: tuple[DataFile, ...]
    format: Literal["files", "delta", "iceberg"] = "files"
    # The Delta version or the Iceberg snapshot; None for plain files, and for an Iceberg table
    # without a snapshot.
    version: int | None = None
    location: str = ""
    table: str = ""  # the id that a Delta or Iceberg table keeps for life
    # The table's own columns; None if the files decide.
    fields: tuple[TableField, ...] | None = None
    # The types of the partition columns of plain files.
    partitions: Mapping[str, pa.DataType] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # what lies beside plain files and is not read, in words


class FoundColumn(NamedTuple):
    """A column of a table as its metadata name it, before anybody has declared it."""

    name: str
    # Its Arrow type; None if the files do not tell: in CSV, and for columns in the names of
    # folders.
    type: pa.DataType | None
    nullable: bool = True  # whether it may hold nulls, as far as the files tell
    in_folders: bool = False  # whether its values stand in the names of folders


class TableFormat(Protocol):
    """How the files of a table are found."""

    def read_columns(self, url: str) -> tuple[FoundColumn, ...]:
        """Return the columns of the table at a URL, from the names and types in its metadata: no value or statistic is looked at."""

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files of the table at a URL."""


def find_columns(
    fields: tuple[TableField, ...], found: pa.Schema, given: Mapping[str, Any], where: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the names of a table's columns in a file, and the values of those that it does not hold.

    `given` has the values of partition columns, which count if the file does not hold them.
    """
    ids = {column.name: (column.metadata or {}).get(_ID) for column in found}
    by_id = {int(number): name for name, number in ids.items() if number is not None}
    names: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for wanted in fields:
        if wanted.field_id is not None and by_id:
            name = by_id.get(wanted.field_id)
        elif wanted.field_id is not None and not wanted.names:
            what = "the file has no field ids, and the table no names for its columns"
            raise DataError(what, where, "write the file again with field ids")
        else:
            name = next((each for each in wanted.names if each in found.names), None)
        if name is not None:
            names[wanted.name] = name
        elif wanted.name in given or wanted.optional or wanted.default is not None:
            constants[wanted.name] = given.get(wanted.name, wanted.default)
        else:
            what = "the file lacks this column, which has no default"
            raise DataError(what, f"{where}, column {wanted.name!r}", "write the file again")
    return names, constants


def _partition_types(names: list[str], schema: Schema) -> dict[str, pa.DataType]:
    """Return the types of the columns in the folders of files: declared, or as domains imply, or text."""
    first = list(split_folders(names[0]))
    for name in names:
        differing = set(first) ^ set(split_folders(name))
        if differing:
            what = "some files have a folder for this column, and others do not"
            hint = "give all files the same folders, or name those to read with a glob"
            raise DataError(what, f"column {min(differing)!r}", hint)
    declared = schema.columns
    return {each: csv_type(declared[each]) if each in declared else pa.string() for each in first}


def check_agreement(types: pa.Schema, name: str, footer: Footer | None, where: str) -> None:
    """Check that a file has no other values in a column than its folder's name, if both hold it."""
    folders = split_folders(name)
    both = sorted(set(types.names) & set(folders))
    ranges = find_ranges(footer, both) if both and footer is not None else {}
    for column in both:
        text, found = folders[column], ranges.get(column)
        agrees = footer is not None and text is not None and found is not None
        if agrees and footer and found is not None:
            value = read_value(text, column, types.field(column).type)
            chunks = (chunk for group in footer.groups for chunk in group.chunks)
            agrees = all(low == high == value for low, high in found)
            agrees = agrees and all(each.n_nulls == 0 for each in chunks if each.column == column)
        if not agrees:
            what = "both the file and its folder's name hold this column, and they could disagree"
            hint = "write the files without it, or rename the folders"
            raise DataError(what, f"{where}, column {column!r}", hint)


# ---- plain files


@freeze_class(kw_only=False)
class Files:
    """The format of a table of plain files."""

    # `parquet` or `csv`: that of all files, whatever their names; `files`: their names tell it.
    format: PlainFormat = "files"

    def list_files(self, url: str, schema: Schema) -> Listing:
        """Return the files at a URL; see `TableFormat.list_files`.

        Parameters
        ----------
        url
            A file, a folder, or a glob. Names that begin with `_` or `.` are passed over, except
            folders such as `_key=value`; files are taken in natural order (`part.2` before
            `part.10`).
        """
        fs, _ = open_filesystem(url)
        tables, sizes, left_out = _find_tables(url, self.format)
        types = _partition_types([name for _, name, _ in tables], schema)
        files = [
            DataFile(
                url=str(fs.unstrip_protocol(path)),
                name=name,
                format=format_,
                constants={
                    column: read_value(text, column, types[column])
                    for column, text in split_folders(name).items()
                },
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
            file = str(open_filesystem(url)[0].unstrip_protocol(path))
            if format_ == "csv":
                columns = csv.read_names(file, shown)
                csv.check_names(columns, shown)
                found = [FoundColumn(name=column, type=None) for column in columns]
            else:
                found = [
                    FoundColumn(name=column, type=type_, nullable=flag)
                    for column, type_, flag in parquet.read_columns(file, shown)
                ]
        held = {column.name for column in found}
        beside = [column for column in split_folders(name) if column not in held]
        return (*found, *(FoundColumn(name=each, type=None, in_folders=True) for each in beside))


def _find_tables(
    url: str, wanted: PlainFormat
) -> tuple[list[_Table], Mapping[str, int | None], tuple[str, ...]]:
    """Return the files in natural order, the sizes that a listing told, and what is not read."""
    base, sizes = find_files(url)
    _refuse_lakes(base, list(sizes), url)
    named = [(path, path[len(base) :].lstrip("/")) for path in sizes]
    hidden = {name for _, name in named if _is_hidden(name)}
    files = [(path, name) for path, name in named if name not in hidden and sizes[path] is not None]
    found = [
        (path, name, name_format(name) if wanted == "files" else wanted) for path, name in files
    ]
    tables = [(path, name, format_) for path, name, format_ in found if format_ is not None]
    counts = (
        (len(files) - len(tables), "file", _OTHER_NAME),
        (sum(_BOOKKEEPING.search(name) is None for name in hidden), "hidden file", _HIDDEN),
        (len(named) - len(files) - len(hidden), "item", _NO_FILE),
    )
    left_out = tuple(f"not read: {say_count(n, noun)} {why}" for n, noun, why in counts if n)
    if not tables:
        what = "; ".join(["there is no Parquet or CSV file here", *left_out])
        raise MissingError(what, url, "check this path")
    if any(format_ != tables[0][2] for _, _, format_ in tables):
        hint = "name one kind with a glob, such as folder/*.parquet"
        raise InputError("holds both Parquet and CSV files", url, hint)
    names = {name for _, name in files}
    for _, name, _ in tables:
        other = name[:-3]
        if name.lower().endswith(".gz") and other in names:
            what = f"rows seen again: by its name this file is a compressed copy of {mask(other)}"
            hint = "remove one of the two, or rename one if it holds other rows"
            raise InputError(what, mask(name), hint)
    return sorted(tables, key=lambda file: natural(file[1])), sizes, left_out


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key of a name by which numbers in it count as numbers."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def name_format(name: str) -> Literal["parquet", "csv"] | None:
    """Return the format that a file's name tells, if it tells one."""
    suffix = next(filter(name.lower().endswith, _SUFFIXES), None)
    return None if suffix is None else _SUFFIXES[suffix]


def _is_hidden(name: str) -> bool:
    *folders, last = PurePosixPath(name).parts
    return last[0] in "_." or any(
        folder[0] == "." or (folder[0] == "_" and "=" not in folder) for folder in folders
    )


def _refuse_lakes(base: str, paths: list[str], url: str) -> None:
    """Refuse a Delta or Iceberg table, or a part of one: deleted rows and old versions lie there too."""

    def look(fs: Any, _: str) -> list[str]:
        folders = _folders(base, paths, inside=is_glob(url))
        return [kind for folder in folders for kind in _kinds_in(fs, folder)]

    listed = list(filter(None, (_kind_of(path[len(base) :]) for path in paths)))
    for kind in listed or call_storage(url, look):
        what = f"this is {TABLES[kind]}, or a part of one: read as plain files, it would give deleted rows and old versions too"
        hint = f"name the table's own folder, with `format: {kind}` beside `path`"
        raise SpecError(what, url, hint)


def _kind_of(name: str) -> str | None:
    """Return whose metadata a file is, by its path."""
    *_, folder, last = ["", *name.split("/")]
    if folder == "_delta_log":
        return "delta"
    return "iceberg" if folder == "metadata" and last.endswith(".metadata.json") else None


def _folders(base: str, paths: list[str], *, inside: bool) -> Iterator[str]:
    """Yield the folders whose metadata were not listed with the files.

    They are the table's and those around it; for a glob, those of the files too.
    """
    for path in sorted({path.rpartition("/")[0] for path in paths} if inside else ()):
        while len(path) > len(base):
            yield path
            path = path.rpartition("/")[0]
    top = _HOST.match(base)
    while len(base) > (top.end() if top else 0):
        yield base
        base = base.rpartition("/")[0]


def _kinds_in(fs: Any, folder: str) -> Iterator[str]:
    """Yield the formats whose metadata lie in a folder.

    None lies in one that this user may not list, or that has no listing.
    """
    # a store is asked for the folder once: s3fs lists it for each that is looked for in vain
    known = None if protocols(fs).isdisjoint(KINDS) else _list(fs, folder)
    inside = None if known is None else {path.rstrip("/").rpartition("/")[2] for path in known}
    for inner in LOG_FOLDERS:
        if inside is None or inner in inside:
            yield from filter(None, map(_kind_of, _list(fs, f"{folder}/{inner}") or ()))


def _list(fs: Any, folder: str) -> list[str] | None:
    """Return what is in a folder; None if nobody says."""
    try:
        return [str(path) for path in fs.ls(folder, detail=False)]
    except Exception as error:
        # a web server answers as it likes
        known = classify(error) in ("missing", "refused") or protocols(fs) & {"http", "https"}
        if not known:
            raise
        return None


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
