"""What the schema lets become of values outside a column's domain: at construction, and in the codec."""

import datetime as dt
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import categorical, continuous
from hypothesis import given
from hypothesis import strategies as st

from dpdask import Schema
from dpdask.codec import codec_for
from dpdask.errors import DataError, SpecError
from dpdask.schema import Column

NUMBER = continuous()
BOUNDED = {**NUMBER, "bounds": [0, 10]}
LEVELS = categorical(["a", "b", "rest"])
NAN, INF = float("nan"), float("inf")


def column(**declared):
    return Schema.from_dict({"columns": {"x": declared}}).columns["x"]


def codec(type_, **declared):
    return codec_for("x", column(**declared), type_)


# ---- the schema


@pytest.mark.parametrize(
    ("declared", "outside"),
    [
        (BOUNDED, "clip"),
        ({**BOUNDED, "kind": "mixed", "atoms": [0]}, "clip"),
        (NUMBER, "refuse"),
        (LEVELS, "refuse"),
        ({**LEVELS, "other": "rest"}, "other"),
        (
            {**LEVELS, "nulls": "level", "outside": None},
            "null",
        ),  # what YAML makes of `outside: null`
        ({**BOUNDED, "nulls": "level", "outside": "null"}, "null"),
        ({"role": "keep"}, None),
    ],
)
def test_a_column_says_what_becomes_of_values_outside_its_domain(declared, outside):
    found = column(**declared)
    assert found.outside == outside
    assert Column.model_validate(found.model_dump()) == found


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({**NUMBER, "outside": "clip"}, "`outside: clip` needs bounds"),
        ({**LEVELS, "outside": "clip"}, "`outside: clip` needs bounds"),
        ({**BOUNDED, "outside": None}, "`outside: null` needs `nulls: level`"),
        ({**LEVELS, "outside": "null"}, "`outside: null` needs `nulls: level`"),
        ({**LEVELS, "outside": "other"}, "declare `other: <level>`"),
        ({**LEVELS, "outside": "refuse", "other": "rest"}, "`other` belongs to `outside: other`"),
        ({**LEVELS, "other": "c"}, "`other` must be one of the levels"),
        ({**LEVELS, "other": ["rest"]}, "a number, a text, a date, true or false is expected"),
        (
            {**LEVELS, "kind": "discrete", "levels": [0, 1], "other": True},
            "`other` must be one of the levels",
        ),
        ({**BOUNDED, "other": 3}, "takes no other level"),
        ({**BOUNDED, "outside": "widen"}, "'clip', 'null', 'other' or 'refuse'"),
        ({"role": "keep", "outside": "refuse"}, "outside belongs to a privatised column"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(declared, what):
    with pytest.raises(SpecError) as caught:
        column(**declared)
    assert what in str(caught.value)
    assert "x" in str(caught.value.where)


# ---- numbers


LIMITS = {
    pa.float64(): None,
    pa.float32(): None,
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint64(): (0, 2**64 - 1),
    pa.int8(): (-128, 127),
    pa.date32(): (-700_000, 2_900_000),
    pa.timestamp("s"): (-(2**62), 2**62),
    pa.timestamp("us", tz="UTC"): (-(2**62), 2**62),
}


@given(st.data())
def test_numbers_outside_the_bounds_are_clipped_made_null_or_refused(data):
    type_ = data.draw(st.sampled_from(list(LIMITS)))
    low, high = sorted(
        data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True))
    )
    inside = (
        st.integers(*LIMITS[type_])
        if LIMITS[type_]
        else st.floats(allow_nan=False, width=type_.bit_width)
    )
    values = data.draw(
        st.lists(
            inside | st.integers(low - 2, high + 2).filter(lambda value: value >= 0), min_size=1
        )
    )
    array = pa.array(values, type=type_)
    is_outside = [not low <= value <= high for value in values]
    clipping, voiding, refusing = (
        codec(type_, **NUMBER, bounds=[low, high], nulls="level", outside=outside)
        for outside in ("clip", "null", "refuse")
    )
    for given_ in (array, array.dictionary_encode()):
        found, is_null = clipping.encode(given_)
        assert (found.tolist(), is_null.any()) == (
            [float(min(max(value, low), high)) for value in values],
            False,
        )
        clipping.decode(found, is_null).validate(full=True)
        assert voiding.encode(given_)[1].tolist() == is_outside
        with (
            pytest.raises(DataError, match="declare `outside: clip`")
            if any(is_outside)
            else nullcontext()
        ):
            refusing.encode(given_)
    assert [each.n_outside(array) for each in (clipping, voiding, refusing)] == [
        sum(is_outside),
        sum(is_outside),
        0,
    ]


@pytest.mark.parametrize(
    ("type_", "bounds", "values", "expected"),
    [
        (pa.float16(), [2, 10], [np.float16(-1), np.float16(3), np.float16(INF)], [2, 3, 10]),
        (
            pa.float64(),
            [-(2.0**1021), 2.0**1021],
            [-1.6e308, 0.0, 2.0**1021, 2.0**1022],
            [-(2.0**1021), 0, 2.0**1021, 2.0**1021],
        ),
        (
            pa.int64(),
            [-(2.0**53), 2.0**53],
            [-(2**53) - 1, -(2**53), 2**53, 2**53 + 1],
            [-(2.0**53), -(2.0**53), 2.0**53, 2.0**53],
        ),
        (pa.timestamp("ns"), [0, 10], [-(10**18), 5000, 2**62], [0, 5, 10]),
    ],
    ids=str,
)
def test_bounds_at_the_ends_of_what_a_float_holds(type_, bounds, values, expected):
    made, array = codec(type_, **NUMBER, bounds=bounds), pa.array(values, type=type_)
    assert made.encode(array)[0].tolist() == list(map(float, expected))
    assert made.n_outside(array) == 2


def test_days_counted_in_milliseconds_do_not_overflow():
    array = pa.Array.from_buffers(
        pa.date64(),
        4,
        [None, pa.py_buffer(np.array([-(2**63), 86_400_000, 2 * 86_400_000, 2**62]))],
    )
    assert codec(pa.date64(), **{**NUMBER, "bounds": [0, 1]}).encode(array)[0].tolist() == [
        0,
        1,
        1,
        1,
    ]
    assert codec(pa.date64(), **{**NUMBER, "bounds": [0, 1]}).n_outside(array) == 3
    with pytest.raises(DataError, match="a value beyond the years 1 to 9999"):
        codec(pa.date64(), **{**NUMBER, "bounds": [0, 1], "outside": "refuse"}).encode(array)


def test_clipped_nan_is_null_where_that_is_a_level_and_else_refused():
    array = pa.array([NAN, 11.0, None])
    values, is_null = codec(pa.float64(), **BOUNDED, nulls="level").encode(array)
    assert (values.tolist(), is_null.tolist()) == ([0, 10, 0], [True, False, True])
    assert codec(pa.float64(), **BOUNDED, nulls="level").n_outside(array) == 2
    with pytest.raises(DataError, match="'x': holds NaN"):
        codec(pa.float64(), **BOUNDED).encode(array.slice(0, 2))
    with pytest.raises(DataError, match="'x': holds a null"):
        codec(pa.float64(), **BOUNDED).encode(array.slice(1))


def test_numbers_outside_what_a_float_holds_become_null_or_are_refused():
    with pytest.raises(DataError, match="declare bounds"):
        codec(pa.int64(), **NUMBER).encode(pa.array([2**53 + 1]))
    made = codec(pa.float64(), **NUMBER, nulls="level", outside="null")
    array = pa.array([7.0, NAN, INF, -INF, 2.0**1022, None])
    values, is_null = made.encode(array)
    assert (values.tolist(), is_null.tolist()) == ([7, 0, 0, 0, 0, 0], [False] + [True] * 5)
    assert made.n_outside(array) == 4


@pytest.mark.parametrize(("type_", "bounds"), [(pa.uint8(), [300, 400]), (pa.int8(), [-400, -300])])
def test_bounds_between_which_the_type_has_no_value_are_refused(type_, bounds):
    with pytest.raises(DataError, match="no value of its type"):
        codec(type_, **NUMBER, bounds=bounds)


def test_atoms_are_never_clipped_in_silence():
    with pytest.raises(DataError, match="outside its bounds"):
        codec(
            pa.date32(), role="privatise", kind="mixed", bounds=[0, 10], atoms=[dt.date(2000, 1, 1)]
        )


# ---- levels


@pytest.mark.parametrize(
    ("type_", "levels", "values"),
    [
        (pa.string(), ["rest", "a", "b"], ["b", "zebulon", "rest", ""]),
        (
            pa.int64(),
            [2, 1, 3],
            [1, 2**60, 3, -7],
        ),  # neighbouring whole numbers take a way of their own
        (pa.float64(), [0.5, 1.5], [1.5, NAN, INF, 0.5]),
        (
            pa.date32(),
            [dt.date(2020, 1, 1)],
            [dt.date(2020, 1, 1), dt.date(1915, 1, 1), dt.date(1916, 1, 1)],
        ),
    ],
    ids=str,
)
def test_values_outside_the_levels_become_the_other_level(type_, levels, values):
    made = codec(
        type_, role="privatise", kind="categorical", levels=levels, other=levels[0], nulls="level"
    )
    array = pa.array([*values, None], type=type_)
    assert made.decode(made.encode(array)).to_pylist() == [
        *(value if value in levels else levels[0] for value in values),
        None,
    ]
    assert [
        made.n_outside(each)
        for each in (array, array.dictionary_encode(), pa.array(levels, type=type_))
    ] == [2, 2, 0]
    with pytest.raises(DataError, match="a null"):
        codec(type_, role="privatise", kind="categorical", levels=levels, other=levels[0]).encode(
            array
        )


def test_values_outside_the_levels_become_null():
    made = codec(pa.string(), **LEVELS, nulls="level", outside="null")
    array = pa.array(["b", "zebulon", None])
    assert made.encode(array).tolist() == [2, 0, 0]
    assert made.n_outside(array) == 1


def test_levels_refuse_what_is_outside_until_other_is_declared():
    made = codec(pa.string(), **LEVELS)
    assert made.n_outside(pa.array(["zebulon"])) == 0
    with pytest.raises(DataError, match="declare `other: <level>`") as caught:
        made.encode(pa.array(["zebulon"]))
    assert "zebulon" not in str(caught.value)
