"""Distributions from released ranges: references, certificates, consistency, standard errors, coverage, refusals."""

import numpy as np
import pytest
from e2e.helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy import stats

from dpdask.errors import DataError
from dpdask.inference import range_estimates as module
from dpdask.inference.range_estimates import (
    _place_knots,
    _Stretch,
    average,
    bootstrap,
    count_ranges,
    npmle,
)
from dpdask.mechanisms.interval.design import ScipyDistribution
from dpdask.mechanisms.interval.ranges import Ranges, coverages
from dpdask.stats.ranges import RangeCounts, grid_of_ranges

INF = np.inf
# 1 - cdf at 1 ... 8 of KaplanMeierFitter().fit_interval_censoring(LOWER + 0.01, UPPER, tol=1e-14) of lifelines 0.30.3, which needs
# pandas 2; its ranges are closed, hence the 0.01
LOWER = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 2, 8.0])
UPPER = np.array([2, 4, 7, 3, 6, 5, 4, 9, 8, INF, 7, 9, INF, 3, INF])
LIFELINES = [
    1.0,
    0.860168053,
    0.642112433,
    0.470373748,
    0.470373748,
    0.470373748,
    0.217611225,
    0.217611225,
]
BETA = stats.beta(2, 3)


def one_anchor(rng, y):
    u = rng.uniform(0, 1, len(y))
    return np.where(y <= u, -INF, u), np.where(y <= u, u, INF)


def two_anchors(rng, y):
    u, v = np.sort(rng.uniform(0, 1, (len(y), 2)), axis=1).T
    return np.where(y <= u, -INF, np.where(y <= v, u, v)), np.where(
        y <= u, u, np.where(y <= v, v, INF)
    )


def ring(rng, y):
    u, v = np.sort(rng.uniform(0, 1, (len(y), 2)), axis=1).T
    inside = (u < y) & (y <= v)
    return np.where(inside, u, v), np.where(inside, v, u)


def partly_exact(rng, y):
    lower, upper = two_anchors(rng, y)
    shown = y < 0.3  # an acceptable set
    return np.where(shown, y, np.maximum(lower, 0.3)), np.where(shown, y, upper)


MECHANISMS = [one_anchor, two_anchors, ring, partly_exact]


def counted(lower, upper, n_knots=600):
    return RangeCounts.of_batch(grid_of_ranges(lower, upper, n_knots), lower, upper)


def test_it_agrees_with_lifelines():
    found = npmle(counted(LOWER, UPPER), tolerance=1e-13, max_ambiguity=1.0)
    assert_allclose(1 - found.cdf(np.arange(1.0, 9.0)), LIFELINES, atol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("n_rows", [300, 10_000])
def test_every_mechanism_is_certified_and_near_the_truth(mechanism, n_rows):
    rng = default_rng(11)
    estimate = npmle(
        counted(*mechanism(rng, BETA.rvs(n_rows, random_state=rng)), n_knots=400), support=(0, 1)
    )
    assert estimate.duality_gap <= 1e-6
    assert estimate.masses.min() > 0
    assert estimate.masses.sum() == pytest.approx(1, abs=1e-9)
    x = np.linspace(0, 1, 201)
    error = np.abs(estimate.cdf(x) - BETA.cdf(x)).max()
    assert error < 3.0 * n_rows ** (-1 / 3)
    assert np.abs(estimate.cdf(x) - stats.beta(3, 2).cdf(x)).max() > 0.2  # and far from another


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_exact_values_give_the_empirical_cdf(values):
    y = np.array(values, float)
    estimate = npmle(RangeCounts.of_batch(np.arange(-6.0, 7.0), y, y), tolerance=1e-10)
    x = np.arange(-7.0, 8.0)
    assert_allclose(estimate.cdf(x), (y[:, None] <= x).mean(axis=0), atol=1e-6)
    assert estimate.moment(1) == pytest.approx(y.mean(), abs=1e-6)
    assert estimate.moment(0) == pytest.approx(1)
    assert estimate.ambiguity == 0
    assert estimate.quantile(0.5) in np.unique(y)
    assert (estimate.quantile(0.0), estimate.quantile(1.0)) == (y.min(), y.max())


@pytest.mark.parametrize("mechanism", [one_anchor, two_anchors, ring])
def test_moments_are_within_their_standard_errors_and_not_those_of_another_distribution(mechanism):
    rng = default_rng(21)
    counts = counted(*mechanism(rng, BETA.rvs(4000, random_state=rng)), n_knots=150)
    found = bootstrap(counts, lambda f: f.moment(1), 20, rng=rng, support=(0, 1), place="middle")
    assert 0.002 < found.standard_error < 0.02
    assert abs(found.value - BETA.mean()) < 4 * found.standard_error + 1 / 150
    assert abs(found.value - 0.5) > 4 * found.standard_error
    second = npmle(counts, support=(0, 1), place="middle").functional(lambda y: y**2)
    assert second == pytest.approx(BETA.moment(2), abs=0.03)


@pytest.mark.slow
def test_bootstrap_intervals_cover():
    grid, covered, n_trials = np.linspace(0, 1, 41), 0, 120
    for seed in range(n_trials):
        rng = default_rng(seed)
        u, y = rng.choice(grid, 1500), BETA.rvs(1500, random_state=rng)
        counts = RangeCounts.of_batch(grid, np.where(y <= u, -INF, u), np.where(y <= u, u, INF))
        low, high = bootstrap(
            counts, lambda f: f.moment(1), 60, rng=rng, support=(0, 1), place="middle"
        ).interval()
        covered += low <= BETA.mean() <= high
    assert 0.87 <= covered / n_trials <= 1.0


def test_mass_beyond_the_anchors_has_no_mean_unless_bounded():
    counts = counted(np.array([-INF, 1.0, 2.0, 1.0]), np.array([1.0, 2.0, INF, 2.0]))
    frame = npmle(counts, support=(0, 4), max_ambiguity=1.0).plot_data()
    assert frame[["left", "right", "point"]].to_numpy().tolist() == [
        [0, 1, 1],
        [1, 2, 2],
        [2, 4, 4],
    ]
    assert_allclose(
        frame[["mass", "before", "after"]],
        [[0.25, 0, 0.25], [0.5, 0.25, 0.75], [0.25, 0.75, 1]],
        atol=1e-7,
    )
    assert npmle(counts, support=(0, 4), place="middle", max_ambiguity=1.0).moment(
        1
    ) == pytest.approx(0.125 + 0.75 + 0.75)
    estimate = npmle(counts, max_ambiguity=1.0)
    assert estimate.quantile(1.0) == INF
    assert estimate.functional(lambda y: (y <= 1).astype(float)) == pytest.approx(1 / 4)
    with refused("functional is not finite"):
        estimate.moment(1)
    with refused("order"):
        estimate.moment(-1)
    with refused("within 0 to 1"):
        estimate.quantile(50)


def coverage(cdf, anchors, *, ring=False):
    """τ, the mean of Σ_i F(R_i)² over the ranges R_i between a row's anchors: Ding and Ding, theorem 1; example 3 for the ring."""
    shares = np.diff(cdf(anchors.reshape(len(anchors), -1)), axis=1, prepend=0.0, append=1.0)
    if ring:
        shares = np.column_stack([shares[:, 0] + shares[:, -1], shares[:, 1:-1]])
    return (shares**2).sum(axis=1).mean()


@pytest.mark.parametrize("mechanism", [one_anchor, two_anchors, ring])
def test_the_mean_of_individual_coverages_is_the_coverage(mechanism):
    rng = default_rng(4)
    lower, upper = mechanism(rng, BETA.rvs(50_000, random_state=rng))
    again = default_rng(4)
    BETA.rvs(50_000, random_state=again)
    anchors = (
        again.uniform(0, 1, 50_000)
        if mechanism is one_anchor
        else np.sort(again.uniform(0, 1, (50_000, 2)), axis=1)
    )
    expected = coverage(BETA.cdf, anchors, ring=mechanism is ring)
    ranges = Ranges(lower=lower, upper=upper, is_null=np.zeros(len(lower), bool))
    assert coverages(ranges, ScipyDistribution(name="beta", a=2, b=3)).mean() == pytest.approx(
        expected, abs=5e-3
    )
    assert coverage(
        npmle(counted(lower, upper), support=(0, 1)).cdf, anchors, ring=mechanism is ring
    ) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "no rows"),
        ([(-INF, INF)], {}, "no range says anything"),
        ([(-INF, 0.5), (0.5, INF)], {}, "do not determine where the mass lies"),  # one fixed anchor
        ([(-INF, 0.5), (0.5, INF)], {"support": (0, 1)}, "do not determine where the mass lies"),
        (
            [(0.2, 0.8), (0.8, 0.2)],
            {},
            "equally likely",
        ),  # a ring whose two halves nothing tells apart
        ([(0.2, 0.8)], {"support": (0.5, 1)}, "enclose the grid"),
        ([(0.2, 0.8)], {"tolerance": 1e-3}, "tolerance"),
        ([(0.2, 0.8)], {"max_ambiguity": 2}, "ambiguity"),
        ([(0.2, 0.8)], {"place": "left"}, "place"),
    ],
)
def test_what_cannot_be_identified_is_refused(rows, options, words):
    lower, upper = np.array(rows, float).reshape(-1, 2).T
    counts = RangeCounts.of_batch(np.array([0.2, 0.5, 0.8]), lower, upper)
    with refused(words):
        npmle(counts, **options)


def test_an_unreached_gap_is_refused(monkeypatch):
    rng = default_rng(0)
    counts = counted(*two_anchors(rng, rng.uniform(size=200)))
    with refused("2 resamples"):
        bootstrap(counts, lambda f: f.moment(1), 1, rng=rng)
    monkeypatch.setattr(module.turnbull, "_NEWTON_STEPS", 1)
    with refused("duality gap stayed"):
        npmle(counts, support=(0, 1))


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-3.0, -2.0), (0.9, 3.0)])
def test_anchors_that_do_not_reach_the_values_do_not_identify_their_distribution(low, high):
    rng = default_rng(1)
    values = rng.uniform(0, 0.8, 4000)

    def estimate(mechanism, low, high):
        lower, upper = mechanism(rng, (values - low) / (high - low))
        return npmle(
            counted(low + (high - low) * lower, low + (high - low) * upper), support=(-3.0, 3.0)
        )

    for mechanism in (one_anchor, two_anchors):
        with refused(
            r"npmle: the ranges do not determine where the mass lies.*; use a mechanism whose anchors reach",
        ) as caught:
            estimate(mechanism, low, high)
        assert "\n" not in str(caught.value)
    assert estimate(one_anchor, -0.2, 1.0).moment(1) == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [(INF, 1.0, "a range is empty"), (0.0, -INF, "a range is empty"), (np.nan, 1.0, "is missing")],
)
def test_ranges_that_hold_no_value_are_wrong_data(lower, upper, words):
    with pytest.raises(DataError, match=words) as caught:
        RangeCounts.of_batch(
            np.array([0.2, 0.5, 0.8]), np.array([0.0, lower]), np.array([0.5, upper])
        )
    assert caught.value.hint
    with refused("no range has a finite end, so the ranges carry no information"):
        grid_of_ranges(np.full(5, -INF), np.full(5, INF))


def test_crossed_ends_are_a_rings_outer_range_and_no_empty_one():
    counts = RangeCounts.of_batch(
        np.array([0.2, 0.5, 0.8]), np.array([0.8, 0.2, -INF]), np.array([0.2, 0.5, 0.5])
    )
    assert npmle(counts, max_ambiguity=1.0).masses.sum() == pytest.approx(1.0)


# ---- grids


def test_a_grid_is_of_quantiles_where_they_are_fine_enough():
    """Also where a tenth of the values lie beyond all anchors: finer knots would draw them before the last one."""
    rng = default_rng(31)
    y = rng.normal(0.5, 0.1, 20_000)
    lower, upper = one_anchor(rng, y)
    assert np.array_equal(
        count_ranges(lower, upper, bounds=(0.0, 1.0)).knots, grid_of_ranges(lower, upper, 300)[1:-1]
    )
    assert np.array_equal(count_ranges(lower, upper).knots, grid_of_ranges(lower, upper, 300))
    lower, upper = one_anchor(rng, np.where(rng.random(20_000) < 0.1, 1.8, y))
    assert np.array_equal(
        count_ranges(lower, upper, bounds=(0.0, 2.0)).knots, grid_of_ranges(lower, upper, 300)[1:-1]
    )


@pytest.mark.parametrize(
    ("mechanism", "bounds"), [(one_anchor, (0.0, 1.0)), (two_anchors, None), (ring, (0.0, 1.0))]
)
def test_a_grid_is_fine_where_the_mass_is(mechanism, bounds):
    """Values within a thousandth of the anchors' span, at its ends and inside it; a cell of quantiles is three times as wide."""
    rng, place = default_rng(32), "right" if bounds is None else "middle"
    for start in (0.0, 0.6, 0.999):
        y = start + 1e-3 * BETA.rvs(20_000, random_state=rng)
        lower, upper = mechanism(rng, y)
        counts = count_ranges(lower, upper, bounds=bounds)
        assert len(counts.knots) < 600
        fine, coarse = (
            npmle(each, support=bounds, place=place, max_ambiguity=1.0)
            for each in (counts, counted(lower, upper, 300))
        )
        assert abs(fine.quantile(0.5) - np.median(y)) < 2.5e-4
        assert start > 0.0 or abs(coarse.quantile(0.5) - np.median(y)) > 4e-4


def test_cells_grow_slowly():
    ends = np.arange(100_001.0)
    for stretch in (
        _Stretch(0, 50, 1.0),
        _Stretch(30_000, 30_100, 2.0),
        _Stretch(99_990, 100_000, 1.0),
    ):
        knots = _place_knots(ends, 300.0, [stretch], trim=True)
        sizes = np.diff(knots)
        assert sizes.max() <= 301.0
        inside = (knots[:-1] >= stretch.first) & (knots[1:] <= stretch.last)
        assert (sizes[inside] <= stretch.size).all()
        assert inside.any()
        assert (np.abs(np.diff(sizes)) <= 0.1 * np.maximum(sizes[:-1], sizes[1:]) + 2.5).all()


@pytest.mark.parametrize("mechanism", [one_anchor, two_anchors, partly_exact])
def test_the_error_by_the_information_is_that_of_repeats(mechanism):
    rng, means, errors = default_rng(41), [], []
    for _ in range(60):
        counts = counted(*mechanism(rng, BETA.rvs(1_500, random_state=rng)), n_knots=100)
        estimate = npmle(counts, support=(0, 1), place="middle", max_ambiguity=1.0)
        found = average(counts, estimate, lambda y: y)
        assert found.value == pytest.approx(estimate.moment(1))
        means.append(found.value)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.35)
    again = bootstrap(counts, lambda f: f.moment(1), 30, rng=rng, support=(0, 1), place="middle")
    assert found.standard_error == pytest.approx(again.standard_error, rel=0.5)


def test_mass_at_one_place_has_no_error_by_the_information():
    counts = RangeCounts.of_batch(np.array([0.5]), np.full(9, -INF), np.full(9, 0.5))
    estimate = npmle(counts, support=(0, 1), place="middle", max_ambiguity=1.0)
    assert average(counts, estimate, lambda y: y).standard_error == 0.0
