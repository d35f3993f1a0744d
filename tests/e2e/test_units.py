"""Columns beyond what is exact, with a unit: in each mechanism, from files and frames, on the card, and in an opened release."""

import datetime as dt
from decimal import Decimal

import dask
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from e2e.helpers import call_cli, continuous, mixed, refusing, run_here, says, write_job

import dpdask
from dpdask.schema import Schema

N_ROWS = 600
FIRST, LAST = dt.date(1, 1, 2), dt.date(9999, 12, 30)
COLUMNS = {
    "whole": mixed([-(10**18), 10**18], atoms=[-(10**18), 10**18], unit=1000, type="int64"),
    "large": continuous([0, 1.8e19], unit=10_000, type="uint64", nulls="level"),
    "money": mixed([-1e9, 1e9], atoms=[-1e9, 1e9], unit=0.01, type="decimal128(30, 10)"),
    "when": continuous([FIRST, LAST], unit="ms", type="timestamp[us]"),
    "zoned": continuous(
        [dt.date(1678, 1, 1), dt.date(2262, 1, 1)], unit="s", type="timestamp[ns, tz=UTC]"
    ),
    "span": continuous([0, 10**11], unit="s", type="duration[us]"),
}
STEPS = dict(zip(COLUMNS, (1000, 10_000, 10**8, 1000, 10**9, 10**6), strict=True))
COUNTED = {  # the bounds, as cards and tests count them
    "whole": (-(10**15), 10**15),
    "large": (0, 18 * 10**14),
    "money": (-(10**11), 10**11),
    "when": (-62_135_510_400_000, 253_402_214_399_999),
    "zoned": (-9_214_560_000, 9_214_732_799),
    "span": (0, 10**11),
}
MARGINALS = {"kind": "marginals", "cliques": [[name] for name in COLUMNS]}
CELLS = {"kind": "histogram", "bins": 2, "threshold": "none"}
MECHANISMS = {
    "holdout": {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.3}},
    "dip": {"kind": "dip", "reference": {"kind": "histogram"}},
    "copula": {"kind": "copula"},
    "rows": {"kind": "histogram", "bins": 2, "output": "rows"},
    "cells": CELLS,
    "marginals": MARGINALS,
}


def decimals(numbers):
    return pa.array([Decimal(int(n)).scaleb(-10) for n in numbers], pa.decimal128(30, 10))


def make_table():
    """Return values between multiples, and of some columns many at both ends."""
    rng = np.random.default_rng(3)
    share, at = rng.beta(2, 2, N_ROWS), rng.random(N_ROWS)
    numbers = {}
    for name, (low, high) in COUNTED.items():
        n, reach = STEPS[name], high - low
        inside = [low * n + int(each * reach) * n + n // 3 for each in share]
        is_low, is_high = (at < 0.25, at > 0.75) if "atoms" in COLUMNS[name] else (at < 0, at > 1)
        numbers[name] = [
            low * n if one else high * n if other else each
            for one, other, each in zip(is_low, is_high, inside, strict=True)
        ]
    types = {name: pa.int64() for name in COLUMNS} | {"large": pa.uint64()}
    arrays = {name: pa.array(numbers[name], types[name]) for name in COLUMNS if name != "money"}
    arrays["large"] = pa.array(numbers["large"], pa.uint64(), mask=at < 0.1)
    cast = {
        "when": pa.timestamp("us"),
        "zoned": pa.timestamp("ns", "UTC"),
        "span": pa.duration("us"),
    }
    arrays |= {name: arrays[name].cast(type_) for name, type_ in cast.items()}
    arrays["money"] = decimals(numbers["money"])
    return pa.table({name: arrays[name] for name in COLUMNS})


def count(array):
    """Return how many units released values are, after a check that they are multiples."""

    def whole(value):
        return int(value.scaleb(10)) if isinstance(value, Decimal) else int(value)

    array, name = array
    plain = array if pa.types.is_decimal(array.type) or pa.types.is_integer(array.type) else None
    found = [
        whole(each)
        for each in (array.cast(pa.int64()) if plain is None else plain).to_pylist()
        if each is not None
    ]
    assert not any(each % STEPS[name] for each in found), name
    return np.array([each // STEPS[name] for each in found])


def check_released(found, given):
    assert found.schema.types == given.schema.types
    for name, (low, high) in COUNTED.items():
        counts = count((found[name], name))
        assert low <= counts.min() <= counts.max() <= high
        if "atoms" in COLUMNS[name]:
            assert (counts == low).mean() == pytest.approx(0.25, abs=0.1)
            assert (counts == high).mean() == pytest.approx(0.25, abs=0.1)
        middle = (counts.mean() - low) / (high - low)
        assert middle == pytest.approx(0.5, abs=0.1), name
        assert len(set(counts)) > 20, name
    assert found["large"].null_count > 0


def run(folder, source, mechanism, **more):
    asked = {"privacy__epsilon": 60.0, "schema": COLUMNS, "mechanism": mechanism} | more
    if mechanism["kind"] != "dip" and "privacy" not in more:
        asked["privacy__delta"] = 1e-6 if mechanism["kind"] in ("copula", "marginals") else 0
    run_here(write_job(folder, source, folder / "out", **asked))
    shards = sorted((folder / "out").glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(shard) for shard in shards])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in")
    pq.write_table(make_table(), folder / "rows.parquet")
    return folder


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_each_mechanism_releases_multiples_exactly(mechanism, source, tmp_path):
    given, schema = make_table(), COLUMNS
    if mechanism["kind"] == "histogram":  # of few columns, since cells multiply
        schema = {name: COLUMNS[name] for name in ("whole", "when")}
        schema |= {name: {"role": "drop"} for name in COLUMNS if name not in schema}
    found = run(tmp_path, source, mechanism, schema=schema)
    release = dpdask.open(str(tmp_path / "out"))
    told = release.card["columns"]
    assert told["whole"] | {"unit": 1000, "numbers": "units of 1000"} == told["whole"]
    assert told["whole"]["bounds"] == [-1e15, 1e15]
    assert told["whole"]["atoms"] == [-1e15, 1e15]
    assert told["when"]["numbers"] == "milliseconds since 1970-01-01"
    if mechanism["kind"] == "histogram":
        for name in ("whole", "when"):
            assert found.schema.field(name).type == given.schema.field(name).type
            counts = count((found[name], name))
            assert [counts.min(), counts.max()] == [-(10**15), 10**15] or name == "when"
    elif mechanism is not MARGINALS:
        check_released(found, given)
    asked = release.quantile("whole", 0.5) if mechanism is not CELLS else release.mean("whole")
    assert says(asked, "the numbers of 'whole' are units of 1000, rounded down")
    # the median of a histogram is the point of a cell
    assert abs(float(asked.estimate)) < (6e14 if mechanism["kind"] == "histogram" else 3e14)
    when = release.mean("when")
    assert 4000 < when.estimate.year < 6000
    for name, middle in (("when", "5000-01-01"), ("zoned", "1970-01-01T12:00")):
        if name in schema and schema[name]["role"] == "privatise":
            low, high = release.where(f"{name} < {middle}").count().interval(0.99999)
            assert low < 0.6 * N_ROWS
            assert high > 0.3 * N_ROWS  # a hold-out leaves out some
            assert mechanism["kind"] == "histogram" or high - low < 0.7 * N_ROWS
    assert "in units of 1000" in (tmp_path / "out" / "_dpdask" / "release.html").read_text()


def test_ranges_hold_what_values_are_rounded_down_to(source, tmp_path):
    names, given = ("whole", "money", "span"), make_table()
    schema = refusing({name: COLUMNS[name] for name in names})
    schema |= {name: {"role": "drop"} for name in COLUMNS if name not in names}
    designs = {
        name: {
            "design": "case2",
            "anchors": {"name": "uniform", "loc": float(low), "scale": float(high - low)},
        }
        for name, (low, high) in COUNTED.items()
        if name in names
    }
    mechanism = {"kind": "interval", "columns": designs}
    asked = {"schema": schema, "privacy": None, "output__order": "keep"}
    found = run(tmp_path, source, mechanism, **asked)
    own = {"whole": given["whole"], "span": given["span"].cast(pa.int64())}
    numbers = {name: each.to_pylist() for name, each in own.items()}
    numbers["money"] = [int(each.scaleb(10)) for each in given["money"].to_pylist()]
    for name in names:
        counts = np.array([number // STEPS[name] for number in numbers[name]])
        low, high = (found[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
        assert ((low <= counts) & (counts <= high)).all()
        assert (low == np.floor(low)).all()
    opened = dpdask.open(str(tmp_path / "out"))
    assert opened.card["columns"]["whole"]["bounds"] == [-1e15, 1e15]
    assert abs(float(opened.mean("whole").estimate)) < 3e14


def test_csv_is_read_alike(tmp_path):
    names = ("whole", "money", "when")
    given = make_table().select(names)
    (tmp_path / "in").mkdir()
    pa_csv.write_csv(given, tmp_path / "in" / "rows.csv")
    schema = {name: COLUMNS[name] for name in names}
    dip = MECHANISMS["dip"]
    found = run(tmp_path, tmp_path / "in", dip, schema=schema, privacy__epsilon=40.0)
    assert found.schema.types == given.schema.types
    for name in names:
        assert len(count((found[name], name))) > 0
    assert {-(10**18), 10**18} < set(found["whole"].to_pylist())


@pytest.mark.filterwarnings("ignore:ε = ", "ignore:.*is large", "ignore:A released row keeps")
def test_frames_and_conditions_of_models_have_the_columns_own_values():
    given = make_table().select(["whole", "when", "span"])
    frame = given.to_pandas()
    columns = {name: {**COLUMNS[name]} for name in given.column_names}
    for column in columns.values():
        del column["type"]
    schema = Schema.from_dict({"columns": columns})
    with dask.config.set(scheduler="synchronous"):
        dip = dpdask.DIP(schema, epsilon=50.0, reference=dpdask.Histogram(), insecure_seed=1)
        with dip.fit(frame) as release:
            found = release.transform(frame)
        assert {-(10**18), 10**18} < set(found["whole"])
        assert not (found["whole"] % 1000).any()
        copula = dpdask.GaussianCopula(schema, epsilon=9.0, delta=1e-6, insecure_seed=1)
        with copula.fit(given) as release:
            drawn = release.sample(50, seed=1, where="whole >= 500000000000000000").compute()
    assert drawn["whole"].min() >= 5 * 10**17


def test_validate_and_plan_name_the_unit(source, tmp_path):
    plain = {name: {**column} for name, column in COLUMNS.items()}
    for column in plain.values():
        del column["unit"]
    job = write_job(tmp_path, source, tmp_path / "out", schema=plain, mechanism=MECHANISMS["dip"])
    done = call_cli("validate", job)
    assert done.returncode == 64, done.stderr
    for unit in ("1000", "10000", "0.000001", "ms"):
        assert f"`unit: {unit}`" in done.stderr
    job = write_job(tmp_path, source, tmp_path / "out", schema=COLUMNS, mechanism=MECHANISMS["dip"])
    planned = call_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
