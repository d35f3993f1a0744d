"""The numbers that stand for the values of an Arrow type: what they count, how far they are exact, and how they are told."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BeforeValidator, WithJsonSchema

from dpdask.arrays import Floats

EXACT = 2.0**53
EXACT_DIGITS = 2**50  # counts of a decimal's last digit that come back from float64 as they were
_LARGEST = 2.0**1021
_ONE_DAY = dt.timedelta(days=1)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _as_unit(value: object) -> object:
    known = value in ("s", "ms", "us") if isinstance(value, str) else type(value) in (int, float)
    if not known or (isinstance(value, int | float) and not 0 < value < math.inf):
        raise ValueError("a number, such as 1000 or 0.01, or of times s, ms or us is expected")
    return value


Unit = Annotated[
    int | float | str,
    BeforeValidator(_as_unit),
    WithJsonSchema(
        {"anyOf": [{"enum": ["s", "ms", "us"]}, {"type": "number", "exclusiveMinimum": 0}]}
    ),
]
"""In which values are counted: a number, or a unit of time."""


def is_real(type_: pa.DataType) -> bool:
    """Return whether a type's values are numbers with a fraction: floats and decimals."""
    return bool(pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def is_dated(type_: pa.DataType) -> bool:
    """Return whether a type's values are dates, or times of a date: they count from 1970."""
    return bool(pa.types.is_date(type_) or pa.types.is_timestamp(type_))


def is_span(type_: pa.DataType) -> bool:
    """Return whether a type's values are times of a day, or durations: they count from 0."""
    return bool(pa.types.is_time(type_) or pa.types.is_duration(type_))


def float_type(type_: pa.DataType) -> Any:
    """Return the NumPy type of the numbers of a column that is no lattice: decimals are read as float64."""
    return np.float64 if pa.types.is_decimal(type_) else type_.to_pandas_dtype()


def comparable(array: pa.Array) -> pa.Array:
    """Return `array` in a type that Arrow can look values up in and take them from, with one zero instead of 0.0 and -0.0."""
    if pa.types.is_floating(array.type):
        return pc.add(array.cast(pa.float64()), 0.0)
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    if pa.types.is_decimal(array.type) and array.type.bit_width < 128:
        return array.cast(pa.decimal128(array.type.precision, array.type.scale))
    return array


# ---- what the numbers count


def lattice_type(type_: pa.DataType) -> pa.DataType:
    """Return the type whose steps are the lattice of a column: whole days for dates, microseconds for nanoseconds."""
    if pa.types.is_date(type_):
        return pa.date32()
    return count_type(type_, "us") if getattr(type_, "unit", "") == "ns" else type_


def whole_type(type_: pa.DataType) -> pa.DataType:
    """Return the integer type that Arrow casts the type of a lattice from and to."""
    return (
        type_ if pa.types.is_integer(type_) else pa.int32() if type_.bit_width == 32 else pa.int64()
    )


def count_type(type_: pa.DataType, unit: Unit | None) -> pa.DataType:
    """Return the type of values in a declared unit: times of that unit; of numbers int64, how many units they are."""
    if unit is None:
        return type_
    if not isinstance(unit, str):
        return pa.int64()
    if pa.types.is_timestamp(type_):
        return pa.timestamp(unit, tz=type_.tz)
    if pa.types.is_duration(type_):
        return pa.duration(unit)
    return pa.time64(unit) if unit == "us" else pa.time32(unit)


def coarsen(array: pa.Array, unit: Unit | None) -> pa.Array:
    """Return values in a declared unit, rounded down, in the type of `count_type`."""
    if unit is None:
        return array
    type_, is_null = count_type(array.type, unit), array.is_null()
    if pa.types.is_decimal(array.type):
        counts = _count_decimals(comparable(array), find_digits(unit))
    else:
        own = array.cast(whole_type(array.type)).fill_null(0).to_numpy(zero_copy_only=False)
        own = own if own.dtype == np.uint64 else own.astype(np.int64)
        counts = own // own.dtype.type(n_steps(array.type, unit))
    whole = pa.array(counts.astype(np.int64), mask=np.asarray(is_null))
    return whole.cast(whole_type(type_)).cast(type_)


def refine(counts: Floats, type_: pa.DataType, unit: Unit) -> NDArray[np.integer]:
    """Return whole numbers of a type from how many units they are."""
    kind = np.uint64 if type_ == pa.uint64() else np.int64
    found: NDArray[np.integer] = counts.astype(kind) * kind(n_steps(type_, unit))
    return found


def n_steps(type_: pa.DataType, unit: Unit) -> int:
    """Return how many of the numbers or times of a type a declared unit of it is."""
    return PER_SECOND[type_.unit] // PER_SECOND[unit] if isinstance(unit, str) else int(unit)


def find_digits(unit: Unit) -> int:
    """Return how many digits after the point multiples of a power of ten have: of 0.01 two, of 100 minus two."""
    return -int(Decimal(str(unit)).normalize().as_tuple().exponent)


def _count_decimals(array: pa.Array, digits: int) -> NDArray[np.int64]:
    """Return decimals in units of a number of digits, rounded down."""
    # towards zero first: to round -99.9 down overflows, and the error would show it; nine digits at
    # a time, because Arrow divides by more of them one too low where a word of the quotient is full
    cut, make = array, pa.decimal256 if array.type.bit_width == 256 else pa.decimal128
    while (n := min(cut.type.scale - digits, 9)) > 0:
        cut = cut.cast(make(max(cut.type.precision - n, 1), cut.type.scale - n), safe=False)
    numbers = cut.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
    found: Floats = np.rint(numbers * 10.0 ** max(digits, 0) / 10.0 ** max(-digits, 0))
    found -= np.asarray(pc.less(array, cut.cast(array.type)).fill_null(False))
    return found.clip(-(2.0**62), 2.0**62).astype(np.int64)


def count_spans(array: pa.Array) -> Floats:
    """Return times of a day or durations as numbers of their unit, missing ones as NaN."""
    counted = lattice_type(array.type)
    whole = array.cast(counted, safe=False).cast(whole_type(counted))
    found: Floats = whole.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def step_of(counted: pa.DataType) -> dt.timedelta:
    """Return how long one step of a lattice of dates, times or durations is."""
    if pa.types.is_date(counted):
        return _ONE_DAY
    return dt.timedelta(microseconds=10**6 // PER_SECOND[counted.unit])


def name_unit(type_: pa.DataType) -> str:
    """Return the unit in which a column of dates, times or durations is counted."""
    counted = lattice_type(type_)
    return "days" if pa.types.is_date(counted) else UNITS[counted.unit]


def tell_unit(type_: pa.DataType) -> str:
    """Return what the numbers of a column of times of a day, or of durations, count."""
    return f"{name_unit(type_)}{' since midnight' if pa.types.is_time(type_) else ''}"


def say_number(number: float, type_: pa.DataType | None = None) -> str:
    """Return a number as every label has it: whole, or in six digits; of a column of dates or times, as that, in whole seconds."""
    if type_ is not None and pa.types.is_temporal(type_):
        try:
            whole = pa.scalar(int(number), pa.int32() if type_.bit_width == 32 else pa.int64())
            time = whole.cast(type_).as_py()
        except (OverflowError, ValueError):  # the edge of a cell, in a year that no calendar has
            if is_span(type_):  # or before midnight
                return f"{number:,.0f}"
            time = dt.date.max if number > 0 else dt.date.min
        return str(time)[:19].removesuffix(" 00:00:00")
    number = 0.0 if abs(number) < 1e-300 else number  # the neighbours of 0 are edges, too
    short = f"{number:,.6g}"
    is_whole = number == math.floor(number) or "e+" in short
    return f"{number:,.0f}" if is_whole and abs(number) < 1e15 else short


# ---- how far they are exact


@lru_cache(maxsize=128)  # for the few types of a table, asked for each batch
def find_limits(type_: pa.DataType, unit: Unit | None = None) -> tuple[float, float]:
    """Return the least and the greatest number of a column that its type holds, float64 counts exactly, and a calendar has."""
    if pa.types.is_floating(type_):
        return -_LARGEST, _LARGEST
    if pa.types.is_decimal(type_):
        digits = type_.scale if unit is None else find_digits(unit)
        most = min((10**type_.precision - 1) // 10 ** (type_.scale - digits), EXACT_DIGITS)
        most = most / 10.0**type_.scale if unit is None else float(most)
        return -most, most
    counted = lattice_type(count_type(type_, unit))
    held = np.iinfo(whole_type(counted if unit is None else type_).to_pandas_dtype())
    n = 1 if unit is None else n_steps(type_, unit)
    low, high = max(float(-(-held.min // n)), -EXACT), min(float(held.max // n), EXACT)
    if pa.types.is_time(type_):
        return 0.0, float(_ONE_DAY // step_of(counted) - 1)
    if is_dated(type_):
        # a year there, and in UTC
        zones = {
            dt.UTC,
            (pa.scalar(0, counted).as_py().tzinfo if pa.types.is_timestamp(counted) else None)
            or dt.UTC,
        }
        low = max(
            low,
            *(
                float((dt.datetime.min.replace(tzinfo=zone) - EPOCH) // step_of(counted))
                for zone in zones
            ),
        )
        high = min(
            high,
            *(
                float((dt.datetime.max.replace(tzinfo=zone) - EPOCH) // step_of(counted))
                for zone in zones
            ),
        )
    return low, high


def say_limits(
    type_: pa.DataType, unit: Unit | None = None, most: float | None = None
) -> tuple[str, str]:
    """Return the limits of a column's numbers in words, and how to declare it beyond them, of which the public one that lies farthest from 0 may be known."""
    if pa.types.is_floating(type_):
        return "±2**1021, where differences overflow", "store it in a larger unit"
    counted = lattice_type(count_type(type_, unit))
    if pa.types.is_time(type_):
        return f"one day, in {tell_unit(counted)}", "count from midnight"
    low, high = find_limits(type_, unit)
    if is_dated(type_) and high < EXACT:
        return f"the years 1 to 9999 of {counted}", "correct the file's type"
    coarser = _find_unit(type_, unit, most)
    mend = f"declare `unit: {coarser}`, to which values are rounded down"
    if is_dated(type_):
        first, last = ((EPOCH + number * step_of(counted)).date() for number in (low, high))
        what = (
            f"{first + _ONE_DAY} to {last - _ONE_DAY}, the whole days that {type_} counts exactly"
        )
        return what, mend
    what = "±2**53, where whole numbers are no longer exact"
    if is_span(type_):
        mend += ", and in which bounds count"
        return f"{what} ({name_unit(counted)})", mend if coarser else "store it as whole days"
    if unit is not None:
        return f"what {type_} holds exactly in units of {unit}", mend
    if pa.types.is_decimal(type_):
        return f"±{high:,.{type_.scale}f}, up to which all digits of {type_} are exact", mend
    return what, f"{mend}, or list its values as levels"


def _find_unit(type_: pa.DataType, unit: Unit | None, most: float | None) -> str:
    """Return the least power of ten, or the next unit of time, in which all numbers of a column are exact, or one that is known; an empty text if none is."""
    if pa.types.is_temporal(type_):
        own = step_of(lattice_type(count_type(type_, unit)))
        times = {name: step_of(count_type(type_, name)) / own for name in ("ms", "s")}
        fit = (name for name, n in times.items() if n > 1.0 and (most or 0.0) <= n * EXACT)
        return next(fit, "")
    scale, limit, held = 0, int(EXACT), 2**64
    if pa.types.is_decimal(type_):
        scale, limit, held = type_.scale, EXACT_DIGITS, 10**type_.precision
    furthest = Decimal(held).scaleb(-scale)
    if most is not None:
        furthest = Decimal(most) * Decimal(str(unit or 1))
    found = Decimal(1).scaleb(-scale)
    while furthest > limit * found:
        found *= 10
    return f"{found.normalize():f}"
