"""The bivariate normal against quadrature in 20 digits, its identities, and the correlation found back."""

import math
from functools import cache

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.special import ndtr as normal_cdf

from dpdask.kernels import normal
from dpdask.kernels.normal import tetrachoric

INF = math.inf
CUTS = st.floats(-6, 6)
PAIRS = [(-8, 8), (8, 8), (-4, 1.5), (-0.2, 0.4), (0, 0), (0.7, -0.7), (1, 2.5), (3, 3.001)]


def upper_orthant(h, k, r):
    """Pr(X > h, Y > k) by the package's own quadrature, for cuts of any sign: Pr(X > -h, Y > k; r) = Pr(Y > k) - Pr(X > h, Y > k; -r)."""

    def orthant(h, k, r):
        a, b = normal.upper_tail(abs(h)), normal.upper_tail(abs(k))
        value = normal._reduce(abs(h), abs(k), math.asin(-r if (h < 0) != (k < 0) else r), a, b)
        if h >= 0:
            return value if k >= 0 else a - value
        return b - value if k >= 0 else (1 - (a + b)) + value

    given = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (h, k, r)))
    return np.array(
        [orthant(*row) for row in zip(*(each.ravel().tolist() for each in given), strict=True)]
    ).reshape(given[0].shape)


@cache
def exact(h, k, r):
    """Pr(X > h, Y > k) as the integral of φ(x) Φ((rx - k) / (1 - r²)^½) over x > h, in 20 digits."""
    with mpmath.workdps(20):
        h, k, r = mpmath.mpf(h), mpmath.mpf(k), mpmath.mpf(r)
        spread = mpmath.sqrt((1 - r) * (1 + r))
        middle = k / r if abs(r) > 0.1 else mpmath.mpf(0)
        edges = {
            h,
            mpmath.mpf(14),
            *(middle + step * spread for step in (-12, -3, 0, 3, 12)),
            *map(mpmath.mpf, (-8, -3, 0, 3, 8)),
        }
        edges = sorted(edge for edge in edges if h <= edge <= 14)
        return mpmath.quad(lambda x: mpmath.npdf(x) * mpmath.ncdf((r * x - k) / spread), edges)


SOME = [-0.999999, -0.926, 0.0, 0.76, 0.926]  # a quadrature of 20 digits is slow


@pytest.mark.few(2)
@pytest.mark.parametrize("r", SOME)
def test_the_orthant_agrees_with_quadrature(r):
    for h, k in PAIRS:
        assert abs(exact(h, k, r) - float(upper_orthant(h, k, r))) <= 1e-15


@pytest.mark.parametrize("x", [-37.0, -8.0, -1.0, 0.0, 2.5, 8.0])
def test_the_normal_cdf_keeps_its_relative_accuracy(x):
    assert_allclose(normal_cdf(x), float(mpmath.ncdf(x)), rtol=1e-12)
    assert_allclose(normal.upper_tail(-x), float(mpmath.ncdf(x)), rtol=1e-12)


@settings(max_examples=80)
@given(CUTS, CUTS, st.floats(0, 1))
def test_any_probability_between_the_bounds_is_met(h, k, share):
    a, b = float(normal_cdf(-h)), float(normal_cdf(-k))
    low, high = max(0, a + b - 1), min(a, b)
    p = low + share * (high - low)
    found = float(tetrachoric(h, k, p))
    # between two neighbouring floats next to ±1, the orthant may move by more than 1e-12
    reach = abs(
        upper_orthant(h, k, np.clip(found + 2e-16, -1, 1))
        - upper_orthant(h, k, np.clip(found - 2e-16, -1, 1))
    )
    assert abs(upper_orthant(h, k, found) - p) <= 1e-14 + reach


@pytest.mark.parametrize(
    ("h", "k", "p"),
    [
        (0.3, -0.6, 0.31),
        (2.5, 2.4, 0.004),
        (-1.0, 1.5, 0.05),
        (3.0, 3.0, 1e-9),
        (0.1, 0.1, 0.4601),
        (0.1, -0.1, 1e-5),
        (-2.0, -2.2, 0.97),
    ],
)
def test_the_true_correlation_lies_next_to_the_one_found(h, k, p):
    found = float(tetrachoric(h, k, p))
    assert exact(h, k, found - 1e-9) < p < exact(h, k, found + 1e-9)


@pytest.mark.parametrize(
    ("h", "k"), [(0.5, 1.2), (-0.5, 1.2), (0.5, -1.2), (-0.5, -1.2), (0.0, 0.0), (4.0, 4.0)]
)
def test_beyond_the_frechet_bounds_the_correlation_is_perfect(h, k):
    a, b = float(normal_cdf(-h)), float(normal_cdf(-k))
    low, high = max(0.0, a + b - 1), min(a, b)
    assert tetrachoric(h, k, [-1, low - 1e-9, low, high, high + 1e-9, 2]).tolist() == [
        -1,
        -1,
        -1,
        1,
        1,
        1,
    ]
    assert tetrachoric(h, k, a * b) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("h", "k"), [(INF, 0.3), (0.3, -INF), (INF, INF), (-INF, INF), (9.0, 0.3), (0.3, -9.0)]
)
def test_constant_columns_have_no_correlation(h, k):
    assert tetrachoric(h, k, [0, 0.2, 1]).tolist() == [0, 0, 0]


def test_threads_change_nothing():
    rng = np.random.default_rng(0)
    h, k = rng.normal(size=(2, 50_000))
    p = upper_orthant(h, k, rng.uniform(-1, 1, 50_000))
    assert (tetrachoric(h, k, p) == tetrachoric(h, k, p, n_threads=3)).all()
