"""`dpdask.IntervalMechanism` on Dask and pandas frames: lazy, repeatable, true."""

import json
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from e2e.helpers import continuous, discrete
from mechanisms.containing import held_by

import dpdask
from dpdask.mechanisms.interval.ranges import Ranges
from dpdask.mechanisms.interval.release import IntervalRelease
from dpdask.mechanisms.interval.spec import IntervalSpec

LEVELS = [1.0, 2.0, 3.0, 4.0, 5.0]
COLUMNS = {
    "user": {"role": "keep"},
    "rating": discrete(LEVELS),
    "price": continuous(nulls="level"),
    "note": {"role": "drop"},
}
DESIGNS = {
    "rating": {"design": "case2", "anchors": {"name": "uniform", "loc": 0.5, "scale": 5}},
    "price": {
        "design": "case1",
        "anchors": {"name": "norm", "loc": 20, "scale": 10},
        "nulls": "public",
        "reference": {"name": "norm", "loc": 20},
    },
}


def mechanism(columns=COLUMNS, designs=DESIGNS, **options):
    return dpdask.IntervalMechanism(
        dpdask.Schema.from_dict({"columns": columns}), columns=designs, **options
    )


def fitted(frame, columns=COLUMNS, designs=DESIGNS, **options):
    return mechanism(columns, designs, **options).fit(frame)


def transformed(frame, columns=COLUMNS, designs=DESIGNS, **options):
    return fitted(frame, columns, designs, **options).transform(frame)


@pytest.fixture
def table():
    rng, n = np.random.default_rng(5), 3000
    price = rng.normal(20, 5, n)
    price[::7] = np.nan
    return pd.DataFrame(
        {
            "user": np.arange(n, dtype=np.int32),
            "rating": rng.choice(LEVELS, n),
            "price": price,
            "note": ["secret"] * n,
        },
        index=pd.RangeIndex(0, 2 * n, 2),
    )


def check(released, table):
    assert list(released.columns) == [
        "user",
        "rating_lower",
        "rating_upper",
        "price_lower",
        "price_upper",
    ]
    pd.testing.assert_series_equal(released["user"], table["user"])
    for name in ("rating", "price"):
        lower, upper = (released[f"{name}_{end}"] for end in ("lower", "upper"))
        assert lower.dtype == upper.dtype == np.float64
        is_null = table[name].isna().to_numpy()
        assert (lower.isna() == is_null).all()
        inside = held_by(
            Ranges(lower=lower.to_numpy(), upper=upper.to_numpy(), is_null=is_null),
            table[name].fillna(0.0).to_numpy(),
        )
        assert (inside | is_null).all()


def test_pandas_at_once_and_dask_lazily(table):
    check(transformed(table), table)
    frame = dd.from_pandas(table, npartitions=3)

    def refuse(*_, **__):
        raise AssertionError("something was computed")

    with dask.config.set(scheduler=refuse):
        lazy = transformed(frame)
    assert lazy.divisions == frame.divisions
    with dask.config.set(scheduler="synchronous"):
        check(lazy.compute(), table)


PERTURBED = {
    "design": "interval-differential",
    "perturb": {
        "epsilon": 2.0,
        "channel": "optimal",
        "reference": {"kind": "known", "probabilities": [0.2] * 5},
    },
    "of": DESIGNS["rating"],
}


def test_coverage_is_a_third_column_where_there_is_a_reference(table):
    with pytest.raises(
        dpdask.SpecError, match=r"column 'rating': coverage needs a public reference"
    ):
        mechanism(coverage=True)
    rating = {**DESIGNS["rating"], "reference": {"name": "randint", "low": 1, "high": 6}}
    frame = dd.from_pandas(table, npartitions=2)
    made = fitted(frame, designs={**DESIGNS, "rating": rating}, coverage=True)
    lazy = made.transform(frame)
    names = [
        "user",
        *(
            f"{name}_{what}"
            for name in ("rating", "price")
            for what in ("lower", "upper", "coverage")
        ),
    ]
    assert list(lazy.columns) == names
    with dask.config.set(scheduler="synchronous"):
        released = lazy.compute()
    assert list(released.columns) == names
    assert (released["price_coverage"].isna() == table["price"].isna()).all()
    low, high = np.clip(np.floor(released[["rating_lower", "rating_upper"]].to_numpy()), 0, 5).T
    assert released["rating_coverage"].to_numpy() == pytest.approx((high - low) / 5)
    assert made.card["columns"]["price"]["released_as"] == names[-3:]


PLAIN = {"anchors": {"name": "norm"}}
WHERE = "where inside its released range a value lies; the cuts between ranges were drawn at random, without looking at the value"
BY_EPSILON = "the value, by the ε of its perturbation"
TRUE = "that the value lies in its released range"
STOPPED = "by stopping where its own next range would be too narrow, that a value is likelier near an end of its range"
UNRELEASED = "of a row released as the whole line, that its range was too narrow, with a probability of at most one half"
BOUNDED = "what the range says of the perturbed value; its ε bounds what that says of the value"
TOLD = "the exact values inside the acceptable set, and of all others that they are not in it"
EVERY = [
    ({"design": "case1", **PLAIN}, TRUE),
    ({"design": "case2", **PLAIN, "nulls": "public"}, f"{TRUE}; which values are missing"),
    ({"design": "ring", **PLAIN}, TRUE),
    ({"design": "canonical", **PLAIN, "n_anchors": 3, "exact_ranges": [2]}, f"{TRUE}; {TOLD}"),
    ({"design": "canonical", **PLAIN, "n_anchors": 1, "acceptable": [[0, 1]]}, f"{TRUE}; {TOLD}"),
    ({"design": "progressive", **PLAIN, "tau": 0.2, "reference": {"name": "norm"}}, TRUE),
    (
        {
            "design": "progressive",
            **PLAIN,
            "tau": 0.2,
            "reference": {"name": "norm"},
            "stop": "own",
        },
        f"{TRUE}; {STOPPED} (interval privacy does not hold)",
    ),
    (
        {
            "design": "selective",
            "of": {"design": "case2", **PLAIN},
            "tau": 0.3,
            "reference": {"name": "norm"},
            "nulls": "public",
        },
        f"{TRUE}; {UNRELEASED} (under the public reference); which values are missing",
    ),
    (
        {
            "design": "ensemble",
            "of": [
                {"design": "canonical", **PLAIN, "n_anchors": n, "exact_ranges": [1]}
                for n in (1, 2)
            ],
        },
        f"{TRUE}; {TOLD}",
    ),
    (
        {
            **PERTURBED,
            "of": {"design": "canonical", **PLAIN, "n_anchors": 1, "acceptable": [[0, 1]]},
            "nulls": "public",
        },
        f"{BOUNDED}; of perturbed values, {TOLD}; which values are missing",
    ),
]


def test_the_page_on_ranges_names_each_design_that_tells_where_inside_a_value_lies():
    norm = {"name": "norm", "loc": 0, "scale": 1}
    inner = {"design": "case2", "anchors": norm}
    designs = {
        "selective": {"design": "selective", "of": inner, "tau": 0.45, "reference": norm},
        "progressive` with `stop: own": {
            "design": "progressive",
            "anchors": norm,
            "tau": 0.1,
            "stop": "own",
            "reference": norm,
        },
        "canonical` with an acceptable set": {
            "design": "canonical",
            "anchors": norm,
            "n_anchors": 2,
            "acceptable": [[0, 1]],
        },
    }
    page = (Path(__file__).parents[1] / "docs/explanation/interval-privacy.md").read_text(
        encoding="utf-8"
    )
    for name, design in designs.items():
        spec = IntervalSpec.model_validate({"kind": "interval", "columns": {"x": design}})
        assert spec.columns["x"].revealed
        assert f"- `{name}" in page
    schema = {"x": continuous()}
    zeros_and_tails = pd.DataFrame({"x": [0.0, -3.0] * 20_000})
    found = transformed(zeros_and_tails, schema, {"x": designs["selective"]}, insecure_seed=1)
    whole = np.isneginf(found["x_lower"]) & np.isposinf(found["x_upper"])
    for value, percent in ((0, 54), (-3, 83)):
        assert whole[zeros_and_tails["x"] == value].mean() == pytest.approx(
            percent / 100, abs=0.012
        )
        assert f"{percent} % of the values {value}" in page


@pytest.mark.parametrize(
    ("design", "says"), EVERY, ids=lambda given: given["design"] if isinstance(given, dict) else ""
)
def test_what_a_design_does_not_protect_is_said_once_also_of_a_release_from_its_bytes(design, says):
    document = IntervalSpec.model_validate({"columns": {"y": design}}).columns["y"]
    perturbed = design["design"] == "interval-differential"
    assert (document.protected, document.unprotected) == (BY_EPSILON if perturbed else WHERE, says)
    if (
        perturbed
    ):  # whose release needs fitted channels: tests/mechanisms/test_interval_differential.py
        return
    release = IntervalRelease(designs={"y": document}, lattice={"y": True})
    again = IntervalRelease.from_bytes(release.to_bytes(), "designs")
    assert again.designs["y"].unprotected == says
    assert again.to_bytes() == release.to_bytes()


@pytest.mark.parametrize(
    "design",
    [
        {"design": "ensemble", "of": [{"design": "case1", **PLAIN}, {"design": "case1", **PLAIN}]},
        PERTURBED,
    ],
    ids=lambda design: design["design"],
)
def test_nulls_are_decided_by_the_outer_design_alone(design, table):
    *others, last = design["of"] if isinstance(design["of"], list) else [design["of"]]
    said = {**last, "nulls": "public"}
    with pytest.raises(
        dpdask.SpecError,
        match=r"columns\.rating\.of.*: a design inside another cannot set `nulls`: move `nulls` to",
    ):
        mechanism(
            designs={**DESIGNS, "rating": {**design, "of": [*others, said] if others else said}}
        )
    columns = {**COLUMNS, "rating": {**COLUMNS["rating"], "nulls": "level"}}
    card = fitted(table, columns, {**DESIGNS, "rating": {**design, "nulls": "public"}}).card[
        "columns"
    ]["rating"]
    assert card["nulls"] == card["design"]["nulls"] == "public"
    assert "nulls" not in json.dumps(card["design"]["of"])
