"""Isotonic regression against its min-max formula, and the Case I estimate against its likelihood."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.kernels.projections import case_one, isotonic

PAIRS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(1e-2, 1e2)), min_size=1, max_size=20)


@given(PAIRS)
def test_it_is_the_max_of_mins_of_averages(pairs):
    values, weights = np.array(pairs).T

    def average(i, j):
        return np.average(values[i : j + 1], weights=weights[i : j + 1])

    n = len(values)
    expected = [
        max(min(average(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)
    ]
    np.testing.assert_allclose(isotonic(values, weights), expected, atol=1e-8)


def test_nothing_gives_nothing():
    assert isotonic(np.zeros(0), np.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("values", "weights"),
    [([1.0], [1.0, 2.0]), ([np.nan], [1.0]), ([1.0], [0.0]), ([1.0], [np.inf])],
)
def test_nonsense_is_refused(values, weights):
    with pytest.raises(ValueError, match="isotonic regression needs"):
        isotonic(np.array(values), np.array(weights))


def test_case_one_pools_violators_and_fills_silent_anchors():
    anchors = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    cdf = case_one(anchors, np.array([0, 3, 1, 0, 2]), np.array([0, 4, 4, 0, 2]))
    assert cdf.tolist() == [0.0, 0.5, 0.5, 0.5, 1.0]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12).filter(
        lambda pairs: any(map(any, pairs))
    ),
    st.integers(0, 99),
)
def test_no_other_cdf_is_likelier(pairs, seed):
    below, above = np.array(pairs).T
    cdf = case_one(np.arange(len(pairs), dtype=float), below, below + above)

    def likelihood(f):
        with np.errstate(divide="ignore", invalid="ignore"):
            return (
                np.where(below > 0, below * np.log(f), 0).sum()
                + np.where(above > 0, above * np.log(1 - f), 0).sum()
            )

    rng = np.random.default_rng(seed)
    for size in (1e-3, 0.1, 1.0):
        other = (1 - size) * cdf + size * np.sort(rng.uniform(size=len(cdf)))
        assert likelihood(other) <= likelihood(cdf) + 1e-9


@pytest.mark.parametrize(
    ("anchors", "below", "asked"),
    [
        ([0.0, 0.0], [1, 1], [1, 1]),
        ([np.nan], [1], [1]),
        ([0.0], [2], [1]),
        ([0.0], [-1], [1]),
        ([0.0], [0], [0]),
        ([0.0, 1.0], [1], [1]),
        ([], [], []),
    ],
)
def test_what_is_no_case_one_data_is_refused(anchors, below, asked):
    with pytest.raises(ValueError, match="anchor"):
        case_one(
            np.array(anchors, dtype=float),
            np.array(below, dtype=np.int64),
            np.array(asked, dtype=np.int64),
        )
