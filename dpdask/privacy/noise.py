"""Noise on counts: discrete Laplace and discrete Gaussian, exact in whole numbers, drawn by OpenDP from the system's entropy.

Noise is drawn on the driver, once, after the accountant and the ledger have agreed, and it is saved
before any use. It is never drawn inside a Dask graph: a task may run twice, and two draws are two
releases.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from dpdask.arrays import Floats, Indices, Ints
from dpdask.errors import SpecError
from dpdask.privacy.events import (
    CentralEvent,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    round_up,
)
from dpdask.streams import Rng, words

MAX_COUNT = 2**53
# noise beyond 2**62 then has probability exp(-2**14): a saturated count never happens
MAX_SCALE = 2.0**48
_CHUNK = 2**14
_SUMMED_SIGMA = 1024.0  # up to it, the mass of a discrete Gaussian is summed
_ROUNDING = 1e-9  # relative: above what sums and exponentials in doubles lose
_NORMAL_95 = 1.959963984540054

Counts = Ints


def laplace_scale(sensitivity: int, epsilon: float) -> float:
    """Return sensitivity / epsilon rounded up: the scale at which discrete Laplace noise costs at most `epsilon`, at δ = 0."""
    return round_up(Fraction(sensitivity) / Fraction(epsilon))


def perturb(counts: Counts, event: CentralEvent, *, rng: Rng | None = None) -> Counts:
    """Return counts with the noise of an event, exactly.

    Parameters
    ----------
    counts
        int64 array of any shape: all vectors of the event together.
    event
        The event to draw the noise of, so that the accounted noise is the drawn noise.
    """
    if isinstance(event, DiscreteLaplace):
        return discrete_laplace(counts, event.scale, rng=rng)
    return discrete_gaussian(counts, event.sigma, rng=rng)


def deviation(event: CentralEvent) -> float:
    """Return the standard deviation of an event's noise, in counts."""
    if isinstance(event, DiscreteGaussian):
        return event.sigma
    return math.sqrt(0.5) / math.sinh(0.5 / event.scale)  # √(2α) / (1-α), without cancellation


def margin_95(event: CentralEvent) -> float:
    """Return the least whole number m with Pr(|noise| > m) <= 5 %: what a cell's count may be off, in counts."""
    if isinstance(event, DiscreteGaussian):
        margin = max(0, math.floor(_NORMAL_95 * event.sigma) - 1)
        while 2.0 * bound_tail(event, margin + 1) > 0.05:
            margin += math.ceil(_ROUNDING * event.sigma)
        return float(margin)
    # Pr(|e| >= j) = 2 α^j / (1 + α), α = exp(-1 / scale)
    alpha = math.exp(-1.0 / event.scale)
    return max(0.0, math.ceil(event.scale * math.log(2.0 / (0.05 * (1.0 + alpha)))) - 1.0)


def excess_95(event: CentralEvent, most: int) -> float:
    """Return how many times as wide an event's noise is as the widest of its kind that exceeds so many counts with a probability of at most 5 %."""
    low, high = 1e-3, 2.0 * (most + 1.0)
    while high > (1.0 + 1e-6) * low:
        middle = math.sqrt(low * high)
        if isinstance(event, DiscreteGaussian):
            margin = margin_95(replace(event, sigma=middle))
        else:
            margin = margin_95(replace(event, scale=middle))
        low, high = (low, middle) if margin > most else (middle, high)
    return (event.sigma if isinstance(event, DiscreteGaussian) else event.scale) / low


def discrete_laplace(counts: Counts, scale: float, *, rng: Rng | None = None) -> Counts:
    """Return counts + e with independent e, Pr(e) = tanh(1 / 2·scale) · exp(-|e| / scale).

    Parameters
    ----------
    scale
        The scale in counts, positive, at most 2**48; OpenDP takes the float as the fraction that it
        is.
    rng
        None: secure noise from the operating system, the only kind that protects. A stream:
        INSECURE, because a holder of its key can subtract the noise; only for tests and runs marked
        insecure.

    Privacy
    -------
    Unit, adjacency, sensitivity: the caller's, declared in a `DiscreteLaplace` event. Protected:
    every row counted, with ε = sensitivity / scale.

    References
    ----------
    Ghosh, Roughgarden and Sundararajan, Universally utility-maximizing privacy mechanisms (2012).
    Drawn exactly by the sampler of Canonne, Kamath and Steinke, The discrete Gaussian for
    differential privacy (2020), Algorithm 2.
    """
    _check(counts, scale)
    if rng is not None:
        return counts + _draw_keyed_laplace(rng, counts.size, scale).reshape(counts.shape)
    from opendp import measurements, metrics

    metric = metrics.l1_distance(T="i64")
    return _secure(measurements.make_laplace, metric, scale, counts)


def discrete_gaussian(counts: Counts, sigma: float, *, rng: Rng | None = None) -> Counts:
    """Return counts + e with independent e, Pr(e) ∝ exp(-e² / 2σ²).

    Privacy
    -------
    Unit, adjacency, sensitivity: the caller's, declared in a `DiscreteGaussian` event. Protected:
    every row counted, with the ε that `accountant` finds for a δ; with none at δ = 0.

    References
    ----------
    Canonne, Kamath and Steinke, The discrete Gaussian for differential privacy (2020), Algorithm 3.
    """
    _check(counts, sigma)
    if rng is not None:
        return counts + _draw_keyed_gaussian(rng, counts.size, sigma).reshape(counts.shape)
    from opendp import measurements, metrics

    metric = metrics.l2_distance(T="f64")
    return _secure(measurements.make_gaussian, metric, sigma, counts)


def bound_tail(event: CentralEvent, least: int) -> float:
    """Return an upper bound on Pr(e ≥ least) of one entry of an event's noise, for a whole number above 0.

    Notes
    -----
    Discrete Laplace: exp(-t/b) / (1 + exp(-1/b)). Discrete Gaussian: the mass is summed; for a large
    σ it is at most that of the continuous Gaussian above t - 1/2, since its density is convex there
    (t - 1/2 ≥ σ), and its sum over all whole numbers is at least σ·√(2π).
    """
    if isinstance(event, DiscreteLaplace):
        tail = math.exp(-least / event.scale) / (1.0 + math.exp(-1.0 / event.scale))
    elif event.sigma > _SUMMED_SIGMA:
        place = (least - 0.5) / event.sigma
        tail = 0.5 * math.erfc(place / math.sqrt(2.0)) if place >= 1.0 else 1.0
    else:
        twice = 2.0 * event.sigma**2
        numbers = np.arange(math.ceil(12.0 * event.sigma) + 40, dtype=np.float64)
        # relative to the first term, which alone may be tiny
        above = np.exp(-(numbers * (numbers + 2.0 * least)) / twice).sum()
        whole = 2.0 * np.exp(-(numbers**2) / twice).sum() - 1.0
        tail = math.exp(-(float(least) ** 2) / twice) * float(above / whole)
    return min(1.0, math.nextafter(tail * (1.0 + _ROUNDING), math.inf))


def find_threshold(selection: KeySelection) -> int:
    """Return the least noisy sum at which a key is listed: a unit with as many keys as are allowed has each key that is its alone listed with probability q* at most.

    Notes
    -----
    w + min {t: Pr(e ≥ t) ≤ q*}, 1 - (1 - q*)^m = δ₀, w the least weight. The threshold is that of
    the discrete noise: formulas of continuous noise let a key of one unit through up to 8.6 times
    too often.
    """
    return (selection.weight or 1) + _find_excess(selection, selection.keys)


def _find_excess(selection: KeySelection, keys: int) -> int:
    """Return the least number that the noise of one of so many keys reaches with probability q* at most."""
    most = -math.expm1(math.log1p(-selection.delta) / keys) * (1.0 - _ROUNDING)
    if not most > 0.0:
        raise SpecError("is too small for a threshold", "`delta`", "set it to 1e-9 or so")
    low, high = 0, 1
    while bound_tail(selection.noise, high) > most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if bound_tail(selection.noise, middle) > most:
            low = middle
        else:
            high = middle
    return high


def weigh_keys(selection: KeySelection, most: int) -> Ints:
    """Return what a unit weighs in each of its keys, by how many keys it has: int64 array of shape (most + 1,), not increasing from 1 on.

    Notes
    -----
    A unit with t keys weighs as much as the sensitivity allows, w √(m/t) for Gaussian noise and
    w m/t for Laplace noise, but no more than lets its own keys through with probability q*(t) at
    most. With m keys it weighs w. So no key is listed less often than if every unit weighed w,
    under the same noise and the same threshold (Gopi et al., Differentially private set union,
    2020, have such weights in a sequential form).
    """
    numbers, keys = np.arange(1, most + 1), selection.keys
    if (least := selection.weight) is None:
        return np.append(0, np.ones_like(numbers))
    if isinstance(selection.noise, DiscreteGaussian):
        found = [math.isqrt(keys * least**2 // t) for t in range(1, most + 1)]
    else:
        found = [keys * least // t for t in range(1, most + 1)]
    # the noise of a few numbers of keys stands for those below them too, where q* is larger
    powers = range(math.ceil(math.log(keys, 1.1)) + 1)
    points = sorted({min(keys, math.ceil(1.1**power)) for power in powers} | {keys})
    excess = np.array([_find_excess(selection, point) for point in points])
    own = excess[np.searchsorted(points, numbers)]
    return np.append(0, np.minimum(found, find_threshold(selection) - own))


def select_keys(
    counts: Counts, selection: KeySelection, *, rng: Rng | None = None
) -> tuple[Indices, Counts]:
    """Return the places of the keys that are listed, and their noisy sums.

    Parameters
    ----------
    counts
        int64 array of shape (n,): of each key that occurs, what its units weigh (`weigh_keys`), at
        least 1.

    Privacy
    -------
    Unit, adjacency, sensitivity: those of the selection's noise, where a unit has at most
    `selection.keys` keys. Protected: every unit counted. A key that does not occur must not be
    among the counts.
    """
    if counts.size and counts.min() < 1:
        raise SpecError("a key that no unit has cannot be listed", "noise", "leave it out")
    noisy = perturb(counts, selection.noise, rng=rng)
    places = np.flatnonzero(noisy >= find_threshold(selection))
    return places, noisy[places]


def check_scale(scale: float) -> None:
    """Check that noise of a scale can be drawn."""
    if not 0 < scale <= MAX_SCALE:  # also refuses NaN
        raise SpecError(
            "the noise's scale must be positive and at most 2**48",
            "noise",
            "raise `epsilon`, or a weight",
        )


def _check(counts: Counts, scale: float) -> None:
    if counts.dtype != np.int64:
        raise SpecError("noise is added to counts of type int64", "noise", "count in whole numbers")
    check_scale(scale)
    if counts.size and (counts.min() < -MAX_COUNT or counts.max() > MAX_COUNT):
        raise SpecError(
            "a count is beyond ±2**53", "noise", "no table has so many rows: count in whole rows"
        )


def _secure(make: Callable[..., Any], metric: Any, scale: float, counts: Counts) -> Counts:
    """Return OpenDP's measurement of the counts, in chunks that run side by side: it draws without Python's lock."""
    from opendp import domains, mod  # imported by the driver, when it draws

    mod.enable_features("contrib")
    whole_numbers = domains.vector_domain(domains.atom_domain(T="i64"))
    measurement = make(whole_numbers, metric, scale=float(scale))
    flat = counts.ravel()
    chunks = [flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK)]
    if not chunks:
        return counts.copy()
    with ThreadPoolExecutor(max_workers=min(len(chunks), os.cpu_count() or 1)) as pool:
        drawn = list(pool.map(lambda chunk: np.array(measurement(chunk), dtype=np.int64), chunks))
    return np.concatenate(drawn).reshape(counts.shape)


def _uniforms(rng: Rng, n: int) -> Floats:
    """Return n uniform numbers in (0, 1], from one raw word each."""
    return ((words(rng, n) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def _draw_keyed_laplace(rng: Rng, n: int, scale: float) -> Counts:
    """Return the difference of two geometric draws, which is discrete Laplace up to the rounding of a logarithm. Insecure."""
    first, second = (np.floor(-scale * np.log(_uniforms(rng, n))) for _ in range(2))
    return (first - second).astype(np.int64)


def _draw_keyed_gaussian(rng: Rng, n: int, sigma: float) -> Counts:
    """Return discrete Gaussian draws by rejection from discrete Laplace ones (Canonne, Kamath and Steinke, Algorithm 3). Insecure."""
    scale = math.floor(sigma) + 1.0
    accepted = np.empty(0, dtype=np.int64)
    while len(accepted) < n:
        proposed = _draw_keyed_laplace(rng, 2 * (n - len(accepted)) + 64, scale)
        exponent = -((np.abs(proposed) - sigma * (sigma / scale)) ** 2) / (2.0 * sigma * sigma)
        accepted = np.concatenate(
            [accepted, proposed[_uniforms(rng, len(proposed)) <= np.exp(exponent)]]
        )
    return accepted[:n]
