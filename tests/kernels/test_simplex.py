"""The projection against its optimality conditions and a general solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dpdask.kernels.projections import project

VECTORS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)
TOTALS = st.floats(1e-3, 1e6)


@settings(max_examples=300, deadline=None)
@given(VECTORS, TOTALS)
def test_the_result_meets_the_conditions_of_the_nearest_point(values, total):
    result = project(values, total)
    slack = 1e-9 * (total + np.abs(values).max())
    assert (result >= 0).all()
    assert result.sum() == pytest.approx(total, rel=1e-12)
    kept = result > 0
    shift = (values - result)[kept].mean()
    assert np.abs((values - result)[kept] - shift).max() <= slack  # one threshold for what is kept
    assert (values[~kept] <= shift + slack).all()  # and nothing above it is dropped


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_general_solver(seed):
    rng = np.random.default_rng(seed)
    values, total = rng.normal(size=6) * 3, float(rng.uniform(0.5, 5))
    found = optimize.minimize(
        lambda x: ((x - values) ** 2).sum(),
        np.full(6, total / 6),
        jac=lambda x: 2 * (x - values),
        bounds=[(0, None)] * 6,
        constraints={"type": "eq", "fun": lambda x: x.sum() - total, "jac": lambda x: np.ones(6)},
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    assert project(values, total) == pytest.approx(found.x, abs=1e-6)


def test_a_point_of_the_simplex_stays():
    assert project(np.array([1.0, 0.0, 3.0]), 4.0).tolist() == [1.0, 0.0, 3.0]


def test_what_is_hugely_negative_becomes_zero():
    assert project(np.array([-1e15, 5.0, -1e15]), 2.0).tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([], 1.0),
        ([np.nan], 1.0),
        ([np.inf, 0.0], 1.0),
        ([1.0], 0.0),
        ([1.0], np.inf),
        ([1.0], np.nan),
    ],
)
def test_nonsense_is_refused(values, total):
    with pytest.raises(ValueError, match="finite"):
        project(np.array(values, dtype=float), total)
