"""Values <-> what mechanisms work on: level codes, or numbers on a line, for one Arrow array at a time.

The domain comes from the schema, never from the data: a value outside it is an error that does not show the value.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.errors import DataError
from dpdask.schema import Column, Level

_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCodec:
    """The codec of a discrete or categorical column: values <-> codes 0..n_levels-1.

    Attributes
    ----------
    name
        The column.
    levels
        The public levels in the column's own Arrow type, in the schema's order; when null is a level it stands first.
    ordered
        Whether the order of the codes means anything.
    """

    name: str
    levels: pa.Array
    ordered: bool

    @property
    def n_levels(self) -> int:
        """How many levels there are, null included."""
        return len(self.levels)

    def encode(self, array: pa.Array) -> NDArray[np.int32]:
        """Return the code of each value.

        Parameters
        ----------
        array
            The values, of the column's type or a dictionary of it.

        Returns
        -------
        int32 array of shape (len(array),), each in 0..n_levels-1.

        Raises
        ------
        DataError
            If a value is null without null being a level, or is none of the levels.
        """
        codes = pc.index_in(_plain(array, self.name, self.levels.type), value_set=self.levels)
        if codes.null_count:
            if array.null_count and not self.levels.null_count:
                raise _refused(self.name, "a null", "declare `nulls: level`, or fill it")
            raise _refused(self.name, "a value outside its levels", "add the level to the schema, or mend the data")
        return codes.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow is untyped

    def decode(self, codes: NDArray[np.integer]) -> pa.Array:
        """Return the values of `codes`, in the column's Arrow type."""
        return self.levels.take(pa.array(codes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCodec:
    """The codec of a continuous or mixed column: values <-> float64 numbers and a null mask.

    Attributes
    ----------
    name
        The column.
    type
        The column's Arrow type. Times become microseconds since 1970 (days for a date32); finer times are cut to the
        microsecond.
    bounds
        The public closed range, in numbers.
    atoms
        The declared atoms, in numbers, increasing; empty for a continuous column.
    nulls
        Whether null is a level.
    """

    name: str
    type: pa.DataType
    bounds: tuple[float, float] | None
    atoms: tuple[float, ...]
    nulls: bool

    @property
    def lattice(self) -> bool:
        """Whether values are whole numbers (integers, dates, times), so that a release must be whole too."""
        return not pa.types.is_floating(self.type)

    def encode(self, array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return each value as a number, and where it is null.

        Returns
        -------
        values
            float64 array of shape (len(array),), finite; 0 where null.
        is_null
            bool array of the same shape.

        Raises
        ------
        DataError
            On a null that is no level, NaN, infinity, a value outside the bounds, or a whole number beyond 2**53.
        """
        array = _plain(array, self.name, self.type)
        if array.null_count and not self.nulls:
            raise _refused(self.name, "a null", "declare `nulls: level`, or fill it")
        is_null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
        values = np.asarray(self._numbers(array).fill_null(0).to_numpy(zero_copy_only=False))
        if values.dtype.kind == "i" and len(values) and max(int(values.max()), -int(values.min())) > _EXACT:
            raise _refused(self.name, "a whole number beyond ±2**53", "store it in a coarser unit")
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            raise _refused(self.name, "NaN or an infinity", "store a missing value as null")
        if self.bounds is not None and bool((((values < self.bounds[0]) | (values > self.bounds[1])) & ~is_null).any()):
            raise _refused(self.name, "a value outside its bounds", "widen the schema's bounds, or mend the data")
        return values, is_null

    def decode(self, values: NDArray[np.float64], is_null: NDArray[np.bool_]) -> pa.Array:
        """Return numbers (whole ones for a lattice column) as the column's Arrow type, null where `is_null`."""
        if not self.lattice:
            return pa.array(values.astype(self.type.to_pandas_dtype()), type=self.type, mask=is_null)
        whole = np.where(is_null, 0.0, values).astype(np.int64)
        if pa.types.is_date32(self.type):
            return pa.array(whole.astype(np.int32), mask=is_null).cast(self.type)
        if pa.types.is_temporal(self.type):
            times = pa.array(whole, mask=is_null).cast(pa.timestamp("us", tz=getattr(self.type, "tz", None)))
            return times.cast(self.type, safe=False)
        return pa.array(whole, mask=is_null).cast(self.type)

    def _numbers(self, array: pa.Array) -> pa.Array:
        if pa.types.is_date32(array.type):
            return array.cast(pa.int32())
        if pa.types.is_temporal(array.type):
            return array.cast(pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
        if pa.types.is_floating(array.type):
            return array.cast(pa.float64())
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            raise _refused(self.name, "a whole number beyond ±2**53", "store it in a coarser unit") from None


Codec = LevelCodec | ValueCodec


def codec_for(name: str, column: Column, type_: pa.DataType) -> Codec:
    """Return the codec of one privatised column.

    Parameters
    ----------
    name
        The column.
    column
        What the schema declares of it.
    type_
        Its Arrow type in the table.

    Raises
    ------
    DataError
        If the declared domain cannot be expressed in that type.
    """
    if column.has_levels:
        assert column.levels is not None
        levels = _typed(name, column.levels, type_)
        if len(levels.unique()) < len(levels):
            raise _refused(name, f"levels that are the same number as {type_}", "make them differ by more")
        if column.nulls == "level":
            levels = pa.concat_arrays([pa.nulls(1, type_), levels])
        return LevelCodec(name=name, levels=levels, ordered=column.kind == "discrete")
    if not (pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_date(type_) or pa.types.is_timestamp(type_)):
        raise DataError(f"a {column.kind} column holds numbers, dates or times, and this one is {type_}", f"column {name!r}", "correct its kind")
    codec = ValueCodec(name=name, type=type_, bounds=column.bounds, atoms=(), nulls=column.nulls == "level")
    if column.bounds is not None and codec.lattice and column.bounds != tuple(map(round, column.bounds)):
        raise DataError("the bounds of a column of whole numbers must be whole", f"column {name!r}", "round them outward")
    if not column.atoms:
        return codec
    atoms, _ = codec.encode(_typed(name, column.atoms, type_))
    return ValueCodec(name=name, type=type_, bounds=column.bounds, atoms=tuple(map(float, atoms)), nulls=codec.nulls)


def _typed(name: str, levels: tuple[Level, ...], type_: pa.DataType) -> pa.Array:
    """Return declared levels in a column's own type; that 0.1 is not exactly a float32 is the file's choice, not an error."""
    wrong = DataError(f"its declared values do not fit its type {type_}", f"column {name!r}", "correct the schema, or the file's type")
    texts, truths = isinstance(levels[0], str), isinstance(levels[0], bool)
    fits = {
        "text": pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_),
        "truth": pa.types.is_boolean(type_),
        "time": pa.types.is_date(type_) or pa.types.is_timestamp(type_),
        "number": pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_),
    }
    kind = "text" if texts else "truth" if truths else "time" if isinstance(levels[0], dt.date) else "number"
    if not fits[kind]:
        raise wrong
    try:
        if kind == "number" and pa.types.is_decimal(type_):
            return pa.array([Decimal(str(level)) for level in levels], type=type_)
        if kind == "number" and pa.types.is_floating(type_):
            return pa.array(levels, type=pa.float64()).cast(type_, safe=False)
        if kind == "number":
            return pa.array([int(level) if level == int(level) else level for level in levels], type=type_)  # type: ignore[arg-type]
        return pa.array(levels).cast(type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        raise wrong from None


def _plain(array: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    """Return `array` without a dictionary; it must then be of the column's type."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type != type_:
        raise DataError(f"its type is {array.type}, and {type_} is expected", f"column {name!r}", "give every file the same type")
    return array


def _refused(name: str, what: str, mend: str) -> DataError:
    return DataError(f"holds {what}", f"column {name!r}", mend)
