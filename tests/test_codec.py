"""Codecs: what a schema accepts comes back unchanged, everything else is refused in one line without a data value."""

import datetime as dt
import pickle
import re
import traceback
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import DECIMALS, FLOATS, TIMES, VALUE_TYPES, as_array, mixed_tables

from dpdask.codec import LevelCodec, codec_for
from dpdask.errors import DataError, SpecError
from dpdask.schema import Column

SECRET = "Zebulon-Quux-1815"  # a planted data value
SECRETS = (SECRET, "1815.1875", "1815181518", "1915")
FLOAT, F32, INT, UNSIGNED, TEXT, DAY = (
    pa.float64(),
    pa.float32(),
    pa.int64(),
    pa.uint64(),
    pa.string(),
    pa.date32(),
)
DATES = dt.date(2020, 1, 1), dt.date(2020, 1, 2)
CENTS = pa.decimal128(20, 2)
MOMENTS = {unit: pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")}


def make(type_, **declared):
    kind = (
        "categorical"
        if "levels" in declared
        else "mixed"
        if declared.get("atoms")
        else "continuous"
    )
    return codec_for(
        "x", Column(**{"role": "privatise", "kind": kind, "outside": "refuse", **declared}), type_
    )


def refusal(call, *args, **named):
    with pytest.raises(DataError) as caught:
        call(*args, **named)
    error = caught.value
    assert (error.exit_code, error.where) == (65, "column 'x'")
    assert error.what
    assert error.hint
    assert error.__cause__ is None
    return error


def decoded(codec, encoded):
    return codec.decode(encoded) if isinstance(codec, LevelCodec) else codec.decode(*encoded)


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(mixed_tables())
def test_what_a_schema_accepts_comes_back_unchanged_and_everything_else_is_refused(case):
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


OF_TEXTS = make(TEXT, levels=["a", "b"])
OF_NULLS = make(TEXT, levels=["a"], nulls="level")
UNITS = make(FLOAT, bounds=(0, 1))
IN_DICTIONARY = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
BOUNDS_OF_F32 = make(F32, bounds=(0, 0.1), atoms=[0.1])
TENTH = float(np.float32(0.1))
THREE_SECONDS = dt.datetime(1970, 1, 1, 0, 0, 3, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("codec", "array", "expected"),
    [
        (make(TEXT, levels=["a", "b"], nulls="level"), pa.array(["b", None, "a"]), [2, 0, 1]),
        (OF_NULLS, IN_DICTIONARY, [1, 0]),
        *(
            (
                make(type_, levels=[0, 1.5], kind="discrete"),
                pa.array([-0.0, 1.5, 0.0], type_),
                [0, 1, 0],
            )
            for type_ in (F32, FLOAT)
        ),
        (make(F32, levels=[0.1, 0.2]), pa.array([0.2, 0.1], F32), [1, 0]),
        (
            make(pa.decimal128(5, 2), levels=[0.1, 0.25]),
            pa.array([Decimal("0.25"), Decimal("0.10")], pa.decimal128(5, 2)),
            [1, 0],
        ),
        (OF_TEXTS, pa.array(["zz", "b", "a"])[1:], [1, 0]),  # a slice
        (make(pa.int32(), nulls="level"), pa.array([5, None, 7, 8], pa.int32())[1:3], [0.0, 7.0]),
        (make(INT), pa.array([2**53, -(2**53)]), [2.0**53, -(2.0**53)]),
        *(
            (make(MOMENTS[unit]), pa.array([THREE_SECONDS], MOMENTS[unit]), [n])
            for unit, n in zip(MOMENTS, (3.0, 3e3, 3e6, 3e6), strict=True)
        ),
        (make(MOMENTS["ns"]), pa.array([3_000_999], INT).cast(MOMENTS["ns"]), [3000.0]),
        *(
            (make(type_, bounds=(0, 1)), pa.array([dt.date(1970, 1, 2)], type_), [1.0])
            for type_ in (DAY, pa.date64())
        ),
        (UNITS, pa.array([0.0, 1.0]), [0.0, 1.0]),
        (BOUNDS_OF_F32, pa.array([0.1], F32), [TENTH]),
        (make(FLOAT, bounds=(5, 9), nulls="level"), pa.array([None, 7.0]), [0.0, 7.0]),
        *(
            (
                make(type_, levels=[n, n + 1, n + 2], kind="discrete"),
                pa.array([n + 2, n], type_),
                [2, 0],
            )
            for type_, n in (
                (UNSIGNED, 2**64 - 3),
                (UNSIGNED, 2**63 - 1),
                (INT, 2**63 - 3),
                (INT, -(2**63)),
            )
        ),
    ],
)
def test_values_are_encoded_as_what_they_are(codec, array, expected):
    encoded = codec.encode(array)
    assert (encoded if isinstance(codec, LevelCodec) else encoded[0]).tolist() == expected
    back = decoded(codec, encoded)
    assert back.to_pylist() == array.to_pylist() or array.type == MOMENTS["ns"]
    assert "-0.0" not in map(str, back.to_pylist())


def test_bounds_and_atoms_are_the_files_own_float32():
    assert (BOUNDS_OF_F32.bounds, BOUNDS_OF_F32.atoms) == ((0.0, TENTH), (TENTH,))


NAN, INFINITE = "holds NaN or an infinity", [float("nan"), float("inf"), float("-inf")]
OUTSIDE, NULL, BEYOND = "holds a value outside its", "holds a null", "beyond ±2**53"


@pytest.mark.parametrize(
    ("codec", "array", "what"),
    [
        *(
            (OF_TEXTS, array, OUTSIDE)
            for array in (pa.array(["a", SECRET]), pa.array(["a", SECRET]).dictionary_encode())
        ),
        (OF_NULLS, pa.array([None, SECRET]), OUTSIDE),
        (OF_TEXTS, pa.array([None, SECRET]), NULL),
        (make(TEXT, levels=["a"]), IN_DICTIONARY, NULL),
        (make(FLOAT), pa.array([1.0, None]), NULL),
        *(
            (OF_TEXTS, pa.array([SECRET], type_), "string is expected")
            for type_ in (pa.large_string(), pa.binary())
        ),
        *(
            (OF_TEXTS, array, "string is expected")
            for array in (pa.array([[SECRET]]), pa.array([1]).dictionary_encode())
        ),
        *((make(type_, levels=[1]), pa.array([SECRET]), "is expected") for type_ in (INT, FLOAT)),
        (make(INT, levels=[1]), pa.array([1815181518]), OUTSIDE),
        (make(F32, levels=[1.5]), pa.array([1815.1875], F32), OUTSIDE),
        *(
            (make(INT), pa.array([bad]), BEYOND)
            for bad in (2**53 + 1, -(2**53) - 1, -(2**63), 1815181518151815181)
        ),
        (make(UNSIGNED), pa.array([18151815181518151815], UNSIGNED), BEYOND),
        *(
            (
                make(MOMENTS[unit]),
                pa.array([1815181518151815181]).cast(MOMENTS[unit]),
                "holds a value beyond",
            )
            for unit in ("s", "ms", "us")
        ),
        (
            make(MOMENTS["ns"], bounds=(0, 1)),
            pa.array([1815181518000000000]).cast(MOMENTS["ns"]),
            OUTSIDE,
        ),
        *(
            (make(type_, bounds=(0, 1)), pa.array([dt.date(1915, 12, 10)], type_), OUTSIDE)
            for type_ in (DAY, pa.date64())
        ),
        *(
            (make(type_), as_array([0.5, bad], type_), NAN)
            for type_ in (pa.float16(), F32, FLOAT)
            for bad in INFINITE
        ),
        *((make(FLOAT, bounds=(0, 1), nulls="level"), pa.array([bad]), NAN) for bad in INFINITE),
        *(
            (UNITS, pa.array([bad]), OUTSIDE)
            for bad in (np.nextafter(0, -1), np.nextafter(1, 2), 1815.1875)
        ),
    ],
)
def test_other_values_are_refused_without_a_data_value(codec, array, what):
    error = refusal(codec.encode, array)
    assert what in error.what
    assert error.__context__ is None
    surfaces = (
        f"{error}{error!r}{error.args}{getattr(error, '__dict__', None)}{pickle.dumps(error)!r}"
        + "".join(traceback.format_exception(error))
    )
    assert [secret for secret in SECRETS if secret in surfaces] == []


BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)]
TWO_BYTES = {"utf-8": ["é", "a\0", "zz"], "latin-1": ["éé", "a "], "utf-16-le": ["é", "a"]}


@pytest.mark.parametrize("encoding", TWO_BYTES)
@pytest.mark.parametrize("type_", BYTES, ids=str)
def test_texts_in_bytes_are_levels_and_come_back_as_the_bytes_that_they_were(type_, encoding):
    texts = [*TWO_BYTES[encoding], None]
    array = pa.array([text and text.encode(encoding) for text in texts], type_)
    bad = pa.array([b"\xff\xd8"], type_)  # of latin-1 the text "ÿØ"
    codec = make(type_, levels=texts[:-1], encoding=encoding, nulls="level")
    for stored in (array, pa.DictionaryArray.from_arrays(pa.array(range(len(array))), array)):
        assert codec.encode(stored).tolist() == [*range(1, len(texts)), 0]
        assert codec.read_keys(stored).to_pylist() == texts
    back = codec.decode(codec.encode(array))
    back.validate(full=True)
    assert back.equals(array)
    assert codec.told == {"levels": [None, *texts[:-1]], "encoding": encoding}
    assert codec.read_keys(bad).to_pylist() == ["ÿØ" if encoding == "latin-1" else None]
    assert OUTSIDE in refusal(codec.encode, bad).what
    for outside in ({"outside": "null"}, {"other": texts[0], "outside": "other"}):
        lenient = make(type_, levels=texts[:-1], encoding=encoding, nulls="level", **outside)
        assert lenient.encode(bad).tolist() == [int("other" in outside)]
        assert lenient.n_outside(bad) == 1


@pytest.mark.parametrize("encoding", ["utf-7", "unicode_escape", "raw_unicode_escape"])
def test_half_of_a_pair_of_surrogates_is_no_text(encoding):
    codec = make(pa.binary(), levels=["a"], encoding=encoding)
    bad = pa.array(["\ud800".encode(encoding)])
    assert codec.read_keys(bad).to_pylist() == [None]
    assert OUTSIDE in refusal(codec.encode, bad).what


@pytest.mark.parametrize("type_", BYTES, ids=str)
@pytest.mark.parametrize("declared", [{"levels": ["aa"]}, {}, {"bounds": (0, 1)}], ids=str)
def test_bytes_without_an_encoding_are_refused_with_the_key_to_declare(type_, declared):
    error = refusal(make, type_, **declared)
    assert error.what.startswith(f"its type is {type_}, and the schema does not say which texts")
    assert "declare `encoding: utf-8`" in error.hint


def test_an_encoding_of_what_is_no_bytes_and_a_level_of_another_width_are_refused():
    for type_ in (TEXT, INT, pa.list_(pa.binary())):
        assert "does not hold bytes" in refusal(make, type_, levels=["a"], encoding="utf-8").what
    error = refusal(make, pa.binary(2), levels=["é", "a"], encoding="utf-8")
    assert "a level does not have the 2 bytes of its type" in error.what
    assert make(pa.binary(2), levels=["é", "a\0"], encoding="utf-8").n_levels == 2


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"levels": ["a"], "encoding": "utf8x"}, "the encoding 'utf8x' is not known"),
        ({"levels": ["a"], "encoding": "hex"}, "the encoding 'hex' is not known"),
        ({"levels": ["a", "€"], "encoding": "latin-1"}, "not all levels can be written in latin-1"),
        ({"levels": [1], "encoding": "utf-8"}, "whose levels are texts"),
        ({"levels": "discover", "other": -1, "encoding": "utf-8"}, "whose levels are texts"),
        ({"bounds": (0, 1), "kind": "continuous", "encoding": "utf-8"}, "whose levels are texts"),
        ({"role": "keep", "kind": None, "encoding": "utf-8"}, "belongs to a privatised column"),
    ],
)
def test_encodings_that_no_level_can_have_are_refused(declared, what):
    with pytest.raises(SpecError, match=what):
        Column(**{"role": "privatise", "kind": "categorical", **declared})


def test_a_column_without_an_encoding_is_written_as_before():
    column = {"role": "privatise", "kind": "categorical", "levels": ("a",)}
    assert "encoding" not in Column(**column).model_dump()
    assert Column(**column, encoding="utf-8").model_dump()["encoding"] == "utf-8"


NO_FIT, QUOTES = "do not fit its type", "write them without quotes, or correct the file's type"


@pytest.mark.parametrize(
    ("type_", "declared", "what"),
    [
        *(
            (type_, {"levels": [level]}, NO_FIT)
            for type_, level in [
                (pa.int8(), 300),
                (UNSIGNED, -1),
                (INT, 2**64),
                (INT, 0.5),
                (INT, 1e300),
                (F32, 1e300),
                (pa.float16(), 1e5),
                (FLOAT, 2**53 + 1),
                (FLOAT, 10**400),
                (pa.decimal128(5, 2), 0.125),
                (pa.decimal128(5, 2), 12345),
                (pa.int8(), True),
                (pa.int32(), DATES[0]),
                (DAY, 1),
                (MOMENTS["ns"], dt.date(9999, 1, 1)),
                (pa.time32("s"), 1),
                (pa.list_(TEXT), "a"),
                (pa.null(), 1),
            ]
        ),
        (
            pa.timestamp("s", "America/Lima"),
            {"levels": [dt.date(2000, 1, 1), dt.date(1, 1, 1)]},
            NO_FIT,
        ),  # beyond the calendar in its zone
        (F32, {"levels": [0.1, 0.1 + 1e-12]}, "become equal when stored as float"),
        (F32, {"atoms": [0.1, 0.1 + 1e-12]}, "become equal when stored as float"),
        (F32, {"bounds": (1, 1 + 1e-12)}, "become equal"),
        (F32, {"bounds": (0, 1e300)}, "do not fit"),
        (CENTS, {"bounds": (0, 0.125)}, "its bounds have more digits after the point than"),
        (CENTS, {"bounds": (0, 5), "atoms": [0.125]}, "do not fit"),
        *(
            (type_, {"bounds": (0, 0.5)}, "must be whole")
            for type_ in (pa.int32(), DAY, MOMENTS["us"])
        ),
        *((type_, {}, str(type_)) for type_ in (TEXT, pa.bool_(), pa.binary())),
        (DAY, {"bounds": (0, 10), "atoms": [DATES[0]]}, ""),
        *(
            (type_, {"atoms": [atom]}, "")
            for type_, atom in ((pa.int32(), 0.5), (pa.int32(), DATES[0]), (INT, 2**53 + 2))
        ),
    ],
    ids=str,
)
def test_domains_that_do_not_fit_the_columns_type_are_refused(type_, declared, what):
    assert what in refusal(make, type_, **declared).what


@pytest.mark.parametrize(
    ("type_", "hint"),
    [
        (pa.time64("ns"), "write numbers of microseconds since midnight"),
        (pa.time32("s"), "write numbers of seconds since midnight"),
        (pa.duration("ms"), "write numbers of milliseconds,"),
        (FLOAT, "write numbers, or correct"),
    ],
    ids=str,
)
def test_dates_as_bounds_of_another_type_are_refused_with_the_unit_to_use(type_, hint):
    assert hint in refusal(make, type_, bounds=DATES).hint


@pytest.mark.parametrize("type_", [pa.time32("ms"), pa.time64("us"), pa.time64("ns")], ids=str)
def test_a_day_has_24_hours(type_):
    day = 86_400 * 10 ** {"ms": 3, "us": 6, "ns": 6}[type_.unit]
    assert make(type_, bounds=(0, day - 1)).bounds == (0, day - 1)
    for bounds in ((0, day), (-1, 5)):
        assert "beyond one day, in m" in refusal(make, type_, bounds=bounds).what


@pytest.mark.parametrize(
    ("levels", "type_", "hint"),
    [
        (["false", "true"], pa.bool_(), QUOTES),
        (["1", "-2.5e3"], FLOAT, QUOTES),
        (["2020-01-31"], DAY, QUOTES),
        ([1], TEXT, "put them in quotes, or correct the file's type"),
        ([True], pa.large_string(), "put them in quotes, or correct the file's type"),
        (["no", "true"], pa.bool_(), "correct the schema, or the file's type"),
        ([0.5], INT, "correct the schema, or the file's type"),
    ],
)
def test_levels_that_only_quotes_make_wrong_are_answered_so(levels, type_, hint):
    error = refusal(make, type_, levels=levels)
    assert (error.hint, NO_FIT in error.what) == (hint, True)


@pytest.mark.parametrize(
    ("bounds", "mend"), [(None, "or declare bounds"), ([0, 100], "or declare `outside: clip`")]
)
def test_a_number_beyond_what_is_exact_is_answered_with_what_is_not_declared_yet(bounds, mend):
    assert refusal(make(UNSIGNED, bounds=bounds).encode, pa.array([2**60], UNSIGNED)).hint.endswith(
        mend
    )


FIRST, LAST = dt.date(1, 1, 1), dt.date(9999, 12, 31)
ROUNDED = "declare `unit: {}`, to which values are rounded down"
LISTED = f"{ROUNDED}, or list its values as levels"
CORRECT = "correct the file's type"


@pytest.mark.parametrize(
    ("type_", "inside", "beyond", "mend"),
    [
        *(
            (type_, [-(2**53), 2**53], [0, 2.0**54], LISTED.format(10))
            for type_ in (pa.int8(), INT)
        ),
        (UNSIGNED, [0, 2.0**53], [-(2.0**60), 5], LISTED.format(1000)),
        (FLOAT, [-(2.0**1021), 2.0**1021], [0, 1.7e308], "store it in a larger unit"),
        *(
            (type_, [-most, most], beyond, ROUNDED.format(unit))
            for type_, most, beyond, unit in (
                (CENTS, 2**50 / 100, [-(10**14), 5], "0.1"),
                (CENTS, 2**50 / 100, [0, 2**51], "10"),
                (pa.decimal128(5, 2), 999.99, [0, 10**14], "0.1"),
                (pa.decimal32(3, 0), 999, [0, 2**51], "10"),
                (pa.decimal256(60, 30), 1e-15, [0, 10**6], "0.000000001"),
            )
        ),
        *(
            (
                pa.duration(unit),
                [-(2**53), 2**53],
                [0, 2.0**60],
                f"{ROUNDED.format(coarser)}, and in which bounds count",
            )
            for unit, coarser in (("ns", "ms"), ("us", "ms"), ("ms", "s"))
        ),
        *((type_, [FIRST, LAST], [0, 2_932_897], CORRECT) for type_ in (DAY, pa.date64())),
        (MOMENTS["s"], [FIRST, LAST], [0, 1e15], CORRECT),
        (pa.timestamp("ms", "Asia/Tokyo"), [FIRST, dt.date(9999, 12, 30)], [FIRST, LAST], CORRECT),
        (pa.timestamp("s", "America/Lima"), [dt.date(1, 1, 2), LAST], [FIRST, LAST], CORRECT),
        *(
            (
                pa.timestamp(unit, zone),
                [dt.date(1684, 7, 29), dt.date(2255, 6, 4)],
                beyond,
                ROUNDED.format("ms"),
            )
            for unit, zone in (("us", None), ("ns", "+05:30"))
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
    codec = make(type_, bounds=inside)
    assert (codec.least, codec.greatest) == codec.bounds or not pa.types.is_integer(type_)
    ends = codec.decode(np.array(codec.bounds), np.zeros(2, dtype=bool))
    assert len(ends.to_pylist()) == 2  # a value that Python has, too
    assert tuple(codec.encode(ends)[0]) == codec.bounds
    error = refusal(make, type_, bounds=beyond)
    assert error.what.startswith("its bounds reach beyond ")
    assert error.hint == f"narrow the bounds, or {mend}"


FAR = {  # a public bound beyond what is exact, and the value of it; of times of a day there is none
    **dict.fromkeys((INT, UNSIGNED, pa.duration("us"), pa.duration("ms")), (2.0**60, 2**60)),
    **{MOMENTS[unit]: (dt.date(2260, 1, 1), dt.date(2260, 1, 1)) for unit in ("us", "ns")},
    pa.duration("ns"): (2.0**54, None),  # no value is so long
    pa.decimal128(38, 6): (10**12, 10**12),
    pa.decimal256(70, 20): (10**12, 10**12),
}


@pytest.mark.parametrize("type_", FAR, ids=str)
def test_the_way_on_that_a_number_beyond_is_answered_with_leads_on(type_):
    bound, value = FAR[type_]
    low = dt.date(2000, 1, 1) if isinstance(bound, dt.date) else 0
    error = refusal(make, type_, bounds=(low, bound))
    found = re.search("`unit: ([^`]+)`", error.hint)[1]
    if pa.types.is_integer(type_):
        assert "list its values as levels" in error.hint
        levels = [value - 1, value, value + 1]
        assert make(type_, levels=levels).encode(pa.array(levels, type_)).tolist() == [0, 1, 2]
    unit = found if pa.types.is_temporal(type_) else float(found)
    if pa.types.is_integer(type_):
        bound = bound // unit * unit
    make(type_, unit=unit, bounds=(low, bound // 1000 if pa.types.is_duration(type_) else bound))
    if unit == "ms":  # as in the years that nanoseconds have not
        bound = 2.0**53 if pa.types.is_duration(type_) else dt.date(9999, 12, 31)
        codec = make(type_, unit=unit, bounds=(low, bound))
        assert codec.bounds[1] == codec.greatest
    if value is not None:
        whole = pa.types.is_integer(type_) or pa.types.is_duration(type_)
        given = pa.array([value]).cast(type_) if whole else as_array([value], type_)
        assert refusal(make(type_).encode, given).hint.endswith(", or declare bounds")


def test_seconds_beyond_what_is_exact_are_answered_with_days():
    error = refusal(make, pa.duration("s"), bounds=(0, 2.0**54))
    assert error.hint == "narrow the bounds, or store it as whole days"


@pytest.mark.parametrize("bound", [2**53 + 1, -(2**53) - 1, 10**20 + 1])
def test_whole_bounds_that_float64_would_change_are_refused(bound):
    for bounds in ([0, bound], [bound, 0]):
        with pytest.raises(
            SpecError,
            match=r"whole bounds beyond ±2\*\*53 are not exact; round them outward",
        ):
            Column(role="privatise", kind="continuous", bounds=bounds)


def test_atoms_of_times_are_declared_as_dates_and_only_floats_and_decimals_are_off_the_lattice():
    for type_ in TIMES:
        codec = make(type_, atoms=[DATES[0]])
        assert codec.atoms == tuple(codec.encode(as_array([DATES[0]], type_))[0])
    assert [type_ for type_ in VALUE_TYPES if not make(type_).lattice] == FLOATS + DECIMALS


@pytest.mark.parametrize("type_", [CENTS, pa.decimal64(16, 4), pa.decimal256(70, 40)], ids=str)
def test_decimals_come_back_with_all_digits_and_other_numbers_as_the_nearest(type_):
    rng, codec = np.random.default_rng(1), make(type_)
    most = round(codec.greatest * 10.0**type_.scale)
    counted = [-most, most, 0, 1, -1, *rng.integers(-most, most, 10_000).tolist()]
    array = pa.array([Decimal(each).scaleb(-type_.scale) for each in counted], type_)
    back = codec.decode(*codec.encode(array))
    back.validate(full=True)
    assert back.equals(array)
    near = np.array([-1.4, 0.6, 2.0**60]) / 10.0**type_.scale
    found = codec.decode(near, np.zeros(3, dtype=bool)).to_pylist()
    assert found == [Decimal(each).scaleb(-type_.scale) for each in (-1, 1, most)]


@pytest.mark.parametrize("type_", [F32, FLOAT, CENTS, pa.int32(), MOMENTS["ns"]], ids=str)
def test_nothing_lies_under_a_released_null(type_):
    released = make(type_, nulls="level").decode(np.array([1815.0, 7.0]), np.array([True, False]))
    assert released.null_count == 1
    assert not np.frombuffer(released.buffers()[1], dtype=np.uint8)[: type_.bit_width // 8].any()
