"""Random ranges against one-line oracles: anchors by numpy's interpolation, ranges by sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special

from dpdask.kernels.ranges import (
    LEVELS,
    N_CELLS,
    Acceptable,
    Quantiles,
    Steps,
    at_least,
    intersect,
    narrow,
    partition,
)

NORMAL = Quantiles(special.ndtri(LEVELS), LEVELS)
UNIFORM = Quantiles(np.array([-3.0, 3.0]), np.array([0.0, 1.0]))
N_ROWS = 5000


def nothing(n_anchors):
    return Acceptable(np.empty(0), np.empty(0), np.zeros(n_anchors + 1, dtype=bool))


def random_words(n_columns, n_rows=N_ROWS):
    drawn = np.random.PCG64(7).random_raw(n_rows * n_columns).reshape(n_rows, n_columns)
    drawn[:4] = np.array([0, 2**64 - 1, 2**11, 2**64 - 2**11], dtype=np.uint64)[
        :, None
    ]  # the ends of the table
    return drawn


def shares(words):
    return ((words >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53


@pytest.mark.parametrize("distribution", [NORMAL, UNIFORM], ids=["normal", "uniform"])
@pytest.mark.parametrize("n_anchors", [1, 2, 5])
@pytest.mark.parametrize("lattice", [False, True])
def test_a_partition_agrees_with_sorting(distribution, n_anchors, lattice):
    words, centres = random_words(n_anchors), np.arange(n_anchors) / 4.0
    values = np.round(np.random.default_rng(0).normal(size=N_ROWS) * 2) / (1 if lattice else 4)
    lower, upper = partition(
        values,
        words,
        distribution,
        centres,
        nothing(n_anchors),
        spacing=0.0,
        ring=False,
        lattice=lattice,
    )
    anchors = centres + np.interp(shares(words), distribution.p, distribution.x)
    anchors = np.sort(np.floor(anchors) if lattice else anchors, axis=1)
    ends = np.column_stack([np.full(N_ROWS, -np.inf), anchors, np.full(N_ROWS, np.inf)])
    index = (anchors < values[:, None]).sum(axis=1)
    assert_allclose(lower, ends[np.arange(N_ROWS), index], rtol=1e-9, atol=1e-9)
    assert_allclose(upper, ends[np.arange(N_ROWS), index + 1], rtol=1e-9, atol=1e-9)


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(-3, 3), st.integers(-3, 3)),
        min_size=1,
    )
)
def test_an_intersection_holds_what_both_hold(ends):
    first, second = [
        (
            np.array([e[i] for e in ends], dtype=float),
            np.array([e[i + 1] for e in ends], dtype=float),
        )
        for i in (0, 2)
    ]
    for value in np.arange(-3.0, 4.0):
        holds = [
            np.where(low == high, low == value, (low < value) & (value <= high))
            for low, high in (first, second)
        ]
        low, high = intersect(first, second)
        both = holds[0] & holds[1]
        assert np.where(low == high, low == value, (low < value) & (value <= high))[both].all()


@given(st.lists(st.floats(-10, 10), min_size=1), st.lists(st.floats(-10, 10), min_size=1))
def test_the_bound_on_a_probability_holds(some, others):
    cdf = Steps(NORMAL.x, np.concatenate([[0.0], LEVELS]), np.concatenate([LEVELS, [1.0]]))
    n = min(len(some), len(others))
    lower, upper = np.array(some[:n]), np.array(others[:n])
    true = np.where(
        lower == upper, 0.0, special.ndtr(upper) - special.ndtr(lower) + (lower > upper)
    )
    bound = at_least(lower, upper, cdf)
    assert (bound <= true + 1e-12).all()
    assert (bound >= true - 2.0 / N_CELLS).all()
    open_ended = at_least(np.array([-np.inf, -np.inf, 0.0]), np.array([np.inf, 0.0, np.inf]), cdf)
    assert_allclose(open_ended, [1.0, 0.5, 0.5], atol=1.0 / N_CELLS)


@pytest.mark.parametrize("either", [True, False])
def test_narrowing_agrees_with_rounds_written_out(either):
    cdf = Steps(
        np.linspace(-3, 3, 601), np.linspace(0, 601, 602) / 601, np.linspace(0, 601, 602) / 601
    )
    values, words = np.random.default_rng(0).uniform(-3, 3, 300), random_words(4, 300)
    tau = Quantiles(np.array([0.0, 0.4]), np.array([0.0, 1.0]))
    lower, upper = narrow(values, words, UNIFORM, tau, cdf, either=either, lattice=False)
    for row in range(300):
        v, (t, *drawn) = values[row], shares(words[row])
        low, high, a, b, least, most = -np.inf, np.inf, 0.0, 1.0, 0.0, 1.0
        for share in drawn:
            rank = a + share * (b - a)
            anchor = -3 + 6 * rank
            at = np.searchsorted(cdf.x, anchor) / 601
            pieces = (at - least, most - at)
            if (
                min(pieces) if either else pieces[int(v > anchor)]
            ) < 0.4 * t or not low < anchor < high:
                break
            if v <= anchor:
                high, b, most = anchor, rank, at
            else:
                low, a, least = anchor, rank, at
        assert (lower[row], upper[row]) == pytest.approx((low, high), rel=1e-9)
