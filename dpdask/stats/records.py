"""Distinct records of some columns with their counts: exact until they are too many, then an exact keyed subsample."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.codec import Codec, LevelCodec
from dpdask.errors import DataError
from dpdask.kernels import records as kernel
from dpdask.kernels.siphash import siphash
from dpdask.stats.hashing import as_words
from dpdask.stats.levels import encode
from dpdask.stats.statistic import Chosen, FoldCounter
from dpdask.streams import RunKey, Streams, stream, words

MAX_RECORDS = 2**22
SAMPLE_ID, GROUP_ID = "chain/sample", "chain/by"
_ALL = slice(None)

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class Records:
    """The distinct records of some rows; mergeable, in any order and from any partitions.

    Attributes
    ----------
    max_records
        How many entries there are at most.
    keys
        uint64 array of shape (n, n_columns): each record's values as words.
    grades
        uint8 array of shape (n,): a row has grade g or more with probability 2**-g, by a keyed word of its own.
    counts
        int64 array of shape (n,): how many rows have this record and this grade.
    least
        Rows of a lower grade are left out: the records are a sample of 2**-least of the rows.

    Notes
    -----
    Where there would be more than `max_records` entries, `least` becomes the least grade for which there are not. A part
    of the rows never needs a higher one than all of them, so the result is the same however the rows are partitioned and
    merged, two at a time. Memory: entries · (8 · columns + 9) bytes; while two parts are merged, about five times a part
    besides both.
    """

    max_records: int
    keys: Words
    grades: NDArray[np.uint8]
    counts: Ints
    least: int = 0

    @classmethod
    def identity(cls, n_columns: int, max_records: int = MAX_RECORDS) -> Self:
        """Return the statistic of no rows.

        Parameters
        ----------
        n_columns
            How many columns a record has.
        max_records
            The most records to keep.
        """
        nothing = np.zeros(0, dtype=np.int64)
        return cls(max_records=max_records, keys=np.zeros((0, n_columns), dtype=np.uint64), grades=nothing.astype(np.uint8), counts=nothing)

    @classmethod
    def of_rows(cls, columns: Sequence[Words], own: Words, max_records: int = MAX_RECORDS) -> Self:
        """Return the statistic of some rows.

        Parameters
        ----------
        columns
            For each column a uint64 array of shape (n,), the rows' values as words.
        own
            uint64 array of shape (n,): each row's own keyed word.
        max_records
            At least 1.
        """
        keys = np.stack(columns, axis=1) if columns else np.zeros((len(own), 0), dtype=np.uint64)
        return cls._bound(max_records, keys, kernel.leading_zeros(own), np.ones(len(own), dtype=np.int64), 0)

    def merge(self, *others: Self) -> Self:
        """Return the statistic of all rows together."""
        return functools.reduce(type(self)._with, others, self)

    def _with(self, other: Self) -> Self:
        least = max(self.least, other.least)
        chosen = [(part, part.grades >= least) for part in (self, other)]
        keys, grades, counts = (np.concatenate([getattr(part, name)[mask] for part, mask in chosen]) for name in ("keys", "grades", "counts"))
        return self._bound(self.max_records, keys, grades, counts, least)

    @classmethod
    def _bound(cls, max_records: int, keys: Words, grades: NDArray[np.uint8], counts: Ints, least: int) -> Self:
        first, counts = kernel.find_distinct(keys, grades, counts)
        if len(first) > max_records:
            of_grade_or_more = np.cumsum(np.bincount(grades[first], minlength=65)[::-1])[::-1]
            least = int(np.argmax(np.append(of_grade_or_more, 0) <= max_records))
            chosen = grades[first] >= least
            first, counts = first[chosen], counts[chosen]
        return cls(max_records=max_records, keys=keys[first], grades=grades[first], counts=counts, least=least)

    @property
    def n_rows(self) -> int:
        """How many rows it stands for."""
        return int(self.counts.sum())


def numbers(codec: Codec, array: pa.Array, rows: Ints | slice = _ALL) -> Floats:
    """Return a column's values as sortable numbers: a level's code, a number itself, and -inf for a null on a line.

    Parameters
    ----------
    codec
        The column's codec.
    array
        Its values; all are checked.
    rows
        Which of them are returned.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    if isinstance(codec, LevelCodec):
        return encode(codec, array)[rows].astype(np.float64)
    values, is_null = codec.encode(array)
    result: Floats = np.where(is_null[rows], -np.inf, values[rows] + 0.0)  # one zero
    return result


def from_numbers(codec: Codec, values: Floats) -> pa.Array:
    """Return the values that `numbers` stand for, in the column's Arrow type.

    Parameters
    ----------
    codec
        The column's codec.
    values
        float64 array, as `numbers` returns it.
    """
    return codec.decode(values.astype(np.int32)) if isinstance(codec, LevelCodec) else codec.decode(values, values == -np.inf)


def group_key(key: RunKey) -> Words:
    """Return the key of the groups' hashes, uint64 of shape (2,)."""
    return words(stream(key, GROUP_ID, ""), 2)


def group_hashes(column: str, array: pa.Array, key: Words) -> Words:
    """Return the keyed hash of each row's group, uint64.

    Parameters
    ----------
    column
        The name of the groups' column, for messages.
    array
        Its values.
    key
        From `group_key`.

    Raises
    ------
    DataError
        If a row's group is null.
    """
    if array.null_count:
        raise DataError("holds a null, and the group of every row must be known", f"column {column!r}", "fill it, or drop these rows")
    return siphash(as_words(array).reshape(-1, 1), *key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStatistic:
    """The distinct records of some columns.

    Attributes
    ----------
    codecs
        The codec of each privatised column.
    by
        The kept column whose values name the rows' groups, or None.
    max_records
        How many distinct records are held at most.
    """

    codecs: Mapping[str, Codec]
    by: str | None = None
    max_records: int = MAX_RECORDS

    @property
    def rows_per_task(self) -> None:
        """None: a task for each part."""

    def counter(self) -> FoldCounter[Records]:
        """Return a counter of no rows."""
        n_columns = len(self.codecs) + (self.by is not None)
        return FoldCounter(Records.identity(n_columns, self.max_records), self._count)

    def _count(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> Records:
        rows = _ALL if chosen is None else np.flatnonzero(chosen)
        columns = [] if self.by is None else [group_hashes(self.by, batch.column(self.by), words(streams.of_run(GROUP_ID), 2))[rows]]
        columns += [numbers(codec, batch.column(name), rows).view(np.uint64) for name, codec in self.codecs.items()]
        own = words(streams.of_part(SAMPLE_ID), batch.num_rows)[rows]
        return Records.of_rows(columns, own, self.max_records)
