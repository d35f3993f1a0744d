"""Reading Parquet: a footer by one ranged read, a row group by streamed batches; a remote one's needed columns and footer together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import InputError
from dpdask.io.faults import report_change
from dpdask.io.filesystems import call_storage
from dpdask.io.fragment import Fragment, Layout
from dpdask.io.remote import RemoteFile, open_remote, read_ranges

_TAIL_BYTES = 2**16
_LEAST_TAIL_BYTES = 12  # the footer's length, and the magic number at both ends of a file
_MAGIC = b"PAR1"


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
    if size is None:
        size = int(call_storage(url, lambda fs, path: fs.info(path)["size"]))
    raw = read_ranges(url, [(max(0, size - tail_bytes), size)], size)[0]
    length = int.from_bytes(raw[-8:-4], "little") if len(raw) >= 12 and raw[-4:] == _MAGIC else size
    if length + 12 > size:
        raise InputError("this is not a complete Parquet file: it is truncated or corrupt", name, "write it again")
    if length + 8 > len(raw):
        raw = read_ranges(url, [(size - length - 8, size)], size)[0]
    try:
        return _digest(size, raw[-length - 8 :]), pq.read_metadata(pa.BufferReader(_MAGIC + raw[-length - 8 :]))
    except (pa.ArrowException, OSError):
        raise InputError("its Parquet footer cannot be read: it is corrupt or encrypted", name, "write it again") from None


def read_columns(fs: Any, path: str, name: str) -> list[tuple[str, pa.DataType, bool]]:
    """Return the name, the type and the null flag of each column; only the footer is read, and of it only the schema is looked at.

    Parameters
    ----------
    fs
        The file system.
    path
        The file's path in it.
    name
        The file's name, for messages.

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


def lay_out(metadata: Any, row_group: int, size: int) -> Layout:
    """Return where the columns of a row group lie.

    Parameters
    ----------
    metadata
        The parsed footer.
    row_group
        The row group's number.
    size
        The file's length.
    """
    group = metadata.row_group(row_group)
    chunks = [group.column(number) for number in range(group.num_columns)]
    starts = [min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))) for chunk in chunks]
    columns = tuple((chunk.path_in_schema, start, start + chunk.total_compressed_size) for chunk, start in zip(chunks, starts, strict=True))
    return Layout(n_file_bytes=size, footer_start=size - metadata.serialized_size - 8, columns=columns)


def plain_schema(metadata: Any) -> pa.Schema:
    """Return a footer's Arrow schema without metadata and without dictionaries."""
    schema = metadata.schema.to_arrow_schema()
    return pa.schema([pa.field(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type) for field in schema])


def read_batches(fs: Any, path: str, fragment: Fragment, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield a row group's rows, after checking that the file is still the one whose footer was read first.

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
    batch_rows
        The most rows of a batch.
    """
    try:
        with _open(fs, path, fragment, columns) as (source, metadata):
            file = pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
            for batch in file.iter_batches(batch_size=batch_rows, row_groups=[fragment.row_group], columns=columns, use_threads=False):
                yield batch.select(columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise InputError("this row group cannot be read: it is truncated or corrupt", fragment.where, "write the file again") from None


@contextmanager
def _open(fs: Any, path: str, fragment: Fragment, columns: list[str]) -> Iterator[tuple[Any, Any]]:
    """Open a row group's file, and yield it with its footer, after checking that the footer is the one that was read first."""
    layout = fragment.layout
    if isinstance(fs, LocalFileSystem) or layout is None:
        digest, metadata = footer(fs, path, fragment.name)
        if digest != fragment.version:
            raise report_change(fragment.name)
        with pa.OSFile(path) if isinstance(fs, LocalFileSystem) else pa.PythonFile(open_remote(fragment.url), mode="r") as source:
            yield source, metadata
        return
    needed = [(start, end) for name, start, end in layout.columns if any(f"{name}.".startswith(f"{column}.") for column in columns)]
    file = RemoteFile(fragment.url, layout.n_file_bytes, [*needed, (layout.footer_start, layout.n_file_bytes)])
    file.seek(layout.footer_start)
    raw = file.read()
    if _digest(layout.n_file_bytes, raw) != fragment.version:
        raise report_change(fragment.name)
    with pa.PythonFile(file, mode="r") as source:
        yield source, pq.read_metadata(pa.BufferReader(_MAGIC + raw))
