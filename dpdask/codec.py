"""Conversion of values to level codes or to numbers on a line, and back, for one Arrow array at a time.

The domain comes from the schema, never from the data. The schema says how a value outside it is
treated: it is clipped, replaced by null or by another level, or refused with an error that does not
show the value.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.arrays import Flags, Floats, Int32s
from dpdask.conditions import Level
from dpdask.domains import Bound, read_text
from dpdask.errors import DataError
from dpdask.schema import Column, Outside

Numbers = NDArray[np.integer] | Floats

_EXACT = 2.0**53
_EXACT_DIGITS = 2**50  # counts of a decimal's last digit that come back from float64 as they were
_LARGEST = 2.0**1021
_SMALL = 2**30
_DAY = 86_400_000  # milliseconds
_ONE_DAY = dt.timedelta(days=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_YEARS = 1500, 2500  # in days, 1974 to 1976


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCodec:
    """The codec of a discrete or categorical column: values <-> codes 0..n_levels-1."""

    has_levels: ClassVar[Literal[True]] = True
    bounds: ClassVar[None] = None
    atoms: ClassVar[tuple[()]] = ()
    lattice: ClassVar[bool] = False
    name: str
    # The public levels in the column's own Arrow type, in the schema's order; when null is a level
    # it stands first.
    levels: pa.Array
    ordered: bool  # whether the order of the codes means anything
    # The code that replaces every value outside the levels: the code of null or of another level.
    # None: such values are refused.
    instead: int | None = None
    # Of a column of bytes that are texts: their encoding, and the levels as bytes of the column's
    # type. `levels` are the texts.
    encoding: str = ""
    encoded: pa.Array | None = None
    # Values that are no levels, in the column's own type, and the code of the level that stands for
    # each of them.
    below: pa.Array | None = None
    above: Int32s = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def type(self) -> pa.DataType:
        """The column's Arrow type."""
        return self.own.type

    @property
    def own(self) -> pa.Array:
        """The levels as values of the column's type."""
        return self.levels if self.encoded is None else self.encoded

    @property
    def nulls(self) -> bool:
        """Whether null is a level."""
        return bool(self.levels.null_count)

    @property
    def n_levels(self) -> int:
        """How many levels there are, null included."""
        return len(self.levels)

    @property
    def told(self) -> dict[str, Any]:
        """The `levels` as a card has them, the `encoding` of bytes, and the `taxonomy`: the level that stands for each value that is none."""
        told: dict[str, Any] = {"encoding": self.encoding} if self.encoding else {}
        levels = self.levels.to_pylist()
        if self.below is not None:
            texts = read_texts(self.below, self.encoding) if self.encoding else self.below
            told["taxonomy"] = [
                [value, levels[code]]
                for value, code in zip(texts.to_pylist(), self.above.tolist(), strict=True)
            ]
        return {"levels": levels, **told}

    def encode(self, array: pa.Array) -> Int32s:
        """Return the code of each value.

        Parameters
        ----------
        array
            The values, of the column's type or a dictionary of it.
        """
        array = _plain(array, self.name, self.type)
        run = self._in_run(array)
        if run is not None:
            return run
        codes = self._look_up(array)
        if codes.null_count:
            if array.null_count and not self.nulls:
                raise _refuse(self.name, "a null", "declare `nulls: level`, or fill it")
            if self.instead is None:
                raise _refuse(
                    self.name,
                    "a value outside its levels",
                    "add the level to the schema, or declare `other: <level>`",
                )
            codes = codes.fill_null(self.instead)
        return codes.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow is untyped

    def n_outside(self, array: pa.Array) -> int:
        """Return how many values `encode` changes because they are not among the levels; 0 if it refuses them."""
        if self.instead is None:
            return 0
        array = _plain(array, self.name, self.type)
        if self._in_run(array) is not None:
            return 0
        return int(self._look_up(array).null_count) - (0 if self.nulls else int(array.null_count))

    def read_keys(self, array: pa.Array) -> pa.Array:
        """Return the values, whatever the levels are, with null for what no schema has, dates that no calendar has and bytes that are no text: plain, or as a dictionary that is encoded already."""
        type_ = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        # a null may also stand in a dictionary, where it is not counted
        if type_ != self.type or (type_ != array.type and array.dictionary.null_count):
            array = _plain(array, self.name, self.type)
        if array.null_count and not self.nulls:
            raise _refuse(self.name, "a null", "declare `nulls: level`, or fill it")
        if self.encoding:
            return read_texts(array, self.encoding)
        if pa.types.is_date(type_):
            array = _plain(array, self.name, self.type)
            low, high = (pa.scalar(int(day), pa.int32()) for day in find_limits(type_))
            days = array.cast(pa.date32()).cast(pa.int32())
            listable = pc.and_(pc.greater_equal(days, low), pc.less_equal(days, high))
            return pc.if_else(listable, array, pa.scalar(None, type_))
        return _comparable(array)  # Arrow selects none of its views

    def decode(self, codes: NDArray[np.integer]) -> pa.Array:
        """Return the values of `codes`, in the column's Arrow type."""
        first = self._first_of_run()
        if first is not None:
            values = np.add(codes, first, dtype=np.int64) if first else np.asarray(codes)
            return pa.array(values.astype(self.type.to_pandas_dtype()), type=self.type)
        if self.numbers is not None:
            return pa.array(self.numbers[codes])
        return _comparable(self.own).take(pa.array(codes)).cast(self.type)

    @property
    def numbers(self) -> NDArray[np.floating] | None:
        """The levels if they are floats without null, else None; one zero instead of 0.0 and -0.0."""
        if self.type not in (pa.float32(), pa.float64()) or self.nulls:
            return None
        found: NDArray[np.floating] = self.levels.to_numpy() + self.type.to_pandas_dtype()(0)
        return found

    def _first_of_run(self) -> int | None:
        """Return the first level if the levels are neighbouring whole numbers, in order, without null: then no value is looked up."""
        if not pa.types.is_integer(self.type) or self.nulls:
            return None
        first = int(self.levels[0].as_py())
        if first > np.iinfo(np.int64).max - len(self.levels):  # differences are computed in int64
            return None
        return (
            first
            if self.levels.to_pylist() == list(range(first, first + len(self.levels)))
            else None
        )

    def _in_run(self, array: pa.Array) -> Int32s | None:
        """Return the codes of whole numbers, as differences from the first level, if levels are consecutive and contain them all; else None."""
        first = self._first_of_run()
        if first is None or array.null_count:
            return None
        values = np.asarray(array.to_numpy(zero_copy_only=False))
        if len(values) and not (
            first <= int(values.min()) and int(values.max()) < first + len(self.levels)
        ):
            return None
        return (
            (values.astype(np.int64) - first).astype(np.int32)
            if abs(first) > _SMALL
            else values.astype(np.int32) - np.int32(first)
        )

    def _look_up(self, array: pa.Array) -> pa.Array:
        """Return the codes of any values, null for a value for which no level stands."""
        if self.below is None:
            return pc.index_in(_comparable(array), value_set=_comparable(self.own))
        known = pa.concat_arrays([self.own, self.below])
        codes = np.concatenate([np.arange(self.n_levels, dtype=np.int32), self.above])
        return pa.array(codes).take(pc.index_in(_comparable(array), value_set=_comparable(known)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCodec:
    """The codec of a continuous or mixed column: values <-> float64 numbers and a null mask."""

    has_levels: ClassVar[Literal[False]] = False
    ordered: ClassVar[bool] = True
    name: str
    # The column's Arrow type. Dates become days since 1970, times their own unit since 1970;
    # nanoseconds are cut to microseconds, which float64 still counts exactly. Decimals become the
    # nearest float64, and a release has the nearest decimals of the type.
    type: pa.DataType
    bounds: tuple[float, float] | None
    # The declared atoms, in numbers, increasing; empty for a continuous column.
    atoms: tuple[float, ...]
    nulls: bool
    # How a number outside the domain is treated, as in `Column`. The domain is the bounds, which
    # are no wider than the numbers that float64 holds exactly (whole numbers up to 2**53; dates and
    # times of the years 1 to 9999) or without overflow (other numbers up to 2**1021).
    outside: Outside = "refuse"

    @property
    def lattice(self) -> bool:
        """Whether values are whole numbers (integers, dates, times), so that a release must be whole too."""
        return not is_real(self.type)

    @property
    def least(self) -> float:
        """The least number that the column's type can hold, a calendar has and float64 can compute with."""
        return find_limits(self.type)[0]

    @property
    def greatest(self) -> float:
        """The greatest number that the column's type can hold, a calendar has and float64 can compute with."""
        return find_limits(self.type)[1]

    def encode(self, array: pa.Array) -> tuple[Floats, Flags]:
        """Return each value as a number, and where it is null."""
        array = _plain(array, self.name, self.type)
        if array.null_count and not self.nulls:
            raise _refuse(self.name, "a null", "declare `nulls: level`, or fill it")
        is_null = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
        found = self._numbers(array)
        if self.outside == "refuse":
            self._check(found, is_null)
        else:
            inside = self._clip(found)
            missing = np.isnan(inside)
            if self.outside == "null":
                missing = (inside != found) | missing
            elif not self.nulls and (missing & ~is_null).any():
                raise _refuse(self.name, "NaN", "declare `nulls: level`, or fill it")
            found, is_null = inside, is_null | missing
        return np.where(is_null, 0.0, found.astype(np.float64)), is_null

    def n_outside(self, array: pa.Array) -> int:
        """Return how many values `encode` changes because they are outside the domain, NaN included; 0 if it refuses them."""
        if self.outside == "refuse":
            return 0
        array = _plain(array, self.name, self.type)
        found = self._numbers(array)
        changed = self._clip(found) != found  # NaN differs from itself
        return int((changed & ~np.asarray(array.is_null().to_numpy(zero_copy_only=False))).sum())

    def decode(self, values: Floats, is_null: Flags) -> pa.Array:
        """Return numbers (whole ones for a lattice column) as the column's Arrow type, null where `is_null`."""
        values = np.where(is_null, 0.0, values)  # Arrow keeps the values of nulls
        if pa.types.is_decimal(self.type):
            return _make_decimals(np.clip(values, self.least, self.greatest), is_null, self.type)
        if not self.lattice:
            kind = float_type(self.type)
            most = float(np.finfo(kind).max)
            return pa.array(np.clip(values, -most, most).astype(kind), mask=is_null)
        counted = _count(self.type)
        return (
            pa.array(values.astype(np.int64), mask=is_null)
            .cast(_whole(counted))
            .cast(counted)
            .cast(self.type)
        )

    def _check(self, found: Numbers, is_null: Flags) -> None:
        """Refuse numbers outside the domain."""
        # Python compares whole numbers with floats exactly
        low, high = (found.min().item(), found.max().item()) if len(found) else (0, 0)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise _refuse(self.name, "NaN or an infinity", "store a missing value as null")
        if low < self.least or high > self.greatest:
            what, mend = _say_limits(self.type)
            raise _refuse(
                self.name,
                f"a value beyond {what}",
                f"{mend}, or declare {'bounds' if self.bounds is None else '`outside: clip`'}",
            )
        if self.bounds is not None and bool(
            (((found < self.bounds[0]) | (found > self.bounds[1])) & ~is_null).any()
        ):
            raise _refuse(
                self.name,
                "a value outside its bounds",
                "widen the schema's bounds, or declare `outside: clip`",
            )

    def _clip(self, found: Numbers) -> Numbers:
        """Return the nearest numbers in the domain, with the same dtype; NaN stays NaN."""
        low, high = self.bounds or (self.least, self.greatest)
        if self.lattice:
            # with float limits, np.clip would turn whole numbers into floats
            low, high = int(low), int(high)
        inside: NDArray[Any] = np.clip(found, low, high)
        return inside

    def _numbers(self, array: pa.Array) -> Numbers:
        """Return the exact values, 0 where null: whole numbers for a lattice, because float64 may not hold them; else float64."""
        if not self.lattice:
            plain = _comparable(array).cast(pa.float64())
            return np.asarray(plain.fill_null(0).to_numpy(zero_copy_only=False))
        if pa.types.is_date64(self.type):  # Arrow's cast to whole days overflows without an error
            milliseconds = np.asarray(
                array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            )
            days: Numbers = (milliseconds - np.fmod(milliseconds, _DAY)) // _DAY
            return days
        counted = _count(self.type)
        # unsafe only because nanoseconds are cut to microseconds
        whole = array.cast(counted, safe=False).cast(_whole(counted))
        return np.asarray(whole.fill_null(0).to_numpy(zero_copy_only=False))


def is_real(type_: pa.DataType) -> bool:
    """Return whether a type's values are numbers with a fraction: floats and decimals."""
    return bool(pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def is_dated(type_: pa.DataType) -> bool:
    """Return whether a type's values are dates, or times of a date: they count from 1970."""
    return bool(pa.types.is_date(type_) or pa.types.is_timestamp(type_))


def is_span(type_: pa.DataType) -> bool:
    """Return whether a type's values are times of a day, or durations: they count from 0."""
    return bool(pa.types.is_time(type_) or pa.types.is_duration(type_))


def count_spans(array: pa.Array) -> Floats:
    """Return times of a day or durations as numbers of their unit, missing ones as NaN."""
    counted = _count(array.type)
    whole = array.cast(counted, safe=False).cast(_whole(counted))
    found: Floats = whole.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def float_type(type_: pa.DataType) -> Any:
    """Return the NumPy type of the numbers of a column that is no lattice: decimals are read as float64."""
    return np.float64 if pa.types.is_decimal(type_) else type_.to_pandas_dtype()


def _make_decimals(values: Floats, is_null: Flags, type_: pa.DataType) -> pa.Array:
    """Return the nearest decimals of a type; Arrow holds each in 128 bits, the low half first."""
    counted = np.rint(values * 10.0**type_.scale).astype(np.int64)
    halves = np.stack([counted, counted >> 63], axis=1)
    wide = pa.decimal128(38, type_.scale)
    data = pa.Array.from_buffers(wide, len(values), [None, pa.py_buffer(halves.tobytes())])
    return pc.if_else(pa.array(~is_null), data, pa.scalar(None, wide)).cast(type_)


Codec = LevelCodec | ValueCodec
"""Both have a name, type, nulls, bounds, atoms, lattice and order; `has_levels` tells them apart."""
Codecs = Mapping[str, Codec]  # of each privatised column


def codec_for(name: str, column: Column, type_: pa.DataType) -> Codec:
    """Return the codec of one privatised column."""
    if pa.types.is_timestamp(type_):
        _check_zone(name, type_)
    if is_bytes(type_) and column.encoding is None:
        what = f"its type is {type_}, and the schema does not say which texts these bytes are"
        hint = "declare `encoding: utf-8` and texts as levels, or keep or drop it"
        raise DataError(what, f"column {name!r}", hint)
    if column.encoding is not None and not is_bytes(type_):
        what = f"an encoding is declared, and its type {type_} does not hold bytes"
        raise DataError(what, f"column {name!r}", "remove `encoding`, or correct the file's type")
    return (
        _level_codec(name, column, type_)
        if column.has_levels
        else _value_codec(name, column, type_)
    )


def _check_zone(name: str, type_: pa.DataType) -> None:
    """Check that times of a type have values in Python, which limits and labels are made of; a kept column is only copied."""
    try:
        pa.scalar(0, type_).as_py()
    except (pa.ArrowException, LookupError, ValueError):
        hint = (
            "store the column with a known zone, such as UTC or Europe/Zurich, or keep or drop it"
        )
        raise DataError(f"its time zone is not known: {type_}", f"column {name!r}", hint) from None


def _level_codec(name: str, column: Column, type_: pa.DataType) -> LevelCodec:
    told_by = {} if column.discovers else column.ancestors.find_levels(column.listed)
    typed = pa.string() if column.encoding else type_
    # together, since two values may become equal in the column's type
    known = _convert_type(name, (*column.listed, *told_by), typed)
    levels, below = known[: len(column.listed)], known[len(column.listed) :]
    codes = {level: n for n, level in enumerate(column.listed, column.nulls == "level")}
    if column.nulls == "level":
        levels = pa.concat_arrays([pa.nulls(1, levels.type), levels])
    instead = {"null": 0}
    if column.other is not None and not column.discovers:
        instead["other"] = codes[column.other]
    write = partial(_write_texts, name, encoding=column.encoding or "", type_=type_)
    return LevelCodec(
        name=name,
        levels=levels,
        ordered=column.kind == "discrete",
        instead=instead.get(str(column.outside)),
        encoding=column.encoding or "",
        encoded=write(levels) if column.encoding else None,
        below=(write(below) if column.encoding else below) if told_by else None,
        above=np.array([codes[level] for level in told_by.values()], dtype=np.int32),
    )


def _write_texts(name: str, texts: pa.Array, encoding: str, type_: pa.DataType) -> pa.Array:
    """Return texts as bytes of a type."""
    try:
        return pa.array([text and text.encode(encoding) for text in texts.to_pylist()], type_)
    except pa.ArrowInvalid:
        what = f"a level does not have the {type_.byte_width} bytes of its type {type_}"
        hint = 'fill it up as the file does, with spaces or, as in "a\\0", with zeros'
        raise DataError(what, f"column {name!r}", hint) from None


def read_texts(array: pa.Array, encoding: str) -> pa.Array:
    """Return the texts that bytes are; null for bytes that are none."""
    found = array
    if not pa.types.is_dictionary(array.type):
        found = array.cast(pa.large_binary()).dictionary_encode()
    texts = [read_text(value, encoding) for value in found.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(found.indices)


def _value_codec(name: str, column: Column, type_: pa.DataType) -> ValueCodec:
    if not (pa.types.is_integer(type_) or is_real(type_) or is_dated(type_) or is_span(type_)):
        what = f"a {column.kind} column holds numbers, dates, times or durations, but this one is {type_}"
        raise DataError(what, f"column {name!r}", "correct its kind, or the file's type")
    bounds = None if column.bounds is None else convert_bounds(name, column.bounds, type_)
    codec = ValueCodec(
        name=name, type=type_, bounds=bounds, atoms=(), nulls=column.nulls == "level"
    )
    if bounds is not None:
        bounds = _narrow_bounds(codec, bounds)
    atoms = (
        ()
        if column.atoms is None
        else tuple(map(float, codec.encode(_convert_type(name, column.atoms, type_))[0]))
    )
    assert column.outside is not None
    return replace(codec, bounds=bounds, atoms=atoms, outside=column.outside)


def _narrow_bounds(codec: ValueCodec, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return bounds as far as a type of few whole numbers reaches; values beyond what is exact would be clipped in silence, so those are refused."""
    low, high = codec.least, codec.greatest
    if pa.types.is_integer(codec.type):
        low, high = -_EXACT, _EXACT
    elif pa.types.is_decimal(codec.type):
        high = _EXACT_DIGITS / 10.0**codec.type.scale
        low = -high
    if not (low <= bounds[0] and bounds[1] <= high):
        what, mend = _say_limits(codec.type, max(map(abs, bounds)))
        raise DataError(
            f"its bounds reach beyond {what}",
            f"column {codec.name!r}",
            f"narrow the bounds, or {mend}",
        )
    narrow = max(bounds[0], codec.least), min(bounds[1], codec.greatest)
    if narrow[0] > narrow[1]:
        what = f"no value of its type {codec.type} is between its bounds"
        raise DataError(what, f"column {codec.name!r}", "correct the bounds, or the file's type")
    return narrow


def convert_bounds(
    name: str, bounds: tuple[Bound, Bound], type_: pa.DataType
) -> tuple[float, float]:
    """Return declared bounds in the numbers that a codec counts in."""
    low, high = bounds
    if isinstance(low, dt.date) and isinstance(high, dt.date):
        return _count_since_1970(name, low, type_, last=False), _count_since_1970(
            name, high, type_, last=True
        )
    assert not isinstance(low, dt.date) and not isinstance(high, dt.date)  # noqa: PT018 - two of one kind, says the schema
    if is_dated(type_) and _YEARS[0] <= low and high <= _YEARS[1]:
        raise DataError(
            "its bounds look like years, but dates as numbers count from 1970",
            f"column {name!r}",
            "write dates, such as 2000-01-01",
        )
    if pa.types.is_floating(type_):
        # a rule may name one number, as both ends
        found = _convert_type(name, tuple(dict.fromkeys((low, high))), type_).cast(pa.float64())
        low, high = found[0].as_py(), found[-1].as_py()
    elif pa.types.is_decimal(type_):
        digits = (Decimal(str(bound)).normalize().as_tuple().exponent for bound in (low, high))
        if any(int(exponent) < -type_.scale for exponent in digits):
            what = f"its bounds have more digits after the point than its type {type_}"
            raise DataError(what, f"column {name!r}", "round them outward")
    elif (low, high) != (round(low), round(high)):
        raise DataError(
            "the bounds of a column of whole numbers must be whole",
            f"column {name!r}",
            "round them outward",
        )
    return low, high


def _count_since_1970(name: str, bound: dt.date, type_: pa.DataType, *, last: bool) -> float:
    """Return a date or a time in the steps of a column's type; a date, as a time, is its first moment, or its last one."""
    where = f"column {name!r}"
    if not is_dated(type_):
        counted = f" of {tell_unit(type_)}" if is_span(type_) else ""
        raise DataError(
            f"its bounds are dates, but its type is {type_}",
            where,
            f"write numbers{counted}, or correct the file's type",
        )
    if pa.types.is_date(type_):
        if isinstance(bound, dt.datetime):
            raise DataError(
                f"its bound {bound} is a time, but its type is {type_}",
                where,
                f"write the date {bound.date()}",
            )
        return float((bound - _EPOCH.date()).days)
    unit = _step(_count(type_))
    moment = bound if isinstance(bound, dt.datetime) else dt.datetime.combine(bound, dt.time())
    if moment.tzinfo is not None and type_.tz is None:
        raise DataError(
            f"its bound {bound} has a time zone, but its type {type_} has none",
            where,
            "write the bound without a zone",
        )
    steps, rest = divmod(
        (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)) - _EPOCH, unit
    )
    if rest:
        raise DataError(
            f"its bound {bound} is finer than its type {type_}", where, "round it outward"
        )
    return float(
        steps + (_ONE_DAY // unit - 1 if last and not isinstance(bound, dt.datetime) else 0)
    )


def is_text(type_: pa.DataType) -> bool:
    """Return whether a type holds texts."""
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(type_) for check in checks)


def is_bytes(type_: pa.DataType) -> bool:
    """Return whether a type holds bytes, which may be texts."""
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(type_) for check in (*checks, pa.types.is_fixed_size_binary))


def _convert_type(name: str, levels: tuple[Level, ...], type_: pa.DataType) -> pa.Array:
    """Return declared values in a column's own type; rounding (as of 0.1 to float32) is no error."""
    fits = {
        "text": is_text(type_),
        "truth": pa.types.is_boolean(type_),
        "time": is_dated(type_),
        "number": pa.types.is_integer(type_)
        or pa.types.is_floating(type_)
        or pa.types.is_decimal(type_),
    }
    kind = _kind_of(levels[0])
    wanted = next((each for each, is_wanted in fits.items() if is_wanted), "")
    mend = _mend_quotes(levels, wanted) if wanted != kind else "correct the schema, or"
    wrong = DataError(
        f"its declared values do not fit its type {type_}",
        f"column {name!r}",
        f"{mend} the file's type",
    )
    if wanted != kind:
        raise wrong
    try:
        typed = _numbers_typed(levels, type_) if kind == "number" else pa.array(levels).cast(type_)
        typed.to_pylist()  # the last day of the year 9999 in UTC may be one of 10,000 in a zone
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        raise wrong from None
    # 1e300 is infinite as a float32
    if pa.types.is_floating(type_) and not np.isfinite(typed.to_numpy()).all():
        raise wrong
    if len(_comparable(typed).unique()) < len(typed):
        raise DataError(
            f"two of its declared values become equal when stored as {type_}",
            f"column {name!r}",
            "make them differ by more",
        )
    return typed


def _kind_of(level: Level) -> str:
    return (
        "text"
        if isinstance(level, str)
        else "truth"
        if isinstance(level, bool)
        else "time"
        if isinstance(level, dt.date)
        else "number"
    )


def _mend_quotes(levels: tuple[Level, ...], wanted: str) -> str:
    """Return how levels of another kind are corrected, as a hint begins: many differ from those that are wanted by quotes alone."""
    if wanted == "text":
        return "put them in quotes, or correct"
    forms = {
        "truth": "(?i)true|false",
        "number": r"[-+]?[\d.]+(e[-+]?\d+)?",
        "time": r"\d{4}-\d\d-\d\d",
    }
    texts = all(
        isinstance(level, str) and re.fullmatch(forms.get(wanted, "$."), level) for level in levels
    )
    # codes such as 01 are no numbers
    if texts and any(re.match(r"[-+]?0\d", str(level)) for level in levels):
        return "declare `type: string` if the file is CSV, or correct"
    return "write them without quotes, or correct" if texts else "correct the schema, or"


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
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    if pa.types.is_decimal(array.type) and array.type.bit_width < 128:
        return array.cast(pa.decimal128(array.type.precision, array.type.scale))
    return array


@lru_cache(maxsize=128)  # for the few types of a table, asked for each batch
def find_limits(type_: pa.DataType) -> tuple[float, float]:
    """Return the least and the greatest number of a column that its type holds, float64 counts exactly, and a calendar has."""
    if pa.types.is_floating(type_):
        return -_LARGEST, _LARGEST
    if pa.types.is_decimal(type_):
        most = min(10**type_.precision - 1, _EXACT_DIGITS) / 10.0**type_.scale
        return -most, most
    counted = _count(type_)
    held = np.iinfo(_whole(counted).to_pandas_dtype())
    low, high = max(float(held.min), -_EXACT), min(float(held.max), _EXACT)
    if pa.types.is_time(type_):
        return 0.0, float(_ONE_DAY // _step(counted) - 1)
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
                float((dt.datetime.min.replace(tzinfo=zone) - _EPOCH) // _step(counted))
                for zone in zones
            ),
        )
        high = min(
            high,
            *(
                float((dt.datetime.max.replace(tzinfo=zone) - _EPOCH) // _step(counted))
                for zone in zones
            ),
        )
    return low, high


def _step(counted: pa.DataType) -> dt.timedelta:
    """Return how long one step of a lattice of dates, times or durations is."""
    return (
        dt.timedelta(microseconds={"s": 1_000_000, "ms": 1_000, "us": 1}[counted.unit])
        if not pa.types.is_date(counted)
        else _ONE_DAY
    )


def name_unit(type_: pa.DataType) -> str:
    """Return the unit in which a column of dates, times or durations is counted."""
    counted = _count(type_)
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


def _say_limits(type_: pa.DataType, most: float = 0.0) -> tuple[str, str]:
    """Return the limits of a type in words, and how to store numbers beyond them, of which the public one that lies farthest from 0 may be known."""
    if pa.types.is_floating(type_):
        return "±2**1021, where differences overflow", "store it in a larger unit"
    if pa.types.is_decimal(type_):
        digits = math.floor(math.log10(_EXACT_DIGITS / most)) if most else max(type_.scale - 1, 0)
        mend = "with fewer digits after the point" if most <= 0 else f"as decimal128(16, {digits})"
        limit = f"±{find_limits(type_)[1]:,.{max(type_.scale, 0)}f}"
        return (
            f"{limit}, up to which all digits of {type_} are exact",
            f"store it {mend if 0 <= digits < type_.scale else 'in a larger unit'}",
        )
    if pa.types.is_time(type_):
        return f"one day, in {tell_unit(type_)}", "count from midnight"
    if is_dated(type_):
        low, high = find_limits(type_)
        if high < _EXACT:
            return f"the years 1 to 9999 of {type_}", "correct the file's type"
        first, last = ((_EPOCH + number * _step(_count(type_))).date() for number in (low, high))
        return (
            f"{first + _ONE_DAY} to {last - _ONE_DAY}, the whole days that {type_} counts exactly",
            "store it as timestamp[ms]",
        )
    what = "±2**53, where whole numbers are no longer exact"
    if is_span(type_):
        coarser = {"ns": "duration[ms]", "us": "duration[ms]", "ms": "duration[s]"}.get(type_.unit)
        return f"{what} ({name_unit(type_)})", f"store it as {coarser or 'whole days'}"
    return (
        what,
        "list its values as levels, or store it in a larger unit (times: microseconds in place of nanoseconds)",
    )


def _count(type_: pa.DataType) -> pa.DataType:
    """Return the type whose steps are the lattice of a column: whole days for dates, microseconds for nanoseconds."""
    if pa.types.is_date(type_):
        return pa.date32()
    if getattr(type_, "unit", "") != "ns":
        return type_
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", tz=type_.tz)
    return pa.time64("us") if pa.types.is_time(type_) else pa.duration("us")


def _whole(counted: pa.DataType) -> pa.DataType:
    """Return the integer type that Arrow casts a counted type from and to."""
    return (
        counted
        if pa.types.is_integer(counted)
        else pa.int32()
        if counted.bit_width == 32
        else pa.int64()
    )


def _plain(array: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    """Return `array` without a dictionary; it must then be of the column's type."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type != type_:
        raise DataError(
            f"its type is {array.type}, but {type_} is expected",
            f"column {name!r}",
            "give every file the same type",
        )
    return array


def _refuse(name: str, what: str, hint: str) -> DataError:
    return DataError(f"holds {what}", f"column {name!r}", hint)
