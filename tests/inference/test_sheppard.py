"""Sheppard's correction: slopes from wide cells of continuous columns, where it is left out, and its standard errors."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, refused
from numpy.random import default_rng

import dpdask
from dpdask.errors import InputError
from dpdask.inference import WeightedSample, least_squares
from dpdask.inference.m_estimators import cell_widths
from pipelines.benchmarks import sheppard

N = 60_000
LINE = continuous([0, 1])


@pytest.fixture(scope="module")
def table():
    rng = default_rng(0)
    x = rng.normal(0.5, 0.15, N).clip(0, 1)
    z = (0.5 * x + rng.normal(0.25, 0.12, N)).clip(0, 1)
    return pd.DataFrame(
        {
            "x": x,
            "z": z,
            "y": (0.1 + 0.5 * x + 0.3 * z + rng.normal(0, 0.08, N)).clip(0, 1),
            "kind": rng.choice(["a", "b"], N),
        }
    )


def released(table, *, seed=1, **given):
    columns = {name: LINE for name in table.columns if name != "kind"} | {
        "kind": categorical(["a", "b"])
    }
    schema = dpdask.Schema.from_dict({"columns": {name: columns[name] for name in table.columns}})
    parameters = {"epsilon": 4.0, "bins": 5, **given}
    release = dpdask.PerturbedHistogram(schema, insecure_seed=seed, **parameters).fit(table)
    assert isinstance(release, dpdask.HistogramRelease)
    return release


def slopes(release, features, *, corrected):
    sample = WeightedSample.of_frame(
        release.cells, "y", features, card=release.card if corrected else None
    )
    return least_squares(sample)[1:]


def truth(table, features):
    return least_squares(WeightedSample.of_frame(table.assign(weight=1.0), "y", features))[1:]


@pytest.mark.parametrize("features", [["x"], ["x", "z", "kind"]])
def test_slopes_from_five_cells_have_a_third_of_the_error(table, features):
    release, true = released(table), truth(table, features)
    error, plain = (
        np.linalg.norm(slopes(release, features, corrected=corrected) - true)
        for corrected in (True, False)
    )
    assert plain > 0.05
    assert error < plain / 3


def test_the_size_of_the_correction_is_a_twelfth_of_the_squared_width(table):
    release = released(table[["x", "y"]], epsilon=50.0)
    sample = WeightedSample.of_frame(release.cells, "y", ["x"], card=release.card)
    assert sample.widths is not None
    assert sample.widths == pytest.approx(0.2)
    true = truth(table, ["x"])[0]
    assert least_squares(sample)[1] == pytest.approx(true, rel=0.006)
    for share in (0.9, 1.1):
        changed = replace(sample, widths=sample.widths * np.sqrt(share))
        assert abs(least_squares(changed)[1] / true - 1) > 0.008


def test_levels_atoms_and_spread_points_are_not_corrected_and_whole_numbers_by_their_steps(table):
    rng = default_rng(4)
    given = pd.DataFrame(
        {
            "n": rng.binomial(40, 0.5, N),
            "amount": np.where(rng.random(N) < 0.5, 0.0, rng.gamma(3.0, 0.1, N).clip(0, 1)),
        }
    )
    given["y"] = given["n"] / 80 + given["amount"] / 4
    schema = dpdask.Schema.from_dict(
        {
            "columns": {
                "n": {**LINE, "bounds": [0, 40]},
                "amount": {**LINE, "kind": "mixed", "atoms": [0.0]},
                "y": LINE,
            }
        }
    )
    release = dpdask.PerturbedHistogram(schema, epsilon=8.0, bins=5, insecure_seed=1).fit(given)
    sample = WeightedSample.of_frame(release.cells, "y", ["n", "amount"], card=release.card)
    assert sample.widths is not None
    edges = np.array(release.card["columns"]["n"]["edges"])
    assert set(sample.widths[:, 0].round(6)) <= set(
        np.sqrt(np.diff(edges) ** 2 - (edges[0] < 0)).round(6)
    )
    assert (sample.widths[:, 0] > 0).all()
    atom = sample.features[:, 1] == 0.0
    assert (sample.widths[atom, 1] == 0).all()
    assert sample.widths[~atom, 1] == pytest.approx(0.2)
    spread = released(table[["x", "y"]]).with_points("spread")
    assert not WeightedSample.of_frame(spread.cells, "y", ["x"], card=spread.card).widths.any()  # type: ignore[union-attr]  # it is an array
    with_kind = released(table)
    by_kind = WeightedSample.of_frame(with_kind.cells, "y", ["x", "kind"], card=with_kind.card)
    assert by_kind.widths is not None
    assert (by_kind.widths > 0).all(axis=0).tolist() == [True, False]


def test_many_cells_without_a_threshold_are_not_corrected(table):
    for bins, threshold, epsilon, applied in (
        (5, "none", 1.0, True),
        (60, "none", 0.1, False),
        (5, "enhanced", 1.0, True),
    ):
        with (
            pytest.warns(UserWarning, match="few cells stand out") if bins == 60 else np.errstate()
        ):
            release = released(table[["x", "y"]], bins=bins, threshold=threshold, epsilon=epsilon)
        assert (
            WeightedSample.of_frame(release.cells, "y", ["x"], card=release.card).widths.any()
            == applied
        )  # type: ignore[union-attr]  # it is an array


def test_a_correction_is_made_where_it_is_twice_what_noise_hides(table):
    """What noise hides does not depend on the scale of the weights; the correction is in proportion to it."""
    release = released(table[["x", "y"]])
    features, weights = release.cells[["x"]], release.cells["weight"].to_numpy(float)
    x, deviation = (
        features["x"].to_numpy(),
        release.card["accounting"]["noise"]["cells"]["standard_deviation"],
    )
    hidden = deviation * np.sqrt(((x - weights @ x / weights.sum()) ** 4).sum())
    enough = 2.0 * hidden / (weights.sum() * 0.2**2 / 12)
    for factor, corrected in ((0.98, False), (1.02, True)):
        assert cell_widths(release.card, features, factor * enough * weights).any() == corrected


def test_a_slope_is_divided_by_the_spread_less_a_twelfth():
    x, y = np.array([0.0, 1.0, 2.0, 4.0]), np.array([1.0, 0.0, 2.0, 5.0])
    sample = WeightedSample(
        features=x[:, None], response=y, weights=np.ones(4), widths=np.full((4, 1), 1.5)
    )
    spread, common = ((x - x.mean()) ** 2).sum(), ((x - x.mean()) * (y - y.mean())).sum()
    assert least_squares(sample)[1] == pytest.approx(common / (spread - 4 * 1.5**2 / 12), rel=1e-12)


def test_cards_and_frames_that_do_not_fit_are_refused(table):
    release = released(table[["x", "y"]])
    frame = release.cells
    with refused("not a release card", InputError):
        WeightedSample.of_frame(frame, "y", ["x"], card={})
    with refused("outside the cells"):
        WeightedSample.of_frame(frame.assign(x=frame["x"] + 1.0), "y", ["x"], card=release.card)
    marginals = dpdask.Marginals(
        dpdask.Schema.from_dict({"columns": {"x": LINE}}),
        epsilon=1.0,
        cliques=[["x"]],
        insecure_seed=1,
    )
    with refused("another mechanism"):
        WeightedSample.of_frame(frame, "y", ["x"], card=marginals.fit(table[["x"]]).card)
    sample = WeightedSample.of_frame(frame, "y", ["x"], card=release.card)
    with refused("shape of the features"):
        replace(sample, widths=np.zeros(3))
    with refused("not positive definite"):
        least_squares(replace(sample, widths=np.full(sample.features.shape, 2.0)))


def test_the_benchmark_on_simulated_sales():
    rng = default_rng(6)
    size = rng.lognormal(np.log(1360), 0.32, 8000)
    sales = pd.DataFrame(
        {
            "bsqft": size,
            "price": 1e5 + 209 * size + rng.normal(0, 8e4, 8000),
            "county": rng.choice(["A", "B"], 8000),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = sheppard.measure(sales, repeats=1)
    coarse = [row for row in rows if row["bins"] == 5 and row["bsqft_up_to"] == 3000.0]
    assert len(coarse) == 4
    assert (
        np.mean([row["with"] for row in coarse]) < np.mean([row["without"] for row in coarse]) / 3
    )
