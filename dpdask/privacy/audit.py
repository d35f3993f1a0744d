"""Audits of a claimed ε: exact ε* of row-level channels, and statistical lower bounds for central noise.

A lower bound above the claim proves, up to the stated confidence, that the promise is broken. One
below it proves nothing: it is an alarm, not a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.arrays import Floats, Ints, Words
from dpdask.errors import SpecError
from dpdask.kernels.channel import TOTAL_BITS, exact_epsilon
from dpdask.kernels.rank import RankNoise
from dpdask.privacy.events import CentralEvent, DiscreteGaussian, epsilon
from dpdask.privacy.noise import perturb

# noise values; below, the rank mechanism's ε* is found by looking at every outcome
MAX_ENUMERATED = 2**22
_N_THRESHOLDS = 256
_DIGITS = 1e-9  # relative: what 53 bits of a probability can change in an ε
_SLACK = 1e-12  # of logarithms of whole numbers below 2**63, summed over at most 8 digits

Counts = Ints
Measure = Callable[[Counts], Counts]


class NoiseAudit(NamedTuple):
    """The claimed ε of many runs on two neighbouring inputs, and a bound that the true ε is not below."""

    claimed: float
    lower_bound: float


def channel_epsilon(weights: Words) -> float:
    """Return ε* of a channel's whole-number weights, the least float that is not below it; infinite if an output excludes an input."""
    exact = exact_epsilon(weights)
    rounded = float(exact)
    return rounded if Decimal(rounded) >= exact else math.nextafter(rounded, math.inf)


def read_weights(channel: object) -> Words:
    """Return the whole-number weights of a channel printed as probabilities, as in a release card."""
    weights: Words = (np.array(channel) * 2.0**TOTAL_BITS).astype(np.uint64)
    return weights


def within_digits(epsilon: float, claimed: float) -> float:
    """Return ε*, or the claim if ε* exceeds it only because printed weights have 53 bits and drawn ones 63."""
    return min(epsilon, claimed) if epsilon <= claimed * (1.0 + _DIGITS) else epsilon


def rank_epsilon(noise: RankNoise) -> float:
    """Return ε* of the rank mechanism from the tables that it draws from, whatever epsilon it claims.

    Notes
    -----
    Every outcome w is looked at: inside, ranks i give it the noise value w - i, so its cost is the
    range of the noise's log probabilities over a window of B values; a clamped outcome sums a tail.
    Probabilities of single values are products of digit weights, tails are sums of positive
    products: each is accurate relative to itself. Rounded up. Where there are too many values to
    look at (ε below about 0.12), the mechanism's own bound is returned.
    """
    n_values = noise.margin + noise.n_cells
    if n_values > MAX_ENUMERATED:
        return noise.epsilon
    values = np.arange(n_values, dtype=np.int64)
    single, tail = _digit_distributions(noise, values)
    up, down = math.log(noise.sign), math.log(2**TOTAL_BITS - noise.sign)
    with np.errstate(divide="ignore"):
        # e = -(n-2) .. n-2
        log_single = np.concatenate([(np.log(single[:-2]) + down)[::-1], np.log(single[:-1]) + up])
        log_tails = np.log(tail[[noise.margin - 1, n_values - 2, noise.margin, n_values - 1]])
    if not np.isfinite(log_single).all() or not np.isfinite(log_tails).all():
        return math.inf
    from scipy import ndimage

    window = {"size": noise.n_cells, "origin": 0, "mode": "nearest"}
    ranges = ndimage.maximum_filter1d(log_single, **window) - ndimage.minimum_filter1d(
        log_single, **window
    )
    half = noise.n_cells // 2
    inside = ranges[half : len(ranges) - (noise.n_cells - 1 - half)]
    worst = max(
        float(inside.max()), float(log_tails[0] - log_tails[1]), float(log_tails[2] - log_tails[3])
    )
    return worst * (1.0 + _SLACK) + _SLACK


def _digit_distributions(noise: RankNoise, values: Counts) -> tuple[Floats, Floats]:
    """Return Pr(m = v) and Pr(m >= v) of the noise's magnitude, both over one constant."""
    single, tail = np.ones(len(values)), np.ones(len(values))
    for row in noise.weights.astype(np.float64) / 2.0**TOTAL_BITS:
        digits = values & 255
        above = np.append(np.cumsum(row[::-1])[::-1][1:], 0.0)
        single *= row[digits]
        tail = above[digits] + row[digits] * tail
        values = values >> 8
    return single, tail


def audit_event(
    event: CentralEvent,
    *,
    delta: float = 0.0,
    n_runs: int = 20_000,
    confidence: float = 0.999,
    measure: Measure | None = None,
    rng: Generator | None = None,
) -> NoiseAudit:
    """Return the claimed cost of an event beside a lower bound from runs on its worst neighbours.

    Parameters
    ----------
    measure
        The measurement to audit, applied to an int64 array of shape (n_runs, n_counts), each row on
        its own; by default the noise that dpdask draws for the event.

    Notes
    -----
    Neighbours that use up the sensitivity: under replace-one half of it leaves one count and enters
    another, under add-remove all of it leaves one count; a Gaussian's L2 sensitivity is rounded
    down to whole counts. The event's vectors are all measured in one run.
    """
    claimed = epsilon(event, delta)
    if not math.isfinite(claimed):
        raise SpecError("the event claims no finite epsilon", "audit", "give a delta above 0")
    moved = event.sensitivity if event.adjacency == "add-remove" else event.sensitivity / 2
    if isinstance(event, DiscreteGaussian) and event.adjacency == "replace-one":
        moved = event.sensitivity / math.sqrt(2)
    whole = math.floor(moved * (1.0 + 1e-9))
    # replace-one, sensitivity 1: one count of a pair, the other one is an event of its own
    if whole == 0:
        pair = np.array([1]), np.array([0])
    else:
        pair = (
            (np.array([whole, 0]), np.array([0, whole]))
            if event.adjacency == "replace-one"
            else (np.array([whole]), np.array([0]))
        )
    left, right = (np.tile(counts.astype(np.int64), event.count) for counts in pair)
    runs = measure if measure is not None else lambda counts: perturb(counts, event, rng=rng)
    bound = lower_bound(runs, left, right, delta=delta, n_runs=n_runs, confidence=confidence)
    return NoiseAudit(claimed, bound)


def lower_bound(
    measure: Measure, left: Counts, right: Counts, *, delta: float, n_runs: int, confidence: float
) -> float:
    """Return a statistical lower bound on the ε of a measurement.

    Parameters
    ----------
    measure
        Takes an int64 array of shape (n_runs, n_counts) and measures each row on its own, with
        fresh noise.
    n_runs
        On each input, at least 200; half of them choose the event, the other half judge it.

    Notes
    -----
    For any event E, ε ≥ log((Pr_left(E) - δ) / Pr_right(E)). Events are half-lines of two scores,
    the sum of the counts' changes (best for Gaussian noise) and the least of them (for Laplace
    noise on several counts), in both directions. As the judging runs are fresh, one pair of
    Clopper-Pearson bounds, each at half of 1 - confidence, is enough.

    References
    ----------
    Ding, Wang, Wang, Zhang and Kifer, Detecting violations of differential privacy (2018); Clopper
    and Pearson (1934).
    """
    if n_runs < 200 or not 0 < confidence < 1:
        raise SpecError(
            "an audit needs at least 200 runs, and a confidence between 0 and 1", "audit"
        )
    alpha = (1.0 - confidence) / 2.0
    half = n_runs // 2
    signs = np.sign(left - right)[left != right]
    scores = []
    for counts in (left, right):
        moved = (measure(np.tile(counts, (2 * half, 1))) - right)[:, left != right] * signs
        scores.append(
            np.stack([moved.sum(axis=1), moved.min(axis=1), -moved.sum(axis=1), -moved.max(axis=1)])
        )
    best, chosen = -math.inf, (0, 0, False)
    for score in range(4):
        pool = np.concatenate([scores[0][score, :half], scores[1][score, :half]])
        thresholds = np.unique(
            np.quantile(pool, np.linspace(0.0, 1.0, _N_THRESHOLDS), method="lower")
        )
        hits = [
            half - np.searchsorted(np.sort(side[score, :half]), thresholds, side="left")
            for side in scores
        ]
        bounds = _bound(hits[score // 2], hits[1 - score // 2], half, delta, alpha)
        if bounds.max() > best:
            best, chosen = (
                float(bounds.max()),
                (score, int(thresholds[bounds.argmax()]), score >= 2),
            )
    score, threshold, swapped = chosen
    judged = [np.array([(side[score, half:] >= threshold).sum()]) for side in scores]
    return max(0.0, float(_bound(judged[swapped], judged[1 - swapped], half, delta, alpha)[0]))


def _bound(
    hits: NDArray[np.integer], misses: NDArray[np.integer], n: int, delta: float, alpha: float
) -> Floats:
    """Return log((lower bound of hits/n - δ) / upper bound of misses/n), -inf if there is no bound."""
    from scipy import stats  # slow to import, and only an audit needs it

    low = np.where(hits > 0, stats.beta.ppf(alpha, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(
        misses < n, stats.beta.ppf(1.0 - alpha, misses + 1, np.maximum(n - misses, 1)), 1.0
    )
    with np.errstate(divide="ignore"):
        result: Floats = np.log(np.maximum(low - delta, 0.0)) - np.log(high)
    return result
