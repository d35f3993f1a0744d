"""The standard bivariate normal: the correlation that gives the probability of an upper orthant.

The tetrachoric correlation of two binary columns is the r at which two normal variables, cut at h
and k, are both above their cuts as often as both columns are one. Everything works with the angle
asin(r): there the derivative of the orthant probability stays bounded, and an r next to ±1 keeps
the digits that decide the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Literal, NamedTuple

import numpy as np
import scipy  # its modules are imported when they are first used, and `special` is slow to import
from numpy.typing import ArrayLike

from dpdask.arrays import Floats, freeze_class
from dpdask.kernels.jit import jit

AT_BOUND = (
    1e-15  # a probability this near to a Fréchet bound is that bound: orthants are known no better
)
_HALF_TURN = math.pi / 2
_SINGULAR = 1.18  # from this |asin r| on (|r| > 0.925) the integrand is nearly singular, and integrated from ±1 instead of 0
_CHUNK = 2**14
_MAX_STEPS = 100  # bisection alone would need 60
_LANDED = (
    1e-5  # a third-order step this small, in units of the curvature, leaves an error below 1e-15
)

_NODES_6, _WEIGHTS_6 = np.polynomial.legendre.leggauss(6)
_NODES_12, _WEIGHTS_12 = np.polynomial.legendre.leggauss(12)
_NODES_20, _WEIGHTS_20 = np.polynomial.legendre.leggauss(20)


def tetrachoric(h: ArrayLike, k: ArrayLike, p: ArrayLike, *, n_threads: int = 1) -> Floats:
    """Return the correlation at which two standard normals have Pr(X > h, Y > k) = p.

    Parameters
    ----------
    h, k
        Cuts. Where one of them is infinite, or so far out that its tail is below 2e-15, every r
        fits: the result is 0.
    p
        Finite numbers; clipped to the Fréchet bounds [max(0, a + b - 1), min(a, b)] of the tails a
        = Φ(-h), b = Φ(-k).
    n_threads
        How many threads share the work; the result does not depend on it.

    Notes
    -----
    The orthant is known to about 1e-16, so r is known to 1e-16 / φ₂(h, k; r). On cuts made
    non-negative, Halley's method runs on the angle asin(r), inside a bracket that bisection shrinks
    when a step leaves it. It looks for the zero of log(L / p) below independence and of log((min(a,
    b) - L) / (min(a, b) - p)) above it: next to a bound, L falls off like a Gaussian tail, which a
    step in L itself would descend one e-fold at a time. Two or three evaluations are typical.

    References
    ----------
    Pearson, On the correlation of characters not quantitatively measurable (1900); Genz (2004) for
    the orthant.
    """
    arrays = (np.asarray(each, dtype=np.float64) for each in (h, k, p))
    x, y, q = np.broadcast_arrays(*arrays)
    shape, out = q.shape, np.empty(q.size)
    x, y, q = x.ravel(), y.ravel(), q.ravel()
    chunks = [slice(start, start + _CHUNK) for start in range(0, out.size, _CHUNK)]
    # a thread costs more than a small table
    with ThreadPoolExecutor(n_threads) if len(chunks) > 1 else nullcontext() as pool:
        list(
            (map if pool is None else pool.map)(
                lambda part: _correlations(x[part], y[part], q[part], out[part]), chunks
            )
        )
    return out.reshape(shape)


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
    Drezner and Wesolowsky, On the computation of the bivariate normal integral (1990); Genz,
    Numerical computation of rectangular bivariate and trivariate normal and t probabilities (2004).
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
    exp(-product / (1 + t)) / t = exp(-product / 2) (1 + c₁x² + c₂x⁴ + ...), and the moments M_n = ∫
    xⁿ exp(-gap / (2x²)) dx obey M_n = (top^(n+1) exp(-gap / (2 top²)) - gap M_(n-2)) / (n + 1).
    What remains is of order x⁶, so Gauss's rule meets no edge at 0 however small the gap.
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

    `slope` is the derivative of the value and `bend` the logarithmic derivative of the slope.
    Without a finite step, inf.
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


NoiseFamily = Literal["gaussian", "logistic"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
# up to this width and this fall of the log density, 20 nodes are exact to rounding
_NARROW, _DROP = (4.0, 16.0)
_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
# of -Li₂(-y)/y; at y <= 1/5 what is cut is below 1e-19
_SERIES = np.array([(-1.0) ** k / (k + 1) ** 2 for k in range(24)])


class Truncated(NamedTuple):
    """The probability and the moments of ε in a range."""

    log_probability: Floats  # log Pr(range), float64 array, <= 0; of a point, -inf
    mean: Floats
    square: Floats


def truncate(distribution: NoiseFamily, lower: ArrayLike, upper: ArrayLike) -> Truncated:
    """Return log Pr(range), E(ε | range) and E(ε² | range) of a standard noise ε.

    Parameters
    ----------
    distribution
        "gaussian": N(0, 1). "logistic": F(s) = 1/(1 + e⁻ˢ), of variance π²/3. A noise of scale c
        has ranges divided by c, means multiplied by c and squares by c².
    lower, upper
        Ranges, broadcast together. lower < upper: the interval (lower, upper], ends ±inf allowed.
        lower == upper, finite: that point. lower > upper, finite: the ring (-inf, upper] ∪ (lower,
        inf).

    Notes
    -----
    A range is reflected so that its far end is the upper one. Narrow ranges are integrated by
    Gauss's rule, the density divided by its largest value. Wide ones are differences of tail
    moments ∫_s^∞ εᵏ dF, k = 0, 1, 2, divided by the density's order of magnitude at s, in which
    nothing cancels. For the normal these are R(s), 1 and s + R(s) times φ(s), R Mills's ratio (by
    erfcx); for the logistic distribution, with y = e⁻ˢ, F(s), sF(s) + log(1+y)/y and s²F(s) + 2s
    log(1+y)/y - 2 Li₂(-y)/y times y. Parts of a ring are weighed by their log probabilities.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection, Remark 5
    and supplement S2, whose equation (28) has a constant too many (docs/explanation/math.md,
    Departures from the papers).
    """
    form = FORMS[distribution]
    low, high = (np.array(end, dtype=np.float64) for end in np.broadcast_arrays(lower, upper))
    if np.isnan(low).any() or np.isnan(high).any():
        raise ValueError("an end of a range is NaN")
    if (low == math.inf).any() or (high == -math.inf).any():
        raise ValueError("a range is empty: its lower end is inf or its upper end is -inf")
    shape, low, high = low.shape, low.ravel(), high.ravel()
    ring = low > high
    first = _intervals(form, np.where(ring, -math.inf, low), high)
    if ring.any():
        # two disjoint intervals of positive probability
        left = Truncated(*(part[ring] for part in first))
        right = _intervals(form, low[ring], np.full(int(ring.sum()), math.inf))
        total = np.logaddexp(left.log_probability, right.log_probability)
        share, rest = (np.exp(side.log_probability - total) for side in (left, right))
        first.log_probability[ring] = np.minimum(total, 0.0)
        first.mean[ring] = share * left.mean + rest * right.mean
        first.square[ring] = share * left.square + rest * right.square
    return Truncated(*(part.reshape(shape) for part in first))


@freeze_class
class Form:
    """A standard symmetric distribution.

    `reference(s)`, s >= 0, is the log of an order of magnitude of its density; `fall(s, t)` is
    reference(s) - reference(t) without cancellation; `tails(s)` are ∫_s^∞ εᵏ dF ·
    exp(-reference(s)), k = 0, 1, 2. `ratio(start, step)` is the log density at start + step less
    that at start >= 0.
    """

    variance: float
    log_density: Callable[[Floats], Floats]
    reference: Callable[[Floats], Floats]
    fall: Callable[[Floats, Floats], Floats]
    ratio: Callable[[Floats, Floats], Floats]
    tails: Callable[[Floats], tuple[Floats, Floats, Floats]]


def _gaussian_log_density(x: Floats) -> Floats:
    return -0.5 * x * x - _LOG_ROOT_2PI


def _gaussian_tails(s: Floats) -> tuple[Floats, Floats, Floats]:
    mills = math.sqrt(math.pi / 2) * scipy.special.erfcx(s / math.sqrt(2))
    return mills, np.ones_like(s), s + mills


def _logistic_log_density(x: Floats) -> Floats:
    distance = np.abs(x)
    return np.asarray(-distance - 2 * np.log1p(np.exp(-distance)), dtype=np.float64)


def _logistic_ratio(start: Floats, step: Floats) -> Floats:
    return np.asarray(
        -step - 2 * (np.log1p(np.exp(-(start + step))) - np.log1p(np.exp(-start))), dtype=np.float64
    )


def _logistic_tails(s: Floats) -> tuple[Floats, Floats, Floats]:
    y = np.exp(-s)
    safe = np.where(y > 0, y, 1.0)
    once = np.where(y > 0, np.log1p(safe) / safe, 1.0)  # ∫_s^∞ (1 - F)
    # spence knows its argument 1 + y only to 1e-16, which is nothing of a small y
    twice = np.where(
        y > 0.2,
        -scipy.special.spence(1 + y) / safe,
        np.polynomial.polynomial.polyval(np.minimum(y, 0.2), _SERIES),
    )
    share = 1 / (1 + y)
    return share, s * share + once, s * s * share + 2 * s * once + 2 * twice


FORMS = {
    "gaussian": Form(
        variance=1.0,
        log_density=_gaussian_log_density,
        reference=_gaussian_log_density,
        fall=lambda s, t: (t - s) * (t + s) / 2,
        ratio=lambda start, step: -step * (start + step / 2),
        tails=_gaussian_tails,
    ),
    "logistic": Form(
        variance=math.pi**2 / 3,
        log_density=_logistic_log_density,
        reference=lambda s: -s,
        fall=lambda s, t: t - s,
        ratio=_logistic_ratio,
        tails=_logistic_tails,
    ),
}


def _intervals(form: Form, low: Floats, high: Floats) -> Truncated:
    """Return the moments on intervals low <= high, arrays of shape (n,)."""
    flip = low < -high
    a, b = np.where(flip, -high, low), np.where(flip, -low, high)
    # right for the whole line
    result = Truncated(np.zeros(len(a)), np.zeros(len(a)), np.full(len(a), form.variance))
    with np.errstate(over="ignore"):
        narrow = (b - a <= _NARROW) & (form.fall(np.maximum(a, 0.0), b) <= _DROP)
    wide = ~narrow & np.isfinite(a)
    for rows, method in ((narrow, _narrow), (wide & (a >= 0), _in_tail), (wide & (a < 0), _across)):
        if rows.any():
            with np.errstate(over="ignore", under="ignore"):
                found = method(form, a[rows], b[rows])
            for whole, part in zip(result, found, strict=True):
                whole[rows] = part
    np.clip(result.mean, a, b, out=result.mean)
    np.copyto(result.mean, -result.mean, where=flip)
    np.minimum(result.log_probability, 0.0, out=result.log_probability)
    return result


def _narrow(form: Form, a: Floats, b: Floats) -> Truncated:
    """Return the moments by Gauss's rule; the density is taken relative to its largest value, at max(a, 0)."""
    half, start = (b - a) / 2, np.maximum(a, 0.0)
    mass, first, second = (np.zeros(len(a)) for _ in range(3))
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        step = half * (1 + node)  # exact however far a is
        x = a + step
        share = weight * np.exp(form.ratio(start, step - (start - a)))
        mass += share
        first += share * step
        second += share * x * x
    with np.errstate(divide="ignore"):
        log_probability = np.log(half * mass) + form.log_density(start)
    return Truncated(log_probability, a + first / mass, second / mass)


def _far_tails(form: Form, b: Floats, scale: Floats) -> tuple[Floats, ...]:
    """Return `scale` times the tail moments at b; at b = inf, where scale is 0, they are 0 too."""
    finite = np.where(np.isinf(b), 0.0, b)
    return tuple(np.where(scale > 0, scale * part, 0.0) for part in form.tails(finite))


def _in_tail(form: Form, a: Floats, b: Floats) -> Truncated:
    """Return the moments on wide intervals with 0 <= a, divided by the density's magnitude at a."""
    far = _far_tails(form, b, np.exp(-form.fall(a, b)))
    mass, first, second = (near - part for near, part in zip(form.tails(a), far, strict=True))
    return Truncated(np.log(mass) + form.reference(a), first / mass, second / mass)


def _across(form: Form, a: Floats, b: Floats) -> Truncated:
    """Return the moments on wide intervals with a < 0 and -a <= b: the whole line less two tails."""
    near = _far_tails(form, -a, np.exp(form.reference(-a)))
    far = _far_tails(form, b, np.exp(form.reference(b)))
    outside = near[0] + far[0]
    inside = 1 - outside
    return Truncated(
        np.log1p(-outside), (near[1] - far[1]) / inside, (form.variance - near[2] - far[2]) / inside
    )
