"""Sensitivities by enumeration, shares, thresholds and weights in closed form: a change of any of them by a tenth fails here."""

import itertools
import math

import numpy as np
import pytest

import dpdask
from dpdask.mechanisms import expectations
from dpdask.mechanisms.dip.tree import plan_tree_noise
from dpdask.mechanisms.histogram import noise as histogram_noise
from dpdask.mechanisms.histogram import spec as histogram_spec
from dpdask.mechanisms.histogram.release import affordable_bins
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    _total,
    denoise,
    draft,
    plan_noise,
)
from dpdask.mechanisms.marginals.spec import list_noisy_tables
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace
from dpdask.references.histogram import histogram_event
from dpdask.stats import Domain

DELTA = 1e-6


def gaussian(sigma):
    return DiscreteGaussian(sigma=sigma, sensitivity=1.0, adjacency="add-remove")


# ---- sensitivity


def changes(adjacency, rows):
    """Return how one unit can change a histogram of three cells: every pair of what its rows are before and after."""
    own = [
        np.bincount(chosen, minlength=3)
        for chosen in itertools.combinations_with_replacement(range(3), rows)
    ]
    return (
        own
        if adjacency == "add-remove"
        else [one - other for one, other in itertools.product(own, own)]
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_the_declared_sensitivity_is_the_largest_change_of_a_histogram(adjacency, rows):
    unit = "row" if rows == 1 else UnitColumn(column="who", max_rows=rows)
    budgets = [
        Budget(epsilon=1.0, delta=delta, adjacency=adjacency, unit=unit) for delta in (0.0, DELTA)
    ]
    manhattan = max(int(np.abs(change).sum()) for change in changes(adjacency, rows))
    euclidean = max(float(np.linalg.norm(change)) for change in changes(adjacency, rows))
    for event in (
        draft(budgets[0], 1.0, 1),
        histogram_event(1.0, adjacency, rows),
        histogram_noise.plan(budgets[0]).cells,
    ):
        assert event.sensitivity == manhattan
    assert (
        euclidean * (1 - 1e-15) <= draft(budgets[1], 1.0, 1).sensitivity <= euclidean * (1 + 1e-15)
    )
    for budget in budgets:
        planned = plan_noise(budget, 3, cliques={("a", "b"): 2.0}, n_found=1)
        of_tree = (
            plan_tree_noise(Budget(epsilon=1.0, delta=budget.delta, unit=unit), 3, 1)
            if adjacency == "replace-one"
            else planned
        )
        for each in (*planned.event.events, *of_tree.event.events):
            assert each.sensitivity == pytest.approx(
                manhattan if budget.delta == 0 else euclidean, rel=1e-15
            )


# ---- shares of a budget


def price(event):
    """Return what an event takes of a budget: with Laplace noise its ε, with Gaussian noise a multiple of the inverse variance."""
    noise = (
        event.sensitivity / event.scale
        if isinstance(event, DiscreteLaplace)
        else (event.sensitivity / event.sigma) ** 2
    )
    return float(event.count * noise)


def shares(planned):
    prices = [price(event) for event in planned.event.events]
    return [each / sum(prices) for each in prices]


@pytest.mark.parametrize(
    ("delta", "share"), [(0.0, 0.1), (DELTA, 0.05)], ids=["laplace", "gaussian"]
)
def test_fine_counts_take_their_share_and_tables_the_rest(delta, share):
    n_found, budget = 3, Budget(epsilon=1.0, delta=delta)
    planned = plan_noise(budget, 4, one_way=2.0, pairs=1.0, cliques={("a",): 6.0}, n_found=n_found)
    assert [event.count for event in planned.event.events] == [3 * n_found, 4, 6, 1]
    # Gaussian: 9 vectors, each with a fifth of the mean weight of 11 tables
    own = share if delta == 0 else 9 / (5 * 11 + 9)
    assert shares(planned) == pytest.approx(
        [own, *((1 - own) * part for part in (0.4, 0.3, 0.3))], rel=1e-9
    )
    tree = plan_tree_noise(budget, 4, n_found)
    assert [event.count for event in tree.event.events] == [3 * n_found, 4, 6, 3]
    assert shares(tree) == pytest.approx(
        [share, *((1 - share) * part for part in (0.15, 0.15, 0.7))], rel=1e-9
    )
    two = plan_tree_noise(budget, 2, n_found)
    assert shares(two) == pytest.approx(
        [share, *((1 - share) * part / 0.85 for part in (0.15, 0.7))], rel=1e-9
    )
    if delta == 0:
        assert sum(price(event) for event in planned.event.events) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "n_found", "share"),
    [(2, 2, 0.25), (3, 1, 3 / (5 * 6 + 3)), (10, 10, 30 / (5 * 55 + 30)), (42, 38, 0.05)],
)
def test_fine_counts_of_few_columns_get_a_fifth_of_a_tables_weight(n, n_found, share):
    """At least a twentieth, and at most a quarter of all; never more where pairs are not all measured."""
    budget = Budget(epsilon=1.0, delta=DELTA)
    assert shares(plan_noise(budget, n, n_found=n_found))[0] == pytest.approx(share, rel=1e-9)
    alone = plan_noise(budget, n, pairs=0.0, n_found=n_found)
    assert shares(alone)[0] == pytest.approx(0.05, rel=1e-9)
    without = plan_noise(Budget(epsilon=1.0, delta=0.0), n, n_found=n_found)
    assert shares(without)[0] == pytest.approx(0.1, rel=1e-9)


def test_references_split_epsilon_as_documented():
    assert dpdask.Histogram().split(1.0) == pytest.approx((0.1, 0.9), rel=1e-12)
    assert dpdask.Tree().split(1.0) == pytest.approx((0.6, 0.4), rel=1e-12)
    budget = Budget(epsilon=1.0, delta=DELTA, adjacency="add-remove")
    planned = histogram_noise.plan(budget)
    assert price(planned.total) / price(planned.cells) == pytest.approx(0.01, rel=1e-9)


# ---- means of several noisy counts


SMALL = Domain(names=("a", "b"), sizes=(2, 3))
NOISE = MarginalNoise(one_way=gaussian(3.0), pairs=gaussian(2.0), cliques={})
ONE_WAY = np.array([60, 40, 20, 30, 50])
PAIRS = np.array([[20, 22, 24], [6, 8, 20]])


def noisy_of(factor=1, **changes):
    given = {"noise": NOISE, "cliques": {}, **changes}
    return NoisyMarginals(
        domain=SMALL,
        n_rows=100.0 * factor,
        one_way=ONE_WAY * factor,
        pairs=PAIRS.ravel() * factor,
        **given,
    )


def test_one_way_counts_are_means_by_inverse_variance():
    """A sum of the pairs' table has as many times a cell's variance as it has cells."""
    found = denoise(noisy_of(), shrinkage=False, significance=False).one_way
    np.testing.assert_allclose(
        found[0],
        (ONE_WAY[:2] / 9 + PAIRS.sum(axis=1) / (3 * 4)) / (1 / 9 + 1 / (3 * 4)),
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        found[1],
        (ONE_WAY[2:] / 9 + PAIRS.sum(axis=0) / (2 * 4)) / (1 / 9 + 1 / (2 * 4)),
        rtol=1e-12,
    )


def test_a_private_number_of_rows_is_the_mean_of_the_sums_by_inverse_variance():
    one_way, pairs = np.array([60, 40, 20, 30, 80]), PAIRS + 1
    sums, variances = np.array([100, 130, 106]), np.array([2 * 9.0, 3 * 9.0, 6 * 4.0])
    expected = (sums / variances).sum() / (1 / variances).sum()
    assert _total(SMALL, NOISE, one_way, pairs.ravel(), {}) == pytest.approx(expected, rel=1e-12)


# ---- what is said before a run


def test_tables_and_references_that_drown_are_told_at_their_thresholds():
    for n_rows, warned in ((1001, False), (999, True)):
        event = DiscreteLaplace(scale=20.0 / math.sqrt(2.0), sensitivity=1, adjacency="replace-one")
        assert (
            bool(expectations.warn_of_noisy_references({"v": event}, n_rows)) == warned
        )  # two percent of the rows
    noise = MarginalNoise(one_way=gaussian(50.0), pairs=None, cliques={})
    for n_rows, warned in ((251, False), (249, True)):
        assert bool(list_noisy_tables(noise, {"v": 5}, n_rows)) == warned  # σ · five cells


# ---- perturbed histograms, and what is told of them


def told(n_cells, n_rows):
    planned = histogram_noise.plan(Budget(epsilon=1.0))  # of scale 2
    return histogram_spec.list_warnings(Domain(names=("x",), sizes=(n_cells,)), planned, n_rows)


def test_cells_stand_out_at_three_times_the_largest_noise():
    enough = 10 * 3.0 * 2.0 * math.log(10)
    for factor, few, bins in ((0.999, True, 9), (1.001, False, 10)):
        assert (
            any("few cells stand out" in sentence for sentence in told(10, factor * enough)) == few
        )
        assert affordable_bins(factor * enough, 1, 1, 2.0) == bins


def test_spurious_cells_are_told_from_a_twentieth_of_the_rows():
    """The threshold for 1,000 rows is 4; noise reaches it with e⁻²/(1 + e^-½), and goes e^-½/(1 - e^-½) beyond on average."""
    a = math.exp(-0.5)
    edge = 0.05 * 1000 / (a**4 / (1 + a) * (4 + a / (1 - a)))
    assert edge == pytest.approx(107.1, abs=0.1)
    for n_cells, many in ((107, False), (108, True)):
        assert any("Noise alone may raise" in sentence for sentence in told(n_cells, 1000)) == many
