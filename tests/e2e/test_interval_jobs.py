"""Interval jobs: every released range is true, kept columns are the input's, there is no ε anywhere, and crashes change nothing."""

import datetime as dt
import json
import signal

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    KNOWN,
    MIXED_SCHEMA,
    call_cli,
    charging_entries,
    continuous,
    digests,
    discrete,
    hidden,
    lake,
    load,
    make_ledger,
    mixed,
    read_card,
    read_rows,
    refusing,
    run_here,
    write_job,
)
from mechanisms.containing import held_by

from dpdask.engine.account import open_ledger
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import status
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.ranges import Ranges, coverages
from dpdask.privacy.events import Composed, LocalRelease, to_dict

SCHEMA = {**refusing(MIXED_SCHEMA), "genre": {"role": "drop", "type": "string"}}
UNIT = {"name": "uniform", "loc": 0, "scale": 1}


def uniform(scale):
    return {"name": "uniform", "loc": 0, "scale": scale}


DESIGNS = {
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
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES, schema=SCHEMA)


pytestmark = pytest.mark.usefixtures("here")


def job(folder, source, designs=DESIGNS, **changed):
    given = {
        "schema": SCHEMA,
        "mechanism": {"kind": "interval", "columns": designs},
        "privacy": None,
        "output__rows_per_shard": 150,
        **changed,
    }
    return write_job(folder / "job", source, folder / "out", **given)


def run(folder, source, designs=DESIGNS, **changed):
    run_here(
        job(folder, source, designs, **{"output__order": "keep", **changed})
    )  # rows are compared with their originals
    return read(folder / "out")


def read(folder):
    return read_rows(folder, "")


def ranges(released, name):
    lower, upper = (released[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
    is_null = np.asarray(released[f"{name}_lower"].is_null().to_numpy())
    return Ranges(lower=lower.astype(float), upper=upper.astype(float), is_null=is_null)


# ---- what is released


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """The folder of the job with nothing changed."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, source)
    return folder


def test_every_range_holds_its_value_and_kept_columns_are_the_input_s(plain, source):
    released, given = read(plain / "out"), read(source)
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


def test_the_card_has_no_epsilon_and_says_what_a_range_reveals(plain):
    found = read_card(plain)
    assert found["guarantee"]["epsilon"] is None
    assert found["guarantee"]["delta"] is None
    assert found["accounting"]["epsilon_exact"] is None
    text = found["guarantee"]["text"]
    assert text.startswith("INSECURE")
    assert "There is no ε" in text
    assert "What is released is true of every row. " in text
    assert found["mechanism"]["true_of_every_row"] is True
    assert "the exact values inside the acceptable set" in text
    assert found["columns"]["price"]["mean_coverage"] == pytest.approx(0.7, abs=0.01)
    assert found["columns"]["price"]["mean_coverage"] + found["columns"]["price"][
        "leakage"
    ] == pytest.approx(1.0)
    assert "mean_coverage" not in found["columns"]["rating"]  # nothing public to measure it by
    assert found["columns"]["amount"]["design"]["acceptable"] == [["-inf", 0.0]]
    assert found["columns"]["userId"] == {"role": "kept"}
    assert "lower > upper" in found["mechanism"]["convention"]


def test_plan_run_and_audit_promise_no_epsilon(source, tmp_path):
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


EVERY_TYPE = {
    "day": continuous(nulls="level"),
    "when": continuous(),
    "code": discrete([1, 2, 5], nulls="level"),
    "single": mixed(atoms=[0.1], bounds=[0.0, 0.7], outside="refuse"),
    "birthday": discrete([dt.date(2020, 1, 1), dt.date(2020, 1, 3)]),
}


def test_dates_times_levels_nulls_and_small_floats(tmp_path):
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
    numbers = {name: column["numbers"] for name, column in read_card(tmp_path)["columns"].items()}
    assert numbers["day"] == "days since 1970-01-01"
    assert numbers["when"].startswith("microseconds")
    ring = ranges(released, "code")
    known = ~ring.is_null
    assert not (
        ring.lower[known] == ring.upper[known]
    ).any()  # two equal anchors: the whole line, not a value
    assert (np.isneginf(ring.lower[known]) & np.isposinf(ring.upper[known])).any()


# ---- coverage beside the ranges

COVERED = {
    "rating": {"design": "case2", "anchors": uniform(5.5), "reference": uniform(5.0)},
    "price": DESIGNS["price"],
    "age": {
        "design": "ring",
        "anchors": uniform(120),
        "reference": {"name": "randint", "low": 18, "high": 90},
    },
    "amount": {**DESIGNS["amount"], "reference": uniform(100)},
}


def test_coverages_are_what_anybody_computes_from_the_ranges_and_the_card(source, tmp_path):
    """So they add nothing: an outsider needs the released ends and the public card alone."""
    released = run(
        tmp_path, source, mechanism={"kind": "interval", "columns": COVERED, "coverage": True}
    )
    assert released.column_names == [
        "userId",
        *(f"{name}_{what}" for name in PRIVATE for what in ("lower", "upper", "coverage")),
    ]
    told = read_card(tmp_path)["mechanism"]["convention"]
    assert "coverage: the probability of the range" in told
    columns = read_card(tmp_path)["columns"]
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


# ---- kills


@pytest.mark.parametrize("point", ["shard-half-written", "after-move"])
def test_a_killed_driver_changes_nothing(point, plain, drivers, source, tmp_path):
    """It spends no budget, so the contract of mechanisms kills it nowhere."""
    path = job(tmp_path, source, output__order="keep")
    assert drivers.run("run", path, point=point)[0] == -signal.SIGKILL
    assert (tmp_path / "out").exists() == (point == "after-move")
    run_here(path)
    assert digests(tmp_path / "out") == digests(plain / "out")
    assert not hidden(tmp_path / "out").exists()


# ---- perturbed columns: an ε for those and for no other


def perturbed(name, epsilon, of, **more):
    reference = {"kind": "known", **KNOWN["columns"][name]}
    return {
        "design": "interval-differential",
        "perturb": {"epsilon": epsilon, "reference": reference, **more},
        "of": of,
    }


NARROW = {**SCHEMA, "amount": {"role": "drop", "type": "float64"}}
AGE = {
    "design": "case2",
    "anchors": uniform(120),
    "reference": {"name": "randint", "low": 18, "high": 90},
}
PERTURBED = {
    "rating": perturbed(
        "rating", 1.25, {"design": "case2", "anchors": uniform(5.5)}, channel="laplace-calibrated"
    ),
    "price": perturbed(
        "price",
        0.75,
        {"design": "case1", "anchors": {"name": "uniform"}, "reference": {"name": "uniform"}},
    ),
    "age": AGE,
}


def perturbing(folder, source, designs=PERTURBED, **changed):
    return job(
        folder, source, designs, **{"schema": NARROW, "privacy": {"epsilon": 2.0}, **changed}
    )


def test_only_unperturbed_ranges_are_true_and_the_card_tells_them_apart(source, tmp_path):
    run_here(perturbing(tmp_path, source, output__order="keep"))
    released, given = read(tmp_path / "out"), pads.dataset(source).to_table()
    inside = {
        name: held_by(ranges(released, name), given[name].to_numpy().astype(float)).mean()
        for name in PERTURBED
    }
    assert inside["age"] == 1.0
    assert 0.35 < inside["rating"] < 0.97
    assert 0.56 < inside["price"] < 0.97  # by chance alone two thirds
    found = read_card(tmp_path)
    guarantee, columns, text = found["guarantee"], found["columns"], found["guarantee"]["text"]
    assert (
        guarantee["epsilon"],
        guarantee["delta"],
        guarantee["adjacency"],
        guarantee["unit"],
    ) == (2.0, 0, "replace-one", "row")
    assert (guarantee["epsilon_private"], guarantee["interval_private_only"]) == (
        ["rating", "price"],
        ["age"],
    )
    assert (
        "For rating, price: Each released row's private values are ε = 2 differentially private"
        in text
    )
    assert "Protected: the values of rating, price in all rows" in text
    assert "For age that ε says nothing." in text
    after = text.split("For age that ε says nothing.")[1]
    assert "For each private value (age)" in after
    assert "There is no ε" in after
    assert "ε =" not in after
    assert not any(name in after for name in ("rating", "price"))
    assert "of age: where inside its released range" in guarantee["protected"]["what"]
    assert (
        "of rating, price: the value, by the ε of its perturbation"
        in guarantee["protected"]["what"]
    )
    assert not found["mechanism"]["true_of_every_row"]
    assert columns["rating"]["epsilon"] == 1.25
    assert 1.2 < columns["rating"]["epsilon_exact"] <= 1.25
    assert columns["price"]["ranges_of"] == "perturbed values"
    assert columns["price"]["mean_coverage"] == pytest.approx(2 / 3, abs=1e-3)
    assert "leakage" not in columns["price"]
    assert not {"epsilon", "epsilon_exact", "ranges_of"} & set(columns["age"])
    assert columns["age"]["leakage"] > 0
    accounting = found["accounting"]
    assert accounting["events"] == to_dict(Composed(events=(LocalRelease(epsilon=2.0),)))
    assert columns["rating"]["epsilon_exact"] + columns["price"]["epsilon_exact"] == pytest.approx(
        accounting["epsilon_exact"]
    )
    assert accounting["epsilon_exact"] <= 2.0


def test_a_job_that_perturbs_every_column_speaks_of_nothing_else(source, tmp_path):
    designs = {name: PERTURBED[name] for name in ("rating", "price")}
    run_here(
        perturbing(
            tmp_path,
            source,
            designs,
            schema={**NARROW, "age": {"role": "drop", "type": "int32"}},
            privacy={"epsilon": 2.5},
        )
    )
    guarantee = read_card(tmp_path)["guarantee"]
    assert guarantee["interval_private_only"] == []
    assert "There is no ε" not in guarantee["text"]
    assert "ε = 2.5 differentially private" in guarantee["text"]
    assert guarantee["protected"]["what"] == "the value, by the ε of its perturbation"


def test_plan_audit_ledger_and_run_tell_the_same_epsilon(source, tmp_path):
    place = make_ledger(tmp_path, "ratings", 2.0)
    path = perturbing(tmp_path, source, ledger=place)
    planned = plan_job(load(path))
    assert planned.epsilons == {"rating": 1.25, "price": 0.75}
    assert any("perturb rating, price; draw" in stage for stage in planned.stages)
    assert planned.ledger is not None
    assert (planned.ledger["before"], planned.ledger["after"], planned.ledger["fits"]) == (
        0.0,
        2.0,
        True,
    )
    audited = audit_job(load(path))
    assert audited["sound"]
    assert audited["measurements"] == []
    assert set(audited["columns"]) == {"rating", "price"}
    for name, claimed in planned.epsilons.items():
        assert audited["columns"][name]["claimed"] == claimed
        assert 0.5 * claimed < audited["columns"][name]["epsilon_exact"] <= claimed
    result = json.loads(call_cli("run", path, "--json").stdout)
    assert (result["epsilon"], result["delta"], result["rows"]) == (2.0, 0, sum(SIZES))
    assert not hidden(tmp_path / "out").exists()
    assert run_here(path).status == "already released"
    [intended, committed] = charging_entries(**place)
    assert (intended.kind, committed.kind) == ("intend", "commit")
    assert (intended.charge.epsilon, intended.charge.delta) == (2.0, 0.0)
    assert intended.charge.event == to_dict(
        Composed(
            events=(LocalRelease(epsilon=2.0),), unit="row", uncovered=(), without_epsilon=("age",)
        )
    )
    assert open_ledger(place["url"]).read_balance("ratings").epsilon_spent == 2.0
