"""Outputs with partition columns: each shard holds the rows of one combination of their values, which are kept columns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dpdask.arrays import freeze_class
from dpdask.engine.compute import guard, make_stage, run_stage
from dpdask.engine.work import TableWork
from dpdask.errors import DataError
from dpdask.io.folders import check_values, leave_to_folders, name_folders
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import read_batches
from dpdask.io.shards import Format, Shard, ShardWriter
from dpdask.io.storage import Folder

MAX_PARTITIONS = 10_000  # of a table: each is a file of each task that has rows of it
_MOST_OPEN = 64
_MOST_HELD = 2**27  # bytes of the shards that one task is writing

Values: TypeAlias = tuple[str | int | bool | None, ...]


def split_batch(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Yield the rows of each combination of values, in their order; the combinations in the order in which they appear."""
    if not batch.num_rows:
        return
    if not columns:
        yield (), batch
        return
    codes, parts = np.zeros(batch.num_rows, np.int64), []
    for name in columns:
        array = batch.column(name)
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        part = array.indices.fill_null(len(array.dictionary)).to_numpy(zero_copy_only=False)
        values = [*map(_plain, array.dictionary.to_pylist()), None]
        parts.append((part, values))
        _, codes = np.unique(codes * len(values) + part, return_inverse=True)
    _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes))
    for code in np.argsort(first):
        rows = order[ends[code - 1] if code else 0 : ends[code]]
        yield tuple(values[part[first[code]]] for part, values in parts), batch.take(pa.array(rows))


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.date) else value


def write_partitions(
    batches: Iterable[pa.RecordBatch],
    types: pa.Schema,
    few_valued: Collection[str],
    columns: Sequence[str],
    rows_per_shard: int,
    folder: Folder,
    names: Iterator[str],
    *,
    in_folders: bool,
    new: bool,
) -> list[Shard]:
    """Write the rows of a task as shards of one combination of values each, and return them; without columns, one at least.

    Few are written at a time, and few bytes held: the one that was begun first, or that holds the
    most, is closed, and later rows of its values get another one. With `in_folders`, the names of
    folders hold the values, and the shards hold the other columns.
    """
    held = leave_to_folders(types, columns) if in_folders else types
    writers: dict[Values, ShardWriter] = {}
    rooms: dict[Values, int] = {}
    shards: list[Shard] = []

    def open_shard(values: Values) -> ShardWriter:
        place = [name_folders(dict(zip(columns, values, strict=True)))] if in_folders else []
        return ShardWriter(folder, "/".join([*place, next(names)]), held, few_valued, new=new)

    def close(values: Values) -> None:
        partition = dict(zip(columns, values, strict=True))
        shards.append(writers[values].close(partition or None))
        del writers[values]

    try:
        for values, rows in chain.from_iterable(split_batch(each, columns) for each in batches):
            start = 0
            while start < rows.num_rows:
                if values in writers and not rooms[values]:
                    close(values)
                if values not in writers:
                    if len(writers) >= _MOST_OPEN:
                        close(next(iter(writers)))
                    writers[values] = open_shard(values)
                    rooms[values] = rows_per_shard
                taken = min(rooms[values], rows.num_rows - start)
                writers[values].write(rows.slice(start, taken).select(held.names))
                start, rooms[values] = start + taken, rooms[values] - taken
            if columns and sum(each.n_bytes_held for each in writers.values()) > _MOST_HELD:
                close(max(writers, key=lambda values: writers[values].n_bytes_held))
        if not (columns or writers):  # no rows
            writers[()] = open_shard(())
        for values in [*writers]:
            close(values)
    except BaseException as error:
        for writer in writers.values():
            writer.discard(error)
        raise
    return shards


# without a repr: Dask logs the arguments of a failed task
@freeze_class(repr=False)
class Reading:
    """What every task needs that lists values."""

    work: TableWork
    columns: tuple[str, ...]


@guard
def list_values(fragment: Fragment, reading: Reading) -> set[Values]:
    """Return the combinations of values in a fragment; a few more than are allowed, if there are more."""
    found: set[Values] = set()
    columns = reading.columns
    for batch in read_batches(fragment, [*columns], reading.work.types, columns):
        found.update(values for values, _ in split_batch(batch, columns))
        if len(found) > MAX_PARTITIONS:
            break
    return found


@guard
def join_values(parts: list[set[Values]]) -> set[Values]:
    """Return the combinations of several fragments."""
    return set().union(*parts)


def check_partitions(
    fragments: Sequence[Fragment],
    work: TableWork,
    columns: Sequence[str],
    format_: Format,
) -> None:
    """Check the values of partition columns in a table, before anything is charged; only these columns are read, which are kept."""
    reading = Reading(work=work, columns=tuple(columns))
    arguments = [(fragment,) for fragment in fragments]
    stage = make_stage("partitions", list_values, arguments, reading, join_values)
    found = join_values([*chain.from_iterable(run_stage(stage))])
    where = f"column {columns[0]!r}" if len(columns) == 1 else f"columns {', '.join(columns)}"
    if len(found) > MAX_PARTITIONS:
        what = f"its values would make more than {MAX_PARTITIONS:,} partitions"
        raise DataError(what, where, "partition by a column with fewer values")
    if format_ == "parquet":
        check_values(columns, found)
    if format_ == "delta" and any("" in values for values in found):
        what = "a Delta table reads an empty text back as null where it is a partition's value"
        raise DataError(
            what, where, "write another text in the input, or partition by another column"
        )
