"""The fragments of an input table: Parquet row groups or CSV files, with identities made of their content.

A fragment's id names its random stream, its shard and its place in a resumed run. It is made of the
file's path inside the table, the file's own digest and the row group, so it does not depend on
schedulers, partition numbers, or where the table lies. The version of a Delta or Iceberg table, the
values of its partition columns and the deleted rows enter it too. If a table grows, the version
does not, so that a file keeps its identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from dpdask.errors import DataError, InputError
from dpdask.io import csv, parquet
from dpdask.io import files as hive
from dpdask.io.faults import mask, storage_faults
from dpdask.io.files import DataFile, Files, Listing, TableFormat, find_columns, is_glob
from dpdask.io.filesystems import call_storage, open_filesystem
from dpdask.io.footer import Footer, Ranges, find_ranges
from dpdask.io.fragment import (
    Fragment,
    complete,
    count_deleted,
    find_stored,
    fits,
    pack,
    unpack,
    widen,
)
from dpdask.io.objects import open_remote
from dpdask.schema import Schema

_THREADS = 16
_POOL_FILES = 2**10  # a pool keeps a kilobyte or two for each call that it has
_SINGLE_FILES = 2**6  # that one thread reads before it looks at its time again
_LEAST_WORK = 0.5  # of one thread's time: below, it waits for a storage

File = TypeVar("File")
Found = TypeVar("Found")


def map_files(call: Callable[[File], Found], files: Sequence[File]) -> list[Found]:
    """Return what a call returns for each file, in their order.

    Parameters
    ----------
    call
        Reads a little of a file. It may be called in another thread, and by several at once.

    Notes
    -----
    Threads that do not wait for a storage wait for Python's lock: with 16 of them the footer of a
    local file took 0.9 ms of CPU time, with one 0.55 ms. So one thread begins, and as soon as it
    waits for half of its time or more, 16 threads take the rest.
    """
    found: list[Found] = []
    n_next, work = 1, 1.0
    while len(found) < len(files) and work >= _LEAST_WORK:
        began, began_work = time.perf_counter(), time.thread_time()
        found += [call(file) for file in files[len(found) : len(found) + n_next]]
        work = (time.thread_time() - began_work) / max(time.perf_counter() - began, 1e-9)
        n_next = min(2 * n_next, _SINGLE_FILES)
    rest = files[len(found) :]
    if rest:
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(rest), _POOL_FILES):
                found += pool.map(call, rest[start : start + _POOL_FILES])
    return found


def check_copies(
    fragments: Sequence[Fragment], released: Sequence[Fragment] = (), *, apart: Collection[str]
) -> None:
    """Check that no file is a copy of another one, or of a released one; see `find_copies`."""
    known = {fragment.url for fragment in released}
    for file, other in find_copies(fragments, released, apart=apart):
        what = f"rows seen again: this file is a copy of {other.name}{', which was released' if other.url in known else ''}"
        raise InputError(
            what,
            file.name,
            "remove it, or, if it holds other rows that happen to be equal, put them into a file with more rows",
        )


def find_copies(
    fragments: Sequence[Fragment], known: Sequence[Fragment] = (), *, apart: Collection[str]
) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield a fragment of each file that is a copy of a known file or of one before it, and a fragment of that file.

    Files are read only if their footers, or the beginnings of their texts, agree. Without rows, or
    with other values of the partition columns `apart`, they are no copies, unless they are one file
    under two names.
    """
    fresh = {fragment.url for fragment in fragments}
    alike: dict[str, dict[str, Fragment]] = {}
    for fragment in (*known, *fragments):
        if fragment.n_rows != 0:
            alike.setdefault(fragment.alike or fragment.version, {}).setdefault(
                fragment.url, fragment
            )
    for files in alike.values():
        if len(files) > 1 and not fresh.isdisjoint(files):
            places = [
                repr([each for each in file.constants if each[0] in apart])
                for file in files.values()
            ]
            shared = Counter(places)
            compared = [
                file
                for file, place in zip(files.values(), places, strict=True)
                if shared[place] > 1
            ]
            digests = dict(
                zip((file.url for file in compared), map_files(_digest, compared), strict=True)
            )
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


# values of partition columns: writers of Delta tables write bytes in several ways, and pyiceberg reads float64 as float32
_INEXACT = {("delta", pa.binary()), ("iceberg", pa.float64())}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTable:
    """An input table, as described by its file names and footers."""

    fragments: tuple[Fragment, ...]
    schema: pa.Schema
    format: Literal["parquet", "csv", "delta", "iceberg"] = "parquet"
    version: int | None = None  # the Delta version or the Iceberg snapshot; None for plain files
    n_files: int = 0
    location: str = ""
    left_out: tuple[str, ...] = ()  # what lies beside its files and is not read, in words
    released: tuple[Fragment, ...] = ()  # of a growing table: the fragments of earlier releases

    @property
    def fingerprint(self) -> str:
        """A digest of the whole input: equal if and only if no file was added, removed or changed, and it is the same version."""
        version = [] if self.version is None else [f"{self.format} {self.version}"]
        lines = [*version, *(f"{fragment.id} {fragment.version}" for fragment in self.fragments)]
        return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @property
    def n_bytes(self) -> int:
        """The bytes that a whole pass reads, compressed."""
        return sum(fragment.n_bytes for fragment in self.fragments)

    @property
    def n_rows(self) -> int | None:
        """The rows, if every footer tells them."""
        rows = [fragment.n_rows for fragment in self.fragments]
        return None if None in rows else sum(n for n in rows if n is not None)


def discover(
    url: str, schema: Schema, table_format: TableFormat | None = None, *, growing: bool = False
) -> InputTable:
    """Return the table at a URL, from its file names, footers and metadata alone.

    Parameters
    ----------
    url
        The table: for plain files, a file, a folder, or a glob.
    growing
        Whether fragments have the same identities in each version of the table.
    """
    listing = (table_format or Files()).list_files(url, schema)
    version = listing.version
    if growing:
        listing = dataclasses.replace(listing, version=None)
    seen = parquet.SchemaCache()
    parts = map_files(lambda file: _inspect(file, listing, schema, seen), listing.files)
    found = [fragment for fragments, _ in parts for fragment in fragments]
    if len({fragment.id for fragment in found}) < len(found) or len(
        {file.url for file in listing.files}
    ) < len(listing.files):
        raise DataError(
            "the table lists a file twice",
            url,
            "list it once, or each of its rows would be released twice",
        )
    return InputTable(
        fragments=tuple(
            dataclasses.replace(fragment, number=number) for number, fragment in enumerate(found)
        ),
        schema=_join_types(
            [types for _, types in parts],
            [mask(file.name) for file in listing.files],
            listing,
            schema,
        ),
        format=listing.files[0].format if listing.format == "files" else listing.format,
        version=version,
        n_files=len(listing.files),
        location=listing.location,
        left_out=listing.left_out,
    )


def read_batches(
    fragment: Fragment, columns: list[str], types: pa.Schema, public: Collection[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's rows in batches of at most 2**17 rows, and of about 32 MiB at most.

    Where a batch ends does not depend on private values: it would be seen in the row groups of the
    release.

    Parameters
    ----------
    types
        The table's Arrow schema (a CSV file is parsed by it).
    public
        Those of the columns that are released as they are: the sizes of their values may decide
        where a batch ends.
    """
    missing = next((name for name in columns if name not in types.names), None)
    if missing is not None:
        raise DataError(
            "the table has no such column",
            f"column {missing!r}",
            "write all files with the declared columns",
        )
    fs, path = open_filesystem(fragment.url)
    stored = find_stored(fragment, columns)
    with storage_faults(fragment.where):
        if fragment.format == "parquet":
            batches = parquet.read_batches(
                path, fragment, stored, find_stored(fragment, list(public))
            )
        else:
            batches = csv.read_batches(fs, path, fragment, stored or types.names[:1], types)
        yield from complete(batches, fragment, columns, types)


def takes_in(url: str, folder: str) -> bool:
    """Return whether a table's URL includes the files written to a folder, so that the next run would read them."""
    if is_glob(url):
        written = f"{folder}/part-00000.parquet"
        return (
            re.fullmatch(glob_translate(url.partition("://")[2]), written.partition("://")[2])
            is not None
        )
    return f"{folder}/".startswith(f"{url.rstrip('/')}/")


def _inspect(
    file: DataFile, listing: Listing, schema: Schema, seen: parquet.SchemaCache
) -> tuple[list[Fragment], pa.Schema]:
    """Return the fragments of a file, and the columns that it holds."""
    shown = mask(file.name)
    common: dict[str, Any] = {"url": file.url, "name": shown, "format": file.format}
    with storage_faults(shown):
        fs, path = open_filesystem(file.url)
        if file.format == "csv":
            found, types = csv.inspect(fs, path, shown, schema)
            hive.check_agreement(types, hive.split_folders(file.name), None, shown)
            common |= {
                "version": found.version,
                "alike": found.alike,
                "constants": tuple(file.constants.items()),
            }
            return [
                Fragment(
                    id=_id(file, listing, found.content),
                    row_group=0,
                    n_rows=None,
                    n_bytes=found.n_bytes,
                    **common,
                )
            ], types
        size = (
            file.n_bytes
            if file.n_bytes is not None
            else int(call_storage(file.url, lambda fs, path: fs.info(path)["size"]))
        )
        footer = parquet.footer(fs, path, shown, size)
    types = seen.find_plain(footer.parsed, shown)
    constants, renamed = _place_columns(file, listing, footer, types, schema)
    common |= {
        "version": footer.digest,
        "constants": tuple(constants.items()),
        "renamed": tuple(renamed.items()),
    }
    if file.deleted and count_deleted(file.deleted) > int(
        unpack(file.deleted, 0, footer.n_rows).sum()
    ):
        raise InputError(
            "the table deletes rows that this file does not have", shown, "restore the table"
        )
    dropped = {
        renamed.get(column, column)
        for column, declared in schema.columns.items()
        if declared.role == "drop"
    }
    fragments, start = [], 0
    for index, group in enumerate(footer.groups):
        gone = unpack(file.deleted, start, group.n_rows if file.deleted else 0)
        start += group.n_rows
        if gone.size and gone.all():
            continue
        fragments.append(
            Fragment(
                id=_id(file, listing, footer.digest, index, gone.tobytes()),
                row_group=index,
                n_rows=group.n_rows - int(gone.sum()),
                n_bytes=sum(chunk.n_bytes for chunk in group.chunks),
                deleted=pack(gone),
                n_bytes_decoded=sum(
                    chunk.n_bytes_decoded for chunk in group.chunks if chunk.column not in dropped
                ),
                layout=None
                if isinstance(fs, LocalFileSystem)
                else parquet.lay_out(footer, group, size),
                **common,
            )
        )
    return fragments, types


def _place_columns(
    file: DataFile, listing: Listing, footer: Footer, types: pa.Schema, schema: Schema
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns that a Parquet file does not hold with their values, and those that have another name in it with that name."""
    shown = mask(file.name)
    if listing.fields is None:
        hive.check_agreement(types, hive.split_folders(file.name), footer, shown)
        held = set(types.names) if file.constants else set()
        return {column: value for column, value in file.constants.items() if column not in held}, {}
    names, constants = find_columns(
        listing.fields, footer.parsed.schema.to_arrow_schema(), file.constants, shown
    )
    for wanted in listing.fields:
        if (
            wanted.name in schema.columns and schema.columns[wanted.name].role == "drop"
        ):  # never read: of any type
            continue
        if wanted.name in names and not fits(types.field(names[wanted.name]).type, wanted.type):
            what = f"its type is {types.field(names[wanted.name]).type} in this file, and {wanted.type} in the table"
            raise DataError(what, f"{shown}, column {wanted.name!r}", "write the file again")
        if (
            (listing.format, wanted.type) in _INEXACT
            and wanted.name not in names
            and file.constants.get(wanted.name) is not None
        ):
            what = f"its values stand in the table's metadata alone, from which a value of type {wanted.type} cannot be read exactly"
            raise DataError(
                what,
                f"column {wanted.name!r}",
                "write a copy of the table without this partition, or drop the column",
            )
    return constants, {column: name for column, name in names.items() if column != name}


def _id(
    file: DataFile, listing: Listing, digest: str, row_group: int = 0, deleted: bytes = b""
) -> str:
    place = f"{len(file.name)}:{file.name}:{digest}:{row_group}"
    if (
        listing.format != "files"
    ):  # the folders' names tell nothing here: the values stand in the metadata
        place += f":{listing.format}:{listing.version}:{sorted(file.constants.items())!r}:{blake2b(deleted, digest_size=16).hexdigest()}"
    return blake2b(place.encode(), digest_size=16).hexdigest()


def _join_types(
    parts: list[pa.Schema], names: list[str], listing: Listing, schema: Schema
) -> pa.Schema:
    """Return the table's columns: its own, or those of its folders and of its files, with types that hold the values of all files."""
    if listing.fields is not None:
        return pa.schema([(each.name, each.type) for each in listing.fields])
    dropped = {
        column for column, declared in schema.columns.items() if declared.role == "drop"
    }  # never read: of any type
    joined: dict[str, pa.DataType] = {}
    for found, name in zip(parts, names, strict=True):
        if joined and (found is parts[0] or found.equals(parts[0])):
            continue
        _check_names(found.names, list(joined) or found.names, name)
        for column in found:
            wider = widen(joined.get(column.name, column.type), column.type)
            if wider is None and column.name not in dropped:
                others = [
                    (each.field(column.name).type, other)
                    for each, other in zip(parts, names, strict=True)
                ]
                type_, other = next(
                    (pair for pair in others if widen(pair[0], column.type) is None), others[0]
                )
                what = f"its type is {column.type} in this file, and {type_} in {other}"
                raise DataError(
                    what, f"{name}, column {column.name!r}", "write all files with one type"
                )
            joined[column.name] = wider or joined[column.name]
    return pa.schema(
        [*joined.items(), *(each for each in listing.partitions.items() if each[0] not in joined)]
    )


def _check_names(found: Sequence[str], wanted: Sequence[str], name: str) -> None:
    twice = next((column for column, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            "this column appears twice in the table", f"column {twice!r}", "rename one of the two"
        )
    for column in sorted(set(found) ^ set(wanted)):
        what = (
            "this file has this column and the first one"
            if column in found
            else "the first file has this column and this one"
        )
        raise DataError(
            f"{what} does not",
            f"{name}, column {column!r}",
            "write all files with the same columns",
        )


_FIRST_FILES = 64


def row_group_ranges(
    table: InputTable, columns: Iterable[str], is_needed: Callable[[Ranges], bool] | None = None
) -> Mapping[str, Ranges]:
    """Return the range of values in each row group, in the order of the table, for the columns whose range every footer holds.

    Row groups that hold only nulls have no range. Only footers are read; CSV files have none.
    Partition columns have none either, and no column has one if rows are deleted, because footers
    count these too.

    Parameters
    ----------
    is_needed
        Called with the first ranges of a column, and again with more; if it returns False, the
        column is left out. When none is left, no further footer is read. None keeps all columns.

    Privacy
    -------
    The ranges are exact values of the private table. Compare them and discard them: never put them
    in a message, file or graph.
    """
    if any(fragment.format != "parquet" or fragment.deleted for fragment in table.fragments):
        return {}
    files = list({fragment.url: fragment for fragment in table.fragments}.values())
    joined: dict[str, Ranges] = {name: [] for name in columns}
    start = 0
    while joined and start < len(files):
        end = max(_FIRST_FILES, 2 * start)
        found = map_files(partial(_of_file, columns=list(joined)), files[start:end])
        whole = [name for name in joined if all(ranges[name] is not None for ranges in found)]
        more = {
            name: joined[name] + [pair for ranges in found for pair in ranges[name] or ()]
            for name in whole
        }
        joined = {
            name: ranges
            for name, ranges in more.items()
            if _is_of_one_kind(ranges) and (is_needed is None or is_needed(ranges))
        }
        start = end
    return joined


def _is_of_one_kind(ranges: Ranges) -> bool:
    return len({_kind(low) for low, _ in ranges}) <= 1


def _kind(value: Any) -> Any:
    """Return what two values must share to be compared: files of one Delta table may hold one column in several types."""
    return (
        float
        if isinstance(value, int | float)
        else (type(value), getattr(value, "tzinfo", None) is None)
    )


def _of_file(file: Fragment, columns: Collection[str]) -> dict[str, Ranges | None]:
    fs, path = open_filesystem(file.url)
    with storage_faults(file.name):
        footer = parquet.footer(
            fs, path, file.name, None if file.layout is None else file.layout.n_file_bytes
        )
    renamed, absent = dict(file.renamed), dict(file.constants)
    held = {name: renamed.get(name, name) for name in columns if name not in absent}
    ranges = find_ranges(footer, set(held.values()))
    return {name: ranges[held[name]] if name in held else None for name in columns}
