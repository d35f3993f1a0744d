"""Hypothesis strategies: random mixed schemas with tables that they accept, and what each column must refuse; and a column with a tail."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from dpdask.codec import LevelCodec, ValueCodec
from dpdask.schema import Schema

EXACT = 2**53

INTEGERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DECIMALS = [pa.decimal32(7, 2), pa.decimal64(12, 2), pa.decimal128(20, 2), pa.decimal256(50, 2)]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
TIMES = [
    pa.date32(),
    pa.date64(),
    *(
        pa.timestamp(unit, tz=tz)
        for unit, tz in [
            ("s", None),
            ("ms", "UTC"),
            ("us", "Europe/Amsterdam"),
            ("us", None),
            ("ns", None),
            ("ns", "UTC"),
        ]
    ),
]
SPANS = [pa.time32("s"), pa.time64("us"), pa.time64("ns"), pa.duration("ms"), pa.duration("ns")]
NUMBERS = [*INTEGERS, *FLOATS, *DECIMALS]
LEVEL_TYPES = [*NUMBERS, *TEXTS, *TIMES, pa.bool_()]
VALUE_TYPES = [*INTEGERS, *FLOATS, *DECIMALS, *TIMES, *SPANS]


@dataclass(frozen=True, kw_only=True)
class ColumnCase:
    """A declared column, an array that it accepts, the numbers that the codec must find, and arrays that it must refuse."""

    declared: dict[str, Any]
    array: pa.Array
    expected: list[float | int | None]
    refused: list[pa.Array]

    @property
    def type(self):
        return (
            self.array.type.value_type
            if pa.types.is_dictionary(self.array.type)
            else self.array.type
        )


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """A schema and a table that it accepts; `columns` are the privatised ones."""

    schema: Schema
    table: pa.Table
    columns: dict[str, ColumnCase]


def as_array(values, type_):
    """Return Python numbers, texts, dates or truths (None is null) as an Arrow array; whole numbers become times by their own unit."""
    if pa.types.is_decimal(type_):
        return pa.array(
            [None if value is None else Decimal(str(value)) for value in values], type=type_
        )
    if pa.types.is_floating(type_):
        return pa.array(values, type=pa.float64()).cast(type_)
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        days = all(value is None or isinstance(value, dt.date) for value in values)
        whole = (
            pa.array(values, type=pa.date32())
            if days
            else pa.array(values, type=pa.int32() if pa.types.is_date(type_) else pa.int64())
        )
        return (whole.cast(pa.date32()) if pa.types.is_date(type_) else whole).cast(type_)
    if type_ in SPANS:
        return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).cast(type_)
    if pa.types.is_dictionary(type_):
        return as_array(values, type_.value_type).dictionary_encode()
    return pa.array(values, type=type_)


def _level_values(type_):
    if pa.types.is_boolean(type_):
        return st.booleans()
    if type_ in TEXTS:
        return st.text(max_size=4)
    if type_ in TIMES:
        return st.dates(dt.date(1900, 1, 1), dt.date(2100, 1, 1))
    if pa.types.is_integer(type_):
        return st.integers(0 if pa.types.is_unsigned_integer(type_) else -120, 120)
    return st.integers(-200, 200).map(lambda quarters: quarters / 4)


def _not_null_refusals(values, type_, nulls):
    wrong = pa.int16() if type_ != pa.int16() else pa.string()
    refused = [pa.nulls(2, wrong), pa.array([b"wrong"]), pa.array([b"wrong"]).dictionary_encode()]
    return refused if nulls == "level" else [*refused, as_array([*values, None], type_)]


@st.composite
def level_columns(draw, n_rows):
    """Draw a discrete or categorical column."""
    type_ = draw(st.sampled_from(LEVEL_TYPES))
    levels = draw(st.lists(_level_values(type_), min_size=1, max_size=6, unique=True))
    sortable = not (type_ in TEXTS or pa.types.is_boolean(type_))
    kind = draw(st.sampled_from(["discrete", "categorical"])) if sortable else "categorical"
    levels = sorted(levels) if kind == "discrete" else levels
    nulls = draw(st.sampled_from(["refuse", "level"]))
    values = draw(
        st.lists(
            st.sampled_from([*levels, None] if nulls == "level" else levels),
            min_size=n_rows,
            max_size=n_rows,
        )
    )
    array = as_array(values, type_)
    if type_ in (pa.string(), pa.large_string(), pa.int64(), pa.date32()) and draw(st.booleans()):
        array = array.dictionary_encode()
    coded = ([None] if nulls == "level" else []) + levels
    refused = _not_null_refusals(values, type_, nulls)
    strange = (
        draw(_level_values(type_).filter(lambda value: value not in levels))
        if type_ != pa.bool_() or len(levels) == 1
        else None
    )
    if strange is not None:
        refused.append(as_array([*values, strange], type_))
    if pa.types.is_floating(type_):
        refused += [
            as_array([*values, bad], type_) for bad in (float("nan"), float("inf"), float("-inf"))
        ]
    declared = {"role": "privatise", "kind": kind, "levels": levels, "nulls": nulls}
    return ColumnCase(
        declared=declared,
        array=array,
        expected=[coded.index(value) for value in values],
        refused=refused,
    )


def _range(type_):
    """Return whole numbers, well inside the type, that a column may take; of a time, in its own unit (of ns: microseconds)."""
    if pa.types.is_integer(type_):
        low, high = (
            (0, 2**type_.bit_width - 1)
            if pa.types.is_unsigned_integer(type_)
            else (-(2 ** (type_.bit_width - 1)), 2 ** (type_.bit_width - 1) - 1)
        )
        return max(low, -EXACT), min(high, EXACT)
    if pa.types.is_date(type_):
        return -40_000, 40_000
    if pa.types.is_time(type_):
        return 0, 86_400 * 10 ** {"s": 0, "us": 6, "ns": 6}[type_.unit] - 1
    return (-1000, 1000) if type_ in FLOATS + DECIMALS else (-(10**10), 10**10)


def _as_stored(values, type_):
    nanoseconds = getattr(type_, "unit", "") == "ns"
    return as_array(
        [value * 1000 if nanoseconds and value is not None else value for value in values], type_
    )


@st.composite
def value_columns(draw, n_rows):
    """Draw a continuous or mixed column."""
    type_ = draw(st.sampled_from(VALUE_TYPES))
    low, high = _range(type_)
    bounds = draw(
        st.none()
        | st.lists(st.integers(low, high), min_size=2, max_size=2, unique=True).map(sorted)
    )
    inside = st.integers(*(bounds or (low, high)))
    inside = (
        inside.map(lambda whole: max(bounds[0], whole - 0.5) if bounds else whole / 4)
        if type_ in FLOATS + DECIMALS
        else inside
    )
    nulls = draw(st.sampled_from(["refuse", "level"]))
    values = draw(
        st.lists(
            inside | st.none() if nulls == "level" else inside, min_size=n_rows, max_size=n_rows
        )
    )
    array = _as_stored(values, type_)
    refused = [*_not_null_refusals([], type_, nulls)]
    if pa.types.is_floating(type_):
        refused += [as_array([bad], type_) for bad in (float("nan"), float("inf"), float("-inf"))]
    elif type_ in DECIMALS[2:]:
        refused += [as_array([Decimal(2**50 + 1).scaleb(-type_.scale)], type_)]
    elif type_.bit_width == 64 and type_ not in DECIMALS and not pa.types.is_date(type_):
        refused += [_as_stored([EXACT + 1], type_)]
    if bounds and bounds[0] > low:
        refused.append(_as_stored([bounds[0] - 1], type_))
    if bounds and bounds[1] < high:
        refused.append(_as_stored([bounds[1] + 1], type_))
    declared = {
        "role": "privatise",
        "kind": "continuous",
        "bounds": bounds,
        "nulls": nulls,
        "outside": "refuse",
    }
    if type_ in NUMBERS and draw(st.booleans()):
        declared |= {
            "kind": "mixed",
            "atoms": sorted(set(draw(st.lists(inside, min_size=1, max_size=3)))),
        }
    return ColumnCase(declared=declared, array=array, expected=values, refused=refused)


@st.composite
def mixed_tables(draw, max_columns=4, max_rows=8):
    """Draw a schema of privatised, kept and dropped columns, and a table that it accepts, in any order of columns."""
    n_rows = draw(st.integers(0, max_rows))
    drawn = draw(
        st.lists(level_columns(n_rows) | value_columns(n_rows), min_size=1, max_size=max_columns)
    )
    columns = {f"private{i}": case for i, case in enumerate(drawn)}
    arrays = {name: case.array for name, case in columns.items()} | {
        "kept": pa.array(range(n_rows), pa.int64()),
        "dropped": pa.nulls(n_rows),
    }
    order = draw(st.permutations(list(arrays)))
    declared = {name: case.declared for name, case in columns.items()} | {
        "kept": {"role": "keep"},
        "dropped": {"role": "drop"},
    }
    return TableCase(
        schema=Schema.from_dict({"columns": declared}),
        table=pa.table({name: arrays[name] for name in order}),
        columns=columns,
    )


def randomise(codes, matrix, rng):
    """Return released codes by inversion of each row's cumulative probabilities."""
    return (rng.random(len(codes))[:, None] > matrix.cumsum(axis=1)[codes, :-1]).sum(axis=1)


def zeros_and_a_tail(seed, n_rows=50_000, share=0.96):
    """Return whole numbers: that share of them 0, the rest log-normal up to 100,000."""
    rng = np.random.default_rng(seed)
    return np.where(
        rng.random(n_rows) < share, 0.0, np.round(rng.lognormal(8.6, 1.1, n_rows))
    ).clip(0.0, 1e5)


def value_codec(name: str = "v", type_: pa.DataType = FLOATS[-1], **changes: Any) -> ValueCodec:
    """Return a codec of numbers from 0 to 10."""
    usual: dict[str, Any] = {"bounds": (0.0, 10.0), "atoms": (), "nulls": False}
    return ValueCodec(name=name, type=type_, **{**usual, **changes})


def level_codec(levels: Any, name: str = "v", *, ordered: bool = True) -> LevelCodec:
    """Return a codec of levels."""
    return LevelCodec(name=name, levels=pa.array(levels), ordered=ordered)


def random_words(rng: np.random.Generator, *shape: int) -> Any:
    """Return uniform 64-bit words."""
    return rng.integers(0, 2**64, shape, dtype=np.uint64)
