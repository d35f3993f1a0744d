"""How many units have each value of a column whose levels are to be found: exact and private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.arrays import Int32s, Ints, Words, freeze_class
from dpdask.codec import Codecs, LevelCodec
from dpdask.errors import DataError
from dpdask.kernels.hashing import add_weights, join_keys, keep_first, siphash
from dpdask.stats.statistic import Chosen, TreeFold, as_words
from dpdask.streams import Streams, words

UNIT_ID, KEYS_ID = "bounding/unit", "discover/keys"
_HASH_BITS = 20
_MERGED = 2**17  # pairs of a unit and a key that are merged together
_BUFFERED = 2**20  # rows that are counted together: a batch may have fewer than there are keys


class KeyCounts(NamedTuple):
    """The keys that occur, in their order, and how many units have each, or what these weigh."""

    keys: pa.Array
    counts: Ints


Secret = tuple[np.uint64, np.uint64]  # of a keyed hash
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


def _sort_keys(keys: pa.Array, counts: Ints) -> KeyCounts:
    """Return keys in their order, with their counts."""
    order = pc.sort_indices(keys)
    return KeyCounts(keys.take(order), counts[np.asarray(order)])


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


def _sort_units(units: Words) -> Ints:
    """Return the order of rows by their units, which are hashes: numpy sorts them in a third of the time of their order."""
    below = np.uint64(len(units).bit_length())
    words = (units >> below << below) | np.arange(len(units), dtype=np.uint64)
    words.sort()
    order = (words & ((np.uint64(1) << below) - np.uint64(1))).view(np.int64)
    own = units[order]
    return np.argsort(units) if (own[1:] < own[:-1]).any() else order


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
        return _sort_keys(keys, counts * weigh(1)[1])


@freeze_class(kw_only=False, eq=False, repr=False)
class UnitKeys:
    """Which keys each unit has, at most `most` of them: those whose keyed hashes come first, and of one hash, the lesser key.

    Notes
    -----
    The keys of a unit that are counted depend on its own keys alone, and neither on how the table
    is cut nor on the order of its rows. The statistic holds 4 bytes for each of them, and 12 for each
    unit.
    """

    most: int
    secret: Secret  # zeros if there are no rows
    keys: pa.Array  # distinct
    units: Words  # keyed hashes, distinct, increasing
    sizes: Int32s  # how many keys each unit has
    codes: Int32s  # places among the keys, unit by unit

    @classmethod
    def of_rows(cls, most: int, units: Words, array: pa.ChunkedArray, secret: Secret) -> Self:
        """Return the keys of the units of some rows, of which none is null."""
        found, codes = _encode(array)
        distinct = found.dictionary_encode()  # a dictionary may hold one twice
        order, sizes = _sort_units(units), np.ones(len(units), dtype=np.int32)
        codes = np.asarray(distinct.indices)[codes[order]]
        rows = units[order], sizes, codes, np.array([0, len(units)])
        return cls._join(most, secret, distinct.dictionary, [rows], len(units), len(units))

    @classmethod
    def _join(
        cls,
        most: int,
        secret: Secret,
        keys: pa.Array,
        ranges: Iterable[tuple[Words, Int32s, Int32s, Ints]],
        n_units: int,
        n_pairs: int,
    ) -> Self:
        """Return the keys of units that are given range by range, as `join_keys` takes them, with at most so many units and pairs."""
        last, is_hashed = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.bool_)
        units, sizes = np.empty(n_units, dtype=np.uint64), np.empty(n_units, dtype=np.int32)
        codes = np.empty(n_pairs, dtype=np.int32)
        n_units = n_pairs = 0
        for each in ranges:
            n_units, n_pairs = join_keys(
                *each, most, last, is_hashed, units, sizes, codes, n_units, n_pairs
            )
        units, sizes = units[:n_units], sizes[:n_units]
        if is_hashed.any():
            hashed, words, ranks = np.flatnonzero(is_hashed), last.view(np.uint64), last.copy()
            own = keys.take(pa.array(hashed))
            # who names keys could else choose two with one hash, which a unit would have again
            words[hashed] = as_words(own, np.array(secret).tobytes())
            ranks[hashed[np.asarray(pc.sort_indices(own))]] = np.arange(len(own))
            n_pairs = keep_first(units, sizes, codes, words, ranks, _HASH_BITS, most, *secret)
        return cls(most, secret, keys, units.copy(), sizes.copy(), codes[:n_pairs].copy())

    def merge(self, *others: Self) -> Self:
        """Return the keys of all of them."""
        parts = (self, *others)
        keys, codes = _encode(pa.chunked_array([part.keys for part in parts]))
        places = np.split(codes, np.cumsum([len(part.keys) for part in parts[:-1]]))
        n_pairs = sum(len(part.codes) for part in parts)
        n_bits = (n_pairs // _MERGED).bit_length()
        cuts = [part._cut(n_bits) for part in parts]

        def list_ranges() -> Iterator[tuple[Words, Int32s, Int32s, Ints]]:
            for number in range(2**n_bits):
                taken = [[slice(*each[number : number + 2]) for each in cut] for cut in cuts]
                units = [part.units[own] for part, (own, _) in zip(parts, taken, strict=True)]
                sizes = [part.sizes[own] for part, (own, _) in zip(parts, taken, strict=True)]
                codes = [
                    place[part.codes[rows]]
                    for part, place, (_, rows) in zip(parts, places, taken, strict=True)
                ]
                starts = np.cumsum([0, *map(len, units)])
                yield np.concatenate(units), np.concatenate(sizes), np.concatenate(codes), starts

        n_units = sum(len(part.units) for part in parts)
        secret = max(part.secret for part in parts)
        return self._join(self.most, secret, keys, list_ranges(), n_units, n_pairs)

    def _cut(self, n_bits: int) -> tuple[Ints, Ints]:
        """Return where the units begin whose hashes begin with each number of so many bits, and where their keys do."""
        firsts = np.arange(1, 2**n_bits, dtype=np.uint64) << np.uint64(64 - n_bits)
        own = np.concatenate([[0], np.searchsorted(self.units, firsts), [len(self.units)]])
        return own, np.append(0, np.cumsum(self.sizes))[own]

    def tally(self, weigh: Weigh) -> KeyCounts:
        """Return what the units with each key weigh."""
        weights = weigh(self.sizes.max(initial=0))
        counts = add_weights(self.codes, self.sizes, weights, len(self.keys))
        return _leave_out_empty(*_sort_keys(self.keys, counts))


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
        self._secrets: list[Secret] = []

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
