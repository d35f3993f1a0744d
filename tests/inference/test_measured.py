"""Linear estimates from noisy counts: least squares against dense algebra, exact variances, intervals that cover, and answers without noise."""

import math
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from numpy.random import default_rng
from scipy import stats
from strategies import zeros_and_a_tail

from dpdask.cells import cells
from dpdask.codec import LevelCodec, ValueCodec, codec_for
from dpdask.inference.measured import MeasuredColumn
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace
from dpdask.privacy.noise import deviation, perturb
from dpdask.references.counts import COUNTS, list_cell_counts
from dpdask.references.hierarchy import N_LEVELS, Hierarchy, make_grid
from dpdask.schema import Column
from dpdask.stats.statistic import CellCounts
from dpdask.streams import RunKey, stream

ALPHA = 1e-9
NOISE = DiscreteLaplace(scale=60.0, sensitivity=2, adjacency="replace-one", count=N_LEVELS)
NONE = DiscreteGaussian(sigma=1e-6, sensitivity=1.5, adjacency="replace-one", count=N_LEVELS)


def codec_of(bounds, type_=None, **changes):
    usual = {"name": "v", "type": type_ or pa.float64(), "atoms": (), "nulls": False}
    return ValueCodec(**{**usual, "bounds": bounds, **changes})


MIXED = [
    codec_of((0.0, 40.0), pa.int32(), atoms=(0.0, 7.0, 40.0), nulls=True),
    codec_of((0.0, 11.0), pa.int32()),
    codec_of((-3.0, 5.0), atoms=(1.0,), nulls=True),
]


def small(codec):
    return Hierarchy(make_grid(codec) if codec.lattice else cells(codec, 30))


def count(hierarchy, values):
    grid = hierarchy.cells
    return CellCounts.of_batch(grid, pa.array(values, grid.codec.type, from_pandas=True))


def measure(hierarchy, values, event=NONE, rng=None, *, known=True):
    exact = hierarchy.count(count(hierarchy, values))
    noisy = exact if rng is None else perturb(exact, event, rng=rng)
    rows = hierarchy.list_counts("v", noisy, event)
    return MeasuredColumn.read(rows, float(len(values)) if known else None)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("codec", MIXED, ids=lambda codec: f"{codec.type} {codec.bounds}")
def test_counts_and_variances_are_those_of_dense_least_squares(codec, known):
    hierarchy, rng = small(codec), default_rng(3)
    noisy = rng.integers(-5, 50, hierarchy.size)
    rows = hierarchy.list_counts("v", noisy, NOISE)
    assert rows.schema == COUNTS
    found = MeasuredColumn.read(rows, 500.0 if known else None)
    n, side = len(found.singles), len(found.levels[0])
    design = []
    for level in range(1, N_LEVELS + 1):
        width = side ** (N_LEVELS - level)
        blocks = np.kron(np.eye(side**level), np.ones(width))
        design.append(
            np.block(
                [[np.eye(n), np.zeros((n, side**N_LEVELS))], [np.zeros((side**level, n)), blocks]]
            )
        )
    possible = found.is_possible
    matrix = np.concatenate(design)[:, possible]
    covariance = np.linalg.inv(matrix.T @ matrix)
    best = covariance @ matrix.T @ noisy
    if known:
        pull = covariance.sum(axis=1) / covariance.sum()
        best = best + pull * (500.0 - best.sum())
        covariance = covariance - np.outer(pull, pull) * covariance.sum()
    assert found.counts[possible] == pytest.approx(best, abs=1e-9)
    assert not found.counts[~possible].any()
    weights = rng.normal(size=len(possible))
    inside = weights[possible]
    noise = deviation(NOISE) ** 2
    assert found.variance(weights) == pytest.approx(noise * inside @ covariance @ inside)
    # the variance of each rank is found for all at once
    _, last, (ranks, own, shared) = found._steps
    valued = found.is_possible & ~found.is_null
    for place, value in enumerate(last):
        up_to = (valued & (found.high <= value)).astype(float)
        assert ranks[place] == pytest.approx(up_to @ found.counts, abs=1e-6)
        assert own[place] == pytest.approx(found.variance(up_to), abs=1e-6)
        both = up_to[possible] @ covariance @ valued[possible].astype(float)
        assert shared[place] == pytest.approx(noise * both, abs=1e-6)


def test_levels_and_cells_of_one_level_are_read_alike():
    codec = codec_for(
        "city", Column(role="privatise", kind="categorical", levels=["a", "b", "c"]), pa.string()
    )
    assert isinstance(codec, LevelCodec)
    event = DiscreteLaplace(scale=3.0, sensitivity=2, adjacency="replace-one")
    rows = list_cell_counts(cells(codec, 1), "city", np.array([70, 25, 11]), event)
    found = MeasuredColumn.read(rows, 100.0)
    assert found.counts.tolist() == [68.0, 23.0, 9.0]
    share = found.share(np.array([0.0, 1.0, 0.0]))
    # a third of the excess is taken off: (1 - 1/3) of the noise's variance is left
    drawn = 0.23 * 0.77 / 100.0
    noise = deviation(event) ** 2 * (2.0 / 3.0) / 100.0**2
    assert share.estimate == pytest.approx(0.23)
    assert share.standard_error == pytest.approx(math.sqrt(noise + drawn))
    grades = found.mean_of(np.array([1.0, 3.0, math.nan]))
    assert grades.estimate == pytest.approx((68.0 + 3.0 * 23.0) / 91.0)

    even = cells(codec_of((0.0, 10.0), nulls=True), 5)
    rows = list_cell_counts(even, "v", np.array([10, 1, 2, 3, 4, 5]), event)
    found = MeasuredColumn.read(rows, None)
    assert found.counts.tolist() == [10.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.is_null.tolist() == [True] + [False] * 5
    assert found.mean().bias_bound == pytest.approx(1.0)


COLUMNS = {
    "zeros and a tail": (codec_of((0.0, 1e5), pa.int64()), zeros_and_a_tail(5, 4000)),
    "wide bounds": (codec_of((-1e6, 1e9)), default_rng(1).normal(50.0, 9.0, 4000)),
    "one value": (codec_of((0.0, 1e6)), np.full(4000, 2.75)),
    "nulls and atoms": (
        codec_of((0.0, 1e4), pa.int32(), nulls=True, atoms=(0.0, 999.0)),
        np.where(np.arange(4000) % 3 == 0, np.nan, np.arange(4000) % 2500 // 2),
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_without_noise_the_bounds_on_the_bias_hold_for_every_question(name):
    codec, values = COLUMNS[name]
    found, x = measure(Hierarchy(make_grid(codec)), values), values[~np.isnan(values)]
    for within in (None, (np.quantile(x, 0.1), np.quantile(x, 0.8) + 1.0)):
        mean = found.mean(within)
        truth = x.mean() if within is None else x.clip(*within).mean()
        assert abs(mean.estimate - truth) <= mean.bias_bound + 1e-9 * abs(truth)
    edges = np.unique(np.append(codec.bounds, np.quantile(x, [0.05, 0.3, 0.301, 0.9]) + 0.25))
    for part, exact in zip(found.histogram(edges)[0], np.histogram(x, edges)[0], strict=True):
        assert abs(part.estimate - exact) <= part.bias_bound + 1e-6
    for p in (0.01, 0.3, 0.5, 0.99):
        value, low, high = found.quantile(p, deviations=1e-9)
        exact = np.quantile(x, p, method="inverted_cdf")
        assert low <= exact <= high
        assert abs(value - exact) <= 0.02 * abs(exact) + 1.0


def test_a_column_without_rows_with_a_value_has_no_mean_and_no_quantile():
    codec = codec_of((0.0, 100.0), pa.int32(), nulls=True)
    rng = stream(RunKey.insecure(1), "measured", "")
    found = measure(Hierarchy(make_grid(codec)), np.full(300, np.nan), NOISE, rng)
    assert math.isnan(found.mean().estimate)
    assert math.isnan(found.quantile(0.5)[0])


QUESTIONS = {
    "mean within": lambda found: found.mean((0.0, 20_000.0)),
    "range": lambda found: found.histogram(np.array([0.0, 1.0, 5000.0, 1e5]))[0][1],
}
RUNS = 150


def test_standard_errors_are_those_of_many_runs_and_half_of_them_would_not_pass():
    """Also where the number of rows is not known."""
    population = zeros_and_a_tail(2, 200_000)
    hierarchy = Hierarchy(make_grid(codec_of((0.0, 1e5), pa.int64())))
    shares = count(hierarchy, population).counts / len(population)
    n, draw = 20_000, default_rng(8)
    rng = stream(RunKey.insecure(4), "measured/coverage", "")
    truth = {
        "mean within": population.clip(0.0, 20_000.0).mean(),
        "range": n * ((population >= 1.0) & (population < 5000.0)).mean(),
    }
    told = {}
    for _ in range(RUNS):
        drawn = CellCounts(draw.multinomial(n, shares))
        noisy = perturb(hierarchy.count(drawn), NOISE, rng=rng)
        rows = hierarchy.list_counts("v", noisy, NOISE)
        for known, (name, ask) in product((True, False), QUESTIONS.items()):
            found = ask(MeasuredColumn.read(rows, float(n) if known else None))
            assert found.bias_bound < found.standard_error
            off = (found.estimate - truth[name]) / found.standard_error
            told.setdefault((name, known), []).append(off)

    def p_value(scores):  # a test of the variance 1, in both directions
        below = stats.chi2.cdf(np.square(scores).sum(), RUNS)
        return 2.0 * min(below, 1.0 - below)

    for scores in told.values():
        assert p_value(scores) > ALPHA
        assert p_value(2.0 * np.array(scores)) < ALPHA
        assert p_value(0.5 * np.array(scores)) < ALPHA


def test_intervals_of_quantiles_cover_and_those_that_ignore_the_noise_do_not():
    population = default_rng(0).lognormal(7.0, 0.8, 200_000)
    hierarchy = Hierarchy(make_grid(codec_of((0.0, 1e6))))
    shares = count(hierarchy, population.clip(0.0, 1e6)).counts / len(population)
    n, draw, ps = 20_000, default_rng(8), (0.1, 0.5, 0.8)
    truth = np.quantile(population, ps)
    rng = stream(RunKey.insecure(5), "measured/quantiles", "")
    hits, blind = [], []
    for _ in range(100):
        noisy = perturb(hierarchy.count(CellCounts(draw.multinomial(n, shares))), NOISE, rng=rng)
        rows = hierarchy.list_counts("v", noisy, NOISE)
        for p, exact in zip(ps, truth, strict=True):
            for found, deviations in ((hits, 1.96), (blind, 0.4)):
                _, low, high = MeasuredColumn.read(rows, float(n)).quantile(p, deviations)
                found.append(low <= exact <= high)
    assert stats.binom.cdf(sum(hits), len(hits), 0.95) > ALPHA
    assert stats.binom.cdf(sum(blind), len(blind), 0.95) < ALPHA
