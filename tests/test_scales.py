"""Values in a declared unit: rounded down, exact beyond 2**53, and refused where they are not, with the unit to use."""

import datetime as dt
import re
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from dpdask.codec import codec_for
from dpdask.errors import DataError, SpecError
from dpdask.scales import count_type
from dpdask.schema import Column, Schema

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
YEARS = dt.date(1, 1, 2), dt.date(9999, 12, 30)
OF_NANOSECONDS = dt.date(1678, 1, 1), dt.date(2262, 1, 1)
ALIKE = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32()]
# each type, a unit, and bounds that are not exact without it, if there are any
WIDE = [
    (pa.int64(), 1000, (-9.007e18, 9.007e18)),
    (pa.uint64(), 10_000, (0, 1.8e19)),
    (pa.decimal64(18, 2), 0.1, (-1e14, 1e14)),
    (pa.decimal128(38, 10), 0.01, (-1.0e13, 1.0e13)),
    (pa.decimal128(38, 0), 1.0e22, (-1.0e37, 1.0e37)),
    (pa.decimal256(76, 30), 100, (0, 1.0e17)),
    *(
        (pa.timestamp(own, tz), unit, OF_NANOSECONDS if own == "ns" else YEARS)
        for own in ("us", "ns")
        for tz in (None, "Asia/Tokyo")
        for unit in ("ms", "s")
    ),
    (pa.duration("us"), "ms", (-9.0e15, 9.0e15)),
    (pa.duration("us"), "s", (-9.0e12, 9.0e12)),
    (pa.duration("ms"), "s", (-9.0e15, 9.0e15)),
    (pa.duration("ns"), "s", (-(10**9), 10**9)),
]
NARROW = [
    (pa.int64(), 1024, (-(2**62), 2**63 - 1024)),
    *((type_, 50, (0, 100)) for type_ in ALIKE),
    (pa.decimal32(7, 2), 1, (-99_999, 99_999)),
    *((type_, "s", (0, 86_399)) for type_ in (pa.time32("ms"), pa.time64("us"), pa.time64("ns"))),
    (pa.time64("ns"), "us", (0, 86_399_999_999)),
    (pa.timestamp("ms"), "s", (-(10**9), 10**9)),
    (pa.timestamp("s"), "s", YEARS),
]
KINDS = [*WIDE, *NARROW]
MANY = [-(10**17), 9_007_199_254_993_000, 10**17]


def name(value):
    return str(value) if isinstance(value, pa.DataType) else None


def make(type_, **declared):
    kind = "mixed" if "atoms" in declared else "continuous"
    return codec_for("x", Column(role="privatise", kind=kind, **declared), type_)


def wholes(array):
    """Return values as Python's whole numbers of their type's last digit or unit."""
    if pa.types.is_decimal(array.type):
        scale = 10**array.type.scale
        return [each and int(Fraction(each) * scale) for each in array.to_pylist()]
    plain = array.type if pa.types.is_integer(array.type) else pa.int64()
    return array.cast(pa.int32() if array.type.bit_width == 32 else plain).cast(plain).to_pylist()


def typed(numbers, type_):
    """Return whole numbers of a type's last digit or unit as its values."""
    if pa.types.is_decimal(type_):
        written = (each if each is None else f"{each}e{-type_.scale}" for each in numbers)
        return pa.array([each and Decimal(each) for each in written], type_)
    if pa.types.is_integer(type_):
        return pa.array(numbers, type_)
    return pa.array(numbers, pa.int32() if type_.bit_width == 32 else pa.int64()).cast(type_)


def steps(type_, unit):
    """Return how many of a type's last digits or units a unit is."""
    if isinstance(unit, str):
        return PER_SECOND[type_.unit] // PER_SECOND[unit]
    return int(Decimal(str(unit)).scaleb(getattr(type_, "scale", 0)))


@pytest.mark.parametrize(("type_", "unit", "bounds"), KINDS, ids=name)
def test_values_are_rounded_down_to_multiples_and_come_back_exactly(type_, unit, bounds):
    codec, n = make(type_, unit=unit, bounds=bounds, nulls="level"), steps(type_, unit)
    low, high = map(int, codec.bounds)
    assert codec.lattice
    rng = np.random.default_rng(1)
    counts = [low, high, *(low + int(share * (high - low - 1)) for share in rng.random(200))]
    rests = [0, 0, *(int(share * n) for share in rng.random(200))]
    rests[2], rests[3] = n - 1, min(1, n - 1)
    given = [count * n + rest for count, rest in zip(counts, rests, strict=True)]
    values, is_null = codec.encode(typed([*given, None], type_))
    assert [*map(int, values[:-1])] == counts
    assert is_null.tolist() == [False] * len(counts) + [True]
    released = codec.decode(values, is_null)
    released.validate(full=True)
    assert released.type == type_
    assert wholes(released) == [*(count * n for count in counts), None]
    again, _ = codec.encode(released)
    assert again.tolist() == values.tolist()
    assert codec.n_outside(typed(given, type_)) == 0


@pytest.mark.parametrize(("type_", "unit", "bounds"), KINDS, ids=name)
def test_values_outside_are_clipped_to_multiples(type_, unit, bounds):
    codec = make(type_, unit=unit, bounds=bounds)
    narrow, n = make(type_, unit=unit, bounds=bounds, outside="refuse"), steps(type_, unit)
    low, high = (int(bound) * n for bound in codec.bounds)
    beyond = []
    for number in (low - 1, low - 5 * n, high + n, high + 7 * n + 1, -(2**63), 2**63 - 1):
        try:
            array = typed([number], type_)
            array.validate(full=True)
        except (pa.ArrowInvalid, OverflowError, TypeError):
            continue
        if pa.types.is_time(type_) and not 0 <= number < 86_400 * PER_SECOND[type_.unit]:
            continue
        if not low <= number // n * n <= high:
            beyond.append(number)
            assert codec.n_outside(array) == 1
            assert wholes(codec.decode(*codec.encode(array))) == [low if number < low else high]
            with pytest.raises(
                DataError, match=r"holds a value (outside its bounds|beyond)"
            ) as error:
                narrow.encode(array)
            assert str(abs(number)) not in re.sub(r"[,.]", "", str(error.value))
    fills = type_ in (pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.decimal32(7, 2))
    assert beyond or fills


@pytest.mark.parametrize(("type_", "unit", "bounds"), WIDE, ids=name)
def test_bounds_that_are_not_exact_name_the_least_unit(type_, unit, bounds):
    if pa.types.is_duration(type_):  # whose numbers count in the unit
        bounds = tuple(
            bound * steps(type_, unit) // (1000 if type_.unit == "ns" else 1) for bound in bounds
        )
    if type_ == pa.duration("ns"):
        return  # exact, in microseconds
    with pytest.raises(DataError, match="its bounds reach beyond") as error:
        make(type_, bounds=bounds)
    found = re.search("`unit: ([^`]+)`", error.value.hint)[1]
    if isinstance(unit, str):
        assert found == {"ns": "ms", "us": "ms", "ms": "s"}[type_.unit]
        coarser = [found]
    else:
        assert Decimal(found) in [Decimal(10) ** power for power in range(-30, 40)]
        with pytest.raises(
            DataError, match=r"its bounds reach beyond what .* holds exactly in units"
        ):
            make(type_, bounds=bounds, unit=float(found) / 10)
        coarser = [float(found), float(found) * 10]
    for each in coarser:
        each = int(each) if type_ in (pa.int64(), pa.uint64()) else each
        if pa.types.is_duration(type_):
            bounds = tuple(bound * steps(type_, each) ** -1 for bound in bounds)
        rounded = [
            bound // each * each if pa.types.is_integer(type_) else bound for bound in bounds
        ]
        codec = make(type_, bounds=rounded, unit=each)
        ends = codec.decode(np.array(codec.bounds), np.zeros(2, dtype=bool))
        assert codec.encode(ends)[0].tolist() == list(codec.bounds)


@pytest.mark.parametrize(
    ("type_", "unit", "says"),
    [
        *((type_, 10, "leave it out") for type_ in (pa.float32(), pa.float64())),
        *(
            (type_, unit, "leave it out")
            for type_ in (pa.date32(), pa.date64())
            for unit in ("s", 1)
        ),
        *((pa.int64(), unit, "write a whole number") for unit in ("s", 0.5, 2.5, 1, 1.0e17)),
        *((pa.decimal128(9, 2), unit, "at most 2 digits") for unit in ("s", 0.001, 20, 0.5)),
        *((pa.timestamp("ms"), unit, "write ms or s") for unit in ("us", 1000)),
        *((pa.duration("s"), unit, "write ms or s") for unit in ("ms", 60)),
        (pa.time32("s"), "ms", "write ms or s"),
        *((type_, 1000, "that the type holds") for type_ in (pa.int8(), pa.decimal128(5, 2))),
    ],
    ids=name,
)
def test_a_unit_that_does_not_fit_the_type_is_refused(type_, unit, says):
    with pytest.raises(DataError, match=f"its unit .* does not fit its type .*{says}"):
        make(type_, unit=unit)


@pytest.mark.parametrize(
    "unit", ["ns", "min", "", True, 0, -1, float("nan"), float("inf"), [1], "1000"]
)
def test_a_unit_is_a_number_or_one_of_time(unit):
    with pytest.raises(SpecError, match=r"a number, such as 1000 or 0.01, or of times s, ms or us"):
        Schema.from_dict(
            {"columns": {"x": {"role": "privatise", "kind": "continuous", "unit": unit}}}
        )


@pytest.mark.parametrize(
    "column", [{"role": "keep"}, {"role": "drop"}, {"kind": "discrete", "levels": [1]}]
)
def test_only_columns_of_numbers_have_a_unit(column):
    with pytest.raises(SpecError, match=r"takes no unit|unit belongs to a privatised column"):
        Schema.from_dict({"columns": {"x": {"role": "privatise", "unit": 1000, **column}}})


def test_bounds_and_atoms_are_multiples():
    whole, cents = pa.int64(), pa.decimal128(20, 4)
    for type_, unit, bounds in (
        (whole, 1000, (1, 2000)),
        (whole, 7, (0, 8)),
        (cents, 0.01, (0, 0.125)),
    ):
        with pytest.raises(
            DataError, match=r"its bounds are no multiples of its unit .*round them outward"
        ):
            make(type_, unit=unit, bounds=bounds)
        with pytest.raises(DataError, match="its atoms are no multiples of its unit"):
            make(type_, unit=unit, bounds=(0, 7000), atoms=[bounds[1] if bounds[0] == 0 else 1])
    with pytest.raises(DataError, match=r"is finer than its type timestamp\[s, tz=UTC\]"):
        make(
            pa.timestamp("us", "UTC"),
            unit="s",
            bounds=(YEARS[0], dt.datetime(2021, 1, 1, 0, 0, 0, 5, dt.UTC)),
        )
    held = make(whole, unit=1000, bounds=(-(10**17), 10**17), atoms=MANY)
    atoms = held.decode(np.array(held.atoms), np.zeros(3, dtype=bool))
    assert atoms.to_pylist() == MANY


def test_the_error_of_a_decimal_shows_no_value():
    codec = make(pa.decimal128(38, 4), unit=100, bounds=(0, 1000))
    for text in ("-" + "9" * 34 + ".9999", "9" * 34 + ".9999"):
        values, _ = codec.encode(pa.array([Decimal(text)], pa.decimal128(38, 4)))
        assert values[0] in codec.bounds


def test_decimals_are_rounded_down_as_decimals_are():
    rng = np.random.default_rng(3)
    for scale, unit in ((10, 0.01), (4, 10), (0, 1000), (18, 1)):
        codec = make(pa.decimal128(38, scale), unit=unit)
        most = int(2**50 * Decimal(str(unit)) * 10**scale)
        numbers = [
            int(each) * most // 2**40 + int(rest)
            for each, rest in rng.integers(-(2**40), 2**40, (500, 2))
        ]
        given = [Decimal(min(max(n, -most), most)).scaleb(-scale) for n in numbers]
        step = Decimal(str(unit))
        expected = [(each / step).to_integral_value(ROUND_FLOOR) for each in given]
        values, _ = codec.encode(pa.array(given, codec.type))
        assert [*map(int, values)] == expected


FULL_WORDS = [2**32 - 1, 2**33 - 1, 3 * 2**40 + 2**32 - 1, 2**50 - 1]


@pytest.mark.parametrize(
    ("type_", "unit"),
    [
        *((pa.decimal128(38, scale), 1) for scale in range(9, 20)),
        *((pa.decimal128(38, 0), float(f"1e{digits}")) for digits in range(9, 23)),
        *((pa.decimal256(76, scale), 0.01) for scale in range(9, 50, 3)),
        (pa.decimal256(76, 20), 1e40),
    ],
    ids=name,
)
def test_no_count_is_one_too_low_where_its_words_are_full(type_, unit):
    """Arrow divides wrongly by ten to the power of 17, 18, 20 and more if 32 bits of the quotient are ones."""
    codec, n = make(type_, unit=unit), steps(type_, unit)
    counts = [sign * count for count in FULL_WORDS for sign in (1, -1)]
    for rest in (0, n - 1, n // 3):
        values, _ = codec.encode(typed([count * n + rest for count in counts], type_))
        assert [*map(int, values)] == counts


def test_units_and_bounds_at_the_ends_of_what_is_exact():
    codec = make(pa.decimal256(76, 0), unit=1e60, bounds=(0, 1e64))
    none = np.zeros(2, dtype=bool)
    assert codec.decode(np.array([5.0, 1e4]), none).to_pylist() == [5 * 10**60, 10**64]
    assert make(pa.int64(), unit=1000, bounds=(0, 9.007199254740992e18)).bounds == (0.0, 2.0**53)
    with pytest.raises(DataError, match="its bounds reach beyond"):
        make(pa.int64(), unit=1000, bounds=(0, 9.007199254740993e18))


def test_the_type_of_counts():
    assert count_type(pa.timestamp("ns", "UTC"), "s") == pa.timestamp("s", "UTC")
    assert count_type(pa.decimal128(5, 2), 1) == pa.int64()
    assert [count_type(pa.time64("ns"), unit) for unit in ("us", "s")] == [
        pa.time64("us"),
        pa.time32("s"),
    ]
    assert count_type(pa.float64(), None) == pa.float64()


def test_digests_and_words_of_schemas_tell_the_unit():
    plain, coarse = (
        Column(role="privatise", kind="continuous", bounds=(0, 2000), **more)
        for more in ({}, {"unit": 1000})
    )
    assert "unit" not in plain.model_dump()
    assert coarse.model_dump()["unit"] == 1000
    assert coarse.domain_in_words == "0.0 to 2000.0, in units of 1000"
