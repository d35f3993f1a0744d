"""Truncated moments against numerical integration, far tails included."""

import math

import mpmath as mp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from dpdask.kernels.normal import FORMS, truncate

LAWS = ["gaussian", "logistic"]
SCIPY = {"gaussian": stats.norm, "logistic": stats.logistic}
INF = math.inf


INTERVALS = [
    (-INF, INF),
    (-INF, 0.0),
    (-INF, 1.7),
    (1.5, INF),
    (40.0, INF),
    (-INF, -40.0),
    (40.0, 40.0001),
    (40.0, 60.0),
    (-60.0, -55.0),
    (-1.0, 1.0),
    (-3.0, 5.0),
    (-1e-9, 1e-9),
    (0.0, 4.0),
    (-0.5, 3.9),
    (12.0, 13.5),
    (-100.0, 0.001),
]


def gaussian(a, b):
    """∫ εᵏ dF over (a, b], k = 0, 1, 2, from erfc with so many digits that nothing can cancel."""

    def tail(s):
        if math.isinf(s):
            return (mp.mpf(s < 0), mp.mpf(0), mp.mpf(s < 0))
        upper, density = mp.erfc(mp.mpf(s) / mp.sqrt(2)) / 2, mp.npdf(s)
        return upper, density, s * density + upper

    return tuple(x - y for x, y in zip(tail(a), tail(b), strict=True))


def logistic(a, b):
    """The same by quadrature of the density."""

    def density(x):
        return mp.exp(-abs(x)) / (1 + mp.exp(-abs(x))) ** 2

    low, high = (mp.mpf(a), mp.mpf(b))
    near = [
        end + sign * step
        for end, sign in ((a, 1), (b, -1))
        if math.isfinite(end)
        for step in (0.1, 1, 5, 20)
    ]
    cuts = [low, *sorted(mp.mpf(x) for x in {*near, -30, -8, -2, 0, 2, 8, 30} if a < x < b), high]
    return tuple(mp.quad(lambda x, k=k: x**k * density(x), cuts) for k in range(3))


@pytest.mark.few(8)
@pytest.mark.parametrize(("a", "b"), INTERVALS)
@pytest.mark.parametrize("distribution", LAWS)
def test_moments_are_the_integrals(distribution, a, b):
    with mp.workdps(900 if distribution == "gaussian" else 40):
        mass, first, second = gaussian(a, b) if distribution == "gaussian" else logistic(a, b)
        expected = float(mp.log(mass)), float(first / mass), float(second / mass)
    found = truncate(distribution, a, b)
    nearest = 1.0 if a < 0 < b and b - a > 1e-3 else 0.0
    assert found.log_probability == pytest.approx(expected[0], rel=1e-12, abs=1e-13)
    assert found.mean == pytest.approx(expected[1], rel=1e-12, abs=1e-13 * nearest + 1e-24)
    assert found.square == pytest.approx(expected[2], rel=1e-12)


@pytest.mark.parametrize("distribution", LAWS)
def test_points_and_shapes(distribution):
    found = truncate(distribution, [[1.0, -2.0]], [[1.0, -2.0], [3.0, 0.0]])
    assert found.mean.shape == (2, 2)
    assert_array_equal(found.mean[0], [1.0, -2.0])
    assert_allclose(found.square[0], [1.0, 4.0], rtol=1e-15)
    assert (found.log_probability[0] == -INF).all()
    assert (found.mean[1] != found.mean[0]).all()
    assert truncate(distribution, 5.0, INF).mean.shape == ()


@pytest.mark.parametrize("distribution", LAWS)
@pytest.mark.parametrize(
    ("u", "v"), [(-1.0, 0.5), (-3.0, 4.0), (20.0, 21.0), (-41.0, -39.0), (-40.0, 40.0)]
)
def test_a_ring_is_what_its_hole_leaves(distribution, u, v):
    ring, below, above = (
        truncate(distribution, v, u),
        truncate(distribution, -INF, u),
        truncate(distribution, v, INF),
    )
    log_mass = np.logaddexp(below.log_probability, above.log_probability)
    weights = np.exp(np.array([below.log_probability, above.log_probability]) - log_mass)
    assert ring.log_probability == pytest.approx(min(log_mass, 0.0), rel=1e-14)
    assert ring.mean == pytest.approx(weights @ [below.mean, above.mean], rel=1e-12, abs=1e-12)
    assert ring.square == pytest.approx(weights @ [below.square, above.square], rel=1e-12)


@pytest.mark.parametrize("distribution", LAWS)
def test_the_far_tail_is_finite_and_right_to_first_order(distribution):
    far = np.array([1e3, 1e6, 1e9])
    found = truncate(distribution, far, np.full(3, INF))
    excess = 1 / far if distribution == "gaussian" else np.ones(3)  # the mean of what lies beyond
    assert_allclose(found.mean, far + excess, rtol=1e-9)
    assert np.isfinite(found.log_probability).all()
    narrow = truncate(distribution, far, far * (1 + 1e-12))
    assert ((narrow.mean >= far) & (narrow.mean <= far * (1 + 1e-12))).all()


@pytest.mark.parametrize("distribution", LAWS)
def test_the_distribution_is_standard(distribution):
    s = np.array([-INF, -800.0, -40.0, -1.3, 0.0, 0.7, 40.0, 800.0, INF])
    assert_allclose(
        FORMS[distribution].log_density(s[1:-1]), SCIPY[distribution].logpdf(s[1:-1]), rtol=1e-14
    )
    assert FORMS[distribution].variance == pytest.approx(SCIPY[distribution].var())


@pytest.mark.parametrize(
    ("distribution", "low", "high"),
    [
        ("gaussian", math.nan, 1.0),
        ("gaussian", 0.0, math.nan),
        ("logistic", INF, INF),
        ("logistic", -INF, -INF),
        ("gaussian", INF, 3.0),
        ("gaussian", 3.0, -INF),
    ],
)
def test_what_is_no_range_is_refused(distribution, low, high):
    with pytest.raises(ValueError):
        truncate(distribution, low, high)
