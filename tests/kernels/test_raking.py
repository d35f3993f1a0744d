"""Raking weights to tables, and systematic sampling by them: against plain numpy, and with power in both directions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from dpdask.kernels.raking import rake, resample, solve_cells

SIZES = np.array([3, 4, 2, 5], dtype=np.int64)
TABLES = np.array(
    [*((*pair, -1) for pair in itertools.combinations(range(4), 2)), (0, 1, 2), (1, 2, 3)],
    dtype=np.int64,
)
LENGTHS = np.append(SIZES, 1)[TABLES].prod(axis=1)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)[:-1]]).astype(np.int64)
TOTAL = 10_000.0


def drawn(rng, n, keep=0.0):
    """Records whose attributes follow the first one with probability `keep`."""
    codes = np.stack([rng.integers(0, size, n) for size in SIZES]).astype(np.uint16)
    for a in range(1, 4):
        codes[a] = np.where(rng.random(n) < keep, codes[0] % SIZES[a], codes[a])
    return codes


def tables_of(codes, weights=None):
    n = codes.shape[1]
    weights = np.full(n, TOTAL / n) if weights is None else weights
    return np.concatenate(
        [
            np.bincount(cells_of(codes, table), weights=weights, minlength=LENGTHS[t])
            for t, table in enumerate(TABLES)
        ]
    )


def cells_of(codes, table):
    """Each record's cell in a table of two or three attributes, counted in numpy's own way."""
    own = [attribute for attribute in table if attribute >= 0]
    return np.ravel_multi_index(tuple(codes[own].astype(int)), tuple(SIZES[own]))


def visits(rng, sweeps):
    return np.concatenate([rng.permutation(len(TABLES)) for _ in range(sweeps)]).astype(np.int64)


def paces(order):
    """How far each visit goes: beyond the root, but for the last visits."""
    return np.where(np.arange(len(order)) < len(order) - len(TABLES), 1.5, 1.0)


def reference(codes, targets, strengths, order):
    """The same in numpy: each cell's equation by bisection."""
    weights = np.full(codes.shape[1], TOTAL / codes.shape[1])
    thetas = np.zeros(len(targets))
    for t, pace in zip(order, paces(order), strict=True):
        cells = STARTS[t] + cells_of(codes, TABLES[t])
        found, firmness = np.bincount(cells, weights=weights, minlength=len(targets)), strengths[t]
        low, high = np.full(len(targets), -4.0), np.full(len(targets), 2.0)
        for _ in range(100):
            middle = (low + high) / 2
            above = thetas + middle > firmness * (targets - found * np.exp(middle))
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        move = np.clip(pace * middle, -4.0, 2.0)
        weights = weights * np.exp(move)[cells]
        met = np.unique(cells)
        thetas[met] += move[met]
    return weights


@given(st.floats(0.0, 1e6), st.floats(1e-6, 1e6), st.floats(-20.0, 20.0), st.floats(1e-6, 40.0))
def test_a_cell_is_solved_or_at_its_bound(wanted, found, theta, strength):
    moves = np.full(3, np.nan)
    solve_cells(np.full(3, wanted), np.full(3, found), np.full(3, theta), strength, moves)
    d = moves[0]
    assert (moves == d).all()

    def side(x):
        return theta + x - strength * (wanted - found * math.exp(x))

    assert -4.0 <= d <= 2.0
    assert side(max(d - 1e-6, -4.0)) <= 1e-9 or d == -4.0
    assert side(min(d + 1e-6, 2.0)) >= -1e-9 or d == 2.0


@pytest.mark.few
@pytest.mark.parametrize("strength", [1e-4, 0.01, 10.0])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_weights_are_those_of_plain_numpy(strength, dtype):
    rng = default_rng(1)
    pool, targets, order = drawn(rng, 997, 0.2), tables_of(drawn(rng, 4000, 0.6)), visits(rng, 3)
    strengths = strength * np.linspace(0.5, 2.0, len(TABLES))
    found = rake(pool.astype(dtype), SIZES, TABLES, STARTS, targets, TOTAL, strengths, order)
    np.testing.assert_allclose(found, reference(pool, targets, strengths, order), rtol=1e-5)


@pytest.mark.parametrize("total", [112_407_258.7, 2_570_975_398.7])
def test_many_equal_weights_are_summed_exactly(total):
    shares, n = np.array([0.97, 0.01, 0.01, 0.01]), 2**17 + 3
    cell = default_rng(3).choice(4, size=n, p=shares)
    codes, sizes, table = (
        np.stack([cell // 2, cell % 2]).astype(np.uint8),
        np.array([2, 2]),
        np.array([[0, 1, -1]]),
    )
    weights = rake(
        codes,
        sizes,
        table,
        np.array([0]),
        total * shares,
        total,
        np.array([1.0]),
        np.zeros(6, dtype=np.int64),
    )
    np.testing.assert_allclose(np.bincount(cell, weights=weights), total * shares, rtol=2e-6)


def test_a_cell_that_the_pool_lacks_does_no_harm():
    rng = default_rng(4)
    pool = drawn(rng, 3000)
    pool[0, pool[0] == 2] = 1
    weights = rake(
        pool,
        SIZES,
        TABLES,
        STARTS,
        tables_of(drawn(rng, 3000)),
        TOTAL,
        np.ones(len(TABLES)),
        visits(rng, 10),
    )
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(TOTAL, rel=0.5)


@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=40),
    st.integers(1, 60),
    st.floats(0.0, 1.0, exclude_max=True),
    st.randoms(),
)
def test_a_systematic_sample_takes_each_record_as_often_as_its_share_up_to_one(
    weights, n, uniform, random
):
    shares = np.array(weights) + 1e-3
    order = np.array(random.sample(range(len(shares)), len(shares)), dtype=np.int64)
    chosen = resample(shares, order, n, uniform)
    counts = np.bincount(chosen, minlength=len(shares))
    assert counts.sum() == n
    assert (np.abs(counts - n * shares / shares.sum()) < 1.0 + 1e-9).all()
    places = np.argsort(order)[chosen]
    assert (np.diff(places) >= 0).all()  # in the order of the walk


def test_weights_that_are_no_numbers_stay_in_the_pool():
    for bad in (np.nan, np.inf, 0.0):
        assert set(resample(np.full(5, bad), np.arange(5), 7, 0.5).tolist()) <= set(range(5))
