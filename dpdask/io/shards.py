"""Writing shards: released rows with a fixed schema and fixed row groups, and nothing else in the file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.errors import InputError
from dpdask.io.storage import Folder

ROW_GROUP_ROWS = 2**17
ROW_GROUP_BYTES = 2**26
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard as it was written.

    Attributes
    ----------
    name
        `part-00000.parquet` and so on.
    n_rows, n_bytes
        Its rows and its size.
    sha256
        Of its bytes.
    """

    name: str
    n_rows: int
    n_bytes: int
    sha256: str


def number_key(shard: str) -> tuple[int, str]:
    """Return the sort key of a shard's name: `part-99999` comes before `part-100000`."""
    return len(shard), shard


class _HashingSink:
    """A file that hashes its content while it is written."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.n_bytes += len(data)
        return self._file.write(data)

    def let_go(self) -> None:
        """Ignore all further writes."""
        self._file = io.BytesIO()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Leave the file open; its opener closes it."""


def _is_whole(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_temporal(type_)) and not pa.types.is_duration(type_)


def choose_encoding(schema: pa.Schema, few_valued: Collection[str]) -> dict[str, Any]:
    """Return the options with which a shard is written.

    Parameters
    ----------
    schema, few_valued
        As for `ShardWriter`.
    """
    whole = {field.name: "DELTA_BINARY_PACKED" for field in schema if _is_whole(field.type) and field.name not in few_valued}
    dictionary = [
        field.name for field in schema if field.name not in whole and not (pa.types.is_floating(field.type) and field.name not in few_valued)
    ]
    return {"compression": "snappy", "version": "2.6", "use_dictionary": dictionary, "column_encoding": whole}


class ShardWriter:
    """Writes one shard; it appears under its name, whole, when it is closed.

    Parameters
    ----------
    folder
        Where the shard goes.
    name
        Its file name.
    schema
        The released columns and types. The footer holds them (also as an Arrow schema without metadata, so that every
        type comes back), the row groups and the statistics of released values; no pandas metadata, no index, no
        dictionary but of values that are in the shard.
    few_valued
        The columns with few distinct values, which a dictionary makes smaller; elsewhere it would cost half the time of
        writing and be given up.
    new
        Whether the shard is written once, where it will stay: if a file of another content is there already, closing fails.
    """

    def __init__(self, folder: Folder, name: str, schema: pa.Schema, few_valued: Collection[str] = (), *, new: bool = False) -> None:
        self._name, self._schema = name, schema
        self._pending: list[pa.RecordBatch] = []
        self._n_pending = self._n_rows = 0
        self._stack = ExitStack()
        what = "this shard was written before, from other rows: the input changed since the run began"
        other = InputError(what, name, "restore the input and run again, or `dpdask abort` the run")
        self._sink = _HashingSink(self._stack.enter_context(folder.open_new(name, other) if new else folder.open_replacement(name)))
        # Parquet writes page by page; a buffer spares as many calls back into Python
        self._file = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _BUFFER_BYTES)
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            **choose_encoding(schema, few_valued),
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; a row group is written as soon as it has 2**17 rows, or 64 MiB in memory."""
        self._pending.append(batch)
        self._n_pending += batch.num_rows
        self._n_rows += batch.num_rows
        if self._n_pending >= ROW_GROUP_ROWS:
            self._flush(self._n_pending // ROW_GROUP_ROWS * ROW_GROUP_ROWS)
        if sum(each.nbytes for each in self._pending) >= ROW_GROUP_BYTES:
            self._flush(self._n_pending)

    def _flush(self, n_rows: int) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        self._writer.write_table(table.slice(0, n_rows), row_group_size=ROW_GROUP_ROWS)
        self._pending = table.slice(n_rows).to_batches()
        self._n_pending -= n_rows

    def close(self) -> Shard:
        """Write the remaining rows and make the shard appear.

        Raises
        ------
        InputError
            If a shard that is written once is there already, with other rows.
        """
        if self._n_pending:
            self._flush(self._n_pending)
        self._writer.close()
        self._file.close()
        self._stack.close()
        return Shard(name=self._name, n_rows=self._n_rows, n_bytes=self._sink.n_bytes, sha256=self._sink.digest.hexdigest())

    def discard(self, error: BaseException) -> None:
        """Remove the unfinished shard."""
        self._sink.let_go()
        with suppress(pa.ArrowException, OSError, ValueError):  # else it writes its footer when it is collected
            self._writer.close()
        self._stack.__exit__(type(error), error, error.__traceback__)
