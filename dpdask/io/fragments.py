"""The fragments of an input table: Parquet row groups or CSV files, with identities made of their content.

A fragment's id names its random stream, its shard and its place in a resumed run. It is made of the file's path inside
the table, the file's own digest and the row group, so it does not depend on schedulers, partition numbers, or where the
table lies.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
from fsspec.utils import glob_translate

from dpdask.errors import DataError, InputError
from dpdask.io import csv, parquet
from dpdask.io.faults import storage_faults
from dpdask.io.filesystems import open_filesystem
from dpdask.io.fragment import Fragment
from dpdask.io.objects import find_files
from dpdask.schema import Schema

BATCH_ROWS = 2**17
_SUFFIXES: dict[str, Literal["parquet", "csv"]] = {".parquet": "parquet", ".parq": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv"}
_FOOTER_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTable:
    """An input table, as described by its file names and footers.

    Attributes
    ----------
    fragments
        In the order of the rows.
    schema
        The Arrow schema, without metadata.
    """

    fragments: tuple[Fragment, ...]
    schema: pa.Schema

    @property
    def fingerprint(self) -> str:
        """A digest of the whole input: equal if and only if no file was added, removed or changed."""
        return blake2b("\n".join(f"{fragment.id} {fragment.version}" for fragment in self.fragments).encode(), digest_size=16).hexdigest()

    @property
    def n_bytes(self) -> int:
        """The bytes that a whole pass reads, compressed."""
        return sum(fragment.n_bytes for fragment in self.fragments)

    @property
    def n_rows(self) -> int | None:
        """The rows, if every footer tells them."""
        rows = [fragment.n_rows for fragment in self.fragments]
        return None if None in rows else sum(n for n in rows if n is not None)


def discover(url: str, schema: Schema) -> InputTable:
    """Return the table at a URL, from its file names and footers alone.

    Parameters
    ----------
    url
        A file, a folder, or a glob. In a folder, names that begin with `_` or `.` are passed over; files are taken in
        natural order (`part.2` before `part.10`).
    schema
        The declared columns.

    Raises
    ------
    InputError
        If there is no such table, or a file is unreadable.
    DataError
        If its columns are not those declared, or two files disagree.
    """
    fs, files, sizes = _files(url)
    kind = files[0][2]
    if any(format_ != kind for _, _, format_ in files):
        raise InputError("holds both Parquet and CSV files", url, "name one kind with a glob, such as folder/*.parquet")
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        parts = list(pool.map(lambda file: _inspect(fs, file[0], file[1], file[2], sizes[file[0]], schema), files))
    first = parts[0][1]
    twice = next((column for column in first.names if first.names.count(column) > 1), None)
    if twice is not None:
        raise DataError("this column appears twice in the table", f"column {twice!r}", "rename one of the two")
    dropped = {column for column, declared in schema.columns.items() if declared.role == "drop"}  # never read: of any type
    for fragments, found in parts:
        _check_same(first, found, dropped, fragments[0].name if fragments else "a file without row groups")
    found = [fragment for fragments, _ in parts for fragment in fragments]
    return InputTable(fragments=tuple(dataclasses.replace(fragment, number=number) for number, fragment in enumerate(found)), schema=first)


def read_batches(fragment: Fragment, columns: list[str], types: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's rows in batches of at most 2**17 rows.

    Parameters
    ----------
    fragment
        What to read.
    columns
        The columns to read, in the order wanted.
    types
        The table's Arrow schema (a CSV file is parsed by it).

    Raises
    ------
    InputError
        If the file is missing, unreadable, or changed since the run began.
    DataError
        If a CSV value cannot be read as its column's type.
    """
    fs, path = open_filesystem(fragment.url)
    with storage_faults(fragment.where):
        if fragment.format == "parquet":
            yield from parquet.read_batches(fs, path, fragment, columns, BATCH_ROWS)
        else:
            yield from csv.read_batches(fs, path, fragment, columns, types, BATCH_ROWS)


def takes_in(url: str, folder: str) -> bool:
    """Return whether a table's URL includes the files written to a folder, so that the next run would read them.

    Parameters
    ----------
    url
        The table's URL; may be a glob.
    folder
        The URL of the folder that is written.
    """
    if any(sign in url for sign in "*?["):
        written = f"{folder}/part-00000.parquet"
        return re.fullmatch(glob_translate(url.partition("://")[2]), written.partition("://")[2]) is not None
    return f"{folder}/".startswith(f"{url.rstrip('/')}/")


def _files(url: str) -> tuple[Any, list[tuple[str, str, Literal["parquet", "csv"]]], dict[str, int]]:
    """Return the file system and, for each file, its path, its name inside the table, and its format; and the sizes by path."""
    fs, _ = open_filesystem(url)
    base, sizes = find_files(url)
    paths = list(sizes)
    named = [(path, path[len(base) :].lstrip("/")) for path in paths]
    found = [(path, name, _format(name)) for path, name in named if not any(part[0] in "_." for part in PurePosixPath(name).parts)]
    tables = sorted([(path, name, format_) for path, name, format_ in found if format_ is not None], key=lambda file: _natural(file[1]))
    if not tables:
        raise InputError("there is no Parquet or CSV file here", url, "check this path in the job")
    hive = next((name for _, name, _ in tables if "=" in name.rpartition("/")[0]), None)
    if hive is not None:
        key = next(part.partition("=")[0] for part in hive.split("/") if "=" in part)  # the value is data
        raise InputError("folders named key=value hold a column that this version does not read", f"{key}=…", "write the column into the files")
    return fs, tables, sizes


def _format(name: str) -> Literal["parquet", "csv"] | None:
    return next((format_ for suffix, format_ in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _inspect(fs: Any, path: str, name: str, format_: Literal["parquet", "csv"], size: int, schema: Schema) -> tuple[list[Fragment], pa.Schema]:
    url = str(fs.unstrip_protocol(path))
    with storage_faults(name):
        if format_ == "csv":
            content, version, n_bytes, types = csv.inspect(fs, path, name, schema)
            return [
                Fragment(id=_id(name, content, 0), url=url, name=name, format="csv", row_group=0, n_rows=None, n_bytes=n_bytes, version=version)
            ], types
        digest, metadata = parquet.footer(fs, path, name, size)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        fragments = [
            Fragment(
                id=_id(name, digest, index),
                url=url,
                name=name,
                format="parquet",
                row_group=index,
                n_rows=group.num_rows,
                n_bytes=sum(group.column(column).total_compressed_size for column in range(group.num_columns)),
                version=digest,
                n_bytes_decoded=_decoded(group, schema),
                layout=parquet.lay_out(metadata, index, size),
            )
            for index, group in enumerate(groups)
        ]
        return fragments, parquet.plain_schema(metadata)


def _decoded(group: Any, schema: Schema) -> int:
    """Return the decompressed bytes of a row group's columns that are not dropped."""
    dropped = {column for column, declared in schema.columns.items() if declared.role == "drop"}
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] not in dropped)


def _id(name: str, digest: str, row_group: int) -> str:
    return blake2b(f"{len(name)}:{name}:{digest}:{row_group}".encode(), digest_size=16).hexdigest()


def _check_same(first: pa.Schema, found: pa.Schema, dropped: set[str], name: str) -> None:
    for field in found:
        if field.name not in first.names or (field.name not in dropped and first.field(field.name).type != field.type):
            raise DataError(
                "its type, or its presence, differs from that in the first file", f"{name}, column {field.name!r}", "write all files with one schema"
            )
    for column in first.names:
        if column not in found.names:
            raise DataError("the first file has this column and this one does not", f"{name}, column {column!r}", "write all files with one schema")
