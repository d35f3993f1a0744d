"""Reading Parquet: a footer by one ranged read, a row group in batches of limited bytes; a remote one's needed columns and footer together.

A reader of many columns holds a page of each, so the pages of a wide row group together can be
larger than its rows: then each column is read whole, one after the other. A process keeps the
footers that it parsed last: else the time of a pass would grow with the square of a file's row
groups.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.errors import DataError, InputError
from dpdask.io.filesystems import mask, report_change
from dpdask.io.folders import find_constants
from dpdask.io.footer import (
    INT96,
    REWRITE,
    TAIL_BYTES,
    Footer,
    RowGroup,
    digest_footer,
    parse_footer,
    read_tail,
)
from dpdask.io.fragment import Fragment, Layout, estimate_width, has_width
from dpdask.io.storage import (
    Folder,
    RemoteFile,
    call_storage,
    open_filesystem,
    read_ranges,
    storage_faults,
)

BATCH_ROWS = 2**17
BATCH_BYTES = 2**25
_PAGE_BYTES = 2**20  # what most writers put into a page
_HELD_BYTES = 2**27  # of pages, or of a remote row group
_READER_BYTES = 2**28  # what Arrow's reader holds for a batch
_READER_VALUE_BYTES = 14  # of it, for each value of a narrow column
_KEPT_BYTES = 2**22  # of footers; when they are parsed they take some ten times as much
_SETTLED_SECONDS = 0.1  # a change within this time may leave a file's times as they are; on file systems with whole seconds, within the next
_ARROW = b"ARROW:schema"
_RESTORE = "restore the release"
_BAD_TYPES = "the types of its columns cannot be read: they are corrupt, or unknown to Arrow"
_BAD_ROWS = "this row group cannot be read: it is truncated or corrupt"


@contextmanager
def refuse_corrupt(what: str, where: str, hint: str = REWRITE) -> Iterator[None]:
    """Turn Arrow's failures on a file's bytes into an InputError; those of a file system are passed on."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise InputError(what, where, hint) from None


def footer(url: str, name: str, size: int | None = None, *, tail_bytes: int = TAIL_BYTES) -> Footer:
    """Return a file's checked footer; at first `tail_bytes` are read from the end, and what lies before them only if the footer is longer."""
    n_bytes = size or int(call_storage(url, lambda fs, path: fs.info(path)["size"]))

    def read(start: int, end: int) -> bytes:
        return read_ranges(url, [(start, end)], n_bytes)[0]

    raw = read_tail(read, n_bytes, name, tail_bytes=tail_bytes)
    return FOOTERS.keep(url, None, parse_footer(raw, n_bytes, name), len(raw))


@contextmanager
def open_parquet(
    folder: Folder,
    name: str,
    columns: Sequence[str] = (),
    where: str = "",
    hint: str = _RESTORE,
    n_bytes: int | None = None,
) -> Iterator[Any]:
    """Open a small file, as released shards are, that holds some columns, and yield Arrow's reader of it; its size may be known."""
    where = where or mask(name)
    with (
        folder.open(name, n_bytes) as file,
        refuse_corrupt("this file cannot be read: it is truncated or corrupt", where, hint),
    ):
        size = file.seek(0, os.SEEK_END)

        def read(start: int, end: int) -> bytes:
            file.seek(start)
            return file.read(end - start)

        parsed = parse_footer(read_tail(read, size, where, hint), size, where, hint).parsed
        opened = pq.ParquetFile(file, metadata=parsed, page_checksum_verification=True)
        if not set(columns) <= set(opened.schema_arrow.names):
            raise InputError("this file lacks a column", where, hint)
        yield opened


def read_schema(folder: Folder, name: str, n_bytes: int | None = None) -> pa.Schema:
    """Return the columns of a released shard, whose size may be known; last those that it leaves to its folders."""
    with open_parquet(folder, name, n_bytes=n_bytes) as file:
        return _add_constants(file.schema_arrow.empty_table(), name).schema


def read_shard(
    folder: Folder, name: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a released shard, checked, or some columns of them, with those that it leaves to its folders."""
    with open_parquet(folder, name) as file:
        held = [each for each in file.schema_arrow if columns is None or each.name in columns]
        types = pa.schema(held, file.schema_arrow.metadata)
        wanted = list(columns or _add_constants(types.empty_table(), name).schema.names)
        batches = file.iter_batches(BATCH_ROWS, columns=types.names, use_threads=False)
        # of a shard without rows, one batch that tells the types
        for batch in batches if file.metadata.num_rows else [pa.RecordBatch.from_pylist([], types)]:
            batch.validate(full=True)
            rows = _add_constants(batch, name)
            if not {*wanted} <= {*rows.schema.names}:
                raise InputError("this file lacks a column", mask(name), _RESTORE)
            yield rows.select(wanted)


def _add_constants(rows: Any, name: str) -> Any:
    """Return a table or a batch with the columns that a shard leaves to its folders."""
    for column, value in find_constants(rows.schema, name).items():
        rows = rows.append_column(column, pa.repeat(value, rows.num_rows))
    return rows.replace_schema_metadata(None)


def read_columns(url: str, name: str) -> list[tuple[str, pa.DataType, bool]]:
    """Return the name, the type and the null flag of each column; only the footer is read, and of it only the schema is looked at."""
    metadata = footer(url, name, tail_bytes=0).parsed
    with refuse_corrupt(_BAD_TYPES, name):
        nullable = [field.nullable for field in metadata.schema.to_arrow_schema()]
        return [
            (field.name, field.type, flag)
            for field, flag in zip(_plain_schema(metadata), nullable, strict=True)
        ]


def lay_out(found: Footer, group: RowGroup) -> Layout:
    """Return where the columns of a row group lie in its file."""
    columns = tuple(
        (chunk.column, chunk.start, chunk.start + chunk.n_bytes) for chunk in group.chunks
    )
    return Layout(n_file_bytes=found.n_file_bytes, footer_start=found.start, columns=columns)


def _plain_schema(metadata: Any) -> pa.Schema:
    """Return a footer's Arrow schema without metadata and dictionaries; INT96 times are microseconds, for far ones wrap around in nanoseconds."""
    schema = metadata.schema.to_arrow_schema()
    if any(
        metadata.schema.column(number).physical_type == "INT96"
        for number in range(metadata.num_columns)
    ):
        schema = pq.ParquetFile(
            pa.BufferReader(b""), metadata=metadata, coerce_int96_timestamp_unit="us"
        ).schema_arrow
    return pa.schema(
        [
            pa.field(
                field.name,
                field.type.value_type if pa.types.is_dictionary(field.type) else field.type,
            )
            for field in schema
        ]
    )


class SchemaCache:
    """The plain schema of the first file that was seen: to compare a wide footer with it is much cheaper than to convert it."""

    def __init__(self) -> None:
        self._first: tuple[Any, bytes | None, pa.Schema] | None = None

    def find_plain(self, metadata: Any, name: str) -> pa.Schema:
        """Return a footer's plain schema: the same object if it has the columns of the first one."""
        schema, arrow = metadata.schema, (metadata.metadata or {}).get(_ARROW)
        if self._first is not None and self._first[1] == arrow and self._first[0].equals(schema):
            return self._first[2]
        with refuse_corrupt(_BAD_TYPES, name):
            plain = _plain_schema(metadata)
        self._first = self._first or (schema, arrow, plain)
        return plain


def read_batches(
    fragment: Fragment,
    columns: list[str],
    public: Collection[str],
    encoded: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield a row group's rows in batches of limited rows and bytes, after checking that the file is still the one whose footer was read first.

    Of the columns that are not `public` only the type counts for the size of a batch. Texts of the
    `encoded` ones stay dictionaries, as the file holds them.
    """
    with (
        refuse_corrupt(_BAD_ROWS, fragment.where),
        _open(fragment, columns) as (source, found),
    ):
        group, types = found.groups[fragment.row_group], found.parsed.schema.to_arrow_schema()
        row_bytes, page_bytes = measure(group, types, columns, public)
        # for which Arrow's reader stays in its bytes: a power of two, to which it rounds its buffers
        held = _READER_BYTES // (_READER_VALUE_BYTES * max(1, len(columns)))
        most = min(BATCH_ROWS, 1 << max(0, held.bit_length() - 1))
        n_rows = max(1, min(most, int(BATCH_BYTES / max(1.0, row_bytes))))
        # a reader with a buffer reads on as it needs more; one without holds all compressed bytes of its columns
        options: dict[str, Any] = (
            {"buffer_size": _PAGE_BYTES}
            if sum(chunk.n_bytes_decoded for chunk in group.chunks) > _HELD_BYTES
            else {}
        )
        options |= {
            "metadata": found.parsed,
            "page_checksum_verification": True,
            "pre_buffer": False,
            "read_dictionary": list(encoded),
        }

        def read(leaves: Sequence[Sequence[int]], unit: str = "us") -> Iterator[pa.RecordBatch]:
            file = pq.ParquetFile(source, coerce_int96_timestamp_unit=unit, **options)
            return _read_group(
                file, fragment.row_group, leaves, n_rows, together=page_bytes <= _HELD_BYTES
            )

        leaves, n_left = _find_leaves(group, columns, fragment.where), group.n_rows
        for name, own in zip(columns, leaves, strict=True):
            if any(group.chunks[leaf].physical == INT96 for leaf in own):
                for batches in zip(*(read([own], unit) for unit in ("us", "ns", "s")), strict=True):
                    _check_times([batch.column(0) for batch in batches], fragment, name)
        for batch in read(leaves):
            n_left -= batch.num_rows
            # Arrow's reader takes these as they are stored
            for name, column in zip(columns, batch.columns, strict=True):
                if (
                    not has_width(column.type)
                    or pa.types.is_dictionary(column.type)
                    or pa.types.is_time(column.type)
                ):
                    _check_values(column, fragment, name)
            yield batch
        if n_left:
            raise pa.ArrowInvalid


def _check_values(column: pa.Array, fragment: Fragment, stored: str) -> None:
    """Refuse values that their type does not have: it is a fact about rows, so no file is named."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        what, hint = f"holds a value that its type {column.type} does not have", "correct it"
        raise DataError(what, _name(fragment, stored), hint) from None


def _name(fragment: Fragment, stored: str) -> str:
    """Return how messages name a column, which may have another name in the file."""
    found = next((column for column, renamed in fragment.renamed if renamed == stored), stored)
    return f"column {found!r}"


def _check_times(arrays: list[pa.Array], fragment: Fragment, stored: str) -> None:
    """Refuse INT96 times that microseconds do not hold, given in microseconds, nanoseconds and seconds; a unit wraps around what it does not hold."""
    for micro, nano, second in zip(*map(_list_leaves, arrays), strict=True):
        if micro.type == second.type:  # beside the times in a struct
            continue
        count, fine, coarse = (
            leaf.drop_null().cast(pa.int64()).to_numpy() for leaf in (micro, nano, second)
        )
        if (count * 1000 != fine).any() or (count // 1_000_000 != coarse).any():
            what = "holds a time in the old format INT96 that timestamp[us] cannot hold: it is too far, or has nanoseconds"
            raise DataError(
                what,
                _name(fragment, stored),
                "correct it, or, if it has nanoseconds, write the file with timestamp[ns]",
            )


def _list_leaves(array: pa.Array) -> list[pa.Array]:
    """Return the arrays that hold the values of lists, structs and maps."""
    if not pa.types.is_nested(array.type):
        return [array]
    is_map, is_struct = pa.types.is_map(array.type), pa.types.is_struct(array.type)
    inner = (
        [array.keys, array.items] if is_map else array.flatten() if is_struct else [array.flatten()]
    )
    return [leaf for each in inner for leaf in _list_leaves(each)]


def measure(
    group: RowGroup, types: pa.Schema, columns: list[str], public: Collection[str]
) -> tuple[float, int]:
    """Return about how many bytes a row of some columns takes in memory, and how many bytes their largest pages have together.

    A column of fixed width takes its width, and any other 64 bytes; if it is public, what the
    footer says that its values have when they are decompressed. A dictionary holds a repeated text
    once, so such a column counts the length of its least or its greatest text, if that is more.
    """
    read, n_rows = set(columns), max(1, group.n_rows)
    row_bytes, page_bytes = 0.0, 0
    for chunk in group.chunks:
        if chunk.column not in read:
            continue
        page_bytes += min(_PAGE_BYTES, chunk.n_bytes_decoded)
        type_ = types.field(chunk.column).type
        if chunk.column in public and not has_width(type_):
            row_bytes += 8 + max(chunk.n_bytes_decoded / n_rows, chunk.n_text)
        else:
            row_bytes += estimate_width(type_)
    return row_bytes, page_bytes


def _find_leaves(group: RowGroup, columns: Sequence[str], where: str) -> list[list[int]]:
    """Return the numbers of each column's leaves: the reader's own names mix up a column `a.b` and the field `b` of a column `a`."""
    places: dict[str, list[int]] = {name: [] for name in columns}
    for number, chunk in enumerate(group.chunks):
        if chunk.column in places:
            places[chunk.column].append(number)
    missing = next((name for name, numbers in places.items() if not numbers), None)
    if missing is not None:
        raise DataError(
            "the file has no such column",
            f"{where}, column {missing!r}",
            "write all files with one schema",
        )
    return list(places.values())


def _read_group(
    file: Any, row_group: int, leaves: Sequence[Sequence[int]], batch_rows: int, *, together: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group; if its columns are read one after the other, one column's pages are held at a time."""
    if together:
        joined = [number for numbers in leaves for number in numbers]
        yield from file.reader.iter_batches(
            batch_rows, row_groups=[row_group], column_indices=joined, use_threads=False
        )
        return
    read = [
        file.reader.read_row_group(row_group, column_indices=numbers, use_threads=False)
        for numbers in leaves
    ]
    rows = pa.table(
        [table.column(0) for table in read], names=[table.column_names[0] for table in read]
    )
    del read
    for start in range(0, rows.num_rows, batch_rows):
        yield from rows.slice(start, batch_rows).combine_chunks().to_batches()


class _Kept(NamedTuple):
    identity: Any
    found: Footer
    n_bytes: int


class _Footers:
    """The footers that this process parsed last, by URL: a few MiB of them, and always the newest."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._n_bytes = 0
        self._lock = Lock()

    def find(
        self, fragment: Fragment, size: int, identity: Any, read: Callable[[], bytes]
    ) -> Footer:
        """Return the footer of a fragment's file if it is the one that was read first; it is read again unless the file is surely the same."""
        kept = self.get(fragment.url)
        if kept is None or identity is None or kept.identity != identity:
            raw = read()
            if digest_footer(raw, size) != fragment.version:
                raise report_change(fragment.name)
            same = kept is not None and kept.found.digest == fragment.version
            return self.keep(
                fragment.url,
                identity,
                kept.found if same and kept else parse_footer(raw, size, fragment.name),
                len(raw),
            )
        if kept.found.digest != fragment.version:
            raise report_change(fragment.name)
        return kept.found

    def keep(self, url: str, identity: Any, found: Footer, n_bytes: int) -> Footer:
        """Keep a footer in place of the oldest ones."""
        with self._lock:
            old = self._kept.pop(url, None)
            self._kept[url] = _Kept(identity, found, n_bytes)
            self._n_bytes += n_bytes - (0 if old is None else old.n_bytes)
            while len(self._kept) > 1 and self._n_bytes > _KEPT_BYTES:
                self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes
        return found

    def get(self, url: str) -> _Kept | None:
        """Return what is kept of a file."""
        return self._kept.get(url)

    def cache_clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0


FOOTERS = _Footers()


@contextmanager
def _open(fragment: Fragment, columns: list[str]) -> Iterator[tuple[Any, Footer]]:
    """Open a row group's file, and yield it with its footer, after checking that the footer is the one that was read first."""
    layout = fragment.layout
    if layout is None:
        path = open_filesystem(fragment.url)[1]
        with storage_faults(path):
            before = _identify(os.stat(path))  # noqa: PTH116 - on each row group, and a Path costs more
            source = pa.OSFile(path)
            after = _identify(os.stat(path))  # noqa: PTH116 - as above
        with source:
            # Arrow tells no descriptor in all its versions; a file that was exchanged has no identity
            size, here = source.size(), after if after == before else None

            def read() -> bytes:
                return read_tail(
                    lambda start, end: source.read_at(end - start, start), size, fragment.name
                )

            yield source, FOOTERS.find(fragment, size, here, read)
        return
    wanted = set(columns)
    needed = [(start, end) for name, start, end in layout.columns if name in wanted]
    if sum(end - start for start, end in needed) > _HELD_BYTES:
        needed = []  # each column is read as it is needed
    tail = (layout.footer_start, layout.n_file_bytes)
    kept = FOOTERS.get(fragment.url) if tail[1] - tail[0] > TAIL_BYTES else None
    identity = None if kept is None else call_storage(fragment.url, _identify_remote)
    known = kept is not None and identity is not None and kept.identity == identity
    file = RemoteFile(fragment.url, layout.n_file_bytes, needed if known else [*needed, tail])

    def read_footer() -> bytes:
        file.seek(layout.footer_start)
        return file.read()

    found = FOOTERS.find(fragment, layout.n_file_bytes, identity, read_footer)
    with pa.PythonFile(file, mode="r") as source:
        yield source, found


def _identify(about: os.stat_result) -> tuple[int, ...] | None:
    """Return what changes if a local file changes; None while a change may not show in its times."""
    changed = max(about.st_mtime_ns, about.st_ctime_ns)
    settled = changed / 1e9 + (_SETTLED_SECONDS if changed % 10**9 else 2)
    return (
        (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if settled < time.time()
        else None
    )


def _identify_remote(fs: Any, path: str) -> tuple[int, str] | None:
    """Return what changes if a remote file changes; None if its store has no such mark."""
    about: Mapping[str, Any] = fs.info(path)
    mark = about.get("ETag") or about.get("etag")
    return (int(about["size"]), str(mark)) if mark and not fs.dircache.use_listings_cache else None
