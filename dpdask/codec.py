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
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.arrays import Flags, Floats, Int32s
from dpdask.conditions import Level
from dpdask.domains import Bound, read_text
from dpdask.errors import DataError
from dpdask.scales import (
    EPOCH,
    EXACT,
    EXACT_DIGITS,
    Unit,
    coarsen,
    comparable,
    count_type,
    find_digits,
    find_limits,
    float_type,
    is_dated,
    is_real,
    is_span,
    lattice_type,
    n_steps,
    refine,
    say_limits,
    step_of,
    tell_unit,
    whole_type,
)
from dpdask.schema import Column, Outside

Numbers = NDArray[np.integer] | Floats

_SMALL = 2**30
_DAY = 86_400_000  # milliseconds
_ONE_DAY = dt.timedelta(days=1)
_YEARS = 1500, 2500  # in days, 1974 to 1976


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCodec:
    """The codec of a discrete or categorical column: values <-> codes 0..n_levels-1."""

    has_levels: ClassVar[Literal[True]] = True
    bounds: ClassVar[None] = None
    unit: ClassVar[None] = None
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
        return comparable(array)  # Arrow selects none of its views

    def decode(self, codes: NDArray[np.integer]) -> pa.Array:
        """Return the values of `codes`, in the column's Arrow type."""
        first = self._first_of_run()
        if first is not None:
            values = np.add(codes, first, dtype=np.int64) if first else np.asarray(codes)
            return pa.array(values.astype(self.type.to_pandas_dtype()), type=self.type)
        if self.numbers is not None:
            return pa.array(self.numbers[codes])
        return comparable(self.own).take(pa.array(codes)).cast(self.type)

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
            return pc.index_in(comparable(array), value_set=comparable(self.own))
        known = pa.concat_arrays([self.own, self.below])
        codes = np.concatenate([np.arange(self.n_levels, dtype=np.int32), self.above])
        return pa.array(codes).take(pc.index_in(comparable(array), value_set=comparable(known)))


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
    # In which values are counted, rounded down, where it is coarser than the type: one that
    # `_check_unit` lets pass. Bounds and atoms are in it.
    unit: Unit | None = None

    @property
    def lattice(self) -> bool:
        """Whether values are whole numbers (integers, dates, times, units), so that a release must be whole too."""
        return not is_real(count_type(self.type, self.unit))

    @property
    def least(self) -> float:
        """The least number that the column's type can hold, a calendar has and float64 can compute with."""
        return find_limits(self.type, self.unit)[0]

    @property
    def greatest(self) -> float:
        """The greatest number that the column's type can hold, a calendar has and float64 can compute with."""
        return find_limits(self.type, self.unit)[1]

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
            values = np.clip(values, self.least, self.greatest)
            return _make_decimals(values, is_null, self.type, self.unit)
        if self.unit is not None and pa.types.is_integer(self.type):
            return pa.array(refine(values, self.type, self.unit), mask=is_null).cast(self.type)
        if not self.lattice:
            kind = float_type(self.type)
            most = float(np.finfo(kind).max)
            return pa.array(np.clip(values, -most, most).astype(kind), mask=is_null)
        counted = lattice_type(count_type(self.type, self.unit))
        return (
            pa.array(values.astype(np.int64), mask=is_null)
            .cast(whole_type(counted))
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
            what, mend = say_limits(self.type, self.unit)
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
        array = coarsen(array, self.unit)
        if not self.lattice:
            plain = comparable(array).cast(pa.float64())
            return np.asarray(plain.fill_null(0).to_numpy(zero_copy_only=False))
        if pa.types.is_date64(self.type):  # Arrow's cast to whole days overflows without an error
            milliseconds = np.asarray(
                array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            )
            days: Numbers = (milliseconds - np.fmod(milliseconds, _DAY)) // _DAY
            return days
        counted = lattice_type(array.type)
        # unsafe only because nanoseconds are cut to microseconds
        whole = array.cast(counted, safe=False).cast(whole_type(counted))
        return np.asarray(whole.fill_null(0).to_numpy(zero_copy_only=False))


def _make_decimals(
    values: Floats, is_null: Flags, type_: pa.DataType, unit: Unit | None
) -> pa.Array:
    """Return the nearest decimals of a type, or so many units; Arrow holds each in 128 bits, the low half first."""
    counted = np.rint(values * (10.0**type_.scale if unit is None else 1.0)).astype(np.int64)
    halves = np.stack([counted, counted >> 63], axis=1)
    wide = pa.decimal128(16, type_.scale if unit is None else find_digits(unit))
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
    above, n = column.ancestors, len(column.listed)
    told_by = above.find_levels(column.listed)
    others = [*told_by]
    if column.discovers:  # all of a taxonomy fits, before a search is paid for
        others, told_by = [*({*above.parents, *above.roots} - {*column.listed})], {}
    # together, since two values may become equal in the column's type
    known = _convert_type(
        name, (*column.listed, *others), pa.string() if column.encoding else type_
    )
    levels, below = known[:n], known[n:]
    codes = {level: code for code, level in enumerate(column.listed, column.nulls == "level")}
    if column.nulls == "level":
        levels = pa.concat_arrays([pa.nulls(1, levels.type), levels])
    encoded = None
    if column.encoding:
        encoded, below = (
            _write_texts(name, texts, column.encoding, type_) for texts in (levels, below)
        )
    instead = {"null": 0}
    if column.other is not None and not column.discovers:
        instead["other"] = codes[column.other]
    return LevelCodec(
        name=name,
        levels=levels,
        ordered=column.kind == "discrete",
        instead=instead.get(str(column.outside)),
        encoding=column.encoding or "",
        encoded=encoded,
        below=below if told_by else None,
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
    if column.unit is not None:
        _check_unit(name, type_, column.unit)
    bounds, nulls = column.bounds, column.nulls == "level"
    ends = None if bounds is None else convert_bounds(name, bounds, type_, column.unit)
    codec = ValueCodec(name=name, type=type_, bounds=ends, atoms=(), nulls=nulls, unit=column.unit)
    if ends is not None:
        ends = _narrow_bounds(codec, ends)
    atoms = np.zeros(0)
    if column.atoms is not None:
        declared = _convert_type(name, column.atoms, type_)
        atoms, is_null = codec.encode(declared)
        if column.unit is not None and not codec.decode(atoms, is_null).equals(declared):
            raise _refuse_multiples(name, "atoms", column.unit)
    assert column.outside is not None
    return replace(codec, bounds=ends, atoms=tuple(map(float, atoms)), outside=column.outside)


def _check_unit(name: str, type_: pa.DataType, unit: Unit) -> None:
    """Check that values of a type can be counted in a declared unit."""
    hint = "leave it out: whole numbers, decimals, times and durations have one"
    fits = False
    if pa.types.is_timestamp(type_) or is_span(type_):
        fits = isinstance(unit, str) and n_steps(type_, unit) > 0
        hint = "write ms or s, as long as it is no finer than the type"
    elif pa.types.is_integer(type_):
        fits = not isinstance(unit, str) and unit == int(unit) < EXACT and unit > 1
        hint = "write a whole number, such as 1000, that the type holds"
    elif pa.types.is_decimal(type_):
        power = None if isinstance(unit, str) else Decimal(str(unit)).normalize()
        fits = power is not None and power.as_tuple().digits == (1,)
        fits = fits and find_digits(unit) <= type_.scale
        hint = f"write a power of ten, such as 1 or 0.01, with at most {type_.scale} digits after the point, that the type holds"
    if not fits or find_limits(type_, unit)[1] < 1:  # then all values would be 0
        what = f"its unit {unit} does not fit its type {type_}"
        raise DataError(what, f"column {name!r}", hint)


def _refuse_multiples(name: str, what: str, unit: Unit) -> DataError:
    hint = f"write multiples of {unit}" if what == "atoms" else "round them outward"
    return DataError(f"its {what} are no multiples of its unit {unit}", f"column {name!r}", hint)


def _narrow_bounds(codec: ValueCodec, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return bounds as far as a type of few whole numbers reaches; values beyond what is exact would be clipped in silence, so those are refused."""
    low, high = codec.least, codec.greatest
    if pa.types.is_decimal(codec.type):
        high = EXACT_DIGITS / (10.0**codec.type.scale if codec.unit is None else 1.0)
        low = -high
    else:  # a type of few numbers, or of few units, narrows them
        counted = pa.int64() if pa.types.is_integer(codec.type) else codec.type
        low, high = find_limits(count_type(counted, codec.unit))
    if not (low <= bounds[0] and bounds[1] <= high):
        what, mend = say_limits(codec.type, codec.unit, max(map(abs, bounds)))
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
    name: str, bounds: tuple[Bound, Bound], type_: pa.DataType, unit: Unit | None = None
) -> tuple[float, float]:
    """Return declared bounds in the numbers that a codec counts in."""
    low, high = bounds
    if isinstance(low, dt.date) and isinstance(high, dt.date):
        counted = count_type(type_, unit if is_dated(type_) else None)
        return _count_since_1970(name, low, counted, last=False), _count_since_1970(
            name, high, counted, last=True
        )
    assert not isinstance(low, dt.date) and not isinstance(high, dt.date)  # noqa: PT018 - two of one kind, says the schema
    if is_dated(type_) and _YEARS[0] <= low and high <= _YEARS[1]:
        raise DataError(
            "its bounds look like years, but dates as numbers count from 1970",
            f"column {name!r}",
            "write dates, such as 2000-01-01",
        )
    if unit is not None and not isinstance(unit, str):
        return _count_units(name, low, unit), _count_units(name, high, unit)
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


def _count_units(name: str, bound: float, unit: Unit) -> float:
    """Return how many units a declared bound is: as the number that it is, or as it is written."""
    for number in (Fraction(bound), Fraction(str(bound))):
        count = number / Fraction(str(unit))
        if count.denominator == 1:  # beyond what is exact, one more is refused, too
            return float(count) if abs(count) <= EXACT else math.copysign(2 * EXACT, count)
    raise _refuse_multiples(name, "bounds", unit)


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
        return float((bound - EPOCH.date()).days)
    unit = step_of(lattice_type(type_))
    moment = bound if isinstance(bound, dt.datetime) else dt.datetime.combine(bound, dt.time())
    if moment.tzinfo is not None and type_.tz is None:
        raise DataError(
            f"its bound {bound} has a time zone, but its type {type_} has none",
            where,
            "write the bound without a zone",
        )
    steps, rest = divmod((moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)) - EPOCH, unit)
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
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError):
        raise wrong from None
    # 1e300 is infinite as a float32
    if pa.types.is_floating(type_) and not np.isfinite(typed.to_numpy()).all():
        raise wrong
    if len(comparable(typed).unique()) < len(typed):
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


def _plain(array: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    """Return `array` without a dictionary; it must then be of the column's type."""
    if pa.types.is_dictionary(array.type):
        # Arrow decodes no dictionary of its views
        array = comparable(array.dictionary).take(array.indices).cast(array.type.value_type)
    if array.type != type_:
        raise DataError(
            f"its type is {array.type}, but {type_} is expected",
            f"column {name!r}",
            "give every file the same type",
        )
    return array


def _refuse(name: str, what: str, hint: str) -> DataError:
    return DataError(f"holds {what}", f"column {name!r}", hint)
