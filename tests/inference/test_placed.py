"""Where values lie inside cells, what thresholded cells are corrected by, and what a redraw of them moves."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng
from scipy import special

from dpdask.inference.m_estimators import (
    WeightedSample,
    find_influence,
    huber,
    least_squares,
    logistic,
)
from dpdask.inference.placed import UNRESOLVED, Axis, PlacedTable, find_line
from dpdask.inference.redraw import ThresholdedCells, keep_tails

SEED = 7
EDGES = np.array([-6.0, -1.2, -0.4, 0.4, 1.2, 6.0])


def table_of(x: np.ndarray, y: np.ndarray) -> PlacedTable:
    """Return the exact table of two columns in five wide cells each."""
    codes = [np.digitize(each, EDGES[1:-1]) for each in (y, x)]
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(codes), 1.0)
    axes = []
    for each, code, axis in zip((y, x), codes, (1, 0), strict=True):
        means = np.array([each[code == k].mean() for k in range(5)])
        rows = counts.sum(axis=axis)
        # places inside cells follow the values, as fine counts tell them
        found = Axis.of(means, EDGES[:-1], EDGES[1:], rows, n_each=20)
        inner = [np.quantile(each[code == k], (np.arange(20) + 0.5) / 20) for k in range(5)]
        axes.append(
            Axis(
                cell=found.cell,
                values=np.concatenate(inner),
                scores=found.scores,
                masses=found.masses,
            )
        )
    return PlacedTable(axes=axes, counts=counts)


@pytest.mark.parametrize("r", [0.3, 0.8, -0.6])
def test_slopes_follow_the_copula_inside_cells(r):
    rng = default_rng(SEED)
    x = rng.normal(size=200_000).clip(-5.9, 5.9)
    y = (r * x + np.sqrt(1.0 - r * r) * rng.normal(size=len(x))).clip(-5.9, 5.9)
    table = table_of(x, y)
    found = find_line(table, "slope")
    assert table.correlations[0, 1] == pytest.approx(r, abs=0.02)
    assert found.estimate == pytest.approx(r, rel=0.03)
    # without dependence inside cells the slope is a tenth too flat, and the bound says so; another
    # dependence there may move it by about as much
    assert 0.04 * abs(r) < found.bias_bound < 0.4
    assert abs(found.estimate - r) < found.bias_bound / 10.0
    # the influence is the slope's derivative by the counts
    more = table.counts.copy()
    more[1, 3] += 200.0
    moved = find_line(PlacedTable(axes=table.axes, counts=more), "slope").estimate - found.estimate
    assert moved == pytest.approx(found.influence[1, 3] * 200.0 / len(x), rel=0.2)


def test_bounds_of_slopes_hold_for_what_is_no_copula():
    """In the tails y follows x, elsewhere it does not: as the delay of an arrival follows that of a departure."""
    rng = default_rng(SEED)
    x = rng.standard_t(3, size=200_000).clip(-5.9, 5.9)
    y = np.where(np.abs(x) > 1.5, x, 0.0) + rng.normal(size=len(x))
    truth = float(np.cov(x, y)[0, 1] / x.var())
    table = table_of(x, y.clip(-5.9, 5.9))
    found = find_line(table, "slope")
    assert table.unresolved < UNRESOLVED
    assert abs(found.estimate - truth) < found.bias_bound
    without = abs(found.estimate - find_line(replace_even(table), "slope").estimate) / 2.0
    assert (
        abs(found.estimate - truth) > without
    )  # power: half of what the copula adds is too little


def replace_even(table: PlacedTable) -> PlacedTable:
    """Return a table whose columns do not depend on each other inside cells."""
    table = PlacedTable(axes=table.axes, counts=table.counts)
    table.__dict__["leaning"] = table.even
    return table


def test_a_column_in_one_cell_is_not_resolved():
    rows = np.array([5.0, 995.0])
    wide = Axis.of(np.array([0.0, 50.0]), np.zeros(2), np.array([0.0, 100.0]), rows, n_each=9)
    assert wide.unresolved > UNRESOLVED
    edges = np.linspace(0.0, 100.0, 21)
    fine = Axis.of((edges[1:] + edges[:-1]) / 2, edges[:-1], edges[1:], np.ones(20), n_each=5)
    assert fine.unresolved < 0.01


def draw_cells(rng, truth, scale, cut, n_rows):
    """Return one release of cells, four joint ones in each of the columns' own."""
    share = -np.expm1(-1.0 / scale)
    noisy = rng.poisson(truth) + rng.geometric(share, len(truth)) - rng.geometric(share, len(truth))
    listed = noisy >= cut
    of_column = np.arange(len(truth)) // 4
    return ThresholdedCells(
        counts=noisy[listed].astype(float),
        place=of_column[listed],
        others=np.bincount(of_column[~listed], minlength=len(truth) // 4).astype(float),
        scale=scale,
        cut=cut,
        n_rows=n_rows,
    )


@pytest.mark.parametrize("cut", [1, 2])
def test_thresholded_cells_are_corrected_and_redrawn(cut):
    rng = default_rng(SEED)
    truth = np.where(np.arange(400) < 160, 8.0, 0.0)
    releases = [draw_cells(rng, truth, 1.2, cut, float(truth.sum())) for _ in range(400)]
    exact = truth.reshape(-1, 4).sum(axis=1)
    empty = exact == 0.0
    found = np.array([each.corrected[empty].sum() for each in releases])
    raw = np.array([each._add_up(each.counts, each.others * 0.0)[empty].sum() for each in releases])
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean()) < 5.0 * error
    if cut == 1:  # power: what noise alone raised is not taken for rows
        assert raw.mean() > 20.0 * error
    some = releases[:20]
    again = [np.std([each.draw(rng)[:40].sum() for _ in range(60)], ddof=1) for each in some]
    spread = np.std([each.corrected[:40].sum() for each in releases])
    assert np.mean(again) == pytest.approx(spread, rel=0.25)
    total = np.mean([each.expected.sum() for each in some])
    assert total == pytest.approx(truth.sum(), rel=0.1)


def test_tails_of_noise_are_not_kept():
    rng = default_rng(SEED)
    counts = np.zeros((40, 3))
    counts[15:25] = 100.0
    noisy = counts + rng.normal(scale=3.0, size=counts.shape)
    kept = keep_tails(noisy, 0, 3.0)
    assert (kept >= 0.0).all()
    assert kept.sum() == pytest.approx(noisy.sum())
    assert kept[:8].sum() + kept[-8:].sum() < 25.0
    # power: a tail that is there stays
    counts[2:15] = 20.0
    kept = keep_tails(counts + rng.normal(scale=3.0, size=counts.shape), 0, 3.0)
    assert kept[:15].sum() > 600.0


@pytest.mark.parametrize("kind", ["linear", "logistic", "huber"])
def test_influences_are_derivatives(kind):
    rng = default_rng(SEED)
    x = rng.normal(size=(3_000, 1))
    eta = 0.4 + 0.8 * x[:, 0]
    response = eta + rng.standard_t(5, size=len(x))
    if kind == "logistic":
        response = (rng.random(len(x)) < special.expit(eta)).astype(float)
    sample = WeightedSample(features=x, response=response, weights=np.ones(len(x)))
    estimator = {"linear": least_squares, "logistic": logistic, "huber": huber}[kind]
    values = estimator(sample)
    influence = find_influence(sample, values, kind=kind)
    changed = np.where(x[:, 0] > 0.5, 1.05, 1.0) * np.where(response > 1.0, 1.05, 1.0)
    moved = estimator(WeightedSample(features=x, response=response, weights=changed)) - values
    assert moved == pytest.approx((changed - 1.0) @ influence, rel=0.15, abs=2e-3)


def test_the_influence_of_a_median_is_its_error():
    rng = default_rng(SEED)
    x, y = rng.normal(size=(20_000, 1)), rng.normal(size=20_000)
    sample = WeightedSample(features=x, response=y, weights=np.ones(len(x)))
    influence = find_influence(sample, np.zeros(2), kind="median")
    error = np.sqrt((influence**2).sum(axis=0))
    assert error == pytest.approx(np.sqrt(np.pi / 2.0 / len(x)), rel=0.05)
