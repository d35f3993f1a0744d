"""Reading Parquet: a footer by one ranged read, a row group by streamed batches."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from dpdask.errors import InputError
from dpdask.io.fragment import Fragment

_TAIL_BYTES = 2**16
_MAGIC = b"PAR1"


def footer(fs: Any, path: str, name: str) -> tuple[str, Any]:
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

    Raises
    ------
    InputError
        If the file is truncated or no Parquet file.
    """
    size = int(fs.size(path))
    raw = fs.cat_file(path, start=max(0, size - _TAIL_BYTES), end=size)
    length = int.from_bytes(raw[-8:-4], "little") if len(raw) >= 12 and raw[-4:] == _MAGIC else size
    if length + 12 > size:
        raise InputError("this is not a complete Parquet file: it is truncated or corrupt", name, "write it again")
    if length + 8 > len(raw):
        raw = fs.cat_file(path, start=size - length - 8, end=size)
    thrift = raw[-length - 8 :]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + thrift))
    except (pa.ArrowException, OSError):
        raise InputError("its Parquet footer cannot be read: it is corrupt or encrypted", name, "write it again") from None
    return blake2b(size.to_bytes(8, "little") + thrift, digest_size=16).hexdigest(), metadata


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
    digest, metadata = footer(fs, path, fragment.name)
    if digest != fragment.version:
        raise InputError("this file changed since the run began", fragment.name, "restore it and run again, or `dpdask abort` the run")
    try:
        with pa.OSFile(path) if isinstance(fs, LocalFileSystem) else pa.PythonFile(fs.open(path, "rb"), mode="r") as source:
            file = pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
            for batch in file.iter_batches(batch_size=batch_rows, row_groups=[fragment.row_group], columns=columns, use_threads=False):
                yield batch.select(columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise InputError("this row group cannot be read: it is truncated or corrupt", fragment.where, "write the file again") from None
