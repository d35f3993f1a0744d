"""The standard bivariate normal: the correlation that gives the probability of an upper orthant.

The tetrachoric correlation of two binary columns is the r at which two normal variables, cut at h and k, are both above
their cuts as often as both columns are one. Everything works with the angle asin(r): there the derivative of the orthant
probability stays bounded, and an r next to ±1 keeps the digits that decide the result.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import scipy  # its modules are imported when they are first used, and `special` is slow to import
from numpy.typing import ArrayLike, NDArray

from dpdask.kernels.jit import jit

AT_BOUND = 1e-15  # a probability this near to a Fréchet bound is that bound: orthants are known no better
_HALF_TURN = math.pi / 2
_SINGULAR = 1.18  # from this |asin r| on (|r| > 0.925) the integrand is nearly singular, and integrated from ±1 instead of 0
_CHUNK = 2**14
_MAX_STEPS = 100  # bisection alone would need 60
_LANDED = 1e-5  # a third-order step this small, in units of the curvature, leaves an error below 1e-15

Floats = NDArray[np.float64]
_NODES_6, _WEIGHTS_6 = np.polynomial.legendre.leggauss(6)
_NODES_12, _WEIGHTS_12 = np.polynomial.legendre.leggauss(12)
_NODES_20, _WEIGHTS_20 = np.polynomial.legendre.leggauss(20)


def normal_quantile(p: ArrayLike) -> Floats:
    """Return the x with Pr(Z <= x) = p of a standard normal Z.

    Parameters
    ----------
    p
        Probabilities in [0, 1].

    Returns
    -------
    float64 array of the same shape; -inf at 0 and +inf at 1.

    Raises
    ------
    ValueError
        If a probability is not in [0, 1].
    """
    probabilities = np.asarray(p, dtype=np.float64)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError("a quantile needs probabilities in [0, 1]")
    return np.asarray(scipy.special.ndtri(probabilities), dtype=np.float64)


def tetrachoric(h: ArrayLike, k: ArrayLike, p: ArrayLike, *, n_threads: int = 1) -> Floats:
    """Return the correlation at which two standard normals have Pr(X > h, Y > k) = p.

    Parameters
    ----------
    h, k
        Cuts. Where one of them is infinite, or so far out that its tail is below 2e-15, every r fits: the result is 0.
    p
        Finite numbers; clipped to the Fréchet bounds [max(0, a + b - 1), min(a, b)] of the tails a = Φ(-h), b = Φ(-k).
    n_threads
        How many threads share the work; the result does not depend on it.

    Returns
    -------
    float64 array of the shape the three broadcast to, in [-1, 1]: exactly -1 or 1 where p is within 1e-15 of a bound.

    Raises
    ------
    ValueError
        If a cut is NaN, a p is not finite, or `n_threads` is below 1.

    Notes
    -----
    The orthant is known to about 1e-16, so r is known to 1e-16 / φ₂(h, k; r). On cuts made non-negative, Halley's method
    runs on the angle asin(r), inside a bracket that bisection shrinks when a step leaves it. It looks for the zero of
    log(L / p) below independence and of log((min(a, b) - L) / (min(a, b) - p)) above it: next to a bound, L falls off like
    a Gaussian tail, which a step in L itself would descend one e-fold at a time. Two or three evaluations are typical.

    References
    ----------
    Pearson, On the correlation of characters not quantitatively measurable (1900); Genz (2004) for the orthant.
    """
    x, y, q = _broadcast(h, k, p)
    if np.isnan(x).any() or np.isnan(y).any() or not np.isfinite(q).all() or n_threads < 1:
        raise ValueError("a tetrachoric correlation needs cuts, finite probabilities and at least one thread")
    x, y, q, out = x.ravel(), y.ravel(), q.ravel(), np.empty(q.size, dtype=np.float64)
    chunks = [slice(start, start + _CHUNK) for start in range(0, out.size, _CHUNK)]
    with ThreadPoolExecutor(n_threads) if len(chunks) > 1 else nullcontext() as pool:  # a thread costs more than a small table
        list((map if pool is None else pool.map)(lambda part: _correlations(x[part], y[part], q[part], out[part]), chunks))
    return out.reshape(np.broadcast_shapes(np.shape(h), np.shape(k), np.shape(p)))


def _broadcast(*arrays: ArrayLike) -> tuple[Floats, ...]:
    return np.broadcast_arrays(*(np.asarray(array, dtype=np.float64) for array in arrays))


@jit
def upper_tail(x: float) -> float:
    """Return Pr(Z > x) of a standard normal Z."""
    return 0.5 * math.erfc(x * math.sqrt(0.5))


@jit
def _reduce(h: float, k: float, angle: float, a: float, b: float) -> float:
    """Return Pr(X > h, Y > k) in [0, min(a, b)] for h, k >= 0 with upper tails a, b, at correlation sin(angle).

    Notes
    -----
    With φ₂ the bivariate density, the probability is ab + ∫₀ʳ φ₂(h, k, t) dt; in t = sin θ the integrand is
    exp(-(h² + k² - 2hk sin θ) / (2 cos² θ)) / 2π, and Gauss's rule of 6, 12 or 20 nodes is exact to rounding. Beyond
    |r| = 0.925 the integral is taken from ±1 instead, over x = (1 - t²)^½, after the first three terms of the smooth
    factor's series, whose integrals are known, are subtracted.

    References
    ----------
    Drezner and Wesolowsky, On the computation of the bivariate normal integral (1990); Genz, Numerical computation of
    rectangular bivariate and trivariate normal and t probabilities (2004).
    """
    if a == 0.0 or b == 0.0:
        return 0.0
    if angle >= _SINGULAR:
        value = min(a, b) - _from_one((h - k) ** 2, h * k, math.cos(angle))
    elif angle <= -_SINGULAR:
        value = _from_one((h + k) ** 2, -h * k, math.cos(angle))
    else:
        value = a * b + _from_zero(h, k, angle)
    return min(max(value, 0.0), min(a, b))


@jit
def _from_zero(h: float, k: float, angle: float) -> float:
    """Return the integral of φ₂ over correlations from 0 to sin(angle)."""
    nodes, weights = _NODES_20, _WEIGHTS_20
    if abs(angle) < 0.305:
        nodes, weights = _NODES_6, _WEIGHTS_6
    elif abs(angle) < 0.85:
        nodes, weights = _NODES_12, _WEIGHTS_12
    square, product, total = (h * h + k * k) / 2.0, h * k, 0.0
    for i in range(len(nodes)):
        t = math.sin(angle * (0.5 + 0.5 * nodes[i]))
        total += weights[i] * math.exp((t * product - square) / (1.0 - t * t))
    return total * angle / (4.0 * math.pi)


@jit
def _from_one(gap: float, product: float, top: float) -> float:
    """Return ∫ exp(-gap / (2x²) - product / (1 + t)) / (2π t) dx over x in [0, top], where t = (1 - x²)^½.

    Notes
    -----
    exp(-product / (1 + t)) / t = exp(-product / 2) (1 + c₁x² + c₂x⁴ + ...), and the moments M_n = ∫ xⁿ exp(-gap / (2x²)) dx
    obey M_n = (top^(n+1) exp(-gap / (2 top²)) - gap M_(n-2)) / (n + 1). What remains is of order x⁶, so Gauss's rule
    meets no edge at 0 however small the gap.
    """
    if top <= 0.0 or gap / (2.0 * top * top) + product / 2.0 > 700.0:
        return 0.0
    c1, c2 = (4.0 - product) / 8.0, (4.0 - product) * (12.0 - product) / 128.0
    edge, scale = math.exp(-gap / (2.0 * top * top)), math.exp(-product / 2.0)
    m0 = top * edge - math.sqrt(2.0 * math.pi * gap) * upper_tail(math.sqrt(gap) / top)
    m2 = (top**3 * edge - gap * m0) / 3.0
    m4 = (top**5 * edge - gap * m2) / 5.0
    total = 0.0
    for i in range(len(_NODES_20)):
        x2 = (top * (0.5 + 0.5 * _NODES_20[i])) ** 2
        t = math.sqrt(1.0 - x2)
        rest = math.exp(-product * x2 / (2.0 * (1.0 + t) ** 2)) / t - (1.0 + x2 * (c1 + c2 * x2))
        total += _WEIGHTS_20[i] * math.exp(-gap / (2.0 * x2)) * rest
    return scale * (m0 + c1 * m2 + c2 * m4 + total * top / 2.0) / (2.0 * math.pi)


@jit
def _correlations(h: Floats, k: Floats, p: Floats, out: Floats) -> None:
    for i in range(len(out)):
        out[i] = _correlation(h[i], k[i], p[i])


@jit
def _correlation(h: float, k: float, p: float) -> float:
    """Return the correlation at which Pr(X > h, Y > k) = p."""
    a, b = upper_tail(abs(h)), upper_tail(abs(k))
    most = min(a, b)
    if most <= 2.0 * AT_BOUND:
        return 0.0
    if h >= 0.0:
        q, sign = (p, 1.0) if k >= 0.0 else (a - p, -1.0)
    else:
        q, sign = (b - p, -1.0) if k >= 0.0 else ((p - 1.0) + (a + b), 1.0)
    if q <= AT_BOUND:
        return -sign
    if q >= most - AT_BOUND:
        return sign
    return sign * math.sin(_angle(abs(h), abs(k), q, a, b))


@jit
def _angle(h: float, k: float, p: float, a: float, b: float) -> float:
    """Return the angle whose sine is the correlation, for h, k >= 0 and 0 < p < min(a, b)."""
    below = p < a * b
    low, high = (-_HALF_TURN, 0.0) if below else (0.0, _HALF_TURN)
    square, product = (h * h + k * k) / 2.0, h * k
    angle, value = 0.0, a * b
    for _ in range(_MAX_STEPS):
        if value < p:
            low = angle
        else:
            high = angle
        t, c = math.sin(angle), math.cos(angle)
        exponent = (square - product * t) / (c * c)
        slope, bend = math.exp(-exponent) / (2.0 * math.pi), (product - 2.0 * t * exponent) / c
        step, scale = _step(value, p, slope, bend, 0.0 if below else min(a, b))
        if abs(step) * scale < _LANDED and low <= angle + step <= high:
            return angle + step
        angle += step
        if not low < angle < high:
            angle = 0.5 * (low + high)
            if high - low < 1e-15:
                return angle
        value = _reduce(h, k, angle, a, b)
    return angle


@jit
def _step(value: float, p: float, slope: float, bend: float, bound: float) -> tuple[float, float]:
    """Return Halley's step of log|value - bound| towards log|p - bound|, and the curvature it is to be measured by.

    `slope` is the derivative of the value and `bend` the logarithmic derivative of the slope. Without a finite step, inf.
    """
    distance = value - bound
    if slope == 0.0 or distance == 0.0:
        return math.inf, 1.0
    rate = slope / distance
    step = math.log((p - bound) / distance) / rate
    curve = 1.0 + 0.5 * step * (bend - rate)
    if curve > 0.25:  # a smaller one says that the step is too long for its expansion
        step /= curve
    return step, 1.0 + abs(bend) + abs(rate)
