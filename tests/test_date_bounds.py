"""Bounds that are dates: read from YAML, converted exactly, kept in releases, refused in words about dates."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from dpdask.codec import ValueCodec, codec_for
from dpdask.documents import parse_yaml
from dpdask.errors import DataError, SpecError
from dpdask.io.csv import csv_type
from dpdask.schema import Schema

DAYS = "[2020-01-01, 2024-12-31]"
START = dt.datetime(2020, 6, 1)  # noqa: DTZ001 - of a column without a zone
TIMES = "[2020-01-01 06:00:00, 2024-12-31 12:00:00.5]"


def column(bounds, **more):
    data = parse_yaml(
        f"columns: {{x: {{role: privatise, kind: continuous, bounds: {bounds}}}}}", "schema.yaml"
    )
    data["columns"]["x"] |= more
    return Schema.from_dict(data).columns["x"]


def codec(bounds, type_):
    made = codec_for("x", column(bounds), type_)
    assert isinstance(made, ValueCodec)
    return made


@pytest.mark.parametrize("type_", [pa.date32(), pa.date64()])
def test_dates_bound_a_column_of_dates(type_):
    made = codec(DAYS, type_)
    assert made.decode(np.array(made.bounds), np.zeros(2, dtype=bool)).to_pylist() == [
        dt.date(2020, 1, 1),
        dt.date(2024, 12, 31),
    ]


@pytest.mark.parametrize(
    ("unit", "step"),
    [
        ("s", dt.timedelta(seconds=1)),
        ("ms", dt.timedelta(milliseconds=1)),
        ("us", dt.timedelta(microseconds=1)),
    ],
)
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_dates_bound_a_column_of_times_from_the_first_moment_to_the_last(unit, step, zone):
    made = codec(DAYS, pa.timestamp(unit, tz=zone))
    low, high = made.decode(np.array(made.bounds), np.zeros(2, dtype=bool)).to_pylist()
    end = dt.datetime(2025, 1, 1, tzinfo=None if zone is None else dt.UTC)
    assert (low, high) == (dt.datetime(2020, 1, 1, tzinfo=end.tzinfo), end - step)


def test_times_bound_a_column_of_times_exactly():
    assert codec(TIMES, pa.timestamp("us")).bounds == (1577858400e6, 1735646400.5e6)
    assert codec(TIMES, pa.timestamp("ns")).bounds == (
        1577858400e6,
        1735646400.5e6,
    )  # counted in microseconds
    assert codec("[2020-01-01T08:00:00+02:00, 2024-12-31]", pa.timestamp("s", tz="UTC")).bounds == (
        1577858400.0,
        1735689599.0,
    )


@pytest.mark.parametrize(
    ("bounds", "type_", "says"),
    [
        (DAYS, pa.int64(), "its bounds are dates, but its type is int64"),
        (DAYS, pa.float64(), "its bounds are dates, but its type is double"),
        (
            TIMES,
            pa.date32(),
            r"its bound 2020-01-01 06:00:00 is a time, but its type is date32\[day\]; write the date 2020-01-01",
        ),
        (
            TIMES,
            pa.timestamp("s"),
            r"its bound 2024-12-31 12:00:00.500000 is finer than its type timestamp\[s\]",
        ),
        (
            "[2020-01-01T00:00:00Z, 2024-12-31]",
            pa.timestamp("us"),
            ".* has a time zone, but its type .* has none",
        ),
        (
            "[2000, 2040]",
            pa.timestamp("ms"),
            "its bounds look like years, .*; write dates, such as 2000-01-01",
        ),
        (
            "[1900, 2024]",
            pa.date32(),
            "its bounds look like years, .*; write dates, such as 2000-01-01",
        ),
    ],
)
def test_bounds_that_do_not_fit_the_type_are_refused_in_dates(bounds, type_, says):
    with pytest.raises(DataError, match=f"^column 'x': {says}"):
        codec(bounds, type_)


@pytest.mark.parametrize(
    "bounds", ["[2020-01-01, 2020-01-01]", "[2020-01-01, 5]", "[0, 2020-01-01]"]
)
def test_bounds_are_two_dates_the_earlier_one_first(bounds):
    with pytest.raises(SpecError, match=r"columns\.x.*bounds need two finite numbers or two dates"):
        column(bounds)
    with pytest.raises(
        SpecError,
        match=r"the lower bound 2024-12-31 is above the upper bound 2020-01-01 06:00:00; swap them",
    ):
        column("[2024-12-31, 2020-01-01T06:00:00]")


def test_atoms_lie_between_dates():
    assert column(DAYS, kind="mixed", atoms=[dt.date(2021, 1, 1)]).atoms
    with pytest.raises(SpecError, match="atoms must lie within the bounds"):
        column(DAYS, kind="mixed", atoms=[dt.date(2019, 1, 1)])


def test_a_csv_column_has_the_type_of_its_bounds():
    assert csv_type(column(DAYS)) == pa.date32()
    assert csv_type(column(TIMES)) == pa.timestamp("us")
    assert csv_type(column("[0, 1]")) == pa.float64()
