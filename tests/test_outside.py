"""What the schema lets become of values outside a column's domain: at construction, and in the codec."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from dpdask import Schema
from dpdask.codec import codec_for
from dpdask.errors import DataError, SpecError
from dpdask.schema import Column

NUMBER = {"role": "privatise", "kind": "continuous"}
BOUNDED = {**NUMBER, "bounds": [0, 10]}
LEVELS = {"role": "privatise", "kind": "categorical", "levels": ["a", "b", "rest"]}
NAN, INF = float("nan"), float("inf")


def column(**declared) -> Column:
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
        ({**NUMBER, "kind": "mixed", "atoms": [0]}, "refuse"),
        (LEVELS, "refuse"),
        ({**LEVELS, "other": "rest"}, "other"),
        ({**LEVELS, "outside": "other", "other": "rest"}, "other"),
        (
            {**LEVELS, "nulls": "level", "outside": None},
            "null",
        ),  # what YAML makes of `outside: null`
        ({**BOUNDED, "nulls": "level", "outside": "null"}, "null"),
        ({**NUMBER, "nulls": "level", "outside": "null"}, "null"),
        ({**BOUNDED, "outside": "refuse"}, "refuse"),
        ({"role": "keep"}, None),
        ({"role": "drop"}, None),
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
        (
            {**LEVELS, "nulls": "level", "outside": "null", "other": "rest"},
            "`other` belongs to `outside: other`",
        ),
        ({**LEVELS, "other": "c"}, "`other` must be one of the levels"),
        ({**LEVELS, "other": 1}, "`other` must be one of the levels"),
        ({**LEVELS, "other": ["rest"]}, "a number, a text, a date, true or false is expected"),
        (
            {**LEVELS, "kind": "discrete", "levels": [0, 1], "other": True},
            "`other` must be one of the levels",
        ),
        ({**BOUNDED, "other": 3}, "takes no other level"),
        ({**BOUNDED, "outside": "other", "other": 3}, "takes no other level"),
        ({**BOUNDED, "outside": "widen"}, "'clip', 'null', 'other' or 'refuse'"),
        ({"role": "keep", "outside": "refuse"}, "outside belongs to a privatised column"),
        ({"role": "drop", "other": "rest"}, "other belongs to a privatised column"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(declared, what):
    with pytest.raises(SpecError) as caught:
        column(**declared)
    assert what in str(caught.value)
    assert "x" in str(caught.value.where)


# ---- numbers


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize(
    ("type_", "bounds", "values", "expected", "n_outside"),
    [
        (
            pa.float64(),
            [0, 10],
            [-INF, -1.0, 0.0, 5.5, 10.0, 10.1, 2.0**1023, INF],
            [0, 0, 0, 5.5, 10, 10, 10, 10],
            5,
        ),
        (
            pa.float32(),
            [0.1, 0.3],
            [0.0, 0.2, 1.0],
            [np.float32(0.1), np.float32(0.2), np.float32(0.3)],
            2,
        ),
        (pa.float16(), [2, 10], [np.float16(-1), np.float16(3), np.float16(INF)], [2, 3, 10], 2),
        (
            pa.float64(),
            [-(2.0**1021), 2.0**1021],
            [-1.6e308, 0.0, 2.0**1021, 2.0**1022],
            [-(2.0**1021), 0, 2.0**1021, 2.0**1021],
            2,
        ),
        (
            pa.int64(),
            [0, 10],
            [-(2**63), -1, 0, 10, 11, 2**53 + 1, 2**63 - 1],
            [0, 0, 0, 10, 10, 10, 10],
            5,
        ),
        (
            pa.int64(),
            [-(2.0**53), 2.0**53],
            [-(2**53) - 1, -(2**53), 2**53, 2**53 + 1],
            [-(2.0**53), -(2.0**53), 2.0**53, 2.0**53],
            2,
        ),
        (pa.uint64(), [5, 10], [0, 5, 2**64 - 1], [5, 5, 10], 2),
        (pa.uint8(), [-5, 100], [0, 100, 101, 255], [0, 100, 100, 100], 2),
        (pa.int8(), [-1000, 0], [-128, 0, 127], [-128, 0, 0], 1),
        (
            pa.date32(),
            [0, 1],
            [dt.date(1915, 12, 10), dt.date(1970, 1, 2), dt.date(9999, 1, 1)],
            [0, 1, 1],
            2,
        ),
        (pa.timestamp("s"), [0, 10], [-(2**62), 5, 2**62], [0, 5, 10], 2),
        (pa.timestamp("ns"), [0, 10], [-(10**18), 5000, 2**62], [0, 5, 10], 2),
    ],
    ids=str,
)
def test_numbers_outside_the_bounds_go_to_the_nearest_bound(
    type_, bounds, values, expected, n_outside, dictionary
):
    array = pa.array(values, type=type_)
    if dictionary and type_ == pa.float16():
        pytest.skip("Arrow has no dictionaries of half floats")
    made = codec(type_, **{**NUMBER, "bounds": bounds})
    found, is_null = made.encode(array.dictionary_encode() if dictionary else array)
    assert found.tolist() == list(map(float, expected))
    assert not is_null.any()
    assert made.n_outside(array) == n_outside
    made.decode(found, is_null).validate(full=True)


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


@pytest.mark.parametrize("bounds", [None, [0, 10], [5, 10]])
def test_numbers_outside_become_null(bounds):
    made = codec(pa.float64(), **NUMBER, bounds=bounds, nulls="level", outside="null")
    array = pa.array([7.0, NAN, INF, -INF, 2.0**1022, None])
    values, is_null = made.encode(array)
    assert (values.tolist(), is_null.tolist()) == ([7, 0, 0, 0, 0, 0], [False] + [True] * 5)
    assert made.n_outside(array) == 4
    whole = codec(pa.int64(), **NUMBER, bounds=bounds, nulls="level", outside="null")
    assert whole.encode(pa.array([7, 2**53 + 1, None]))[1].tolist() == [False, True, True]
    assert whole.n_outside(pa.array([7, 2**53 + 1, None])) == 1


def test_a_null_under_bounds_without_zero_is_not_counted():
    made = codec(pa.int32(), **{**NUMBER, "bounds": [5, 10], "nulls": "level"})
    values, is_null = made.encode(pa.array([None, 4], pa.int32()))
    assert (values.tolist(), is_null.tolist(), made.n_outside(pa.array([None, 4], pa.int32()))) == (
        [0, 5],
        [True, False],
        1,
    )


@pytest.mark.parametrize(("type_", "bounds"), [(pa.uint8(), [300, 400]), (pa.int8(), [-400, -300])])
def test_bounds_between_which_the_type_has_no_value_are_refused(type_, bounds):
    with pytest.raises(DataError, match="no value of its type"):
        codec(type_, **NUMBER, bounds=bounds)


def test_atoms_are_never_clipped_in_silence():
    with pytest.raises(DataError, match="outside its bounds"):
        codec(
            pa.date32(), role="privatise", kind="mixed", bounds=[0, 10], atoms=[dt.date(2000, 1, 1)]
        )


def test_what_is_refused_counts_nothing_and_names_the_mend():
    made = codec(pa.int64(), **{**BOUNDED, "outside": "refuse"})
    assert made.n_outside(pa.array([11])) == 0
    with pytest.raises(DataError, match="declare `outside: clip`"):
        made.encode(pa.array([11]))
    with pytest.raises(DataError, match="declare bounds"):
        codec(pa.int64(), **NUMBER).encode(pa.array([2**53 + 1]))


# ---- levels


@pytest.mark.parametrize("nulls", ["refuse", "level"])
@pytest.mark.parametrize(
    ("type_", "levels", "other", "values", "n_outside"),
    [
        (pa.string(), ["a", "b", "rest"], "rest", ["b", "zebulon", "rest", ""], 2),
        (
            pa.int64(),
            [1, 2, 3],
            2,
            [1, 2**60, 3, -7],
            2,
        ),  # neighbouring whole numbers take a way of their own
        (pa.uint64(), [1, 5, 7], 1, [5, 2**64 - 1, 7, 0], 2),
        (pa.float64(), [0.5, 1.5], 0.5, [1.5, NAN, INF, 0.5], 2),
        (pa.bool_(), [True], True, [True, False], 1),
        (
            pa.date32(),
            [dt.date(2020, 1, 1)],
            dt.date(2020, 1, 1),
            [dt.date(2020, 1, 1), dt.date(1915, 1, 1)],
            1,
        ),
    ],
    ids=str,
)
def test_values_outside_the_levels_become_the_other_level(
    type_, levels, other, values, n_outside, nulls
):
    made = codec(
        type_, role="privatise", kind="categorical", levels=levels, other=other, nulls=nulls
    )
    array = pa.array(values, type=type_)
    assert made.decode(made.encode(array)).to_pylist() == [
        value if value in levels else other for value in values
    ]
    assert made.n_outside(array) == n_outside
    assert made.n_outside(array.dictionary_encode()) == n_outside
    assert made.n_outside(pa.array(levels, type=type_)) == 0
    with_null = pa.concat_arrays([array, pa.nulls(1, type_)])
    if nulls == "level":
        assert made.decode(made.encode(with_null)).to_pylist()[-1] is None
        assert made.n_outside(with_null) == n_outside
    else:
        with pytest.raises(DataError, match="a null"):
            made.encode(with_null)


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
