"""A bounded part of the released rows, spread evenly over the shards: enough for a page of statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from dpdask.io.manifest import Manifest
from dpdask.io.parquet import open_parquet
from dpdask.io.shards import ROW_GROUP_ROWS
from dpdask.io.storage import Folder

MAX_ROWS = 2**17
MAX_PARTS = 32
_BATCH_ROWS = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Released rows.

    Attributes
    ----------
    rows
        The rows that were read.
    n_rows
        How many are released in all.
    """

    rows: pa.Table
    n_rows: int


def read_sample(shards: Folder, manifest: Manifest, columns: Sequence[str]) -> Sample:
    """Return at most `MAX_ROWS` released rows, from at most `MAX_PARTS` row groups: the same release, the same rows.

    Parameters
    ----------
    shards
        The folder of the shards.
    manifest
        The list of the shards.
    columns
        The columns to read; those that are not released are left out.
    """
    groups = [(shard.name, group) for shard in manifest.shards for group in range(-(-shard.n_rows // ROW_GROUP_ROWS))]
    n_parts = min(len(groups), MAX_PARTS)
    chosen = [groups[part * len(groups) // n_parts] for part in range(n_parts)]
    batches = [
        batch
        for name, of_shard in groupby(chosen, itemgetter(0))
        for batch in _read_groups(shards, name, [group for _, group in of_shard], columns, MAX_ROWS // n_parts)
    ]
    return Sample(rows=pa.Table.from_batches(batches) if batches else pa.table({}), n_rows=manifest.n_rows)


def _read_groups(shards: Folder, name: str, groups: Sequence[int], columns: Sequence[str], most: int) -> Iterator[pa.RecordBatch]:
    """Yield the first rows of some row groups of a shard."""
    with open_parquet(shards, name) as parquet:
        known = [column for column in parquet.schema_arrow.names if column in columns]
        for group in groups:
            left = most
            for batch in parquet.iter_batches(batch_size=min(most, _BATCH_ROWS), row_groups=[group], columns=known):
                batch.validate(full=True)
                yield batch.slice(0, left)
                left -= batch.num_rows
                if left <= 0:
                    break
