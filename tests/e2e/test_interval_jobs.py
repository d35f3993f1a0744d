"""Interval jobs: every released range is true, kept columns are the input's, there is no ε anywhere, and crashes change nothing."""

from __future__ import annotations

import datetime as dt
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import (
    MIXED_SCHEMA,
    call_cli,
    digests,
    hidden,
    lake,
    load,
    refusing,
    run_here,
    write_job,
)
from faults.drivers import Drivers
from mechanisms.containing import held_by
from scipy import stats

from dpdask.engine.compute import Progress
from dpdask.errors import DataError, SpecError
from dpdask.inference.range_estimates import npmle
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import run_job, status
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.ranges import Ranges, coverages
from dpdask.stats.ranges import RangeCounts, grid_of_ranges

SCHEMA: dict[str, Any] = {**refusing(MIXED_SCHEMA), "genre": {"role": "drop", "type": "string"}}
UNIT: dict[str, Any] = {"name": "uniform", "loc": 0, "scale": 1}


def uniform(scale: float) -> dict[str, Any]:
    return {"name": "uniform", "loc": 0, "scale": scale}


DESIGNS: dict[str, Any] = {
    "rating": {"design": "case2", "anchors": uniform(5.5)},
    "price": {
        "design": "case1",
        "anchors": {"coverage": 0.7, "family": {"name": "norm"}},
        "reference": UNIT,
    },
    "age": {"design": "ring", "anchors": uniform(120)},
    "amount": {
        "design": "canonical",
        "n_anchors": 2,
        "anchors": uniform(100),
        "acceptable": [[float("-inf"), 0.0]],
    },
}
PRIVATE = list(DESIGNS)
ENDS = [f"{name}_{end}" for name in PRIVATE for end in ("lower", "upper")]
SIZES = [150, 90, 1700, 40, 300]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES, schema=SCHEMA)


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def job(folder: Path, source: Path, designs: dict[str, Any] = DESIGNS, **changed: Any) -> Path:
    given = {
        "schema": SCHEMA,
        "mechanism": {"kind": "interval", "columns": designs},
        "privacy": None,
        "output__rows_per_shard": 150,
        **changed,
    }
    return write_job(folder / "job", source, folder / "out", **given)


def run(folder: Path, source: Path, designs: dict[str, Any] = DESIGNS, **changed: Any) -> pa.Table:
    run_here(
        job(folder, source, designs, **{"output__order": "keep", **changed})
    )  # rows are compared with their originals
    return read(folder / "out")


def read(folder: Path) -> pa.Table:
    return pads.dataset(folder, exclude_invalid_files=False).to_table()


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
    return found


def ranges(released: pa.Table, name: str) -> Ranges:
    lower, upper = (released[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
    is_null = np.asarray(released[f"{name}_lower"].is_null().to_numpy())
    return Ranges(lower=lower.astype(float), upper=upper.astype(float), is_null=is_null)


# ---- what is released


def test_every_range_holds_its_value_and_kept_columns_are_the_input_s(
    source: Path, tmp_path: Path
) -> None:
    released, given = run(tmp_path, source), read(source)
    assert released.column_names == ["userId", *ENDS]
    assert released["userId"].equals(given["userId"])
    for name in PRIVATE:
        found = ranges(released, name)
        assert (
            released.schema.field(f"{name}_lower").type
            == released.schema.field(f"{name}_upper").type
            == pa.float64()
        )
        assert held_by(found, given[name].to_numpy().astype(float)).all(), name
        assert len(np.unique(found.lower)) > 20, name
    amount = ranges(released, "amount")
    exact = amount.lower == amount.upper
    assert (exact == (given["amount"].to_numpy() == 0.0)).all()
    ages = ranges(released, "age")
    assert (ages.lower > ages.upper).any()
    finite = np.isfinite(ages.lower)
    assert (ages.lower[finite] == np.floor(ages.lower[finite])).all()


def test_the_card_has_no_epsilon_and_says_what_a_range_reveals(
    source: Path, tmp_path: Path
) -> None:
    run(tmp_path, source)
    found = card(tmp_path)
    assert found["guarantee"]["epsilon"] is None
    assert found["guarantee"]["delta"] is None
    assert found["accounting"]["epsilon_exact"] is None
    text = found["guarantee"]["text"]
    assert text.startswith("INSECURE")
    assert "There is no ε" in text
    assert "What is released is true of every row. " in text
    assert card(tmp_path)["mechanism"]["true_of_every_row"] is True
    assert "the exact values inside the acceptable set" in text
    assert found["columns"]["price"]["mean_coverage"] == pytest.approx(0.7, abs=0.01)
    assert found["columns"]["price"]["mean_coverage"] + found["columns"]["price"][
        "leakage"
    ] == pytest.approx(1.0)
    assert "mean_coverage" not in found["columns"]["rating"]  # nothing public to measure it by
    assert found["columns"]["amount"]["design"]["acceptable"] == [["-inf", 0.0]]
    assert found["columns"]["userId"] == {"role": "kept"}
    assert "lower > upper" in found["mechanism"]["convention"]


def test_plan_run_and_audit_promise_no_epsilon(source: Path, tmp_path: Path) -> None:
    loaded = load(job(tmp_path, source))
    planned = plan_job(loaded)
    assert (planned.epsilons, planned.reference_epsilons, planned.ledger) == ({}, {}, None)
    assert planned.released_rows == sum(SIZES)
    said = str(planned)
    assert "expect    price: a range holds 70 % of the values on average" in said
    assert "expect    rating, age, amount: without a `reference`" in said
    assert audit_job(loaded) == {
        "name": "test",
        "columns": {},
        "row": None,
        "measurements": [],
        "sound": True,
    }
    outcome = call_cli("run", tmp_path / "job" / "job.yaml", "--json")
    result = json.loads(outcome.stdout)
    assert (result["epsilon"], result["delta"], result["rows"]) == (None, None, sum(SIZES))
    assert status((tmp_path / "out").as_uri()).stage == "released"
    assert not hidden(tmp_path / "out").exists()
    assert "nothing to audit" in call_cli("audit", tmp_path / "job" / "job.yaml").stdout


def test_two_runs_without_a_seed_draw_other_anchors(source: Path, tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, source, insecure_seed=None) for name in "ab")
    assert not first["rating_lower"].equals(second["rating_lower"])
    assert not card(tmp_path / "a")["guarantee"]["text"].startswith("INSECURE")


EVERY_TYPE: dict[str, Any] = {
    "day": {"role": "privatise", "kind": "continuous", "nulls": "level"},
    "when": {"role": "privatise", "kind": "continuous"},
    "code": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 5], "nulls": "level"},
    "single": {
        "role": "privatise",
        "kind": "mixed",
        "atoms": [0.1],
        "bounds": [0.0, 0.7],
        "outside": "refuse",
    },
    "birthday": {
        "role": "privatise",
        "kind": "discrete",
        "levels": [dt.date(2020, 1, 1), dt.date(2020, 1, 3)],
    },
}


def test_dates_times_levels_nulls_and_small_floats(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(4), 1200
    missing = rng.random(n) < 0.2
    days, whens = rng.integers(18262, 20001, n), rng.integers(16 * 10**8, 17 * 10**8, n)
    codes, singles, births = (
        rng.choice([1, 2, 5], n),
        rng.uniform(0, 0.7, n).astype(np.float32),
        rng.choice([18262, 18264], n),
    )
    table = pa.table(
        {
            "day": pa.array(days, pa.int32(), mask=missing).cast(pa.date32()),
            "when": pa.array(whens * 10**9 + 1).cast(pa.timestamp("ns", tz="UTC")),
            "code": pa.array(codes, pa.uint16(), mask=missing),
            "single": singles,
            "birthday": pa.array(births, pa.int32()).cast(pa.date32()),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "part.parquet")
    designs = {
        "day": {
            "design": "case2",
            "anchors": {"name": "uniform", "loc": 18262, "scale": 1800},
            "nulls": "public",
        },
        "when": {"design": "case1", "anchors": {"name": "uniform", "loc": 1.6e15, "scale": 1e14}},
        "code": {"design": "ring", "anchors": uniform(6), "nulls": "public"},
        "single": {
            "design": "progressive",
            "anchors": uniform(0.7),
            "tau": 0.2,
            "reference": uniform(0.7),
        },
        "birthday": {"design": "case2", "anchors": {"name": "uniform", "loc": 18261, "scale": 5}},
    }
    released = run(tmp_path, tmp_path / "in", designs, schema=EVERY_TYPE)
    for name, values in {
        "day": days,
        "when": whens * 10**6,
        "code": codes,
        "single": singles,
        "birthday": births,
    }.items():
        found = ranges(released, name)
        assert (held_by(found, values.astype(float)) | found.is_null).all(), name
        expected = missing if name in ("day", "code") else np.zeros(n, dtype=bool)
        assert (found.is_null == expected).all(), name
        assert released[f"{name}_upper"].null_count == expected.sum(), name
    numbers = {name: column["numbers"] for name, column in card(tmp_path)["columns"].items()}
    assert numbers["day"] == "days since 1970-01-01"
    assert numbers["when"].startswith("microseconds")
    ring = ranges(released, "code")
    known = ~ring.is_null
    assert not (
        ring.lower[known] == ring.upper[known]
    ).any()  # two equal anchors: the whole line, not a value
    assert (np.isneginf(ring.lower[known]) & np.isposinf(ring.upper[known])).any()


def test_ranges_of_a_job_tell_the_distribution(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    values = np.random.default_rng(9).beta(2, 5, 20_000)
    pq.write_table(pa.table({"price": values}), tmp_path / "in" / "part.parquet")
    schema = {"price": SCHEMA["price"]}
    released = run(
        tmp_path,
        tmp_path / "in",
        {"price": {"design": "case2", "anchors": UNIT}},
        schema=schema,
        output__rows_per_shard=50_000,
    )
    found = ranges(released, "price")
    fitted = npmle(
        RangeCounts.of_batch(
            grid_of_ranges(found.lower, found.upper, 2000), found.lower, found.upper
        ),
        support=(0.0, 1.0),
    )
    at = np.linspace(0.05, 0.95, 19)
    assert np.abs(fitted.cdf(at) - stats.beta(2, 5).cdf(at)).max() < 0.05


# ---- coverage beside the ranges

COVERED: dict[str, Any] = {
    "rating": {"design": "case2", "anchors": uniform(5.5), "reference": uniform(5.0)},
    "price": DESIGNS["price"],
    "age": {
        "design": "ring",
        "anchors": uniform(120),
        "reference": {"name": "randint", "low": 18, "high": 90},
    },
    "amount": {**DESIGNS["amount"], "reference": uniform(100)},
}


def test_coverages_are_what_anybody_computes_from_the_ranges_and_the_card(
    source: Path, tmp_path: Path
) -> None:
    """So they add nothing: an outsider needs the released ends and the public card alone."""
    plain = run(tmp_path / "plain", source, COVERED)
    released = run(
        tmp_path, source, mechanism={"kind": "interval", "columns": COVERED, "coverage": True}
    )
    assert released.column_names == [
        "userId",
        *(f"{name}_{what}" for name in PRIVATE for what in ("lower", "upper", "coverage")),
    ]
    assert released.select(plain.column_names).equals(plain)
    columns = card(tmp_path)["columns"]
    assert "coverage: the probability of the range" in card(tmp_path)["mechanism"]["convention"]
    assert "coverage: " not in card(tmp_path / "plain")["mechanism"]["convention"]
    for name in PRIVATE:
        column = columns[name]
        assert column["released_as"] == [f"{name}_lower", f"{name}_upper", f"{name}_coverage"]
        told = tuple(
            (float(low), float(high)) for low, high in column["design"].get("acceptable", ())
        )
        expected = coverages(
            ranges(released, name),
            ScipyDistribution(**column["reference"]),
            acceptable=told,
            lattice=name == "age",
        )
        found = released[f"{name}_coverage"]
        assert found.type == pa.float64()
        assert found.to_numpy().tolist() == expected.tolist(), name
        assert len(np.unique(expected)) > 20, name
        if name in ("rating", "age"):  # whose values follow their references
            assert expected.mean() == pytest.approx(column["mean_coverage"], abs=0.02), name


# ---- the same bytes


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("quiet")
    run_here(job(folder, source))
    return digests(folder / "out")


def run_on(path: Path, progress: Progress | None = None) -> None:
    run_job(load(path), progress)


def test_threads_give_the_same_bytes(source: Path, quiet: dict[str, str], tmp_path: Path) -> None:
    with dask.config.set(scheduler="threads", num_workers=3):
        run_on(job(tmp_path, source))
    assert digests(tmp_path / "out") == quiet


@pytest.mark.more
def test_processes_give_the_same_bytes(
    two_workers: LocalCluster, source: Path, quiet: dict[str, str], tmp_path: Path
) -> None:
    with Client(two_workers), dask.config.set(scheduler="distributed"):
        run_on(job(tmp_path, source))
    assert digests(tmp_path / "out") == quiet


STAGES = [
    "opened",
    "intended",
    "fitted",
    "shard-half-written",
    "some-shards",
    "before-move",
    "after-move",
]
FEW = (
    "fitted",
    "shard-half-written",
    "after-move",
)  # the stages of every job are those of test_driver_kill.py


@pytest.mark.parametrize(
    "point",
    [point if point in FEW else pytest.param(point, marks=pytest.mark.slow) for point in STAGES],
)
def test_a_killed_driver_changes_nothing(
    point: str, drivers: Drivers, source: Path, quiet: dict[str, str], tmp_path: Path
) -> None:
    path = job(tmp_path, source)
    assert drivers.run("run", path, point=point)[0] == -signal.SIGKILL
    assert (tmp_path / "out").exists() == (point == "after-move")
    run_here(path)
    assert digests(tmp_path / "out") == quiet
    assert not hidden(tmp_path / "out").exists()


def test_designs_that_were_tampered_with_are_refused(
    drivers: Drivers, source: Path, tmp_path: Path
) -> None:
    path = job(tmp_path, source)
    drivers.run("run", path, point="fitted")
    designs = hidden(tmp_path / "out") / "release.npz"
    designs.write_bytes(designs.read_bytes().replace(b"120", b"121"))
    code, line = drivers.run("run", path)
    assert (code, "not the one that was written; abort the run and begin again" in line) == (
        66,
        True,
    ), line


def test_csv_is_counted_first_and_read_like_parquet(tmp_path: Path) -> None:
    schema = {name: column for name, column in SCHEMA.items() if name in ("userId", "price", "age")}
    designs = {name: DESIGNS[name] for name in ("price", "age")}
    source = lake(tmp_path / "in", [70, 130], schema=schema, csv=True)
    released = run(tmp_path, source, designs, schema=schema)
    assert released.num_rows == 200
    given = pads.dataset(source, format="csv").to_table()
    for name in designs:
        assert held_by(ranges(released, name), given[name].to_numpy().astype(float)).all()
    assert (
        plan_job(
            load(
                job(tmp_path, source, designs, schema=schema, output__path=str(tmp_path / "other"))
            )
        )
        .stages[0]
        .startswith("survey")
    )


# ---- refusals

TINY = {"design": "case1", "at_least": 0.1, "reference": UNIT}


def changed(name: str, design: dict[str, Any]) -> dict[str, Any]:
    return {"mechanism": {"kind": "interval", "columns": {**DESIGNS, name: design}}}


def without(name: str) -> dict[str, Any]:
    return {
        "mechanism": {
            "kind": "interval",
            "columns": {other: design for other, design in DESIGNS.items() if other != name},
        }
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "privacy": (
        {"privacy": {"epsilon": 1.0}},
        r"job\.yaml, .*privacy: .*has no ε.*; remove the key 'privacy'",
    ),
    "ledger": (
        {"ledger": {"url": "sqlite:///ledger.db", "dataset": "d"}},
        r"job\.yaml, .*ledger: .*has no ε.*; remove the key 'ledger'",
    ),
    "missing design": (
        without("age"),
        r"column 'age': has no design; add it to mechanism\.columns",
    ),
    "design of an unknown column": (
        changed("agee", TINY),
        r"mechanism\.columns\.agee: is not a privatised column",
    ),
    "design of a kept column": (
        changed("userId", TINY),
        r"mechanism\.columns\.userId: is not a privatised column",
    ),
    "categorical": (
        {"schema": MIXED_SCHEMA, **changed("genre", TINY)},
        r"column 'genre': a categorical column has no order",
    ),
    "clash": (
        {"schema": {**SCHEMA, "age_lower": {"role": "keep", "type": "int64"}}},
        r"column 'age': its released column would be 'age_lower', but another column has that name",
    ),
    "tau above 1/m": (
        changed("price", {"design": "case2", "at_least": 0.4, "reference": UNIT}),
        r"3 ranges cannot all have a coverage of 0\.4",
    ),
    "unknown design": (
        changed("price", {"design": "case3", "anchors": UNIT}),
        r"mechanism\.columns\.price\.design: .*case3.*did you mean .case2",
    ),
    "no design's name": (
        changed("price", {"anchors": UNIT}),
        r"the key 'mechanism\.columns\.price\.design' is missing; add it",
    ),
    "unknown key": (
        changed("price", {"design": "case2", "anchor": UNIT}),
        r"unknown key 'mechanism\.columns\.price\.anchor'; did you mean 'anchors'\?",
    ),
    "coverage of what has no reference": (
        {"mechanism": {"kind": "interval", "columns": DESIGNS, "coverage": True}},
        r"column 'rating': coverage needs a public reference, and its design names none; add `reference",
    ),
    "clash with a coverage": (
        {
            "schema": {
                "price": SCHEMA["price"],
                "price_coverage": {"role": "keep", "type": "float64"},
            },
            "mechanism": {
                "kind": "interval",
                "columns": {"price": DESIGNS["price"]},
                "coverage": True,
            },
        },
        r"column 'price': its released column would be 'price_coverage'",
    ),
    "private nulls": (
        {"schema": {**SCHEMA, "price": {**SCHEMA["price"], "nulls": "level"}}},
        r"column 'price': a null has no range",
    ),
    "no columns": ({"mechanism": {"kind": "interval", "columns": {}}}, r"mechanism\.columns"),
    "unattainable coverage": (
        changed(
            "price",
            {
                "design": "case1",
                "anchors": {"coverage": 0.3, "family": {"name": "norm"}},
                "reference": UNIT,
            },
        ),
        r"column 'price': .*coverages between 0\.5 and 1, not 0\.3",
    ),
    "unknown distribution": (
        changed("price", {"design": "case1", "anchors": {"name": "norml"}}),
        r"column 'price'.*norml",
    ),
    "least coverage of whole numbers": (
        changed("age", {"design": "case1", "at_least": 0.1, "reference": uniform(120)}),
        r"column 'age': whole numbers",
    ),
    "nulls that the schema refuses": (
        changed("price", {**DESIGNS["price"], "nulls": "public"}),
        r"column 'price': its design has `nulls: public`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_is_refused_in_one_line(name: str, source: Path, tmp_path: Path) -> None:
    changes, says = REFUSED[name]
    with pytest.raises(SpecError, match=says) as error:
        load(job(tmp_path, source, **changes))
    assert "\n" not in str(error.value)


def test_a_design_that_tells_nothing_of_its_column_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    loaded = load(
        job(
            tmp_path,
            source,
            **changed(
                "price", {"design": "case1", "anchors": {"name": "uniform", "loc": 5, "scale": 1}}
            ),
        )
    )
    for act in (plan_job, run_job):
        with pytest.raises(
            SpecError, match=r"column 'price': no anchor falls between its least and greatest value"
        ):
            act(loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


@pytest.mark.parametrize("csv", [False, True], ids=["parquet", "csv"])
def test_an_empty_table_is_refused(csv: bool, tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [0], schema=SCHEMA, csv=csv)
    with pytest.raises(DataError, match="the table has no rows"):
        run(tmp_path, source)
    assert not (tmp_path / "out").exists()


def test_a_value_outside_its_bounds_is_refused_without_showing_it(
    source: Path, tmp_path: Path
) -> None:
    path = job(
        tmp_path,
        source,
        schema={**SCHEMA, "price": {**SCHEMA["price"], "bounds": [0.0, 0.5], "outside": "refuse"}},
    )
    with pytest.raises(DataError, match=r"column 'price': holds a value outside its bounds"):
        run_here(path)
    assert not hidden(tmp_path / "out").exists()


def test_other_kinds_still_need_a_budget(source: Path, tmp_path: Path) -> None:
    dip = {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.25}}
    for mechanism in (dip, {"kind": "copula"}, {"kind": "marginals", "cliques": [["age"]]}):
        with pytest.raises(SpecError, match=r"^job\.yaml.*: the key 'privacy' is missing; add it$"):
            load(job(tmp_path, source, mechanism=mechanism))
