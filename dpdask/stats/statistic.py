"""A statistic of rows as data: a scan of any source sends it to workers, counts batch by batch, and merges the values in a tree."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.kernels.jit import Flags, Words
from dpdask.streams import Streams

_NULL = np.uint64(0x9E3779B97F4A7C15)


def as_words(array: pa.Array) -> Words:
    """Return a column as 64-bit words, equal if and only if the values are (for texts, up to a 64-bit hash)."""
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
            int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")
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
