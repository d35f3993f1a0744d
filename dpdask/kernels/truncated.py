"""Moments of a noise ε in a range: its probability, E(ε | range) and E(ε² | range), for Gaussian and logistic noise.

Ranges far in a tail are the common case, not the exception: a first guess of a regression may lie 40 standard deviations
from the report. Nothing here forms a difference of two distribution functions that are both near 0 or near 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import scipy  # its modules are imported when they are first used, and `special` is slow to import
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NoiseFamily = Literal["gaussian", "logistic"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_NARROW, _DROP = 4.0, 16.0  # up to this width and this fall of the log density, 20 nodes are exact to rounding
_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
_SERIES = np.array([(-1.0) ** k / (k + 1) ** 2 for k in range(24)])  # of -Li₂(-y)/y; at y <= 1/5 what is cut is below 1e-19


class Truncated(NamedTuple):
    """The probability and the moments of ε in a range.

    Attributes
    ----------
    log_probability
        log Pr(range), float64 array, <= 0; of a point, -inf.
    mean
        E(ε | range).
    square
        E(ε² | range).
    """

    log_probability: Floats
    mean: Floats
    square: Floats


def truncate(distribution: NoiseFamily, lower: ArrayLike, upper: ArrayLike) -> Truncated:
    """Return log Pr(range), E(ε | range) and E(ε² | range) of a standard noise ε.

    Parameters
    ----------
    distribution
        "gaussian": N(0, 1). "logistic": F(s) = 1/(1 + e⁻ˢ), of variance π²/3. A noise of scale c has ranges divided by c,
        means multiplied by c and squares by c².
    lower, upper
        Ranges, broadcast together. lower < upper: the interval (lower, upper], ends ±inf allowed. lower == upper, finite:
        that point. lower > upper, finite: the ring (-inf, upper] ∪ (lower, inf).

    Returns
    -------
    Truncated, float64 arrays of the shape the two broadcast to; relative errors of mean (against the range's nearest
    point to 0, or 1) and square below 1e-12.

    Raises
    ------
    ValueError
        If the distribution is unknown, an end is NaN, or a range is empty or a ring with an infinite end.

    Notes
    -----
    A range is reflected so that its far end is the upper one. Narrow ranges are integrated by Gauss's rule, the density
    divided by its largest value. Wide ones are differences of tail moments ∫_s^∞ εᵏ dF, k = 0, 1, 2, divided by the
    density's order of magnitude at s, in which nothing cancels. For the normal these are R(s), 1 and s + R(s) times φ(s),
    R Mills's ratio (by erfcx); for the logistic distribution, with y = e⁻ˢ, F(s), sF(s) + log(1+y)/y and
    s²F(s) + 2s log(1+y)/y - 2 Li₂(-y)/y times y. Parts of a ring are weighed by their log probabilities.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection, Remark 5 and supplement S2, whose equation
    (28) has a constant too many (docs/explanation/math.md, Departures from the papers).
    """
    form = _form_of(distribution)
    low, high = (np.array(end, dtype=np.float64) for end in np.broadcast_arrays(lower, upper))
    _check(low, high)
    shape, low, high = low.shape, low.ravel(), high.ravel()
    ring = low > high
    first = _intervals(form, np.where(ring, -math.inf, low), high)
    if ring.any():
        left, right = (part[ring] for part in first), _intervals(form, low[ring], np.full(int(ring.sum()), math.inf))
        for whole, part in zip(first, _union(Truncated(*left), right), strict=True):
            whole[ring] = part
    return Truncated(*(part.reshape(shape) for part in first))


def log_density(distribution: NoiseFamily, values: ArrayLike) -> Floats:
    """Return log of the standard density at `values`, float64 array of the same shape.

    Parameters
    ----------
    distribution
        See `truncate`.
    values
        Where to evaluate it.
    """
    return _form_of(distribution).log_density(np.asarray(values, dtype=np.float64))


def variance(distribution: NoiseFamily) -> float:
    """Return the variance of the standard noise: 1, or π²/3."""
    return _form_of(distribution).variance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A standard symmetric distribution.

    `reference(s)`, s >= 0, is the log of an order of magnitude of its density; `fall(s, t)` is reference(s) - reference(t)
    without cancellation; `tails(s)` are ∫_s^∞ εᵏ dF · exp(-reference(s)), k = 0, 1, 2. `ratio(start, step)` is the log
    density at start + step less that at start >= 0.
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
    return np.asarray(-step - 2 * (np.log1p(np.exp(-(start + step))) - np.log1p(np.exp(-start))), dtype=np.float64)


def _logistic_tails(s: Floats) -> tuple[Floats, Floats, Floats]:
    y = np.exp(-s)
    safe = np.where(y > 0, y, 1.0)
    once = np.where(y > 0, np.log1p(safe) / safe, 1.0)  # ∫_s^∞ (1 - F)
    # spence knows its argument 1 + y only to 1e-16, which is nothing of a small y
    twice = np.where(y > 0.2, -scipy.special.spence(1 + y) / safe, np.polynomial.polynomial.polyval(np.minimum(y, 0.2), _SERIES))
    share = 1 / (1 + y)
    return share, s * share + once, s * s * share + 2 * s * once + 2 * twice


_FORMS = {
    "gaussian": _Form(
        variance=1.0,
        log_density=_gaussian_log_density,
        reference=_gaussian_log_density,
        fall=lambda s, t: (t - s) * (t + s) / 2,
        ratio=lambda start, step: -step * (start + step / 2),
        tails=_gaussian_tails,
    ),
    "logistic": _Form(
        variance=math.pi**2 / 3,
        log_density=_logistic_log_density,
        reference=lambda s: -s,
        fall=lambda s, t: t - s,
        ratio=_logistic_ratio,
        tails=_logistic_tails,
    ),
}


def _form_of(distribution: str) -> _Form:
    if distribution not in _FORMS:
        raise ValueError(f"noise must be one of {', '.join(_FORMS)}")
    return _FORMS[distribution]


def _check(low: Floats, high: Floats) -> None:
    if np.isnan(low).any() or np.isnan(high).any():
        raise ValueError("an end of a range is NaN")
    if (low == math.inf).any() or (high == -math.inf).any():
        raise ValueError("a range is empty: its lower end is inf or its upper end is -inf")


def _intervals(form: _Form, low: Floats, high: Floats) -> Truncated:
    """Return the moments on intervals low <= high, arrays of shape (n,)."""
    flip = low < -high
    a, b = np.where(flip, -high, low), np.where(flip, -low, high)
    result = Truncated(np.zeros(len(a)), np.zeros(len(a)), np.full(len(a), form.variance))  # right for the whole line
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


def _narrow(form: _Form, a: Floats, b: Floats) -> Truncated:
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


def _far_tails(form: _Form, b: Floats, scale: Floats) -> tuple[Floats, ...]:
    """Return `scale` times the tail moments at b; at b = inf, where scale is 0, they are 0 too."""
    finite = np.where(np.isinf(b), 0.0, b)
    return tuple(np.where(scale > 0, scale * part, 0.0) for part in form.tails(finite))


def _in_tail(form: _Form, a: Floats, b: Floats) -> Truncated:
    """Return the moments on wide intervals with 0 <= a, divided by the density's magnitude at a."""
    far = _far_tails(form, b, np.exp(-form.fall(a, b)))
    mass, first, second = (near - part for near, part in zip(form.tails(a), far, strict=True))
    return Truncated(np.log(mass) + form.reference(a), first / mass, second / mass)


def _across(form: _Form, a: Floats, b: Floats) -> Truncated:
    """Return the moments on wide intervals with a < 0 and -a <= b: the whole line less two tails."""
    near = _far_tails(form, -a, np.exp(form.reference(-a)))
    far = _far_tails(form, b, np.exp(form.reference(b)))
    outside = near[0] + far[0]
    inside = 1 - outside
    return Truncated(np.log1p(-outside), (near[1] - far[1]) / inside, (form.variance - near[2] - far[2]) / inside)


def _union(left: Truncated, right: Truncated) -> Truncated:
    """Return the moments on the union of two disjoint ranges of positive probability."""
    total = np.logaddexp(left.log_probability, right.log_probability)
    share = np.exp(left.log_probability - total)
    rest = np.exp(right.log_probability - total)
    return Truncated(np.minimum(total, 0.0), *(share * x + rest * y for x, y in ((left.mean, right.mean), (left.square, right.square))))
