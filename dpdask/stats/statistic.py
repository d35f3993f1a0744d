"""A statistic of rows as data: a scan of any source sends it to workers, counts batch by batch, and merges the values in a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.streams import Streams

FAN_IN = 8

Chosen = NDArray[np.bool_]


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
        batch
            The rows, with the columns that a table's work reads.
        chosen
            Which rows to count; None: all of them.
        streams
            The random streams of the part of the table that the rows are in.

        Raises
        ------
        DataError
            If any row, chosen or not, violates the schema.
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
    """Merges a stream of values as a tree with fan-in 8 would, holding few of them at a time.

    Parameters
    ----------
    levels
        What another fold held, to go on from there.
    """

    def __init__(self, levels: list[list[Value]] | None = None) -> None:
        self._levels: list[list[Value]] = levels or [[]]

    @property
    def levels(self) -> list[list[Value]]:
        """The values that are held: those of one level are merged of equally many."""
        return self._levels

    def add(self, value: Value) -> None:
        """Take the next value."""
        level = 0
        self._levels[0].append(value)
        while len(self._levels[level]) == FAN_IN:
            merged = _merge(self._levels[level])
            self._levels[level] = []
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(merged)

    def result(self) -> Value:
        """Return all values merged, in their order; there must be at least one. What is left in several levels is merged in one call."""
        return _merge([value for level in reversed(self._levels) for value in level])

    def tree(self) -> Value:
        """Return the value at the root of the tree with fan-in 8 over all values; a merge that rounds rounds at the tree's own nodes."""
        rest: list[Value] = []
        for level in self._levels:
            rest = [_merge([*level, *rest])] if level or rest else []
        return rest[0]


def _merge(values: list[Value]) -> Value:
    return values[0].merge(*values[1:])


class FoldCounter(Generic[Value]):
    """A counter that folds the values of batches.

    Parameters
    ----------
    nothing
        The value of no rows.
    count
        Returns the value of one batch.
    """

    def __init__(self, nothing: Value, count: Callable[[pa.RecordBatch, Chosen | None, Streams], Value]) -> None:
        self._count, self._fold = count, TreeFold[Value]()
        self._fold.add(nothing)

    def add(self, batch: pa.RecordBatch, chosen: Chosen | None, streams: Streams) -> None:
        """Count the next rows; see `Counter.add`."""
        self._fold.add(self._count(batch, chosen, streams))

    def result(self) -> Value:
        """Return the value for all rows so far."""
        return self._fold.result()
