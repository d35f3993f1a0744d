"""What a run prints on the steward's terminal only: exact counts and the order of private values, which no ε covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.codec import LevelCodec
from dpdask.mechanisms.mechanism import Columns
from dpdask.stats.order import ColumnOrder

_HEAD = 2**10


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # private: Dask logs the arguments of a failed task
class Told:
    """What the writing tasks found in the rows before they randomised them; results are merged in the order of the rows.

    Attributes
    ----------
    changed
        For each private column, how many values were outside its domain and were changed as the schema says. A column that
        is not listed had none.
    order
        The order of the values in each private or kept column. A column that is not listed was not checked.

    Privacy
    -------
    Exact, and covered by no ε: shown to the steward, and stored only in the run's private folder, which the commit removes.
    """

    changed: Mapping[str, int] = field(default_factory=dict)
    order: Mapping[str, ColumnOrder] = field(default_factory=dict)

    def merge(self, *others: Self) -> Self:
        """Return the result for this one's rows followed by the others' rows."""
        changed, order = dict(self.changed), dict(self.order)
        for other in others:
            for name, count in other.changed.items():
                changed[name] = changed.get(name, 0) + count
            for name, following in other.order.items():
                order[name] = order.get(name, ColumnOrder.identity()).merge(following)
        return type(self)(changed=changed, order=order)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for the run's private records."""
        return {"changed": dict(self.changed), "order": {name: asdict(order) for name, order in self.order.items()}}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the object from the result of `to_dict`, after it was stored as JSON.

        Raises
        ------
        KeyError, TypeError, AttributeError
            If it is not such a result.
        """
        order = {name: ColumnOrder(**{**given, **_tuples(given)}) for name, given in content["order"].items()}
        return cls(changed={name: int(count) for name, count in content["changed"].items()}, order=order)


def _tuples(order: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if order[key] is None else tuple(order[key]) for key in ("first", "last")}


class Teller:
    """Collects what to tell the steward about one task's rows, batch by batch and in order.

    Parameters
    ----------
    columns
        The table's columns.
    """

    def __init__(self, columns: Columns) -> None:
        self._codecs = columns.codecs
        self._ranks = {name: _ranks(codec) for name, codec in columns.codecs.items() if isinstance(codec, LevelCodec)}
        watched = [field.name for field in columns.types if field.name in columns.codecs or _is_number(field.type)]
        self._order = {name: ColumnOrder.identity() for name in watched}
        self._changed = dict.fromkeys(columns.codecs, 0)

    def add(self, rows: pa.RecordBatch) -> None:
        """Look at the next released rows before they are randomised.

        Raises
        ------
        DataError
            If a value violates the schema.
        """
        for name, codec in self._codecs.items():
            self._changed[name] += codec.n_outside(rows.column(name))
        for name in self._order:
            array = rows.column(name)
            for part in (array.slice(0, _HEAD), array.slice(_HEAD)):
                order = self._order[name]
                if not order.is_mixed and len(part):  # most columns are mixed after a few rows, and later rows cannot change that
                    self._order[name] = order.merge(ColumnOrder.of_batch(self._numbers(name, part)))

    def _numbers(self, name: str, array: pa.Array) -> NDArray[Any]:
        """Return a column's non-null values as numbers in the same order: texts as their rank among the levels."""
        codec = self._codecs.get(name)
        if isinstance(codec, LevelCodec):
            ranks = self._ranks[name][codec.encode(array)]
            return ranks[ranks >= 0]
        if codec is not None:
            values, is_null = codec.encode(array)
            return values[~is_null]
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
        return np.asarray(array.drop_null().to_numpy(zero_copy_only=False))

    @property
    def told(self) -> Told:
        """What to tell the steward about all rows so far."""
        return Told(changed={name: count for name, count in self._changed.items() if count}, order=dict(self._order))


def _is_number(type_: pa.DataType) -> bool:
    temporal = pa.types.is_temporal(type_) and not pa.types.is_interval(type_)
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or temporal)


def _ranks(codec: LevelCodec) -> NDArray[np.int64]:
    """Return the rank of each code's level in the natural order of the levels, by which files are sorted; -1 for null."""
    levels = codec.levels.to_pylist()
    places = {level: rank for rank, level in enumerate(sorted(level for level in levels if level is not None))}
    return np.array([-1 if level is None else places[level] for level in levels])
