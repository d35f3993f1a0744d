"""A joint histogram whose cells are found under privacy: what is paid, how many cells there are, and what they are worth."""

import warnings

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import schema_of
from mechanisms.fitting import SKEWED
from mechanisms.fitting import skewed_table as table
from strategies import value_codec

import dpdask
from dpdask.cells import FoundBins, cells
from dpdask.inference import quantile
from dpdask.mechanisms.histogram.noise import NoisyHistogram, plan
from dpdask.mechanisms.histogram.release import centres, line_moments, spread
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import DiscreteLaplace
from dpdask.privacy.events import epsilon as paid
from dpdask.stats.marginals import Domain

AMOUNT = SKEWED["amount"]
COLUMNS = {**SKEWED, "who": {"role": "drop", "type": "int64"}}


def estimator(*columns, **given):
    """Return the class for some of the columns."""
    schema = schema_of(
        {name: COLUMNS[name] if name in columns else {"role": "drop"} for name in COLUMNS}
    )
    return dpdask.PerturbedHistogram(schema, **{"epsilon": 1.0, **given})


def fit(*columns, n=40_000, **given):
    return estimator(*columns, **{"insecure_seed": 1, **given}).fit(table(n))


# ---- what is paid


@pytest.mark.parametrize("threshold", ["none", "enhanced"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("unit", ["row", UnitColumn(column="who", max_rows=3)], ids=["row", "unit"])
def test_fine_counts_take_a_tenth_of_epsilon_and_all_is_spent(threshold, adjacency, unit):
    """Exactly: a sensitivity, a number of vectors or a share that is off by a tenth fails."""
    planned = estimator(
        "amount", "visits", threshold=threshold, adjacency=adjacency, unit=unit
    ).mechanism.noise
    rows = (1 if unit == "row" else 3) * (2 if adjacency == "replace-one" else 1)
    events = [event for event in (planned.fine, planned.cells, planned.total) if event is not None]
    assert all(isinstance(event, DiscreteLaplace) and event.sensitivity == rows for event in events)
    assert planned.fine.count == 2 * 3  # the levels of two columns
    costs = [
        event.count * rows / event.scale for event in events if isinstance(event, DiscreteLaplace)
    ]
    assert sum(costs) == pytest.approx(1.0, rel=1e-9)
    assert sum(costs) <= 1.0
    assert costs[0] == pytest.approx(0.1, rel=1e-9)
    declared = plan(Budget(epsilon=1.0, adjacency=adjacency, unit=unit), threshold=threshold)
    assert planned.cells.scale / declared.cells.scale == pytest.approx(1 / 0.9, rel=1e-9)
    assert estimator("group").mechanism.noise.fine is None
    assert estimator("amount", bins=20).mechanism.noise.fine is None


def test_a_delta_is_composed_over_both_rounds():
    planned = estimator("amount", delta=1e-6).mechanism.noise
    assert paid(planned.event, 1e-6) <= 1.0
    assert paid(planned.event, 1e-6) > 0.99
    assert planned.fine.count == 6  # what a replaced row takes and what it adds, at three levels


# ---- what it is worth


def test_rows_and_cells_keep_skewed_numbers_under_bounds_that_are_far_too_wide():
    """Twenty cells of one width know nothing of these numbers, so the test would see them."""
    own = table()
    scale = np.diff(own["amount"].quantile([0.01, 0.99]).to_numpy())[0]
    errors = {}
    for bins in ("adaptive", 20):
        release = fit("amount", "group", bins=bins)
        rows, points = release.sample(40_000, seed=1).compute(), release.cells
        quantiles = [
            abs(rows["amount"].quantile(share) - own["amount"].quantile(share)) / scale
            for share in (0.5, 0.75, 0.95)
        ]
        weighted = [
            abs(
                quantile(points["amount"].to_numpy(), points["weight"].to_numpy(), share)
                - own["amount"].quantile(share)
            )
            / scale
            for share in (0.5, 0.75, 0.95)
        ]
        errors[bins] = max(quantiles), max(weighted)
        if bins == "adaptive":
            assert abs((rows["amount"] == 0.0).mean() - (own["amount"] == 0.0).mean()) < 0.01
            assert (
                abs(
                    rows["amount"].clip(upper=scale).mean() / own["amount"].clip(upper=scale).mean()
                    - 1
                )
                < 0.02
            )
            mean = np.average(np.minimum(points["amount"], scale), weights=points["weight"])
            assert abs(mean / own["amount"].clip(upper=scale).mean() - 1) < 0.03
            found, true = (
                frame[frame["amount"] > 0].groupby("group")["amount"].median()
                for frame in (rows, own)
            )
            assert (np.abs(found / true - 1) < 0.1).all()
    assert max(errors["adaptive"]) < 0.03
    assert min(errors[20]) > 0.5


# ---- how many cells there are


def sizes(release):
    domain = release.fitted.noisy.domain
    return dict(zip(domain.names, domain.sizes, strict=True))


def test_more_columns_and_fewer_rows_have_fewer_cells():
    alone, two = sizes(fit("amount"))["amount"], sizes(fit("amount", "visits"))
    three = sizes(fit("amount", "visits", "group", n=8000))
    assert 50 <= alone <= 129
    assert 20 <= two["amount"] <= 45
    assert three["amount"] < two["amount"]
    for release, n in (
        (fit("amount", "visits"), 40_000),
        (fit("amount", "visits", "group", n=8000), 8000),
    ):
        cells_ = np.prod(list(sizes(release).values()))
        scale = release.noise.cells.scale  # type: ignore[union-attr]  # Laplace noise
        assert n / cells_ >= 3.0 * scale * np.log(cells_)


def test_a_column_that_is_nearly_constant_takes_no_cells_from_another():
    own = table().assign(visits=0)
    release = estimator("amount", "visits", insecure_seed=1).fit(own)
    assert sizes(release)["amount"] >= 20
    assert sizes(release)["visits"] <= 3


def test_noise_without_rows_has_few_cells():
    """Nothing is refused after the charge, whatever the noise says."""
    for seed in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            release = fit(
                "amount",
                "visits",
                "group",
                n=3,
                adjacency="add-remove",
                epsilon=0.1,
                insecure_seed=seed,
            )
        assert np.prod(list(sizes(release).values())) < 3000


# ---- points


def test_points_have_the_moments_of_the_fine_cells_and_lie_inside_their_cell():
    rng = np.random.default_rng(2)
    codec = value_codec("x", bounds=(0.0, 100.0))
    edges = np.concatenate([[0.0], np.sort(rng.uniform(0, 100, 30)), [100.0]])
    found = FoundBins(cuts=edges[[0, 4, 9, 20, 31]], edges=edges, masses=rng.gamma(0.3, 100.0, 31))
    column = cells(codec, found)
    means, masses, deviations, skewness = line_moments(column)
    fine = rng.choice(31, 1_000_000, p=found.masses / found.masses.sum())
    x = rng.uniform(edges[fine], edges[fine + 1])
    planned = plan(Budget(epsilon=1.0), threshold="none")
    own = np.searchsorted(found.cuts[1:-1], x)
    weights = np.bincount(own).astype(np.int64)
    histogram = NoisyHistogram(
        domain=Domain(names=("x",), sizes=(4,)),
        plan=planned,
        n_rows=None,
        cut=None,
        keys=np.arange(4),
        weights=weights,
    )
    values, shares = spread(histogram, {"x": column}, 0, 4)
    points, pairs = np.asarray(values["x"]).reshape(4, 2), shares.reshape(4, 2)
    for cell in range(4):
        inside = x[own == cell]
        assert masses[cell] == pytest.approx(found.masses[_within(found, cell)].sum())
        assert means[cell] == pytest.approx(inside.mean(), rel=0.01)
        assert deviations[cell] == pytest.approx(inside.std(), rel=0.01)
        assert skewness[cell] == pytest.approx(
            ((inside - inside.mean()) ** 3).mean() / inside.std() ** 3, abs=0.03
        )
        assert (found.cuts[cell] <= points[cell]).all()
        assert (points[cell] <= found.cuts[cell + 1]).all()
        assert np.average(points[cell], weights=pairs[cell]) == pytest.approx(
            inside.mean(), rel=0.01
        )
        assert np.sqrt(np.cov(points[cell], aweights=pairs[cell], ddof=0)) == pytest.approx(
            inside.std(), rel=0.02
        )
    assert np.asarray(centres(column)) == pytest.approx(means)


def _within(found, cell):
    return (found.edges[:-1] >= found.cuts[cell]) & (found.edges[1:] <= found.cuts[cell + 1])


# ---- the release


@pytest.mark.filterwarnings("ignore:The last declared cell of visits")
def test_a_saved_release_comes_back_and_its_card_names_the_found_cells(tmp_path):
    release = fit("amount", "visits", "group", bins={"visits": [0, 1, 2, 5]}, threshold="positive")
    release.save(str(tmp_path / "saved"))
    again = dpdask.HistogramRelease.load(str(tmp_path / "saved"))
    pd.testing.assert_frame_equal(again.cells, release.cells)
    pd.testing.assert_frame_equal(
        again.sample(500, seed=2).compute(), release.sample(500, seed=2).compute()
    )
    mechanism, accounting = release.card["mechanism"], release.card["accounting"]
    assert mechanism["found"] == ["amount"]
    assert mechanism["points"] == "spread"
    assert mechanism["bins"]["visits"] == [0.0, 1.0, 2.0, 5.0]
    assert len(mechanism["bins"]["amount"]) == release.card["columns"]["amount"]["cells"]
    assert set(accounting["noise"]) == {"cells", "fine_counts"}
    assert release.redraw(np.random.default_rng(0)).shape[1] == 4


def test_a_sparse_histogram_has_found_cells_too(tmp_path):
    """Few of its 10⁸ cells are drawn; one column's cells are found."""
    columns = {
        "amount": AMOUNT,
        "visits": {**COLUMNS["visits"], "bounds": [0, 30_000]},
        "fine": {**AMOUNT, "bounds": [0.0, 1.0]},
    }
    own = table().assign(fine=lambda each: each["visits"] / 40.0).drop(columns=["who", "group"])
    schema = schema_of(columns)
    bins = {"visits": 30_000, "fine": 2000}
    with pytest.warns(UserWarning, match="few cells stand out"):
        release = dpdask.PerturbedHistogram(
            schema, epsilon=8.0, factor=3.0, bins=bins, insecure_seed=1
        ).fit(own)
    assert sizes(release)["visits"] == 30_000
    assert sizes(release)["amount"] <= 3  # the others' cells leave room for no more
    assert 10 < len(release.fitted.noisy.keys) < 5000
    assert release.cells["weight"].sum() == pytest.approx(len(own), rel=0.1)


# ---- what is said before


def test_a_plan_tells_of_the_search_and_of_cells_that_are_too_fine_or_too_coarse():
    planned = estimator("amount", "group").plan(table())
    assert planned.stages[0].startswith(
        "search: read all privatised columns once; count amount in fine cells, add noise, cut each into about 64 cells"
    )
    assert (
        planned.stages[1]
        == "tabulate: read 2 columns once; count their joint histogram, merged in a tree"
    )
    assert planned.expectations[0].startswith("a count of a cell is off by at most ")
    assert planned.expectations[-1].startswith("amount: quantiles can be estimated")
    assert planned.warnings == ()
    coarse = estimator("amount", "visits", bins=9).plan(table())
    assert "amount, visits: cells are up to 11 % of the bounds wide" in coarse.expectations[1]
    assert not any(
        "of the bounds wide" in each
        for each in estimator("amount", bins={"amount": [0.0, 5.0]}).plan(table()).expectations
    )
    few = estimator("amount", "visits", "group").plan(table(60))
    assert "few cells stand out" in few.warnings[0]
