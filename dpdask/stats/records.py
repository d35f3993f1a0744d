"""What is kept of rows by keyed hashes: distinct records with their counts, and the first rows of each unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Json, Named
from dpdask.arrays import Bytes, Flags, Floats, Ints, Words, freeze_class
from dpdask.codec import Codec, Codecs
from dpdask.errors import DataError
from dpdask.kernels import hashing as kernel
from dpdask.kernels.hashing import siphash
from dpdask.stats.statistic import Chosen, as_words, encode
from dpdask.streams import RunKey, Streams, stream, words

MAX_RECORDS = 2**22
SAMPLE_ID, GROUP_ID = "chain/sample", "chain/by"
_ALL = slice(None)
_STEP = 2**16  # rows that are added to a table before it is looked at whether they are too many
_WORTH = 0.75  # to find equal entries takes longer than to carry them along, unless this share or less of all is distinct


# Dask logs the arguments of a task that failed
@freeze_class(eq=False, repr=False)
class Records:
    """The distinct records of some rows; mergeable, in any order and from any partitions.

    Notes
    -----
    Entries with the same record and grade are one, unless few were the same when parts were merged:
    then an entry may stand more than once, and its counts are to be added. Where there would be
    more than `max_records` distinct entries, `least` becomes the least grade for which there are
    not. A part of the rows never needs a higher one than all of them, so records, grades, summed
    counts and `least` are the same however the rows are partitioned and merged. Memory: entries ·
    (8 · columns + 9) bytes; while rows are counted or parts merged, up to 24 · (columns + 6) bytes
    for each entry of the result besides.
    """

    max_records: int  # how many entries there are at most
    keys: Words  # uint64 array of shape (n, n_columns): each record's values as words
    # Uint8 array of shape (n,): a row has grade g or more with probability 2**-g, by a keyed word
    # of its own.
    grades: Bytes
    counts: Ints  # int64 array of shape (n,): how many rows the entry stands for
    # Rows of a lower grade are left out: the records are a sample of 2**-least of the rows.
    least: int = 0

    def merge(self, *others: Self) -> Self:
        """Return the statistic of all rows together."""
        parts, n_entries = (self, *others), len(self.keys) + sum(len(part.keys) for part in others)
        if n_entries <= self.max_records and self._are_distinct(parts):
            return self._join(parts)
        table = _Table(self.keys.shape[1], self.max_records)
        table.expect(n_entries)
        for part in parts:
            table.add(part.keys, part.grades, part.counts, part.least)
        return type(self)(**table.parts())

    @staticmethod
    def _are_distinct(parts: Sequence[Records]) -> bool:
        """Return whether most entries differ from all others, as a sample by their hashes tells."""
        hashes = np.concatenate([kernel.sample_hashes(part.keys, part.grades) for part in parts])
        return len(np.unique(hashes)) > _WORTH * len(hashes)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        """Return all entries of parts, those of too low a grade apart."""
        least = max(part.least for part in parts)
        kept = [_ALL if part.least == least else part.grades >= least for part in parts]
        keys, grades, counts = (
            np.concatenate(
                [getattr(part, name)[rows] for part, rows in zip(parts, kept, strict=True)]
            )
            for name in ("keys", "grades", "counts")
        )
        return cls(
            max_records=parts[0].max_records, keys=keys, grades=grades, counts=counts, least=least
        )

    @property
    def n_rows(self) -> int:
        """How many rows it stands for."""
        return int(self.counts.sum())


class _Table:
    """Distinct records while they are counted; `Records` says what is kept of them."""

    def __init__(self, n_columns: int, max_records: int) -> None:
        self._max_records, self._least, self._n = max_records, 0, 0
        self._entries = np.empty((0, n_columns + 2), dtype=np.uint64)
        self._slots = np.zeros(0, dtype=np.uint64)

    def add(self, keys: Words, grades: Bytes, counts: Ints, least: int) -> None:
        """Count further rows, or records with their counts; see `Records` and `kernels.hashing.add_rows`."""
        if least > self._least:
            self._leave_out(least)
        for start in range(0, len(keys), _STEP):
            part = slice(start, start + _STEP)
            self._make_room(self._n + len(keys[part]))
            self._n = kernel.add_rows(
                keys[part],
                grades[part],
                counts[part],
                self._least,
                self._entries,
                self._slots,
                self._n,
            )
            if self._n > self._max_records:
                of_grade_or_more = np.cumsum(np.bincount(self._grades, minlength=65)[::-1])[::-1]
                self._leave_out(int(np.argmax(np.append(of_grade_or_more, 0) <= self._max_records)))

    def expect(self, n_entries: int) -> None:
        """Make room for so many entries at once, as far as so many are kept: to make room again and again is half of the time of a merge."""
        self._make_room(min(n_entries, self._max_records + _STEP))

    def parts(self) -> Json:
        """Return the fields of the records."""
        entries = self._entries[: self._n]
        return {
            "max_records": self._max_records,
            "keys": entries[:, :-2].copy(),
            "grades": self._grades.astype(np.uint8),
            "counts": entries[:, -1].astype(np.int64),
            "least": self._least,
        }

    @property
    def _grades(self) -> Ints:
        return self._entries[: self._n, -2].astype(np.int64)

    def _leave_out(self, least: int) -> None:
        """Leave out the entries of a lower grade."""
        kept = self._entries[: self._n][self._grades >= least]
        self._entries[: len(kept)] = kept
        self._n, self._least = len(kept), least
        self._slots = kernel.find_slots(self._entries, self._n, len(self._slots))

    def _make_room(self, n_entries: int) -> None:
        """Make room for so many entries, or twice as many as there was for."""
        if n_entries > len(self._entries):
            n_room = max(n_entries, min(2 * len(self._entries), self._max_records + _STEP))
            room = np.empty((n_room, self._entries.shape[1]), dtype=np.uint64)
            room[: self._n] = self._entries[: self._n]
            self._entries = room
            self._slots = kernel.find_slots(room, self._n, 2 << max(n_room - 1, 1).bit_length())


def numbers(codec: Codec, array: pa.Array, rows: Ints | slice = _ALL) -> Floats:
    """Return a column's values as sortable numbers, in a new array: a level's code, a number itself, and -inf for a null on a line."""
    if codec.has_levels:
        return encode(codec, array)[rows].astype(np.float64)
    values, is_null = codec.encode(array)
    return np.where(is_null[rows], -np.inf, values[rows] + 0.0)  # one zero


def from_numbers(codec: Codec, values: Floats) -> pa.Array:
    """Return the values that `numbers` stand for, in the column's Arrow type."""
    return (
        codec.decode(values.astype(np.int32))
        if codec.has_levels
        else codec.decode(values, values == -np.inf)
    )


def group_key(key: RunKey) -> Words:
    """Return the key of the groups' hashes, uint64 of shape (2,)."""
    return words(stream(key, GROUP_ID, ""), 2)


def group_hashes(column: str, array: pa.Array, key: Words, rows: Ints | slice = _ALL) -> Words:
    """Return the keyed hash of each row's group, uint64."""
    if array.null_count:
        raise DataError(
            "holds a null, and the group of every row must be known",
            f"column {column!r}",
            "fill it, or drop these rows",
        )
    return siphash(as_words(array)[rows].reshape(-1, 1), *key)


@freeze_class
class RecordStatistic:
    """The distinct records of some columns."""

    codecs: Codecs
    by: str | None = None  # the kept column whose values name the rows' groups, or None
    max_records: int = MAX_RECORDS  # how many distinct records are held at most

    @property
    def rows_per_task(self) -> None:
        """None: as for other statistics."""

    def counter(self) -> RecordCounter:
        """Return a counter of no rows."""
        return RecordCounter(self)


class RecordCounter:
    """Counts the distinct records of the rows of one task."""

    def __init__(self, statistic: RecordStatistic) -> None:
        self._statistic = statistic
        self._table = _Table(
            len(statistic.codecs) + (statistic.by is not None), statistic.max_records
        )

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Count the next rows; see `Counter.add`."""
        by, rows = self._statistic.by, _ALL if chosen is None else np.flatnonzero(chosen)
        columns = (
            []
            if by is None
            else [group_hashes(by, batch.column(by), words(streams.of_run(GROUP_ID), 2), rows)]
        )
        columns += [
            numbers(codec, batch.column(name), rows).view(np.uint64)
            for name, codec in self._statistic.codecs.items()
        ]
        grades = kernel.leading_zeros(words(streams.of_part(SAMPLE_ID), batch.num_rows)[rows])
        self._table.add(np.stack(columns, axis=1), grades, np.zeros(0, dtype=np.int64), 0)

    def result(self) -> Records:
        """Return the records of all rows so far; see `Counter.result`."""
        return Records(**self._table.parts())


_KEYS = ("units", "hashes", "positions")


# Dask logs the arguments of a task that failed
@freeze_class(eq=False, repr=False)
class _UnitRows:
    """Rows of units, as uint64 arrays of one length."""

    units: Words  # a keyed hash of the unit
    hashes: Words  # a keyed hash of the row's public content
    # The row's place in the table, which only decides between rows that are alike.
    positions: Words
    # In one row of each unit how many rows it has, and 0 in its others; None if nobody asks.
    counts: Words | None = None

    def columns(self, rows: Any = _ALL) -> dict[str, Words]:
        """Return the arrays of some rows by name."""
        names = (*_KEYS, *(() if self.counts is None else ("counts",)))
        return {name: getattr(self, name)[rows] for name in names}


def _concatenate(parts: Sequence[_UnitRows]) -> dict[str, Words]:
    columns = [part.columns() for part in parts]
    return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}


@freeze_class(eq=False, repr=False)
class UnitRows(_UnitRows):
    """Of each unit, its first `max_rows` + 1 rows in the order (hash, position); mergeable and exact.

    The rows of a unit stand together; where there are `max_rows` + 1 of them, the last of these
    comes first.
    """

    max_rows: int  # how many rows of a unit may be released

    @classmethod
    def identity(cls, max_rows: int, *, counted: bool = False) -> Self:
        """Return the statistic of no rows."""
        none = np.empty(0, dtype=np.uint64)
        counts = none if counted else None
        return cls(max_rows=max_rows, units=none, hashes=none, positions=none, counts=counts)

    @classmethod
    def of_batch(
        cls,
        max_rows: int,
        units: Words,
        hashes: Words,
        positions: Words,
        counts: Words | None = None,
    ) -> Self:
        """Return the statistic of some rows.

        Parameters
        ----------
        units, hashes, positions
            uint64 arrays of shape (n,): each row's unit, hash and position.
        counts
            How many rows each stands for, if the rows of units are counted.
        """
        group, n_groups = kernel.groups(units)
        first = kernel.first_rows(group, n_groups, hashes, positions, max_rows + 1)
        if counts is not None:
            totals = np.zeros(n_groups, dtype=np.uint64)
            np.add.at(totals, group, counts)
            kept = group[first]
            is_head = np.append(kept[:1] == kept[:1], kept[1:] != kept[:-1])
            counts = np.zeros(len(group), dtype=np.uint64)
            counts[first] = np.where(is_head, totals[kept], 0)
        rows = _UnitRows(units=units, hashes=hashes, positions=positions, counts=counts)
        return cls(max_rows=max_rows, **rows.columns(first))

    def merge(self, *others: Self) -> Self:
        """Return the statistic of all rows together."""
        return self.of_batch(self.max_rows, **_concatenate((self, *others)))

    def select_part(self, part: int, n_parts: int) -> Self:
        """Return the rows of those units whose hash lies in the part-th of `n_parts` equal ranges (a power of two)."""
        if n_parts == 1:
            return self
        chosen = self.units >> np.uint64(64 - (n_parts - 1).bit_length()) == part
        return type(self)(max_rows=self.max_rows, **self.columns(chosen))

    def bounds(self) -> UnitBounds:
        """Return, for each unit that has too many rows, the first one that is not released."""
        starts = np.flatnonzero(
            np.append(self.units[:1] == self.units[:1], self.units[1:] != self.units[:-1])
        )
        counts = np.diff(starts, append=len(self.units))
        over = starts[counts > self.max_rows]
        return UnitBounds(**self.columns(over[np.argsort(self.units[over])]))


@freeze_class(eq=False, repr=False)
class UnitBounds(_UnitRows, Archived):
    """For each unit with too many rows, the first that is not released, sorted by unit; units that are not listed keep all of theirs."""

    archive: ClassVar = Archive(kind="unit-bounds", format=2, noun="file of unit bounds")

    @classmethod
    def concatenate(cls, parts: Sequence[UnitBounds]) -> Self:
        """Return the bounds of all parts, which follow one another in the order of their units."""
        return cls(**_concatenate(parts))

    def is_released(self, units: Words, hashes: Words, positions: Words) -> Flags:
        """Return which rows are released: those before their unit's bound.

        Parameters
        ----------
        units, hashes, positions
            uint64 arrays of shape (n,): each row's unit, hash and position.
        """
        return kernel.before_bounds(
            units, hashes, positions, self.units, self.hashes, self.positions
        )

    def weigh(self, units: Words, max_rows: int) -> Floats:
        """Return how many rows of the table each released row of some units stands for.

        Parameters
        ----------
        units
            uint64 array of shape (n,).
        max_rows
            How many rows of a unit with too many are released.
        """
        assert self.counts is not None
        weights = np.ones(len(units))
        if len(self.units):
            places = np.minimum(np.searchsorted(self.units, units), len(self.units) - 1)
            is_bound = self.units[places] == units
            weights[is_bound] = self.counts[places[is_bound]] / max_rows
        return weights

    def _contents(self) -> Contents:
        return {"counted": True} if self.counts is not None else {}, self.columns()

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        names = (*_KEYS, *(("counts",) if "counted" in header else ()))
        return cls(**{name: arrays[name] for name in names})
