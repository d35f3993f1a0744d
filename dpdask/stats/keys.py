"""How many units have each value of a column whose levels are to be found: exact and private."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.arrays import Int32s, Ints, Uint32s, Words, freeze_class
from dpdask.codec import Codecs, LevelCodec
from dpdask.errors import DataError
from dpdask.kernels.hashing import add_weights, first_keys, groups, siphash
from dpdask.stats.statistic import Chosen, TreeFold, as_words
from dpdask.streams import Streams, words

UNIT_ID, KEYS_ID = "bounding/unit", "discover/keys"
# a word holds a unit's number, the hash of one of its keys, and the key's place, if they are short
_WORD_BITS, _HASH_BITS = 64, 20
_BUFFERED = 2**20  # rows that are counted together: a batch may have fewer than there are keys


class KeyCounts(NamedTuple):
    """The keys that occur, in their order, and how many units have each, or what these weigh."""

    keys: pa.Array
    counts: Ints


Weigh = Callable[[int], Ints]  # what a unit weighs by how many keys it has, up to a number


def _leave_out_empty(keys: pa.Array, counts: Ints) -> KeyCounts:
    """Return keys without those whose count is 0: not all values of a dictionary occur."""
    occur = counts > 0
    return KeyCounts(keys.filter(pa.array(occur)), counts[occur])


def _tally(keys: pa.Array, counts: Ints) -> KeyCounts:
    """Return keys with their counts, each key once."""
    table = pa.table({"key": keys, "count": counts})
    summed = table.group_by("key", use_threads=False).aggregate([("count", "sum")])
    return KeyCounts(
        summed["key"].combine_chunks(), np.asarray(summed["count_sum"], dtype=np.int64)
    )


def _encode(array: pa.ChunkedArray) -> tuple[pa.Array, Int32s]:
    """Return distinct values, and the place of each value among them."""
    encoded = array.dictionary_encode()
    if not encoded.num_chunks:
        return pa.nulls(0, encoded.type.value_type), np.zeros(0, dtype=np.int32)
    # batches of one row group share their dictionary, and to compare it is faster than to hash it
    first, *others = (chunk.dictionary for chunk in encoded.chunks)
    if not all(map(first.equals, others)):
        encoded = encoded.unify_dictionaries()
    codes = [np.asarray(chunk.indices, dtype=np.int32) for chunk in encoded.chunks]
    return encoded.chunk(0).dictionary, np.concatenate(codes)


def _find_first(group: Ints, hashes: Uint32s, ranks: Words, most: int) -> Ints:
    """Return the indices of the first distinct keys of each group, as `first_keys` does, however many there are."""
    order = np.lexsort((ranks, hashes, group))
    same = np.diff(group[order], prepend=-1) == 0
    order = order[~(same & (np.diff(ranks[order].astype(np.int64), prepend=-1) == 0))]
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return order[place < most]


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class RowKeys:
    """How many rows have each key."""

    keys: pa.Array  # those of a part may hold one twice, as its dictionary does
    counts: Ints

    @classmethod
    def of_rows(cls, array: pa.ChunkedArray) -> Self:
        """Return the counts of some rows, of which none is null."""
        keys, codes = _encode(array)
        return cls(*_leave_out_empty(keys, np.bincount(codes, minlength=len(keys))))

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        parts = (self, *others)
        keys = pa.concat_arrays([part.keys for part in parts])
        return type(self)(*_tally(keys, np.concatenate([part.counts for part in parts])))

    def tally(self, weigh: Weigh) -> KeyCounts:
        """Return what the rows with each key weigh, each of which has one."""
        keys, counts = _tally(self.keys, self.counts)
        order = pc.sort_indices(keys)
        return KeyCounts(keys.take(order), counts[np.asarray(order)] * weigh(1)[1])


@freeze_class(kw_only=False, eq=False, repr=False)
class UnitKeys:
    """Which keys each unit has, at most `most` of them: those whose keyed hashes come first, and of one hash, the lesser key.

    Notes
    -----
    The keys of a unit that are counted depend on its own keys alone, and neither on how the table
    is cut nor on the order of its rows. The statistic holds a number of 16 bytes for each of them.
    """

    most: int
    keys: pa.Array  # distinct, increasing
    units: Words  # keyed hashes, of one length with the two below; those of a unit are neighbours
    hashes: Uint32s  # of the unit and the key, 20 bits
    codes: Int32s  # places among the keys

    @classmethod
    def of_rows(
        cls, most: int, units: Words, array: pa.ChunkedArray, secret: tuple[np.uint64, np.uint64]
    ) -> Self:
        """Return the keys of the units of some rows, of which none is null."""
        keys, codes = _encode(array)
        # who names keys could else choose two with one hash, which a unit would have again and again
        pairs = np.stack([units, as_words(keys, np.array(secret).tobytes())[codes]], axis=1)
        hashes = siphash(np.ascontiguousarray(pairs), *secret) >> np.uint64(64 - _HASH_BITS)
        return cls._bound(most, keys, units, hashes.astype(np.uint32), codes)

    @classmethod
    def _bound(
        cls, most: int, keys: pa.Array, units: Words, hashes: Uint32s, codes: Int32s
    ) -> Self:
        order = np.asarray(pc.sort_indices(keys))
        keys = keys.take(pa.array(order))
        is_new = np.ones(len(order), dtype=np.bool_)  # a dictionary may hold one twice
        is_new[1:] = pc.not_equal(keys[1:], keys[:-1])
        ranks = np.empty(len(order), dtype=np.uint64)
        ranks[order] = np.cumsum(is_new, dtype=np.uint64) - np.uint64(1)
        group, n_units = groups(units)
        keys = keys if is_new.all() else keys.filter(pa.array(is_new))
        code_bits = len(keys).bit_length()
        unit_shift = np.uint64(_HASH_BITS + code_bits)
        if n_units.bit_length() + int(unit_shift) > _WORD_BITS:
            own = _find_first(group, hashes, ranks[codes], most)
            return cls(most, keys, units[own], hashes[own], ranks[codes[own]].astype(np.int32))
        names = np.empty(n_units, dtype=np.uint64)
        names[group] = units
        packed = group.astype(np.uint64) << unit_shift
        packed |= hashes.astype(np.uint64) << np.uint64(code_bits)
        packed |= ranks[codes]
        packed.sort()
        kept = first_keys(packed, most, unit_shift)
        return cls(
            most,
            keys,
            names[(kept >> unit_shift).view(np.int64)],
            (kept >> np.uint64(code_bits)).astype(np.uint32) & np.uint32(2**_HASH_BITS - 1),
            (kept & np.uint64(2**code_bits - 1)).astype(np.int32),
        )

    def merge(self, *others: Self) -> Self:
        """Return the keys of all of them."""
        parts = (self, *others)
        keys, places = _encode(pa.chunked_array([part.keys for part in parts]))
        starts = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        codes = [places[start + part.codes] for start, part in zip(starts, parts, strict=True)]
        return self._bound(
            self.most,
            keys,
            np.concatenate([part.units for part in parts]),
            np.concatenate([part.hashes for part in parts]),
            np.concatenate(codes),
        )

    def tally(self, weigh: Weigh) -> KeyCounts:
        """Return what the units with each key weigh."""
        starts = np.flatnonzero(np.append(np.ones(1, bool), self.units[1:] != self.units[:-1]))
        sizes = np.diff(starts[: len(self.units)], append=len(self.units))
        counts = add_weights(self.codes, sizes, weigh(sizes.max(initial=0)), len(self.keys))
        return _leave_out_empty(self.keys, counts)


Keys = RowKeys | UnitKeys


@freeze_class(kw_only=False, eq=False, repr=False)
class ColumnKeys:
    """The keys of each column."""

    columns: dict[str, Keys]

    def merge(self, *others: Self) -> Self:
        """Return those of all of them."""
        merged = {
            name: own.merge(*(each.columns[name] for each in others))  # type: ignore[arg-type]  # one kind in a table
            for name, own in self.columns.items()
        }
        return type(self)(merged)


@freeze_class
class KeyStatistic:
    """How many units have each key of some columns."""

    codecs: dict[str, LevelCodec]
    checked: Codecs = field(default_factory=dict)  # of columns whose values are only checked
    unit: str | None = None  # the column that names the unit; None: it is the row
    most: int = 1  # how many keys of a unit are counted in each column
    rows_per_task: int | None = field(default=None, init=False)

    def counter(self) -> KeyCounter:
        """Return a counter of no rows."""
        return KeyCounter(self)


class KeyCounter:
    """Counts the keys of one task, many rows at a time."""

    def __init__(self, statistic: KeyStatistic) -> None:
        self._asked, self._fold = statistic, TreeFold[ColumnKeys]()
        self._waiting: list[pa.RecordBatch] = []
        self._secrets: list[tuple[np.uint64, np.uint64]] = []

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Count the next rows; see `Counter.add`."""
        del chosen  # the statistic bounds units itself
        for name, codec in self._asked.checked.items():
            codec.encode(batch.column(name))
        if self._asked.unit is not None and not self._secrets:
            for name in (UNIT_ID, KEYS_ID):
                one, other = words(streams.of_run(name), 2)
                self._secrets.append((one, other))
        names = [*self._asked.codecs, *([self._asked.unit] if self._asked.unit else [])]
        self._waiting.append(batch.select(list(dict.fromkeys(names))))
        if sum(each.num_rows for each in self._waiting) >= _BUFFERED:
            self._count()

    def result(self) -> ColumnKeys:
        """Return the keys of all rows so far."""
        self._count()
        return self._fold.result()

    def _count(self) -> None:
        units = self._hash_units()
        found: dict[str, Keys] = {}
        for name, codec in self._asked.codecs.items():
            nothing = pa.nulls(0, codec.type)
            columns = [batch.column(name) for batch in self._waiting]
            array = _chunked([codec.read_keys(column) for column in columns or [nothing]])
            own = units
            if array.null_count:
                own = units[np.asarray(array.is_valid())] if len(units) else units
                array = array.drop_null()
            if self._asked.unit is None:
                found[name] = RowKeys.of_rows(array)
                continue
            secret = self._secrets[1] if self._secrets else (np.uint64(0), np.uint64(0))
            found[name] = UnitKeys.of_rows(self._asked.most, own, array, secret)
        self._waiting = []
        self._fold.add(ColumnKeys(found))

    def _hash_units(self) -> Words:
        """Return the keyed hash of the unit of each waiting row."""
        name = self._asked.unit
        if name is None or not self._waiting:
            return np.zeros(0, dtype=np.uint64)
        arrays = [batch.column(name) for batch in self._waiting]
        if any(array.null_count for array in arrays):
            what = "holds a null, and the unit of every row must be known"
            raise DataError(what, f"column {name!r}", "fill it, or drop these rows")
        plain = np.concatenate([as_words(array) for array in arrays])
        return siphash(plain[:, None], *self._secrets[0])


def _chunked(arrays: Sequence[pa.Array]) -> pa.ChunkedArray:
    """Return arrays as one: all plain, or all dictionaries."""
    if len({array.type for array in arrays}) > 1:
        arrays = [
            array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
            for array in arrays
        ]
    return pa.chunked_array(arrays)
