"""A table of plain files: one file, a folder, or a glob, of Parquet or CSV; folders named `key=value` hold columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol
from urllib.parse import unquote

import pyarrow as pa

from dpdask.errors import DataError, InputError, MissingError, SpecError, say_count
from dpdask.io import csv, parquet
from dpdask.io.csv import csv_type
from dpdask.io.faults import Fault, classify, mask, storage_faults
from dpdask.io.filesystems import call_storage, open_filesystem, protocols
from dpdask.io.footer import Footer, Ranges, find_ranges
from dpdask.io.objects import find_files
from dpdask.schema import Schema

NULL = "__HIVE_DEFAULT_PARTITION__"


def split_folders(name: str) -> dict[str, str | None]:
    """Return the columns in a file's folders, each with its value as text; None is null."""
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if not sign:
            continue
        column = unquote(key)
        if column in found:
            raise DataError(
                "two folders of one path hold this column",
                f"column {column!r}",
                "rename one of the two",
            )
        found[column] = None if value == NULL else unquote(value)
    return found


def partition_types(names: list[str], schema: Schema) -> dict[str, pa.DataType]:
    """Return the types of the columns in the folders of a table: those that the schema declares, or that its domains imply; else text.

    Parameters
    ----------
    names
        The paths of its files inside the table, at least one.
    """
    first = list(split_folders(names[0]))
    for name in names:
        differing = set(first) ^ set(split_folders(name))
        if differing:
            what = "some files have a folder for this column, and others do not"
            raise DataError(
                what,
                f"column {min(differing)!r}",
                "give all files the same folders, or name those to read with a glob",
            )
    return {
        column: csv_type(schema.columns[column]) if column in schema.columns else pa.string()
        for column in first
    }


def read_value(text: str | None, column: str, type_: pa.DataType) -> Any:
    """Return the value of a partition column."""
    try:
        return pa.array([text], pa.string()).cast(type_)[0].as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        what = "the name of a folder cannot be read as this column's declared type"
        raise DataError(
            what,
            f"column {column!r}",
            "correct the schema's `type` or levels, or rename the folder",
        ) from None


def check_agreement(
    types: pa.Schema, folders: Mapping[str, str | None], footer: Footer | None, where: str
) -> None:
    """Check that a file that holds a column which its folder's name holds too cannot have other values than the folder."""
    both = sorted(set(types.names) & set(folders))
    ranges = find_ranges(footer, both) if both and footer is not None else {}
    for column in both:
        text, found = folders[column], ranges.get(column)
        if (
            footer is None
            or text is None
            or found is None
            or _has_nulls(footer, column)
            or not _is_constant(found, text, column, types)
        ):
            what = "both the file and its folder's name hold this column, and they could disagree"
            raise DataError(
                what,
                f"{where}, column {column!r}",
                "write the files without it, or rename the folders",
            )


def _has_nulls(footer: Footer, column: str) -> bool:
    return any(
        chunk.n_nulls != 0
        for group in footer.groups
        for chunk in group.chunks
        if chunk.column == column
    )


def _is_constant(ranges: Ranges, text: str, column: str, types: pa.Schema) -> bool:
    value = read_value(text, column, types.field(column).type)
    return all(low == high == value for low, high in ranges)


_ID = b"PARQUET:field_id"
LOG_FOLDERS = ("_delta_log", "metadata")  # of Delta and Iceberg tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a table."""

    url: str = field(repr=False)
    # Its path inside the table, which names its fragments; folders may hold values.
    name: str = field(repr=False)
    format: Literal["parquet", "csv"]
    # The partition columns with their values in this file.
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Its deleted rows, as `deletions.pack` writes them.
    deleted: bytes = field(default=b"", repr=False)
    n_bytes: int | None = None  # its length, if a listing told it


@dataclass(frozen=True, slots=True, kw_only=True)
class TableField:
    """One column of a table that keeps its own schema: Delta or Iceberg."""

    name: str  # its name and Arrow type in the table
    type: pa.DataType
    names: tuple[str, ...]  # the names that it may have in a file that has no field ids
    # Its number in files that have field ids; None if columns are found by name alone.
    field_id: int | None = None
    default: Any = None  # its value in files that were written before the table got it
    optional: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a table."""

    files: tuple[DataFile, ...]
    format: Literal["files", "delta", "iceberg"] = "files"
    # The Delta version or the Iceberg snapshot; None for plain files, and for an Iceberg table
    # without a snapshot.
    version: int | None = None
    location: str = ""
    # The table's own columns; None if the files decide.
    fields: tuple[TableField, ...] | None = None
    # The types of the partition columns of plain files.
    partitions: Mapping[str, pa.DataType] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # what lies beside plain files and is not read, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
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
    """Return the name in a file of each of a table's columns, and the values of those that the file does not hold.

    Parameters
    ----------
    given
        The values of partition columns, which count if the file does not hold them.
    """
    by_id = {
        int(column.metadata[_ID]): column.name
        for column in found
        if column.metadata and _ID in column.metadata
    }
    names: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for wanted in fields:
        if wanted.field_id is not None and by_id:
            name = by_id.get(wanted.field_id)
        elif wanted.field_id is not None and not wanted.names:
            raise DataError(
                "the file has no field ids, and the table no names for its columns",
                where,
                "write the file again with field ids",
            )
        else:
            name = next((each for each in wanted.names if each in found.names), None)
        if name is not None:
            names[wanted.name] = name
        elif wanted.name in given:
            constants[wanted.name] = given[wanted.name]
        elif wanted.optional or wanted.default is not None:
            constants[wanted.name] = wanted.default
        else:
            raise DataError(
                "the file lacks this column, which has no default",
                f"{where}, column {wanted.name!r}",
                "write the file again",
            )
    return names, constants


_SUFFIXES: dict[str, Literal["parquet", "csv"]] = {
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
}
PlainFormat = Literal["files", "parquet", "csv"]
_BOOKKEEPING = re.compile(
    r"(^|/)(_SUCCESS|_(common_)?metadata|_(committed|started)_\w+|\..+\.crc|\.DS_Store)$"
)
_OTHER_NAME = "whose name tells no format (with `format: parquet` or `format: csv`, files of any name are read)"
_HIDDEN = "(its name or a folder's begins with `_` or `.`; rename it if it holds rows)"
_NO_FILE = "other than files (a folder that a link or a glob names: name it itself, or end the glob with `/**`; or a pipe, socket or device)"
_GLOB = "*?["
_Table = tuple[str, str, Literal["parquet", "csv"]]  # path, name inside the table, format
_HOST = re.compile(r"\w+://[^/]*")


@dataclass(frozen=True, slots=True)
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
        types = partition_types([name for _, name, _ in tables], schema)
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
            fs, _ = open_filesystem(url)
            if format_ == "csv":
                names = csv.read_names(fs, path, shown)
                csv.check_names(names, shown)
                found = [FoundColumn(name=column, type=None) for column in names]
            else:
                found = [
                    FoundColumn(name=column, type=type_, nullable=flag)
                    for column, type_, flag in parquet.read_columns(fs, path, shown)
                ]
        held = {column.name for column in found}
        return (
            *found,
            *(
                FoundColumn(name=column, type=None, in_folders=True)
                for column in split_folders(name)
                if column not in held
            ),
        )


def _find_tables(
    url: str, wanted: PlainFormat
) -> tuple[list[_Table], Mapping[str, int | None], tuple[str, ...]]:
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
        raise MissingError(
            "; ".join(["there is no Parquet or CSV file here", *left_out]), url, "check this path"
        )
    if any(format_ != tables[0][2] for _, _, format_ in tables):
        raise InputError(
            "holds both Parquet and CSV files",
            url,
            "name one kind with a glob, such as folder/*.parquet",
        )
    names = {name for _, name in files}
    for _, name, _ in tables:
        if name.lower().endswith(".gz") and name[:-3] in names:
            what = (
                f"rows seen again: by its name this file is a compressed copy of {mask(name[:-3])}"
            )
            raise InputError(
                what, mask(name), "remove one of the two, or rename one if it holds other rows"
            )
    return sorted(tables, key=lambda file: natural(file[1])), sizes, left_out


def _tell(n: int, noun: str, why: str) -> tuple[str, ...]:
    return (f"not read: {say_count(n, noun)} {why}",) if n else ()


def is_glob(url: str) -> bool:
    """Return whether a URL has signs that stand for other names."""
    return any(sign in url for sign in _GLOB)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return the sort key of a name by which numbers in it count as numbers."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def _format(name: str) -> Literal["parquet", "csv"] | None:
    return next(
        (format_ for suffix, format_ in _SUFFIXES.items() if name.lower().endswith(suffix)), None
    )


def _is_hidden(name: str) -> bool:
    *folders, last = PurePosixPath(name).parts
    return last[0] in "_." or any(
        folder[0] == "." or (folder[0] == "_" and "=" not in folder) for folder in folders
    )


def _refuse_lakes(base: str, paths: list[str], url: str) -> None:
    """Refuse a Delta or Iceberg table, or a part of one: its folder also holds deleted rows and the files of old versions."""

    def look(fs: Any, _: str) -> list[str]:
        return [
            kind
            for folder in _folders(base, paths, inside=is_glob(url))
            for kind in _kinds_in(fs, folder)
        ]

    kinds = [
        kind for path in paths if (kind := _kind_of(path[len(base) :])) is not None
    ] or call_storage(url, look)
    if kinds:
        table = {"delta": "a Delta table", "iceberg": "an Iceberg table"}[kinds[0]]
        what = f"this is {table}, or a part of one: read as plain files, it would give deleted rows and old versions too"
        raise SpecError(
            what, url, f"name the table's own folder, with `format: {kinds[0]}` beside `path`"
        )


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
            answered = isinstance(error, NotADirectoryError) or classify(error) in (
                Fault.MISSING,
                Fault.REFUSED,
            )
            if not answered and not protocols(fs) & {
                "http",
                "https",
            }:  # a web server answers as it likes
                raise
            continue
        yield from filter(None, map(_kind_of, found))
