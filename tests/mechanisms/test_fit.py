"""Fitting each kind of channel to each kind of column, through bytes and back."""

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, mixed, schema_of

import dpdask
from dpdask.engine.work import load
from dpdask.errors import SpecError
from dpdask.mechanisms.dip.columns import DipRelease

N = 40_000
SCHEMA = schema_of(
    {
        "stars": discrete([1, 2, 3, 4, 5], nulls="level"),
        "price": continuous(nulls="level"),
        "gain": mixed(atoms=[0]),
        "colour": categorical(["a", "b", "c"]),
    }
)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    stars = pd.array(rng.choice([1, 2, 3, 4, 5], N, p=[0.1, 0.1, 0.2, 0.4, 0.2]), dtype="Int8")
    stars[rng.random(N) < 0.1] = pd.NA
    price = np.where(rng.random(N) < 0.2, np.nan, rng.lognormal(3, 1, N))
    return pd.DataFrame(
        {
            "stars": stars,
            "price": price,
            "gain": np.where(rng.random(N) < 0.7, 0, rng.integers(1, 1000, N)),
            "colour": rng.choice(list("abc"), N),
        }
    )


def fitted(table, channel):
    dip = dpdask.DIP(
        SCHEMA, epsilon=8.0, reference=dpdask.Public(), channel=channel, insecure_seed=1
    )  # type: ignore[arg-type]  # parametrised
    release = dip.fit(table.iloc[::-1])
    return release, release.transform(table)


@pytest.mark.parametrize("channel", ["laplace", "laplace-calibrated", "optimal"])
def test_every_channel_keeps_every_kind_of_distribution(table, channel):
    release, released = fitted(table, channel)
    bound = 7 * np.sqrt(0.25 / N)  # seven standard deviations of a share
    for share in (
        lambda frame: (frame["stars"] == 4).fillna(False).mean(),
        lambda frame: frame["stars"].isna().mean(),
        lambda frame: frame["price"].isna().mean(),
        lambda frame: (frame["price"] > 20).mean(),
        lambda frame: (frame["gain"] == 0).mean(),
        lambda frame: (frame["gain"] > 500).mean(),
        lambda frame: (frame["colour"] == "b").mean(),
    ):
        assert abs(float(share(released)) - float(share(table))) < bound
    assert released["gain"].between(0, 999).all()
    mechanisms = load(release.folder, release.sha256, DipRelease)
    assert all(mechanism.epsilon <= 2.0 for mechanism in mechanisms.columns.values())
    assert mechanisms.epsilon <= 8.0
    assert release.card["mechanism"]["channel"] == channel


def test_optimal_disturbs_less_than_calibrated_and_calibrated_less_than_laplace(table):
    _, laplace = fitted(table, "laplace")
    _, calibrated = fitted(table, "laplace-calibrated")
    _, optimal = fitted(table, "optimal")
    kept = [
        float((released["colour"] == table["colour"]).mean())
        for released in (laplace, calibrated, optimal)
    ]
    assert kept[0] + 0.01 < kept[1] < kept[2] - 0.01
    ranks = [released["gain"].rank().corr(table["gain"].rank()) for released in (laplace, optimal)]
    assert ranks[0] + 0.05 < ranks[1]


@pytest.mark.parametrize(
    ("channel", "cost", "message"),
    [
        ("laplace", {"stars": "rank"}, "belongs to the channel optimal"),
        ("optimal", {"colour": "rank"}, "categories have no rank"),
        ("optimal", {"colour": "value"}, "categories have no value"),
        ("optimal", {"price": "value"}, "always rank"),
        ("optimal", {"nothing": "value"}, "not a privatised column"),
        ("optimal", {"colour": ((0.0, 1.0), (1.0, 0.0))}, "3 rows and columns"),
    ],
)
def test_costs_that_cannot_be_are_refused(table, channel, cost, message):
    with pytest.raises(SpecError, match=message):
        dpdask.DIP(SCHEMA, epsilon=8.0, reference=dpdask.Public(), channel=channel, cost=cost).fit(
            table
        )  # type: ignore[arg-type]  # wrong on purpose


def test_another_cost_gives_another_channel(table):
    default, other = (
        dpdask.DIP(SCHEMA, epsilon=8.0, reference=dpdask.Public(), channel="optimal", cost=cost)
        .fit(table)
        .card["columns"]["stars"]["channel"]
        for cost in ({}, {"stars": "zero-one"})
    )
    assert default != other
