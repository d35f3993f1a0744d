"""Reading Parquet: a footer by one ranged read, a row group in batches of limited bytes; a remote one's needed columns and footer together.

A reader of many columns holds a page of each, so the pages of a wide row group together can be larger than its rows: then each
column is read whole, one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import DataError, InputError
from dpdask.io.faults import report_change, storage_faults
from dpdask.io.filesystems import call_storage
from dpdask.io.fragment import Fragment, Layout
from dpdask.io.remote import RemoteFile, open_remote, read_ranges
from dpdask.io.rows import TEXT_BYTES, estimate_width, has_width

BATCH_ROWS = 2**17
BATCH_BYTES = 2**25
_PAGE_BYTES = 2**20  # what most writers put into a page
_HELD_BYTES = 2**27  # of pages, or of a remote row group
_READER_BYTES = 2**28  # what Arrow's reader holds for a batch
_READER_VALUE_BYTES = 14  # of it, for each value of a narrow column
_TAIL_BYTES = 2**16
_LEAST_TAIL_BYTES = 12  # the footer's length, and the magic number at both ends of a file
_MAGIC = b"PAR1"
_ARROW = b"ARROW:schema"


def footer(fs: Any, path: str, name: str, size: int | None = None, *, tail_bytes: int = _TAIL_BYTES) -> tuple[str, Any]:
    """Return a digest of the file's size and footer, and the parsed footer.

    The footer holds every column chunk's place and size, so a rewritten file has another digest.

    Parameters
    ----------
    fs
        The file system.
    path
        The file's path in it.
    name
        The file's name, for messages.
    size
        The file's length, if it was listed.
    tail_bytes
        How much is read first, from the end, at least 12; what lies before the footer is read too if it is shorter.

    Raises
    ------
    InputError
        If the file is truncated or no Parquet file.
    """
    url = str(fs.unstrip_protocol(path))
    n_bytes = int(call_storage(url, lambda fs, path: fs.info(path)["size"])) if size is None else size
    return _read_footer(lambda start, end: read_ranges(url, [(start, end)], n_bytes)[0], n_bytes, name, tail_bytes)


def _read_footer(read: Callable[[int, int], bytes], size: int, name: str, tail_bytes: int = _TAIL_BYTES) -> tuple[str, Any]:
    """Return a digest of a file's size and footer, and the parsed footer; see `footer`. The bytes from `start` to `end` are `read(start, end)`."""
    raw = read(max(0, size - tail_bytes), size)
    length = int.from_bytes(raw[-8:-4], "little") if len(raw) >= 12 and raw[-4:] == _MAGIC else size
    if length + 12 > size:
        raise InputError("this is not a complete Parquet file: it is truncated or corrupt", name, "write it again")
    if length + 8 > len(raw):
        raw = read(size - length - 8, size)
    try:
        return _digest(size, raw[-length - 8 :]), pq.read_metadata(pa.BufferReader(_MAGIC + raw[-length - 8 :]))
    except (pa.ArrowException, OSError):
        raise InputError("its Parquet footer cannot be read: it is corrupt or encrypted", name, "write it again") from None


def read_columns(fs: Any, path: str, name: str) -> list[tuple[str, pa.DataType, bool]]:
    """Return the name, the type and the null flag of each column; only the footer is read, and of it only the schema is looked at.

    Parameters
    ----------
    fs, path, name
        As for `footer`.

    Raises
    ------
    InputError
        If the file is truncated or no Parquet file.
    """
    _, metadata = footer(fs, path, name, tail_bytes=_LEAST_TAIL_BYTES)
    nullable = [field.nullable for field in metadata.schema.to_arrow_schema()]
    return [(field.name, field.type, flag) for field, flag in zip(plain_schema(metadata), nullable, strict=True)]


def _digest(size: int, raw: bytes) -> str:
    return blake2b(size.to_bytes(8, "little") + raw, digest_size=16).hexdigest()


def lay_out(metadata: Any, chunks: Sequence[Any], size: int) -> Layout:
    """Return where the columns of a row group lie.

    Parameters
    ----------
    metadata
        The parsed footer.
    chunks
        The footer's entries of the row group's columns.
    size
        The file's length.
    """
    starts = [min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))) for chunk in chunks]
    columns = tuple(
        (sys.intern(chunk.path_in_schema), start, start + chunk.total_compressed_size) for chunk, start in zip(chunks, starts, strict=True)
    )
    return Layout(n_file_bytes=size, footer_start=size - metadata.serialized_size - 8, columns=columns)


def plain_schema(metadata: Any) -> pa.Schema:
    """Return a footer's Arrow schema without metadata and without dictionaries; INT96 times are microseconds."""
    schema = _count_in_micro(metadata.schema.to_arrow_schema(), metadata)
    return pa.schema([pa.field(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type) for field in schema])


class SchemaCache:
    """The plain schema of the first file that was seen: to compare a wide footer with it is much cheaper than to convert it."""

    def __init__(self) -> None:
        self._first: tuple[Any, bytes | None, pa.Schema] | None = None

    def find_plain(self, metadata: Any) -> pa.Schema:
        """Return `plain_schema` of a footer; the same object if it has the columns of the first one."""
        schema, arrow = metadata.schema, (metadata.metadata or {}).get(_ARROW)
        if self._first is not None and self._first[1] == arrow and self._first[0].equals(schema):
            return self._first[2]
        plain = plain_schema(metadata)
        self._first = self._first or (schema, arrow, plain)
        return plain


def read_batches(fs: Any, path: str, fragment: Fragment, columns: list[str], public: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Yield a row group's rows in batches of limited rows and bytes, after checking that the file is still the one whose footer was read first.

    Parameters
    ----------
    fs
        The file system.
    path
        The file's path in it.
    fragment
        The row group as it was found when the run began.
    columns
        The columns to read.
    public
        Those that the footer may be asked about, to choose the batches' size; of others only the type counts.
    """
    try:
        with _open(fs, path, fragment, columns) as (source, metadata):
            group = metadata.row_group(fragment.row_group)
            types = metadata.schema.to_arrow_schema()
            row_bytes, page_bytes = measure(group, types, columns, public)
            n_rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, row_bytes)), _limit_rows(len(columns))))
            # a reader with a buffer reads on as it needs more; one without holds all compressed bytes of its columns
            options: dict[str, Any] = {"buffer_size": _PAGE_BYTES} if group.total_byte_size > _HELD_BYTES else {}
            options |= {"metadata": metadata, "page_checksum_verification": True, "pre_buffer": False}

            def read(names: list[str], unit: str = "us") -> Iterator[pa.RecordBatch]:
                file = pq.ParquetFile(source, coerce_int96_timestamp_unit=unit, **options)
                if page_bytes > _HELD_BYTES:
                    return _read_columns(file, fragment.row_group, names, n_rows)
                batches = file.iter_batches(batch_size=n_rows, row_groups=[fragment.row_group], columns=names, use_threads=False)
                return (batch.select(names) for batch in batches)

            counted = _count_in_micro(types, metadata)
            for name in (name for name in columns if counted is not types and counted.field(name).type != types.field(name).type):
                for batches in zip(*(read([name], unit) for unit in ("us", "ns", "s")), strict=True):
                    _check_times([batch.column(0) for batch in batches], fragment, name)
            yield from read(columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise InputError("this row group cannot be read: it is truncated or corrupt", fragment.where, "write the file again") from None


def _count_in_micro(types: pa.Schema, metadata: Any) -> pa.Schema:
    """Return a footer's Arrow schema with INT96 times in microseconds, or as it is if it has none: in nanoseconds, far times wrap around."""
    if all(metadata.schema.column(number).physical_type != "INT96" for number in range(metadata.num_columns)):
        return types
    return pq.ParquetFile(pa.BufferReader(b""), metadata=metadata, coerce_int96_timestamp_unit="us").schema_arrow


def _check_times(arrays: list[pa.Array], fragment: Fragment, stored: str) -> None:
    """Refuse INT96 times that microseconds do not hold, given in microseconds, nanoseconds and seconds; a unit wraps around what it does not hold."""
    for micro, nano, second in zip(*map(_list_leaves, arrays), strict=True):
        if micro.type == second.type:  # beside the times in a struct
            continue
        count, fine, coarse = (leaf.drop_null().cast(pa.int64()).to_numpy() for leaf in (micro, nano, second))
        if (count * 1000 != fine).any() or (count // 1_000_000 != coarse).any():
            name = next((column for column, renamed in fragment.renamed if renamed == stored), stored)
            what = "holds a time in the old format INT96 that timestamp[us] cannot hold: it is too far, or has nanoseconds"
            raise DataError(what, f"column {name!r}", "correct it, or write the file with timestamps in nanoseconds")


def _list_leaves(array: pa.Array) -> list[pa.Array]:
    """Return the arrays that hold the values of lists, structs and maps."""
    if not pa.types.is_nested(array.type):
        return [array]
    is_map, is_struct = pa.types.is_map(array.type), pa.types.is_struct(array.type)
    inner = [array.keys, array.items] if is_map else array.flatten() if is_struct else [array.flatten()]
    return [leaf for each in inner for leaf in _list_leaves(each)]


def _limit_rows(n_columns: int) -> int:
    """Return the most rows of a batch for which Arrow's reader stays in its bytes: a power of two, to which it rounds its buffers."""
    most: int = _READER_BYTES // (_READER_VALUE_BYTES * max(1, n_columns))
    return 1 << max(0, most.bit_length() - 1)


def measure(group: Any, types: pa.Schema, columns: list[str], public: Collection[str]) -> tuple[float, int]:
    """Return about how many bytes a row of some columns takes in memory, and how many bytes their largest pages have together.

    Parameters
    ----------
    group
        The row group's part of the footer.
    types
        The file's Arrow schema.
    columns
        The columns that are read.
    public
        Those whose sizes in the footer count for the bytes of a row.

    Notes
    -----
    A column of fixed width takes its width, and any other 64 bytes; if it is public, what the footer says that its values have when they are
    decompressed. A dictionary holds a repeated text once, so such a column counts the length of its least or its greatest text, if that is more.
    """
    read, n_rows = set(columns), max(1, group.num_rows)
    row_bytes, page_bytes = 0.0, 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        name = chunk.path_in_schema.partition(".")[0]
        if name not in read:
            continue
        page_bytes += min(_PAGE_BYTES, chunk.total_uncompressed_size)
        if name in public and not has_width(types.field(name).type):
            row_bytes += 8 + max(chunk.total_uncompressed_size / n_rows, _find_length(chunk))
        else:
            row_bytes += estimate_width(types.field(name).type)
    return row_bytes, page_bytes


def _find_length(chunk: Any) -> int:
    """Return the length of the longer of a text column's least and greatest value, if values are stored in a dictionary; else 0."""
    if not chunk.has_dictionary_page or chunk.physical_type != "BYTE_ARRAY":
        return 0
    statistics = chunk.statistics
    known = statistics is not None and statistics.has_min_max
    return max(len(statistics.min_raw), len(statistics.max_raw)) if known else TEXT_BYTES


def _read_columns(file: Any, row_group: int, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group whose columns are read one after the other, so that one column's pages are held at a time."""
    read = [file.read_row_group(row_group, columns=[name], use_threads=False) for name in columns]
    rows = pa.table([table.column(name) for name, table in zip(columns, read, strict=True)], names=columns)
    del read
    for start in range(0, rows.num_rows, batch_rows):
        yield from rows.slice(start, batch_rows).combine_chunks().to_batches()


def _check_footer(found: tuple[str, Any], fragment: Fragment) -> Any:
    """Return a footer, given with its digest, if it is the one that was read first."""
    digest, metadata = found
    if digest != fragment.version:
        raise report_change(fragment.name)
    return metadata


@contextmanager
def _open(fs: Any, path: str, fragment: Fragment, columns: list[str]) -> Iterator[tuple[Any, Any]]:
    """Open a row group's file, and yield it with its footer, after checking that the footer is the one that was read first."""
    layout = fragment.layout
    if isinstance(fs, LocalFileSystem):
        with storage_faults(path):
            source = pa.OSFile(path)
        with source:
            found = _read_footer(lambda start, end: source.read_at(end - start, start), source.size(), fragment.name)
            yield source, _check_footer(found, fragment)
        return
    if layout is None:
        metadata = _check_footer(footer(fs, path, fragment.name), fragment)
        with pa.PythonFile(open_remote(fragment.url), mode="r") as source:
            yield source, metadata
        return
    read = set(columns)
    needed = [(start, end) for name, start, end in layout.columns if name.partition(".")[0] in read]
    if sum(end - start for start, end in needed) > _HELD_BYTES:
        needed = []  # each column is read as it is needed
    file = RemoteFile(fragment.url, layout.n_file_bytes, [*needed, (layout.footer_start, layout.n_file_bytes)])
    file.seek(layout.footer_start)
    raw = file.read()
    if _digest(layout.n_file_bytes, raw) != fragment.version:
        raise report_change(fragment.name)
    with pa.PythonFile(file, mode="r") as source:
        yield source, pq.read_metadata(pa.BufferReader(_MAGIC + raw))
