"""The fragments of an input table: Parquet row groups or CSV files, with identities made of their content.

A fragment's id names its random stream, its shard and its place in a resumed run. It is made of the
file's path inside the table, the file's own digest and the row group, so it does not depend on
schedulers, partition numbers, or where the table lies. The version of a Delta or Iceberg table, the
values of its partition columns and the deleted rows enter it too. If a table grows, the version
does not, so that a file keeps its identity.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
from fsspec.utils import glob_translate

from dpdask.arrays import freeze_class
from dpdask.errors import DataError, InputError, RepeatedError
from dpdask.io import csv, parquet
from dpdask.io.files import (
    DataFile,
    Files,
    Listing,
    TableFormat,
    check_agreement,
    find_columns,
    is_glob,
)
from dpdask.io.filesystems import mask
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
from dpdask.io.storage import is_local, open_filesystem, open_remote, storage_faults
from dpdask.schema import Schema

_THREADS = 16
_POOL_FILES = 2**10  # a pool keeps a kilobyte or two for each call that it has
_TIMED_FILES = 4
_FIRST_FILES = 64
# values of partition columns: writers of Delta tables write bytes in several ways, and pyiceberg
# reads float64 as float32
_INEXACT = {("delta", pa.binary()), ("iceberg", pa.float64())}

File = TypeVar("File")
Found = TypeVar("Found")


@freeze_class
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
    table: str = ""  # the id that a Delta or Iceberg table keeps for life
    # Released files that may hold the rows of new ones in another order or codec.
    alike: tuple[Fragment, ...] = ()
    # A digest of the rows that are left out as their keys were released; empty without such.
    skipped: str = ""
    persons: InputTable | None = None  # the table of persons, if this one has their rows

    @property
    def fingerprint(self) -> str:
        """A digest of the whole input: another one if a file was added, removed or changed, or of another version."""
        version = [] if self.version is None else [f"{self.format} {self.version}"]
        lines = [*version, *(f"{fragment.id} {fragment.version}" for fragment in self.fragments)]
        lines += [self.skipped] if self.skipped else []
        lines += [] if self.persons is None else [f"persons {self.persons.fingerprint}"]
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


def map_files(call: Callable[[File], Found], files: Sequence[File]) -> list[Found]:
    """Return the results of a call that reads a little of each file, in their order.

    Notes
    -----
    Threads that do not wait for a storage wait for Python's lock: with 16 of them the footer of a
    local file took 0.9 ms of CPU time, with one 0.55 ms. So one thread begins, and if it waits for
    half of its time or more, 16 threads take the rest.
    """
    began, worked = time.perf_counter(), time.thread_time()
    found = [call(file) for file in files[:_TIMED_FILES]]
    if time.thread_time() - worked > (time.perf_counter() - began) / 2:
        return found + [call(file) for file in files[_TIMED_FILES:]]
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(_TIMED_FILES, len(files), _POOL_FILES):
            found += pool.map(call, files[start : start + _POOL_FILES])
    return found


def discover(
    url: str, schema: Schema, table_format: TableFormat | None = None, *, growing: bool = False
) -> InputTable:
    """Return the table at a URL, from its file names, footers and metadata alone.

    If it is `growing`, fragments have the same identities in each version of the table.
    """
    listing = (table_format or Files()).list_files(url, schema)
    return describe_files(url, listing, schema, growing=growing)


def describe_files(url: str, listing: Listing, schema: Schema, *, growing: bool) -> InputTable:
    """Return the table of a listing, from the metadata of its files alone."""
    version, files = listing.version, listing.files
    if growing:
        listing = replace(listing, version=None)
    seen = parquet.SchemaCache()
    parts = map_files(lambda file: _inspect(file, listing, schema, seen), files)
    found = [fragment for fragments, _ in parts for fragment in fragments]
    for names in ([fragment.id for fragment in found], [file.url for file in files]):
        if len(set(names)) < len(names):
            hint = "list it once, or each of its rows would be released twice"
            raise DataError("the table lists a file twice", url, hint)
    types = [types for _, types in parts]
    return InputTable(
        fragments=tuple(replace(each, number=number) for number, each in enumerate(found)),
        schema=_join_types(types, [mask(file.name) for file in files], listing, schema),
        format=files[0].format if listing.format == "files" else listing.format,
        version=version,
        n_files=len(files),
        location=listing.location,
        left_out=listing.left_out,
        table=listing.table,
    )


def read_batches(
    fragment: Fragment,
    columns: list[str],
    types: pa.Schema,
    public: Collection[str] = (),
    encoded: Collection[str] = (),
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
    encoded
        Columns of texts that may come as dictionaries, which is faster.
    """
    missing = next((name for name in columns if name not in types.names), None)
    if missing is not None:
        hint = "write all files with the declared columns"
        raise DataError("the table has no such column", f"column {missing!r}", hint)
    stored = find_stored(fragment, columns)
    with storage_faults(fragment.where):
        if fragment.format == "parquet":
            shown = find_stored(fragment, list(public))
            batches = parquet.read_batches(
                fragment, stored, shown, find_stored(fragment, list(encoded))
            )
        else:
            batches = csv.read_batches(fragment, stored or types.names[:1], types)
        yield from complete(batches, fragment, columns, types, encoded)


def takes_in(url: str, folder: str, inside: int = 0) -> bool:
    """Return whether a table's URL includes the files written to a folder, or so many folders inside it, which the next run would read."""
    if not is_glob(url):
        return f"{folder}/".startswith(f"{url.rstrip('/')}/")
    written = f"{folder}/{'_/' * inside}part-00000.parquet".partition("://")[2]
    first, parts = folder.count("/") + 1, url.split("/")
    # any name of a folder may come to be written there
    for place in range(first, min(first + inside, len(parts) - 1)):
        parts[place] = "**" if parts[place] == "**" else "*"
    asked = "/".join(parts)
    return re.fullmatch(glob_translate(asked.partition("://")[2]), written) is not None


def _inspect(
    file: DataFile, listing: Listing, schema: Schema, seen: parquet.SchemaCache
) -> tuple[list[Fragment], pa.Schema]:
    """Return the fragments of a file, and the columns that it holds."""
    shown = mask(file.name)
    common: dict[str, Any] = {"url": file.url, "name": shown, "format": file.format}
    with storage_faults(shown):
        if file.format == "csv":
            found, types = csv.inspect(file.url, shown, schema)
            check_agreement(types, file.name, None, shown)
            common |= {"version": found.version, "alike": found.alike, "n_bytes": found.n_bytes}
            common |= {"constants": tuple(file.constants.items()), "n_rows": None, "row_group": 0}
            return [Fragment(id=_id(file, listing, found.content), **common)], types
        footer = parquet.footer(file.url, shown, file.n_bytes)
        local = is_local(open_filesystem(file.url)[0])
    types = seen.find_plain(footer.parsed, shown)
    constants, renamed = _place_columns(file, listing, footer, types, schema)
    common |= {"constants": tuple(constants.items()), "renamed": tuple(renamed.items())}
    if count_deleted(file.deleted) > int(unpack(file.deleted, 0, footer.n_rows).sum()):
        what = "the table deletes rows that this file does not have"
        raise InputError(what, shown, "restore the table")
    back = {stored: column for column, stored in renamed.items()}
    fragments, start = [], 0
    for index, group in enumerate(footer.groups):
        gone = unpack(file.deleted, start, group.n_rows if file.deleted else 0)
        start += group.n_rows
        if gone.size and gone.all():
            continue
        read = (
            chunk.n_bytes_decoded
            for chunk in group.chunks
            if not schema.is_dropped(back.get(chunk.column, chunk.column))
        )
        fragment = Fragment(
            id=_id(file, listing, footer.digest, index, gone.tobytes()),
            version=footer.digest,
            row_group=index,
            n_rows=group.n_rows - int(gone.sum()),
            n_bytes=sum(chunk.n_bytes for chunk in group.chunks),
            deleted=pack(gone),
            n_bytes_decoded=sum(read),
            layout=None if local else parquet.lay_out(footer, group),
            **common,
        )
        fragments.append(fragment)
    return fragments, types


def _place_columns(
    file: DataFile, listing: Listing, footer: Footer, types: pa.Schema, schema: Schema
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the columns that a Parquet file does not hold, and other names in it."""
    shown = mask(file.name)
    if listing.fields is None:
        check_agreement(types, file.name, footer, shown)
        held = set(types.names) if file.constants else set()
        return {column: value for column, value in file.constants.items() if column not in held}, {}
    stored = footer.parsed.schema.to_arrow_schema()
    names, constants = find_columns(listing.fields, stored, file.constants, shown)
    for wanted in (each for each in listing.fields if not schema.is_dropped(each.name)):
        where = f"column {wanted.name!r}"
        if wanted.name in names:
            type_ = types.field(names[wanted.name]).type
            if not fits(type_, wanted.type):
                what = f"its type is {type_} in this file, and {wanted.type} in the table"
                raise DataError(what, f"{shown}, {where}", "write the file again")
        elif (listing.format, wanted.type) in _INEXACT and file.constants.get(
            wanted.name
        ) is not None:
            what = f"its values stand in the table's metadata alone, from which a value of type {wanted.type} cannot be read exactly"
            hint = "write a copy of the table without this partition, or drop the column"
            raise DataError(what, where, hint)
    return constants, {column: name for column, name in names.items() if column != name}


def _id(
    file: DataFile, listing: Listing, digest: str, row_group: int = 0, deleted: bytes = b""
) -> str:
    place = f"{len(file.name)}:{file.name}:{digest}:{row_group}"
    # the folders' names tell nothing in a lake: the values stand in the metadata
    if listing.format != "files":
        gone = blake2b(deleted, digest_size=16).hexdigest()
        values = sorted(file.constants.items())
        place += f":{listing.format}:{listing.version}:{values!r}:{gone}"
    return blake2b(place.encode(), digest_size=16).hexdigest()


def _join_types(
    parts: list[pa.Schema], names: list[str], listing: Listing, schema: Schema
) -> pa.Schema:
    """Return the table's columns: its own, or those of its files and folders, with wide enough types."""
    if listing.fields is not None:
        return pa.schema([(each.name, each.type) for each in listing.fields])
    joined: dict[str, pa.DataType] = {}
    for found, name in zip(parts, names, strict=True):
        if joined and (found is parts[0] or found.equals(parts[0])):
            continue
        _check_names(found.names, list(joined) or found.names, name, schema)
        for column in found:
            wider = widen(joined.get(column.name, column.type), column.type)
            if wider is None and not schema.is_dropped(column.name):
                others = [each.field(column.name).type for each in parts]
                unlike = (
                    at for at, type_ in enumerate(others) if widen(type_, column.type) is None
                )
                at = next(unlike, 0)
                what = f"its type is {column.type} in this file, and {others[at]} in {names[at]}"
                where = f"{name}, column {column.name!r}"
                raise DataError(what, where, "write all files with one type")
            joined[column.name] = wider or joined[column.name]
    return pa.schema({**joined, **listing.partitions, **joined})


def _check_names(found: Sequence[str], wanted: Sequence[str], name: str, schema: Schema) -> None:
    twice = next((column for column, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        what = "this column appears twice in the table"
        raise DataError(what, f"column {twice!r}", "rename one of the two")
    # of one column, an empty line of a CSV file is a row
    strict = min(len(found), len(wanted)) == 1
    differing = (each for each in set(found) ^ set(wanted) if strict or not schema.is_dropped(each))
    for column in sorted(differing):
        this, other = "this file", "the first file"
        one, two = (this, "the first one") if column in found else (other, "this one")
        what = f"{one} has this column and {two} does not"
        hint = "write all files with the same columns"
        raise DataError(what, f"{name}, column {column!r}", hint)


# ---- files with the same rows: copies, links, and compressed copies, whatever their names


def check_copies(
    fragments: Sequence[Fragment], released: Sequence[Fragment] = (), *, apart: Collection[str]
) -> None:
    """Check that no file is a copy of another one, or of a released one; see `find_copies`."""
    known = {fragment.url for fragment in released}
    for file, other in find_copies(fragments, released, apart=apart):
        what = f"rows seen again: this file is a copy of {other.name}"
        what += ", which was released" if other.url in known else ""
        hint = "remove it, or, if it holds other rows that happen to be equal, put them into a file with more rows"
        raise RepeatedError(what, file.name, hint)


def find_copies(
    fragments: Sequence[Fragment], known: Sequence[Fragment] = (), *, apart: Collection[str]
) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield a fragment of each file that is a copy of a known file or of one before it, and its like.

    Files are read only if their footers, or the beginnings of their texts, agree. Without rows, or
    with other values of the partition columns `apart`, they are no copies, unless they are one file
    under two names.
    """
    fresh = {fragment.url for fragment in fragments}
    alike: dict[str, dict[str, Fragment]] = {}
    for fragment in (*known, *fragments):
        if fragment.n_rows != 0:
            same = alike.setdefault(fragment.alike or fragment.version, {})
            same.setdefault(fragment.url, fragment)
    for files in alike.values():
        if len(files) < 2 or fresh.isdisjoint(files):
            continue
        places = {
            url: repr([each for each in file.constants if each[0] in apart])
            for url, file in files.items()
        }
        shared = Counter(places.values())
        compared = [file for url, file in files.items() if shared[places[url]] > 1]
        digests = {
            file.url: digest
            for file, digest in zip(compared, map_files(_digest, compared), strict=True)
        }
        seen: dict[object, Fragment] = {}
        for url, file in files.items():
            marks: list[object] = []
            if digests.get(url) is not None:
                marks.append((digests[url], places[url]))
            if url.startswith("file://"):  # the same file under another name
                with storage_faults(file.name):
                    about = Path(url.removeprefix("file://")).stat()
                marks.append((about.st_dev, about.st_ino))
            other = next((seen[mark] for mark in marks if mark in seen), file)
            seen |= dict.fromkeys(marks, other)
            if other is not file and url in fresh:
                yield file, other


def _digest(fragment: Fragment) -> bytes | None:
    with storage_faults(fragment.name):
        if fragment.format == "csv":
            return csv.digest(fragment.url)
        with open_remote(fragment.url) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # fsspec's files have readinto


# ---- ranges of values in row groups: private values that stay on the driver


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
        for name in list(joined):
            parts = [ranges[name] for ranges in found]
            more = [*joined.pop(name), *(pair for part in parts for pair in part or ())]
            # files of one Delta table may hold one column in types that cannot be compared
            is_known = None not in parts and len({_kind(low) for low, _ in more}) <= 1
            if is_known and (is_needed is None or is_needed(more)):
                joined[name] = more
        start = end
    return joined


def _kind(value: Any) -> Any:
    """Return what two values must share to be compared."""
    if isinstance(value, int | float):
        return float
    return type(value), getattr(value, "tzinfo", None) is None


def _of_file(file: Fragment, columns: Collection[str]) -> dict[str, Ranges | None]:
    size = None if file.layout is None else file.layout.n_file_bytes
    with storage_faults(file.name):
        footer = parquet.footer(file.url, file.name, size)
    held = {name: find_stored(file, [name]) for name in columns}
    ranges = find_ranges(footer, {stored for names in held.values() for stored in names})
    return {name: ranges[names[0]] if names else None for name, names in held.items()}
