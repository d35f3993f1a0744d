"""Statistics that merge: their protocol, and the counts of one column: levels, cells, ranks and order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.arrays import Flags, Floats, Int32s, Ints, Words, freeze_class
from dpdask.cells import Cells
from dpdask.codec import LevelCodec, ValueCodec
from dpdask.kernels import rank as ecdf
from dpdask.kernels.channel import find_codes
from dpdask.streams import Streams

_NULL = np.uint64(0x9E3779B97F4A7C15)


def as_words(array: pa.Array, key: bytes = b"") -> Words:
    """Return a column as 64-bit words, equal if and only if the values are (for texts, up to a 64-bit hash, which a key of 64 bytes at most makes a secret)."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if (
        pa.types.is_boolean(array.type)
        or pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
    ):
        floating = pa.types.is_floating(array.type)
        numbers = array.cast(pa.float64() if floating else pa.int64(), safe=False)
        found = np.asarray(
            (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy(zero_copy_only=False)
        )
        # one zero, one NaN
        plain = (np.where(np.isnan(found), np.nan, found + 0.0) if floating else found).view(
            np.uint64
        )
    else:
        encoded = array.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        hashed = [
            int.from_bytes(
                hashlib.blake2b(repr(value).encode(), digest_size=8, key=key).digest(), "little"
            )
            for value in distinct
        ]
        codes = np.asarray(encoded.indices.fill_null(0).to_numpy(zero_copy_only=False))
        plain = np.array(hashed or [0], dtype=np.uint64)[codes]
    if array.null_count:
        plain = np.where(np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False)), _NULL, plain)
    return np.ascontiguousarray(plain, dtype=np.uint64)


def list_leaves(value: Any, template: Any) -> Iterator[NDArray[Any]]:
    """Yield the arrays and numbers of a value, in a fixed order.

    Parameters
    ----------
    value
        Frozen dataclasses, mappings and sequences of arrays and numbers. All else is what the
        template has there.
    """
    if type(value) is not type(template):
        raise TypeError(type(value).__name__)
    if isinstance(value, np.ndarray | np.generic | int | float):
        yield np.asarray(value)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from list_leaves(getattr(value, each.name), getattr(template, each.name))
    elif isinstance(value, Mapping) and list(value) == list(template):
        for key in value:
            yield from list_leaves(value[key], template[key])
    elif isinstance(value, tuple | list) and len(value) == len(template):
        for one, other in zip(value, template, strict=True):
            yield from list_leaves(one, other)
    elif value != template:
        raise TypeError(type(value).__name__)


def replace_leaves(template: Any, leaves: Iterator[NDArray[Any]]) -> Any:
    """Return the value whose arrays and numbers `list_leaves` yielded."""
    if isinstance(template, np.ndarray):
        return next(leaves)
    if isinstance(template, np.generic | int | float):
        return type(template)(next(leaves)[()])
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        return dataclasses.replace(
            template,
            **{
                each.name: replace_leaves(getattr(template, each.name), leaves)
                for each in dataclasses.fields(template)
            },
        )
    if isinstance(template, Mapping):
        return {key: replace_leaves(each, leaves) for key, each in template.items()}
    if isinstance(template, tuple | list):
        return type(template)(replace_leaves(each, leaves) for each in template)
    return template


Chosen = Flags
FAN_IN = 8


class Mergeable(Protocol):
    """The value of a statistic over some rows."""

    def merge(self, *others: Self) -> Self:
        """Return the value of all their rows together; the others' rows follow."""


Value = TypeVar("Value", bound=Mergeable)
Value_co = TypeVar("Value_co", bound=Mergeable, covariant=True)


class Counter(Protocol[Value_co]):
    """Counts the rows of one task, batch by batch and in order."""

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Count the next rows.

        Parameters
        ----------
        streams
            The random streams of the part of the table that the rows are in.
        """

    def result(self) -> Value_co:
        """Return the value for all rows so far; the counter must not be used again."""


class Statistic(Protocol[Value_co]):
    """A frozen description of one pass over rows, which tasks carry."""

    @property
    def rows_per_task(self) -> int | None:
        """How many rows one task counts at most if parts are put together, because the value is large to merge; None: as for others."""

    def counter(self) -> Counter[Value_co]:
        """Return a counter of no rows."""


class TreeFold(Generic[Value]):
    """Merges a stream of values as a tree with fan-in 8 would, holding few of them at a time."""

    def __init__(self, levels: list[list[Value]] | None = None) -> None:
        # the values that are held: those of one level are merged of equally many
        self.levels: list[list[Value]] = levels or [[]]

    def add(self, value: Value) -> None:
        """Take the next value."""
        level = 0
        self.levels[0].append(value)
        while len(self.levels[level]) == FAN_IN:
            merged = _merge(self.levels[level])
            self.levels[level] = []
            level += 1
            if level == len(self.levels):
                self.levels.append([])
            self.levels[level].append(merged)

    def result(self) -> Value:
        """Return all values merged, in their order; there must be at least one. What is left in several levels is merged in one call."""
        return _merge([value for level in reversed(self.levels) for value in level])

    def tree(self) -> Value:
        """Return the value at the root of the tree with fan-in 8 over all values; a merge that rounds rounds at the tree's own nodes."""
        rest: list[Value] = []
        for level in self.levels:
            rest = [_merge([*level, *rest])] if level or rest else []
        return rest[0]


def _merge(values: list[Value]) -> Value:
    return values[0].merge(*values[1:])


class FoldCounter(Generic[Value]):
    """A counter that folds the values of batches."""

    def __init__(
        self, nothing: Value, count: Callable[[pa.RecordBatch, Chosen | None, Streams], Value]
    ) -> None:
        self._count, self._fold = count, TreeFold[Value]()
        self._fold.add(nothing)

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Count the next rows; see `Counter.add`."""
        self._fold.add(self._count(batch, chosen, streams))

    def result(self) -> Value:
        """Return the value for all rows so far."""
        return self._fold.result()


@freeze_class(kw_only=False)
class Check(Generic[Value]):
    """Checks all rows against the schema, as a statistic does, and counts none: no exact count leaves a task."""

    statistic: Statistic[Value]

    @property
    def rows_per_task(self) -> None:
        """None: as for other statistics."""

    def counter(self) -> CheckCounter[Value]:
        """Return a counter of no rows."""
        return CheckCounter(self.statistic.counter())


class CheckCounter(Generic[Value]):
    """Hands all rows to a counter, and chooses none."""

    def __init__(self, counter: Counter[Value]) -> None:
        self._counter = counter
        self.result = counter.result

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Check the next rows; see `Counter.add`."""
        del chosen
        self._counter.add(batch, np.zeros(batch.num_rows, dtype=np.bool_), streams)


def encode(codec: LevelCodec, array: pa.Array) -> Int32s:
    """Return the code of each value, as `codec.encode` does, but for floats in a fifth of the time."""
    if codec.numbers is not None and array.type == codec.levels.type and not array.null_count:
        levels = codec.numbers.astype(np.float64)
        order = np.argsort(levels)
        codes, complete = find_codes(array.to_numpy(), levels[order], order.astype(np.int32))
        if complete:
            return codes
    return codec.encode(array)


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class Tally:
    """Exact counts of rows, by level or by cell."""

    counts: Ints

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        return type(self)(np.stack([part.counts for part in (self, *others)]).sum(axis=0))

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())


@freeze_class(kw_only=False, eq=False, repr=False)
class LevelCounts(Tally):
    """How many rows have each level: int64 array of shape (n_levels,), exact."""

    @classmethod
    def identity(cls, codec: LevelCodec) -> Self:
        """Return the counts of no rows."""
        return cls(np.zeros(codec.n_levels, dtype=np.int64))

    @classmethod
    def of_batch(cls, codec: LevelCodec, array: pa.Array, chosen: Flags | None = None) -> Self:
        """Return the counts of the chosen rows of a batch; every row is checked against the levels."""
        codes = encode(codec, array)
        kept = codes if chosen is None else codes.compress(chosen)
        return cls(np.bincount(kept, minlength=codec.n_levels))


@freeze_class(kw_only=False, eq=False, repr=False)
class CellCounts(Tally):
    """How many rows lie in each public cell: int64 array of shape (n_cells,), exact."""

    @classmethod
    def identity(cls, cells: Cells) -> Self:
        """Return the counts of no rows."""
        return cls(np.zeros(cells.n_cells, dtype=np.int64))

    @classmethod
    def of_batch(cls, cells: Cells, array: pa.Array, chosen: Flags | None = None) -> Self:
        """Return the counts of the chosen rows of a batch; every row is checked against the schema."""
        index = cells.index(array)
        return cls(
            np.bincount(index if chosen is None else index[chosen], minlength=cells.n_cells).astype(
                np.int64
            )
        )


MAX_POINTS = 2**19
MAX_KNOTS = 2**16
MAX_RANK_ERROR = 2.0**-15


# Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class RankSummary:
    """A weighted sample that stands for the rows of one column.

    Notes
    -----
    A merge that overflows keeps 2**19 points, which misplaces at most 2**-19 of its rows, however
    many summaries it takes at once. Merged in a tree with fan-in 8, one call a node, up to 8**8
    fragments stay within 8 * 2**-19 = 2**-16, and the final cut to 2**16 knots adds at most 2**-16:
    the rank error of a reference is at most 2**-15. `error` keeps the count, so the bound is
    checked and not assumed.
    """

    # Float64 and int64 arrays of one shape, at most 2**19 points: distinct sorted values apart from
    # the atoms, and how many rows each stands for.
    values: Floats
    weights: Ints
    atom_counts: Ints  # int64 array, the rows at each declared atom; exact
    n_nulls: int
    error: int  # by how many rows the rank of any number can be wrong

    @classmethod
    def identity(cls, codec: ValueCodec) -> Self:
        """Return the summary of no rows."""
        return cls(
            np.empty(0),
            np.empty(0, dtype=np.int64),
            np.zeros(len(codec.atoms), dtype=np.int64),
            0,
            0,
        )

    @classmethod
    def of_batch(cls, codec: ValueCodec, array: pa.Array, chosen: Flags | None = None) -> Self:
        """Return the summary of the chosen rows of a batch; every row is checked against the schema."""
        values, is_null = codec.encode(array)
        if chosen is not None:
            values, is_null = values[chosen], is_null[chosen]
        found, counts = np.unique(values[~is_null], return_counts=True)
        is_atom = np.isin(found, codec.atoms)
        atom_counts = np.zeros(len(codec.atoms), dtype=np.int64)
        atom_counts[np.searchsorted(codec.atoms, found[is_atom])] = counts[is_atom]
        return cls(found[~is_atom], counts[~is_atom], atom_counts, int(is_null.sum()), 0)

    def merge(self, *others: Self) -> Self:
        """Return the summary of all of them, compressed once if it passes 2**19 points; merge a tree's fan-in in one call."""
        parts = (self, *others)
        values, weights = ecdf.merge(
            [part.values for part in parts], [part.weights for part in parts]
        )
        values, weights, moved = ecdf.compress(values, weights, MAX_POINTS)
        atom_counts: Ints = np.stack([part.atom_counts for part in parts]).sum(axis=0)
        n_nulls = sum(part.n_nulls for part in parts)
        return type(self)(
            values, weights, atom_counts, n_nulls, sum(part.error for part in parts) + moved
        )

    def compress(self, n_points: int) -> Self:
        """Return the summary with at most `n_points` points."""
        values, weights, moved = ecdf.compress(self.values, self.weights, n_points)
        return type(self)(values, weights, self.atom_counts, self.n_nulls, self.error + moved)

    @property
    def n_rows(self) -> int:
        """How many rows it stands for."""
        return int(self.weights.sum() + self.atom_counts.sum()) + self.n_nulls


Range = tuple[Any, Any]


# contains values, so it must never be printed
@freeze_class(repr=False)
class ColumnOrder:
    """Whether the values of neighbouring rows, or the ranges of neighbouring parts, rise or fall; neighbours can be merged in order.

    Notes
    -----
    Merging is associative, with `identity`, and not commutative: merge in the order of the table.
    """

    # The smallest and the largest value of the first and of the last part; a row is a part with one
    # value. None if there is no value, or if values both rise and fall, because then they are no
    # longer needed.
    first: Range | None = None
    last: Range | None = None
    # Whether some part has a value that is larger (smaller) than some value of the part before it.
    rises: bool = False
    falls: bool = False

    @classmethod
    def identity(cls) -> Self:
        """Return the order of no rows."""
        return cls()

    @classmethod
    def of_batch(cls, values: NDArray[Any]) -> Self:
        """Return the order of neighbouring rows.

        Parameters
        ----------
        values
            Numbers of shape (n,), without nulls, in the same order as the column's values and equal
            where these are equal.
        """
        if not len(values):
            return cls()
        first, last = values[0].item(), values[-1].item()
        before, after = values[:-1], values[1:]
        return cls(
            first=(first, first),
            last=(last, last),
            rises=bool((after > before).any()),
            falls=bool((after < before).any()),
        )._plain()

    @classmethod
    def of_range(cls, low: Any, high: Any) -> Self:
        """Return the order of one part whose values are in [low, high], in unknown order."""
        return cls(first=(low, high), last=(low, high))

    def merge(self, *others: Self) -> Self:
        """Return the order of this one's rows followed by the others'."""
        merged = self
        for other in others:
            merged = merged._follow(other)
        return merged

    def _follow(self, other: Self) -> Self:
        if self.is_mixed or (other.first is None and not other.is_mixed):
            return self
        if other.is_mixed or self.last is None or other.first is None:
            return other
        rises, falls = other.first[1] > self.last[0], other.first[0] < self.last[1]
        return type(self)(
            first=self.first,
            last=other.last,
            rises=self.rises or other.rises or rises,
            falls=self.falls or other.falls or falls,
        )._plain()

    def _plain(self) -> Self:
        """Return this order without its values if they are no longer needed, so that equal orders compare equal."""
        return type(self)(rises=True, falls=True) if self.is_mixed else self

    @property
    def is_mixed(self) -> bool:
        """Whether values both rise and fall; later rows cannot change that."""
        return self.rises and self.falls

    @property
    def is_sorted(self) -> bool:
        """Whether values rise and never fall, or fall and never rise. A constant column is not sorted: its order reveals nothing."""
        return self.rises != self.falls
