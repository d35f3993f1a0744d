import datetime as dt
import pickle
import traceback
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import TIMES, VALUE_TYPES, TableCase, as_array, mixed_tables

from dpdask.codec import Codec, LevelCodec, ValueCodec, codec_for
from dpdask.errors import DataError, SpecError
from dpdask.schema import Column

SECRET = "Zebulon-Quux-1815"  # a planted data value


def level_codec(levels, type_, nulls="refuse", kind="categorical") -> LevelCodec:
    codec = codec_for("x", Column(role="privatise", kind=kind, levels=levels, nulls=nulls), type_)
    assert isinstance(codec, LevelCodec)
    return codec


def value_codec(type_, bounds=None, nulls="refuse", atoms=None, outside="refuse") -> ValueCodec:
    kind = "mixed" if atoms else "continuous"
    codec = codec_for(
        "x",
        Column(
            role="privatise", kind=kind, bounds=bounds, atoms=atoms, nulls=nulls, outside=outside
        ),
        type_,
    )
    assert isinstance(codec, ValueCodec)
    return codec


def refusal(call, *args) -> DataError:
    with pytest.raises(DataError) as caught:
        call(*args)
    error = caught.value
    assert error.exit_code == 65
    assert error.what
    assert error.where == "column 'x'"
    assert error.hint
    assert error.__cause__ is None
    return error


def decoded(codec: Codec, encoded) -> pa.Array:
    return codec.decode(encoded) if isinstance(codec, LevelCodec) else codec.decode(*encoded)


# ---- the acceptance distribution


@settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(mixed_tables())
def test_what_a_schema_accepts_comes_back_unchanged_and_everything_else_is_refused(case: TableCase):
    released = case.schema.select_released(case.table.schema)
    assert released.names == [name for name in case.table.column_names if name != "dropped"]
    for name, column in case.columns.items():
        codec = codec_for(name, case.schema.columns[name], released.field(name).type)
        encoded = codec.encode(column.array)
        back = decoded(codec, encoded)
        back.validate(full=True)
        assert back.type == released.field(name).type
        assert back.to_pylist() == column.array.to_pylist()
        if isinstance(codec, LevelCodec):
            assert encoded.dtype == np.int32
            assert encoded.tolist() == column.expected
            assert codec.n_levels == len(column.declared["levels"]) + (
                column.declared["nulls"] == "level"
            )
            assert codec.ordered == (column.declared["kind"] == "discrete")
        else:
            values, is_null = encoded
            assert (values.dtype, is_null.dtype) == (np.float64, np.bool_)
            assert [
                None if null else value
                for value, null in zip(values.tolist(), is_null, strict=True)
            ] == column.expected
            assert not values[is_null].any()
            assert codec.atoms == tuple(map(float, column.declared.get("atoms", ())))
        for bad in column.refused:
            with pytest.raises(DataError, match=name):
                codec.encode(bad)


# ---- levels


def test_null_as_a_level_has_the_code_0():
    codec = level_codec(["a", "b"], pa.string(), nulls="level")
    assert codec.n_levels == 3
    assert codec.encode(pa.array(["b", None, "a"])).tolist() == [2, 0, 1]
    assert codec.decode(np.array([0, 1, 2], dtype=np.uint16)).to_pylist() == [None, "a", "b"]


@pytest.mark.parametrize("nulls", ["refuse", "level"])
def test_a_null_inside_a_dictionary_is_a_null(nulls):
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    codec = level_codec(["a"], pa.string(), nulls=nulls)
    if nulls == "level":
        assert codec.encode(array).tolist() == [1, 0]
    else:
        assert refusal(codec.encode, array).what == "holds a null"


def test_negative_zero_is_the_level_zero():
    for type_ in (pa.float32(), pa.float64()):
        codec = level_codec([0, 1.5], type_, kind="discrete")
        assert codec.encode(pa.array([-0.0, 1.5, 0.0], type=type_)).tolist() == [0, 1, 0]
        assert not np.signbit(codec.decode(np.array([0])).to_numpy()).any()


def test_a_declared_0_1_is_the_files_own_float32():
    codec = level_codec([0.1, 0.2], pa.float32(), kind="discrete")
    assert codec.encode(pa.array([0.2, 0.1], type=pa.float32())).tolist() == [1, 0]


def test_a_value_outside_the_levels_is_refused():
    assert (
        refusal(level_codec(["a"], pa.string()).encode, pa.array(["a", SECRET])).what
        == "holds a value outside its levels"
    )


def test_a_null_that_is_no_level_is_refused():
    error = refusal(level_codec(["a"], pa.string()).encode, pa.array(["a", None]))
    assert str(error) == "column 'x': holds a null; declare `nulls: level`, or fill it"


@pytest.mark.parametrize(
    "array",
    [pa.array([1, 2]), pa.array(["a"], pa.large_string()), pa.array([1]).dictionary_encode()],
)
def test_an_array_of_another_type_is_refused(array):
    assert "string is expected" in refusal(level_codec(["a"], pa.string()).encode, array).what


@pytest.mark.parametrize(
    ("levels", "type_"),
    [
        ([300], pa.int8()),
        ([-1], pa.uint64()),
        ([2**64], pa.int64()),
        ([0.5, 1], pa.int64()),
        ([1e300], pa.int64()),
        ([1e300], pa.float32()),
        ([1e5], pa.float16()),
        ([2**53 + 1], pa.float64()),
        ([10**400], pa.float64()),
        ([0.125], pa.decimal128(5, 2)),
        ([12345], pa.decimal128(5, 2)),
        (["1"], pa.int64()),
        ([1], pa.string()),
        ([True], pa.int8()),
        ([1], pa.bool_()),
        ([dt.date(2020, 1, 1)], pa.int32()),
        ([1], pa.date32()),
        ([dt.date(9999, 1, 1)], pa.timestamp("ns")),
        ([1], pa.time32("s")),
        (["a"], pa.binary()),
        (["a"], pa.list_(pa.string())),
        ([1], pa.null()),
    ],
)
def test_levels_that_do_not_fit_the_columns_type_are_refused(levels, type_):
    assert f"do not fit its type {type_}" in refusal(level_codec, levels, type_).what


@pytest.mark.parametrize(
    ("levels", "type_", "hint"),
    [
        (["false", "true"], pa.bool_(), "write them without quotes, or correct the file's type"),
        (["True"], pa.bool_(), "write them without quotes, or correct the file's type"),
        (["1", "-2.5e3"], pa.float64(), "write them without quotes, or correct the file's type"),
        (["2020-01-31"], pa.date32(), "write them without quotes, or correct the file's type"),
        ([1], pa.string(), "put them in quotes, or correct the file's type"),
        ([True], pa.large_string(), "put them in quotes, or correct the file's type"),
        (["no", "true"], pa.bool_(), "correct the schema, or the file's type"),
        (["a"], pa.int32(), "correct the schema, or the file's type"),
        ([0.5], pa.int64(), "correct the schema, or the file's type"),
    ],
)
def test_levels_that_only_quotes_make_wrong_are_answered_so(levels, type_, hint):
    assert refusal(level_codec, levels, type_).hint == hint


def test_a_level_that_is_beyond_the_year_9999_in_its_zone_is_refused():
    column = Column(
        role="privatise", kind="categorical", levels=(dt.date(2000, 1, 1), dt.date(1, 1, 1))
    )
    assert (
        "do not fit its type"
        in refusal(codec_for, "x", column, pa.timestamp("s", "America/Lima")).what
    )


def test_levels_that_are_one_number_in_the_columns_type_are_refused():
    assert (
        "become equal when stored as float"
        in refusal(level_codec, [0.1, 0.1 + 1e-12], pa.float32()).what
    )
    assert (
        "become equal when stored as float"
        in refusal(value_codec, pa.float32(), None, "refuse", [0.1, 0.1 + 1e-12]).what
    )


def test_decimal_levels_are_exact():
    codec = level_codec([0.1, 0.25], pa.decimal128(5, 2), kind="discrete")
    assert codec.encode(
        pa.array([Decimal("0.25"), Decimal("0.10")], type=pa.decimal128(5, 2))
    ).tolist() == [1, 0]


# ---- numbers


def test_whole_numbers_up_to_2_to_the_53_are_exact_and_beyond_are_refused():
    codec = value_codec(pa.int64())
    assert codec.encode(pa.array([2**53, -(2**53)]))[0].tolist() == [2.0**53, -(2.0**53)]
    for bad in (2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)):
        assert "beyond ±2**53" in refusal(codec.encode, pa.array([bad])).what


def test_an_uint64_beyond_int64_is_refused_without_a_context_that_carries_it():
    error = refusal(value_codec(pa.uint64()).encode, pa.array([2**64 - 1], type=pa.uint64()))
    assert error.__context__ is None


@pytest.mark.parametrize(
    ("bounds", "mend"), [(None, "or declare bounds"), ([0, 100], "or declare `outside: clip`")]
)
def test_a_number_beyond_what_is_exact_is_answered_with_what_is_not_declared_yet(bounds, mend):
    codec = value_codec(pa.uint64(), bounds=bounds, outside="refuse")
    assert refusal(codec.encode, pa.array([2**60], pa.uint64())).hint.endswith(mend)


def test_a_time_that_would_overflow_in_a_finer_unit_is_refused():
    for unit in ("s", "ms", "us"):
        array = pa.array([2**61], pa.int64()).cast(pa.timestamp(unit))
        assert "holds a value beyond" in refusal(value_codec(pa.timestamp(unit)).encode, array).what


FIRST, LAST = dt.date(1, 1, 1), dt.date(9999, 12, 31)
BEYOND = "store it in a larger unit (times: microseconds in place of nanoseconds)"


@pytest.mark.parametrize(
    ("type_", "inside", "beyond", "mend"),
    [
        *(
            (type_, [-(2**53), 2**53], [0, 2.0**54], BEYOND)
            for type_ in (pa.int8(), pa.uint32(), pa.int64())
        ),
        (pa.uint64(), [0, 2.0**53], [-(2.0**60), 5], BEYOND),
        (pa.float64(), [-(2.0**1021), 2.0**1021], [0, 1.7e308], "store it in a larger unit"),
        *(
            (type_, [FIRST, LAST], [0, 2_932_897], "correct the file's type")
            for type_ in (pa.date32(), pa.date64())
        ),
        *(
            (pa.timestamp(unit, zone), [FIRST, LAST], [0, 1e15], "correct the file's type")
            for unit in ("s", "ms")
            for zone in (None, "UTC")
        ),
        (
            pa.timestamp("ms", "Asia/Tokyo"),
            [FIRST, dt.date(9999, 12, 30)],
            [FIRST, LAST],
            "correct the file's type",
        ),
        (
            pa.timestamp("s", "America/Lima"),
            [dt.date(1, 1, 2), LAST],
            [FIRST, LAST],
            "correct the file's type",
        ),
        *(
            (
                pa.timestamp(unit, zone),
                [dt.date(1684, 7, 29), dt.date(2255, 6, 4)],
                beyond,
                "store it as timestamp[ms]",
            )
            for unit in ("us", "ns")
            for zone in (None, "+05:30")
            for beyond in (
                [dt.date(2020, 1, 1), LAST],
                [dt.date(1684, 7, 27), dt.date(2020, 1, 1)],
                [0, 2.0**54],
            )
        ),
    ],
    ids=str,
)
def test_bounds_reach_as_far_as_numbers_are_exact_and_dates_exist(type_, inside, beyond, mend):
    codec = value_codec(type_, bounds=inside)
    assert (codec.least, codec.greatest) == codec.bounds or not pa.types.is_integer(type_)
    ends = codec.decode(np.array(codec.bounds), np.zeros(2, dtype=bool))
    assert len(ends.to_pylist()) == 2  # a value that Python has, too
    assert tuple(codec.encode(ends)[0]) == codec.bounds
    error = refusal(value_codec, type_, beyond)
    assert error.what.startswith("its bounds reach beyond ")
    assert error.hint == f"narrow the bounds, or {mend}"


@pytest.mark.parametrize("bound", [2**53 + 1, -(2**53) - 1, 2**63 - 1, 10**20 + 1])
def test_whole_bounds_that_float64_would_change_are_refused(bound):
    for bounds in ([0, bound], [bound, 0]):
        with pytest.raises(
            SpecError,
            match=r"whole bounds beyond ±2\*\*53 are not exact; store the column in a larger unit",
        ):
            Column(role="privatise", kind="continuous", bounds=bounds)


@pytest.mark.parametrize(
    ("type_", "first"),
    [
        (pa.uint64(), 2**64 - 3),
        (pa.uint64(), 2**63 - 1),
        (pa.int64(), 2**63 - 3),
        (pa.int64(), -(2**63)),
    ],
)
def test_whole_levels_reach_to_the_ends_of_their_type(type_, first):
    levels = [first, first + 1, first + 2]
    codec, values = (
        level_codec(levels, type_, kind="discrete"),
        pa.array([levels[2], levels[0]], type_),
    )
    assert codec.encode(values).tolist() == [2, 0]
    assert codec.decode(np.array([2, 0])).equals(values)
    assert refusal(codec.encode, pa.array([5], type_)).what == "holds a value outside its levels"


def test_times_are_numbers_in_their_own_unit_and_nanoseconds_are_cut():
    expected = {"s": 3.0, "ms": 3e3, "us": 3e6, "ns": 3e6}
    for unit, number in expected.items():
        array = pa.array([dt.datetime(1970, 1, 1, 0, 0, 3, tzinfo=dt.UTC)], type=pa.timestamp(unit))
        assert value_codec(pa.timestamp(unit)).encode(array)[0].tolist() == [number]
    odd = pa.array([3_000_999], pa.int64()).cast(pa.timestamp("ns"))
    assert value_codec(pa.timestamp("ns")).encode(odd)[0].tolist() == [3000.0]


def test_dates_are_days():
    for type_ in (pa.date32(), pa.date64()):
        codec = value_codec(type_, bounds=(0, 1))
        assert codec.encode(pa.array([dt.date(1970, 1, 2)], type=type_))[0].tolist() == [1.0]
        refusal(codec.encode, pa.array([dt.date(1970, 1, 3)], type=type_))


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities_are_refused_with_and_without_bounds(type_, bad):
    for codec in (value_codec(type_), value_codec(type_, bounds=(0, 1), nulls="level")):
        assert refusal(codec.encode, as_array([0.5, bad], type_)).what == "holds NaN or an infinity"


def test_bounds_are_closed_and_kept():
    codec = value_codec(pa.float64(), bounds=(0, 1))
    assert codec.encode(pa.array([0.0, 1.0]))[0].tolist() == [0.0, 1.0]
    for bad in (np.nextafter(0, -1), np.nextafter(1, 2)):
        assert refusal(codec.encode, pa.array([bad])).what == "holds a value outside its bounds"


def test_bounds_and_atoms_are_the_files_own_float32():
    codec = value_codec(pa.float32(), bounds=(0, 0.1), atoms=[0.1])
    assert codec.bounds == (0.0, float(np.float32(0.1)))
    assert codec.atoms == (float(np.float32(0.1)),)
    assert codec.encode(pa.array([0.1], type=pa.float32()))[0].tolist() == [float(np.float32(0.1))]


def test_bounds_that_a_float32_cannot_hold_are_refused():
    assert "do not fit" in refusal(value_codec, pa.float32(), (0, 1e300)).what
    assert "become equal" in refusal(value_codec, pa.float32(), (1, 1 + 1e-12)).what


def test_a_null_may_lie_outside_the_bounds():
    codec = value_codec(pa.float64(), bounds=(5, 9), nulls="level")
    values, is_null = codec.encode(pa.array([None, 7.0]))
    assert values.tolist() == [0.0, 7.0]
    assert is_null.tolist() == [True, False]


def test_a_null_that_is_no_level_is_refused_in_numbers():
    assert refusal(value_codec(pa.float64()).encode, pa.array([1.0, None])).what == "holds a null"


def test_fractional_bounds_of_whole_numbers_are_refused():
    for type_ in (pa.int32(), pa.date32(), pa.timestamp("us")):
        assert "must be whole" in refusal(value_codec, type_, (0, 0.5)).what


@pytest.mark.parametrize(
    "type_",
    [pa.string(), pa.bool_(), pa.decimal128(5, 2), pa.binary(), pa.time64("us"), pa.duration("s")],
    ids=str,
)
def test_a_continuous_column_of_another_type_is_refused(type_):
    assert str(type_) in refusal(value_codec, type_).what


def test_atoms_outside_bounds_that_only_the_type_shows_are_refused():
    refusal(value_codec, pa.date32(), (0, 10), "refuse", [dt.date(2020, 1, 1)])


def test_atoms_that_do_not_fit_are_refused():
    refusal(value_codec, pa.int32(), None, "refuse", [0.5])
    refusal(value_codec, pa.int32(), None, "refuse", [dt.date(2020, 1, 1)])
    refusal(value_codec, pa.int64(), None, "refuse", [2**53 + 2])


def test_atoms_of_times_are_declared_as_dates():
    for type_ in TIMES:
        codec = value_codec(type_, atoms=[dt.date(2020, 1, 1)])
        assert codec.atoms == tuple(codec.encode(as_array([dt.date(2020, 1, 1)], type_))[0])


def test_only_floats_are_off_the_lattice():
    assert {str(type_) for type_ in VALUE_TYPES if not value_codec(type_).lattice} == {
        "halffloat",
        "float",
        "double",
    }


@pytest.mark.parametrize(
    "type_", [pa.float32(), pa.float64(), pa.int32(), pa.timestamp("ns")], ids=str
)
def test_nothing_lies_under_a_released_null(type_):
    released = value_codec(type_, nulls="level").decode(
        np.array([1815.0, 7.0]), np.array([True, False])
    )
    assert released.null_count == 1
    assert not np.frombuffer(released.buffers()[1], dtype=np.uint8)[: type_.bit_width // 8].any()


def test_slices_are_encoded_like_their_copies():
    array = pa.array([5, None, 7, 8], type=pa.int32())[1:3]
    values, is_null = value_codec(pa.int32(), nulls="level").encode(array)
    assert values.tolist() == [0.0, 7.0]
    assert is_null.tolist() == [True, False]
    assert level_codec(["a", "b"], pa.string()).encode(pa.array(["zz", "b", "a"])[1:]).tolist() == [
        1,
        0,
    ]


# ---- no data value in an error


def _surfaces(error: BaseException) -> str:
    chain = [error, error.__cause__, error.__context__]
    texts = [
        f"{each}{each!r}{each.args}{getattr(each, '__dict__', None)}{pickle.dumps(each)!r}"
        for each in chain
        if each is not None
    ]
    return "".join([*texts, *traceback.format_exception(error)])


@pytest.mark.parametrize(
    ("codec", "array", "secret"),
    [
        (level_codec(["a"], pa.string()), pa.array(["a", SECRET]), SECRET),
        (level_codec(["a"], pa.string()), pa.array(["a", SECRET]).dictionary_encode(), SECRET),
        (level_codec(["a"], pa.string(), nulls="level"), pa.array([None, SECRET]), SECRET),
        (level_codec(["a"], pa.string()), pa.array([None, SECRET]), SECRET),
        (level_codec(["a"], pa.string()), pa.array([SECRET], pa.large_string()), SECRET),
        (level_codec(["a"], pa.string()), pa.array([[SECRET]]), SECRET),
        (level_codec([1], pa.int64()), pa.array([SECRET]), SECRET),
        (level_codec([1], pa.int64()), pa.array([1815181518]), "1815181518"),
        (level_codec([1.5], pa.float32()), pa.array([1815.1875], pa.float32()), "1815.1875"),
        (value_codec(pa.float64()), pa.array([SECRET]), SECRET),
        (value_codec(pa.float64(), bounds=(0, 1)), pa.array([1815.1875]), "1815.1875"),
        (
            value_codec(pa.uint64()),
            pa.array([18151815181518151815], pa.uint64()),
            "18151815181518151815",
        ),
        (value_codec(pa.int64()), pa.array([1815181518151815181]), "1815181518151815181"),
        (
            value_codec(pa.timestamp("s")),
            pa.array([1815181518151815181]).cast(pa.timestamp("s")),
            "1815181518151815181",
        ),
        (
            value_codec(pa.timestamp("ns"), bounds=(0, 1)),
            pa.array([1815181518000000000]).cast(pa.timestamp("ns")),
            "1815181518",
        ),
        (value_codec(pa.date32(), bounds=(0, 1)), pa.array([dt.date(1915, 12, 10)]), "1915"),
    ],
)
def test_a_data_value_never_shows_in_an_error(codec, array, secret):
    with pytest.raises(DataError) as caught:
        codec.encode(array)
    assert secret not in _surfaces(caught.value)
    assert caught.value.__context__ is None
