"""Values <-> what mechanisms work on: level codes, or numbers on a line, for one Arrow array at a time.

The domain comes from the schema, never from the data: a value outside it is an error that does not show the value.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.errors import DataError
from dpdask.schema import Column, Level

_EXACT = 2**53
_LARGEST = 2.0**1021
_SMALL = 2**30


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
        array = _plain(array, self.name, self.levels.type)
        first = self._first_of_run()
        if first is not None and not array.null_count:
            return self._differences(np.asarray(array.to_numpy(zero_copy_only=False)), first)
        codes = pc.index_in(_comparable(array), value_set=_comparable(self.levels))
        if codes.null_count:
            if array.null_count and not self.levels.null_count:
                raise _refused(self.name, "a null", "declare `nulls: level`, or fill it")
            raise _refused(self.name, "a value outside its levels", "add the level to the schema, or mend the data")
        return codes.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow is untyped

    def decode(self, codes: NDArray[np.integer]) -> pa.Array:
        """Return the values of `codes`, in the column's Arrow type."""
        first = self._first_of_run()
        if first is not None:
            return pa.array((np.asarray(codes).astype(np.int64) + first).astype(self.levels.type.to_pandas_dtype()), type=self.levels.type)
        return _comparable(self.levels).take(pa.array(codes)).cast(self.levels.type)

    def _first_of_run(self) -> int | None:
        """Return the first level if the levels are neighbouring whole numbers, in order, without null: then no value is looked up."""
        if not pa.types.is_integer(self.levels.type) or self.levels.null_count:
            return None
        first = int(self.levels[0].as_py())
        return first if self.levels.to_pylist() == list(range(first, first + len(self.levels))) else None

    def _differences(self, values: NDArray[np.integer], first: int) -> NDArray[np.int32]:
        """Return the codes of whole numbers whose levels begin at `first`."""
        if len(values) and not (first <= int(values.min()) and int(values.max()) < first + len(self.levels)):
            raise _refused(self.name, "a value outside its levels", "add the level to the schema, or mend the data")
        return (values.astype(np.int64) - first).astype(np.int32) if abs(first) > _SMALL else values.astype(np.int32) - np.int32(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCodec:
    """The codec of a continuous or mixed column: values <-> float64 numbers and a null mask.

    Attributes
    ----------
    name
        The column.
    type
        The column's Arrow type. Dates become days since 1970, times their own unit since 1970; nanoseconds are cut to
        microseconds, which float64 still counts exactly.
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
            On a null that is no level, NaN, infinity, a number beyond 2**1021, a value outside the bounds, or a whole number
            beyond 2**53.
        """
        array = _plain(array, self.name, self.type)
        if array.null_count and not self.nulls:
            raise _refused(self.name, "a null", "declare `nulls: level`, or fill it")
        is_null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
        values = self._numbers(array)
        if not np.isfinite(values).all():
            raise _refused(self.name, "NaN or an infinity", "store a missing value as null")
        if len(values) and max(float(values.max()), -float(values.min())) > _LARGEST:
            raise _refused(self.name, "a number beyond ±2**1021, where differences overflow", "store it in a larger unit")
        if self.bounds is not None and bool((((values < self.bounds[0]) | (values > self.bounds[1])) & ~is_null).any()):
            raise _refused(self.name, "a value outside its bounds", "widen the schema's bounds, or mend the data")
        return values, is_null

    def decode(self, values: NDArray[np.float64], is_null: NDArray[np.bool_]) -> pa.Array:
        """Return numbers (whole ones for a lattice column) as the column's Arrow type, null where `is_null`."""
        values = np.where(is_null, 0.0, values)  # Arrow keeps what lies under a null
        if not self.lattice:
            kind = self.type.to_pandas_dtype()
            most = float(np.finfo(kind).max)
            return pa.array(np.clip(values, -most, most).astype(kind), mask=is_null)
        counted = _counted(self.type)
        return pa.array(values.astype(np.int64), mask=is_null).cast(_whole(counted)).cast(counted).cast(self.type)

    def _numbers(self, array: pa.Array) -> NDArray[np.float64]:
        """Return the values as float64, every one of them exactly; 0 where null."""
        if self.lattice:
            counted = _counted(self.type)
            array = array.cast(counted, safe=False).cast(_whole(counted))  # unsafe for the cut to microseconds alone
            # Looked at before the cast to float64: Arrow's own refusal would carry the value.
            extremes = pc.min_max(array).as_py()
            if max(abs(extremes["min"] or 0), abs(extremes["max"] or 0)) > _EXACT:
                raise _refused(self.name, "a whole number beyond ±2**53", "store it in a coarser unit")
        return np.asarray(array.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False))


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
    return _level_codec(name, column, type_) if column.has_levels else _value_codec(name, column, type_)


def _level_codec(name: str, column: Column, type_: pa.DataType) -> LevelCodec:
    assert column.levels is not None
    levels = _typed(name, column.levels, type_)
    if column.nulls == "level":
        levels = pa.concat_arrays([pa.nulls(1, type_), levels])
    return LevelCodec(name=name, levels=levels, ordered=column.kind == "discrete")


def _value_codec(name: str, column: Column, type_: pa.DataType) -> ValueCodec:
    if not (pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_date(type_) or pa.types.is_timestamp(type_)):
        what = f"a {column.kind} column holds integers, floats, dates or timestamps, and this one is {type_}"
        raise DataError(what, f"column {name!r}", "correct its kind, or the file's type")
    bounds = column.bounds
    if bounds is not None and pa.types.is_floating(type_):
        low, high = _typed(name, bounds, type_).cast(pa.float64()).to_pylist()
        bounds = (low, high)
    elif bounds is not None and bounds != tuple(map(round, bounds)):
        raise DataError("the bounds of a column of whole numbers must be whole", f"column {name!r}", "round them outward")
    codec = ValueCodec(name=name, type=type_, bounds=bounds, atoms=(), nulls=column.nulls == "level")
    if column.atoms is None:
        return codec
    atoms, _ = codec.encode(_typed(name, column.atoms, type_))
    return replace(codec, atoms=tuple(map(float, atoms)))


def _typed(name: str, levels: tuple[Level, ...], type_: pa.DataType) -> pa.Array:
    """Return declared values in a column's own type; that 0.1 is not exactly a float32 is the file's choice, not an error."""
    wrong = DataError(
        f"its declared values do not fit its type {type_}", f"column {name!r}", "correct the schema (texts in quotes), or the file's type"
    )
    fits = {
        "text": pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_),
        "truth": pa.types.is_boolean(type_),
        "time": pa.types.is_date(type_) or pa.types.is_timestamp(type_),
        "number": pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_),
    }
    first = levels[0]
    kind = "text" if isinstance(first, str) else "truth" if isinstance(first, bool) else "time" if isinstance(first, dt.date) else "number"
    if not fits[kind]:
        raise wrong
    try:
        typed = _numbers_typed(levels, type_) if kind == "number" else pa.array(levels).cast(type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        raise wrong from None
    if pa.types.is_floating(type_) and not np.isfinite(typed.to_numpy()).all():  # 1e300 is infinite as a float32
        raise wrong
    if len(_comparable(typed).unique()) < len(typed):
        raise DataError(f"two of its declared values are the same as {type_}", f"column {name!r}", "make them differ by more")
    return typed


def _numbers_typed(levels: tuple[Level, ...], type_: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(type_):
        return pa.array([Decimal(str(level)) for level in levels], type=type_)
    if pa.types.is_floating(type_):
        return pa.array(levels, type=pa.float64()).cast(type_, safe=False)
    whole = [int(level) for level in levels]  # type: ignore[arg-type]  # numbers, checked by the caller
    if whole != list(levels):
        raise pa.ArrowInvalid("a fraction")  # pyarrow would cut it off in silence
    return pa.array(whole, type=type_)


def _comparable(array: pa.Array) -> pa.Array:
    """Return `array` in a type that Arrow can look values up in and take them from, with one zero instead of 0.0 and -0.0."""
    if pa.types.is_floating(array.type):
        return pc.add(array.cast(pa.float64()), 0.0)
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_decimal(array.type) and array.type.bit_width < 128:
        return array.cast(pa.decimal128(array.type.precision, array.type.scale))
    return array


def _counted(type_: pa.DataType) -> pa.DataType:
    """Return the type whose steps are the lattice of a column: whole days for dates, microseconds for nanoseconds."""
    if pa.types.is_date(type_):
        return pa.date32()
    if pa.types.is_timestamp(type_) and type_.unit == "ns":
        return pa.timestamp("us", tz=type_.tz)
    return type_


def _whole(counted: pa.DataType) -> pa.DataType:
    """Return the integer type that Arrow casts a counted type from and to."""
    return counted if pa.types.is_integer(counted) else pa.int32() if pa.types.is_date(counted) else pa.int64()


def _plain(array: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    """Return `array` without a dictionary; it must then be of the column's type."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type != type_:
        raise DataError(f"its type is {array.type}, and {type_} is expected", f"column {name!r}", "give every file the same type")
    return array


def _refused(name: str, what: str, mend: str) -> DataError:
    return DataError(f"holds {what}", f"column {name!r}", mend)
