"""The channel optimal-unbiased in releases: its card, its released means, and the columns and references that it does not take."""

import datetime as dt

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, charging_entries, continuous, discrete, mixed, schema_of

import dpdask
from dpdask.engine.account import open_ledger
from dpdask.errors import SpecError
from dpdask.privacy.audit import channel_epsilon, read_weights

STARS = discrete([1, 2, 3, 4, 5])
DAYS = discrete([dt.date(2020, 1, day) for day in (1, 2, 9)])


def dip(columns, **given):
    parameters = {
        "epsilon": 2.0,
        "reference": dpdask.Public(),
        "channel": "optimal-unbiased",
        "insecure_seed": 1,
        **given,
    }
    return dpdask.DIP(schema_of(columns), **parameters)


def test_the_card_gives_the_line_that_makes_group_means_unbiased():
    rng = np.random.default_rng(0)
    group = np.arange(60_000) % 2
    table = pd.DataFrame(
        {
            "group": group,
            "stars": np.where(
                rng.random(60_000) < 0.3 + 0.4 * group, 5, rng.integers(1, 6, 60_000)
            ),
        }
    )
    release = dip({"group": {"role": "keep"}, "stars": STARS}).fit(table.iloc[::-1])
    card = release.card["columns"]["stars"]
    line, matrix = card["attenuation"], np.array(card["channel"])
    assert channel_epsilon(read_weights(matrix)) <= 2.0 + 1e-9
    np.testing.assert_allclose(
        line["centre"] + (matrix @ np.arange(1, 6) - line["centre"]) / line["factor"],
        np.arange(1, 6),
        atol=1e-12,
    )
    assert line["bias_at_most"] < 1e-12
    means = release.transform(table).groupby("group")["stars"].mean()
    found = line["centre"] + (means - line["centre"]) / line["factor"]
    bound = 6 * 1.6 / line["factor"] / np.sqrt(30_000)
    assert (np.abs(found - table.groupby("group")["stars"].mean()) < bound).all()
    assert np.abs(means - table.groupby("group")["stars"].mean()).max() > bound  # without the line


def test_dates_count_in_their_own_unit():
    days = np.array(["2020-01-01", "2020-01-02", "2020-01-09"], dtype="datetime64[ns]")
    card = dip({"day": DAYS}).fit(pd.DataFrame({"day": np.repeat(days, 50)})).card["columns"]["day"]
    assert card["attenuation"]["centre"] == pytest.approx(days.astype(np.int64).mean(), rel=1e-12)
    assert card["attenuation"]["bias_at_most"] < 1e-10 * float(np.ptp(days.astype(np.int64)))


def test_noise_that_leaves_one_level_costs_no_budget_for_nothing(tmp_path):
    """In every second fit the noisy count of the level that nobody has is not above 0."""
    place = dpdask.LedgerPlace(url=f"sqlite:///{tmp_path / 'ledger.db'}", dataset="d")
    open_ledger(place.url).init("d", 200.0)
    bits, frame = {**STARS, "levels": [0, 1]}, pd.DataFrame({"bit": [0] * 1000})
    for _ in range(40):
        release = dip({"bit": bits}, reference=dpdask.Histogram(), insecure_seed=None).fit(
            frame, ledger=place
        )
        with release:
            card, released = release.card, release.transform(frame)
        if "attenuation" not in card["columns"]["bit"]:
            break
    else:
        pytest.fail("every count was above 0")
    assert card["columns"]["bit"]["channel"] == [[1.0, 0.0]] * 2
    assert (released["bit"] == 0).all()
    kinds = [entry.kind for entry in charging_entries(place.url, "d")]
    assert kinds.count("intend") == kinds.count("commit") == len(kinds) / 2


@pytest.mark.parametrize(
    ("bits", "known", "message"),
    [
        ([0, 1], [1.0, 0.0], "column 'bit': an unbiased channel keeps nothing of its values"),
        (list(range(101)), [1 / 101] * 101, "column 'bit'.*at most 100 levels"),
    ],
)
def test_what_is_declared_is_refused_before_any_row_is_read(bits, known, message):
    columns = {"bit": {**STARS, "levels": bits}}
    with pytest.raises(SpecError, match=message):
        dip(columns, reference=dpdask.Known(columns={"bit": {"probabilities": known}})).plan(
            pd.DataFrame({"bit": [0, 1]})
        )


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        ({"x": {**STARS, "nulls": "level"}}, {}, "column 'x': null is a level without a value"),
        (
            {"x": categorical(["a", "b"])},
            {},
            "column 'x': .*numbers or dates",
        ),
        (
            {"x": continuous([0, 1])},
            {},
            "column 'x': .*numbers or dates",
        ),
        (
            {"x": mixed(atoms=[0])},
            {},
            "column 'x': .*numbers or dates",
        ),
        (
            {"x": STARS},
            {"reference": dpdask.Tree()},
            "`channel`: .*reference tree releases columns jointly",
        ),
        (
            {"x": STARS},
            {"reference": dpdask.Chain(fraction=0.5)},
            "`channel`: .*reference chain releases columns jointly",
        ),
        (
            {"x": STARS},
            {"cost": {"x": "value"}},
            "a cost belongs to the channel optimal, not to optimal-unbiased",
        ),
    ],
)
def test_what_has_no_mean_of_its_own_is_refused_in_one_line(columns, given, message):
    with pytest.raises(SpecError, match=message) as caught:
        dip(columns, **given)
    assert "\n" not in str(caught.value)
