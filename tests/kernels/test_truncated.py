"""Truncated moments against numerical integration, far tails included; the paper's (28) as printed and as corrected."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dpdask.kernels import normal as truncated
from dpdask.kernels.normal import log_density, truncate, variance

LAWS = ["gaussian", "logistic"]
SCIPY = {"gaussian": stats.norm, "logistic": stats.logistic}
INF = math.inf


def cdf(distribution, s):
    """F(s) = Pr(ε <= s)."""
    return SCIPY[distribution].cdf(s)


def partial_mean(distribution, s):
    """G(s) = ∫_{-∞}^s ε dF(ε), which is 0 at ±∞, from the tails of the package; Ding and Ding, supplement S2."""
    form, distance = truncated._form_of(distribution), np.abs(np.asarray(s, dtype=float))
    finite = np.where(np.isinf(distance), 0.0, distance)
    return np.where(
        np.isinf(distance), 0.0, -np.exp(form.reference(finite)) * form.tails(finite)[1]
    )


INTERVALS = [
    (-INF, INF),
    (-INF, 0.0),
    (-INF, 1.7),
    (1.5, INF),
    (-40.0, INF),
    (40.0, INF),
    (-INF, -40.0),
    (40.0, 40.0001),
    (40.0, 40.3),
    (40.0, 41.0),
    (40.0, 60.0),
    (-60.0, -55.0),
    (-1.0, 1.0),
    (-2.0, 2.5),
    (-3.0, 5.0),
    (-1e-9, 1e-9),
    (0.0, 4.0),
    (0.0, 4.5),
    (0.5, 4.4),
    (-0.5, 3.9),
    (12.0, 13.0),
    (12.0, 13.5),
    (-100.0, 0.001),
]


def gaussian(a: float, b: float) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
    """∫ εᵏ dF over (a, b], k = 0, 1, 2, from erfc with so many digits that nothing can cancel."""

    def tail(s: float) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
        if math.isinf(s):
            return (mp.mpf(s < 0), mp.mpf(0), mp.mpf(s < 0))
        upper, density = mp.erfc(mp.mpf(s) / mp.sqrt(2)) / 2, mp.npdf(s)
        return upper, density, s * density + upper

    return tuple(x - y for x, y in zip(tail(a), tail(b), strict=True))


def logistic(a: float, b: float) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
    """The same by quadrature of the density."""

    def density(x: mp.mpf) -> mp.mpf:
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


@pytest.mark.few(12)
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


@settings(max_examples=40)
@given(st.sampled_from(LAWS), st.floats(-50, 50), st.floats(1e-6, 50), st.floats(1e-6, 50))
def test_moments_add_up_and_mirror(distribution, a, w, rest):
    b, c = a + w, a + w + rest
    whole, left, right = (
        truncate(distribution, a, c),
        truncate(distribution, a, b),
        truncate(distribution, b, c),
    )
    assert a <= whole.mean <= c
    assert whole.square - whole.mean**2 >= -1e-12 * max(1, whole.square)
    mirrored = truncate(distribution, -c, -a)
    assert mirrored.mean == -whole.mean
    assert mirrored.square == whole.square
    if a < b < c:  # the whole is the mixture of its parts
        share = math.exp(left.log_probability - whole.log_probability)
        assert share + math.exp(right.log_probability - whole.log_probability) == pytest.approx(
            1, abs=1e-9
        )
        assert share * left.mean + (1 - share) * right.mean == pytest.approx(
            float(whole.mean), rel=1e-8, abs=1e-8
        )


@pytest.mark.parametrize("distribution", LAWS)
def test_points_and_shapes(distribution):
    found = truncate(distribution, [[1.0, -2.0]], [[1.0, -2.0], [3.0, 0.0]])
    assert found.mean.shape == (2, 2)
    np.testing.assert_array_equal(found.mean[0], [1.0, -2.0])
    np.testing.assert_allclose(found.square[0], [1.0, 4.0], rtol=1e-15)
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
    np.testing.assert_allclose(found.mean, far + excess, rtol=1e-9)
    assert np.isfinite(found.log_probability).all()
    narrow = truncate(distribution, far, far * (1 + 1e-12))
    assert ((narrow.mean >= far) & (narrow.mean <= far * (1 + 1e-12))).all()


@pytest.mark.parametrize("distribution", LAWS)
def test_the_distribution_is_standard(distribution):
    s = np.array([-INF, -800.0, -40.0, -1.3, 0.0, 0.7, 40.0, 800.0, INF])
    np.testing.assert_allclose(
        log_density(distribution, s[1:-1]), SCIPY[distribution].logpdf(s[1:-1]), rtol=1e-14
    )
    assert variance(distribution) == pytest.approx(SCIPY[distribution].var())
    integral = [
        integrate.quad(lambda x: x * SCIPY[distribution].pdf(x), -50, end, epsabs=1e-13)[0]
        for end in (-1.3, 0.0, 0.7)
    ]
    np.testing.assert_allclose(partial_mean(distribution, s[3:6]), integral, rtol=1e-10)


def test_the_logistic_partial_mean_is_minus_the_entropy():
    s = np.array([-5.0, -0.1, 0.0, 2.0])
    z = 1 / (1 + np.exp(-s))
    np.testing.assert_allclose(
        partial_mean("logistic", s), z * np.log(z) + (1 - z) * np.log(1 - z), rtol=1e-12
    )


# The erratum of equation (28)


def case_two_mean(distribution, u, v, delta, gamma):
    """E(ε | report of a Case-II mechanism) for anchors u <= v less f̂(x): formula (28), corrected.

    The printed numerator ends in (1-δ-γ){1 - G(v)}. The third range's part is ∫_v^∞ ε dF = G(∞) - G(v), and G(∞) = E ε = 0, so it is -G(v):

        E = {(δ-γ) G(u) + (δ+2γ-1) G(v)} / {(δ-γ) F(u) + (δ+2γ-1) F(v) + (1-δ-γ)}.
    """
    d, g = np.asarray(delta, dtype=float), np.asarray(gamma, dtype=float)
    top = (d - g) * partial_mean(distribution, u) + (d + 2 * g - 1) * partial_mean(distribution, v)
    return top / (
        (d - g) * cdf(distribution, u) + (d + 2 * g - 1) * cdf(distribution, v) + (1 - d - g)
    )


def printed_28(distribution, u, v, delta, gamma):
    """The paper's formula as printed: its numerator ends in (1-δ-γ){1 - G(v)}."""
    G, F, rest = partial_mean, cdf, 1 - delta - gamma
    top = (
        delta * G(distribution, u)
        + gamma * (G(distribution, v) - G(distribution, u))
        + rest * (1 - G(distribution, v))
    )
    return float(
        top
        / (
            delta * F(distribution, u)
            + gamma * (F(distribution, v) - F(distribution, u))
            + rest * (1 - F(distribution, v))
        )
    )


CASES = [(1, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(("delta", "gamma"), CASES)
@pytest.mark.parametrize(("u", "v"), [(-1.2, 0.4), (0.3, 2.0), (-3.0, -1.0), (1.0, 1.5)])
@pytest.mark.parametrize("distribution", LAWS)
def test_erratum_28(distribution, u, v, delta, gamma):
    a, b = {(1, 0): (-60.0, u), (0, 1): (u, v), (0, 0): (v, 60.0)}[delta, gamma]
    density = SCIPY[distribution].pdf
    cuts = [x for x in (-5.0, 0.0, 5.0) if a < x < b]
    first, mass = (
        integrate.quad(
            lambda x, k=k: x**k * density(x), a, b, epsabs=1e-14, epsrel=1e-13, points=cuts or None
        )[0]
        for k in (1, 0)
    )
    integral = first / mass
    assert case_two_mean(distribution, u, v, delta, gamma) == pytest.approx(integral, abs=1e-10)
    assert truncate(
        distribution, *{(1, 0): (-INF, u), (0, 1): (u, v), (0, 0): (v, INF)}[delta, gamma]
    ).mean == pytest.approx(integral, abs=1e-10)
    printed = printed_28(distribution, u, v, delta, gamma)
    if (delta, gamma) == (0, 0):
        # printed: {1 - G(v)} / {1 - F(v)}, too large by 1 / (1 - F(v)), which is more than the noise's whole deviation
        assert printed - integral == pytest.approx(1 / (1 - float(cdf(distribution, v))), abs=1e-9)
        assert printed > integral + 1
    else:
        assert printed == pytest.approx(integral, abs=1e-10)


def test_erratum_28_combined_form_is_the_sum_of_its_parts():
    u, v = np.full(3, -0.7), np.full(3, 1.1)
    found = case_two_mean("logistic", u, v, [1, 0, 0], [0, 1, 0])
    np.testing.assert_allclose(
        found, truncate("logistic", [-INF, -0.7, 1.1], [-0.7, 1.1, INF]).mean, rtol=1e-13
    )


@pytest.mark.parametrize(
    ("distribution", "low", "high"),
    [
        ("cauchy", 0.0, 1.0),
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
