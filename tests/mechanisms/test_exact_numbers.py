"""Sensitivities by enumeration, shares, thresholds and weights in closed form: a change of any of them by a tenth fails here."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dpdask
from dpdask.cells import cells
from dpdask.codec import ValueCodec
from dpdask.errors import SpecError
from dpdask.inference import WeightedSample, noise_error
from dpdask.kernels import marginals as tables_kernel
from dpdask.kernels import raking as raking_kernel
from dpdask.mechanisms import expectations
from dpdask.mechanisms.copula import model as raking
from dpdask.mechanisms.copula.fit import CopulaOptions, fit_copula
from dpdask.mechanisms.dip import tree as tree_fit
from dpdask.mechanisms.dip.tree import plan_tree_noise
from dpdask.mechanisms.histogram import noise as histogram_noise
from dpdask.mechanisms.histogram import spec as histogram_spec
from dpdask.mechanisms.histogram.cells import affordable_bins
from dpdask.mechanisms.marginals.denoise import Denoised, PairGroup, denoise
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    _total,
    draft,
    margin_95,
    plan_noise,
)
from dpdask.mechanisms.marginals.spec import list_noisy_tables
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import Adjacency, CentralEvent, DiscreteGaussian, DiscreteLaplace
from dpdask.references import hierarchy
from dpdask.references.hierarchy import Hierarchy, find_bins
from dpdask.references.histogram import histogram_event
from dpdask.stats import Domain

DELTA = 1e-6
FLAT = np.full((3, 5), 20.0)


def gaussian(sigma: float) -> DiscreteGaussian:
    return DiscreteGaussian(sigma=sigma, sensitivity=1.0, adjacency="add-remove")


# ---- sensitivity


def changes(adjacency: Adjacency, rows: int) -> list[np.ndarray]:
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
def test_the_declared_sensitivity_is_the_largest_change_of_a_histogram(
    adjacency: Adjacency, rows: int
) -> None:
    unit: Any = "row" if rows == 1 else UnitColumn(column="who", max_rows=rows)
    budgets = [
        Budget(epsilon=1.0, delta=delta, adjacency=adjacency, unit=unit) for delta in (0.0, DELTA)
    ]
    manhattan = max(int(np.abs(change).sum()) for change in changes(adjacency, rows))
    euclidean = max(float(np.linalg.norm(change)) for change in changes(adjacency, rows))
    for event in (
        draft(0.0, adjacency, rows, 1.0, 1),
        histogram_event(1.0, adjacency, rows),
        histogram_noise.plan(budgets[0]).cells,
    ):
        assert event.sensitivity == manhattan
    assert (
        euclidean * (1 - 1e-15)
        <= draft(DELTA, adjacency, rows, 1.0, 1).sensitivity
        <= euclidean * (1 + 1e-15)
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


def price(event: CentralEvent) -> float:
    """Return what an event takes of a budget: with Laplace noise its ε, with Gaussian noise a multiple of the inverse variance."""
    noise = (
        event.sensitivity / event.scale
        if isinstance(event, DiscreteLaplace)
        else (event.sensitivity / event.sigma) ** 2
    )
    return float(event.count * noise)


def shares(planned: Any) -> list[float]:
    prices = [price(event) for event in planned.event.events]
    return [each / sum(prices) for each in prices]


@pytest.mark.parametrize(
    ("delta", "share"), [(0.0, 0.1), (DELTA, 0.05)], ids=["laplace", "gaussian"]
)
def test_fine_counts_take_their_share_and_tables_the_rest(delta: float, share: float) -> None:
    n_found, budget = 3, Budget(epsilon=1.0, delta=delta)
    planned = plan_noise(budget, 4, one_way=2.0, pairs=1.0, cliques={("a",): 6.0}, n_found=n_found)
    assert [event.count for event in planned.event.events] == [3 * n_found, 4, 6, 1]
    assert shares(planned) == pytest.approx(
        [share, *((1 - share) * part for part in (0.4, 0.3, 0.3))], rel=1e-9
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


def test_references_split_epsilon_as_documented() -> None:
    assert dpdask.Histogram().split(1.0) == pytest.approx((0.1, 0.9), rel=1e-12)
    assert dpdask.Tree().split(1.0) == pytest.approx((0.6, 0.4), rel=1e-12)
    budget = Budget(epsilon=1.0, delta=DELTA, adjacency="add-remove")
    planned = histogram_noise.plan(budget)
    assert planned.total is not None
    assert price(planned.total) / price(planned.cells) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize(("scale", "n"), [(0.5, 1), (3.0, 7), (20.0, 1000)])
def test_the_enhanced_threshold_is_the_formula_s(scale: float, n: int) -> None:
    budget = Budget(epsilon=1.0 / scale, unit=UnitColumn(column="who", max_rows=2))
    assert histogram_noise.plan(budget).cut(n) == max(
        1, math.ceil(0.5 * 2 * math.log(max(2, n)) * scale)
    )


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0, 155.0])
def test_a_margin_is_the_least_that_noise_exceeds_with_a_twentieth(scale: float) -> None:
    m = int(margin_95(DiscreteLaplace(scale=scale, sensitivity=1, adjacency="add-remove")))

    def beyond(count: int) -> float:
        return (
            2
            * math.tanh(0.5 / scale)
            * sum(math.exp(-k / scale) for k in range(count + 1, count + int(60 * scale) + 60))
        )

    assert beyond(m) <= 0.05 < beyond(m - 1)
    assert (margin_95(gaussian(scale)) - 1.0) / scale == pytest.approx(1.959964, abs=1e-6)


# ---- means of several noisy counts


SMALL = Domain(names=("a", "b"), sizes=(2, 3))
NOISE = MarginalNoise(one_way=gaussian(3.0), pairs=gaussian(2.0), cliques={})
ONE_WAY = np.array([60, 40, 20, 30, 50])
PAIRS = np.array([[20, 22, 24], [6, 8, 20]])


def noisy_of(factor: int = 1, **changes: Any) -> NoisyMarginals:
    given = {"noise": NOISE, "cliques": {}, **changes}
    return NoisyMarginals(
        domain=SMALL,
        n_rows=100.0 * factor,
        one_way=ONE_WAY * factor,
        pairs=PAIRS.ravel() * factor,
        **given,
    )


def test_one_way_counts_are_means_by_inverse_variance() -> None:
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


def test_a_private_number_of_rows_is_the_mean_of_the_sums_by_inverse_variance() -> None:
    one_way, pairs = np.array([60, 40, 20, 30, 80]), PAIRS + 1
    sums, variances = np.array([100, 130, 106]), np.array([2 * 9.0, 3 * 9.0, 6 * 4.0])
    expected = (sums / variances).sum() / (1 / variances).sum()
    assert _total(SMALL, NOISE, one_way, pairs.ravel(), {}) == pytest.approx(expected, rel=1e-12)


# ---- taking the noise out of tables


@pytest.mark.parametrize("seed", [0, 1])
def test_the_mixture_has_the_least_estimated_risk(seed: int) -> None:
    """|E - Z|² + 2σ²·div(E) at three weights gives the parabola, and its lowest point the weight."""
    rng, sigma = np.random.default_rng(seed), 30.0
    truth = 1500.0 * rng.dirichlet(np.full(6, 4.0))[:, None] * (0.6 * np.eye(6) + 0.4 / 6)
    rows, columns, total = truth.sum(axis=1)[None], truth.sum(axis=0)[None], float(truth.sum())
    noisy = truth[None] + rng.normal(size=(1, 6, 6)) * sigma
    flat = tables_kernel.independence(rows, columns, total)
    departure = noisy - flat
    departure -= departure.mean(axis=1, keepdims=True)
    departure -= departure.mean(axis=2, keepdims=True)
    one, of_one = tables_kernel.shrink_values(departure, sigma)
    two, of_two = tables_kernel.project_stack(flat + departure, total)
    two -= flat

    def risk(w: float) -> float:
        estimate = w * two + (1 - w) * one
        return float(
            ((estimate - departure) ** 2).sum() + 2 * sigma**2 * (w * of_two + (1 - w) * of_one)[0]
        )

    bent = risk(1.0) - 2 * risk(0.5) + risk(0.0)
    best = (3 * risk(0.0) - 4 * risk(0.5) + risk(1.0)) / (4 * bent)
    found = tables_kernel.estimate(noisy, rows, columns, total, sigma) - flat
    weight = float(((found - one) * (two - one)).sum() / ((two - one) ** 2).sum())
    assert 0.0 < weight < 1.0  # the estimates are mixed
    assert weight == pytest.approx(best, abs=1e-9)


def one_value(m: int, n: int, value: float) -> np.ndarray:
    """Return independence with a departure of a single singular value."""
    left, right = (
        np.resize([1.0, -1.0], size) - np.resize([1.0, -1.0], size).mean() for size in (m, n)
    )
    return 1000.0 + value * np.outer(left / np.linalg.norm(left), right / np.linalg.norm(right))


@pytest.mark.parametrize(("m", "n"), [(2, 9), (5, 5), (4, 12)])
def test_dependence_is_told_beyond_the_edge_of_the_noise(m: int, n: int) -> None:
    sigma = 7.0
    edge = sigma * (math.sqrt(m - 1) + math.sqrt(n - 1))
    tables = np.stack([one_value(m, n, factor * edge) for factor in (0.999, 1.001)])
    rows, columns = tables.sum(axis=2), tables.sum(axis=1)
    assert tables_kernel.tell_dependence(
        tables, rows, columns, float(tables[0].sum()), sigma
    ).tolist() == [False, True]
    kept = [
        tables_kernel.shrink_values(table[None] - 1000.0, sigma)[0]
        for table in (*tables, one_value(m, n, 3.0 * edge))
    ]
    q, beta = n - 1, (m - 1) / (n - 1)
    y = 3.0 * edge / (sigma * math.sqrt(q))
    assert np.abs(kept[0]).max() == 0.0 < np.abs(kept[1]).max()
    assert np.linalg.norm(kept[2]) == pytest.approx(
        sigma * math.sqrt(q) * math.sqrt((y**2 - beta - 1) ** 2 - 4 * beta) / y, rel=1e-9
    )


def test_significance_and_doubt_are_whole_and_half_of_the_noise() -> None:
    rng, sizes, sigma = np.random.default_rng(1), (6, 6, 6, 6), 20.0
    domain = Domain(names=tuple("abcd"), sizes=sizes)
    pairs = np.concatenate([rng.integers(20, 200, 36) for _ in range(6)])
    noise = MarginalNoise(one_way=None, pairs=gaussian(sigma), cliques={})
    noisy = NoisyMarginals(
        domain=domain,
        n_rows=float(pairs.sum() / 6),
        noise=noise,
        one_way=np.zeros(0, dtype=np.int64),
        pairs=pairs,
        cliques={},
    )
    [group] = denoise(noisy, shrinkage=False).groups
    departure = np.abs(
        group.tables
        - tables_kernel.independence(
            group.tables.sum(axis=2), group.tables.sum(axis=1), noisy.n_rows
        )
    )
    assert (group.significant == (departure > sigma)).all()
    for factor in (0.9, 1.1):
        assert (group.significant != (departure > factor * sigma)).any()
    assert group.sigma == pytest.approx(sigma, rel=1e-7)


EMPTY: Any = SimpleNamespace(cliques={})  # no three-way tables


def group_of(table: np.ndarray, sigma: float = 1.0) -> PairGroup:
    all_ = np.ones((1, *table.shape), dtype=bool)
    first, second, starts = (np.array([number]) for number in (0, 1, 0))
    return PairGroup(
        first=first,
        second=second,
        starts=starts,
        tables=table[None],
        significant=all_,
        dependent=all_[:, 0, 0],
        sigma=sigma,
    )


def test_what_two_deviations_of_a_sample_explain_is_not_corrected() -> None:
    table = np.array([[400.0, 100.0], [200.0, 300.0]])
    group = group_of(table, sigma=24.0)
    for missing, taken in ((19, False), (21, True)):  # a count of 100 has a deviation of 10
        shown = np.array([400, 100, 200, 300])
        wanted = group_of(table + np.array([[-missing, missing], [0, 0]]))
        moved = wanted.correct(table, shown, int(shown.sum()), 1.0)[0, 0, 1] - 100.0
        assert moved == pytest.approx(missing if taken else 0.0, abs=1e-9)
    moved = group.shrink_towards_independence(table[None])[0]
    assert moved.tolist() == [[388.0, 112.0], [212.0, 288.0]]


# ---- raking


def test_raking_moves_each_cell_by_the_strength_times_what_is_missing() -> None:
    codes = np.array([[0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1, 0]], dtype=np.uint8)
    targets, strength, total = np.array([30.0, 10.0, 25.0, 35.0]), 0.05, 100.0
    sizes, tables, starts = np.array([2, 2]), np.array([[0, 1, -1]]), np.array([0])
    weights = raking_kernel.rake(
        codes,
        sizes,
        tables,
        starts,
        targets,
        total,
        np.array([strength]),
        np.zeros(60, dtype=np.int64),
    )
    cell = codes[0] * 2 + codes[1]
    found = np.bincount(cell, weights=weights, minlength=4)
    assert np.abs(targets - found).max() > 1.0
    np.testing.assert_allclose(
        np.log(weights * 8 / total), (strength * (targets - found))[cell], rtol=1e-5
    )  # single precision


def test_a_refinement_takes_seven_tenths_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    gains: list[float] = []
    correct = PairGroup.correct

    def spy(group: PairGroup, wanted: Any, found: Any, n_sampled: int, gain: float) -> Any:
        gains.append(gain)
        return correct(group, wanted, found, n_sampled, gain)

    monkeypatch.setattr(PairGroup, "correct", spy)
    fit_copula(
        noisy_of(1000),
        np.random.Generator(np.random.PCG64(1)),
        CopulaOptions(refinements=1),
        records="copula",
    )
    assert gains == [0.7]


@pytest.mark.parametrize(
    ("sigma", "strength"), [(0.3, 40.0), (1.0, 40.0), (5.0, 1.6), (200.0, 0.001)]
)
def test_a_cell_of_a_fortieth_of_the_variance_is_half_believed(
    sigma: float, strength: float
) -> None:
    table = np.array([[60.0, 40.0], [30.0, 70.0]])
    cleaned = Denoised(
        domain=Domain(names=("a", "b"), sizes=(2, 2)),
        n_rows=200.0,
        one_way=(),
        groups=(group_of(table, sigma),),
    )
    targets = raking.choose_targets(cleaned, np.array([60, 40, 30, 70]), 200, EMPTY)
    assert targets is not None
    assert targets.strengths == pytest.approx([strength], rel=1e-12)


def test_a_table_is_missed_by_what_noise_and_chance_do_not_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, shown = (
        group_of(np.array([[100.0, 0.0], [0.0, 100.0]]), 3.0),
        np.array([120, 80, 80, 120]),
    )
    explained = [2.0 * math.sqrt(9.0 + 0.25 * count) for count in shown]
    assert raking._missed(group, shown, 400, 2.0) == pytest.approx(
        [sum(40.0 - each for each in explained)], rel=1e-12
    )
    seen: list[float] = []
    monkeypatch.setattr(raking, "MOST_TABLES", 0)
    monkeypatch.setattr(raking, "_missed", lambda *given: seen.append(given[-1]) or np.zeros(1))
    cleaned = Denoised(domain=SMALL, n_rows=200.0, one_way=(), groups=(group,))
    assert raking.choose_targets(cleaned, np.zeros(1000), 400, EMPTY) is None
    assert seen == [pytest.approx(math.sqrt(2.0 * math.log(1000)), rel=1e-12)]


# ---- fine counts in a hierarchy


def eight(**changes: Any) -> Hierarchy:
    """Return a hierarchy of eight whole numbers: two blocks of two blocks of two."""
    codec = ValueCodec(
        **{
            "name": "v",
            "type": pa.int64(),
            "bounds": (1.0, 8.0),
            "atoms": (),
            "nulls": True,
            **changes,
        }
    )
    return Hierarchy(cells(codec, 8))


def test_fine_counts_are_those_of_least_squares() -> None:
    """With counts that noise leaves large, upwards means and downwards differences are the generalised inverse."""
    found = eight()
    assert found.size == 3 + 2 + 4 + 8
    rng = np.random.default_rng(3)
    blocks = [np.repeat(np.eye(2**level), 8 // 2**level, axis=1) for level in (1, 2, 3)]
    line = rng.integers(900, 1100, 8)
    noisy = [
        np.rint(block @ line + rng.normal(size=len(block)) * 20).astype(np.int64)
        for block in blocks
    ]
    nulls = [500, 506, 530]
    counts = np.concatenate(
        [part for null, level in zip(nulls, noisy, strict=True) for part in ([null], level)]
    )
    event = DiscreteLaplace(scale=14.0, sensitivity=1, adjacency="add-remove", count=3)
    estimate = found.estimate(counts, event, None)
    expected = np.linalg.lstsq(
        np.concatenate(blocks), np.concatenate(noisy).astype(float), rcond=None
    )[0]
    np.testing.assert_allclose(estimate, [512.0, *expected], rtol=1e-9)


@pytest.mark.parametrize(
    ("before", "least"),
    [
        ([], 2.5),
        ([0.0], 3.0 * 2**0.5),
        ([2.0, 2.0], 3.5 * 3**0.5 - 4.0),
        ([2.0, 2.0, 2.0], 2.0),
        ([2.0, 2.0, 2.0, 1.9], 4.5 * 5**0.5 - 7.9),
        ([0.0] * 6, 6.0),
    ],
)
def test_blocks_are_kept_outwards_as_far_as_they_have_more_than_noise(
    before: list[float], least: float
) -> None:
    for last, reach in ((least - 0.05, 0), (least + 0.05, len(before) + 1)):
        counts = 3.0 * np.array([100.0, *before, last, 0.0, 0.0])
        for kept, around in (
            hierarchy._keep(counts, np.full(len(counts), 3.0)),
            hierarchy._keep(counts[::-1], np.full(len(counts), 3.0)),
        ):
            assert kept.indices(len(counts))[:2] in (
                (0, reach + 2),
                (len(counts) - reach - 2, len(counts)),
            )
            assert around in (
                [reach + 1],
                [len(counts) - reach - 2],
            )  # one more, with nothing known of it


def test_all_blocks_are_kept_where_none_has_more_than_noise() -> None:
    for most, kept in ((4.45, slice(0, 5)), (4.55, slice(1, 4))):
        assert (
            hierarchy._keep(np.array([0.0, 0.0, 3.0 * most, 0.0, 0.0]), np.full(5, 3.0))[0] == kept
        )


def test_sums_below_one_deviation_follow_their_neighbours() -> None:
    edge = math.sqrt(2 * 9.0)
    for mass, spread in ((0.99 * edge, True), (1.01 * edge, False)):
        found = hierarchy._share(
            np.array([mass]), np.array([[5.0, 1.0]]), np.full((1, 2), 3.0), np.ones((1, 2))
        )
        assert found[0] == pytest.approx(
            [mass / 2, mass / 2] if spread else [mass / 2 + 2, mass / 2 - 2]
        )
    falling = hierarchy._share(
        np.array([30.0, 20.0, 10.0, 0.0]), np.zeros((4, 2)), np.full((4, 2), 100.0), np.ones((4, 2))
    )
    assert falling.tolist() == [
        pytest.approx(row) for row in ([15.625, 14.375], [11.25, 8.75], [6.25, 3.75], [0.0, 0.0])
    ]


def test_found_cells_hold_a_part_each() -> None:
    grid = cells(
        ValueCodec(name="v", type=pa.int64(), bounds=(1.0, 200.0), atoms=(), nulls=False), 200
    )
    assert find_bins(grid, np.ones(200), 5, 0.0).cuts.tolist() == [
        0.0,
        40.0,
        80.0,
        120.0,
        160.0,
        200.0,
    ]
    fine = cells(
        ValueCodec(name="v", type=pa.int64(), bounds=(1.0, 401.0), atoms=(), nulls=False), 401
    )
    for much, alone in ((98.5, False), (100.5, True)):  # of 500, in five cells
        counts = np.append(much, np.full(400, (500.0 - much) / 400))
        assert (1.0 in find_bins(fine, counts, 5, 0.0).cuts) == alone
    exactly = cells(
        ValueCodec(name="v", type=pa.int64(), bounds=(1.0, 402.0), atoms=(), nulls=False), 402
    )
    assert 1.0 in find_bins(exactly, np.concatenate([[100.0, 0.0], np.ones(400)]), 5, 0.0).cuts


# ---- what is said before a run


@pytest.mark.parametrize(("kept", "warned"), [(0.0999, True), (0.1001, False)])
def test_almost_nothing_is_less_than_a_tenth(
    kept: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expectations, "estimate_kept", lambda *_: kept)
    codec = ValueCodec(name="v", type=pa.int64(), bounds=(1.0, 8.0), atoms=(), nulls=False)
    assert bool(expectations.warn_of_little({"v": codec}, {"v": 1.0}, "laplace")) == warned


def test_tables_and_references_that_drown_are_told_at_their_thresholds() -> None:
    for n_rows, warned in ((1001, False), (999, True)):
        event = DiscreteLaplace(scale=20.0 / math.sqrt(2.0), sensitivity=1, adjacency="replace-one")
        assert (
            bool(expectations.warn_of_noisy_references({"v": event}, n_rows)) == warned
        )  # two percent of the rows
    noise = MarginalNoise(one_way=gaussian(50.0), pairs=None, cliques={})
    for n_rows, warned in ((251, False), (249, True)):
        assert bool(list_noisy_tables(noise, {"v": 5}, n_rows)) == warned  # σ · five cells


# ---- perturbed histograms, and what is told of them


def told(n_cells: int, n_rows: float) -> list[str]:
    planned = histogram_noise.plan(Budget(epsilon=1.0))  # of scale 2
    return histogram_spec.list_warnings(Domain(names=("x",), sizes=(n_cells,)), planned, n_rows)


def test_cells_stand_out_at_three_times_the_largest_noise() -> None:
    enough = 10 * 3.0 * 2.0 * math.log(10)
    for factor, few, bins in ((0.999, True, 9), (1.001, False, 10)):
        assert (
            any("few cells stand out" in sentence for sentence in told(10, factor * enough)) == few
        )
        assert affordable_bins(factor * enough, 1, 1, 2.0) == bins


def test_spurious_cells_are_told_from_a_twentieth_of_the_rows() -> None:
    """The threshold for 1,000 rows is 4; noise reaches it with e⁻²/(1 + e^-½), and goes e^-½/(1 - e^-½) beyond on average."""
    a = math.exp(-0.5)
    edge = 0.05 * 1000 / (a**4 / (1 + a) * (4 + a / (1 - a)))
    assert edge == pytest.approx(107.1, abs=0.1)
    for n_cells, many in ((107, False), (108, True)):
        assert any("Noise alone may raise" in sentence for sentence in told(n_cells, 1000)) == many


def test_noise_alone_may_leave_no_estimate_in_a_twentieth_of_the_repeats() -> None:
    sample = WeightedSample(features=np.ones((1, 1)), response=np.ones(1), weights=np.ones(1))

    def estimates(refused: int) -> Any:
        calls = itertools.count()

        def estimate(_: WeightedSample) -> np.ndarray:
            if next(calls) < refused:
                raise SpecError("none", "here", "")
            return np.ones(1)

        return estimate

    rng = np.random.default_rng(1)
    assert noise_error(estimates(50), lambda _: sample, repeats=1000, rng=rng).refused == 50
    with pytest.raises(SpecError, match="often no estimate"):
        noise_error(estimates(51), lambda _: sample, repeats=1000, rng=rng)


def test_programs_are_solved_for_parents_with_a_thousandth_of_the_rows() -> None:
    for share, solved in ((0.00095, False), (0.00105, True)):
        tables = {"a": np.array([[1.0 - share, share]]), "b": np.full((2, 2), 0.5)}
        assert tree_fit._solve([("a", None), ("b", "a")], tables)["b"].tolist() == [True, solved]
